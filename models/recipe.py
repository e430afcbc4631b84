"""How a model is used: what sentence-transformers' files say beside the weights.

Nothing is guessed: a setting that would change vectors and is not understood is refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.encoder import EncoderConfig
from models.model_folder import CheckpointError, ModelFolder, join
from models.pooling import POOLINGS
from models.sentence_encoder import HEAD_ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class Head:
    """A dense layer after pooling: where its weights are, and its shape."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a model folder says about its use.

    Attributes:
        family: `model_type` of its config.json.
        transformer: Subfolder of the encoder's files; mostly "", the folder itself.
        max_tokens: Longer rows are cut.
        pooling: Names in `models.pooling.POOLINGS`, side by side.
        include_prompt: Whether pooling counts the tokens of a prompt.
        heads: Dense layers, applied in turn.
        normalize: Whether its vectors have unit length.
        lowercase: Whether text is lowercased before the tokenizer sees it.
        prompts: Name -> text put before the input.
        default_prompt: Name of the prompt used where none is asked for.
    """

    family: str
    transformer: str
    max_tokens: int
    pooling: tuple[str, ...]
    include_prompt: bool
    heads: tuple[Head, ...]
    normalize: bool
    lowercase: bool
    prompts: Mapping[str, str]
    default_prompt: str | None


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What takes the place of a model's own recipe; None leaves it as it is."""

    max_tokens: int | None = None
    pooling: Sequence[str] | None = None
    include_prompt: bool | None = None
    normalize: bool | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None


# Their pooling modes, in the order in which old boolean fields are put side by side.
_POOLING_NAMES = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "lasttoken": "last",
}
_POOLING_FIELDS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "last",
}

# The names that sentence-transformers tries for the settings of its Transformer module.
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_TEXT_MODALITY = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
# Its settings that we do not follow, with the value at which they change nothing.
_TRANSFORMER_PLAIN: Mapping[str, Any] = {
    "transformer_task": "feature-extraction",
    "modality_config": _TEXT_MODALITY,
    "module_output_name": "token_embeddings",
    "model_args": {},
    "model_kwargs": {},
    "tokenizer_args": {},
    "processor_kwargs": {},
    "processing_kwargs": {},
    "config_args": {},
    "config_kwargs": {},
    "tokenizer_name_or_path": None,
}
_TRANSFORMER_FOLLOWED = {"max_seq_length", "do_lower_case", "unpad_inputs"}
_SENTENCE_EMBEDDING = {
    "module_input_name": "sentence_embedding",
    "module_output_name": "sentence_embedding",
}


def transformer_folder(folder: ModelFolder) -> str:
    """Return the subfolder with the encoder's config.json and weights.

    Raises:
        CheckpointError: modules.json is there and does not begin with a Transformer.
    """
    modules = _modules(folder)
    return modules[0][1] if modules else ""


def read_recipe(
    folder: ModelFolder, family: str, config: EncoderConfig, overrides: Overrides
) -> Recipe:
    """Return the folder's recipe, with the overrides in place.

    Raises:
        CheckpointError: A file or a setting is not understood; the message names it.
    """
    modules = _modules(folder)
    transformer = modules[0][1] if modules else ""
    name = next((n for n in _TRANSFORMER_CONFIGS if folder.has(join(transformer, n))), "")
    settings = folder.json(join(transformer, name), dict) if name else {}
    _refuse_unless(settings, _TRANSFORMER_PLAIN, name)
    unknown = settings.keys() - _TRANSFORMER_PLAIN.keys() - _TRANSFORMER_FOLLOWED
    if unknown:
        raise CheckpointError(f"{name}: {min(unknown)} is not understood")

    if modules:
        pooling, include_prompt = _pooling(folder, modules[1][1], overrides)
    else:  # sentence-transformers' own default
        pooling, include_prompt = tuple(overrides.pooling or ["mean"]), True
    for mode in pooling:
        if mode not in POOLINGS:
            raise CheckpointError(f"the pooling {mode!r} is not one of {', '.join(POOLINGS)}")
    normalize = bool(modules) and modules[-1][0] == "Normalize"
    if normalize:
        name = join(modules[-1][1], "config.json")
        _refuse_unless(folder.json(name, dict, {}), _SENTENCE_EMBEDDING, name)
    prompts, default_prompt = _prompts(folder, overrides)
    return Recipe(
        family=family,
        transformer=transformer,
        max_tokens=_max_tokens(folder, transformer, config, settings, overrides),
        pooling=pooling,
        include_prompt=_or(overrides.include_prompt, include_prompt),
        heads=tuple(_head(folder, path) for kind, path in modules if kind == "Dense"),
        normalize=_or(overrides.normalize, normalize),
        lowercase=bool(settings.get("do_lower_case")),
        prompts=prompts,
        default_prompt=default_prompt,
    )


def _or(override: bool | None, own: bool) -> bool:
    return own if override is None else override


