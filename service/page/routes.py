"""Routes of the web page: its static files, and the chart library of the package `plotly`."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter, Depends, Request, Response

from service.api.errors import NotFound
from service.api.raw_route import RawRoute
from service.api.state import State, state_of

_FOLDER = Path(__file__).parent / "static"
_CHARTS = "plotly.min.js"
_MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}

# Scripts are loaded from this host only. The chart library needs inline styles.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def require_page_enabled(request: Request) -> None:
    """Reject the request if the page is disabled.

    Raises:
        NotFound: The page is disabled.
    """
    if not state_of(request).settings.server.page:
        raise NotFound("the page is disabled; set VITRINE_SERVER__PAGE=true")


router = APIRouter(
    prefix="/debug",
    route_class=RawRoute,
    dependencies=[Depends(require_page_enabled)],
    include_in_schema=False,
)


@router.get("")
async def page(_request: Request, state: State) -> Response:
    """Return the HTML page, which says whether the gradient routes are enabled.

    The page itself needs no API key, because it contains no secrets. If the service has API keys,
    the requests that the page sends need one.
    """
    content = await asyncio.to_thread((_FOLDER / "index.html").read_text, "utf-8")
    gradients = "enabled" if state.settings.debug.enabled else "disabled"
    content = content.replace("{{gradients}}", gradients)
    return Response(content, headers=_HEADERS, media_type=_MEDIA_TYPES[".html"])


@router.get("/assets/{name}")
async def asset(request: Request, _state: State) -> Response:
    """Return one file of the page, such as a script."""
    files = {path.name: path for path in _FOLDER.iterdir()}
    # `find_spec` does not import the package, which would take a second.
    charts = find_spec("plotly")
    if charts is not None and charts.origin is not None:
        files[_CHARTS] = Path(charts.origin).parent / "package_data" / _CHARTS
    name = request.path_params["name"]
    if name not in files:
        raise NotFound("the page has no file of this name", code="not_found")
    # Read before the response starts: a FileResponse fails in the middle of the response if the
    # file cannot be opened.
    content = await asyncio.to_thread(files[name].read_bytes)
    return Response(content, headers=_HEADERS, media_type=_MEDIA_TYPES[files[name].suffix])
