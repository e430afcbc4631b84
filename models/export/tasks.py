"""Tasks of models: what a network computes, as the files of its folder declare it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.export import (
    classifier,
    gliner,
    hybrid,
    logit_score,
    masked_lm,
    multi_vector,
    token_classifier,
)
from models.export.masked_lm import SparseConfig
from models.export.model_files import ModelFiles
from models.export.model_folder import (
    CheckpointError,
    ModelFolder,
    check_defaults,
    check_known,
    join,
)
from models.export.modules import LOGIT_SCORE, SPLADE, WIDTHS, is_size, scores_pairs
from models.manifest import Output

# Possible names of the file with the settings of the Transformer module. The first one with a
# setting is read.
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Only supported values, the defaults, of settings of the Transformer module for all tasks.
_TRANSFORMER_DEFAULTS: Mapping[str, Any] = {
    "model_args": {},
    "model_kwargs": {},
    "tokenizer_args": {},
    "processor_kwargs": {},
    "processing_kwargs": {},
    "config_args": {},
    "config_kwargs": {},
    "tokenizer_name_or_path": None,
}
_TRANSFORMER_SUPPORTED = {"max_seq_length", "do_lower_case", "unpad_inputs"}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a network computes.

    Attributes:
        output: First output of the graph.
        library_class: Class of sentence-transformers for models of this task; None: it has none.
        transformer: Only supported values of settings of the Transformer module.
        prompts: Whether texts can have prompts.
        embeds: Whether the network computes embeddings, whose pooling can be changed.
        settings: Further settings of the Transformer module, read elsewhere.
    """

    output: Output
    library_class: str | None
    transformer: Mapping[str, Any] = field(repr=False)
    prompts: bool = True
    embeds: bool = False
    settings: frozenset[str] = frozenset()


EMBEDDING = Task(
    output="pooled",
    library_class="SentenceTransformer",
    transformer={
        "transformer_task": "feature-extraction",
        "modality_config": {
            "text": {"method": "forward", "method_output_name": "last_hidden_state"}
        },
        "module_output_name": "token_embeddings",
    },
    embeds=True,
)
MULTI_VECTOR = Task(
    output="multi",
    library_class="MultiVectorEncoder",
    transformer=EMBEDDING.transformer,
    settings=frozenset(multi_vector.SETTINGS),
)
CLASSIFICATION = Task(
    output="logits",
    library_class="CrossEncoder",
    transformer={
        "transformer_task": "sequence-classification",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "scores",
    },
)
LOGITS_OF_TOKENS = Task(
    output="logits",
    library_class="CrossEncoder",
    transformer={
        **CLASSIFICATION.transformer,
        "transformer_task": "text-generation",
        "module_output_name": "causal_logits",
    },
)
SCORES = Task(output="logits", library_class="CrossEncoder", transformer=EMBEDDING.transformer)
TOKEN_CLASSIFICATION = Task(output="tags", library_class=None, transformer={}, prompts=False)
SPANS = Task(output="spans", library_class=None, transformer={}, prompts=False)
SPARSE = Task(
    output="sparse",
    library_class="SparseEncoder",
    transformer={
        "transformer_task": "fill-mask",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "token_embeddings",
    },
)


