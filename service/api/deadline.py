"""Request deadlines, and cancellation when a client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from service.api.errors import Malformed
from service.api.headers import TIMEOUT, header
from service.api.http_protocol import cycle_of
from service.inference.call_options import Deadline

Result = TypeVar("Result")

# Key in the `state` of an ASGI scope: whether the client's header has shortened the deadline.
CLIENT_DEADLINE = "client_deadline"
# Key there: the request's `Deadline`.
_DEADLINE = "deadline"


def deadline_of(request: Request, longest_s: float) -> Deadline:
    """Return the deadline of a request. It starts with the first call.

    The header `X-Request-Timeout-Ms` can shorten the deadline. Without it, the deadline is
    `longest_s`.

    Raises:
        Malformed: The header is not an integer from 1 to 999999999.
    """
    state = request.scope["state"]
    deadline: Deadline | None = state.get(_DEADLINE)
    if deadline is None:
        deadline = state[_DEADLINE] = Deadline.start(_seconds(request, longest_s))
    return deadline


def _seconds(request: Request, longest_s: float) -> float:
    value = header(request, TIMEOUT.lower())
    if value is None:
        return longest_s
    if not (value.isascii() and value.isdecimal() and 0 < len(value) < 10 and int(value)):
        raise Malformed(
            f"{TIMEOUT} must be a whole number of milliseconds from 1 to 999999999", code="timeout"
        )
    seconds = int(value) / 1e3
    request.scope["state"][CLIENT_DEADLINE] = seconds < longest_s
    return min(seconds, longest_s)


async def within(deadline: Deadline, work: Coroutine[Any, Any, Result]) -> Result:
    """Await the coroutine until the deadline, and return its result.

    Raises:
        DeadlineExceeded: The deadline has passed, and the coroutine was cancelled.
    """
    try:
        async with asyncio.timeout(deadline.remaining_s):
            return await work
    except TimeoutError:
        raise deadline.error() from None


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await the coroutine and return its result; cancel it if the client disconnects.

    Raises:
        ClientDisconnect: The client disconnected before the coroutine had finished.
    """
    # The coroutine runs in this task: a separate task would cost two iterations of the event loop.
    caller = asyncio.current_task()
    assert caller is not None  # noqa: S101 - a coroutine runs in a task
    cycle = cycle_of(request.receive)
    if cycle is None:
        return await _cancel_on_message(request, caller, work)
    if cycle.disconnected:
        work.close()
        raise ClientDisconnect
    cycle.watch(caller.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if cycle.disconnected:
            caller.uncancel()
            raise ClientDisconnect from None
        raise
    finally:
        cycle.on_disconnect = None


async def _cancel_on_message(
    request: Request, caller: asyncio.Task[Any], work: Coroutine[Any, Any, Result]
) -> Result:
    """Do the same for another HTTP protocol, which reports a disconnect as an ASGI message."""
    is_done = False

    def cancel(_: asyncio.Task[None]) -> None:
        if not is_done:
            caller.cancel()

    watch = asyncio.ensure_future(_wait_for_disconnect(request))
    watch.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if watch.done():
            caller.uncancel()
            raise watch.exception() or ClientDisconnect from None
        raise
    finally:
        is_done = True
        watch.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    # Messages of an unread body come first, such as the empty body of a GET request.
    while (await request.receive())["type"] != "http.disconnect":
        pass
