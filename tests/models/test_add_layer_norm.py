import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

from models.add_layer_norm import AddLayerNorm, add_layer_norm, add_layer_norm_with_sum

EPS = 1e-5
SHAPES = [(8,), (3, 8), (2, 5, 8), (1, 8), (0, 8), (4, 1)]


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """x, residual, weight and bias, all of which want gradients."""
    generator = torch.Generator().manual_seed(0)
    sizes = [shape, shape, shape[-1:], shape[-1:]]
    return tuple(
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in sizes
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_torch_layer_norm_of_the_sum(shape: tuple[int, ...]) -> None:
    x, residual, weight, bias = tensors(*shape)
    y, total = add_layer_norm_with_sum(x, residual, weight, bias, EPS)
    torch.testing.assert_close(y, F.layer_norm(x + residual, shape[-1:], weight, bias, EPS))
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0)


def test_gradients_equal_finite_differences_once_and_twice() -> None:
    def op(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return add_layer_norm_with_sum(x, residual, weight, bias, EPS)

    inputs = tensors(2, 3, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(op, inputs)
    assert torch.autograd.gradgradcheck(op, inputs)


def test_gradients_of_a_single_row_equal_finite_differences() -> None:
    def op(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return add_layer_norm(x, residual, weight, bias, EPS)

    assert torch.autograd.gradcheck(op, tensors(6, dtype=torch.float64))


def test_statistics_of_a_low_precision_row_are_float32() -> None:
    # A mean of 1 with deviations that bfloat16 statistics would lose.
    x = (1 + torch.arange(256) / 128).to(torch.bfloat16)[None]
    wanted = F.layer_norm(x.double(), [256], eps=EPS)
    found = add_layer_norm(x, torch.zeros_like(x), None, None, EPS)
    assert (found.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()


def test_under_autocast_it_works_in_float32_as_torchs_does() -> None:
    x, residual, weight, bias = tensors(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = add_layer_norm(x.bfloat16(), residual, weight, bias, EPS)
    assert y.dtype == torch.float32
    torch.testing.assert_close(
        y, F.layer_norm(x.bfloat16().float() + residual, [8], weight, bias, EPS)
    )


def test_gradients_equal_finite_differences_without_weight_and_bias() -> None:
    x, residual, _, _ = tensors(3, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, r: add_layer_norm(x, r, None, None, EPS), (x, residual)
    )


def test_a_gradient_of_the_sum_alone_passes_through() -> None:
    x, residual, weight, bias = tensors(3, 6)
    add_layer_norm_with_sum(x, residual, weight, bias, EPS)[1].sum().backward()
    assert x.grad is not None
    assert residual.grad is not None
    torch.testing.assert_close(x.grad, torch.ones_like(x))
    torch.testing.assert_close(residual.grad, torch.ones_like(x))
    assert weight.grad is None


def test_a_gradient_of_both_results_is_the_sum_of_the_two() -> None:
    x, residual, weight, bias = tensors(3, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: torch.stack(add_layer_norm_with_sum(x, residual, weight, bias, EPS)).sum(0), (x,)
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_the_registration_passes_opcheck(shape: tuple[int, ...], affine: bool) -> None:
    x, residual, weight, bias = tensors(*shape)
    parameters = (weight, bias) if affine else (None, None)
    opcheck(torch.ops.vitrine.add_layer_norm.default, (x, residual, *parameters, EPS))


def test_the_registration_passes_opcheck_on_views() -> None:
    x, residual, weight, bias = tensors(4, 6, 8)
    for view in (lambda t: t.transpose(0, 1), lambda t: t[:, ::2], lambda t: t[1:2]):
        args = (view(x).detach().requires_grad_(), view(residual).detach().requires_grad_())
        opcheck(torch.ops.vitrine.add_layer_norm.default, (*args, weight, bias, EPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_within_one_rounding_of_float64(dtype: torch.dtype) -> None:
    x, residual, weight, bias = tensors(512, 256, dtype=dtype)
    dy = torch.randn(512, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = add_layer_norm(x, residual, weight, bias, EPS)
    y.backward(dy)

    exact = [t.detach().double().requires_grad_() for t in (x, residual, weight, bias)]
    # The op rounds the sum to its storage type, so the reference starts from that sum.
    total = (x + residual).detach().double().requires_grad_()
    wanted_y = F.layer_norm(total, [256], exact[2], exact[3], EPS)
    wanted_y.backward(dy.double())
    rounding = torch.finfo(dtype).eps
    pairs = [
        (y, wanted_y),
        (x.grad, total.grad),
        (weight.grad, exact[2].grad),
        (bias.grad, exact[3].grad),
    ]
    for found, wanted in pairs:
        assert found is not None
        assert wanted is not None
        assert found.dtype == dtype
        error = (found.double() - wanted).abs() / (wanted.abs() + wanted.abs().mean())
        assert error.max() <= rounding


def test_it_is_one_node_in_an_exported_program() -> None:
    module = AddLayerNorm(8)
    x, residual, _, _ = tensors(3, 8)
    program = torch.export.export(module, (x, residual))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names.count("vitrine.add_layer_norm.default") == 1
    assert not any("native_layer_norm" in name for name in names)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"residual": torch.zeros(3, 7)}, r"residual is \(3, 7\) where x is \(3, 8\)"),
        ({"residual": torch.zeros(8)}, r"residual is \(8,\) where x is \(3, 8\)"),
        ({"residual": torch.zeros(3, 8).double()}, "residual is torch.float64"),
        ({"weight": torch.ones(7)}, r"weight is \(7,\), \(8,\) is needed"),
        ({"bias": torch.ones(8).double()}, "bias is torch.float64 where weight is torch.float32"),
        ({"bias": torch.ones(1, 8)}, r"bias is \(1, 8\), \(8,\) is needed"),
        ({"x": torch.zeros(3, 8).long()}, "x must be floating point"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(broken: dict[str, Tensor], message: str) -> None:
    fitting = dict(zip(("x", "residual", "weight", "bias"), tensors(3, 8), strict=True))
    with pytest.raises(RuntimeError, match=message):
        add_layer_norm(**{**fitting, **broken}, eps=EPS)
