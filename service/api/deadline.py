"""Request deadlines, and cancellation when a client disconnects."""

import asyncio
import time
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
# Key there: end of the deadline, by `time.monotonic`.
_DEADLINE_END = "deadline_end"
# Key there: the whole deadline in seconds, if inference gets only the rest of it.
_WHOLE_DEADLINE = "whole_deadline"


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


def remaining_s(request: Request, longest_s: float) -> float:
    """Return the time until a request's deadline in seconds, rounded to milliseconds.

    The first call starts the deadline. Most routes read the body before.

    Raises:
        Malformed: See `deadline_s`.
    """
    now, seconds = time.monotonic(), deadline_s(request, longest_s)
    end: float = request.scope["state"].setdefault(_DEADLINE_END, now + seconds)
    return max(0.0, round(end - now, 3))


def inference_s(request: Request, longest_s: float) -> float:
    """Return `remaining_s` as the timeout of an inference call.

    If it is less than the deadline, errors of the call state the whole deadline all the same; see
    `cancel_on_disconnect`.

    Raises:
        Malformed: See `deadline_s`.
    """
    whole_s, rest_s = deadline_s(request, longest_s), remaining_s(request, longest_s)
    if rest_s < whole_s:
        request.scope["state"][_WHOLE_DEADLINE] = whole_s
    return rest_s


async def within(request: Request, longest_s: float, work: Coroutine[Any, Any, Result]) -> Result:
    """Await the coroutine until the request's deadline, and return its result.

    Raises:
        DeadlineExceeded: The deadline has passed, and the coroutine was cancelled.
        Malformed: See `deadline_s`.
    """
    try:
        async with asyncio.timeout(remaining_s(request, longest_s)):
            return await work
    except TimeoutError:
        raise _deadline_exceeded(deadline_s(request, longest_s)) from None


def _deadline_exceeded(seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"deadline of {seconds:g} s exceeded")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await the coroutine and return its result; cancel it if the client disconnects.

    Raises:
        ClientDisconnect: The client disconnected before the coroutine had finished.
        DeadlineExceeded: The coroutine exceeded the deadline of `inference_s`.
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
    except DeadlineExceeded:
        whole_s = request.scope.get("state", {}).get(_WHOLE_DEADLINE)
        if whole_s is None:
            raise
        raise _deadline_exceeded(whole_s) from None
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
