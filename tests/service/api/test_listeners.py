"""Tests of the HTTP server's listeners."""

import asyncio
import socket
from types import SimpleNamespace
from typing import cast

import uvloop
from fastapi import FastAPI

from service.api.server import Server
from service.api.state import AppState
from service.settings import ServerSettings
from tests.eventually import eventually_async

CLIENTS = 64


def test_an_iteration_of_the_event_loop_accepts_several_connections() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        iterations = runner.run(_iterations_to_accept(CLIENTS))
    # A single listener of uvloop takes an iteration for each connection.
    assert iterations <= CLIENTS / 4


async def _iterations_to_accept(clients: int) -> int:
    """Return the number of iterations in which a server accepts clients that wait already."""
    state = cast(AppState, SimpleNamespace(stopping=False))
    server = Server(FastAPI(), state, ServerSettings(port=0), lambda: None)
    serving = asyncio.create_task(server.serve())
    await eventually_async(lambda: server.started)
    address = server.servers[0].sockets[0].getsockname()
    # The calls block, so no iteration comes between them.
    connections = [socket.create_connection(address) for _ in range(clients)]
    iterations = 0
    while len(server.server_state.connections) < clients and iterations < 10 * clients:
        await asyncio.sleep(0)
        iterations += 1
    accepted = len(server.server_state.connections)
    for connection in connections:
        connection.close()
    server.should_exit = True
    await serving
    assert accepted == clients
    return iterations
