"""A call of a gradient route: its job, parity with the served model, and its response."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel

from service.api.deadline import cancel_on_disconnect, deadline_of, within
from service.api.responses import JSON
from service.debug.pipeline.messages import MAX_NONFINITE, Completed, Job, Opened
from service.debug.pipeline.model_kinds import ModelKind
from service.debug.pipeline.response import Cost, CostResponse, GradientResponse, hashes_of
from service.debug.pipeline.served_vectors import encode, parity_of
from service.debug.pipeline.state import DebugState
from service.inference.errors import InvalidInput
from service.inference.model.model import Model
from service.inference.results.metrics import record_outcome

Value = TypeVar("Value")


@dataclass(frozen=True)
class Call:
    """A call of a gradient route.

    Attributes:
        request: HTTP request.
        state: State of the application.
        model: The served model that the request names.
        kind: Kind of the model.
    """

    request: Request
    state: DebugState
    model: Model
    kind: ModelKind

    async def within_deadline(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Return the result of work, which is cancelled when the client disconnects.

        Raises:
            DeadlineExceeded: The request's deadline passes before the work ends.
        """
        work = cancel_on_disconnect(self.request, work)
        deadline = deadline_of(self.request, self.state.settings.limits.request_s)
        return await within(deadline, work)

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

    def cost_response(self, cost: Cost) -> Response:
        """Return the HTTP response to a request with `dry_run`."""
        return json_response(CostResponse(model=hashes_of(self.model), cost=cost))

    async def open_process(self) -> Opened:
        """Start the gradient process for the model, if necessary, and return its description."""
        start = self.state.gradients.start(self.model.artifact)
        return await self.within_deadline(start)

    async def run(
        self, job: Job, cost: Cost, served: NDArray[np.float32] | None = None
    ) -> tuple[dict[str, Any], Completed]:
        """Run a job in the gradient process, and compare the reference model with the served model.

        Args:
            job: Job to run.
            cost: Cost of the request.
            served: Served vectors of `job.rows`, `(B, W)`. None: encode the rows here.

        Returns:
            Fields of `GradientResponse`, and the reply of the gradient process.
        """
        with record_outcome(lambda outcome: self.state.jobs.labels(job.kind, outcome).inc()):
            run = self.state.gradients.run(self.model.artifact, job)
            reply = await self.within_deadline(run)
        parity = None
        if job.rows:
            if served is None:
                served = await self.within_deadline(encode(self.model, job.rows))
            reference = np.frombuffer(reply.vectors, np.float32).reshape(served.shape)
            parity = await asyncio.to_thread(parity_of, self.model, served, reference)
        warnings = []
        if parity is not None and not parity.agrees:
            warnings.append(
                "the served vectors differ from the reference model's vectors; see parity"
            )
        if not reply.done.converged:
            warnings.append(
                "a path integral has not converged; increase max_evaluations or choose another "
                "baseline"
            )
        if len(reply.done.nonfinite) == MAX_NONFINITE:
            warnings.append(
                f"nonfinite lists only the first {MAX_NONFINITE} non-finite numbers; there may be "
                "more"
            )
        report = {
            "model": hashes_of(self.model),
            "parity": parity,
            "cost": cost,
            "wall_ms": reply.done.wall_ms,
            "warnings": warnings,
            "nonfinite": reply.done.nonfinite,
        }
        return report, reply

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
            cost: See `run`.
            response: Response model.
            served: See `run`.
            fields: Further fields of the response, such as the tokens of the texts.
        """
        report, reply = await self.run(job, cost, served)
        return json_response(response.model_validate(report | fields | reply.done.result))


def json_response(response: BaseModel) -> Response:
    """Return the HTTP response with a response model."""
    return Response(response.model_dump_json(), media_type=JSON)