def _modules(folder: ModelFolder) -> list[tuple[str, str]]:
    """Class name and path of each module; none where there is no modules.json."""
    listed = folder.json("modules.json", list, [])
    modules: list[tuple[str, str]] = []
    for module in listed:
        if not isinstance(module, dict) or not isinstance(module.get("path"), str):
            raise CheckpointError("modules.json: every module needs a type and a path")
        package, _, kind = str(module.get("type")).rpartition(".")
        if package.split(".")[0] != "sentence_transformers":
            raise CheckpointError(
                f"modules.json names {module.get('type')}, code from outside "
                "sentence-transformers; such code is never run"
            )
        modules.append((kind, module["path"]))
    kinds = [kind for kind, _ in modules]
    normalize = kinds[-1:] == ["Normalize"]
    dense = ["Dense"] * (len(kinds) - 2 - normalize)
    if kinds and kinds != ["Transformer", "Pooling", *dense, *["Normalize"] * normalize]:
        raise CheckpointError(
            f"modules.json lists {' -> '.join(kinds)}; understood is "
            "Transformer -> Pooling -> Dense (any number) -> Normalize (or not)"
        )
    return modules


def _pooling(
    folder: ModelFolder, subfolder: str, overrides: Overrides
) -> tuple[tuple[str, ...], bool]:
    """The poolings, and whether they count a prompt."""
    config = folder.json(join(subfolder, "config.json"), dict)
    include_prompt = bool(config.get("include_prompt", True))
    if overrides.pooling:
        return tuple(overrides.pooling), include_prompt
    given = config.get("pooling_mode")
    if given:
        modes = [str(mode) for mode in given] if isinstance(given, list) else [str(given)]
        return tuple(_POOLING_NAMES.get(mode, mode) for mode in modes), include_prompt
    wanted = [key for key, on in config.items() if key.startswith("pooling_mode_") and on]
    unknown = [key for key in wanted if key not in _POOLING_FIELDS]
    known = [name for key, name in _POOLING_FIELDS.items() if key in wanted]
    return tuple(unknown or known or ["mean"]), include_prompt


def _head(folder: ModelFolder, subfolder: str) -> Head:
    name = join(subfolder, "config.json")
    config = folder.json(name, dict)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    package, _, kind = activation.rpartition(".")
    if not package.startswith("torch.nn.") or kind not in HEAD_ACTIVATIONS:
        raise CheckpointError(
            f"{name}: the activation {activation!r} is not one of {', '.join(HEAD_ACTIVATIONS)}"
        )
    _refuse_unless(config, {**_SENTENCE_EMBEDDING, "use_residual": False}, name)
    sizes = (config.get("in_features"), config.get("out_features"))
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise CheckpointError(f"{name}: in_features and out_features must be positive integers")
    return Head(
        folder=subfolder,
        in_features=int(str(sizes[0])),
        out_features=int(str(sizes[1])),
        bias=bool(config.get("bias", True)),
        activation=kind,
    )


def _prompts(folder: ModelFolder, overrides: Overrides) -> tuple[dict[str, str], str | None]:
    """Prompts and the default one's name; sentence-transformers always has two, empty or not."""
    name = "config_sentence_transformers.json"
    config = folder.json(name, dict, {})
    _refuse_unless(config, {"model_type": "SentenceTransformer"}, name)
    own = config.get("prompts") or {}
    if not isinstance(own, dict):
        raise CheckpointError(f"{name}: prompts is not an object")
    prompts = {"query": "", "document": ""}
    for key, text in {**own, **(overrides.prompts or {})}.items():
        if not isinstance(text, str | None):
            raise CheckpointError(f"{name}: the prompt {key!r} is not a text")
        prompts[key] = text or ""
    default = overrides.default_prompt or config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(
            f"the default prompt {default!r} is not among the prompts: {', '.join(prompts)}"
        )
    return prompts, None if default is None else str(default)


def _max_tokens(
    folder: ModelFolder,
    transformer: str,
    config: EncoderConfig,
    settings: Mapping[str, object],
    overrides: Overrides,
) -> int:
    """The asked-for or the folder's own limit, at most what the position table holds."""
    tokenizer = folder.json(join(transformer, "tokenizer_config.json"), dict, {})
    own = next(
        (
            limit
            for limit in (
                settings.get("max_seq_length"),
                tokenizer.get("model_max_length"),
                tokenizer.get("max_len"),
            )
            if limit is not None
        ),
        config.max_tokens,
    )
    # transformers writes 1e30 for "no limit", as a float or as an integer.
    if isinstance(own, float) and own.is_integer():
        own = int(own)
    limit = overrides.max_tokens
    if limit is None:
        limit = min(own, config.max_tokens) if isinstance(own, int) else 0
    # The shortest row that says anything has a token between two special ones.
    if not 3 <= limit <= config.max_tokens:
        raise CheckpointError(
            f"the maximum of {overrides.max_tokens or own} tokens is not between 3 and "
            f"{config.max_tokens}, which is what the position table holds"
        )
    return limit


def _refuse_unless(
    config: Mapping[str, object], expected: Mapping[str, object], where: str
) -> None:
    """Refuse a field that has another value than the one at which it changes nothing."""
    for name, value in expected.items():
        if config.get(name, value) not in (value, None):
            raise CheckpointError(f"{where}: {name} is {config[name]!r}; understood is {value!r}")
