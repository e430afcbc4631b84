"""Execution of gradient jobs: a function of the reference model for each kind."""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import ConfigDict, Discriminator, TypeAdapter
from tokenizers import Tokenizer

from models.add_layer_norm import implementation
from models.artifact import Artifact
from models.engines import available_cpus
from models.export.tokenizer_file import tokenizer_of_source
from models.gradients.activations import activations, patch, tap_points
from models.gradients.attribution import attribute, vjp
from models.gradients.faithfulness import faithfulness
from models.gradients.flow import flow
from models.gradients.inputs import Objective, Side
from models.gradients.layer_norm_trace import norm_names
from models.gradients.maxsim import alignment
from models.gradients.objectives import check_objective
from models.gradients.pair import explain_pair
from models.gradients.parity import Served, Tokenized, parity
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.attribution import Attribution, PairAttribution, TokenGradient
from models.gradients.results.flow import Flow
from models.gradients.results.json_form import as_dict
from models.gradients.results.parity import ParityCheck
from models.gradients.results.patching import Patching
from service.debug.activations import ActivationsJob
from service.debug.attribute import AttributeJob
from service.debug.child.layer_norm import layer_norm_check
from service.debug.child.target import rows_of, target_function
from service.debug.child.tensor_files import WRITERS
from service.debug.flow import FlowJob
from service.debug.layer_norm import LayerNormJob
from service.debug.pair import PairJob
from service.debug.parity import ParityJob
from service.debug.patch import PatchJob
from service.debug.pipeline.messages import MAX_NONFINITE, Completed, Done, NonFinite, Opened
from service.debug.target import MaxSimTarget
from service.debug.vjp import VjpJob
from service.inference.errors import InvalidInput

AnyJob = (
    AttributeJob | PairJob | FlowJob | LayerNormJob | ParityJob | VjpJob | ActivationsJob | PatchJob
)
# Errors, which are logged, leave out the texts.
JOB: TypeAdapter[AnyJob] = TypeAdapter(
    Annotated[AnyJob, Discriminator("kind")], config=ConfigDict(hide_input_in_errors=True)
)


class Jobs:
    """Runs gradient jobs on the reference model of an artifact.

    Args:
        path: Folder of the artifact.
        device: Device of the reference model, such as "cpu" or "cuda". "auto" selects "cuda" if it
            is available, otherwise "cpu".
        verify: See `Artifact.load`.

    Raises:
        ArtifactError: The artifact cannot be loaded or is not signed, it has no reference model,
            or the weights of its reference model differ from the weights of its graph.
        CheckpointError: The files of the reference model cannot be loaded.
        RuntimeError: The device is not available.
    """

    def __init__(self, path: Path, device: str, verify: Path | None = None) -> None:
        torch.set_num_threads(available_cpus())
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = device
        self._artifact = Artifact.load(path, verify)
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
            manifest_sha256=self._artifact.manifest.sha256,
        )

    def run(self, body: bytes) -> Completed:
        """Run a job, given as JSON, and return its result, its file and the vectors to compare.

        Raises:
            InvalidInput: A field of the request is invalid.
        """
        job = JOB.validate_json(body)
        started = time.perf_counter()
        fields: dict[str, Any] = {}
        file, converged = b"", True
        match job:
            case ActivationsJob():
                file = _activations(self._model, job)
            case AttributeJob():
                attribution = _attribute(self._model, job)
                converged = attribution.completeness is None or attribution.completeness.converged
                fields = as_dict(attribution)
                fields["words"] = [
                    {**vars(word), "score": float(attribution.scores[list(word.tokens)].sum())}
                    for word in job.words
                ]
            case PairJob():
                pair = _pair(self._model, job)
                converged = all(integral.converged for integral in pair.completeness)
                fields = as_dict(pair)
            case FlowJob():
                fields = as_dict(_flow(self._model, job))
            case LayerNormJob():
                fields = as_dict(layer_norm_check(self._model, job))
            case ParityJob():
                fields = as_dict(self._parity(job))
            case VjpJob():
                fields = as_dict(_vjp(self._model, job))
            case PatchJob():
                fields = as_dict(_patch(self._model, job))
        vectors = b"".join(self._model.vector(row).cpu().numpy().tobytes() for row in job.rows)
        wall_ms = 1e3 * (time.perf_counter() - started)
        return Completed(Done(fields, nonfinite(fields), converged, wall_ms), vectors, file)

    def _parity(self, job: ParityJob) -> ParityCheck:
        served = Served(job.engine, job.precision, np.array(job.vectors, np.float32))
        tokenized = [Tokenized(*text) for text in job.check_texts] + [
            Tokenized(text, ids, self._tokenizer.encode(text).ids) for text, ids in job.texts
        ]
        return parity(self._artifact, self._model, job.rows, served, job.files, tokenized)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return tokenizer_of_source(self._artifact)


def _attribute(model: ReferenceModel, job: AttributeJob) -> Attribution:
    request, rows = job.request, rows_of(job)
    target = target_function(model, job.target)
    result = attribute(
        model,
        list(map(Side, rows, job.baselines, job.kept)),
        target,
        method=request.method,
        layer_name=_layer(model, request.layer),
        options=request.options,
    )
    if job.units is not None:
        measured = faithfulness(
            model,
            rows,
            target,
            job.units,
            result.scores,
            seed=request.seed,
            is_signed=request.method != "saliency",
        )
        result = replace(result, faithfulness=measured)
    if isinstance(job.target.target, MaxSimTarget):
        result = replace(result, alignment=alignment(model, rows[0], rows[1:]))
    return result


def _pair(model: ReferenceModel, job: PairJob) -> PairAttribution:
    request = job.request
    return explain_pair(
        model,
        *map(Side, job.rows, job.baselines),
        layer_name=_layer(model, request.layer),
        tolerance=request.tolerance,
        max_evaluations=request.max_evaluations,
    )


def _flow(model: ReferenceModel, job: FlowJob) -> Flow:
    request = job.request
    objective = Objective(request.objective.type, request.vectors)
    try:
        check_objective(objective, len(job.rows), model.network.width)
    except ValueError as error:
        raise InvalidInput(str(error), code="objective", pointer="/objective") from None
    return flow(model, job.rows, objective, emulate=request.emulate, loss_scale=request.loss_scale)


def _vjp(model: ReferenceModel, job: VjpJob) -> TokenGradient:
    request = job.request
    x, gradient = vjp(model, job.rows[0], request.cotangent, _layer(model, request.layer))  # (L, D)
    match request.reduce:
        case "norm":
            gradient = gradient.norm(dim=-1)
        case "dot":
            gradient = (gradient * x).sum(-1)
    return TokenGradient(gradient.cpu().numpy())


def _activations(model: ReferenceModel, job: ActivationsJob) -> bytes:
    arrays = {
        f"{index}/{name}": array
        for index, row in enumerate(job.rows)
        for name, array in activations(model, row, job.taps, job.request.reduction).items()
    }
    return WRITERS[job.request.format](arrays, job.metadata)


def _patch(model: ReferenceModel, job: PatchJob) -> Patching:
    rows, half = rows_of(job), len(job.rows) // 2
    return patch(
        model,
        rows[:half],
        rows[half:],
        target_function(model, job.target),
        job.taps,
        job.patches,
        is_each=job.request.positions == "each",
    )


def _layer(model: ReferenceModel, layer_name: str) -> str:
    if layer_name not in model.layer_names:
        raise InvalidInput(
            f"unknown layer; the model's layers: {', '.join(model.layer_names)}",
            code="unknown_layer",
            pointer="/layer",
        )
    return layer_name


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
