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

RIGHT_FORWARD: dict[str, set[str]] = {
    "eps outside the root": _LARGE_VARIANCE,
    "no eps": _LARGE_VARIANCE,
    "single-pass variance": _SMALL_MEANS,
    "mean subtracted once": _SMALL_MEANS,
    "x rstd - mean rstd": _SMALL_MEANS,
}
RIGHT_BACKWARD: dict[str, set[str]] = {
    "eps outside the root": _LARGE_VARIANCE,
}
# Faults in terms with xhat, which is zero on constant rows: out is beta and dgamma zero, as they
# should be, and there is no verdict.
FAULTS_OF_XHAT = {
    "no term for the variance",
    "term for the variance added",
    "dgamma of the first row alone",
    "dgamma a mean",
    "dgamma summed in float16",
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
    undecided = rows == "constant_row" and fault in FAULTS_OF_XHAT
    expected = None if undecided else rows in RIGHT_FORWARD.get(fault, ())
    assert forward.passes is expected, forward
    assert backward.passes is (None if rows == "constant_row" else True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", DISTRIBUTIONS)
@pytest.mark.parametrize("fault", WRONG_BACKWARD)
def test_fault_in_the_backward_pass_fails(fault: str, rows: Distribution, dtype: str) -> None:
    implementation = implementation_of(correct_forward, WRONG_BACKWARD[fault])
    operands = rounded_to(draw((4, 16), rows), np.dtype(dtype).type)
    forward, backward = judge(operands, {fault: implementation})
    undecided = rows == "constant_row" and fault in FAULTS_OF_XHAT - {"eps outside the root"}
    expected = None if undecided else rows in RIGHT_BACKWARD.get(fault, ())
    assert backward.passes is expected, backward
    assert forward.passes is (None if rows == "constant_row" else True)
