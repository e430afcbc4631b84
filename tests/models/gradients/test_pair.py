import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.gradients import attribution
from models.gradients.inputs import InputRow, MethodOptions, Side
from models.gradients.pair import explain_pair
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.attribution import PairAttribution, ReferenceTerms
from models.network.heads import NormalizeHead, TruncateHead
from tests.models.gradients.toys import A, B, attribute_row, toy_model

PAD_A, PAD_B = [0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 2]


def exact(model: ReferenceModel, a: Side, b: Side, layer_name: str) -> PairAttribution:
    return explain_pair(model, a, b, layer_name=layer_name, tolerance=1e-9, max_evaluations=2000)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("layer_name", ["words", "layers.0", "output"])
def test_matrix_and_reference_terms_sum_to_the_cosine(layer_name: str, norm_first: bool) -> None:
    model = toy_model(norm_first=norm_first)
    result = exact(model, Side(A, PAD_A), Side(B, PAD_B), layer_name)
    cosine = F.cosine_similarity(model.vector(A), model.vector(B), dim=0).item()
    assert result.similarity == pytest.approx(cosine, abs=1e-12)
    terms = result.reference_terms
    whole = result.matrix.sum() + terms.a_baseline + terms.baseline_b - terms.baselines
    assert whole == pytest.approx(cosine, abs=1e-8)
    assert result.delta == pytest.approx(whole - cosine, abs=1e-12)
    assert result.matrix.shape == (6, 5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("layer_name", ["layers.0", "output"])
def test_matrix_and_reference_terms_sum_to_the_dot_product_of_served_vectors(
    layer_name: str, normalize: bool
) -> None:
    model = toy_model(normalize=normalize)
    model.similarity = "dot"
    result = exact(model, Side(A, PAD_A), Side(B, PAD_B), layer_name)
    a, b = model.vector(A), model.vector(B)
    dot = float(F.normalize(a, dim=0) @ F.normalize(b, dim=0) if normalize else a @ b)
    assert result.similarity == pytest.approx(dot, rel=1e-12)
    terms = result.reference_terms
    whole = result.matrix.sum() + terms.a_baseline + terms.baseline_b - terms.baselines
    assert whole == pytest.approx(dot, rel=1e-7)


@pytest.mark.parametrize("layer_name", ["embeddings", "output"])
def test_swapping_the_sides_transposes_the_matrix(layer_name: str) -> None:
    model = toy_model()
    pair = exact(model, Side(A, PAD_A), Side(B), layer_name)
    swapped = exact(model, Side(B), Side(A, PAD_A), layer_name)
    np.testing.assert_allclose(pair.matrix, swapped.matrix.T, atol=1e-12)
    assert pair.reference_terms.a_baseline == pytest.approx(swapped.reference_terms.baseline_b)
    assert pair.reference_terms.baseline_b == pytest.approx(swapped.reference_terms.a_baseline)


@pytest.mark.parametrize("layer_name", ["words", "layers.0"])
def test_row_sums_equal_the_single_text_attribution(layer_name: str) -> None:
    model = toy_model(normalize=False)
    result = exact(model, Side(A, PAD_A), Side(B, PAD_B), layer_name)
    e_a, e_b, r_b = model.vector(A), model.vector(B), model.vector(InputRow(PAD_B))
    target = attribution.dot((e_b - r_b) / (e_a.norm() * e_b.norm()), normalize=False)
    options = MethodOptions(tolerance=1e-9, max_evaluations=2000)
    single = attribute_row(model, A, target, layer_name=layer_name, baseline=PAD_A, options=options)
    np.testing.assert_allclose(result.matrix.sum(1), single.scores, atol=1e-8)


def test_output_matrix_is_token_dot_products_under_mean_pooling() -> None:
    model = toy_model()
    result = exact(model, Side(A), Side(B), "output")
    h_a, h_b = model.tokens("output", A), model.tokens("output", B)
    lengths = model.vector(A).norm() * model.vector(B).norm()
    np.testing.assert_allclose(result.matrix, h_a @ h_b.T / (6 * 5 * lengths), atol=1e-12)
    assert result.reference_terms == ReferenceTerms(0.0, 0.0, 0.0)
    assert result.matrix.sum() == pytest.approx(result.similarity, abs=1e-12)


@pytest.mark.parametrize("normalize", [False, True])
def test_output_matrix_is_exact_if_vectors_are_normalised_before_they_are_truncated(
    normalize: bool,
) -> None:
    model = toy_model(normalize=normalize, heads=[NormalizeHead(), TruncateHead(5)])
    result = explain_pair(model, Side(A), Side(B))
    cosine = F.cosine_similarity(model.vector(A), model.vector(B), dim=0).item()
    assert result.similarity == pytest.approx(cosine, abs=1e-12)
    h_a, h_b = (model.tokens("output", row)[:, :5] for row in (A, B))
    lengths = h_a.mean(0).norm() * h_b.mean(0).norm()
    np.testing.assert_allclose(result.matrix, h_a @ h_b.T / (6 * 5 * lengths), atol=1e-12)
    assert result.matrix.sum() == pytest.approx(cosine, abs=1e-12)
    assert all(own.converged for own in result.completeness)


def test_integrated_jacobian_equals_jacrev_at_the_same_nodes() -> None:
    model = toy_model()
    x, baseline = model.tokens("layers.0", A), model.tokens("layers.0", A, PAD_A)
    nodes, weights = np.polynomial.legendre.leggauss(8)
    jacobian = torch.func.jacrev(lambda tokens: model.continue_from("layers.0", tokens[None], A)[0])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected: Tensor = sum(  # type: ignore[assignment]
            weight
            / 2
            * torch.einsum("wld,ld->lw", jacobian(baseline + alpha * (x - baseline)), x - baseline)
            for alpha, weight in zip((nodes + 1) / 2, weights, strict=True)
        )
    result = explain_pair(
        model, Side(A, PAD_A), Side(A, PAD_A), layer_name="layers.0", max_evaluations=10
    )
    length = model.vector(A).norm()
    np.testing.assert_allclose(result.matrix, expected @ expected.T / length**2, atol=1e-12)


def test_unpooled_tokens_score_zero_at_the_output() -> None:
    model = toy_model()
    result = exact(model, Side(InputRow(A.ids, prompt_tokens=2)), Side(B), "output")
    assert np.all(result.matrix[:2] == 0)
    assert np.all(result.matrix[2:] != 0)


@pytest.mark.parametrize("chunk_size", [1, 13, 100])
def test_matrix_is_independent_of_the_chunk_size(
    monkeypatch: pytest.MonkeyPatch, chunk_size: int
) -> None:
    model = toy_model()
    whole = exact(model, Side(A, PAD_A), Side(B, PAD_B), "embeddings")
    monkeypatch.setattr("models.gradients.pair.TOKENS_AT_ONCE", chunk_size)
    chunked = exact(model, Side(A, PAD_A), Side(B, PAD_B), "embeddings")
    np.testing.assert_allclose(chunked.matrix, whole.matrix, atol=1e-12)


def test_reference_terms_equal_scaled_dot_products() -> None:
    model = toy_model()
    result = exact(model, Side(A, PAD_A), Side(B, PAD_B), "words")
    e_a, e_b, r_a, r_b = (model.vector(row) for row in (A, B, InputRow(PAD_A), InputRow(PAD_B)))
    scale = 1 / (e_a.norm() * e_b.norm())
    assert result.reference_terms.a_baseline == pytest.approx((scale * e_a @ r_b).item())
    assert result.reference_terms.baseline_b == pytest.approx((scale * r_a @ e_b).item())
    assert result.reference_terms.baselines == pytest.approx((scale * r_a @ r_b).item())
