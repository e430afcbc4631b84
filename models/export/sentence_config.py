"""The sentence-transformers config of a model: pooling, heads, prompts and maximum length.

Unsupported settings that would change the vectors raise an error with the name of the setting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from models.artifact import Artifact
from models.export import (
    classifier,
    gliner,
    hybrid,
    logit_score,
    masked_lm,
    multi_vector,
    token_classifier,
)
from models.export.gliner import SpanConfig
from models.export.masked_lm import SparseConfig
from models.export.model_files import ModelFiles
from models.export.model_folder import CheckpointError, ModelFolder, check_defaults
from models.export.modules import (
    MODEL_CONFIG,
    HeadConfig,
    NormalizeConfig,
    TruncateConfig,
    is_size,
    read_heads,
    read_pooling,
)
from models.export.multi_vector import MultiVectorConfig
from models.export.pair_template import (
    NONE,
    answers_of,
    published_limit,
    read_pair_template,
)
from models.export.router import Routes, read_routes
from models.export.similarity import read_similarity
from models.export.tasks import (
    CLASSIFICATION,
    EMBEDDING,
    LOGITS_OF_TOKENS,
    MULTI_VECTOR,
    SCORES,
    SPANS,
    SPARSE,
    TOKEN_CLASSIFICATION,
    Task,
    read_task,
    read_transformer_settings,
)
from models.export.tokenizer_settings import TokenizerSettings
from models.export.transformers_tokenizer import load_tokenizer, read_settings
from models.manifest import Output, PairTemplate, SimilarityName
from models.network.config import EncoderConfig

# Task of Jina v3 for the prompts with which texts are scored.
_RETRIEVAL = {"query": "retrieval.query", "document": "retrieval.passage"}


@dataclass(frozen=True, kw_only=True)
class SentenceConfig:
    """Settings of a sentence encoder.

    Attributes:
        family: `model_type` in config.json.
        transformer: Subfolder of the encoder's files; "" is the model folder itself.
        max_tokens: Maximum input length in tokens, special tokens included.
        pooling: Names of the poolings in `models.network.pooling.POOLINGS`. Their results are
            concatenated.
        include_prompt: Whether pooling includes prompt tokens.
        outputs: Names of the outputs of the graph.
        projection: Width to which the checkpoint projects vectors; None: it does not.
        heads: Configs of the modules after pooling, in order, without a final `Normalize`.
        normalize: Whether vectors are normalised to unit length.
        similarity: Similarity of two vectors or multi-vectors; None for models without vectors.
        matryoshka_dimensions: Widths of truncated row vectors that the model was trained for.
        truncation_side: Side on which inputs with too many tokens are truncated, "left" or "right".
        token_types: Number of types of the tokens of a pair; 1: all tokens have type 0.
        labels: Label of each logit of a sequence or token classification model; empty for other
            models.
        pools_logits: Whether logits are computed for each token, and then pooled.
        skipped_id: Token id that pooling skips; None: no token is skipped.
        activation: Activation that turns logits into scores: "sigmoid", "softmax" or "identity".
        answers: Tokens whose logits make the score; None: another model.
        pair_template: Texts around a query and a document; None: the tokenizer joins pairs.
        sparse: Pooling of the logits of a masked language model; None: no sparse vectors.
        routes: Modules of queries and of documents; None: all texts pass through the same.
        multi: Settings of a multi-vector model; None: another model.
        spans: Settings of a GLiNER model; None: another model.
        unweighted: Tokens without a weight, if sparse vectors consist of the weights of tokens.
        unknown_id: See `models.manifest.Manifest`.
        baseline_ids: See `models.manifest.Manifest`.
        lowercase: Whether texts are lowercased before tokenization.
        prompts: Texts that can be prepended to an input, by prompt name.
        default_prompt: Name of the default prompt; None: no prompt.
        prompt_adapters: See `models.manifest.Manifest`.
    """

    family: str
    transformer: str
    max_tokens: int
    pooling: tuple[str, ...]
    include_prompt: bool
    outputs: tuple[Output, ...]
    projection: int | None
    heads: tuple[HeadConfig, ...]
    normalize: bool
    similarity: SimilarityName | None
    matryoshka_dimensions: tuple[int, ...]
    truncation_side: str
    token_types: int
    labels: tuple[str, ...]
    pools_logits: bool
    skipped_id: int | None
    activation: str
    answers: logit_score.Answers | None
    pair_template: PairTemplate | None
    sparse: SparseConfig | None
    routes: Routes | None
    multi: MultiVectorConfig | None
    spans: SpanConfig | None
    unweighted: tuple[str, ...]
    unknown_id: int | None
    baseline_ids: Mapping[str, int]
    lowercase: bool
    prompts: Mapping[str, str]
    default_prompt: str | None
    prompt_adapters: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Replacements for settings of a model; None keeps the model's setting.

    Prompts are added to the model's prompts, or replace prompts of the same name. `sparse` selects
    sparse vectors for a masked language model without a config of sentence-transformers, and for an
    embedding model whose checkpoint has weights of tokens. `tokens`
    selects whether the graph of an embedding model has token vectors as an output; by default it
    has, unless the model pools the first token alone. `pair_template` is the template of a
    reranker, or a name in `models.export.pair_template.CHOICES`. `tokenizer` replaces the settings
    of the tokenizer, which is then not read.
    """

    sparse: bool = False
    tokens: bool | None = None
    max_tokens: int | None = None
    pooling: Sequence[str] | None = None
    include_prompt: bool | None = None
    normalize: bool | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None
    pair_template: str | PairTemplate | None = None
    tokenizer: TokenizerSettings | None = None


