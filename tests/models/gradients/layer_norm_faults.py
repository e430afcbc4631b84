"""A correct add + LayerNorm in numpy, and variants of it with one fault each."""

from collections.abc import Callable

import numpy as np

from models.add_layer_norm.reference import Array
from models.gradients.layer_norm_implementations import PassOutcome
from models.gradients.layer_norm_operands import Operands

Outputs = dict[str, Array]
Gradients = dict[str, Array | None]
Forward = Callable[[Operands], Outputs]
Backward = Callable[[Operands], Gradients]


def implementation_of(forward: Forward, backward: Backward) -> Callable[[Operands], PassOutcome]:
    return lambda operands: PassOutcome(forward(operands), backward(operands))


# Forward pass.


def total_of(operands: Operands) -> Array:
    return operands.x if operands.residual is None else operands.x + operands.residual


def centred(operands: Operands) -> Array:
    rows = total_of(operands) - total_of(operands).mean(-1, keepdims=True)
    rows -= rows.mean(-1, keepdims=True)
    return rows


def variance(operands: Operands) -> Array:
    """Return the biased variance, `(N, 1)`."""
    result: Array = np.square(centred(operands)).mean(-1, keepdims=True)
    return result


def rstd(operands: Operands) -> Array:
    result: Array = 1 / np.sqrt(variance(operands) + operands.eps)
    return result


def unbiased_rstd(operands: Operands) -> Array:
    D = operands.x.shape[-1]
    result: Array = 1 / np.sqrt(variance(operands) * D / (D - 1) + operands.eps)
    return result


def rstd_with_eps_outside(operands: Operands) -> Array:
    result: Array = 1 / (np.sqrt(variance(operands)) + operands.eps)
    return result


def outputs(operands: Operands, out: Array) -> Outputs:
    total = {} if operands.residual is None else {"sum": total_of(operands)}
    return {"out": out, **total}


def scaled(operands: Operands, xhat: Array) -> Outputs:
    return outputs(operands, operands.gamma * xhat + operands.beta)


def correct_forward(operands: Operands) -> Outputs:
    return scaled(operands, centred(operands) * rstd(operands))


def single_pass_variance(operands: Operands) -> Outputs:
    total = total_of(operands)
    var = np.square(total).mean(-1, keepdims=True) - np.square(total.mean(-1, keepdims=True))
    return scaled(operands, centred(operands) / np.sqrt(var + operands.eps))


def centred_once(operands: Operands) -> Outputs:
    total = total_of(operands)
    return scaled(operands, (total - total.mean(-1, keepdims=True)) * rstd(operands))


def difference_of_products(operands: Operands) -> Outputs:
    total, ivar = total_of(operands), rstd(operands)
    return scaled(operands, total * ivar - total.mean(-1, keepdims=True) * ivar)


def last_element_skipped(operands: Operands) -> Outputs:
    made = correct_forward(operands)
    made["out"][:, -1] = 0
    return made


def last_row_skipped(operands: Operands) -> Outputs:
    made = correct_forward(operands)
    made["out"][-1] = np.nan
    return made


def statistics_of_the_first_row(operands: Operands) -> Outputs:
    rows = total_of(operands) - total_of(operands)[:1].mean(-1, keepdims=True)
    return scaled(operands, rows * rstd(operands)[:1])


def statistics_over_rows(operands: Operands) -> Outputs:
    rows = total_of(operands) - total_of(operands).mean(0)
    return scaled(operands, rows / np.sqrt(np.square(rows).mean(0) + operands.eps))


def swapped_parameters(operands: Operands) -> Outputs:
    return correct_forward(operands._replace(gamma=operands.beta, beta=operands.gamma))


def rounded_to_float16(values: Array) -> Array:
    return values.astype(np.float16).astype(values.dtype)


def with_sum(made: Outputs, total: Array) -> Outputs:
    return {**made, "sum": total}


WRONG_FORWARD: dict[str, Forward] = {
    "variance divided by D - 1": lambda o: scaled(o, centred(o) * unbiased_rstd(o)),
    "eps outside the root": lambda o: scaled(o, centred(o) * rstd_with_eps_outside(o)),
    "no eps": lambda o: scaled(o, centred(o) / np.sqrt(variance(o))),
    "single-pass variance": single_pass_variance,
    "mean subtracted once": centred_once,
    "x rstd - mean rstd": difference_of_products,
    "no mean subtracted": lambda o: scaled(o, total_of(o) * rstd(o)),
    "no residual": lambda o: with_sum(correct_forward(o._replace(residual=0 * o.x)), total_of(o)),
    "gamma and beta swapped": swapped_parameters,
    "no gamma": lambda o: correct_forward(o._replace(gamma=np.ones_like(o.gamma))),
    "no beta": lambda o: correct_forward(o._replace(beta=np.zeros_like(o.beta))),
    "ten percent too large": lambda o: correct_forward(
        o._replace(gamma=o.gamma * o.gamma.dtype.type(1.1))
    ),
    "beta alone": lambda o: outputs(o, np.broadcast_to(o.beta, o.x.shape)),
    "all zeros": lambda o: outputs(o, np.zeros_like(o.x)),
    "last element of each row skipped": last_element_skipped,
    "last row skipped": last_row_skipped,
    "statistics of the first row": statistics_of_the_first_row,
    "statistics over the rows": statistics_over_rows,
    "sum without the residual": lambda o: with_sum(correct_forward(o), o.x),
    "sum before normalisation replaced by out": lambda o: with_sum(
        correct_forward(o), correct_forward(o)["out"]
    ),
    "sum rounded to float16": lambda o: with_sum(
        correct_forward(o), rounded_to_float16(total_of(o))
    ),
}


