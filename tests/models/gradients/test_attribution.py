from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sentence_transformers.util import SimilarityFunction
from tokenizers import Tokenizer
from torch import Tensor

from models.artifact import Artifact
from models.gradients import attribution
from models.gradients.attribution import METHODS, TargetFunction
from models.gradients.budget import COSTS
from models.gradients.inputs import InputRow, Method, MethodOptions
from models.gradients.reference_model import ReferenceModel
from models.manifest import TOKENIZER, SimilarityName
from tests.models.gradients.toys import A, B, assert_complete, attribute_row, toy_model
from tests.sentences import SENTENCES

PAD = [0, 1, 1, 1, 1, 2]  # baseline of A, with A's special tokens
EXACT = MethodOptions(tolerance=1e-9, max_evaluations=3000)


def targets(model: ReferenceModel) -> dict[str, TargetFunction]:
    other = model.vector(B)
    return {
        "cosine": attribution.cosine(other),
        "margin": attribution.margin(
            "cosine", other, model.vector(InputRow([0, 5, 2])), model.normalize
        ),
        "dot": attribution.dot(torch.arange(16.0, dtype=torch.float64), model.normalize),
        "dim": attribution.dim(3, model.normalize),
        "norm": attribution.norm(),
    }


def function(
    model: ReferenceModel, target: TargetFunction, row: InputRow = A, layer_name: str = "words"
) -> Callable[[Tensor], Tensor]:
    return lambda tokens: target(model.continue_from(layer_name, tokens, row))


@pytest.fixture(scope="module", params=[False, True], ids=["post-norm", "pre-norm"])
def model(request: pytest.FixtureRequest) -> ReferenceModel:
    return toy_model(norm_first=request.param)


@pytest.mark.parametrize("name", ["cosine", "margin", "dot", "dim", "norm"])
@pytest.mark.parametrize("layer_name", ["words", "embeddings", "layers.0", "output"])
def test_gradient_methods_equal_captum(model: ReferenceModel, layer_name: str, name: str) -> None:
    from captum.attr import InputXGradient, IntegratedGradients, Saliency

    target = targets(model)[name]
    x = model.tokens(layer_name, A)[None].requires_grad_()
    pad = model.tokens(layer_name, A, PAD)[None]
    f = function(model, target, layer_name=layer_name)

    def scores(method: Method) -> np.ndarray:
        return attribute_row(
            model, A, target, method=method, layer_name=layer_name, baseline=PAD, options=EXACT
        ).scores

    gradient = Saliency(f).attribute(x, abs=False)[0]
    np.testing.assert_allclose(scores("saliency"), gradient.norm(dim=-1), rtol=1e-10)
    products = InputXGradient(f).attribute(x)[0].detach()
    np.testing.assert_allclose(scores("grad_x_input"), products.sum(-1), rtol=1e-10)
    integrated = IntegratedGradients(f).attribute(x, pad, n_steps=100, method="gausslegendre")
    np.testing.assert_allclose(
        scores("integrated_gradients"), integrated[0].detach().sum(-1), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("layer_name", ["words", "layers.0"])
def test_gradients_equal_finite_differences(model: ReferenceModel, layer_name: str) -> None:
    f = function(model, targets(model)["cosine"], layer_name=layer_name)
    x = model.tokens(layer_name, A)
    _, gradient = attribution.value_and_gradient(f, x[None])
    for seed in range(5):
        direction = torch.randn(
            x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed)
        )
        step = 1e-4 * direction
        # Five points: their step can be long enough that the rounding of cosines does not count.
        far, near = (f((x + n * step)[None]) - f((x - n * step)[None]) for n in (2, 1))
        difference = (8 * near - far).item() / 12e-4
        assert difference == pytest.approx((gradient[0] * direction).sum().item(), rel=1e-6)


