"""ONNX nodes of the fused operator, for `torch.onnx.export` of any module that calls it."""

from collections.abc import Callable
from typing import Any

import onnx
import torch
from onnxscript import opset20 as op
from onnxscript.values import Op, Opset

Translation = Callable[..., Any]


def onnx_translations(target: str = "cpu") -> dict[Callable[..., Any], Translation]:
    """Return the operator's translations, for `torch.onnx.export(custom_translation_table=...)`.

    Layer norm becomes the standard `LayerNormalization`, and RMS norm becomes onnxruntime's
    `SimplifiedLayerNormalization`.

    Args:
        target: "cpu": the residual addition is a separate `Add` node, which onnxruntime runs
            fastest on CPU. "cuda": addition and norm are one node of onnxruntime,
            `SkipLayerNormalization` or `SkipSimplifiedLayerNormalization`, which requires x
            `(N, D)` or `(B, L, D)`.

    Raises:
        ValueError: `target` is neither "cpu" nor "cuda".
    """
    if target not in _ADD_NORM:
        raise ValueError(f"unknown target {target!r}; allowed: {', '.join(_ADD_NORM)}")
    return {
        torch.ops.vitrine.norm.default: _norm,
        torch.ops.vitrine.add_norm.default: _ADD_NORM[target],
    }


def _contrib_op(
    domain: str, name: str, inputs: str, optional_inputs: str, outputs: str, optional_outputs: str
) -> Op:
    """Return an op of onnxruntime with its schema, which the onnx package does not have.

    `inputs`, `outputs` and their optional counterparts are names separated by spaces.
    """
    formal = onnx.defs.OpSchema.FormalParameter
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    types = {"mean": "U", "inv_std_var": "U"}
    attributes = [onnx.defs.OpSchema.Attribute("epsilon", onnx.defs.OpSchema.AttrType.FLOAT)]
    if not domain:
        axis = onnx.defs.OpSchema.Attribute("axis", onnx.defs.OpSchema.AttrType.INT)
        attributes.append(axis)
    schema = onnx.defs.OpSchema(
        name,
        domain,
        1,
        inputs=[
            *(formal(input, "T") for input in inputs.split()),
            *(formal(input, "T", param_option=optional) for input in optional_inputs.split()),
        ],
        outputs=[
            *(formal(output, "T") for output in outputs.split()),
            *(
                formal(output, types.get(output, "T"), param_option=optional)
                for output in optional_outputs.split()
            ),
        ],
        type_constraints=[
            ("T", ["tensor(float)", "tensor(float16)"], ""),
            ("U", ["tensor(float)"], ""),
        ],
        attributes=attributes,
    )
    return Op(Opset(domain, 1), name, schema)


_STATISTICS_AND_SUM = "mean inv_std_var input_skip_bias_sum"
_SKIP_LAYER_NORMALIZATION = _contrib_op(
    "com.microsoft",
    "SkipLayerNormalization",
    "input skip gamma",
    "beta bias",
    "output",
    _STATISTICS_AND_SUM,
)
_SKIP_RMS_NORMALIZATION = _contrib_op(
    "com.microsoft",
    "SkipSimplifiedLayerNormalization",
    "input skip gamma",
    "bias",
    "output",
    _STATISTICS_AND_SUM,
)
# onnxruntime registers this op in the domain of the standard ops, although it is not standard.
_RMS_NORMALIZATION = _contrib_op(
    "", "SimplifiedLayerNormalization", "X scale", "", "Y", "inv_std_var"
)
_ONE = onnx.helper.make_tensor("one", onnx.TensorProto.FLOAT, [1], [1.0])


def _ones(x: Any) -> Any:  # noqa: ANN401
    """Return a weight of ones for a norm without weight, because all of the nodes require one."""
    return op.CastLike(op.ConstantOfShape([x.shape[-1]], value=_ONE), x)


def _norm(x: Any, weight: Any, bias: Any, eps: float, centred: bool) -> Any:  # noqa: ANN401
    weight = _ones(x) if weight is None else weight
    if centred:
        # The outputs are (Y, Mean, InvStdDev).
        return op.LayerNormalization(x, weight, bias, axis=-1, epsilon=eps)[0]
    y = _RMS_NORMALIZATION(x, weight, axis=-1, epsilon=eps)[0]
    return y if bias is None else op.Add(y, bias)


def _add_norm_cpu(x: Any, residual: Any, weight: Any, *others: Any) -> Any:  # noqa: ANN401
    # The ones take their shape from x, because the exporter does not know the shape of `total`.
    weight = _ones(x) if weight is None else weight
    total = op.Add(x, residual)
    return _norm(total, weight, *others), total


def _add_norm_cuda(
    x: Any,  # noqa: ANN401
    residual: Any,  # noqa: ANN401
    weight: Any,  # noqa: ANN401
    bias: Any,  # noqa: ANN401
    eps: float,
    centred: bool,
) -> Any:  # noqa: ANN401
    weight = _ones(x) if weight is None else weight
    if centred:
        y, _, _, total = _SKIP_LAYER_NORMALIZATION(x, residual, weight, bias, epsilon=eps)
        return y, total
    y, _, _, total = _SKIP_RMS_NORMALIZATION(x, residual, weight, epsilon=eps)
    return y if bias is None else op.Add(y, bias), total


_ADD_NORM: dict[str, Translation] = {
    "cpu": _add_norm_cpu,
    "cuda": _add_norm_cuda,
}

TARGETS = tuple(_ADD_NORM)
