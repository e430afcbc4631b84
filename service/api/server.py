"""The HTTP server: uvicorn with different signal handling.

By default uvicorn closes its port at the first signal, so connections of a load balancer are
refused before a readiness probe fails. It also waits for slow clients without a time limit, and it
exits with the status of a process killed by the signal.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from service.api.http_protocol import BoundedReads
from service.api.keys import KeyRing
from service.api.state import AppState
from service.settings import ServerSettings

log = logging.getLogger("vitrine")

# uvloop accepts one connection per listener in an iteration of the event loop. Under load an
# iteration takes long, and clients that open many connections would fill the queue of connections.
_LISTENERS = 8


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then shuts down gracefully with exit status 0.

    After SIGTERM, /readyz returns 503 and requests are still served for `drain_s` seconds, in which
    load balancers remove the replica. Then the port closes, and requests in flight have `grace_s`
    seconds to finish. After SIGINT, the port closes immediately. A second signal terminates the
    process immediately, with status 1. After SIGHUP, the keys file is read again, and changed
    artifacts are loaded. After SIGUSR1, the state of the process is logged.

    Args:
        app: The application.
        state: State of the application.
        settings: Address, drain period and grace period.
        log_state: Logs the state of the process.
    """

    def __init__(
        self,
        app: FastAPI,
        state: AppState,
        settings: ServerSettings,
        log_state: Callable[[], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedReads,  # type: ignore[arg-type]
                ws="none",  # no WebSocket, even if a library for it is installed
                host=settings.host,
                port=settings.port,
                lifespan="on",  # "auto" would ignore a failure of the lifespan
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                # Longer than the usual 60 s idle timeout of a proxy, so that the proxy closes idle
                # connections first.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=settings.grace_s,
            )
        )
        self._state = state
        self._log_state = log_state
        self._drain_s = settings.drain_s
        self._grace_s = settings.grace_s
        self._scanning: asyncio.Future[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the port, with several listeners; see `_LISTENERS`."""
        await super().startup(sockets)
        if self.should_exit:
            return
        loop = asyncio.get_running_loop()
        for listening in [listener for server in self.servers for listener in server.sockets]:
            for _ in range(_LISTENERS - 1):
                self.servers.append(
                    await loop.create_server(
                        self._make_protocol,
                        sock=socket.socket(fileno=os.dup(listening.fileno())),
                        backlog=self.config.backlog,
                    )
                )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections, and wait for the requests in flight."""
        if not self.server_state.tasks:
            # With no time to wait, uvicorn logs an error even if there is nothing to wait for.
            self.config.timeout_graceful_shutdown = max(1, self._grace_s)
        await super().shutdown(sockets)

    def _make_protocol(self) -> asyncio.BaseProtocol:
        return BoundedReads(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install handlers for SIGTERM and SIGINT in place of uvicorn's handlers."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        loop.add_signal_handler(signal.SIGUSR1, self._log_state)
        yield

    def _reload(self) -> None:
        log.info("SIGHUP: reading API keys, and looking for changed artifacts")
        try:
            self._state.keys = KeyRing(self._state.settings.auth.all_keys())
        except (OSError, ValueError) as error:
            log.error("the API keys stay as they were: %s", error)
        self._scanning = asyncio.ensure_future(self._state.watch.scan())

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
