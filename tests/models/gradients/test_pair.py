import numpy as np
import pytest
import torch
import torch.nn.functional as F

from models.gradients import attribution
from models.gradients.attribution import attribute
from models.gradients.budget import Settings
from models.gradients.pair import Pair, Side, explain_pair
from models.gradients.twin import Row, Twin
from tests.models.gradients.toys import A, B, toy_twin

PAD_A, PAD_B = [0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 2]


def exact(twin: Twin, a: Side, b: Side, point: str) -> Pair:
    return explain_pair(twin, a, b, point=point, tolerance=1e-9, max_evaluations=2000)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("point", ["words", "layers.0", "output"])
def test_the_matrix_and_the_terms_of_the_baselines_add_up_to_the_cosine(
    point: str, norm_first: bool
) -> None:
    twin = toy_twin(norm_first=norm_first)
    found = exact(twin, Side(A, PAD_A), Side(B, PAD_B), point)
    cosine = F.cosine_similarity(twin.vector(A), twin.vector(B), dim=0).item()
    assert found.cosine == pytest.approx(cosine, abs=1e-12)
    whole = found.matrix.sum() + found.a_baseline + found.baseline_b - found.baselines
    assert whole == pytest.approx(cosine, abs=1e-8)
    assert found.delta == pytest.approx(whole - cosine, abs=1e-12)
    assert found.matrix.shape == (6, 5)


@pytest.mark.parametrize("point", ["embeddings", "output"])
def test_the_other_way_round_the_matrix_is_transposed(point: str) -> None:
    twin = toy_twin()
    there = exact(twin, Side(A, PAD_A), Side(B), point)
    back = exact(twin, Side(B), Side(A, PAD_A), point)
    np.testing.assert_allclose(there.matrix, back.matrix.T, atol=1e-12)
    assert there.a_baseline == pytest.approx(back.baseline_b)
    assert there.baseline_b == pytest.approx(back.a_baseline)


@pytest.mark.parametrize("point", ["words", "layers.0"])
def test_its_rows_sum_to_what_the_single_text_is_given_for_the_same_target(point: str) -> None:
    twin = toy_twin(normalize=False)
    found = exact(twin, Side(A, PAD_A), Side(B, PAD_B), point)
    e_a, e_b, r_b = twin.vector(A), twin.vector(B), twin.vector(Row(PAD_B))
    target = attribution.dot((e_b - r_b) / (e_a.norm() * e_b.norm()), normalize=False)
    settings = Settings(tolerance=1e-9, max_evaluations=2000)
    single = attribute(twin, A, target, point=point, baseline=PAD_A, settings=settings)
    np.testing.assert_allclose(found.matrix.sum(1), single.scores, atol=1e-8)


def test_with_mean_pooling_the_output_gives_products_of_token_vectors_and_nothing_is_left() -> None:
    twin = toy_twin()
    found = exact(twin, Side(A), Side(B), "output")
    h_a, h_b = twin.tokens("output", A), twin.tokens("output", B)
    lengths = twin.vector(A).norm() * twin.vector(B).norm()
    np.testing.assert_allclose(found.matrix, h_a @ h_b.T / (6 * 5 * lengths), atol=1e-12)
    assert found.a_baseline == found.baseline_b == found.baselines == 0
    assert found.matrix.sum() == pytest.approx(found.cosine, abs=1e-12)


def test_the_integrated_jacobian_is_that_of_jacrev_on_the_same_points() -> None:
    twin = toy_twin()
    x, baseline = twin.tokens("layers.0", A), twin.tokens("layers.0", A, PAD_A)
    nodes, weights = np.polynomial.legendre.leggauss(8)
    jacobian = torch.func.jacrev(lambda tokens: twin.onwards("layers.0", tokens[None], A)[0])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wanted = sum(
            weight
            / 2
            * torch.einsum("wld,ld->lw", jacobian(baseline + place * (x - baseline)), x - baseline)
            for place, weight in zip((nodes + 1) / 2, weights, strict=True)
        )
    found = explain_pair(twin, Side(A, PAD_A), Side(A, PAD_A), point="layers.0", max_evaluations=10)
    np.testing.assert_allclose(found.integrals[0].scores, wanted, atol=1e-12)


def test_tokens_that_pooling_leaves_out_have_no_part_at_the_output() -> None:
    twin = toy_twin()
    found = exact(twin, Side(Row(A.ids, unpooled=2)), Side(B), "output")
    assert np.all(found.matrix[:2] == 0)
    assert np.all(found.matrix[2:] != 0)


@pytest.mark.parametrize("at_once", [1, 13, 100])
def test_many_versions_run_in_parts_with_the_same_matrix(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    twin = toy_twin()
    whole = exact(twin, Side(A, PAD_A), Side(B, PAD_B), "embeddings")
    monkeypatch.setattr("models.gradients.pair.TOKENS_AT_ONCE", at_once)
    parts = exact(twin, Side(A, PAD_A), Side(B, PAD_B), "embeddings")
    np.testing.assert_allclose(parts.matrix, whole.matrix, atol=1e-12)


def test_the_terms_of_the_baselines_are_the_products_that_they_are_named_after() -> None:
    twin = toy_twin()
    found = exact(twin, Side(A, PAD_A), Side(B, PAD_B), "words")
    e_a, e_b, r_a, r_b = (twin.vector(row) for row in (A, B, Row(PAD_A), Row(PAD_B)))
    scale = 1 / (e_a.norm() * e_b.norm())
    assert found.a_baseline == pytest.approx((scale * e_a @ r_b).item())
    assert found.baseline_b == pytest.approx((scale * r_a @ e_b).item())
    assert found.baselines == pytest.approx((scale * r_a @ r_b).item())
