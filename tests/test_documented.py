"""The check of responses against the OpenAPI document."""

import json
from typing import Any

import httpx2
import pytest

from tests.documented import check_documented

HEALTH = {"status": "ok"}


def response(path: str, body: Any, media_type: str = "application/json") -> httpx2.Response:  # noqa: ANN401
    return httpx2.Response(
        200,
        headers={"content-type": media_type},
        content=json.dumps(body),
        request=httpx2.Request("GET", f"http://testserver{path}"),
    )


def test_documented_response_passes() -> None:
    check_documented(response("/healthz", HEALTH))
    check_documented(response("/not-a-route", {"any": "body"}))


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/healthz", {**HEALTH, "more": 1}, "'more' was unexpected"),
        ("/healthz", {"status": 1}, '1 is not of type "string"'),
        ("/tei/info", {}, '"model_id" is a required property'),
        ("/v1/models/name", {}, '"id" is a required property'),
    ],
)
def test_missing_unknown_and_wrong_fields_are_found(path: str, body: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=message):
        check_documented(response(path, body))


def test_undocumented_media_type_is_found() -> None:
    with pytest.raises(AssertionError, match="text/plain is not documented"):
        check_documented(response("/healthz", HEALTH, "text/plain"))
