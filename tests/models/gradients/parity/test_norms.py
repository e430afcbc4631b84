"""Norms of a graph are compared on rows that are hard to normalise."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from models.artifact import Artifact
from models.gradients.parity import STRESS_ROWS, norm_stress
from models.gradients.reference_model import ReferenceModel
from models.network.norms import KINDS
from tests.models.gradients.parity.conftest import ROWS, parity_of, self_contained, served_by


def test_layer_norm_stress_rows_pass_on_the_installed_onnxruntime() -> None:
    for width, kind in product((24, 384, 768, 1024), KINDS):
        for eps in (1e-12, 1e-5):
            rows = norm_stress(width, eps, kind)
            assert [stress.row for stress in rows] == list(STRESS_ROWS)
            assert all(stress.finite and stress.error <= stress.bound for stress in rows)


@pytest.mark.parametrize("width", [6, 30, 450])
def test_rows_with_large_means_are_left_out_at_widths_where_they_are_not_exact(width: int) -> None:
    rows = norm_stress(width, 1e-12, "layer_norm")
    assert {row.row for row in rows} == {"constant", "zero", "tiny values", "huge"}
    assert all(row.finite and row.error <= row.bound for row in rows)


def single_pass(x: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    """Normalise with the variance as mean(x^2) - mean(x)^2, which cancels for a large mean."""
    mean = x.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (x - mean) / np.sqrt((x * x).mean(-1, keepdims=True) - mean * mean + np.float32(eps))


def clipped(x: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    """Normalise like `single_pass`, with the variance clipped at zero."""
    mean = x.mean(-1, keepdims=True)
    variance = np.maximum((x * x).mean(-1, keepdims=True) - mean * mean, np.float32(0))
    return (x - mean) / np.sqrt(variance + np.float32(eps))


@pytest.mark.parametrize(("norm", "finite"), [(single_pass, False), (clipped, True)])
def test_single_pass_variance_fails_on_a_row_with_a_large_mean(
    norm: Callable[[NDArray[np.float32], float], NDArray[np.float32]],
    finite: bool,
    tiny: Artifact,
    model: ReferenceModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Session:
        def run(
            self, _: list[str], inputs: dict[str, NDArray[np.float32]]
        ) -> list[NDArray[np.float32]]:
            total = inputs["x"] + inputs["residual"]
            return [norm(total, 1e-12), total]

    served = served_by(self_contained(tiny), ROWS)
    implementations = "models.gradients.layer_norm_implementations"
    monkeypatch.setattr(f"{implementations}.onnxruntime_session", lambda *_, **__: Session())
    result = parity_of(tiny, model, served=served)
    stress = {stress.row: stress for stress in result.layer_norm}
    assert stress["zero"].error <= stress["zero"].bound
    assert stress["large mean"].finite is finite
    assert not stress["large mean"].error <= stress["large mean"].bound
    assert any("on the row 'large mean'" in line for line in result.failures)
    assert not any("on the row 'zero'" in line for line in result.failures)
