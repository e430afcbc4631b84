"""The documentation site builds without warnings, such as those of dead links, and offline."""

import html
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "-c", "docs"]
    built = subprocess.run(
        [*command, "--doctree-dir", folder / "trees", ".", folder / "html"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder / "html"


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    loaded = [
        (page.name, url)
        for page in pages
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text())
        for url in re.findall(r'(?:src|href)="((?:https?:)?//[^"]*)"', tag)
    ]
    assert not loaded
    styles = "".join(style.read_text() for style in site.rglob("*.css"))
    assert not re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//", styles)


def test_local_links_and_pictures_exist(site: Path) -> None:
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    checked = 0
    for page, text in pages.items():
        for url in re.findall(r'\b(?:href|src|srcset)="([^":]+)"', text):
            name, _, anchor = html.unescape(unquote(url)).partition("#")
            target = page.parent / name.partition("?")[0] if name else page
            assert target.exists(), f"{page.relative_to(site)} links to {url}"
            if anchor and target.suffix == ".html":
                there = pages[target.resolve()]
                assert re.search(rf'\bid="{re.escape(anchor)}"', there), f"{page}: {url}"
            checked += 1
    assert checked > 1000


def test_http_api_has_every_native_route_and_links_to_its_schemas(site: Path) -> None:
    page = (site / "docs/reference/http-api.html").read_text()
    for route in ("POST /encode", "POST /rerank", "POST /debug/attribute", "GET /info"):
        assert f"{route}<a" in page
    assert '<a class="reference internal" href="#schema-encoderequest">' in page
    targets = set(re.findall(r'href="#(schema-\w+)"', page))
    assert targets
    assert all(f'id="{target}"' in page for target in targets)
