"""GLiNER models that find entities with labels of the request: uni-encoders that score spans.

Source: the package gliner 0.2.29. Its other models, such as those that score tokens, encode labels
alone, generate labels or find relations, are refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from models.export.families import TensorPart
from models.export.model_folder import CheckpointError, ModelFolder, check_required
from models.export.sources import GLINER_CONFIG, GLINER_FOLDER
from models.export.weights import fill
from models.manifest import SpanRules
from models.network.config import EncoderConfig
from models.network.spans import SpanHead

CONFIG = GLINER_CONFIG
# `model_type` of encoders that are compared with transformers; the package has code for others.
_ENCODERS = ("bert", "deberta-v2", "distilbert", "modernbert", "xlm-roberta")
_DEFAULT_ENCODER = "deberta-v2"
# Only supported values, the defaults of the package. Other fields affect training alone.
_REQUIRED: Mapping[str, object] = {
    "span_mode": "markerV0",
    "subtoken_pooling": "first",
    "words_splitter_type": "whitespace",
    "post_fusion_schema": "",
    "fuse_layers": False,
    "embed_ent_token": True,
    "labels_encoder": None,
    "labels_decoder": None,
    "relations_layer": None,
    "span_encoder_config": None,
    "precomputed_prompts_mode": False,
}
_MODEL_TYPES = (None, "gliner", "gliner_uni_encoder_span")
# Sizes of the head: default, least and greatest value.
_SIZES = {
    "max_width": (12, 1, 100),
    "hidden_size": (512, 2, 2**15),
    "max_len": (384, 1, 2**14),
    "num_rnn_layers": (1, 0, 16),
}
# Maximum length of a row with relative positions alone, which the package does not limit: 384 words
# and 25 labels have 600 to 900 tokens.
_MAX_TOKENS = 2048
# Tensors of the encoder and of each module of the head.
_ENCODER = "token_rep_layer.bert_layer.model."
_MODULES = {
    "projection": "token_rep_layer.projection",
    "lstm": "rnn.lstm",
    "start": "span_rep_layer.span_rep_layer.project_start",
    "end": "span_rep_layer.span_rep_layer.project_end",
    "span": "span_rep_layer.span_rep_layer.out_project",
    "label": "prompt_rep_layer",
}


@dataclass(frozen=True, kw_only=True)
class SpanConfig:
    """Settings of a GLiNER model besides its encoder.

    Attributes:
        rules: Rules for its rows.
        width: Width of a word vector.
        lstm_layers: Number of LSTM layers; 0: none.
        label_id: Token id of the marker of labels.
    """

    rules: SpanRules
    width: int
    lstm_layers: int
    label_id: int


def is_gliner(folder: ModelFolder) -> bool:
    """Return whether a folder has a GLiNER model."""
    return folder.has(CONFIG)


def read_encoder_config(folder: ModelFolder) -> dict[str, Any]:
    """Return the hyperparameters of the encoder, as config.json would have them.

    Raises:
        CheckpointError: They are missing, or are those of an encoder that is not supported.
    """
    config = folder.json(CONFIG, dict)
    own = config.get("encoder_config")
    if not isinstance(own, dict):
        raise CheckpointError(
            f"{CONFIG} has no encoder_config, the config of its encoder "
            f"{config.get('model_name')!r}; {GLINER_FOLDER}"
        )
    encoder = {"model_type": _DEFAULT_ENCODER, **own}
    if encoder["model_type"] not in _ENCODERS:
        raise CheckpointError(
            f"{CONFIG}: the model_type of encoder_config is {encoder['model_type']!r}; supported: "
            f"{', '.join(_ENCODERS)}"
        )
    if config.get("vocab_size") != encoder.get("vocab_size"):
        raise CheckpointError(
            f"{CONFIG}: vocab_size is {config.get('vocab_size')!r}, but that of encoder_config is "
            f"{encoder.get('vocab_size')!r}"
        )
    return encoder


def read_config(folder: ModelFolder) -> SpanConfig:
    """Return the settings of a GLiNER model besides its encoder.

    Raises:
        CheckpointError: A setting is invalid or unsupported.
    """
    config = folder.json(CONFIG, dict)
    if config.get("model_type") not in _MODEL_TYPES:
        raise CheckpointError(
            f"{CONFIG}: model_type is {config['model_type']!r}; only {_MODEL_TYPES[-1]!r} is "
            "supported"
        )
    check_required(config, _REQUIRED, CONFIG)
    sizes = {}
    for name, (default, least, greatest) in _SIZES.items():
        size = config.get(name, default)
        if type(size) is not int or not least <= size <= greatest:
            raise CheckpointError(
                f"{CONFIG}: {name} is {size!r}; it must be an integer from {least} to {greatest}"
            )
        sizes[name] = size
    if sizes["num_rnn_layers"] and sizes["hidden_size"] % 2:
        raise CheckpointError(f"{CONFIG}: hidden_size must be even, for the directions of the LSTM")
    markers = {}
    for name, default_marker in (("ent_token", "<<ENT>>"), ("sep_token", "<<SEP>>")):
        marker = config.get(name, default_marker)
        if not isinstance(marker, str) or not 0 < len(marker) <= 256:
            raise CheckpointError(f"{CONFIG}: {name} has the invalid value {marker!r}")
        markers[name] = marker
    label_id = config.get("class_token_index", -1)
    if type(label_id) is not int or label_id < 0:
        raise CheckpointError(
            f"{CONFIG}: class_token_index is {label_id!r}; it must be the token id of ent_token"
        )
    return SpanConfig(
        rules=SpanRules(
            label_marker=markers["ent_token"],
            text_marker=markers["sep_token"],
            max_words=sizes["max_len"],
            max_width=sizes["max_width"],
        ),
        width=sizes["hidden_size"],
        lstm_layers=sizes["num_rnn_layers"],
        label_id=label_id,
    )


def without_limit(config: EncoderConfig) -> EncoderConfig:
    """Return the config with room for longer rows, if its positions are relative alone."""
    if config.position_embeddings or config.distances is None:
        return config
    return replace(config, max_positions=max(config.max_positions, _MAX_TOKENS))


def split_tensors(folder: ModelFolder) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the encoder, with its own names, and all others."""
    tensors = folder.tensors("")
    encoder = {
        name.removeprefix(_ENCODER): tensor
        for name, tensor in tensors.items()
        if name.startswith(_ENCODER)
    }
    return encoder, {n: tensor for n, tensor in tensors.items() if not n.startswith(_ENCODER)}


def make_head(config: SpanConfig, token_width: int, tensors: Mapping[str, Tensor]) -> SpanHead:
    """Return the head with its weights.

    Args:
        config: Settings of the model.
        token_width: Width of a token vector.
        tensors: Tensors of the checkpoint besides those of the encoder.
    """
    head = SpanHead(token_width, config.width, config.rules.max_width, config.lstm_layers)
    fill(head, tensors, lambda key: (TensorPart(_tensor_name(key)),))
    return head


def _tensor_name(key: str) -> str:
    module, rest = key.split(".", 1)
    for layer, number in (("hidden", "0"), ("out", "3")):  # between them are ReLU and dropout
        rest = rest.replace(f"{layer}.", f"{number}.")
    return f"{_MODULES[module]}.{rest}"
