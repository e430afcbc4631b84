"""`python -m models.add_layer_norm`: compare the operator and its numpy reference with autograd."""

import argparse
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.add_layer_norm import add_layer_norm, implementation, reference

EPS = 1e-5
# Maximum error of a float32 result, relative to the largest absolute value of the exact result.
TOLERANCE = 1e-5


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the errors of outputs and gradients; return 1 if one exceeds `TOLERANCE`, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m models.add_layer_norm", description=__doc__.split(": ", 1)[1]
    )
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=10)
    parser.add_argument("--embedding-dim", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    shape = (options.batch_size, options.sequence_length, options.embedding_dim)
    if min(shape) < 1 or shape[-1] < 2:
        parser.error(
            "sizes must be at least 1; --embedding-dim must be at least 2, for a non-zero variance"
        )

    generator = torch.Generator().manual_seed(options.seed)
    x, residual, dy = (torch.randn(shape, generator=generator) for _ in range(3))
    weight, bias = (torch.randn(shape[-1], generator=generator) for _ in range(2))
    inputs = (x, residual, weight, bias)

    print(f"torch {torch.__version__}, add + layer_norm of {shape} in float32")
    y = add_layer_norm(x, residual, torch.ones_like(weight), torch.zeros_like(bias), EPS)
    means, stds = y.mean(-1), y.std(-1, correction=0)
    print(
        f"per position, before weight and bias: mean {means.min():+.1e} .. {means.max():+.1e}, "
        f"std {stds.min():.6f} .. {stds.max():.6f}"
    )

    def composite(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x + residual, shape[-1:], weight, bias, EPS)

    def op(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return add_layer_norm(x, residual, weight, bias, EPS)

    expected = _gradients(composite, [t.double() for t in inputs], dy.double())
    out, cache = reference.forward(
        x.numpy(), weight.numpy(), bias.numpy(), EPS, residual=residual.numpy()
    )
    dx, dgamma, dbeta = reference.backward(dy.numpy(), cache)
    results = {
        implementation(x): _gradients(op, inputs, dy),
        "triton": None,
        "reference": [torch.from_numpy(np.asarray(a)) for a in (out, dx, dx, dgamma, dbeta)],
    }
    on_gpu = [tensor.cuda() for tensor in (*inputs, dy)] if torch.cuda.is_available() else []
    if on_gpu and implementation(on_gpu[0], backward=True) == "triton":
        results["triton"] = [t.cpu() for t in _gradients(op, on_gpu[:-1], on_gpu[-1])]
    failed = False
    print(f"{'implementation':15} {'value':10} {'error':>9}  against autograd in float64")
    names = ("y", "dx", "dresidual", "dweight", "dbias")
    for implementation_name, values in results.items():
        if values is None:
            print(
                f"{implementation_name:15} not run: no CUDA device, Triton is not installed, or "
                "--embedding-dim is too large for the kernels"
            )
            continue
        for name, value, exact in zip(names, values, expected, strict=True):
            error = float((value.double() - exact).abs().max() / exact.abs().max())
            passed = error <= TOLERANCE
            failed |= not passed
            print(
                f"{implementation_name:15} {name:10} {error:9.1e}  {'pass' if passed else 'FAIL'}"
            )
    return int(failed)


def _gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor
) -> list[Tensor]:
    """Return the output, and the gradient with respect to each input, given the gradient `dy`."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


if __name__ == "__main__":
    sys.exit(main())
