"""The route dependency that requires an API key with a scope."""

from typing import Any

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from service.api.errors import Forbidden
from service.api.headers import header
from service.api.state import state_of
from service.settings import Scope

# Key in the `state` of an ASGI scope: whether the API key is for bulk requests only.
BULK_ONLY = "bulk_only"
_BEARER = HTTPBearer(auto_error=False, description="API key, required if API keys are configured")


def require_scope(scope: Scope) -> Any:  # noqa: ANN401 - Depends() returns Any
    """Return a route dependency that requires an API key with the scope, if keys are configured."""

    async def require(request: Request, _documented: Any = Security(_BEARER)) -> None:  # noqa: ANN401, B008
        keys = state_of(request).keys
        if keys.is_open and scope == "admin":
            raise Forbidden(
                "this route needs an API key with the scope admin, and no API keys are configured; "
                "set VITRINE_AUTH__KEYS",
                code="keys_required",
            )
        if not keys.is_open:
            key = keys.require(_api_key(request), scope)
            request.scope["state"] |= {"api_key": key.name, BULK_ONLY: key.is_bulk_only}

    require.__name__ = f"require_{scope}"
    return Depends(require)


def _api_key(request: Request) -> str | None:
    scheme, _, key = (header(request, "authorization") or "").partition(" ")
    if scheme.lower() == "bearer" and key:
        return key.strip()
    # Azure OpenAI clients send the key in the header `api-key`.
    return header(request, "x-api-key") or header(request, "api-key")
