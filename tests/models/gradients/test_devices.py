"""Gradients in float32 on each available device, against float64 on the CPU."""

import numpy as np
import pytest
import torch

from models.artifact import Artifact
from models.gradients.attribution import METHODS, attribute, cosine, vjp
from models.gradients.flow import flow
from models.gradients.inputs import InputRow, Method, MethodOptions, Objective, Side
from models.gradients.reference_model import ReferenceModel

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available"),
        ],
    ),
]
# smoothgrad draws its noise in the model's dtype, so float32 and float64 are not comparable.
EXACT = sorted(METHODS.keys() - {"smoothgrad"})
# An unreachable tolerance: both dtypes spend the whole budget on the same points.
TOLERANCE = MethodOptions(tolerance=1e-12, max_evaluations=64)


@pytest.fixture(scope="module")
def exact(artifact: Artifact) -> ReferenceModel:
    model = ReferenceModel.open(artifact)
    model.network.double()
    return model


@pytest.fixture(scope="module", params=DEVICES)
def model(artifact: Artifact, request: pytest.FixtureRequest) -> ReferenceModel:
    return ReferenceModel.open(artifact, request.param)


@pytest.fixture(scope="module")
def rows(artifact: Artifact) -> list[InputRow]:
    return [InputRow(ids) for ids in artifact.check().rows[1:5]]


def assert_close(actual: object, expected: object, bound: float) -> None:
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.abs(a - b).max() <= bound * np.abs(b).max()


@pytest.mark.parametrize("method", EXACT)
def test_float32_attributions_equal_float64(
    model: ReferenceModel, exact: ReferenceModel, rows: list[InputRow], method: Method
) -> None:
    text, other = rows[:2]
    actual, expected = (
        attribute(m, [Side(text)], cosine(m.vector(other)), method=method, options=TOLERANCE)
        for m in (model, exact)
    )
    assert_close(actual.scores, expected.scores, 1e-4)


def test_float32_word_gradients_equal_float64(
    model: ReferenceModel, exact: ReferenceModel, rows: list[InputRow]
) -> None:
    cotangent = np.random.default_rng(0).normal(size=exact.network.width).tolist()
    for row in rows:
        (_, actual), (_, expected) = (vjp(m, row, cotangent, "words") for m in (model, exact))
        assert_close(actual.cpu(), expected, 1e-4)


def test_float32_training_gradients_equal_float64(
    model: ReferenceModel, exact: ReferenceModel, rows: list[InputRow]
) -> None:
    actual, expected = (flow(m, rows, Objective("mnrl")) for m in (model, exact))
    assert [step.name for step in actual.steps] == [step.name for step in expected.steps]
    for actual_step, expected_step in zip(actual.steps, expected.steps, strict=True):
        assert (actual_step.gradient is None) == (expected_step.gradient is None)
        if actual_step.gradient and expected_step.gradient:
            assert actual_step.gradient.l2 == pytest.approx(expected_step.gradient.l2, rel=1e-4)
        if actual_step.parameters and expected_step.parameters:
            assert actual_step.parameters.l2 == pytest.approx(expected_step.parameters.l2, rel=1e-4)
