"""FastAPI's OpenAPI document, plus headers, limits and the bodies that handlers parse."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from service.api.auth import require_scope
from service.api.errors import DESCRIPTIONS, PROBLEM
from service.api.headers import PRIORITY, TIMEOUT
from service.api.schemas import REFERENCED, Problem, reference
from service.settings import LimitSettings

_SECURITY_SCHEMES = {
    "Bearer": {"type": "http", "scheme": "bearer", "description": "Authorization: Bearer KEY"},
    "XApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "ApiKey": {
        "type": "apiKey",
        "in": "header",
        "name": "api-key",
        "description": "Header in which Azure OpenAI clients send the API key",
    },
}

_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Identifier of the request in logs and errors: 1 to 128 ASCII letters, digits "
    "and `._-`; any other value is replaced by a new identifier",
    "schema": {"type": "string"},
}
_TIMEOUT = {
    "name": TIMEOUT,
    "in": "header",
    "description": "Deadline of the request in milliseconds; a value above the service's own "
    "deadline has no effect",
    "schema": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
}
_PRIORITY = {
    "name": PRIORITY,
    "in": "header",
    "description": "Priority of the inference; interactive requests overtake bulk requests",
    "schema": {"type": "string", "enum": ["interactive", "bulk"], "default": "interactive"},
}
_REQUEST_ID_HEADER = {
    "description": "Identifier of the request: the client's, or a new identifier",
    "schema": {"type": "string"},
}
_RETRY_AFTER_HEADER = {
    "description": "Seconds to wait before a retry",
    "schema": {"type": "integer", "minimum": 1, "maximum": 60},
}


# Statuses of errors of the routes that run a model.
INFERENCE_STATUSES = (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503, 504)


def error_responses(
    *statuses: int, schema: type[BaseModel] = Problem, media_type: str = PROBLEM
) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of error responses, by status."""
    content = {media_type: {"schema": reference(schema)}}
    return {
        status: {"description": DESCRIPTIONS[status], "content": content} for status in statuses
    }


# Error responses of the native routes that run a model.
NATIVE_ERRORS: Mapping[int | str, dict[str, Any]] = error_responses(*INFERENCE_STATUSES)


def request_body(*models: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a request body that the handler parses itself.

    Args:
        models: Model of the body, or alternative models.
    """
    schemas = [reference(model) for model in models]
    content = {
        "application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
    }
    return {"requestBody": {"required": True, "content": content}}


def inference_route(
    summary: str,
    response: object,
    *bodies: type[BaseModel],
    responses: Mapping[int | str, dict[str, Any]] = NATIVE_ERRORS,
) -> dict[str, Any]:
    """Return the decorator arguments of a route that runs a model, and parses the body itself.

    Args:
        summary: Summary of the route.
        response: Type of the response.
        bodies: Model of the body, or alternative models.
        responses: OpenAPI descriptions of its error responses.
    """
    return {
        "summary": summary,
        "dependencies": [require_scope("encode")],
        "response_model": response,
        "openapi_extra": request_body(*bodies),
        "responses": responses,
    }


def openapi(
    app: FastAPI,
    limits: LimitSettings,
    *,
    needs_keys: bool,
    replaced: Collection[str] = (),
) -> dict[str, Any]:
    """Return the OpenAPI document of an application.

    Args:
        app: The application.
        limits: Limits on the inputs of a request.
        needs_keys: Whether requests need API keys.
        replaced: Paths whose routes are replaced by others, which are not in the document.
    """
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        for path in replaced:
            document["paths"].pop(path, None)
        schemas = document["components"]["schemas"]
        for model in REFERENCED.values():
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= {**schema.pop("$defs", {}), model.__name__: schema}
            for name in ("inputs", "input", "texts", "documents", "queries", "query"):
                _limit_inputs(schema.get("properties", {}).get(name, {}), limits)
        document["components"].pop("securitySchemes", None)
        if needs_keys:
            document["components"]["securitySchemes"] = _SECURITY_SCHEMES
        for method, operation in _operations(document):
            _describe_security(operation, needs_keys=needs_keys)
            _describe_headers(method, operation)
        app.openapi_schema = document
    return app.openapi_schema


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in document["paths"].values():
        yield from path.items()


def _limit_inputs(schema: dict[str, Any], limits: LimitSettings) -> None:
    """Add `maxItems` and `maxLength` to the schema of a field with inputs."""
    for choice in (schema, *schema.get("oneOf", ()), *schema.get("anyOf", ())):
        _limit_texts(choice, limits.max_chars)
        if choice.get("type") == "array" and choice["items"].get("type") != "integer":
            choice.setdefault("maxItems", limits.max_inputs)


def _limit_texts(schema: dict[str, Any], max_chars: int) -> None:
    """Add `maxLength` to the schemas of all texts in a schema."""
    if schema.get("type") == "string":
        schema["maxLength"] = max_chars
    items = schema.get("items", {})
    for choice in (*([items] if items else []), *schema.get("oneOf", ()), *schema.get("anyOf", ())):
        _limit_texts(choice, max_chars)


def _describe_security(operation: dict[str, Any], *, needs_keys: bool) -> None:
    if operation.pop("security", None) and needs_keys:
        operation["security"] = [{name: []} for name in _SECURITY_SCHEMES]


def _describe_headers(method: str, operation: dict[str, Any]) -> None:
    parameters = [_REQUEST_ID, _TIMEOUT, _PRIORITY] if method == "post" else [_REQUEST_ID]
    operation["parameters"] = [*operation.get("parameters", ()), *parameters]
    for status, response in operation["responses"].items():
        headers = response.setdefault("headers", {})
        headers["X-Request-Id"] = _REQUEST_ID_HEADER
        if status in ("429", "503"):
            headers["Retry-After"] = _RETRY_AFTER_HEADER
