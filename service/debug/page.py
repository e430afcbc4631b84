"""The page to look at gradients with: static files, and the chart library as pip installed it."""

from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import FileResponse

from service.debug.access import switched_on
from service.errors import NotFound
from service.routing import DirectRoute

_FOLDER = Path(__file__).parent / "page"
_CHARTS = "plotly.min.js"

# Scripts are files of this host. The chart library sets styles of its own.
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
    route_class=DirectRoute,
    dependencies=[Depends(switched_on)],
    include_in_schema=False,
)


@router.get("")
async def page(_request: Request) -> Response:
    """Return the page. It holds nothing secret; what it asks for needs a key."""
    return FileResponse(_FOLDER / "index.html", headers=_HEADERS)


@router.get("/assets/{name}")
async def asset(request: Request) -> Response:
    """Return one of the page's files."""
    files = {path.name: path for path in _FOLDER.iterdir()}
    # The package alone knows where it is, and importing it would take a second.
    charts = find_spec("plotly")
    if charts is not None and charts.origin is not None:
        files[_CHARTS] = Path(charts.origin).parent / "package_data" / _CHARTS
    name = request.path_params["name"]
    if name not in files:
        raise NotFound("the page has no such file", code="not_found")
    return FileResponse(files[name], headers=_HEADERS)