def read_task(
    files: ModelFiles, *, sparse: bool, has_template: bool
) -> tuple[Task, SparseConfig | None]:
    """Return the task of a model, and the pooling of its sparse vectors if it computes them.

    Args:
        files: Files of the model.
        sparse: Whether a masked language model without modules, or an embedding model with a head
            for the weights of tokens, computes sparse vectors.
        has_template: Whether a causal language model without modules is a reranker.

    Raises:
        CheckpointError: The modules do not match the network, or a setting is not supported.
    """
    modules = files.modules
    if gliner.is_gliner(files.folder):
        return SPANS, None
    kinds = [kind for kind, _ in modules]
    if SPLADE in kinds:
        return SPARSE, _splade_config(files.folder, modules[1][1])
    if sparse and not hybrid.has_weights(files):
        if modules or not masked_lm.masked_lm_class(files.config):
            raise CheckpointError(
                "sparse vectors need a masked language model, such as BertForMaskedLM in "
                "config.json, without other modules of sentence-transformers, or a head for the "
                "weights of tokens, such as NewForTokenClassification"
            )
        return SPARSE, SparseConfig()
    if (task := _task_of_pairs(files, has_template=has_template)) is not None:
        return task, None
    is_multi = kinds[1:2] not in ([], ["Pooling"])
    if is_multi or multi_vector.is_stanford(files):
        return MULTI_VECTOR, None
    if len(modules) < 2 and classifier.classifies(files.config):
        return CLASSIFICATION, None
    if not modules and token_classifier.tags(files):
        return TOKEN_CLASSIFICATION, None
    if len(modules) == 1:
        raise CheckpointError(
            "modules.json lists only a Transformer module, which is supported for sequence "
            "classification models only; add a Pooling module"
        )
    return EMBEDDING, None


def _task_of_pairs(files: ModelFiles, *, has_template: bool) -> Task | None:
    """Return the task of a reranker that is no sequence classification model; None: it is none."""
    is_causal = has_template and not files.modules and logit_score.is_causal(files.config)
    if is_causal or [kind for kind, _ in files.modules[1:]] == [LOGIT_SCORE]:
        return LOGITS_OF_TOKENS
    return SCORES if scores_pairs(files) else None


def _splade_config(folder: ModelFolder, subfolder: str) -> SparseConfig:
    name = join(subfolder, "config.json")
    config = folder.json(name, dict)
    check_known(config, ("pooling_strategy", "activation_function", "chunk_size", *WIDTHS), name)
    pooling = config.get("pooling_strategy", "max")
    activation = config.get("activation_function", "relu")
    if pooling not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise CheckpointError(
            f"{name}: supported are the pooling_strategy max and sum, and the activation_function "
            "relu and log1p_relu"
        )
    return SparseConfig(pooling=str(pooling), double_log=activation == "log1p_relu")


def read_length(folder: ModelFolder, transformer: str) -> int:
    """Return the maximum length in the settings of the Transformer module; 0 if there is none."""
    length = _transformer_file(folder, transformer)[1].get("max_seq_length")
    return length if is_size(length) else 0


def _transformer_file(folder: ModelFolder, transformer: str) -> tuple[str, dict[str, object]]:
    """Return name and content of the file with the settings of the Transformer module."""
    contents = ((n, folder.json(join(transformer, n), dict, {})) for n in _TRANSFORMER_CONFIGS)
    return next(((name, content) for name, content in contents if content), ("", {}))


def read_transformer_settings(
    folder: ModelFolder, transformer: str, task: Task
) -> dict[str, object]:
    """Return the settings of the Transformer module; empty if the folder has no file with them.

    Args:
        folder: Model folder.
        transformer: Subfolder of the module.
        task: Task of the model.

    Raises:
        CheckpointError: A setting is unknown, or has an unsupported value.
    """
    name, settings = _transformer_file(folder, transformer)
    expected = {**_TRANSFORMER_DEFAULTS, **task.transformer}
    read = {**settings}
    modalities = read.get("modality_config")
    if task.library_class == "CrossEncoder" and isinstance(modalities, dict):
        # Messages pass through the network like texts; `models.export.pair_template` reads their
        # format.
        own, text = modalities.get("message"), expected["modality_config"]["text"]
        if isinstance(own, dict) and {**own, "format": None} == {**text, "format": None}:
            read["modality_config"] = {k: v for k, v in modalities.items() if k != "message"}
    check_defaults(read, expected, name)
    check_known(settings, {*expected, *_TRANSFORMER_SUPPORTED, *task.settings}, name)
    return settings
