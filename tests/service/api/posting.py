"""Requests of the tests to a service in this process."""

from typing import Any

import httpx2
from starlette.testclient import TestClient


def post(client: TestClient, path: str = "/encode", /, **body: object) -> httpx2.Response:
    """Return the response, whose status must be 200."""
    response: httpx2.Response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


def ask(client: TestClient, path: str = "/encode", /, **body: object) -> Any:  # noqa: ANN401 - JSON
    """Return the body of the response, whose status must be 200."""
    return post(client, path, **body).json()


def stages(response: httpx2.Response) -> dict[str, float]:
    """Return the stages of Server-Timing, in their order, with their durations in ms."""
    entries = [entry.split(";") for entry in response.headers["Server-Timing"].split(", ")]
    durations = {name: float(more[-1].removeprefix("dur=")) for name, *more in entries}
    assert len(durations) == len(entries)
    return durations


def refused(client: TestClient, path: str, /, **body: object) -> dict[str, Any]:
    """Return the problem of a native route in the response, whose status must be 4xx."""
    response = client.post(path, json=body)
    assert response.is_client_error, response.text
    assert response.headers["Content-Type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["status"] == response.status_code
    return problem


def wrong_model(client: TestClient, path: str, /, **body: object) -> str:
    """Return the detail of the error that the model cannot compute the results of the route."""
    problem = refused(client, path, **body)
    assert (problem["status"], problem["code"]) == (422, "wrong_model")
    return str(problem["detail"])
