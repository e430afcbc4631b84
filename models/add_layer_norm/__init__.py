"""The fused add + LayerNorm operator.

- `op`: the operator, registered with `torch.library`, and its functional form.
- `modules`: `LayerNorm` and `AddLayerNorm`, replacements for `torch.nn.LayerNorm`.
- `triton_kernels`: the CUDA kernels, forward and backward.
- `reference`: every step in numpy, forward and backward.

`models.export.onnx_graph` translates the operator to ONNX nodes.
"""

from models.add_layer_norm.modules import AddLayerNorm, LayerNorm
from models.add_layer_norm.op import (
    Implementation,
    add_layer_norm,
    add_layer_norm_with_sum,
    implementation,
    layer_norm,
)

__all__ = [
    "AddLayerNorm",
    "Implementation",
    "LayerNorm",
    "add_layer_norm",
    "add_layer_norm_with_sum",
    "implementation",
    "layer_norm",
]
