"""Bounds of outputs: results that are rounded otherwise are within them, and mistakes are not."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from models.engines import OUTPUTS, Output, Precision
from models.engines.outputs import compare
from tests.models.wrong_outputs import GROSS, WRONG, mistakes_in


def results_of(output: Output) -> NDArray[Any]:
    """Return random results; sparse vectors have small weights, and many of zero."""
    results = np.random.default_rng(0).normal(scale=3, size=(20, 30)).astype(np.float32)
    if output == "sparse":
        results = np.maximum(results, 0)
        results[0, 0] = 0.01
    return results[:, :1] if output == "weights" else results


@pytest.mark.parametrize("output", OUTPUTS)
def test_float32_bounds_detect_every_mistake(output: Output) -> None:
    expected, bounds = results_of(output), OUTPUTS[output].bounds["float32"]
    assert compare(output, expected * (1 + 1e-6), expected).is_within(bounds)
    for name, change in mistakes_in(expected, WRONG).items():
        assert not compare(output, change(expected), expected).is_within(bounds), name


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_bounds_of_lower_precisions_detect_gross_mistakes(
    output: Output, precision: Precision
) -> None:
    expected, bounds = results_of(output), OUTPUTS[output].bounds[precision]
    assert compare(output, expected * (1 + 1e-3), expected).is_within(bounds)
    for name, change in mistakes_in(expected, GROSS).items():
        assert not compare(output, change(expected), expected).is_within(bounds), name


@pytest.mark.parametrize("logit", [0.3, 4.0, -12.0])
@pytest.mark.parametrize("output", ["logits", "tags"])
def test_bounds_detect_a_wrong_single_logit(output: Output, logit: float) -> None:
    expected, bounds = np.array([[logit]]), OUTPUTS[output].bounds["float32"]
    assert compare(output, expected * (1 + 1e-6), expected).is_within(bounds)
    for name in ("scaled", "shifted", "negated"):
        assert not compare(output, WRONG[name](expected), expected).is_within(bounds), name


def test_bounds_detect_small_sparse_weights_that_are_lost_or_added() -> None:
    expected, bounds = results_of("sparse"), OUTPUTS["sparse"].bounds["float32"]
    for old, new in ((0.01, 0), (0, 0.01)):
        actual = np.where(expected == np.float32(old), new, expected)
        assert not compare("sparse", actual, expected).is_within(bounds)
