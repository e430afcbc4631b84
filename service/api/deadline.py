"""Request deadlines, and cancellation when a client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from service.api.errors import Malformed
from service.inference.errors import DeadlineExceeded

Result = TypeVar("Result")

TIMEOUT = "X-Request-Timeout-Ms"
# Key in the `state` of an ASGI scope: whether the client's header has shortened the deadline.
CLIENT_DEADLINE = "client_deadline"


def deadline_s(request: Request, longest_s: float) -> float:
    """Return the deadline of a request, in seconds.

    The header `X-Request-Timeout-Ms` can shorten the deadline. Without it, the deadline is
    `longest_s`.

    Raises:
        Malformed: The header is not an integer from 1 to 999999999.
    """
    value = request.headers.get(TIMEOUT)
    if value is None:
        return longest_s
    if not (value.isascii() and value.isdecimal() and 0 < len(value) < 10 and int(value)):
        raise Malformed(
            f"{TIMEOUT} must be a whole number of milliseconds from 1 to 999999999", code="timeout"
        )
    seconds = int(value) / 1e3
    request.scope["state"][CLIENT_DEADLINE] = seconds < longest_s
    return min(seconds, longest_s)


async def within(seconds: float, work: Coroutine[Any, Any, Result]) -> Result:
    """Await the coroutine for at most `seconds`, and return its result.

    Raises:
        DeadlineExceeded: The coroutine took longer than `seconds` and was cancelled.
    """
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(f"deadline of {seconds:g} s exceeded") from None


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await the coroutine and return its result; cancel it if the client disconnects.

    Raises:
        ClientDisconnect: The client disconnected before the coroutine had finished.
    """
    # The coroutine runs in this task: a separate task would cost two iterations of the event loop.
    caller = asyncio.current_task()
    assert caller is not None  # noqa: S101 - a coroutine runs in a task
    is_done = False

    def cancel(_: asyncio.Task[None]) -> None:
        if not is_done:
            caller.cancel()

    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    disconnect.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if disconnect.done():
            caller.uncancel()
            raise disconnect.exception() or ClientDisconnect from None
        raise
    finally:
        is_done = True
        disconnect.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    # Messages of an unread body come first, such as the empty body of a GET request.
    while (await request.receive())["type"] != "http.disconnect":
        pass
