"""The fused add + LayerNorm operator.

- `op`: the operator, registered with `torch.library`, and its functional form.
- `modules`: `LayerNorm`, a replacement for `torch.nn.LayerNorm`, and `AddLayerNorm`, which fuses it
  with the residual addition.
- `triton_kernels`: the CUDA kernels, forward and backward.
- `reference`: the operator step by step in numpy, forward and backward.

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
