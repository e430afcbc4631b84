"""Start the service for a test: in this process, or in one of its own."""

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from fastapi import FastAPI
from starlette.routing import BaseRoute, Route
from starlette.testclient import TestClient

from models.artifact import Artifact
from service.app import create_app
from service.debug.pipeline.state import DebugState
from service.inference.model.model import Model
from service.settings import Settings
from tests.documented import check_documented
from tests.eventually import eventually

# Timeout of clients and processes; it only bounds a hang.
PATIENCE_S = 60


@contextmanager
def serving(app: FastAPI) -> Iterator[TestClient]:
    """Yield a client of the application once it is ready; it checks responses by the document."""
    # Tests of a 500 need the response that a client gets, not the exception behind it.
    with TestClient(app, raise_server_exceptions=False) as client:
        eventually(lambda: client.get("/readyz").status_code == 200)
        server = state_of(client).settings.server
        check = partial(check_documented, tei_at_root=server.tei_at_root)
        client.event_hooks["response"] = [check]
        yield client


@contextmanager
def served(model: Path | None = None, /, **groups: dict[str, Any]) -> Iterator[TestClient]:
    """Yield a client of a service with an artifact, and with groups of settings as dicts."""
    groups["engine"] = {"threads": 1, **groups.get("engine", {})}
    if model is not None:
        groups["model"] = {"path": model, **groups.get("model", {})}
    settings = Settings.model_validate(groups)
    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
        yield client


def state_of(client: TestClient) -> DebugState:
    """Return the state of the client's application."""
    state: DebugState = client.app.state.vitrine  # type: ignore[attr-defined]
    return state


def ready_model(client: TestClient) -> Model:
    """Return the model of the client's application."""
    return state_of(client).registry.current()


def flat_routes(routes: list[BaseRoute]) -> list[Route]:
    """Return every route, those of included routers too."""
    flat: list[Route] = []
    for route in routes:
        included = getattr(route, "original_router", None)
        flat += flat_routes(included.routes) if included is not None else [cast(Route, route)]
    return flat


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run the service, or `python` with the arguments, until the block ends."""
    settings = {"VITRINE_SERVER__PORT": "0", "VITRINE_ENGINE__THREADS": "2", **environment}
    # A file, because a full pipe would block a process whose output nobody reads.
    with (
        tempfile.NamedTemporaryFile("w") as stderr,
        open(stderr.name) as reader,
        subprocess.Popen(
            [sys.executable, *(arguments or ["-m", "service"])],
            env={**os.environ, **settings},
            stderr=stderr,
            stdout=subprocess.DEVNULL,
            text=True,
        ) as started,
    ):
        started.stderr = reader
        try:
            yield started
        finally:
            started.kill()


@contextmanager
def held_process(
    artifact: Artifact, hold: Path, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Run the service of `tests.held_service`, whose engine waits while the file `hold` exists."""
    settings = {"ENGINE_HOLD": str(hold), "VITRINE_MODEL__PATH": str(artifact.path), **environment}
    with process("-m", "tests.held_service", **settings) as started:
        yield started


def url_of(started: subprocess.Popen[str]) -> str:
    """Return the URL of a service once it serves."""
    return lines_until(started, r"Serving .* on (http://[^\s\"]+)")[1][1]


def connect(url: str) -> socket.socket:
    """Return a connection to a service, to send bytes that no client of HTTP sends."""
    return socket.create_connection(address_of(url), timeout=PATIENCE_S)


def address_of(url: str) -> tuple[str, int]:
    """Return host and port of a service."""
    parts = httpx2.URL(url)
    return parts.host, parts.port or 80


def received(connection: socket.socket) -> bytes:
    """Return what a service sends until it closes the connection."""
    return b"".join(iter(lambda: connection.recv(65_536), b""))


def lines_until(started: subprocess.Popen[str], pattern: str) -> tuple[list[str], re.Match[str]]:
    """Return the lines on stderr up to the first that matches, and the match."""
    lines: list[str] = []
    while line := _next_line(started):
        lines.append(line.rstrip())
        match = re.search(pattern, line)
        if match:
            return lines, match
    raise AssertionError(f"the process ended without a line that matches {pattern!r}: {lines}")


def _next_line(started: subprocess.Popen[str]) -> str:
    """Return the next line on stderr; empty if the process has ended and there is none."""
    stderr, line = started.stderr, ""
    assert stderr is not None

    def is_complete() -> bool:
        nonlocal line
        # Before reading: lines written between the two would be lost.
        has_ended = started.poll() is not None
        line += stderr.readline()
        return has_ended or line.endswith("\n")

    eventually(is_complete)
    return line


def rest(started: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit status, and the rest of stderr."""
    assert started.stderr is not None
    return started.wait(timeout=PATIENCE_S), started.stderr.read()


def outcome(started: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit status and the rest of stderr, which must have no traceback."""
    status, errors = rest(started)
    assert "Traceback" not in errors
    return status, errors


def metrics(url: str) -> dict[str, float]:
    """Return the values of /metrics by name and labels, summed over all models."""
    return values_of(httpx2.get(f"{url}/metrics", timeout=PATIENCE_S).text)


def values_of(exposition: str) -> dict[str, float]:
    """Return the values in Prometheus' text format by name and labels, summed over all models."""
    values: dict[str, float] = {}
    for line in exposition.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = re.sub(r'model="[^"]*",?', "", name).replace("{}", "")
            values[name] = values.get(name, 0.0) + float(value)
    return values
