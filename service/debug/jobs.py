"""What the gradient process does, a function for each kind of job. Here alone torch is imported."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.add_layer_norm import implementation
from models.artifact import Artifact
from models.engines import available_cpus
from models.gradients import attribution
from models.gradients.attribution import Target, attribute, vjp
from models.gradients.budget import Settings
from models.gradients.flow import flow
from models.gradients.integration import Integral
from models.gradients.layer_norm_check import draw, judge, rounded_to
from models.gradients.layer_norm_implementations import Operands
from models.gradients.layer_norm_trace import norm_names, rows_of_layer, trace
from models.gradients.objectives import Objective
from models.gradients.pair import Side, explain_pair
from models.gradients.parity import parity
from models.gradients.twin import Row, Twin
from service.debug.frames import MOST_NONFINITE, Message


class JobRefused(Exception):
    """The twin cannot do what was asked.

    Attributes:
        code: Stable, for programs.
        field: JSON pointer to what is meant.
    """

    def __init__(self, detail: str, code: str, field: str) -> None:
        super().__init__(detail)
        self.code = code
        self.field = field


_opened: dict[str, Any] = {}


def open_twin(path: Path, device: str) -> Message:
    """Open the artifact's twin, and say what it is.

    Raises:
        ArtifactError: It has none, or not that of its graph.
        RuntimeError: The device is not there.
    """
    torch.set_num_threads(available_cpus())
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    artifact = Artifact.load(path)
    twin = Twin.open(artifact, device)
    _opened.update(artifact=artifact, twin=twin)
    word = twin.model.encoder.embeddings.word.weight
    return {
        "points": twin.points,
        "norms": norm_names(twin),
        "device": device,
        "torch": torch.__version__,
        "op": {
            "forward": implementation(word),
            "backward": implementation(word, backward=True),
        },
    }


def run(job: Message) -> Message:
    """Return the answer to a job, and the twin's vectors of the rows that it compares.

    Raises:
        JobRefused: The twin cannot do what was asked.
    """
    twin: Twin = _opened["twin"]
    answer = JOBS[job["kind"]](twin, job)
    vectors = [twin.vector(Row(**row)).cpu().numpy() for row in job["compare"]]
    return {"answer": answer, "nonfinite": nonfinite(answer), "vectors": vectors}


def _attribute(twin: Twin, job: Message) -> Message:
    found = attribute(
        twin,
        Row(**job["row"]),
        _target(twin, job["target"]),
        method=job["method"],
        point=_point(twin, job["point"]),
        baseline=job["baseline"],
        settings=Settings(**job["settings"]),
    )
    return {
        "scores": found.scores,
        "value": found.value,
        "baseline_value": found.baseline_value,
        "sum": found.scores.sum(),
        "completeness": found.integral
        and _completeness(found.integral, found.integral.delta.item()),
        "path": found.integral
        and [[place, value[0]] for place, value in zip(*found.integral.path, strict=True)],
    }


def _pair(twin: Twin, job: Message) -> Message:
    sides = [Side(Row(**job[name]["row"]), job[name]["baseline"]) for name in ("a", "b")]
    found = explain_pair(
        twin,
        *sides,
        point=_point(twin, job["point"]),
        tolerance=job["tolerance"],
        max_evaluations=job["max_evaluations"],
    )
    return {
        "matrix": found.matrix,
        "sum": found.matrix.sum(),
        "cosine": found.cosine,
        "reference_terms": {
            "a_baseline": found.a_baseline,
            "baseline_b": found.baseline_b,
            "baselines": found.baselines,
        },
        "delta": found.delta,
        "completeness": [
            _completeness(integral, float(np.linalg.norm(integral.delta)))
            for integral in found.integrals
        ],
    }


def _completeness(integral: Integral, delta: float) -> Message:
    return {
        "delta": delta,
        "error": integral.error,
        "allowed": integral.allowed,
        "converged": integral.converged,
        "evaluations": integral.evaluations,
    }


def _vjp(twin: Twin, job: Message) -> Message:
    point = _point(twin, job["point"])
    x, gradient = vjp(twin, Row(**job["row"]), job["cotangent"], point)  # (L, D)
    reduced: dict[str, Callable[[], torch.Tensor]] = {
        "norm": lambda: gradient.norm(dim=-1),
        "dot": lambda: (gradient * x).sum(-1),
        "full": lambda: gradient,
    }
    return {"gradient": reduced[job["reduce"]]().cpu().numpy()}


def _flow(twin: Twin, job: Message) -> Message:
    try:
        found = flow(
            twin,
            [Row(**row) for row in job["rows"]],
            Objective(job["objective"], job["vectors"]),
            emulate=job["emulate"],
            loss_scale=job["loss_scale"],
        )
    except ValueError as error:
        raise JobRefused(str(error), code="objective", field="/objective") from None
    first = found.first_nonfinite
    return {
        "objective": found.objective,
        "places": [asdict(place) for place in found.places],
        "first_nonfinite": first and asdict(first),
        "nonfinite_places": [asdict(place) for place in found.nonfinite],
        "verdicts": [asdict(verdict) for verdict in found.verdicts],
    }


def _parity(twin: Twin, job: Message) -> Message:
    rows = [Row(**row) for row in job["rows"]] or None
    found = parity(_opened["artifact"], twin, rows)
    return {**asdict(found), "passes": found.passes, "failures": found.failures}


def _layer_norm(twin: Twin, job: Message) -> Message:
    source, seed = job["source"], job["seed"]
    try:
        if source["type"] == "random":
            operands, dout = draw(source["shape"], source["distribution"], seed)
        else:
            operands = _operands(twin, source)
            dout = np.random.default_rng(seed).normal(size=operands.x.shape)
        if job["dout"] == "ones":
            dout = np.ones_like(dout)
        if job["row"] is not None and job["row"] >= len(operands.x):
            raise JobRefused(
                f"there are rows 0 to {len(operands.x) - 1}", code="no_such_row", field="/row"
            )
        traced = trace(operands, dout, row=job["row"])
        verdicts = judge(*rounded_to(operands, dout, np.dtype(job["dtype"]).type))
    except ValueError as error:
        raise JobRefused(str(error), code="source", field="/source") from None
    return {
        "passes": all(verdict.passes is not False for verdict in verdicts),
        "steps": [asdict(step) for step in traced.steps],
        "invariants": [asdict(invariant) for invariant in traced.invariants],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def _operands(twin: Twin, source: Message) -> Operands:
    if source["type"] == "text":
        names = norm_names(twin)
        if source["norm"] not in names:
            raise JobRefused(
                f"the model has no such norm; it has: {', '.join(names)}",
                code="unknown_norm",
                field="/source/norm",
            )
        return rows_of_layer(twin, Row(**source["row"]), source["norm"])
    for name in ("x", "residual"):
        if len({len(row) for row in source[name] or ()}) > 1:
            raise ValueError(f"the rows of {name} are not equally long")
    given = {
        name: np.array(source[name], np.float64)
        for name in ("x", "residual", "gamma", "beta")
        if source[name] is not None
    }
    D = given["x"].shape[-1]
    return Operands(
        given["x"],
        given.get("residual"),
        given.get("gamma", np.ones(D)),
        given.get("beta", np.zeros(D)),
        source["eps"],
    )


JOBS: dict[str, Callable[[Twin, Message], Message]] = {
    "attribute": _attribute,
    "pair": _pair,
    "flow": _flow,
    "layer_norm": _layer_norm,
    "parity": _parity,
    "vjp": _vjp,
}


def _point(twin: Twin, point: str) -> str:
    if point not in twin.points:
        raise JobRefused(
            f"the model has no such point; it has: {', '.join(twin.points)}",
            code="unknown_point",
            field="/point",
        )
    return point


def _target(twin: Twin, target: Message) -> Target:
    def vector(name: str) -> torch.Tensor:
        return twin.vector(Row(**target[name]))

    weight = twin.model.encoder.embeddings.word.weight
    build: dict[str, Callable[[], Target]] = {
        "cosine": lambda: attribution.cosine(vector("row")),
        "margin": lambda: attribution.margin(vector("positive"), vector("negative")),
        "dot": lambda: attribution.dot(weight.new_tensor(target["vector"]), twin.normalize),
        "dim": lambda: attribution.dim(target["index"], twin.normalize),
        "norm": attribution.norm,
    }
    return build[target["type"]]()


def nonfinite(answer: Message) -> list[Message]:
    """Return where an answer has numbers that JSON has not, and which; the first of them."""
    found: list[Message] = []
    for pointer, value in _numbers(answer, ""):
        if not math.isfinite(value):
            kind = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
            found.append({"pointer": pointer, "kind": kind})
            if len(found) == MOST_NONFINITE:
                break
    return found


def _numbers(value: Any, pointer: str) -> Iterator[tuple[str, float]]:  # noqa: ANN401 - JSON
    if isinstance(value, float):
        yield pointer, value
    elif isinstance(value, np.ndarray):
        for index in np.argwhere(~np.isfinite(value)):
            yield f"{pointer}/{'/'.join(map(str, index))}", float(value[tuple(index)])
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{pointer}/{name}")
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _numbers(inner, f"{pointer}/{place}")
