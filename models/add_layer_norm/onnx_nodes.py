"""ONNX nodes of the fused operator, for `torch.onnx.export` of any module that calls it."""

from collections.abc import Callable
from typing import Any

import onnx
import torch
from onnxscript import opset20 as op
from onnxscript.values import Op, Opset

Translation = Callable[..., Any]


def onnx_translations(target: str = "cpu") -> dict[Callable[..., Any], Translation]:
    """Return the `custom_translation_table` with which `torch.onnx.export` knows the operator.

    Args:
        target: "cpu": `Add` and `LayerNormalization`, which every runtime has and onnxruntime runs
            fastest on CPU. "cuda": one `com.microsoft::SkipLayerNormalization`, which onnxruntime
            has for x `(N, D)` or `(B, L, D)`.

    Raises:
        ValueError: The target is unknown.
    """
    if target not in _ADD_LAYER_NORM:
        raise ValueError(f"unknown target {target!r}; allowed: {', '.join(_ADD_LAYER_NORM)}")
    return {
        torch.ops.vitrine.layer_norm.default: _layer_norm,
        torch.ops.vitrine.add_layer_norm.default: _ADD_LAYER_NORM[target],
    }


def _skip_layer_normalization() -> Op:
    """Return the op with its signature, which the onnx package has for standard ops only."""
    formal = onnx.defs.OpSchema.FormalParameter
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    schema = onnx.defs.OpSchema(
        "SkipLayerNormalization",
        "com.microsoft",
        1,
        inputs=[
            formal("input", "T"),
            formal("skip", "T"),
            formal("gamma", "T"),
            formal("beta", "T", param_option=optional),
            formal("bias", "T", param_option=optional),
        ],
        outputs=[
            formal("output", "T"),
            formal("mean", "U", param_option=optional),
            formal("inv_std_var", "U", param_option=optional),
            formal("input_skip_bias_sum", "T", param_option=optional),
        ],
        type_constraints=[
            ("T", ["tensor(float)", "tensor(float16)"], ""),
            ("U", ["tensor(float)"], ""),
        ],
        attributes=[onnx.defs.OpSchema.Attribute("epsilon", onnx.defs.OpSchema.AttrType.FLOAT)],
    )
    return Op(Opset("com.microsoft", 1), "SkipLayerNormalization", schema)


_SKIP_LAYER_NORMALIZATION = _skip_layer_normalization()
_ONE = onnx.helper.make_tensor("one", onnx.TensorProto.FLOAT, [1], [1.0])


def _ones(x: Any) -> Any:  # noqa: ANN401
    """Return a weight of ones for a norm without weight, which both ONNX nodes require."""
    return op.CastLike(op.ConstantOfShape([x.shape[-1]], value=_ONE), x)


def _layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:  # noqa: ANN401
    weight = _ones(x) if weight is None else weight
    # The outputs are (Y, Mean, InvStdDev).
    return op.LayerNormalization(x, weight, bias, axis=-1, epsilon=eps)[0]


def _add_layer_norm_cpu(x: Any, residual: Any, weight: Any, bias: Any, eps: float) -> Any:  # noqa: ANN401
    # The ones take their shape from x, because the exporter does not know the shape of `total`.
    weight = _ones(x) if weight is None else weight
    total = op.Add(x, residual)
    return _layer_norm(total, weight, bias, eps), total


def _add_layer_norm_cuda(x: Any, residual: Any, weight: Any, bias: Any, eps: float) -> Any:  # noqa: ANN401
    weight = _ones(x) if weight is None else weight
    y, _, _, total = _SKIP_LAYER_NORMALIZATION(x, residual, weight, bias, epsilon=eps)
    return y, total


_ADD_LAYER_NORM: dict[str, Translation] = {
    "cpu": _add_layer_norm_cpu,
    "cuda": _add_layer_norm_cuda,
}

TARGETS = tuple(_ADD_LAYER_NORM)
