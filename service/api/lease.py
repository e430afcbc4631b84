"""Arguments of inference calls that headers and API keys determine."""

from fastapi import Request

from service.api.auth import BULK_ONLY
from service.api.errors import Forbidden, Malformed
from service.api.headers import PRIORITY, header
from service.api.state import AppState
from service.inference.call_options import Priority, QueueArguments
from service.inference.model.model import Model


async def lease_with_options(
    request: Request, state: AppState, name: str | None
) -> tuple[Model, QueueArguments]:
    """Return a served model, see `AppState.lease`, and the arguments of a call of its methods.

    Invalid options do not load a model. The time spent on a load counts towards the deadline.

    Raises:
        Malformed: The header `X-Priority` is invalid.
        Forbidden: The request is interactive, and its API key is for bulk requests only.
        VitrineError: Any error of `AppState.lease`, under the same conditions.
    """
    priority = _priority(request)
    model = await state.lease(request, name)
    return model, QueueArguments(timeout_s=state.deadline(request), priority=priority)


def _priority(request: Request) -> Priority:
    value = header(request, PRIORITY.lower())
    is_bulk_only = request.scope["state"].get(BULK_ONLY, False)
    match value:
        case None:
            return "bulk" if is_bulk_only else "interactive"
        case "bulk":
            return "bulk"
        case "interactive" if not is_bulk_only:
            return "interactive"
        case "interactive":
            raise Forbidden("the API key is for bulk requests only", code="bulk_only")
    raise Malformed(f"{PRIORITY} must be interactive or bulk", code="priority")
