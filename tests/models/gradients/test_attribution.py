from collections.abc import Callable

import numpy as np
import pytest
import torch
from captum.attr import InputXGradient, IntegratedGradients, Saliency
from torch import Tensor

from models.artifact import Artifact
from models.gradients import attribution
from models.gradients.attribution import METHODS, Target, attribute
from models.gradients.budget import COSTS, Settings
from models.gradients.twin import Row, Twin
from tests.models.gradients.toys import A, B, toy_twin

PAD = [0, 1, 1, 1, 1, 2]  # a baseline of A: its special tokens stay
ONCE = Settings(max_evaluations=10)  # one panel of 8 points
EXACT = Settings(tolerance=1e-9, max_evaluations=3000)


def targets(twin: Twin) -> dict[str, Target]:
    other = twin.vector(B)
    return {
        "cosine": attribution.cosine(other),
        "margin": attribution.margin(other, twin.vector(Row([0, 5, 2]))),
        "dot": attribution.dot(torch.arange(16.0, dtype=torch.float64), twin.normalize),
        "dim": attribution.dim(3, twin.normalize),
        "norm": attribution.norm(),
    }


def function(twin: Twin, point: str, target: Target) -> Callable[[Tensor], Tensor]:
    return lambda tokens: target(twin.onwards(point, tokens, A))


@pytest.fixture(scope="module", params=[False, True], ids=["post-norm", "pre-norm"])
def twin(request: pytest.FixtureRequest) -> Twin:
    return toy_twin(norm_first=request.param)


@pytest.mark.parametrize("name", ["cosine", "margin", "dot", "dim", "norm"])
@pytest.mark.parametrize("point", ["words", "embeddings", "layers.0", "output"])
def test_gradient_methods_give_the_scores_of_captum(twin: Twin, point: str, name: str) -> None:
    target = targets(twin)[name]
    x = twin.tokens(point, A)[None].requires_grad_()
    pad = twin.tokens(point, A, PAD)[None]
    f = function(twin, point, target)

    def scores(method: str) -> np.ndarray:
        return attribute(
            twin, A, target, method=method, point=point, baseline=PAD, settings=ONCE
        ).scores

    gradient = Saliency(f).attribute(x, abs=False)[0]
    np.testing.assert_allclose(scores("saliency"), gradient.norm(dim=-1), rtol=1e-10)
    products = InputXGradient(f).attribute(x)[0].detach()
    np.testing.assert_allclose(scores("grad_x_input"), products.sum(-1), rtol=1e-10)
    integrated = IntegratedGradients(f).attribute(x, pad, n_steps=8, method="gausslegendre")
    np.testing.assert_allclose(
        scores("integrated_gradients"), integrated[0].detach().sum(-1), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("point", ["words", "layers.0"])
def test_gradients_are_those_of_finite_differences(twin: Twin, point: str) -> None:
    f = function(twin, point, targets(twin)["cosine"])
    x = twin.tokens(point, A)
    _, gradient = attribution.value_and_gradient(f, x[None])
    for seed in range(5):
        direction = torch.randn(
            x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed)
        )
        step = 1e-6 * direction
        difference = (f((x + step)[None]) - f((x - step)[None])).item() / 2e-6
        assert difference == pytest.approx((gradient[0] * direction).sum().item(), rel=1e-6)


@pytest.mark.parametrize("baseline", [PAD, None], ids=["pad", "zeros"])
@pytest.mark.parametrize("point", ["words", "embeddings", "output"])
def test_integrated_gradients_add_up_to_the_difference_from_the_baseline(
    twin: Twin, point: str, baseline: list[int] | None
) -> None:
    found = attribute(
        twin, A, targets(twin)["norm"], point=point, baseline=baseline, settings=EXACT
    )
    assert found.integral is not None
    assert found.integral.converged
    assert found.baseline_value is not None
    assert found.scores.sum() == pytest.approx(found.value - found.baseline_value, rel=1e-8)
    assert found.value == pytest.approx(twin.vector(A).norm().item(), rel=1e-12)


def test_integrated_gradients_back_from_the_input_are_the_opposite() -> None:
    twin = toy_twin()
    there = attribute(twin, A, targets(twin)["dim"], baseline=PAD, settings=EXACT)
    # Positions are those of the places, so a row of the baseline's ids goes the same line back.
    back = attribute(twin, Row(PAD), targets(twin)["dim"], baseline=A.ids, settings=EXACT)
    np.testing.assert_allclose(there.scores, -back.scores, atol=1e-8)


