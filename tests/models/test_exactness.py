"""Every implementation of add + norm against float64, on rows of any mean and spread."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.add_layer_norm import implementation, op, reference, triton_kernels

EPS = 1e-5
WIDTHS = [1, 2, 7, 31, 33, 64, 384, 768, 1000, 1025, 4097, 8192]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLOAT32_EPS = torch.finfo(torch.float32).eps

ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda noise: noise,
    "mean 1e3": lambda noise: 1e3 + noise,
    "mean -1e5": lambda noise: -1e5 + noise,
    "mean 1e6": lambda noise: 1e6 + noise,
    "tiny spread": lambda noise: 3 + 1e-6 * noise,
    "small": lambda noise: 1e-4 * noise,
    "ramp": lambda noise: torch.arange(noise.shape[-1]) + 1e-3 * noise,
    "ramp from 40,000": lambda noise: 40_000.0 + torch.arange(noise.shape[-1]) + 0 * noise,
    "outlier first": lambda noise: torch.cat([1e4 + noise[:, :1], noise[:, 1:]], -1),
    "outlier last": lambda noise: torch.cat([noise[:, :-1], 1e6 + noise[:, -1:]], -1),
    "one outlier": lambda noise: 8.01 * torch.eye(1, noise.shape[-1]).expand_as(noise),
    "two levels": lambda noise: 1e4 * noise.sign() + noise,
    "constant": lambda noise: 1e3 * noise[:, :1].expand_as(noise),
}


class Results(NamedTuple):
    """Outputs and gradients for a gradient `dy` of the norm and `dsum` of the sum."""

    y: Tensor
    total: Tensor
    dx: Tensor
    dweight: Tensor
    dbias: Tensor


def cpp(
    x: Tensor,
    residual: Tensor,
    w: Tensor,
    b: Tensor,
    dy: Tensor,
    dsum: Tensor,
    centred: bool = True,
) -> Results:
    if implementation(x) != "cpp":
        pytest.skip("the C++ kernels are not built")
    y, total = torch.ops.vitrine.add_norm(x, residual, w, b, EPS, centred)
    return Results(y, total, *torch.ops.vitrine.norm_backward(dy, dsum, total, w, EPS, centred))


def aten(
    x: Tensor,
    residual: Tensor,
    w: Tensor,
    b: Tensor,
    dy: Tensor,
    dsum: Tensor,
    centred: bool = True,
) -> Results:
    y, total = op.composite_forward(x, residual, w, b, EPS, centred)
    return Results(y, total, *op.composite_backward(dy, dsum, total, w, EPS, centred))


def triton(
    x: Tensor,
    residual: Tensor,
    w: Tensor,
    b: Tensor,
    dy: Tensor,
    dsum: Tensor,
    centred: bool = True,
) -> Results:
    tensors = (x, residual, w, b, dy, dsum)
    if torch.cuda.is_available():
        x, residual, w, b, dy, dsum = (t.cuda() for t in tensors)
    y, total = triton_kernels.forward(x, residual, w, b, EPS, centred)
    results = (y, total, *triton_kernels.backward(dy, dsum, total, w, EPS, centred))
    return Results(*(t.cpu() for t in results))


def numpy(
    x: Tensor,
    residual: Tensor,
    w: Tensor,
    b: Tensor,
    dy: Tensor,
    dsum: Tensor,
    centred: bool = True,
) -> Results:
    gamma, beta = w.numpy(), b.numpy()
    y, cache = reference.forward(x.numpy(), gamma, beta, EPS, residual.numpy(), centred)
    dx, dweight, dbias = reference.backward(dy.numpy(), cache)
    return Results(*map(torch.from_numpy, (y, cache.x, dx + dsum.numpy(), dweight, dbias)))


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        *((run, dtype) for run in (cpp, aten) for dtype in DTYPES),
        *(pytest.param(triton, dtype, marks=pytest.mark.slow) for dtype in DTYPES),
        (numpy, torch.float32),
    ],
)
@pytest.mark.parametrize(
    ("norm", "width"),
    [*(("layer norm", width) for width in WIDTHS), *(("RMS norm", width) for width in WIDTHS[::3])],
)
def test_error_is_within_four_ulps_and_one_rounding(
    norm: str,
    run: Callable[..., Results],
    width: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    centred = norm == "layer norm"
    is_interpreted = run is triton and not torch.cuda.is_available()
    if is_interpreted and width > 4096:  # a thousand programs, which are interpreted in turn
        monkeypatch.setattr(triton_kernels, "REDUCED_COLUMNS", 512)
    generator = torch.Generator().manual_seed(width)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # Three rows of each kind; float16 overflows at a mean of 1e5.
    scale = 1e-3 if dtype == torch.float16 else 1.0
    whole = torch.cat([scale * make(randn(3, width)) for make in ROWS.values()]).to(dtype)
    residual = (scale * 1e-2 * randn(*whole.shape)).to(dtype)
    dy, dsum = (randn(*whole.shape).to(dtype) for _ in range(2))
    w, b = (randn(width).float() for _ in range(2))
    results = run(whole, residual, w, b, dy, dsum, centred)
    assert [t.dtype for t in results] == [dtype] * 3 + [torch.float32] * 2
    actual = Results(*(t.double() for t in results))

    expected_total = (whole + residual).double()
    if is_interpreted and dtype == torch.bfloat16:
        # The interpreter truncates to bfloat16, where a GPU rounds.
        assert ((actual.total - expected_total).abs() <= 2**-7 * expected_total.abs()).all()
    else:
        assert torch.equal(actual.total, expected_total)
    leaves = [t.double().requires_grad_() for t in (actual.total, w, b)]

    def normed(x: Tensor) -> Tensor:
        return F.layer_norm(x, [width], eps=EPS) if centred else F.rms_norm(x, [width], eps=EPS)

    y = normed(leaves[0]) * leaves[1] + leaves[2]
    torch.autograd.backward([y, leaves[0]], [dy.double(), dsum.double()])

    # Magnitudes of the terms that are added up; errors are relative to these.
    total = actual.total
    mean = total.mean(-1, keepdim=True) * centred
    rstd = ((total - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    xhat = normed(total)
    dxhat = dy.double() * w
    y_terms = xhat.abs().clamp(min=1) * w.abs() + b.abs()
    dx_terms = (
        rstd * (dxhat.abs() + (1 + xhat.abs()) * dxhat.square().mean(-1, keepdim=True).sqrt())
        + dsum.abs()
    )
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
    smallest = torch.finfo(dtype).smallest_normal
    names = [name for name in ROWS for _ in range(3)]
    for value, exact, terms in ((actual.y, y, y_terms), (actual.dx, leaves[0].grad, dx_terms)):
        assert exact is not None
        # Below the smallest normal number, float16 rounds to multiples of a fixed size.
        error = (value - exact).abs() - rounding * exact.abs().clamp(min=smallest)
        worst = (error / terms).amax(-1) / FLOAT32_EPS
        assert (worst <= 4).all(), dict(zip(names, worst.tolist(), strict=True))
    for value, leaf, terms in (
        (actual.dweight, leaves[1], dy.double().abs() * xhat.abs().clamp(min=1)),
        (actual.dbias, leaves[2], dy.double().abs()),
    ):
        assert leaf.grad is not None
        assert ((value - leaf.grad).abs() <= 4 * FLOAT32_EPS * terms.sum(0)).all()


@pytest.mark.parametrize("run", [cpp, aten, numpy, pytest.param(triton, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("width", "size"), [(4096, 1e18), (384, 3e18)])
def test_squares_of_deviations_from_a_far_pivot_may_overflow(
    run: Callable[..., Results], width: int, size: float
) -> None:
    x = torch.zeros(1, width)
    x[0, :16] = size
    ones, zeros = torch.ones(width), torch.zeros(width)
    y = run(x, torch.zeros_like(x), ones, zeros, x, x).y
    expected = F.layer_norm(x.double(), [width], eps=EPS)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("run", [cpp, aten, numpy])
@pytest.mark.parametrize("centred", [True, False])
def test_row_whose_squares_overflow_gives_the_bias_as_in_torch(
    run: Callable[..., Results], centred: bool
) -> None:
    # Half of the elements are +size, half -size, so the squares add up to 384 * size**2.
    width, limit = 384, (torch.finfo(torch.float32).max / 384) ** 0.5
    sign = torch.tensor([1.0, -1.0]).repeat(1, width // 2)
    weight, bias, zeros = torch.ones(width), torch.full((width,), 0.5), torch.zeros(1, width)
    norm = F.layer_norm if centred else F.rms_norm
    below = run(0.99 * limit * sign, zeros, weight, bias, sign, zeros, centred)
    torch.testing.assert_close(below.y, sign + bias, rtol=4 * FLOAT32_EPS, atol=0)
    x = 1.01 * limit * sign
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "overflow encountered", RuntimeWarning)  # numpy's
        beyond = run(x, zeros, weight, bias, sign, zeros, centred)
    assert torch.equal(beyond.y, norm(x, [width], weight, eps=EPS) + bias)
    assert torch.equal(beyond.y, bias.expand(1, width))
    assert torch.equal(beyond.dx, zeros)


@pytest.mark.parametrize("run", [cpp, aten])
def test_error_of_dbias_does_not_grow_with_the_number_of_rows(run: Callable[..., Results]) -> None:
    x, dy, w = torch.randn(100_000, 4), torch.full((100_000, 4), 0.1), torch.ones(4)
    dbias = run(x, x, w, w, dy, torch.zeros_like(x)).dbias
    torch.testing.assert_close(dbias.double(), dy.double().sum(0), rtol=8 * FLOAT32_EPS, atol=0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual, dy = (torch.randn(1000, 300, generator=generator).to(dtype) for _ in range(3))
    weight = torch.randn(300, generator=generator)
    threads = torch.get_num_threads()
    results: list[tuple[Tensor, ...]] = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results += [run(x, residual, weight, weight, dy, dy) for run in (cpp, aten)]
    finally:
        torch.set_num_threads(threads)
    for number, result in enumerate(results[2:], 2):
        assert all(map(torch.equal, result, results[number % 2]))
