"""Types of rotary positions in config.json, and the angles of each type.

Expected fields, defaults and formulas are those of transformers.
"""

import math
from collections.abc import Sequence

from models.export.families.family import Settings, read_count, read_flag, read_number
from models.export.model_folder import CheckpointError
from models.network.positions import Rotary

# Fields of all types, and those that each type needs or can have besides.
_SHARED = {"mixed_b", "partial_rotary_factor", "rope_theta", "rope_type", "type"}
_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_NEEDED: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {*_LLAMA3, _ORIGINAL},
    "ntk": {"factor"},
    "yarn": {"factor", _ORIGINAL},
}
_OPTIONAL: dict[str, set[str]] = {
    "yarn": {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
}
# Types of decoders.
DECODER_TYPES = ("default", "linear", "llama3", "yarn")


def scaled_rotary(
    base: float, parameters: Settings, config: Settings, head_width: int, types: Sequence[str]
) -> Rotary:
    """Return rotary positions of the type in their parameters.

    Args:
        base: Base of the angles before scaling.
        parameters: Rotary parameters in config.json.
        config: Content of config.json.
        head_width: Width of a head.
        types: Supported types.

    Raises:
        CheckpointError: The type is not supported, or a field is missing, invalid or of another
            type.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    _check_kind(kind, parameters, types)
    if kind == "default":
        return Rotary(base)
    if kind == "llama3":
        return Rotary(base, _llama3_scales(config, parameters, base, head_width))
    factor = read_number(parameters, "factor", 1)
    if kind == "yarn":
        scales = _yarn_scales(config, parameters, base, head_width)
        return Rotary(base, scales, _yarn_amplitude(parameters, factor))
    if kind == "linear":
        return Rotary(base, factor)
    # Static NTK scaling of Alibaba's GTE models: the angles do not depend on the length of a row.
    return Rotary(base * factor, factor ** (2 / head_width))


def _check_kind(kind: object, parameters: Settings, types: Sequence[str]) -> None:
    """Raise CheckpointError unless the type is supported and has its own fields only."""
    if kind not in types:
        raise CheckpointError(
            f"config.json: rotary positions of the type {kind!r} are not supported; supported: "
            f"{', '.join(types)}"
        )
    needed, optional = _NEEDED[str(kind)], _OPTIONAL.get(str(kind), set())
    present = {field for field, value in parameters.items() if value is not None}
    if unknown := present - needed - optional - _SHARED:
        raise CheckpointError(
            f"config.json: rotary positions of the type {kind!r} have the unsupported field "
            f"{min(unknown)!r}"
        )
    if missing := needed - present:
        raise CheckpointError(
            f"config.json: rotary positions of the type {kind!r} need a {min(missing)}"
        )


def original_length(config: Settings, parameters: Settings) -> int:
    """Return the number of positions in pretraining, before scaling.

    Raises:
        CheckpointError: `original_max_position_embeddings` is not a positive integer.
    """
    # As in transformers, the field of the whole config has priority.
    source = parameters if config.get(_ORIGINAL) is None else config
    return read_count(source, _ORIGINAL, 1)


def _llama3_scales(
    config: Settings, parameters: Settings, base: float, head_width: int
) -> tuple[float, ...]:
    """Return the divisor of each pair's angles in Llama 3.1's scaling, `K / 2`.

    Angles that turn rarely within the length of pretraining are divided by the factor, those that
    turn often are kept, and those between are interpolated.
    Source: Grattafiori et al. 2024, arXiv:2407.21783.
    """
    factor, low, high = (read_number(parameters, field, 1) for field in _LLAMA3)
    if not low < high:
        raise CheckpointError(
            f"config.json: high_freq_factor {high} must be greater than low_freq_factor {low}"
        )
    length = original_length(config, parameters)
    scales = []
    for i in range(head_width // 2):
        turns = length * base ** (-2 * i / head_width) / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        scales.append(1 / (kept + (1 - kept) / factor))
    return tuple(scales)


def _yarn_scales(
    config: Settings, parameters: Settings, base: float, head_width: int
) -> tuple[float, ...]:
    """Return the divisor of each pair's angles in YaRN, `K / 2`; see `_llama3_scales`.

    The interpolation is linear in the index of the pair.
    Source: Peng et al. 2023, arXiv:2309.00071.
    """
    if base <= 1:
        raise CheckpointError(f"config.json: rope_theta is {base}; it must be greater than 1")
    length = original_length(config, parameters)
    ends = [
        head_width
        * math.log(length / (2 * math.pi * read_number(parameters, field, default)))
        / (2 * math.log(base))
        for field, default in (("beta_fast", 32), ("beta_slow", 1))
    ]
    if "truncate" not in parameters or read_flag(parameters, "truncate"):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], head_width - 1)
    last = first + 0.001 if first == last else last
    factor = read_number(parameters, "factor", 1)
    slowed = (min(max((i - first) / (last - first), 0.0), 1.0) for i in range(head_width // 2))
    return tuple(1 / (1 - share + share / factor) for share in slowed)


def _yarn_amplitude(parameters: Settings, factor: float) -> float:
    """Return YaRN's factor of all cosines and sines."""

    def amplitude(growth: float) -> float:
        return 0.1 * growth * math.log(factor) + 1 if factor > 1 else 1.0

    if parameters.get("attention_factor") is not None:
        return read_number(parameters, "attention_factor", 1)
    fields = ("mscale", "mscale_all_dim")
    if any(parameters.get(field) is None for field in fields):
        return amplitude(1)
    of_pairs, of_all = (amplitude(read_number(parameters, field, 1)) for field in fields)
    return of_pairs / of_all