def test_tokens_that_equal_their_baseline_score_nothing() -> None:
    twin = toy_twin()
    found = attribute(twin, A, targets(twin)["cosine"], baseline=PAD)
    assert found.scores[[0, -1]].tolist() == [0.0, 0.0]
    assert np.abs(found.scores[1:-1]).min() > 0


def test_scores_of_all_dimensions_add_up_to_that_of_their_sum() -> None:
    twin = toy_twin(normalize=False)
    ones = attribution.dot(torch.ones(16, dtype=torch.float64), normalize=False)
    each = [
        attribute(twin, A, attribution.dim(i, normalize=False), baseline=PAD, settings=EXACT).scores
        for i in range(16)
    ]
    whole = attribute(twin, A, ones, baseline=PAD, settings=EXACT).scores
    np.testing.assert_allclose(sum(each), whole, atol=1e-7)


def linear(x: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, x[0].numel(), dtype=x.dtype).view(x.shape[1:])
    return (x * weights).sum((-1, -2))


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"saliency"}))
def test_all_methods_agree_on_a_linear_function_of_the_tokens(method: str) -> None:
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    wanted = attribution.grad_x_input(linear, x, torch.zeros_like(x), Settings())
    found = METHODS[method](linear, x, torch.zeros_like(x), Settings())
    np.testing.assert_allclose(found.scores, wanted.scores, atol=1e-12)
    assert found.value == pytest.approx(linear(x[None]).item())


def test_smoothgrad_without_noise_is_gradient_times_input() -> None:
    twin = toy_twin()
    target = targets(twin)["cosine"]
    calm = attribute(twin, A, target, method="smoothgrad", settings=Settings(sigma=0.0, samples=3))
    plain = attribute(twin, A, target, method="grad_x_input")
    np.testing.assert_allclose(calm.scores, plain.scores, rtol=1e-12)


def test_smoothgrad_repeats_itself_and_settles_with_more_samples() -> None:
    twin = toy_twin()
    target = targets(twin)["cosine"]

    def scores(samples: int, seed: int) -> np.ndarray:
        settings = Settings(samples=samples, seed=seed)
        return attribute(twin, A, target, method="smoothgrad", settings=settings).scores

    np.testing.assert_array_equal(scores(10, 1), scores(10, 1))
    assert not np.array_equal(scores(10, 1), scores(10, 2))
    few, many = (
        np.mean([np.linalg.norm(scores(n, s) - scores(n, s + 50)) for s in range(8)])
        for n in (10, 160)
    )
    assert many == pytest.approx(few / 4, rel=0.5)  # the error falls with the root


