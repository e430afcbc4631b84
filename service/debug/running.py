"""Runs of gradient jobs: cost, the job itself, parity with the served model, and the response."""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel

from service.api.deadline import cancel_on_disconnect, within
from service.api.openapi import error_responses, request_body
from service.api.responses import JSON
from service.debug.job_types import Job
from service.debug.process import reference_model
from service.debug.replies import MAX_NONFINITE, Done, Opened
from service.debug.responses import Cost, GradientResponse, Hashes, VectorParity
from service.debug.served import encode, parity_of
from service.debug.state import DebugState
from service.inference.errors import InvalidInput
from service.inference.model.model import Model
from service.inference.results.metrics import record_outcome

MAX_BODY_BYTES = 2**20


@dataclass(frozen=True)
class Outcome:
    """Outcome of a job.

    Attributes:
        done: Reply of the gradient process.
        file: File that the job wrote; empty for most jobs.
        parity: Agreement of the reference model with the served model; None: not compared.
        warnings: Reasons why the result may be inaccurate or incomplete.
    """

    done: Done
    file: bytes
    parity: VectorParity | None
    warnings: list[str]


def route_options(
    body: type[BaseModel],
    response: Any,  # noqa: ANN401 - a type expression
    summary: str,
    **success: Any,  # noqa: ANN401 - JSON
) -> dict[str, Any]:
    """Return the options of a route whose handler parses the request body itself.

    Args:
        body: Model of the request body.
        response: Model of a successful response in JSON.
        summary: Title of the route.
        success: Further OpenAPI fields of the successful response.
    """
    errors = error_responses(400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503, 504)
    return {
        "summary": summary,
        "response_model": response,
        "openapi_extra": request_body(body),
        "responses": {**({200: success} if success else {}), **errors},
    }


async def open_process(request: Request, state: DebugState, model: Model) -> Opened:
    """Start the gradient process for a model, if necessary, and return its description."""
    work = cancel_on_disconnect(request, state.gradients.start(reference_model(model)))
    return await within(request, state.settings.limits.request_s, work)


async def run_job(
    request: Request,
    state: DebugState,
    model: Model,
    job: Job,
    served: NDArray[np.float32] | None = None,
) -> Outcome:
    """Run a job in the gradient process, and compare the reference model with the served model.

    Args:
        request: HTTP request, watched for disconnection of the client.
        state: State of the application.
        model: The served model.
        job: Job to run.
        served: Served vectors of the rows in `job.compare`, `(B, W)`. None: encode the rows here.
    """
    with record_outcome(lambda outcome: state.jobs.labels(job.kind, outcome).inc()):
        work = cancel_on_disconnect(request, state.gradients.run(reference_model(model), job))
        done, vectors, file = await within(request, state.settings.limits.request_s, work)
    parity = None
    if job.compare:
        if served is None:
            encoding = cancel_on_disconnect(request, encode(model, job.compare))
            served = await within(request, state.settings.limits.request_s, encoding)
        reference = np.frombuffer(vectors, np.float32).reshape(served.shape)
        parity = await asyncio.to_thread(parity_of, model, served, reference)
    warnings = []
    if parity is not None and not parity.agrees:
        warnings.append("the served vectors differ from the reference model's vectors; see parity")
    if not done.converged:
        warnings.append("a path integral has not converged; increase max_evaluations")
    if len(done.nonfinite) == MAX_NONFINITE:
        warnings.append(
            f"nonfinite lists only the first {MAX_NONFINITE} non-finite numbers; there may be more"
        )
    return Outcome(done, file, parity, warnings)


async def run(
    request: Request,
    state: DebugState,
    model: Model,
    job: Job,
    cost: Cost,
    response: type[GradientResponse],
    served: NDArray[np.float32] | None = None,
    **fields: object,
) -> Response:
    """Run a job in the gradient process and return the HTTP response.

    Args:
        request: See `run_job`.
        state: See `run_job`.
        model: See `run_job`.
        job: See `run_job`.
        cost: Cost of the request, for the response.
        response: Response model.
        served: See `run_job`.
        fields: Further fields of the response, such as the tokens of the texts.
    """
    outcome = await run_job(request, state, model, job, served)
    common = {
        "model": hashes_of(model),
        "parity": outcome.parity,
        "cost": cost,
        "wall_ms": outcome.done.wall_ms,
        "warnings": outcome.warnings,
        "nonfinite": outcome.done.nonfinite,
    }
    return json_response(response.model_validate({**common, **fields, **outcome.done.result}))


def cost_of(state: DebugState, steps: int) -> Cost:
    """Return the cost of a request.

    Args:
        state: State of the application.
        steps: Cost in token steps.

    Raises:
        InvalidInput: The cost exceeds the limit.
    """
    limit = state.settings.debug.max_token_steps
    if steps > limit:
        raise InvalidInput(
            f"the request may cost {steps} token steps; the limit is {limit}: use fewer or shorter "
            "texts, fewer evaluations, samples or taps",
            code="budget",
        )
    return Cost(token_steps=steps, limit=limit)


def hashes_of(model: Model) -> Hashes:
    """Return the name and version of a served model, and the hashes of its parts."""
    manifest = model.artifact.manifest
    return Hashes(
        name=model.name,
        version=model.version,
        weights_sha256=dict(manifest.weights_sha256),
        graph_sha256=model.graph_sha256,
        tokenizer_sha256=manifest.files["tokenizer.json"],
    )


def json_response(response: BaseModel) -> Response:
    """Return the HTTP response with a response model."""
    return Response(response.model_dump_json(), media_type=JSON)
