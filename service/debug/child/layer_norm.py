"""Check of add + norm on the rows of a job: of the caller, at random, or of a norm of the model."""

import numpy as np

from models.gradients.layer_norm_check import judge, judge_candidate
from models.gradients.layer_norm_operands import (
    Operands,
    draw,
    rounded_to,
    with_random_gradients,
)
from models.gradients.layer_norm_trace import norm_names, norm_operands, trace
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.layer_norm import LayerNormCheck
from service.debug.layer_norm import Candidate, GivenRows, LayerNormJob, NormOfText, RandomRows
from service.inference.errors import InvalidInput


def layer_norm_check(model: ReferenceModel, job: LayerNormJob) -> LayerNormCheck:
    """Check add + norm on the rows of a job.

    Raises:
        InvalidInput: A field of the source, the name of the norm, or the row is invalid.
    """
    request = job.request
    operands = _operands(model, job)
    N = len(operands.x)
    if request.row is not None and request.row >= N:
        raise InvalidInput(
            f"row {request.row} does not exist; the rows are 0 to {N - 1}",
            code="no_such_row",
            pointer="/row",
        )
    traced = trace(operands, row=request.row)
    dtype = np.dtype(request.dtype).type
    rounded = rounded_to(operands, dtype)
    candidate = request.source.candidate if isinstance(request.source, GivenRows) else None
    if candidate is None:
        verdicts = judge(rounded)
    else:
        results = {n: np.array(r, dtype) for n, r in candidate if r is not None}
        verdicts = judge_candidate(rounded, results)
    return LayerNormCheck(traced.steps, traced.invariants, verdicts)


def _operands(model: ReferenceModel, job: LayerNormJob) -> Operands:
    request = job.request
    match request.source:
        case RandomRows(shape=(N, D), distribution=distribution, kind=kind):
            try:
                centred = kind == "layer_norm"
                operands = draw((N, D), distribution, request.seed, centred=centred)
            except ValueError as error:
                raise InvalidInput(str(error), code="source", pointer="/source/shape") from None
        case NormOfText(norm=norm):
            names = norm_names(model)
            if norm not in names:
                raise InvalidInput(
                    f"unknown norm; the model's norms: {', '.join(names)}",
                    code="unknown_norm",
                    pointer="/source/norm",
                )
            operands = norm_operands(model, job.rows[0], norm)
        case GivenRows() as source:
            _check_rows(source)
            if source.candidate is not None:
                _check_candidate(source, source.candidate, random_dout=request.dout == "random")
            operands = _operands_of_rows(source)
            if source.dout is not None:
                return operands
    if request.dout == "ones":
        return operands._replace(dout=np.ones_like(operands.x), dsum=None)
    return with_random_gradients(operands, np.random.default_rng(request.seed))


def _check_rows(source: GivenRows) -> None:
    N, D = len(source.x), len(source.x[0])
    fields = [(f"/source/{name}", value) for name, value in source]
    fields += [(f"/source/candidate/{name}", value) for name, value in source.candidate or ()]
    for pointer, value in fields:
        name = pointer.rpartition("/")[2]
        match value:
            case [list(), *_]:
                if len(value) != N or {len(row) for row in value} != {D}:
                    raise _invalid_source(
                        f"{name} must have {N} rows of {D} numbers each: the number of rows in x, "
                        "and the length of the first row of x",
                        pointer,
                    )
            case list():
                if len(value) != D:
                    raise _invalid_source(
                        f"{name} has {len(value)} numbers; it must have {D}, the width of x",
                        pointer,
                    )
    if source.kind == "rms_norm":
        for pointer, value in fields:
            if pointer.endswith("beta") and value is not None:
                raise _invalid_source("RMS norm has no beta; omit it", pointer)
    if source.dsum is not None and (source.dout is None or source.residual is None):
        raise _invalid_source("dsum requires residual and dout in source", "/source/dsum")


def _check_candidate(source: GivenRows, candidate: Candidate, *, random_dout: bool) -> None:
    names = {name for name, value in candidate if value is not None}
    if not names:
        raise _invalid_source(
            "candidate has no results; set at least one of out, sum, dx, dresidual, dgamma and "
            "dbeta",
            "/source/candidate",
        )
    for name in ("sum", "dresidual"):
        if name in names and source.residual is None:
            raise _invalid_source(
                f"{name} requires residual in source", f"/source/candidate/{name}"
            )
    if random_dout and source.dout is None and names - {"out", "sum"}:
        raise _invalid_source(
            "gradients in candidate require the dout from which they were computed; set dout in "
            "source, or the dout of the request to 'ones'",
            "/source/dout",
        )


def _invalid_source(detail: str, pointer: str) -> InvalidInput:
    return InvalidInput(detail, code="source", pointer=pointer)


def _operands_of_rows(source: GivenRows) -> Operands:
    x = np.array(source.x, np.float64)
    D = x.shape[1]
    return Operands(
        x,
        None if source.residual is None else np.array(source.residual, np.float64),
        np.ones(D) if source.gamma is None else np.array(source.gamma, np.float64),
        np.zeros(D) if source.beta is None else np.array(source.beta, np.float64),
        source.eps,
        np.ones_like(x) if source.dout is None else np.array(source.dout, np.float64),
        None if source.dsum is None else np.array(source.dsum, np.float64),
        source.kind == "layer_norm",
    )
