import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import opcheck

from models.add_layer_norm import (
    AddLayerNorm,
    AddRMSNorm,
    LayerNorm,
    RMSNorm,
    add_layer_norm,
    add_layer_norm_with_sum,
    add_rms_norm,
    add_rms_norm_with_sum,
    implementation,
    layer_norm,
    op,
    rms_norm,
)
from models.add_layer_norm.onnx_nodes import onnx_translations
from models.network.layer import EncoderLayer

EPS = 1e-5
SHAPES = [(8,), (3, 8), (2, 5, 8), (1, 8), (0, 8), (4, 1)]
# opcheck traces and compiles the op.
OPCHECK_SHAPES = [SHAPES[0], *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[1:])]


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Return x, residual, weight and bias, all of which require gradients."""
    generator = torch.Generator().manual_seed(0)
    sizes = [shape, shape, shape[-1:], shape[-1:]]
    return tuple(
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in sizes
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_op_equals_torch_layer_norm_of_the_sum(shape: tuple[int, ...]) -> None:
    x, residual, weight, bias = tensors(*shape)
    y, total = add_layer_norm_with_sum(x, residual, weight, bias, EPS)
    torch.testing.assert_close(y, F.layer_norm(x + residual, shape[-1:], weight, bias, EPS))
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_op_equals_torch_rms_norm_of_the_sum(shape: tuple[int, ...]) -> None:
    x, residual, weight, _ = tensors(*shape)
    y, total = add_rms_norm_with_sum(x, residual, weight, EPS)
    torch.testing.assert_close(y, F.rms_norm(x + residual, shape[-1:], weight, EPS))
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0)
    torch.testing.assert_close(rms_norm(x, None, EPS), F.rms_norm(x, shape[-1:], None, EPS))


Norm = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor | tuple[Tensor, ...]]
DIFFERENTIATED: dict[str, Norm] = {
    "both outputs": lambda x, r, w, b: add_layer_norm_with_sum(x, r, w, b, EPS),
    "their sum": lambda x, r, w, b: torch.add(*add_layer_norm_with_sum(x, r, w, b, EPS)),
    "no weight and bias": lambda x, r, _w, _b: add_layer_norm(x, r, None, None, EPS),
    "no residual": lambda x, _r, w, b: layer_norm(x, w, b, EPS),
    "RMS norm": lambda x, r, w, _: (*add_rms_norm_with_sum(x, r, w, EPS), rms_norm(x, w, EPS)),
}


@pytest.mark.parametrize("norm", DIFFERENTIATED)
@pytest.mark.parametrize("shape", [(6,), (2, 3, 6)])
def test_first_and_second_gradients_equal_finite_differences(
    norm: str, shape: tuple[int, ...]
) -> None:
    inputs = tensors(*shape, dtype=torch.float64)
    assert torch.autograd.gradcheck(DIFFERENTIATED[norm], inputs)
    assert torch.autograd.gradgradcheck(DIFFERENTIATED[norm], inputs)


def test_forward_mode_derivative_and_compilation_of_rms_norm_equal_torch() -> None:
    x, residual, weight, _ = (t.detach() for t in tensors(4, 8, dtype=torch.float64))

    def ours(x: Tensor) -> Tensor:
        return rms_norm(add_rms_norm(x, residual, weight, EPS), None, EPS)

    def theirs(x: Tensor) -> Tensor:
        y = F.rms_norm(x + residual, [8], weight, EPS)
        return F.rms_norm(y, [8], None, EPS)

    tangent = x.flip(0)
    actual, expected = (torch.func.jvp(f, (x,), (tangent,))[1] for f in (ours, theirs))
    torch.testing.assert_close(actual, expected)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), theirs(x))


def test_op_computes_in_float32_under_autocast() -> None:
    x, residual, weight, bias = tensors(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = add_layer_norm(x.bfloat16(), residual, weight, bias, EPS)
    assert y.dtype == torch.float32
    torch.testing.assert_close(
        y, F.layer_norm(x.bfloat16().float() + residual, [8], weight, bias, EPS)
    )


def test_gradient_of_the_sum_output_passes_through() -> None:
    x, residual, weight, bias = tensors(3, 6)
    add_layer_norm_with_sum(x, residual, weight, bias, EPS)[1].sum().backward()
    assert x.grad is not None
    assert residual.grad is not None
    torch.testing.assert_close(x.grad, torch.ones_like(x))
    torch.testing.assert_close(residual.grad, torch.ones_like(x))
    assert weight.grad is None


@pytest.mark.parametrize("shape", OPCHECK_SHAPES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("centred", [True, False])
def test_registration_passes_opcheck(shape: tuple[int, ...], affine: bool, centred: bool) -> None:
    x, residual, weight, bias = tensors(*shape)
    parameters = (weight, bias) if affine else (None, None)
    opcheck(torch.ops.vitrine.add_norm.default, (x, residual, *parameters, EPS, centred))


def test_registration_passes_opcheck_on_views() -> None:
    x, residual, weight, bias = tensors(4, 6, 8)
    for view in (lambda t: t.transpose(0, 1), lambda t: t[:, ::2], lambda t: t[1:2]):
        args = (view(x).detach().requires_grad_(), view(residual).detach().requires_grad_())
        opcheck(torch.ops.vitrine.add_norm.default, (*args, weight, bias, EPS, True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_within_one_rounding_of_float64(dtype: torch.dtype) -> None:
    x, residual, weight, bias = tensors(512, 256, dtype=dtype)
    dy = torch.randn(512, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = add_layer_norm(x, residual, weight, bias, EPS)
    y.backward(dy)

    exact = [t.detach().double().requires_grad_() for t in (x, residual, weight, bias)]
    # The op rounds the sum to its storage dtype, so the expectation starts from that sum.
    total = (x + residual).detach().double().requires_grad_()
    expected_y = F.layer_norm(total, [256], exact[2], exact[3], EPS)
    expected_y.backward(dy.double())
    rounding = torch.finfo(dtype).eps
    pairs = [
        (y, expected_y),
        (x.grad, total.grad),
        (weight.grad, exact[2].grad),
        (bias.grad, exact[3].grad),
    ]
    for actual, expected in pairs:
        assert actual is not None
        assert expected is not None
        assert actual.dtype == dtype
        error = (actual.double() - expected).abs() / (expected.abs() + expected.abs().mean())
        assert error.max() <= rounding


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", OPCHECK_SHAPES)
@pytest.mark.parametrize("centred", [True, False])
def test_norm_and_its_backward_op_pass_opcheck(
    shape: tuple[int, ...], affine: bool, centred: bool
) -> None:
    x, dy, weight, bias = tensors(*shape)
    parameters = (weight, bias) if affine else (None, None)
    opcheck(torch.ops.vitrine.norm.default, (x, *parameters, EPS, centred))
    dy, total = dy.detach(), x.detach()
    for dsum in (None, dy):
        scale = weight.detach() if affine else None
        opcheck(torch.ops.vitrine.norm_backward.default, (dy, dsum, total, scale, EPS, centred))


def test_layer_norm_equals_torch() -> None:
    x, _, weight, bias = tensors(3, 5, 8, dtype=torch.float64)
    expected = F.layer_norm(x, [8], weight, bias, EPS)
    torch.testing.assert_close(layer_norm(x, weight, bias, EPS), expected)


def test_gradients_with_create_graph_equal_torch() -> None:
    x, residual, weight, bias = tensors(3, 8, dtype=torch.float64)

    def twice(y: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(y.square().sum(), (x, weight), create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), (x, weight))
        return *first, *second

    torch.testing.assert_close(
        twice(add_layer_norm(x, residual, weight, bias, EPS)),
        twice(F.layer_norm(x + residual, [8], weight, bias, EPS)),
    )


def test_differentiating_the_backward_op_raises() -> None:
    x, dy, weight, _ = tensors(3, 8)
    dx, _, _ = torch.ops.vitrine.norm_backward(dy, None, x, weight, EPS, True)
    with pytest.raises(RuntimeError, match="norm_backward is not differentiable"):
        dx.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in jvp
def test_torch_func_transforms_equal_torch_layer_norm() -> None:
    x, residual, weight, bias = (t.detach() for t in tensors(4, 8, dtype=torch.float64))
    tangent = tensors(4, 8, dtype=torch.float64)[0].detach().flip(0)

    def ours(x: Tensor) -> Tensor:
        y, total = add_layer_norm_with_sum(x, residual, weight, bias, EPS)
        return layer_norm(y, weight, None, EPS) + total

    def theirs(x: Tensor) -> Tensor:
        y = F.layer_norm(x + residual, [8], weight, bias, EPS)
        return F.layer_norm(y, [8], weight, None, EPS) + x + residual

    def loss(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: f(x).square().sum()

    func = torch.func
    transforms: list[Callable[[Callable[[Tensor], Tensor]], Tensor]] = [
        lambda f: func.grad(loss(f))(x),
        lambda f: func.jacrev(f)(x),
        lambda f: func.jacfwd(f)(x),
        lambda f: func.hessian(loss(f))(x),
        lambda f: func.jvp(f, (x,), (tangent,))[1],
        lambda f: func.vjp(f, x)[1](tangent)[0],
        lambda f: func.vmap(f)(torch.stack([x, tangent])),
    ]
    for transform in transforms:
        torch.testing.assert_close(transform(ours), transform(theirs))


@pytest.mark.parametrize("dynamic", [True, False])
def test_op_and_gradient_compile_as_a_full_graph(dynamic: bool) -> None:
    def f(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return layer_norm(add_layer_norm(x, residual, weight, bias, EPS), weight, bias, EPS)

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 5):
        inputs = tensors(rows, 8)
        y = compiled(*inputs)
        torch.testing.assert_close(y, f(*inputs))
        actual = torch.autograd.grad(y.square().sum(), inputs)
        expected = torch.autograd.grad(f(*inputs).square().sum(), inputs)
        torch.testing.assert_close(actual, expected)


MODULES: dict[str, dict[str, Any]] = {
    "one": {"normalized_shape": 8},
    "two": {"normalized_shape": (5, 8), "eps": 1e-3},
    "no bias": {"normalized_shape": [8], "bias": False},
    "plain": {"normalized_shape": 8, "elementwise_affine": False},
    "double": {"normalized_shape": 8, "dtype": torch.float64, "device": "cpu"},
}


def check_replaces(
    ours: torch.nn.Module, fused: torch.nn.Module, theirs: torch.nn.Module, dtype: torch.dtype
) -> None:
    """Check modules of inputs `(..., 5, 8)` against the module of torch that they replace."""
    assert repr(ours) == repr(theirs)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    fused.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 5, 8, dtype=dtype, requires_grad=True)
    residual = torch.randn_like(x)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(fused(x, residual), theirs(x + residual))
    torch.testing.assert_close(fused.with_sum(x, residual)[1], x + residual)  # type: ignore[operator]
    actual = torch.autograd.grad(fused(x, residual).square().sum(), [x, *fused.parameters()])
    expected = torch.autograd.grad(theirs(x + residual).square().sum(), [x, *theirs.parameters()])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    for module in (ours, theirs):
        with pytest.raises(
            RuntimeError, match=r"Given normalized_shape=\[.*8\], expected input with"
        ):
            module(torch.zeros(3, 7, dtype=dtype))


@pytest.mark.parametrize("arguments", MODULES)
def test_modules_are_drop_in_replacements_for_torch(arguments: str) -> None:
    options = MODULES[arguments]
    ours, fused = LayerNorm(**options), AddLayerNorm(**options)
    check_replaces(ours, fused, torch.nn.LayerNorm(**options), options.get("dtype", torch.float32))


@pytest.mark.parametrize(
    "options",
    [
        {"normalized_shape": 8},  # eps is that of the dtype, or of float32 if that is wider
        {"normalized_shape": 8, "dtype": torch.bfloat16},
        {"normalized_shape": (5, 8), "eps": 1e-3},
        {"normalized_shape": [8], "elementwise_affine": False},
        {"normalized_shape": 8, "eps": 1e-6, "dtype": torch.float64, "device": "cpu"},
    ],
)
def test_rms_modules_are_drop_in_replacements_for_torch(options: dict[str, Any]) -> None:
    ours, fused = RMSNorm(**options), AddRMSNorm(**options)
    check_replaces(ours, fused, torch.nn.RMSNorm(**options), options.get("dtype", torch.float32))


@pytest.mark.parametrize("normalized_shape", [8, (5, 8)])
def test_module_rejects_a_residual_of_another_shape(
    normalized_shape: int | tuple[int, ...],
) -> None:
    norm = AddLayerNorm(normalized_shape)
    with pytest.raises(
        RuntimeError, match=r"residual and x differ in shape: \(5, 2, 8\), \(2, 5, 8\)"
    ):
        norm(torch.zeros(2, 5, 8), torch.zeros(5, 2, 8))
    transposed = torch.randn(5, 2, 8).transpose(0, 1)
    x = torch.randn(2, 5, 8)
    expected = F.layer_norm(x + transposed, norm.normalized_shape, norm.weight, norm.bias)
    torch.testing.assert_close(norm(x, transposed), expected)


def test_new_modules_start_with_unit_weight_and_zero_bias() -> None:
    norm = LayerNorm(8)
    assert torch.equal(norm.weight, torch.ones(8))
    assert torch.equal(norm.bias, torch.zeros(8))
    assert LayerNorm(8, bias=False).bias is None
    assert LayerNorm(8, elementwise_affine=False).weight is None


def test_rows_are_batch_independent_and_gradients_bitwise_reproducible() -> None:
    x, residual, weight, bias = tensors(64, 96)
    whole = add_layer_norm(x, residual, weight, bias, EPS)
    for index in (0, 17, 63):
        alone = add_layer_norm(x[index : index + 1], residual[index : index + 1], weight, bias, EPS)
        assert torch.equal(alone[0], whole[index])
    inputs = (x, residual, weight, bias)
    once, again = (
        torch.autograd.grad(add_layer_norm(*inputs, EPS).square().sum(), inputs) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_bfloat16_dweight_is_within_one_rounding_unlike_aten() -> None:
    x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight, bias = torch.ones(256).bfloat16(), torch.zeros(256).bfloat16()
    dy = torch.randn(4096, 256, generator=torch.Generator().manual_seed(1)).bfloat16()

    def dweight(norm: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        w = tensors[1].clone().requires_grad_()
        norm(tensors[0], w, tensors[2]).backward(tensors[3])
        assert w.grad is not None
        return w.grad.double()

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return layer_norm(x, w, b, EPS)

    def aten(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, [256], w, b, EPS)

    inputs = (x, weight, bias, dy)
    exact = dweight(aten, *(t.double() for t in inputs))
    scale = exact.abs().max()
    error, aten_error = (
        (dweight(norm, *inputs) - exact).abs().max() / scale for norm in (ours, aten)
    )
    assert error <= torch.finfo(torch.bfloat16).eps
    assert aten_error > error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_loss_curve_follows_torch(dtype: torch.dtype) -> None:
    def losses(norms: type[torch.nn.Module]) -> list[float]:
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(EncoderLayer(32, 4, 64, 0.0) for _ in range(2))
        if norms is not AddLayerNorm:
            for layer in layers:
                layer.norm1, layer.norm2 = norms(32), norms(32)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
        x, target = torch.randn(8, 6, 32), torch.randn(8, 6, 32)
        curve: list[float] = []
        for _ in range(20):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                y = x
                for layer in layers:
                    y = layer(y)
                loss = F.mse_loss(y.float(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        assert curve[-1] < 0.8 * curve[0]
        return curve

    class Composite(torch.nn.LayerNorm):
        def with_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            return self(x + residual), x + residual

    rounding = 1e-4 if dtype == torch.float32 else 2e-2
    assert losses(AddLayerNorm) == pytest.approx(losses(Composite), rel=rounding)


def test_residual_used_twice_accumulates_both_gradients() -> None:
    x, residual, weight, bias = tensors(3, 8, dtype=torch.float64)

    def twice(norm: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        y = norm(norm(x, residual), residual).square().sum()
        return torch.autograd.grad(y, residual)[0]

    def aten(x: Tensor, r: Tensor) -> Tensor:
        return F.layer_norm(x + r, [8], weight, bias, EPS)

    torch.testing.assert_close(
        twice(lambda x, r: add_layer_norm(x, r, weight, bias, EPS)), twice(aten)
    )


def test_cpu_tensors_use_the_cpp_kernels() -> None:
    # They are optional for users, and built for tests.
    assert implementation(torch.zeros(3, 8)) == "cpp"


@pytest.mark.slow
@pytest.mark.parametrize("library", [None, b"not a library"])
def test_op_is_exact_where_its_cpp_kernels_are_missing_or_damaged(
    tmp_path: Path, library: bytes | None
) -> None:
    package = tmp_path / "models" / "add_layer_norm"
    sources = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(op.__file__).parent, package, ignore=sources)
    if library is not None:
        (package / "_cpu.abi3.so").write_bytes(library)
    (tmp_path / "models" / "__init__.py").touch()
    # The copy does not count for coverage.
    environment = {n: v for n, v in os.environ.items() if not n.startswith("COV")}
    run = subprocess.run(
        [sys.executable, "-m", "models.add_layer_norm"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "aten" in run.stdout
    assert "cpp" not in run.stdout
    assert ("_cpu.abi3.so cannot be loaded" in run.stderr) == (library is not None)


def test_forward_mode_derivatives_equal_torch() -> None:
    x, residual, weight, bias = (t.detach() for t in tensors(4, 8, dtype=torch.float64))
    tangents = [torch.randn_like(t) for t in (x, residual, weight, bias)]
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(*pair)
            for pair in zip((x, residual, weight, bias), tangents, strict=True)
        ]
        x, residual, weight, bias = duals
        y, total = add_layer_norm_with_sum(x, residual, weight, bias, EPS)
        pairs = [
            (y, F.layer_norm(x + residual, [8], weight, bias, EPS)),
            (total, x + residual),
            (layer_norm(x, weight, bias, EPS), F.layer_norm(x, [8], weight, bias, EPS)),
        ]
        for actual, exact in pairs:
            tangent = forward_ad.unpack_dual(actual).tangent
            assert tangent is not None
            torch.testing.assert_close(tangent, forward_ad.unpack_dual(exact).tangent)


def test_forward_mode_derivative_of_a_compiled_op_raises() -> None:
    x = tensors(3, 8)[0].detach()
    compiled = torch.compile(lambda x: layer_norm(x, None, None, EPS), backend="eager")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for function in (compiled, lambda x: torch.ops.vitrine.norm(x, None, None, EPS, True)):
            with pytest.raises(RuntimeError, match="has no forward-mode derivative; outside of"):
                function(dual)


def test_rows_of_width_zero_have_gradients() -> None:
    x, residual, weight, bias = tensors(3, 0)
    for create_graph in (False, True):
        y = add_layer_norm(x, residual, weight, bias, EPS)
        gradients = torch.autograd.grad(y.sum(), (x, residual), create_graph=create_graph)
        assert [g.shape for g in gradients] == [(3, 0), (3, 0)]


@pytest.mark.parametrize("x_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weight_may_have_another_dtype_than_x(
    x_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    x, residual, weight, bias = (t.detach() for t in tensors(3, 40))
    leaves = [t.to(x_dtype).requires_grad_() for t in (x, residual)]
    leaves += [t.to(weight_dtype).requires_grad_() for t in (weight, bias)]
    y = add_layer_norm(leaves[0], leaves[1], leaves[2], leaves[3], EPS)
    assert y.dtype == x_dtype
    gradients = torch.autograd.grad(y.double().square().sum(), leaves)
    assert [g.dtype for g in gradients] == [t.dtype for t in leaves]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = F.layer_norm(exact[0] + exact[1], [40], exact[2], exact[3], EPS)
    tolerance = 4 * max(torch.finfo(x_dtype).eps, torch.finfo(torch.float32).eps)
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_cpu_autocast_keeps_the_dtypes_of_torch(dtypes: tuple[str, str]) -> None:
    x, residual, weight, bias = (t.detach() for t in tensors(3, 8))
    x, residual = x.to(getattr(torch, dtypes[0])), residual.to(getattr(torch, dtypes[1]))
    with torch.autocast("cpu", torch.bfloat16):
        y, total = add_layer_norm_with_sum(x, residual, weight, bias, EPS)
        expected_total = x + residual
        expected = F.layer_norm(expected_total, [8], weight, bias, EPS)
        alone = layer_norm(x, weight, bias, EPS)
        expected_alone = F.layer_norm(x, [8], weight, bias, EPS)
    torch.testing.assert_close(total, expected_total, rtol=0, atol=0)
    for actual, exact in ((y, expected), (alone, expected_alone)):
        assert actual.dtype == exact.dtype
        torch.testing.assert_close(actual, exact, rtol=2**-7, atol=2**-7)


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)`")  # torch's own
@pytest.mark.parametrize(
    ("norm", "op_type"),
    [(AddLayerNorm, "LayerNormalization"), (AddRMSNorm, "SimplifiedLayerNormalization")],
)
def test_module_with_the_op_exports_to_onnx_with_its_translations(
    norm: type[AddLayerNorm | AddRMSNorm], op_type: str, tmp_path: Path
) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(8, 8), norm(8)
            torch.nn.init.normal_(self.norm.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x), x)

    block, x = Block().eval(), torch.randn(3, 8)
    file = tmp_path / "block.onnx"
    program = torch.onnx.export(
        block, (x,), dynamo=True, verbose=False, custom_translation_table=onnx_translations()
    )
    assert program is not None
    program.save(file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (actual,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(actual), block(x).detach())
    operators = [node.op_type for node in program.model_proto.graph.node]
    assert operators.count(op_type) == 1


def test_op_is_one_node_in_an_exported_program() -> None:
    module = AddLayerNorm(8)
    x, residual, _, _ = tensors(3, 8)
    program = torch.export.export(module, (x, residual))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names.count("vitrine.add_norm.default") == 1
    assert not any("native_layer_norm" in name for name in names)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"residual": torch.zeros(3, 7)}, r"residual and x differ in shape: \(3, 7\), \(3, 8\)"),
        ({"residual": torch.zeros(8)}, r"residual and x differ in shape: \(8,\), \(3, 8\)"),
        ({"residual": torch.zeros(3, 8).double()}, "residual and x differ in dtype: torch.float64"),
        ({"weight": torch.ones(7)}, r"weight is \(7,\); it must be \(8,\)"),
        (
            {"bias": torch.ones(8).double()},
            "bias and weight differ in dtype: torch.float64, torch.float32",
        ),
        ({"bias": torch.ones(1, 8)}, r"bias is \(1, 8\); it must be \(8,\)"),
        ({"x": torch.zeros(3, 8).long()}, "x must be floating point"),
        ({"weight": torch.ones(8).long(), "bias": None}, "weight must be floating point"),
        (
            {"weight": torch.ones(8, device="meta")},
            "weight and x are on different devices: meta, cpu",
        ),
        (
            {"residual": torch.ones(3, 8, device="meta")},
            "residual and x are on different devices: meta, cpu",
        ),
    ],
)
def test_mismatched_argument_raises_with_its_name(broken: dict[str, Any], message: str) -> None:
    fitting = dict(zip(("x", "residual", "weight", "bias"), tensors(3, 8), strict=True))
    with pytest.raises(RuntimeError, match=message):
        add_layer_norm(**{**fitting, **broken}, eps=EPS)
