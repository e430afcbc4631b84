"""Settings in tokenizer_config.json, and the tokenizer class of transformers that they mean."""

from typing import Any

from models.export.model_folder import CheckpointError, ModelFolder, join

NAME = "tokenizer_config.json"
# The class that transformers uses for a `model_type` if tokenizer_config.json names none.
_DEFAULT_CLASS = {
    "albert": "Albert",
    "bert": "Bert",
    "camembert": "Camembert",
    "deberta-v2": "DebertaV2",
    "distilbert": "Bert",
    "electra": "Bert",
    "gemma3_text": "Gemma",
    "gte": "XLMRoberta",
    "jina_embeddings_v3": "XLMRoberta",
    "mpnet": "MPNet",
    "nomic_bert": "Bert",
    "qwen3": "Qwen2",
    "roberta": "Roberta",
    "roformer": "RoFormer",
    "xlm-roberta": "XLMRoberta",
}
# The classes that give the tokens of a pair types, unless `model_input_names` says otherwise.
_WITH_TOKEN_TYPES = ("Bert", "DebertaV2", "Electra")


def read_tokenizer_config(folder: ModelFolder, transformer: str) -> dict[str, Any]:
    """Return the content of tokenizer_config.json in the subfolder `transformer`, or nothing."""
    return folder.json(join(transformer, NAME), dict, {})


def tokenizer_class(config: dict[str, Any], model_type: str) -> str:
    """Return the name of the class, without `Tokenizer` and `Fast`; "" if it is unknown."""
    own = str(config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
    return own or _DEFAULT_CLASS.get(model_type, "")


def gives_token_types(config: dict[str, Any], model_type: str) -> bool:
    """Return whether the tokens of a pair's second text have type 1."""
    names = config.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return tokenizer_class(config, model_type) in _WITH_TOKEN_TYPES


def truncation_side(config: dict[str, Any]) -> str:
    """Return the end at which texts with too many tokens lose tokens: "left" or "right".

    Raises:
        CheckpointError: The setting is invalid.
    """
    side = config.get("truncation_side", "right")
    if side not in ("left", "right"):
        raise CheckpointError(f"{NAME}: truncation_side has the invalid value {side!r}")
    return str(side)