@pytest.mark.parametrize("baseline", [PAD, None], ids=["pad", "zeros"])
@pytest.mark.parametrize("layer_name", ["words", "embeddings", "output"])
def test_integrated_gradients_sum_to_the_difference_from_the_baseline(
    model: ReferenceModel, layer_name: str, baseline: list[int] | None
) -> None:
    result = attribute_row(
        model, A, targets(model)["norm"], layer_name=layer_name, baseline=baseline, options=EXACT
    )
    assert_complete(result, rel=1e-8)
    assert result.value == pytest.approx(model.vector(A).norm().item(), rel=1e-12)


def test_integrated_gradients_change_sign_when_input_and_baseline_swap() -> None:
    model = toy_model()
    result = attribute_row(model, A, targets(model)["dim"], baseline=PAD, options=EXACT)
    # Position embeddings depend on the index alone, so both paths are the same line.
    swapped = attribute_row(
        model, InputRow(PAD), targets(model)["dim"], baseline=A.ids, options=EXACT
    )
    np.testing.assert_allclose(result.scores, -swapped.scores, atol=1e-8)


def test_tokens_equal_to_their_baseline_score_zero() -> None:
    model = toy_model()
    result = attribute_row(model, A, targets(model)["cosine"], baseline=PAD)
    assert result.scores[[0, -1]].tolist() == [0.0, 0.0]
    assert np.abs(result.scores[1:-1]).min() > 0


def test_scores_are_additive_over_output_dimensions() -> None:
    model = toy_model(normalize=False)
    ones = attribution.dot(torch.ones(16, dtype=torch.float64), normalize=False)
    each = [
        attribute_row(
            model, A, attribution.dim(i, normalize=False), baseline=PAD, options=EXACT
        ).scores
        for i in range(16)
    ]
    whole = attribute_row(model, A, ones, baseline=PAD, options=EXACT).scores
    np.testing.assert_allclose(sum(each), whole, atol=1e-7)


def linear(x: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, x[0].numel(), dtype=x.dtype).view(x.shape[1:])
    return (x * weights).sum((-1, -2))


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"saliency"}))
def test_all_methods_agree_on_a_linear_function(method: Method) -> None:
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = attribution.grad_x_input(linear, x, torch.zeros_like(x), MethodOptions())
    result = METHODS[method](linear, x, torch.zeros_like(x), MethodOptions())
    np.testing.assert_allclose(result.scores, expected.scores, atol=1e-12)
    assert result.value == pytest.approx(linear(x[None]).item())


def test_smoothgrad_without_noise_equals_gradient_times_input() -> None:
    model = toy_model()
    target = targets(model)["cosine"]
    noiseless = MethodOptions(sigma=0.0, samples=3)
    result = attribute_row(model, A, target, method="smoothgrad", options=noiseless)
    expected = attribute_row(model, A, target, method="grad_x_input")
    np.testing.assert_allclose(result.scores, expected.scores, rtol=1e-12)


def test_smoothgrad_is_deterministic_per_seed_and_converges_with_samples() -> None:
    model = toy_model()
    target = targets(model)["cosine"]

    def scores(samples: int, seed: int) -> np.ndarray:
        settings = MethodOptions(samples=samples, seed=seed)
        return attribute_row(model, A, target, method="smoothgrad", options=settings).scores

    np.testing.assert_array_equal(scores(10, 1), scores(10, 1))
    assert not np.array_equal(scores(10, 1), scores(10, 2))
    few, many = (
        np.mean([np.linalg.norm(scores(n, s) - scores(n, s + 50)) for s in range(8)])
        for n in (10, 160)
    )
    assert many == pytest.approx(
        few / 4, rel=0.5
    )  # the error falls with the square root of the sample count


