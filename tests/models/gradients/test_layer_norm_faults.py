"""Each fault in an implementation of add + LayerNorm fails on all rows that show it."""

import numpy as np
import pytest

from models.gradients.inputs import Distribution
from models.gradients.layer_norm_check import judge
from models.gradients.layer_norm_operands import DISTRIBUTIONS, draw, rounded_to
from tests.models.gradients.layer_norm_faults import (
    WRONG_BACKWARD,
    WRONG_FORWARD,
    correct_backward,
    correct_forward,
    implementation_of,
)

# Rows on which a faulty implementation is right.
_SMALL_MEANS = {"normal", "tiny_var", "huge"}  # nothing cancels if the mean is not large
_LARGE_VARIANCE = {"huge"}  # eps is below the rounding error of the variance
_WITHOUT_XHAT = {"constant_row"}  # xhat is zero, and so are all terms with it

RIGHT_FORWARD: dict[str, set[str]] = {
    "eps outside the root": _LARGE_VARIANCE,
    "no eps": _LARGE_VARIANCE,
    "single-pass variance": _SMALL_MEANS,
    "mean subtracted once": _SMALL_MEANS,
    "x rstd - mean rstd": _SMALL_MEANS,
}
RIGHT_BACKWARD: dict[str, set[str]] = {
    "eps outside the root": _LARGE_VARIANCE,
    "no term for the variance": _WITHOUT_XHAT,
    "term for the variance added": _WITHOUT_XHAT,
    "variance divided by D - 1": _WITHOUT_XHAT,
    "dgamma of the first row alone": _WITHOUT_XHAT,
    "dgamma a mean": _WITHOUT_XHAT,
    "dgamma summed in float16": _WITHOUT_XHAT,
}
# Faults of the scale of xhat. On constant rows, their output is beta, as it should be.
SCALE_FAULTS = {
    "variance divided by D - 1",
    "eps outside the root",
    "single-pass variance",
    "mean subtracted once",
    "x rstd - mean rstd",
    "no residual",
    "no gamma",
    "ten percent too large",
    "beta alone",
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", DISTRIBUTIONS)
@pytest.mark.parametrize("fault", WRONG_FORWARD)
def test_fault_in_the_forward_pass_fails(fault: str, rows: Distribution, dtype: str) -> None:
    implementation = implementation_of(WRONG_FORWARD[fault], correct_backward)
    operands = rounded_to(draw((4, 16), rows), np.dtype(dtype).type)
    forward, backward = judge(operands, {fault: implementation})
    undecided = rows == "constant_row" and fault in SCALE_FAULTS
    expected = None if undecided else rows in RIGHT_FORWARD.get(fault, ())
    assert forward.passes is expected, forward
    assert backward.passes


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", DISTRIBUTIONS)
@pytest.mark.parametrize("fault", WRONG_BACKWARD)
def test_fault_in_the_backward_pass_fails(fault: str, rows: Distribution, dtype: str) -> None:
    implementation = implementation_of(correct_forward, WRONG_BACKWARD[fault])
    operands = rounded_to(draw((4, 16), rows), np.dtype(dtype).type)
    forward, backward = judge(operands, {fault: implementation})
    assert backward.passes is (rows in RIGHT_BACKWARD.get(fault, ())), backward
    assert forward.passes is (None if rows == "constant_row" else True)
