"""Execution of gradient jobs.

This module imports torch, so only the gradient process may import it.
"""

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
from models.gradients.activations import activations, patch, tap_points
from models.gradients.attribution import attribute_together, vjp
from models.gradients.faithfulness import faithfulness
from models.gradients.flow import flow
from models.gradients.inputs import Objective
from models.gradients.layer_norm_trace import norm_names
from models.gradients.maxsim import alignment, maxsim
from models.gradients.objectives import check_objective
from models.gradients.pair import explain_pair
from models.gradients.parity import Served, Tokenized, parity
from models.gradients.reference_model import ReferenceModel
from models.gradients.results import FileHash, TokenGradient, as_dict
from service.debug.job_types import (
    ActivationsJob,
    AttributeJob,
    FlowJob,
    Job,
    LayerNormJob,
    PairJob,
    ParityJob,
    PatchJob,
    Target,
    VjpJob,
    Word,
)
from service.debug.layer_norm_rows import layer_norm_check
from service.debug.replies import MAX_NONFINITE, Completed, Done, JobRefused, NonFinite, Opened
from service.debug.tensor_files import WRITERS

Result = (
    results.Attribution
    | results.PairAttribution
    | results.Flow
    | results.LayerNormCheck
    | results.Parity
    | results.TokenGradient
    | results.Patching
)
JobWithResult = AttributeJob | PairJob | FlowJob | LayerNormJob | ParityJob | VjpJob | PatchJob


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
            layers=dict(self._model.steps),
            norms=norm_names(self._model),
            device=self._device,
            torch=torch.__version__,
            op={
                "forward": implementation(weight),
                "backward": implementation(weight, backward=True),
            },
            taps=tap_points(self._model),
        )

    def run(self, job: Job) -> Completed:
        """Run a job and return its result, its file and the vectors to compare.

        Raises:
            JobRefused: A field of the job is invalid.
        """
        started = time.perf_counter()
        result, file = None, b""
        if isinstance(job, ActivationsJob):
            file = _activations(self._model, job)
        else:
            result = self._result(job)
        fields = {} if result is None else as_dict(result)
        if isinstance(job, AttributeJob):
            fields["words"] = _word_scores(job.words, fields["scores"])
        vectors = b"".join(self._model.vector(row).cpu().numpy().tobytes() for row in job.compare)
        done = Done(
            result=fields,
            nonfinite=nonfinite(fields),
            converged=_has_converged(result),
            wall_ms=1e3 * (time.perf_counter() - started),
        )
        return Completed(done, vectors, file)

    def _result(self, job: JobWithResult) -> Result:
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
                return layer_norm_check(model, job)
            case ParityJob():
                return self._parity(job)
            case VjpJob():
                return _vjp(model, job)
            case PatchJob():
                return _patch(model, job)

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
    entries = _entries(job.target)
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


def _activations(model: ReferenceModel, job: ActivationsJob) -> bytes:
    arrays = {
        f"{index}/{name}": array
        for index, row in enumerate(job.rows)
        for name, array in activations(model, row, job.taps, job.reduction).items()
    }
    return WRITERS[job.format](arrays, job.metadata)


def _patch(model: ReferenceModel, job: PatchJob) -> results.Patching:
    return patch(
        model,
        job.rows,
        job.source_rows,
        _target(model, job.target),
        job.taps,
        job.patches,
        is_each=job.is_each,
        entries=_entries(job.target),
    )


def _flow(model: ReferenceModel, job: FlowJob) -> results.Flow:
    objective = Objective(job.objective, job.vectors)
    try:
        check_objective(objective, len(job.rows), model.network.width)
    except ValueError as error:
        raise JobRefused(str(error), code="objective", pointer="/objective") from None
    return flow(model, job.rows, objective, emulate=job.emulate, loss_scale=job.loss_scale)


def _vjp(model: ReferenceModel, job: VjpJob) -> TokenGradient:
    x, gradient = vjp(model, job.row, job.cotangent, _layer(model, job.layer))  # (L, D)
    reduced: dict[str, Callable[[], torch.Tensor]] = {
        "norm": lambda: gradient.norm(dim=-1),
        "dot": lambda: (gradient * x).sum(-1),
        "full": lambda: gradient,
    }
    return TokenGradient(reduced[job.reduce]().cpu().numpy())


def _layer(model: ReferenceModel, layer_name: str) -> str:
    if layer_name not in model.layer_names:
        raise JobRefused(
            f"unknown layer; the model's layers: {', '.join(model.layer_names)}",
            code="unknown_layer",
            pointer="/layer",
        )
    return layer_name


def _entries(target: Target) -> list[int] | None:
    """Return the vocabulary entries that a job computes; None: all elements of the vectors."""
    return [target.index] if target.type == "sparse" else None


def _target(model: ReferenceModel, target: Target) -> attribution.Target:
    def vector(index: int) -> torch.Tensor:
        return model.vector(target.rows[index])

    weight = model.network.encoder.embeddings.word.weight
    name = model.similarity or "cosine"  # other models do not have the targets that take it
    build: dict[str, Callable[[], attribution.Target]] = {
        "cosine": lambda: attribution.cosine(vector(0)),
        "similarity": lambda: attribution.similarity(name, vector(0), model.normalize),
        "margin": lambda: attribution.margin(name, vector(0), vector(1), model.normalize),
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


def _has_converged(result: Result | None) -> bool:
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