def test_occlusion_score_is_the_drop_when_a_token_is_replaced() -> None:
    model = toy_model()
    target = targets(model)["cosine"]
    result = attribute_row(model, A, target, method="occlusion", baseline=PAD)
    for index in range(len(A.ids)):
        ids = [*A.ids[:index], PAD[index], *A.ids[index + 1 :]]
        occluded = target(model.vector(InputRow(ids))[None]).item()
        assert result.scores[index] == pytest.approx(result.value - occluded, abs=1e-12)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_method_cost_bounds_the_evaluations_used(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy_model()
    evaluations = 0
    continue_from = model.continue_from

    def counted(layer_name: str, tokens: Tensor, row: InputRow) -> Tensor:
        nonlocal evaluations
        evaluations += len(tokens)
        return continue_from(layer_name, tokens, row)

    monkeypatch.setattr(model, "continue_from", counted)
    settings = MethodOptions(tolerance=0.0, max_evaluations=50, samples=7)
    # From a baseline of zeros before a LayerNorm, adaptive methods use their whole budget.
    attribute_row(
        model, A, attribution.norm(), method=method, layer_name="embeddings", options=settings
    )
    cost = COSTS[method](len(A.ids), settings)
    assert cost - 30 < evaluations <= cost


def test_scores_are_independent_of_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy_model()
    target = targets(model)["dot"]
    methods: tuple[Method, ...] = ("occlusion", "smoothgrad", "integrated_gradients")
    for method in methods:
        whole = attribute_row(model, A, target, method=method, baseline=PAD).scores
        with monkeypatch.context() as patch:
            patch.setattr(attribution, "TOKENS_AT_ONCE", 2 * len(A.ids) + 1)
            chunked = attribute_row(model, A, target, method=method, baseline=PAD).scores
        np.testing.assert_allclose(chunked, whole, atol=1e-12)


@pytest.mark.parametrize("layer_name", ["words", "layers.0", "output"])
def test_vjp_is_the_adjoint_of_the_jvp(model: ReferenceModel, layer_name: str) -> None:
    draw = torch.Generator().manual_seed(3)
    u = torch.randn(16, dtype=torch.float64, generator=draw)
    x, gradient = attribution.vjp(model, A, u.tolist(), layer_name)
    v = torch.randn(x.shape, dtype=torch.float64, generator=draw)

    def served(tokens: Tensor) -> Tensor:
        return torch.nn.functional.normalize(
            model.continue_from(layer_name, tokens[None], A)[0], dim=0
        )

    jacobian_v = (served(x + 1e-6 * v) - served(x - 1e-6 * v)) / 2e-6
    assert (u @ jacobian_v).item() == pytest.approx((gradient * v).sum().item(), rel=1e-6)
    _, twice = attribution.vjp(model, A, (2 * u).tolist(), layer_name)
    torch.testing.assert_close(twice, 2 * gradient)


def test_default_model_attributes_similarity_to_the_matching_word(artifact: Artifact) -> None:
    from captum.attr import IntegratedGradients

    model = ReferenceModel.open(artifact)
    cat = InputRow([101, 1996, 4937, 2938, 2006, 1996, 13523, 1012, 102])  # the cat sat on the mat.
    feline = InputRow([101, 1037, 10768, 4179, 8583, 2006, 1996, 20452, 1012, 102])
    baseline = [101, *[0] * 7, 102]
    target = attribution.cosine(model.vector(feline))
    result = attribute_row(model, cat, target, baseline=baseline)
    assert result.completeness is not None
    assert result.completeness.converged
    assert result.scores.argmax() == 2
    fixed = IntegratedGradients(function(model, target, cat)).attribute(
        model.tokens("words", cat)[None],
        model.tokens("words", cat, baseline)[None],
        n_steps=100,
        method="gausslegendre",
    )
    np.testing.assert_allclose(result.scores, fixed[0].sum(-1), atol=5e-3)


def test_default_tolerance_bounds_the_error_of_every_token(artifact: Artifact) -> None:
    from captum.attr import IntegratedGradients

    model = ReferenceModel.open(artifact)
    tokenizer = Tokenizer.from_file(str(artifact.path / TOKENIZER))
    tokenizer.no_padding()
    tokenizer.enable_truncation(16)
    rows = [InputRow(tokenizer.encode(text).ids) for text in SENTENCES[:9]]
    for row, other in pairwise(rows):
        baseline = [row.ids[0], *[0] * (len(row.ids) - 2), row.ids[-1]]
        target = attribution.cosine(model.vector(other))
        result = attribute_row(model, row, target, baseline=baseline)
        assert result.completeness is not None
        assert result.completeness.converged
        fixed = IntegratedGradients(function(model, target, row)).attribute(
            model.tokens("words", row)[None],
            model.tokens("words", row, baseline)[None],
            n_steps=64,
            method="gausslegendre",
        )
        error = np.abs(result.scores - fixed[0].sum(-1).detach().numpy()).max()
        assert error <= 0.01 * np.abs(result.scores).max()
        assert error <= result.completeness.score_error + 1e-6


@pytest.mark.parametrize("normalize", [False, True])
def test_targets_equal_their_formulas(normalize: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    vectors, (p, n, other) = torch.randn(4, 8, generator=draw), torch.randn(3, 8, generator=draw)
    lengths = vectors.norm(dim=1)
    served = vectors / lengths[:, None] if normalize else vectors
    expected = {
        attribution.cosine(p): vectors @ p / (lengths * p.norm()),
        attribution.margin("cosine", p, n, normalize): vectors
        @ (p / p.norm() - n / n.norm())
        / lengths,
        attribution.dot(other, normalize): served @ other,
        attribution.dim(5, normalize): served[:, 5],
        attribution.norm(): lengths,
    }
    for target, values in expected.items():
        torch.testing.assert_close(target(vectors), values)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities_equal_sentence_transformers(name: SimilarityName, normalize: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    vectors = torch.randn(4, 8, generator=draw, dtype=torch.float64)
    p, n = torch.randn(2, 8, generator=draw, dtype=torch.float64)
    compare = SimilarityFunction.to_similarity_pairwise_fn(name)

    def expected(other: Tensor) -> Tensor:
        sides = vectors, other.expand(4, 8)
        return compare(*(F.normalize(side) if normalize else side for side in sides))

    target = attribution.similarity(name, p, normalize)
    torch.testing.assert_close(target(vectors), expected(p))
    margin = attribution.margin(name, p, n, normalize)
    torch.testing.assert_close(margin(vectors), expected(p) - expected(n))
    assert torch.autograd.gradcheck(target, vectors.clone().requires_grad_())


@pytest.mark.parametrize("method", ["occlusion", "integrated_gradients"])
def test_baseline_keeps_the_positions_of_the_text(method: Method) -> None:
    model = toy_model(position_padding_id=1)  # like RoBERTa, where padding changes positions
    target = targets(model)["cosine"]
    result = attribute_row(model, A, target, method=method, layer_name="embeddings", baseline=PAD)
    tokens = model.tokens("embeddings", A, PAD)
    expected = target(model.continue_from("embeddings", tokens[None], A)).item()
    assert result.baseline_value == pytest.approx(expected, rel=1e-9)


def test_smoothgrad_noise_has_the_same_scale_at_every_token() -> None:
    inputs: list[Tensor] = []

    def recorded(versions: Tensor) -> Tensor:
        inputs.append(versions.detach())
        return versions.sum((1, 2))

    x = torch.tensor([[0.01], [10.0]], dtype=torch.float64) * torch.ones(2, 400)
    METHODS["smoothgrad"](recorded, x, torch.zeros_like(x), MethodOptions(samples=50, sigma=0.1))
    noise = torch.cat([versions for versions in inputs if len(versions) > 1]) - x
    size = 0.1 * x.square().mean().sqrt().item()
    assert noise.std(dim=(0, 2)).tolist() == pytest.approx([size, size], rel=0.05)


def test_tokens_per_forward_pass_stay_within_the_memory_limit() -> None:
    largest = 0

    def recorded(versions: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, versions.shape[0] * versions.shape[1])
        return versions.sum((1, 2))

    x = torch.ones(100, 4, dtype=torch.float64)
    methods: tuple[Method, ...] = ("smoothgrad", "occlusion")
    for method in methods:
        METHODS[method](recorded, x, torch.zeros_like(x), MethodOptions(samples=64))
    assert attribution.TOKENS_AT_ONCE / 2 < largest <= attribution.TOKENS_AT_ONCE
