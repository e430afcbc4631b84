"""Implementations of add + norm to compare: numpy reference, PyTorch op, ONNX nodes.

They compute in the dtype of their operands, float32 or float64, or return the reason why they
cannot.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from onnx import TensorProto, helper
from torch import Tensor

from models.add_layer_norm import implementation, reference
from models.add_layer_norm.op import add_norm, composite_backward, composite_forward, norm
from models.add_layer_norm.reference import Array
from models.engines.with_onnxruntime import onnxruntime_session
from models.gradients.layer_norm_operands import Operands


class PassOutcome(NamedTuple):
    """Outputs and gradients of an implementation, or the reasons why they were not computed.

    Outputs are "out" and "sum", `(N, D)`. Gradients are "dx" and "dresidual", `(N, D)`, and
    "dgamma" and "dbeta", `(D,)`. "sum" and "dresidual" exist only with a residual, "dbeta" only for
    layer norm. A gradient is None if the implementation should return it but does not.
    """

    outputs: Mapping[str, Array] | str
    gradients: Mapping[str, Array | None] | str


Implementation = Callable[[Operands], PassOutcome]


def _reference(operands: Operands) -> PassOutcome:
    out, cache = operands.forward()
    dx, dgamma, dbeta = reference.backward(operands.dout, cache)
    dx = dx if operands.dsum is None else dx + operands.dsum
    gradients = {"dx": dx, "dgamma": dgamma, "dbeta": dbeta, "dresidual": dx}
    return _outcome(operands, {"out": out, "sum": cache.x}, gradients)


def _outcome(
    operands: Operands, outputs: Mapping[str, Array], gradients: Mapping[str, Array | None]
) -> PassOutcome:
    """Return an outcome without the results that do not exist for the operands.

    These are "sum" and "dresidual" without a residual, and "dbeta" for RMS norm.
    """
    missing = {"sum", "dresidual"} if operands.residual is None else set[str]()
    missing |= set() if operands.centred else {"dbeta"}
    return PassOutcome(
        {name: value for name, value in outputs.items() if name not in missing},
        {name: value for name, value in gradients.items() if name not in missing},
    )


def on_cpu(operands: Operands) -> PassOutcome:
    """Run the PyTorch op on CPU."""
    return _op(operands, "cpu")


def _cpp(operands: Operands) -> PassOutcome:
    if implementation(torch.from_numpy(operands.x)) == "cpp":
        return on_cpu(operands)
    reason = "the C++ kernels are not built or cannot be loaded"
    return PassOutcome(reason, reason)


def _aten(operands: Operands) -> PassOutcome:
    """Run the fallback implementation in torch functions, for devices without a kernel."""
    x, residual, gamma, beta, dout, dsum = _tensors(operands, "cpu")
    choices = operands.eps, operands.centred
    out, total = composite_forward(x, residual, gamma, beta, *choices)
    dx, dgamma, dbeta = composite_backward(dout, dsum, total, gamma, *choices)
    gradients = {"dx": dx, "dgamma": dgamma, "dbeta": dbeta, "dresidual": dx}
    return _outcome(
        operands,
        {"out": out.numpy(), "sum": total.numpy()},
        {name: gradient.numpy() for name, gradient in gradients.items()},
    )


def _triton(operands: Operands) -> PassOutcome:
    reason = "no CUDA device is available"
    if torch.cuda.is_available():
        on_device = torch.from_numpy(operands.x).to("cuda")
        if all(implementation(on_device, backward=half) == "triton" for half in (False, True)):
            return _op(operands, "cuda")
        reason = "Triton is not installed or has no kernels for this dtype and width"
    return PassOutcome(reason, reason)


def _op(operands: Operands, device: str) -> PassOutcome:
    """Run the PyTorch op and autograd on a device."""
    x, residual, gamma, beta, dout, dsum = _tensors(operands, device)
    leaves = {"dx": x.requires_grad_(), "dgamma": gamma.requires_grad_()}
    leaves["dbeta"] = beta.requires_grad_()
    if residual is None:
        outputs = {"out": norm(x, gamma, beta, operands.eps, operands.centred)}
        upstream = [dout]
    else:
        leaves["dresidual"] = residual.requires_grad_()
        out, total = add_norm(x, residual, gamma, beta, operands.eps, operands.centred)
        outputs = {"out": out, "sum": total}
        upstream = [dout, torch.zeros_like(dout) if dsum is None else dsum]
    gradients = torch.autograd.grad(
        list(outputs.values()), list(leaves.values()), upstream, allow_unused=True
    )
    return _outcome(
        operands,
        {name: output.detach().cpu().numpy() for name, output in outputs.items()},
        {
            name: None if gradient is None else gradient.cpu().numpy()
            for name, gradient in zip(leaves, gradients, strict=True)
        },
    )


def _tensors(
    operands: Operands, device: str
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None]:
    """Return copies of x, residual, gamma, beta, dout and dsum on a device."""
    x, residual, gamma, beta, _, dout, dsum, _ = operands
    return (
        torch.tensor(x, device=device),
        None if residual is None else torch.tensor(residual, device=device),
        torch.tensor(gamma, device=device),
        torch.tensor(beta, device=device),
        torch.tensor(dout, device=device),
        None if dsum is None else torch.tensor(dsum, device=device),
    )


def _onnxruntime(operands: Operands) -> PassOutcome:
    no_backward = "a served graph has no backward pass"
    if operands.x.dtype != np.float32:
        return PassOutcome("a served graph computes in float32, not in float64", no_backward)
    return PassOutcome(onnxruntime_outputs(operands), no_backward)


def onnxruntime_outputs(operands: Operands) -> dict[str, Array]:
    """Return the outputs of the ONNX nodes of add + norm in onnxruntime on CPU.

    Args:
        operands: Operands in float32.
    """
    inputs, outputs = {"x": operands.x}, ["out"]
    nodes, normed = [], "x"
    if operands.residual is not None:
        inputs["residual"], outputs = operands.residual, ["out", "sum"]
        nodes, normed = [helper.make_node("Add", ["x", "residual"], ["sum"])], "sum"
    parameters = ["gamma", "beta"] if operands.centred else ["gamma"]
    op = "LayerNormalization" if operands.centred else "SimplifiedLayerNormalization"
    nodes.append(
        helper.make_node(op, [normed, *parameters], ["out"], axis=-1, epsilon=operands.eps)
    )
    N, D = operands.x.shape
    graph = helper.make_graph(
        nodes,
        "add_norm",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, (N, D)) for name in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, (N, D)) for name in outputs],
        [
            helper.make_tensor(name, TensorProto.FLOAT, [D], getattr(operands, name))
            for name in parameters
        ],
    )
    # IR version 9 belongs to opset 20.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    session = onnxruntime_session(model.SerializeToString(), threads=1)
    return dict(zip(outputs, session.run(outputs, inputs), strict=True))


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": _reference,
    "cpp": _cpp,
    "aten": _aten,
    "triton": _triton,
    "onnxruntime": _onnxruntime,
}