def test_occlusion_is_what_is_lost_without_each_token() -> None:
    twin = toy_twin()
    target = targets(twin)["cosine"]
    found = attribute(twin, A, target, method="occlusion", baseline=PAD)
    for place in range(len(A.ids)):
        ids = [*A.ids[:place], PAD[place], *A.ids[place + 1 :]]
        without = target(twin.vector(Row(ids))[None]).item()
        assert found.scores[place] == pytest.approx(found.value - without, abs=1e-12)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_no_method_costs_more_than_it_says(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = toy_twin()
    ran = 0
    onwards = twin.onwards

    def counted(point: str, tokens: Tensor, row: Row) -> Tensor:
        nonlocal ran
        ran += len(tokens)
        return onwards(point, tokens, row)

    monkeypatch.setattr(twin, "onwards", counted)
    settings = Settings(tolerance=0.0, max_evaluations=50, samples=7)
    # Zeros before a LayerNorm: what refines itself uses all that it may.
    attribute(twin, A, attribution.norm(), method=method, point="embeddings", settings=settings)
    cost = COSTS[method](len(A.ids), settings)
    assert cost - 17 < ran <= cost


def test_many_versions_run_in_parts_with_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = toy_twin()
    target = targets(twin)["dot"]
    for method in ("occlusion", "smoothgrad", "integrated_gradients"):
        whole = attribute(twin, A, target, method=method, baseline=PAD).scores
        with monkeypatch.context() as patch:
            patch.setattr(attribution, "TOKENS_AT_ONCE", 2 * len(A.ids) + 1)
            parts = attribute(twin, A, target, method=method, baseline=PAD).scores
        np.testing.assert_allclose(parts, whole, atol=1e-12)


@pytest.mark.parametrize("point", ["words", "layers.0", "output"])
def test_a_vector_jacobian_product_is_the_adjoint_of_a_jacobian_vector_product(
    twin: Twin, point: str
) -> None:
    draw = torch.Generator().manual_seed(3)
    u = torch.randn(16, dtype=torch.float64, generator=draw)
    x, gradient = attribution.vjp(twin, A, u.tolist(), point)
    v = torch.randn(x.shape, dtype=torch.float64, generator=draw)

    def served(tokens: Tensor) -> Tensor:
        return torch.nn.functional.normalize(twin.onwards(point, tokens[None], A)[0], dim=0)

    jacobian_v = (served(x + 1e-6 * v) - served(x - 1e-6 * v)) / 2e-6
    assert (u @ jacobian_v).item() == pytest.approx((gradient * v).sum().item(), rel=1e-6)
    _, twice = attribution.vjp(twin, A, (2 * u).tolist(), point)
    torch.testing.assert_close(twice, 2 * gradient)


def test_the_default_model_names_the_words_that_make_two_texts_alike(artifact: Artifact) -> None:
    twin = Twin.open(artifact)
    cat = Row([101, 1996, 4937, 2938, 2006, 1996, 13523, 1012, 102])  # the cat sat on the mat.
    feline = Row([101, 1037, 10768, 4179, 8583, 2006, 1996, 20452, 1012, 102])
    baseline = [101, *[0] * 7, 102]
    target = attribution.cosine(twin.vector(feline))
    found = attribute(twin, cat, target, baseline=baseline)
    assert found.integral is not None
    assert found.integral.converged
    assert found.scores.argmax() == 2
    fixed = IntegratedGradients(function_of(twin, cat, target)).attribute(
        twin.tokens("words", cat)[None],
        twin.tokens("words", cat, baseline)[None],
        n_steps=100,
        method="gausslegendre",
    )
    np.testing.assert_allclose(found.scores, fixed[0].sum(-1), atol=5e-3)


def function_of(twin: Twin, row: Row, target: Target) -> Callable[[Tensor], Tensor]:
    return lambda tokens: target(twin.onwards("words", tokens, row))


@pytest.mark.parametrize("normalize", [False, True])
def test_targets_are_the_numbers_that_they_are_named_after(normalize: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    vectors, (p, n, other) = torch.randn(4, 8, generator=draw), torch.randn(3, 8, generator=draw)
    lengths = vectors.norm(dim=1)
    served = vectors / lengths[:, None] if normalize else vectors
    wanted = {
        attribution.cosine(p): vectors @ p / (lengths * p.norm()),
        attribution.margin(p, n): vectors @ (p / p.norm() - n / n.norm()) / lengths,
        attribution.dot(other, normalize): served @ other,
        attribution.dim(5, normalize): served[:, 5],
        attribution.norm(): lengths,
    }
    for target, numbers in wanted.items():
        torch.testing.assert_close(target(vectors), numbers)


@pytest.mark.parametrize("method", ["occlusion", "integrated_gradients"])
def test_the_baseline_keeps_the_positions_of_the_text(method: str) -> None:
    twin = toy_twin(position_padding_id=1)  # as RoBERTa, which numbers padding in another way
    target = targets(twin)["cosine"]
    found = attribute(twin, A, target, method=method, point="embeddings", baseline=PAD)
    tokens = twin.tokens("embeddings", A, PAD)
    wanted = target(twin.onwards("embeddings", tokens[None], A)).item()
    assert found.baseline_value == pytest.approx(wanted, rel=1e-9)


def test_smoothgrads_noise_is_as_large_at_every_token() -> None:
    seen: list[Tensor] = []

    def watched(versions: Tensor) -> Tensor:
        seen.append(versions.detach())
        return versions.sum((1, 2))

    x = torch.tensor([[0.01], [10.0]], dtype=torch.float64) * torch.ones(2, 400)
    METHODS["smoothgrad"](watched, x, torch.zeros_like(x), Settings(samples=50, sigma=0.1))
    noise = torch.cat([versions for versions in seen if len(versions) > 1]) - x
    size = 0.1 * x.square().mean().sqrt().item()
    assert noise.std(dim=(0, 2)).tolist() == pytest.approx([size, size], rel=0.05)


def test_no_more_tokens_are_on_their_way_than_memory_is_meant_for() -> None:
    most = 0

    def watched(versions: Tensor) -> Tensor:
        nonlocal most
        most = max(most, versions.shape[0] * versions.shape[1])
        return versions.sum((1, 2))

    x = torch.ones(100, 4, dtype=torch.float64)
    for method in ("smoothgrad", "occlusion"):
        METHODS[method](watched, x, torch.zeros_like(x), Settings(samples=64))
    assert attribution.TOKENS_AT_ONCE / 2 < most <= attribution.TOKENS_AT_ONCE
