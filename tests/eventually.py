"""Waiting for conditions, with a bound in attempts and not in seconds."""

import asyncio
import time
from collections.abc import Callable

# A hundred seconds on an idle machine; on a busy one each attempt takes longer, as all else does.
_ATTEMPTS = 20_000
_PAUSE_S = 0.005

# Bound of a wait on a thread or a process that ends at once, or never.
HANG_S = 60.0


def eventually(condition: Callable[[], object]) -> None:
    """Return when the condition is true; fail if it never is."""
    for _ in range(_ATTEMPTS):
        if condition():
            return
        time.sleep(_PAUSE_S)
    raise AssertionError("the condition did not become true")


async def eventually_async(condition: Callable[[], object]) -> None:
    """Return when the condition is true; fail if it never is."""
    for _ in range(_ATTEMPTS):
        if condition():
            return
        await asyncio.sleep(_PAUSE_S)
    raise AssertionError("the condition did not become true")
