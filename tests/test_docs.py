"""The documentation site builds without warnings, such as those of dead links, and offline."""

import html
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from service.app import create_app
from service.settings import DebugSettings, Settings
from tests.eventually import eventually
from tests.service.page.browsing import Browser
from tests.service.page.conftest import browser  # noqa: F401 - a fixture
from tests.test_code_blocks import blocks, commands

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


def test_each_route_is_on_one_page_of_the_http_api_with_links_to_its_schemas(site: Path) -> None:
    pages = [page.read_text() for page in site.glob("docs/reference/http-api/*.html")]
    api = create_app(Settings(debug=DebugSettings(enabled=True))).openapi()
    for path, methods in api["paths"].items():
        for method in methods:
            heading = f">{method.upper()} {path}<a"
            assert sum(heading in page for page in pages) == 1, heading
    for page in pages:
        targets = set(re.findall(r'<a class="reference internal" href="#([a-z-]+-\w+)"', page))
        assert targets
        assert all(f'id="{target}"' in page for target in targets)


def test_no_page_scrolls_sideways_on_a_phone(site: Path, browser: Browser) -> None:  # noqa: F811
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        for page in site.rglob("*.html"):
            browser.get(page.as_uri())
            # furo's content scrolls in place of the page; tables scroll on their own.
            widths = browser.execute_script(
                "return [document.scrollingElement, ...document.querySelectorAll('.content')]"
                ".map((element) => element.scrollWidth)"
            )
            assert max(widths) <= phone["width"], page.relative_to(site)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def has_text(element: WebElement, text: str) -> bool:
    return element.text == text


@pytest.mark.parametrize(
    "page", ["docs/tutorial.md", "service/README.md", "service/bulk/README.md"]
)
def test_copy_button_copies_commands_without_prompt_and_output(
    site: Path,
    browser: Browser,  # noqa: F811
    page: str,
) -> None:
    browser.get((site / page).with_suffix(".html").as_uri())
    browser.execute_script(
        "navigator.clipboard.writeText = async (text) => { window.copied = text; }"
    )
    buttons = browser.find_elements(By.CSS_SELECTOR, ".highlight-console button.copy")
    sessions = blocks(page, "console")
    for button, session in zip(buttons, sessions, strict=True):
        browser.execute_script("arguments[0].click()", button)
        copied = browser.execute_script("return window.copied")
        assert copied == "\n".join(command.text for command in commands(session))
        eventually(partial(has_text, button, "Copied"))
