"""Request deadlines, and cancellation when a client disconnects."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from service.api.errors import Malformed
from service.inference.errors import DeadlineExceeded

Result = TypeVar("Result")

TIMEOUT = "X-Request-Timeout-Ms"
# Key in the `state` of an ASGI scope: whether the client's header has shortened the deadline.
CLIENT_DEADLINE = "client_deadline"
# Key there: the request's `Deadline`.
_DEADLINE = "deadline"
# Key there: the whole deadline in seconds, if inference gets only the rest of it.
_WHOLE_DEADLINE = "whole_deadline"


@dataclass(frozen=True, slots=True)
class Deadline:
    """The deadline of a request.

    Attributes:
        seconds: Duration, in seconds.
        end: Time of its end, by `time.monotonic`.
    """

    seconds: float
    end: float

    @property
    def remaining_s(self) -> float:
        """Time until its end in seconds; 0 after it."""
        return max(0.0, self.end - time.monotonic())


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
        seconds = _seconds(request, longest_s)
        deadline = state[_DEADLINE] = Deadline(seconds, time.monotonic() + seconds)
    return deadline


def _seconds(request: Request, longest_s: float) -> float:
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


def inference_s(request: Request, longest_s: float) -> float:
    """Return the time until a request's deadline, in seconds, as the timeout of an inference call.

    If it is less than the deadline, errors of the call state the whole deadline all the same; see
    `cancel_on_disconnect`.

    Raises:
        Malformed: See `deadline_of`.
    """
    deadline = deadline_of(request, longest_s)
    rest_s = round(deadline.remaining_s, 3)
    if rest_s < deadline.seconds:
        request.scope["state"][_WHOLE_DEADLINE] = deadline.seconds
    return rest_s


async def within(request: Request, longest_s: float, work: Coroutine[Any, Any, Result]) -> Result:
    """Await the coroutine until the request's deadline, and return its result.

    Raises:
        DeadlineExceeded: The deadline has passed, and the coroutine was cancelled.
        Malformed: See `deadline_of`.
    """
    deadline = deadline_of(request, longest_s)
    try:
        async with asyncio.timeout(deadline.remaining_s):
            return await work
    except TimeoutError:
        raise _deadline_exceeded(deadline.seconds) from None


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
    watch: asyncio.Task[None] | None = None
    is_done = False

    def cancel(_: asyncio.Task[None]) -> None:
        if not is_done:
            caller.cancel()

    def start() -> None:
        nonlocal watch
        watch = asyncio.ensure_future(_wait_for_disconnect(request))
        watch.add_done_callback(cancel)

    # The watch starts once the coroutine waits: one that finds its results in the cache needs none.
    starting = asyncio.get_running_loop().call_soon(start)
    try:
        return await work
    except DeadlineExceeded:
        whole_s = request.scope.get("state", {}).get(_WHOLE_DEADLINE)
        if whole_s is None:
            raise
        raise _deadline_exceeded(whole_s) from None
    except asyncio.CancelledError:
        if watch is not None and watch.done():
            caller.uncancel()
            raise watch.exception() or ClientDisconnect from None
        raise
    finally:
        is_done = True
        starting.cancel()
        if watch is not None:
            watch.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    # Messages of an unread body come first, such as the empty body of a GET request.
    while (await request.receive())["type"] != "http.disconnect":
        pass
