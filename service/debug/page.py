"""Routes of the gradient web page: static files, and the chart library of the package `plotly`."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter, Depends, Request, Response

from service.api.errors import NotFound
from service.api.raw_route import RawRoute
from service.api.state import State
from service.debug.pipeline.access import require_debug_enabled

_FOLDER = Path(__file__).parent / "page"
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

router = APIRouter(
    prefix="/debug",
    route_class=RawRoute,
    dependencies=[Depends(require_debug_enabled)],
    include_in_schema=False,
)


@router.get("")
async def page(_request: Request, _state: State) -> Response:
    """Return the HTML page.

    The page itself needs no API key, because it contains no secrets. If the service has API keys,
    the requests that the page sends to the gradient routes need one.
    """
    return await _response_of(_FOLDER / "index.html")


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
    return await _response_of(files[name])


async def _response_of(file: Path) -> Response:
    # Read before the response starts: a FileResponse fails in the middle of the response if the
    # file cannot be opened.
    content = await asyncio.to_thread(file.read_bytes)
    return Response(content, headers=_HEADERS, media_type=_MEDIA_TYPES[file.suffix])
