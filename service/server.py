"""The HTTP server, which owns its signals.

uvicorn closes its port at the first signal, so that a load balancer meets a refused connection
where it should read "not ready"; it waits for slow clients as long as they like, and ends with the
signal for a status.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.settings import ServerSettings

log = logging.getLogger("vitrine")


class Joined(asyncio.Transport):
    """Writes at once what is written within one turn of the event loop: an answer's head and body.

    Killed between two writes, a process would leave half an answer behind, which a gateway cannot
    ask another one for.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._waiting: list[bytes | bytearray | memoryview] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write it with whatever else is written before the loop's next turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(data)

    def close(self) -> None:
        """Close the connection when all has been written."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or will be."""
        return self._transport.is_closing()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand the connection over."""
        self._transport.set_protocol(protocol)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting and not self._transport.is_closing():
            self._transport.writelines(waiting)


class Protocol(HttpToolsProtocol):
    """HTTP/1.1, an answer in one piece."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to serve a connection."""
        super().connection_made(transport)
        self.transport = Joined(transport)


class Server(uvicorn.Server):
    """Serves until it is told to stop, and then ends in order, with status 0.

    At SIGTERM it is no longer ready, but answers for another `drain_s` seconds, in which load
    balancers turn away. Then, and at SIGINT at once, it takes no more requests, and gives those
    that are in flight `grace_s` seconds. A second signal ends the process on the spot.

    Args:
        app: The application.
        settings: Where it listens, and how it stops.
    """

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                host=settings.host,
                port=settings.port,
                lifespan="on",  # what fails there must not pass for an application without one
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nothing here looks at the client's address
                # Longer than the usual 60 s of a proxy, which must be the one that closes.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=settings.grace_s,
            )
        )
        self._app = app
        self._drain_s = settings.drain_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT while the server runs."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        yield

    def _stop(self, number: signal.Signals) -> None:
        if self._app.state.stopping:
            log.warning("%s again: ending at once", number.name)
            os._exit(1)
        self._app.state.stopping = True
        drain_s = self._drain_s if number == signal.SIGTERM else 0
        log.info("%s: no longer ready; the port closes in %g s", number.name, drain_s)
        asyncio.get_running_loop().call_later(drain_s, self._close)

    def _close(self) -> None:
        self.should_exit = True
