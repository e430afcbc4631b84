"""The fused add + norm operator, for layer norm and RMS norm.

- `op`: the operator, registered with `torch.library`, and its functional form.
- `modules`: `LayerNorm` and `RMSNorm`, replacements for the modules of the same name in `torch.nn`;
  `AddLayerNorm` and `AddRMSNorm`, norms fused with the residual addition.
- `cpu_kernels.cpp`: the CPU kernels, which setup.py builds.
- `triton_kernels`: the CUDA kernels, forward and backward.
- `onnx_nodes`: the operator's ONNX nodes, for `torch.onnx.export`.
- `reference`: the operator step by step in numpy, forward and backward.
"""

from models.add_layer_norm.modules import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from models.add_layer_norm.op import (
    Implementation,
    add_layer_norm,
    add_layer_norm_with_sum,
    add_rms_norm,
    add_rms_norm_with_sum,
    implementation,
    layer_norm,
    rms_norm,
)

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "Implementation",
    "LayerNorm",
    "RMSNorm",
    "add_layer_norm",
    "add_layer_norm_with_sum",
    "add_rms_norm",
    "add_rms_norm_with_sum",
    "implementation",
    "layer_norm",
    "rms_norm",
]
