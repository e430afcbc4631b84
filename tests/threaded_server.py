"""Run a server of the standard library in a thread."""

import socketserver
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import TypeVar

Server = TypeVar("Server", bound=socketserver.BaseServer)


@contextmanager
def in_thread(server: Server) -> Iterator[Server]:
    """Yield the server while it serves, then close it."""
    # By default, `shutdown` takes up to half a second.
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    with server:
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
