"""A service as a client sees it: in this process, or in one of its own."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import httpx2
from fastapi import FastAPI
from starlette.routing import BaseRoute, Route
from starlette.testclient import TestClient

from service.debug.state import DebugState
from service.inference.model import Model

# Of a client whose service may be busy, on a machine that may be busy.
PATIENCE_S = 60


@contextmanager
def serving(app: FastAPI) -> Iterator[TestClient]:
    """Give a client of the application once it is ready."""
    # A test of a 500 wants the answer that a client gets, not the exception behind it.
    with TestClient(app, raise_server_exceptions=False) as client:
        deadline = time.monotonic() + PATIENCE_S
        while client.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline, "the service did not become ready"
            time.sleep(0.02)
        yield client


def state_of(client: TestClient) -> DebugState:
    """The state of the client's application."""
    state: DebugState = client.app.state.vitrine  # type: ignore[attr-defined]
    return state


def ready_model(client: TestClient) -> Model:
    """The model of the client's application."""
    return state_of(client).ready_model()


def flat_routes(routes: list[BaseRoute]) -> list[Route]:
    """Every route, those of included routers too."""
    flat: list[Route] = []
    for route in routes:
        included = getattr(route, "original_router", None)
        flat += flat_routes(included.routes) if included is not None else [cast(Route, route)]
    return flat


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    settings = {"VITRINE_SERVER__PORT": "0", "VITRINE_ENGINE__THREADS": "2", **environment}
    # A file takes what nobody reads meanwhile; a full pipe would hold the process up.
    with (
        tempfile.NamedTemporaryFile("w") as said,
        open(said.name) as listening,
        subprocess.Popen(
            [sys.executable, *(arguments or ["-m", "service"])],
            env={**os.environ, **settings},
            stderr=said,
            stdout=subprocess.DEVNULL,
            text=True,
        ) as started,
    ):
        started.stderr = listening
        try:
            yield started
        finally:
            started.kill()


def lines_until(started: subprocess.Popen[str], pattern: str) -> tuple[list[str], re.Match[str]]:
    assert started.stderr is not None
    lines, line = [], ""
    while line or started.poll() is None:
        line += started.stderr.readline()
        if not line.endswith("\n"):  # so far
            time.sleep(0.01)
            continue
        lines.append(line.rstrip())
        match = re.search(pattern, line)
        if match:
            return lines, match
        line = ""
    raise AssertionError(f"{pattern} was not said: {lines}")


def rest(started: subprocess.Popen[str]) -> tuple[int, str]:
    """Return how it ended, and what it said since it was last listened to."""
    assert started.stderr is not None
    return started.wait(timeout=PATIENCE_S), started.stderr.read()


def outcome(started: subprocess.Popen[str]) -> tuple[int, str]:
    status, errors = rest(started)
    assert "Traceback" not in errors
    return status, errors


def metrics(url: str) -> dict[str, float]:
    """Return every value of /metrics by its name and labels."""
    lines = httpx2.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }
