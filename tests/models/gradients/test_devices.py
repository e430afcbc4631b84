"""Gradients in float32, on whatever device, against the same in float64 on CPU."""

import numpy as np
import pytest
import torch

from models.artifact import Artifact
from models.gradients.attribution import METHODS, attribute, cosine, vjp
from models.gradients.budget import Settings
from models.gradients.flow import flow
from models.gradients.objectives import Objective
from models.gradients.twin import Row, Twin

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
        ],
    ),
]
# Draws its noise in the dtype that it works in, so that there is nothing to compare.
EXACT = sorted(METHODS.keys() - {"smoothgrad"})
# The same points for both, whatever rounding says about the error.
TOLERANCE = Settings(tolerance=1e-12, max_evaluations=64)


@pytest.fixture(scope="module")
def exact(artifact: Artifact) -> Twin:
    twin = Twin.open(artifact)
    twin.model.double()
    return twin


@pytest.fixture(scope="module", params=DEVICES)
def twin(artifact: Artifact, request: pytest.FixtureRequest) -> Twin:
    return Twin.open(artifact, request.param)


@pytest.fixture(scope="module")
def rows(artifact: Artifact) -> list[Row]:
    return [Row(ids) for ids in artifact.check().rows[1:5]]


def agree(found: object, wanted: object, bound: float) -> None:
    a, b = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert np.abs(a - b).max() <= bound * np.abs(b).max()


@pytest.mark.parametrize("method", EXACT)
def test_attributions_are_those_of_float64(
    twin: Twin, exact: Twin, rows: list[Row], method: str
) -> None:
    text, other = rows[:2]
    found, wanted = (
        attribute(t, text, cosine(t.vector(other)), method=method, settings=TOLERANCE)
        for t in (twin, exact)
    )
    agree(found.scores, wanted.scores, 1e-4)


def test_a_gradient_by_words_is_that_of_float64(twin: Twin, exact: Twin, rows: list[Row]) -> None:
    cotangent = np.random.default_rng(0).normal(size=exact.model.width).tolist()
    for row in rows:
        (_, found), (_, wanted) = (vjp(t, row, cotangent, "words") for t in (twin, exact))
        agree(found.cpu(), wanted, 1e-4)


def test_training_gradients_are_those_of_float64(twin: Twin, exact: Twin, rows: list[Row]) -> None:
    found, wanted = (flow(t, rows, Objective("mnrl")) for t in (twin, exact))
    assert [place.name for place in found.places] == [place.name for place in wanted.places]
    for mine, true in zip(found.places, wanted.places, strict=True):
        assert (mine.gradient is None) == (true.gradient is None)
        if mine.gradient and true.gradient:
            assert mine.gradient.l2 == pytest.approx(true.gradient.l2, rel=1e-4)
        if mine.parameters and true.parameters:
            assert mine.parameters.l2 == pytest.approx(true.parameters.l2, rel=1e-4)
