"""Rotary positions in config.json, and the tensor names of transformers' rotary encoders.

transformers 5 writes `rope_parameters`, with a section per layer type if there are several. Older
configs have `rope_scaling`, and the base in `rope_theta` or a field specific to the family.
"""

from collections.abc import Iterable, Sequence

from models.export.families import bert
from models.export.families.family import Modules, Settings, read_number, tensors
from models.export.families.rotary_scaling import scaled_rotary
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
    types: Sequence[str] = ("default", "linear"),
) -> Rotary:
    """Return the rotary positions of a config.

    Args:
        config: Content of config.json.
        head_width: Width of a head.
        default: Base if the config has none.
        name: Field with the base in older configs.
        layer_type: Layer type whose section of `rope_parameters` is read; "": there are no
            sections.
        types: Types that the family supports; see `rotary_scaling`.

    Raises:
        CheckpointError: The config is invalid, or requires rotary positions that are not supported.
    """
    current, older = (_section(config, key) for key in ("rope_parameters", "rope_scaling"))
    if older and (current or "rope_theta" in older):
        raise CheckpointError(
            "config.json: rope_scaling must not contain rope_theta, and must not be combined with "
            "rope_parameters"
        )
    current = _of_layer_type(current, layer_type)
    if head_width % 2:
        raise CheckpointError(
            f"config.json: rotary positions need heads of even width, not {head_width}"
        )
    base = read_number(config, name, default)
    base = read_number(current, "rope_theta", base)
    parameters = older or current
    for field, supported in (("partial_rotary_factor", 1.0), ("mixed_b", None)):
        actual = parameters.get(field, config.get(field))
        if actual not in (supported, None):
            raise CheckpointError(
                f"config.json: {field} is {actual!r}; only {supported} is supported"
            )
    return scaled_rotary(base, parameters, config, head_width, types)


def layers_of_types(
    config: Settings, kinds: dict[str, AttentionConfig], default: list[str]
) -> tuple[AttentionConfig, ...]:
    """Return the attention config of each layer.

    Args:
        config: Content of config.json; `layer_types` lists the type of each layer.
        kinds: Attention config of each layer type.
        default: Type of each layer if the config has no `layer_types`.

    Raises:
        CheckpointError: `layer_types` is not a list, has an unknown type, or does not have one
            type per layer.
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
    """Return the section of `rope_parameters` for a layer type; "": all of `rope_parameters`."""
    if layer_type:
        _check_types("rope_parameters", parameters, (FULL, SLIDING))
        return _section(parameters, layer_type)
    if nested := [key for key, value in parameters.items() if isinstance(value, dict)]:
        raise CheckpointError(
            f"config.json: rope_parameters has a section {nested[0]!r}; only parameters shared by "
            "all layers are supported"
        )
    return parameters


def _check_types(name: str, types: Iterable[str], supported: Sequence[str]) -> None:
    unknown = [kind for kind in types if kind not in supported]
    if unknown:
        raise CheckpointError(
            f"config.json: {name} has the unsupported layer type {unknown[0]!r}; supported: "
            f"{', '.join(supported)}"
        )


def _section(config: Settings, name: str) -> Settings:
    section = config.get(name) or {}
    if not isinstance(section, dict):
        raise CheckpointError(f"config.json: {name} is {section!r}; it must be an object")
    return section


# Tensor names that transformers' post-norm encoders with rotary positions share.
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
