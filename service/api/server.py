"""The HTTP server, which handles its own signals.

uvicorn closes its port at the first signal, so a load balancer would get a refused connection
instead of "not ready"; it waits for slow clients without a limit, and exits with the signal as its
status.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from service.api.http_protocol import BoundedReads
from service.api.state import AppState
from service.settings import ServerSettings

log = logging.getLogger("vitrine")


class Server(uvicorn.Server):
    """Serves until a signal, then shuts down gracefully with status 0.

    At SIGTERM it becomes unready, and serves for another `drain_s` seconds while load balancers
    turn away. Then, and at SIGINT at once, it accepts no more requests, and gives those in flight
    `grace_s` seconds. A second signal ends the process immediately.

    Args:
        app: The application.
        state: Its state.
        settings: Address, drain and grace period.
    """

    def __init__(self, app: FastAPI, state: AppState, settings: ServerSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedReads,  # type: ignore[arg-type]
                ws="none",  # whatever is installed
                host=settings.host,
                port=settings.port,
                lifespan="on",  # "auto" would take a failure for an application without lifespan
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                # Longer than a proxy's usual 60 s: the proxy must be the one to close.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=settings.grace_s,
            )
        )
        self._state = state
        self._drain_s = settings.drain_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT while the server runs."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        yield

    def _stop(self, number: signal.Signals) -> None:
        if self._state.stopping:
            log.warning("%s again: exiting immediately", number.name)
            os._exit(1)
        self._state.stopping = True
        drain_s = self._drain_s if number == signal.SIGTERM else 0
        log.info("%s: shutting down; the port closes in %g s", number.name, drain_s)
        asyncio.get_running_loop().call_later(drain_s, self._close)

    def _close(self) -> None:
        self.should_exit = True
