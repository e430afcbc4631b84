"""The fused add + LayerNorm operator.

- `op`: the operator, registered with `torch.library`, and its functional form.
- `modules`: `LayerNorm`, a replacement for `torch.nn.LayerNorm`, and `AddLayerNorm`, which fuses it
  with the residual addition.
- `cpu_kernels.cpp`: the CPU kernels, which setup.py builds.
- `triton_kernels`: the CUDA kernels, forward and backward.
- `onnx_nodes`: the operator's ONNX nodes, for `torch.onnx.export`.
- `reference`: the operator step by step in numpy, forward and backward.
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
