"""The end of commands by signals."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exit_on(*numbers: signal.Signals) -> Iterator[None]:
    """Exit in order on signals, unless they are ignored, as SIGHUP is by nohup.

    As the first process of a container, a command would ignore SIGTERM.
    """
    previous = {number: signal.getsignal(number) for number in numbers}
    for number, handler in previous.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
