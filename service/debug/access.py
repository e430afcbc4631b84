"""Who may come near the gradient routes, beside whoever has a key: their own pages alone."""

from fastapi import Request

from service.errors import Forbidden, NotFound
from service.middleware import names_one_of
from service.settings import DebugSettings


def debug_settings(request: Request) -> DebugSettings:
    """Return the settings of the gradient routes."""
    settings: DebugSettings = request.app.state.settings.debug
    return settings


async def switched_on(request: Request) -> None:
    """Refuse where gradients are switched off, and pages that other hosts have sent.

    Raises:
        NotFound: They are switched off.
        Forbidden: The host name is not one of ours, or the page that asks is of another.
    """
    settings = debug_settings(request)
    if not settings.enabled:
        raise NotFound("the gradient routes are switched off; VITRINE_DEBUG__ENABLED=true")
    host = request.headers.get("host", "")
    # A name that somebody else's DNS has made ours would make a page there one of ours.
    if not names_one_of(host, settings.hosts):
        raise Forbidden("this host name is not one of VITRINE_DEBUG__HOSTS", code="host")
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise Forbidden("the page that asks is of another host", code="origin")


async def from_no_other_site(request: Request) -> None:
    """Refuse what a page of another site makes a browser ask for, such as an image.

    Raises:
        Forbidden: It does.
    """
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Forbidden("the page that asks is of another site", code="origin")
