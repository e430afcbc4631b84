"""Implementations of add + LayerNorm to compare: numpy reference, PyTorch op, ONNX nodes.

They compute in the dtype of their operands, float32 or float64, or return why they cannot.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from onnx import TensorProto, helper

from models.add_layer_norm import add_layer_norm, implementation, layer_norm, reference
from models.add_layer_norm.op import composite_backward, composite_forward
from models.add_layer_norm.reference import Array
from models.engines.with_onnxruntime import onnxruntime_session


class Operands(NamedTuple):
    """Operands of add + LayerNorm; `eps` is added to the variance."""

    x: Array  #                (N, D)
    residual: Array | None  #  (N, D)
    gamma: Array  #            (D,)
    beta: Array  #             (D,)
    eps: float


class Outcome(NamedTuple):
    """Output and gradients of an implementation. A string is the reason why one is not computed.

    The keys of the gradients are "dx", "dresidual" (only with a residual), "dgamma" and "dbeta".
    """

    out: Array | str  #  (N, D)
    gradients: dict[str, Array] | str


Implementation = Callable[[Operands, Array], Outcome]


def _reference(operands: Operands, dout: Array) -> Outcome:
    x, residual, gamma, beta, eps = operands
    out, cache = reference.forward(x, gamma, beta, eps, residual)
    dx, dgamma, dbeta = reference.backward(dout, cache)
    gradients = {"dx": dx, "dgamma": dgamma, "dbeta": dbeta}
    return Outcome(out, gradients if residual is None else {**gradients, "dresidual": dx})


def on_cpu(operands: Operands, dout: Array) -> Outcome:
    """Run the PyTorch op on CPU."""
    return _op(operands, dout, "cpu")


def _cpp(operands: Operands, dout: Array) -> Outcome:
    if implementation(torch.from_numpy(operands.x)) == "cpp":
        return on_cpu(operands, dout)
    reason = "the C++ kernels are not built"
    return Outcome(reason, reason)


def _aten(operands: Operands, dout: Array) -> Outcome:
    """Run the torch functions that are the op where it has no kernels."""
    x, gamma, beta = (torch.from_numpy(a) for a in (operands.x, operands.gamma, operands.beta))
    residual = None if operands.residual is None else torch.from_numpy(operands.residual)
    out, total = composite_forward(x, residual, gamma, beta, operands.eps)
    dx, dgamma, dbeta = composite_backward(torch.from_numpy(dout), None, total, gamma, operands.eps)
    gradients = {"dx": dx, "dgamma": dgamma, "dbeta": dbeta}
    if residual is not None:
        gradients["dresidual"] = dx
    return Outcome(out.numpy(), {name: gradient.numpy() for name, gradient in gradients.items()})


def _triton(operands: Operands, dout: Array) -> Outcome:
    reason = "no CUDA device is available"
    if torch.cuda.is_available():
        on_device = torch.from_numpy(operands.x).to("cuda")
        if all(implementation(on_device, backward=half) == "triton" for half in (False, True)):
            return _op(operands, dout, "cuda")
        reason = "rows of this dtype and width run in ATen, not in Triton"
    return Outcome(reason, reason)


def _op(operands: Operands, dout: Array, device: str) -> Outcome:
    """Run the PyTorch op and autograd on a device."""
    arrays = {"dx": operands.x, "dgamma": operands.gamma, "dbeta": operands.beta}
    if operands.residual is not None:
        arrays["dresidual"] = operands.residual
    leaves = {name: torch.tensor(a, device=device).requires_grad_() for name, a in arrays.items()}
    x, gamma, beta = (leaves[name] for name in ("dx", "dgamma", "dbeta"))
    if operands.residual is None:
        out = layer_norm(x, gamma, beta, operands.eps)
    else:
        out = add_layer_norm(x, leaves["dresidual"], gamma, beta, operands.eps)
    gradients = torch.autograd.grad(out, list(leaves.values()), torch.tensor(dout, device=device))
    return Outcome(
        out.detach().cpu().numpy(),
        {name: g.cpu().numpy() for name, g in zip(leaves, gradients, strict=True)},
    )


def _onnxruntime(operands: Operands, _dout: Array) -> Outcome:
    """Run the ONNX nodes of the op in onnxruntime on CPU; there is no backward pass."""
    no_backward = "a served graph has no backward pass"
    if operands.x.dtype != np.float32:
        return Outcome("a served graph computes in float32", no_backward)
    arrays = {"x": operands.x}
    nodes, normed = [], "x"
    if operands.residual is not None:
        arrays["residual"] = operands.residual
        nodes, normed = [helper.make_node("Add", ["x", "residual"], ["sum"])], "sum"
    nodes.append(
        helper.make_node(
            "LayerNormalization", [normed, "gamma", "beta"], ["out"], axis=-1, epsilon=operands.eps
        )
    )
    D = operands.x.shape[-1]
    graph = helper.make_graph(
        nodes,
        "add_layer_norm",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in arrays.items()],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, operands.x.shape)],
        [
            helper.make_tensor("gamma", TensorProto.FLOAT, [D], operands.gamma),
            helper.make_tensor("beta", TensorProto.FLOAT, [D], operands.beta),
        ],
    )
    # IR version 9 belongs to opset 20.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    session = onnxruntime_session(model.SerializeToString(), threads=1)
    return Outcome(session.run(["out"], arrays)[0], no_backward)


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": _reference,
    "cpp": _cpp,
    "aten": _aten,
    "triton": _triton,
    "onnxruntime": _onnxruntime,
}
