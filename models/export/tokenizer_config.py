"""Settings in tokenizer_config.json, and the tokenizer class of transformers that they select."""

from typing import Any

from models.export.model_folder import CheckpointError, ModelFolder, join

NAME = "tokenizer_config.json"
# Tokenizer class, by `model_type`, that transformers uses if tokenizer_config.json has none.
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
# Mask token, by tokenizer class, that transformers uses if tokenizer_config.json has none.
_MASK_TOKENS = {
    **dict.fromkeys(("Albert", "Bert", "DebertaV2", "DistilBert", "Electra"), "[MASK]"),
    **dict.fromkeys(("Camembert", "MPNet", "Roberta", "XLMRoberta"), "<mask>"),
}
# Tokens of texts without a weight in sparse vectors, and those of XLM-RoBERTa's tokenizer that
# transformers uses if tokenizer_config.json has none.
_UNWEIGHTED = {
    "cls_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
# Tokenizer classes that return token types if tokenizer_config.json has no `model_input_names`.
_WITH_TOKEN_TYPES = ("Bert", "DebertaV2", "Electra")


def read_tokenizer_config(folder: ModelFolder, transformer: str) -> dict[str, Any]:
    """Return tokenizer_config.json of the subfolder `transformer`; empty if it is missing."""
    return folder.json(join(transformer, NAME), dict, {})


def tokenizer_class(config: dict[str, Any], model_type: str) -> str:
    """Return the tokenizer class without the suffix `Tokenizer` or `TokenizerFast`.

    If the class is unknown, return "".
    """
    own = str(config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
    return own or _DEFAULT_CLASS.get(model_type, "")


def gives_token_types(config: dict[str, Any], model_type: str) -> bool:
    """Return whether the tokens of a pair's second text have type 1."""
    names = config.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return tokenizer_class(config, model_type) in _WITH_TOKEN_TYPES


def mask_or_end_token(config: dict[str, Any], model_type: str) -> str | None:
    """Return the mask token, or else the end token, that the tokenizer has in transformers."""
    own = {"mask_token": _MASK_TOKENS.get(tokenizer_class(config, model_type)), **config}
    for name in ("mask_token", "eos_token"):
        token = own.get(name)
        if token := token.get("content") if isinstance(token, dict) else token:
            return str(token)
    return None


def unweighted_tokens(config: dict[str, Any], model_type: str) -> tuple[str, ...]:
    """Return the tokens that have no weight in the sparse vectors of BGE-M3 and GTE.

    Source: `_process_token_weights` in both projects.
    """
    is_xlm_roberta = tokenizer_class(config, model_type) == "XLMRoberta"
    own = {**(_UNWEIGHTED if is_xlm_roberta else {}), **config}
    tokens = (own.get(name) for name in _UNWEIGHTED)
    contents = (token.get("content") if isinstance(token, dict) else token for token in tokens)
    return tuple(str(content) for content in contents if content)


def maximum_length(config: dict[str, Any], override: object = None) -> object:
    """Return the maximum length of a text, in tokens; None if tokenizer_config.json has none.

    Args:
        config: Content of tokenizer_config.json.
        override: Value to return instead, unless it is None.
    """
    values = override, config.get("model_max_length"), config.get("max_len")
    own = next((value for value in values if value is not None), None)
    # transformers writes 1e30 for "no limit", as a float or an integer.
    return int(own) if isinstance(own, float) and own.is_integer() else own


def truncation_side(config: dict[str, Any]) -> str:
    """Return the side on which texts with too many tokens are truncated, "left" or "right".

    Raises:
        CheckpointError: `truncation_side` is neither "left" nor "right".
    """
    side = config.get("truncation_side", "right")
    if side not in ("left", "right"):
        raise CheckpointError(f"{NAME}: truncation_side has the invalid value {side!r}")
    return str(side)
