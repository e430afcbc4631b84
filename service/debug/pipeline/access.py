"""Access checks of the gradient routes, in addition to API keys.

The gradient routes must be enabled, the `Host` header must contain an allowed host name, and
browser requests must not come from web pages of other hosts or sites.
"""

from fastapi import Depends, Request

from service.api.errors import Forbidden, NotFound
from service.api.middleware import host_matches
from service.api.state import state_of


async def require_debug_enabled(request: Request) -> None:
    """Reject the request if gradient routes are disabled, or its host or origin is not allowed.

    Raises:
        NotFound: The gradient routes are disabled.
        Forbidden: The host name in the `Host` header is not in `debug.hosts`, or the host and port
            in the `Origin` header differ from those in the `Host` header.
    """
    settings = state_of(request).settings.debug
    if not settings.enabled:
        raise NotFound("the gradient routes are disabled; set VITRINE_DEBUG__ENABLED=true")
    host = request.headers.get("host", "")
    # Protects against DNS rebinding.
    if not host_matches(host, settings.hosts):
        raise Forbidden("the request's host name is not in VITRINE_DEBUG__HOSTS", code="host")
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise Forbidden("the request comes from a web page of another host", code="origin")


async def reject_cross_site(request: Request) -> None:
    """Reject cross-site browser requests, for example from an image in another site's page.

    Raises:
        Forbidden: The `Sec-Fetch-Site` header is present and is neither "none" nor "same-origin".
    """
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Forbidden("the request comes from a web page of another site", code="origin")


async def check_deadline(request: Request) -> None:
    """Reject an invalid deadline, even in a request that does not use it, such as a dry run.

    Raises:
        Malformed: The `X-Request-Timeout-Ms` header is not a positive number of milliseconds.
    """
    state_of(request).deadline(request)


ACCESS = [Depends(require_debug_enabled), Depends(reject_cross_site), Depends(check_deadline)]
