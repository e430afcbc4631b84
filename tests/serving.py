"""A service in this process, as a client sees it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from fastapi import FastAPI
from starlette.routing import BaseRoute, Route
from starlette.testclient import TestClient


@contextmanager
def serving(app: FastAPI) -> Iterator[TestClient]:
    """Give a client of the application once it is ready."""
    # A test of a 500 wants the answer that a client gets, not the exception behind it.
    with TestClient(app, raise_server_exceptions=False) as client:
        deadline = time.monotonic() + 60
        while client.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline, "the service did not become ready"
            time.sleep(0.02)
        yield client


def flat_routes(routes: list[BaseRoute]) -> list[Route]:
    """Every route, those of included routers too."""
    flat: list[Route] = []
    for route in routes:
        included = getattr(route, "original_router", None)
        flat += flat_routes(included.routes) if included is not None else [cast(Route, route)]
    return flat
