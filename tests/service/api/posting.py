"""Requests of the tests to a service in this process."""

from typing import Any

from starlette.testclient import TestClient


def ask(client: TestClient, path: str = "/encode", /, **body: object) -> Any:  # noqa: ANN401 - JSON
    """Return the body of the response, whose status must be 200."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def wrong_model(client: TestClient, path: str, /, **body: object) -> str:
    """Return the detail of the error that the model cannot compute the results of the route."""
    response = client.post(path, json=body)
    assert (response.status_code, response.json()["code"]) == (422, "wrong_model")
    return str(response.json()["detail"])
