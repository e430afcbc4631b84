"""Access to the gradient routes, beside API keys: only their own pages may call them."""

from fastapi import Depends, Request

from service.api.deadline import deadline_s
from service.api.errors import Forbidden, NotFound
from service.api.middleware import host_matches
from service.api.state import state_of


async def require_debug_enabled(request: Request) -> None:
    """Refuse requests if the routes are disabled, and requests from pages of other hosts.

    Raises:
        NotFound: The routes are disabled.
        Forbidden: The host name is not allowed, or the page comes from another host.
    """
    settings = state_of(request).settings.debug
    if not settings.enabled:
        raise NotFound("the gradient routes are disabled; set VITRINE_DEBUG__ENABLED=true")
    host = request.headers.get("host", "")
    # Protects against DNS rebinding.
    if not host_matches(host, settings.hosts):
        raise Forbidden("the host name is not in VITRINE_DEBUG__HOSTS", code="host")
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise Forbidden("the request comes from a page of another host", code="origin")


async def reject_cross_site(request: Request) -> None:
    """Refuse requests that a page of another site makes a browser send, such as for an image.

    Raises:
        Forbidden: The request is one of these.
    """
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Forbidden("the request comes from a page of another site", code="origin")


async def check_deadline(request: Request) -> None:
    """Refuse an invalid deadline, also where nothing runs.

    Raises:
        Malformed: The deadline is no number of milliseconds.
    """
    deadline_s(request, state_of(request).settings.limits.request_s)


ACCESS = [Depends(require_debug_enabled), Depends(reject_cross_site), Depends(check_deadline)]
