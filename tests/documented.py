"""Responses in tests are as the OpenAPI document describes them."""

import re
from functools import cache
from typing import Any

import httpx2
import jsonschema_rs

from service.app import create_app
from service.settings import Settings


def check_documented(response: httpx2.Response, *, tei_at_root: bool = False) -> None:
    """Check a response against the document of a service.

    Objects must have the fields that are required, and none that the document does not name.

    Args:
        response: The response; nothing is checked of errors and of routes without documentation.
        tei_at_root: The setting of this name.
    """
    name = _operation(response.request.method.lower(), response.request.url.path, tei_at_root)
    if name is None or not response.is_success:
        return
    method, path = name
    responses = _document(tei_at_root)["paths"][path][method]["responses"]
    described = responses.get(str(response.status_code))
    assert described is not None, f"{method} {path}: {response.status_code} is not documented"
    media_type = response.headers.get("content-type", "").partition(";")[0]
    if not response.read():
        assert not media_type
        return
    assert media_type in described["content"], f"{method} {path}: {media_type} is not documented"
    if media_type == "application/json":
        status = str(response.status_code)
        _validator(method, path, status, tei_at_root).validate(response.json())


@cache
def _document(tei_at_root: bool) -> dict[str, Any]:
    settings = Settings(
        model={"path": "/none"}, debug={"enabled": True}, server={"tei_at_root": tei_at_root}
    )
    document = create_app(settings).openapi()
    _close(document["components"])
    return document


def _close(schema: Any) -> None:  # noqa: ANN401 - any JSON value
    """Forbid fields that a schema of an object does not name."""
    match schema:
        case dict():
            if "properties" in schema and "additionalProperties" not in schema:
                schema["additionalProperties"] = False
            for value in schema.values():
                _close(value)
        case list():
            for value in schema:
                _close(value)


@cache
def _operation(method: str, path: str, tei_at_root: bool) -> tuple[str, str] | None:
    """The method and the documented path of a request; None: no operation has them."""
    paths = _document(tei_at_root)["paths"]
    for template in sorted(paths, key=lambda each: ("{" in each, -len(each))):
        pattern = re.sub(r"\\{\w+\\}", ".+", re.escape(template))
        if method in paths[template] and re.fullmatch(pattern, path):
            return method, template
    return None


@cache
def _validator(method: str, path: str, status: str, tei_at_root: bool) -> Any:  # noqa: ANN401
    document = _document(tei_at_root)
    content = document["paths"][path][method]["responses"][status]["content"]
    schema = content["application/json"]["schema"]
    return jsonschema_rs.validator_for({**schema, "components": document["components"]})
