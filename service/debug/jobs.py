"""Execution of gradient jobs. This is the only module of the service that imports torch."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.add_layer_norm import implementation
from models.artifact import Artifact
from models.engines import available_cpus
from models.export.tokenizer_file import tokenizer_of_source
from models.gradients import attribution, results
from models.gradients.attribution import attribute_together, vjp
from models.gradients.faithfulness import faithfulness
from models.gradients.flow import flow
from models.gradients.inputs import Objective
from models.gradients.layer_norm_check import judge, judge_candidate
from models.gradients.layer_norm_operands import (
    Operands,
    draw,
    rounded_to,
    with_random_gradients,
)
from models.gradients.layer_norm_trace import norm_names, norm_operands, trace
from models.gradients.maxsim import alignment, maxsim
from models.gradients.pair import explain_pair
from models.gradients.parity import Served, Tokenized, parity
from models.gradients.reference_model import ReferenceModel
from models.gradients.results import FileHash, LayerNormCheck, TokenGradient, as_dict
from service.debug.messages import (
    MAX_NONFINITE,
    AttributeJob,
    Done,
    FlowJob,
    Job,
    LayerNormJob,
    NonFinite,
    NormOfRow,
    Opened,
    PairJob,
    ParityJob,
    Target,
    VjpJob,
    Word,
)
from service.debug.request_models import Candidate, GivenRows, RandomRows

Result = (
    results.Attribution
    | results.PairAttribution
    | results.Flow
    | results.LayerNormCheck
    | results.Parity
    | results.TokenGradient
)


class JobRefused(Exception):
    """A field of the job is invalid, such as a layer that the reference model does not have.

    Attributes:
        code: Error code for the HTTP response.
        pointer: JSON pointer to the invalid field of the request.
    """

    def __init__(self, detail: str, code: str, pointer: str) -> None:
        super().__init__(detail)
        self.code = code
        self.pointer = pointer


class Jobs:
    """Runs gradient jobs on the reference model of an artifact.

    Args:
        path: Folder of the artifact.
        device: Device of the reference model, such as "cpu" or "cuda". "auto" selects "cuda" if it
            is available, otherwise "cpu".

    Raises:
        ArtifactError: The artifact cannot be loaded, it has no reference model, or the weights of
            its reference model differ from the weights of its graph.
        CheckpointError: The files of the reference model cannot be loaded.
        RuntimeError: The device is not available.
    """

    def __init__(self, path: Path, device: str) -> None:
        torch.set_num_threads(available_cpus())
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = device
        self._artifact = Artifact.load(path)
        self._model = ReferenceModel.open(self._artifact, device)

    def describe(self) -> Opened:
        """Return the layers, norms, device, PyTorch version and kernels of the reference model."""
        weight = self._model.network.encoder.embeddings.word.weight
        return Opened(
            layers=self._model.layer_names,
            norms=norm_names(self._model),
            device=self._device,
            torch=torch.__version__,
            op={
                "forward": implementation(weight),
                "backward": implementation(weight, backward=True),
            },
        )

    def run(self, job: Job) -> Done:
        """Run a job and return its result.

        Raises:
            JobRefused: A field of the job is invalid.
        """
        started = time.perf_counter()
        result = self._result(job)
        fields = as_dict(result)
        if isinstance(job, AttributeJob):
            fields["words"] = _word_scores(job.words, fields["scores"])
        return Done(
            result=fields,
            nonfinite=nonfinite(fields),
            converged=_has_converged(result),
            vectors=[
                vector
                for row in job.compare
                for vector in self._model.vector(row).view(-1, self._model.network.width).tolist()
            ],
            wall_ms=1e3 * (time.perf_counter() - started),
        )

    def _result(self, job: Job) -> Result:
        model = self._model
        match job:
            case AttributeJob():
                return _attribute(model, job)
            case PairJob():
                return explain_pair(
                    model,
                    job.a,
                    job.b,
                    layer_name=_layer(model, job.layer),
                    tolerance=job.tolerance,
                    max_evaluations=job.max_evaluations,
                )
            case FlowJob():
                return _flow(model, job)
            case LayerNormJob():
                return _layer_norm(model, job)
            case ParityJob():
                return self._parity(job)
            case VjpJob():
                return _vjp(model, job)

    def _parity(self, job: ParityJob) -> results.Parity:
        served = Served(job.engine, job.precision, np.array(job.vectors, np.float32))
        tokenized = [
            Tokenized(text, ids, recorded)
            for (text, ids), recorded in zip(job.check_texts, job.check_rows, strict=True)
        ]
        tokenized += [
            Tokenized(text, ids, self._tokenizer.encode(text).ids) for text, ids in job.texts
        ]
        files = [FileHash(*file) for file in job.files]
        return parity(self._artifact, self._model, job.rows, served, files, tokenized)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return tokenizer_of_source(self._artifact)


def _attribute(model: ReferenceModel, job: AttributeJob) -> results.Attribution:
    target = _target(model, job.target)
    entries = [job.target.index] if job.target.type == "sparse" else None
    result = attribute_together(
        model,
        job.sides,
        target,
        method=job.method,
        layer_name=_layer(model, job.layer),
        options=job.options,
        entries=entries,
    )
    rows = [side.row for side in job.sides]
    if job.units is not None:
        seed, scores = job.options.seed, result.scores
        measured = faithfulness(model, rows, target, job.units, scores, seed=seed, entries=entries)
        result = replace(result, faithfulness=measured)
    if job.target.type == "maxsim":
        result = replace(result, alignment=alignment(model, rows[0], rows[1:]))
    return result


def _flow(model: ReferenceModel, job: FlowJob) -> results.Flow:
    objective = Objective(job.objective, job.vectors)
    try:
        return flow(model, job.rows, objective, emulate=job.emulate, loss_scale=job.loss_scale)
    except ValueError as error:
        raise JobRefused(str(error), code="objective", pointer="/objective") from None


def _vjp(model: ReferenceModel, job: VjpJob) -> TokenGradient:
    x, gradient = vjp(model, job.row, job.cotangent, _layer(model, job.layer))  # (L, D)
    reduced: dict[str, Callable[[], torch.Tensor]] = {
        "norm": lambda: gradient.norm(dim=-1),
        "dot": lambda: (gradient * x).sum(-1),
        "full": lambda: gradient,
    }
    return TokenGradient(reduced[job.reduce]().cpu().numpy())


def _layer_norm(model: ReferenceModel, job: LayerNormJob) -> LayerNormCheck:
    operands = _operands(model, job)
    N = len(operands.x)
    if job.row is not None and job.row >= N:
        raise JobRefused(
            f"row {job.row} does not exist; the rows are 0 to {N - 1}",
            code="no_such_row",
            pointer="/row",
        )
    traced = trace(operands, row=job.row)
    dtype = np.dtype(job.dtype).type
    rounded = rounded_to(operands, dtype)
    candidate = job.source.candidate if isinstance(job.source, GivenRows) else None
    if candidate is None:
        verdicts = judge(rounded)
    else:
        results = {n: np.array(r, dtype) for n, r in candidate if r is not None}
        verdicts = judge_candidate(rounded, results)
    return LayerNormCheck(traced.steps, traced.invariants, verdicts)


def _operands(model: ReferenceModel, job: LayerNormJob) -> Operands:
    match job.source:
        case RandomRows(shape=(N, D), distribution=distribution, kind=kind):
            try:
                centred = kind == "layer_norm"
                operands = draw((N, D), distribution, job.seed, centred=centred)
            except ValueError as error:
                raise JobRefused(str(error), code="source", pointer="/source/shape") from None
        case NormOfRow(row=row, norm=norm):
            names = norm_names(model)
            if norm not in names:
                raise JobRefused(
                    f"unknown norm; the model's norms: {', '.join(names)}",
                    code="unknown_norm",
                    pointer="/source/norm",
                )
            operands = norm_operands(model, row, norm)
        case GivenRows():
            source = job.source
            _check_given(source)
            if source.candidate is not None:
                _check_candidate(source, source.candidate, random_dout=job.dout == "random")
            operands = _given(source)
            if source.dout is not None:
                return operands
    if job.dout == "ones":
        return operands._replace(dout=np.ones_like(operands.x), dsum=None)
    return with_random_gradients(operands, np.random.default_rng(job.seed))


def _check_given(source: GivenRows) -> None:
    N, D = len(source.x), len(source.x[0])
    fields = [(f"/source/{name}", value) for name, value in source]
    fields += [(f"/source/candidate/{name}", value) for name, value in source.candidate or ()]
    for pointer, value in fields:
        name = pointer.rpartition("/")[2]
        match value:
            case [list(), *_]:
                if len(value) != N or {len(row) for row in value} != {D}:
                    raise _source_refused(
                        f"{name} must have {N} rows of {D} numbers each: the number of rows in x, "
                        "and the length of the first row of x",
                        pointer,
                    )
            case list():
                if len(value) != D:
                    raise _source_refused(
                        f"{name} has {len(value)} numbers; it must have {D}, the width of x",
                        pointer,
                    )
    if source.kind == "rms_norm":
        for pointer, value in fields:
            if pointer.endswith("beta") and value is not None:
                raise _source_refused("RMS norm has no beta; omit it", pointer)
    if source.dsum is not None and (source.dout is None or source.residual is None):
        raise _source_refused("dsum requires residual and dout in source", "/source/dsum")


def _check_candidate(source: GivenRows, candidate: Candidate, *, random_dout: bool) -> None:
    names = {name for name, value in candidate if value is not None}
    if not names:
        raise _source_refused(
            "candidate has no results; set at least one of out, sum, dx, dresidual, dgamma and "
            "dbeta",
            "/source/candidate",
        )
    for name in ("sum", "dresidual"):
        if name in names and source.residual is None:
            raise _source_refused(
                f"{name} requires residual in source", f"/source/candidate/{name}"
            )
    if random_dout and source.dout is None and names - {"out", "sum"}:
        raise _source_refused(
            "gradients in candidate require the dout from which they were computed; set dout in "
            "source, or the dout of the request to 'ones'",
            "/source/dout",
        )


def _source_refused(detail: str, pointer: str) -> JobRefused:
    return JobRefused(detail, code="source", pointer=pointer)


def _given(source: GivenRows) -> Operands:
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


def _layer(model: ReferenceModel, layer_name: str) -> str:
    if layer_name not in model.layer_names:
        raise JobRefused(
            f"unknown layer; the model's layers: {', '.join(model.layer_names)}",
            code="unknown_layer",
            pointer="/layer",
        )
    return layer_name


def _target(model: ReferenceModel, target: Target) -> attribution.Target:
    def vector(index: int) -> torch.Tensor:
        return model.vector(target.rows[index])

    weight = model.network.encoder.embeddings.word.weight
    build: dict[str, Callable[[], attribution.Target]] = {
        "cosine": lambda: attribution.cosine(vector(0)),
        "margin": lambda: attribution.margin(vector(0), vector(1)),
        "dot": lambda: attribution.dot(weight.new_tensor(target.vector), model.normalize),
        "dim": lambda: attribution.dim(target.index, model.normalize),
        "norm": attribution.norm,
        "score": attribution.score,
        "label": lambda: attribution.label(target.index, target.versus),
        # The only entry that the job computes.
        "sparse": lambda: attribution.dim(0, normalize=False),
        "maxsim": lambda: maxsim(model.normalize),
    }
    return build[target.type]()


def _word_scores(words: Sequence[Word], scores: NDArray[np.float64]) -> list[dict[str, Any]]:
    """Return the fields of each word, with the sum of its tokens' scores.

    Args:
        words: Words of the text.
        scores: Score of each token, `(L,)`.
    """
    return [{**asdict(word), "score": float(scores[list(word.tokens)].sum())} for word in words]


def _has_converged(result: Result) -> bool:
    match result:
        case results.Attribution(completeness=completeness):
            return completeness is None or completeness.converged
        case results.PairAttribution(completeness=integrals):
            return all(integral.converged for integral in integrals)
    return True


def nonfinite(result: dict[str, Any]) -> list[NonFinite]:
    """Return the first non-finite numbers of a result, at most `MAX_NONFINITE`."""
    numbers: list[NonFinite] = []
    for pointer, value in _numbers(result, ""):
        if not math.isfinite(value):
            infinity: Literal["inf", "-inf"] = "inf" if value > 0 else "-inf"
            numbers.append(NonFinite(pointer, "nan" if math.isnan(value) else infinity))
            if len(numbers) == MAX_NONFINITE:
                break
    return numbers


def _numbers(value: Any, pointer: str) -> Iterator[tuple[str, float]]:  # noqa: ANN401 - JSON
    if isinstance(value, float):
        yield pointer, value
    elif isinstance(value, np.ndarray):
        for index in np.argwhere(~np.isfinite(value)):
            yield f"{pointer}/{'/'.join(map(str, index))}", float(value[tuple(index)])
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{pointer}/{name}")
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from _numbers(inner, f"{pointer}/{position}")
