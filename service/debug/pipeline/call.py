"""A call of a gradient route: its job, parity with the served model, and its response."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel

from service.api.deadline import cancel_on_disconnect, within
from service.api.responses import JSON
from service.debug.pipeline.messages import MAX_NONFINITE, Done, Job, Opened
from service.debug.pipeline.process import artifact_version
from service.debug.pipeline.response import Cost, GradientResponse, VectorParity, hashes_of
from service.debug.pipeline.served_vectors import encode, parity_of
from service.debug.pipeline.state import DebugState
from service.inference.errors import InvalidInput
from service.inference.metrics import record_outcome
from service.inference.model import Model

Value = TypeVar("Value")


@dataclass(frozen=True)
class JobOutcome:
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


@dataclass(frozen=True)
class Call:
    """A call of a gradient route.

    Attributes:
        request: HTTP request.
        state: State of the application.
        model: The served model that the request names.
    """

    request: Request
    state: DebugState
    model: Model

    async def within_deadline(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Return the result of work, which is cancelled when the client disconnects.

        Raises:
            DeadlineExceeded: The request's deadline passes before the work ends.
        """
        work = cancel_on_disconnect(self.request, work)
        return await within(self.request, self.state.settings.limits.request_s, work)

    def cost_of(self, steps: int) -> Cost:
        """Return the cost of a number of token steps.

        Raises:
            InvalidInput: The cost exceeds the limit.
        """
        limit = self.state.settings.debug.max_token_steps
        if steps > limit:
            raise InvalidInput(
                f"the request may cost {steps} token steps; the limit is {limit}: use fewer or "
                "shorter texts, fewer evaluations, samples or taps",
                code="budget",
            )
        return Cost(token_steps=steps, limit=limit)

    async def open_process(self) -> Opened:
        """Start the gradient process for the model, if necessary, and return its description."""
        start = self.state.gradients.start(artifact_version(self.model))
        return await self.within_deadline(start)

    async def run(self, job: Job, served: NDArray[np.float32] | None = None) -> JobOutcome:
        """Run a job in the gradient process, and compare the reference model with the served model.

        Args:
            job: Job to run.
            served: Served vectors of the rows in `job.compare`, `(B, W)`. None: encode them here.
        """
        with record_outcome(lambda outcome: self.state.jobs.labels(job.kind, outcome).inc()):
            run = self.state.gradients.run(artifact_version(self.model), job)
            done, vectors, file = await self.within_deadline(run)
        parity = None
        if job.compare:
            if served is None:
                served = await self.within_deadline(encode(self.model, job.compare))
            reference = np.frombuffer(vectors, np.float32).reshape(served.shape)
            parity = await asyncio.to_thread(parity_of, self.model, served, reference)
        warnings = []
        if parity is not None and not parity.agrees:
            warnings.append(
                "the served vectors differ from the reference model's vectors; see parity"
            )
        if not done.converged:
            warnings.append("a path integral has not converged; increase max_evaluations")
        if len(done.nonfinite) == MAX_NONFINITE:
            warnings.append(
                f"nonfinite lists only the first {MAX_NONFINITE} non-finite numbers; there may be "
                "more"
            )
        return JobOutcome(done, file, parity, warnings)

    async def answer(
        self,
        job: Job,
        cost: Cost,
        response: type[GradientResponse],
        served: NDArray[np.float32] | None = None,
        **fields: object,
    ) -> Response:
        """Run a job and return the HTTP response with its result.

        Args:
            job: See `run`.
            cost: Cost of the request.
            response: Response model.
            served: See `run`.
            fields: Further fields of the response, such as the tokens of the texts.
        """
        outcome = await self.run(job, served)
        common = {
            "model": hashes_of(self.model),
            "parity": outcome.parity,
            "cost": cost,
            "wall_ms": outcome.done.wall_ms,
            "warnings": outcome.warnings,
            "nonfinite": outcome.done.nonfinite,
        }
        return json_response(response.model_validate(common | fields | outcome.done.result))


def json_response(response: BaseModel) -> Response:
    """Return the HTTP response with a response model."""
    return Response(response.model_dump_json(), media_type=JSON)
