"""Rotary positions in config.json, and the tensor names of transformers' rotary encoders.

transformers 5 writes `rope_parameters`, by layer type in models that have several. Older files have
`rope_theta`, or a name of the family's own, and `rope_scaling`.
"""

from models.export.families import bert
from models.export.families.family import Modules, Settings, tensors
from models.export.model_folder import CheckpointError
from models.network.positions import Rotary


def read_rotary(
    config: Settings,
    head_width: int,
    default: float,
    names: tuple[str, ...] = ("rope_theta",),
    layer_type: str = "",
) -> Rotary:
    """Return the rotary positions of a config.

    Args:
        config: Content of config.json.
        head_width: Width of a head.
        default: Base where the config has none.
        names: Names of the base in older files.
        layer_type: Key in `rope_parameters` of models with several layer types.

    Raises:
        CheckpointError: The config requires a kind of rotary positions that is not supported.
    """
    parameters = config.get("rope_parameters") or {}
    parameters = parameters.get(layer_type) or parameters
    scaling = config.get("rope_scaling") or parameters
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    own = [parameters.get("rope_theta"), *(config.get(name) for name in names)]
    base = float(next((value for value in own if value is not None), default))
    factor = scaling.get("factor")
    for name, field in (("partial_rotary_factor", 1.0), ("mixed_b", None)):
        actual = scaling.get(name, config.get(name))
        if actual not in (field, None):
            raise CheckpointError(f"config.json: {name} is {actual!r}; only {field} is supported")
    if kind == "default":
        return Rotary(base)
    if kind not in ("linear", "ntk") or not isinstance(factor, int | float) or factor <= 0:
        raise CheckpointError(
            f"config.json: rotary positions of the type {kind!r} with the factor {factor!r} are "
            "not supported; supported: 'default', and 'linear' or 'ntk' with a positive factor"
        )
    if kind == "linear":
        return Rotary(base, scale=float(factor))
    # The fixed form of Alibaba's GTE models, whatever the length of a row.
    return Rotary(base * factor, scale=float(factor) ** (2 / head_width))


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
