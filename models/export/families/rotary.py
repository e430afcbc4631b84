"""Rotary positions in config.json, and the tensor names of transformers' rotary encoders.

transformers 5 writes `rope_parameters`, by layer type in models that have several. Older files have
`rope_theta`, or a name of the family's own, and `rope_scaling`.
"""

from collections.abc import Iterable, Sequence

from models.export.families import bert
from models.export.families.family import Modules, Settings, read_number, tensors
from models.export.model_folder import CheckpointError
from models.network.config import AttentionConfig
from models.network.positions import Rotary

# Layer types of transformers.
FULL, SLIDING = "full_attention", "sliding_attention"


def read_rotary(
    config: Settings,
    head_width: int,
    default: float,
    *,
    name: str = "rope_theta",
    layer_type: str = "",
    scaling: str = "linear",
) -> Rotary:
    """Return the rotary positions of a config.

    Args:
        config: Content of config.json.
        head_width: Width of a head.
        default: Base where the config has none.
        name: Name of the base in older files.
        layer_type: Key in `rope_parameters` of models with several layer types.
        scaling: The type of scaling that the family has, "linear" or "ntk".

    Raises:
        CheckpointError: The config is invalid, or requires rotary positions that are not supported.
    """
    current, older = (_section(config, key) for key in ("rope_parameters", "rope_scaling"))
    if older and (current or "rope_theta" in older):
        raise CheckpointError(
            "config.json: rope_scaling beside rope_parameters or with a rope_theta of its own is "
            "not supported"
        )
    current = _of_layer_type(current, layer_type)
    if head_width % 2:
        raise CheckpointError(
            f"config.json: rotary positions need heads of even width, not {head_width}"
        )
    base = read_number(config, name, default)
    base = read_number(current, "rope_theta", base)
    parameters = older or current
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    for field, supported in (("partial_rotary_factor", 1.0), ("mixed_b", None)):
        actual = parameters.get(field, config.get(field))
        if actual not in (supported, None):
            raise CheckpointError(
                f"config.json: {field} is {actual!r}; only {supported} is supported"
            )
    if kind == "default":
        return Rotary(base)
    if kind != scaling:
        raise CheckpointError(
            f"config.json: rotary positions of the type {kind!r} are not supported; supported: "
            f"'default' and {scaling!r}"
        )
    if parameters.get("factor") is None:
        raise CheckpointError(f"config.json: rotary positions of the type {kind!r} need a factor")
    factor = read_number(parameters, "factor", 1)
    if kind == "linear":
        return Rotary(base, scale=factor)
    # The fixed form of Alibaba's GTE models, whatever the length of a row.
    return Rotary(base * factor, scale=factor ** (2 / head_width))


def layers_of_types(
    config: Settings, kinds: dict[str, AttentionConfig], default: list[str]
) -> tuple[AttentionConfig, ...]:
    """Return the attention of each layer, by its type.

    Args:
        config: Content of config.json, whose `layer_types` has the type of each layer.
        kinds: Attention of each layer type.
        default: Layer types where the config has none.

    Raises:
        CheckpointError: A layer type is unknown, or the number of layers is wrong.
    """
    types = config.get("layer_types")
    types = default if types is None else types
    if not isinstance(types, list):
        raise CheckpointError(f"config.json: layer_types is {types!r}; it must be a list")
    _check_types("layer_types", types, list(kinds))
    if len(types) != len(default):
        raise CheckpointError(
            f"config.json: layer_types has length {len(types)}; the model has {len(default)} layers"
        )
    return tuple(kinds[kind] for kind in types)


def _of_layer_type(parameters: Settings, layer_type: str) -> Settings:
    """Return the part of `rope_parameters` for a layer type; "": all, which all layers share."""
    if layer_type:
        _check_types("rope_parameters", parameters, (FULL, SLIDING))
        return _section(parameters, layer_type)
    if nested := [key for key, value in parameters.items() if isinstance(value, dict)]:
        raise CheckpointError(
            f"config.json: rope_parameters has {nested[0]!r}; only one object for all layers is "
            "supported"
        )
    return parameters


def _check_types(name: str, types: Iterable[str], supported: Sequence[str]) -> None:
    unknown = [kind for kind in types if kind not in supported]
    if unknown:
        raise CheckpointError(
            f"config.json: {name} has {unknown[0]!r}; supported: {', '.join(supported)}"
        )


def _section(config: Settings, name: str) -> Settings:
    section = config.get(name) or {}
    if not isinstance(section, dict):
        raise CheckpointError(f"config.json: {name} is {section!r}; it must be an object")
    return section


# The encoders of transformers with rotary positions and post-norm layers share these names.
EMBEDDINGS = {
    name: tensor for name, tensor in bert.EMBEDDINGS.items() if name != "embeddings.position.weight"
}
MODULES: Modules = {
    "embeddings.norm": "embeddings.LayerNorm",
    "layers.{i}.self_attn.in_proj": (
        "layers.{i}.self_attn.q_proj",
        "layers.{i}.self_attn.k_proj",
        "layers.{i}.self_attn.v_proj",
    ),
    "layers.{i}.self_attn.out_proj": "layers.{i}.self_attn.o_proj",
    "layers.{i}.norm1": "layers.{i}.post_attention_layernorm",
    "layers.{i}.gate": "layers.{i}.mlp.gate_proj",
    "layers.{i}.linear1": "layers.{i}.mlp.up_proj",
    "layers.{i}.linear2": "layers.{i}.mlp.down_proj",
    "layers.{i}.norm2": "layers.{i}.post_mlp_layernorm",
}
TENSORS = tensors(weights=EMBEDDINGS, modules=MODULES)