def overrides_of(artifact: Artifact) -> Overrides:
    """Return the overrides for loading an artifact's source as the network of its graphs.

    The settings of the tokenizer are those of the artifact, so that transformers is not needed. The
    token of query expansion is not among them: it is added before the network.
    """
    manifest = artifact.manifest
    # An override of the pooling is an error for models that compute no embeddings.
    return Overrides(
        sparse=bool({"sparse", "weights"} & {*manifest.outputs}),
        tokens="tokens" in manifest.outputs if "pooled" in manifest.outputs else None,
        pooling=manifest.pooling if "pooled" in manifest.outputs else None,
        pair_template=manifest.pair_template or (NONE if "logits" in manifest.outputs else None),
        prompts=manifest.prompts,
        tokenizer=TokenizerSettings(
            max_length=manifest.max_tokens,
            truncation_side=manifest.truncation_side,
            gives_token_types=bool(artifact.check().token_types),
            mask_or_end_token="",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _TaskSettings:
    """Settings that depend on the task, as in `SentenceConfig`. The defaults are for other tasks.

    Attributes:
        pooling: Names of the poolings, or `classifier.LATE`.
        heads: Configs of the modules after pooling, in order.
        has_tokens: Whether the graph has token vectors; None: the pooling decides.
        per_token: Further outputs of an embedding model.
    """

    pooling: tuple[str, ...] = ()
    include_prompt: bool = True
    heads: tuple[HeadConfig, ...] = ()
    projection: int | None = None
    has_tokens: bool | None = None
    per_token: tuple[Output, ...] = ()
    labels: tuple[str, ...] = ()
    skipped_id: int | None = None
    answers: logit_score.Answers | None = None
    sparse: SparseConfig | None = None
    multi: MultiVectorConfig | None = None
    spans: SpanConfig | None = None


def read_sentence_config(
    files: ModelFiles, config: EncoderConfig, overrides: Overrides
) -> SentenceConfig:
    """Return the sentence-transformers config of a model folder, with the overrides applied.

    Args:
        files: Files of the model.
        config: Hyperparameters of the encoder.
        overrides: Replacements for settings in the folder.

    Raises:
        CheckpointError: A file or a setting is invalid or unsupported; the message names it.
    """
    folder, transformer, model_type = files.folder, files.transformer, files.model_type
    choice = overrides.pair_template
    has_template = choice not in (None, NONE)
    task, sparse = read_task(files, sparse=overrides.sparse, has_template=has_template)
    settings = read_transformer_settings(folder, transformer, task)
    tokenizer = overrides.tokenizer or read_settings(folder, transformer, model_type)
    own = _read_task_settings(task, files, settings, tokenizer, sparse, overrides)
    heads = own.heads
    normalize = isinstance(heads[-1], NormalizeConfig) if heads else False
    if own.multi:
        normalize = own.multi.normalize
    truncate_dim = read_truncate_dim(folder) if task is EMBEDDING else None
    if truncate_dim is not None:  # sentence-transformers does not normalise after truncation
        heads, normalize = (*heads, TruncateConfig(truncate_dim)), False
    of_transformers = partial(load_tokenizer, folder, transformer, model_type)
    of_tasks = _task_prompts(files, config)
    prompts, default_prompt = read_prompts(folder, task, of_tasks, own.multi, overrides)
    _check_overrides(task, overrides)
    template = None
    if task.output == "logits":
        template = read_pair_template(files, of_transformers, settings, choice, len(own.labels))
    _check_prompts(template, prompts)
    pools_logits = own.pooling == (classifier.LATE,)
    include_prompt = _override(own.include_prompt, overrides.include_prompt)
    outputs = _outputs(task, config, own.pooling, include_prompt, own.has_tokens)
    return SentenceConfig(
        family=model_type,
        transformer=transformer,
        max_tokens=_max_tokens(
            tokenizer, config, settings, overrides, published_limit(choice, of_transformers)
        ),
        pooling=("mean",) if pools_logits else own.pooling,
        include_prompt=include_prompt,
        outputs=outputs + own.per_token,
        projection=own.projection,
        heads=heads[:-1] if normalize else heads,
        normalize=_override(normalize, overrides.normalize),
        similarity=read_similarity(folder, task.output),
        matryoshka_dimensions=_matryoshka_dimensions(folder, files.config_name),
        truncation_side=tokenizer.truncation_side,
        token_types=max(1, config.type_vocab_size) if tokenizer.gives_token_types else 1,
        labels=own.labels,
        pools_logits=pools_logits,
        skipped_id=own.skipped_id,
        activation=_activation(files, task, len(own.labels)),
        answers=own.answers,
        pair_template=template,
        sparse=own.sparse,
        routes=read_routes(folder),
        multi=own.multi,
        spans=own.spans,
        unweighted=tokenizer.unweighted if "weights" in own.per_token else (),
        unknown_id=tokenizer.unknown_id if task.output == "tags" else None,
        baseline_ids={
            name: own for name, own in tokenizer.baseline_ids.items() if own < config.vocab_size
        },
        lowercase=bool(settings.get("do_lower_case")),
        prompts=prompts,
        default_prompt=default_prompt,
        prompt_adapters={side: task for side, task in _RETRIEVAL.items() if task in of_tasks},
    )


def _read_task_settings(
    task: Task,
    files: ModelFiles,
    settings: Mapping[str, Any],
    tokenizer: TokenizerSettings,
    sparse: SparseConfig | None,
    overrides: Overrides,
) -> _TaskSettings:
    """Return the settings of a task.

    Raises:
        CheckpointError: One is invalid or unsupported; the message names it.
    """
    if sparse:
        masked_lm.check_supported(files)
        is_tied = bool(files.config.get("tie_word_embeddings", True))
        return _TaskSettings(sparse=replace(sparse, tied=is_tied))
    if task is MULTI_VECTOR:
        multi = multi_vector.read_config(files, settings, tokenizer, overrides.max_tokens)
        return _TaskSettings(multi=multi)
    if task is SPANS:
        return _TaskSettings(spans=gliner.read_config(files.folder))
    if task is TOKEN_CLASSIFICATION:
        token_classifier.check_supported(files)
        return _TaskSettings(labels=classifier.read_labels(files))
    if task is CLASSIFICATION:
        return _TaskSettings(
            pooling=(classifier.read_pooling(files),),
            skipped_id=classifier.read_skipped_id(files),
            labels=classifier.read_labels(files),
        )
    if task is LOGITS_OF_TOKENS:
        answers = logit_score.read_answers(files, answers_of(overrides.pair_template))
        return _TaskSettings(pooling=("last",), labels=(answers.label,), answers=answers)
    pooling, include_prompt = read_pooling(files, overrides.pooling)
    projection, has_tokens = _projection(files, overrides.tokens)
    heads = tuple(read_heads(files))
    if task is SCORES:
        labels = classifier.labels_of_scores(heads, include_prompt)
        per_token: tuple[Output, ...] = ()
    else:
        labels, per_token = (), hybrid.read_outputs(files.folder, sparse=overrides.sparse)
    return _TaskSettings(
        pooling=pooling,
        include_prompt=include_prompt,
        heads=heads,
        projection=projection,
        has_tokens=has_tokens,
        per_token=per_token,
        labels=labels,
    )


def _check_overrides(task: Task, overrides: Overrides) -> None:
    """Raise CheckpointError if an override is not for models of this task."""
    if overrides.sparse and task not in (EMBEDDING, SPARSE):
        raise CheckpointError(
            "sparse vectors cannot be exported, because the model computes neither embeddings nor "
            "the logits of masked tokens"
        )
    if overrides.pair_template is not None and task.output != "logits":
        raise CheckpointError(
            "a pair template cannot be chosen, because the model computes no scores of pairs"
        )
    changes = overrides.pooling, overrides.normalize, overrides.include_prompt, overrides.tokens
    if not task.embeds and any(change is not None for change in changes):
        raise CheckpointError(
            "pooling, normalisation and token vectors cannot be chosen, because the model computes "
            "no pooled embeddings"
        )


def _check_prompts(template: PairTemplate | None, prompts: Mapping[str, str]) -> None:
    """Raise CheckpointError if a template of pairs would drop a prompt."""
    if template and not template.takes_instruction and any(prompts.values()):
        raise CheckpointError(
            "the pair template has no place for an instruction, so prompts would have no effect; "
            "remove the prompts or choose another template"
        )


def _projection(files: ModelFiles, tokens: bool | None) -> tuple[int | None, bool | None]:
    """Return the width to which the checkpoint projects vectors, and whether it has token vectors.

    The width is None if it projects none; then the choice `tokens` is returned.

    Raises:
        CheckpointError: The width is invalid, or `tokens` selects token vectors.
    """
    if not files.family.projection:
        return None, tokens
    if tokens:
        raise CheckpointError(
            "token vectors cannot be exported, because the model projects them; the graph projects "
            "the pooled vector instead, which is the same"
        )
    width = files.config.get("num_labels")
    if not is_size(width):
        raise CheckpointError(
            f"{files.config_name}: num_labels is {width!r}; it must be the width of the model's "
            "vectors"
        )
    return width, False


def _outputs(
    task: Task,
    config: EncoderConfig,
    pooling: Sequence[str],
    include_prompt: bool,
    tokens: bool | None,
) -> tuple[Output, ...]:
    """Return the outputs of the graph; see `Overrides` for `tokens`."""
    if task is not EMBEDDING:
        return (task.output,)
    # The first token of a row belongs to the text only if no prompt is left out of pooling.
    is_first = tuple(pooling) == ("cls",) and include_prompt
    if _override(not (is_first and config.can_compute_first_tokens), tokens):
        return "pooled", "tokens"
    if tuple(pooling) == ("cls",) and not include_prompt:
        raise CheckpointError(
            "a graph without token vectors pools the first token of a row, which can belong to a "
            "prompt; include prompts in pooling, or export token vectors"
        )
    return ("pooled",)


def _override(own: bool, override: bool | None) -> bool:
    return own if override is None else override


def _task_prompts(files: ModelFiles, config: EncoderConfig) -> dict[str, str]:
    """Return the prompt of each adapter's task, by adapter name."""
    if config.adapters is None:
        return {}
    instructions = files.config.get("task_instructions")
    texts = instructions if isinstance(instructions, dict) else {}
    for task in config.adapters.names:
        if not isinstance(texts.get(task), str):
            raise CheckpointError(
                f"{files.config_name}: task_instructions has no text for {task!r}"
            )
    return {task: texts[task] for task in config.adapters.names}


def read_prompts(
    folder: ModelFolder,
    task: Task,
    of_tasks: Mapping[str, str],
    multi: MultiVectorConfig | None,
    overrides: Overrides,
) -> tuple[dict[str, str], str | None]:
    """Return the prompts, by name, and the name of the default prompt.

    As in sentence-transformers, the prompts "query" and "document" always exist. Those of Jina v3
    are its prompts for retrieval; sentence-transformers adds empty ones to the files that it saves.

    Args:
        folder: Model folder.
        task: Task of the model.
        of_tasks: Prompt of each adapter's task, by adapter name.
        multi: Settings of a multi-vector model; None: another model.
        overrides: Replacements for settings in the folder.

    Raises:
        CheckpointError: A prompt or the name of the default prompt is invalid.
    """
    name = MODEL_CONFIG
    config = folder.json(name, dict, {})
    is_pylate = multi is not None and multi.is_pylate
    # Without the right class, sentence-transformers ignores modules.json or settings beside it, or
    # adds modules to those listed there.
    is_needed = not (task is EMBEDDING or is_pylate) and folder.has("modules.json")
    kind = config.get("model_type", None if is_needed else task.library_class)
    if task.library_class and kind is None:
        raise CheckpointError(
            f"{name}: model_type is null or missing; set it to {task.library_class!r}"
        )
    if not is_pylate:
        check_defaults(config, {"model_type": task.library_class, "max_active_dims": None}, name)
    own = config.get("prompts") or {} if multi is None else multi.prompts
    if not isinstance(own, Mapping):
        raise CheckpointError(f"{name}: prompts must be a JSON object")
    prompts = {side: of_tasks.get(task, "") for side, task in _RETRIEVAL.items()}
    own = {key: text for key, text in own.items() if text not in (None, "") or key not in prompts}
    for key, text in {**of_tasks, **own, **(overrides.prompts or {})}.items():
        if not isinstance(text, str | None):
            raise CheckpointError(f"{name}: the prompt {key!r} is not a string")
        prompts[key] = text or ""
    default = overrides.default_prompt or config.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise CheckpointError(
            f"the default prompt {default!r} is not among the prompts: {', '.join(prompts)}"
        )
    if not task.prompts and (default or any(prompts.values())):
        raise CheckpointError(
            "prompts are not supported: the model has labels instead"
            if task is SPANS
            else "prompts of models for token classification are not supported"
        )
    return prompts, default


def _activation(files: ModelFiles, task: Task, labels: int) -> str:
    """Return the activation of the logits; "identity" for a model without labels."""
    if task is TOKEN_CLASSIFICATION:
        return token_classifier.ACTIVATION
    if not labels:
        return "identity"
    # Only sentence-transformers has models in modules. Its default for several scores is none.
    default = "identity" if task is SCORES and labels > 1 else None
    return classifier.read_activation(files, labels, default)


def read_truncate_dim(folder: ModelFolder) -> int | None:
    """Return the width to which sentence-transformers truncates vectors; None: it does not."""
    value = folder.json(MODEL_CONFIG, dict, {}).get("truncate_dim")
    if value is not None and not is_size(value):
        raise CheckpointError(f"{MODEL_CONFIG}: truncate_dim has the invalid value {value!r}")
    return value


def _matryoshka_dimensions(folder: ModelFolder, network: str) -> tuple[int, ...]:
    value = folder.json(network, dict).get("matryoshka_dimensions") or []
    if not isinstance(value, list) or not all(map(is_size, value)):
        raise CheckpointError(f"{network}: matryoshka_dimensions has the invalid value {value!r}")
    return tuple(sorted(value))


def _max_tokens(
    tokenizer: TokenizerSettings,
    config: EncoderConfig,
    settings: Mapping[str, object],
    overrides: Overrides,
    published: int | None,
) -> int:
    """Return the maximum input length in tokens, from the override or the folder's settings.

    The folder's setting is capped at the encoder's maximum, and at that of a published template.
    """
    own = settings.get("max_seq_length")
    own = tokenizer.max_length if own is None else own
    own = config.max_tokens if own is None else own
    limit = overrides.max_tokens
    if limit is None:
        limit = min(own, config.max_tokens) if isinstance(own, int) else 0
        limit = limit if published is None else min(limit, published)
    # The shortest useful row has one token between two special tokens.
    if not 3 <= limit <= config.max_tokens:
        raise CheckpointError(
            f"the maximum input length is {own if overrides.max_tokens is None else limit} tokens; "
            f"it must be between 3 and the model's {config.max_tokens} positions"
        )
    return limit