# Backward pass.


def gradients(
    operands: Operands, ivar: Array, mean: float = 1.0, along: float = 1.0, dsum: float = 1.0
) -> dict[str, Array]:
    """Return the gradients; a factor other than 1 is a fault in its term of dx."""
    xhat = centred(operands) * ivar
    dxhat = operands.dout * operands.gamma
    terms = mean * dxhat.mean(-1, keepdims=True)
    terms = terms + along * xhat * (dxhat * xhat).mean(-1, keepdims=True)
    dx = ivar * (dxhat - terms)
    if operands.dsum is not None:
        dx = dx + dsum * operands.dsum
    dgamma = (operands.dout * xhat).sum(0)
    made = {"dx": dx, "dgamma": dgamma, "dbeta": operands.dout.sum(0)}
    return made if operands.residual is None else {**made, "dresidual": dx}


def correct_gradients(operands: Operands) -> dict[str, Array]:
    return gradients(operands, rstd(operands))


def correct_backward(operands: Operands) -> Gradients:
    return {**correct_gradients(operands)}


def changed(operands: Operands, **values: Array | None) -> Gradients:
    return {**correct_gradients(operands), **values}


def wrong_dx(operands: Operands, dx: Array) -> Gradients:
    return changed(operands, dx=dx, dresidual=dx)


def each_element_alone(operands: Operands) -> Gradients:
    D = operands.x.shape[-1]
    dx = operands.dout * operands.gamma * rstd(operands) * (1 - 1 / D)
    return wrong_dx(operands, dx if operands.dsum is None else dx + operands.dsum)


def last_column_skipped(operands: Operands) -> Gradients:
    dx = correct_gradients(operands)["dx"].copy()
    dx[:, -1] = 0
    return wrong_dx(operands, dx)


def swapped_gradients(operands: Operands) -> Gradients:
    right = correct_gradients(operands)
    return changed(operands, dgamma=right["dbeta"], dbeta=right["dgamma"])


WRONG_BACKWARD: dict[str, Backward] = {
    "no term for the mean": lambda o: {**gradients(o, rstd(o), mean=0)},
    "no term for the variance": lambda o: {**gradients(o, rstd(o), along=0)},
    "term for the variance added": lambda o: {**gradients(o, rstd(o), along=-1)},
    "variance divided by D - 1": lambda o: {**gradients(o, unbiased_rstd(o))},
    "eps outside the root": lambda o: {**gradients(o, rstd_with_eps_outside(o))},
    "dx without gamma": lambda o: wrong_dx(
        o, correct_gradients(o._replace(gamma=np.ones_like(o.gamma)))["dx"]
    ),
    "dx of each element alone": each_element_alone,
    "last column of dx skipped": last_column_skipped,
    "sign of dx flipped": lambda o: wrong_dx(o, -correct_gradients(o)["dx"]),
    "dresidual halved": lambda o: changed(o, dresidual=correct_gradients(o)["dx"] / 2),
    "dresidual zero": lambda o: changed(o, dresidual=np.zeros_like(o.x)),
    "dsum ignored": lambda o: {**gradients(o, rstd(o), dsum=0)},
    "dsum added twice": lambda o: {**gradients(o, rstd(o), dsum=2)},
    "dsum in dx only": lambda o: changed(o, dresidual=gradients(o, rstd(o), dsum=0)["dx"]),
    "dgamma of out in place of xhat": lambda o: changed(
        o, dgamma=(o.dout * correct_forward(o)["out"]).sum(0)
    ),
    "dgamma of the first row alone": lambda o: changed(
        o, dgamma=(o.dout * centred(o) * rstd(o))[0]
    ),
    "dgamma a mean": lambda o: changed(o, dgamma=correct_gradients(o)["dgamma"] / len(o.x)),
    "dgamma summed in float16": lambda o: changed(
        o, dgamma=rounded_to_float16(o.dout * centred(o) * rstd(o)).sum(0)
    ),
    "dbeta without the last row": lambda o: changed(o, dbeta=o.dout[:-1].sum(0)),
    "dgamma and dbeta swapped": swapped_gradients,
    "dx missing": lambda o: changed(o, dx=None),
    "dresidual missing": lambda o: changed(o, dresidual=None),
    "dgamma missing": lambda o: changed(o, dgamma=None),
    "dbeta missing": lambda o: changed(o, dbeta=None),
}
