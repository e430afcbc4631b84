"""Accessibility of every view, by axe-core: light, dark, and as narrow as a phone."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium.webdriver.support.ui import Select

from tests.service.page.browsing import (
    Browser,
    edit,
    find,
    open_details,
    open_page,
    run,
    second_opinion,
    set_value,
    show,
    type_text,
    until,
)

AXE = Path(__file__).parents[3] / ".venv-bench/node_modules/axe-core/axe.min.js"

# A browser and torch may start slowly: the timeout only bounds a hang.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not AXE.exists(), reason="no axe-core: make test installs it, where there is npm"
    ),
]

WIDTHS = {"light": 1280, "dark": 1280, "phone": 390}


@contextmanager
def shown_on(browser: Browser, screen: str) -> Iterator[None]:
    """Show the open page with a light or dark colour scheme, or in a narrow window."""
    metrics = {
        "width": WIDTHS[screen],
        "height": 844,
        "deviceScaleFactor": 1,
        "mobile": screen == "phone",
    }
    scheme = {"name": "prefers-color-scheme", "value": "dark" if screen == "dark" else "light"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def violations(page: Browser) -> list[str]:
    page.execute_script(AXE.read_text())
    result = page.execute_async_script(
        "const done = arguments[0];"
        "axe.run(document).then(({violations}) => done(violations), (e) => done([String(e)]))"
    )
    return [
        f"{found['id']}: {node['html'][:200]}: {node.get('failureSummary', '')[:300]}"
        for found in result
        for node in found["nodes"]
    ]


def check(page: Browser) -> None:
    """Check the page as it is, on every screen."""
    open_details(page)
    for screen in WIDTHS:
        with shown_on(page, screen):
            check_screen(page, screen)


def check_screen(page: Browser, screen: str) -> None:
    assert violations(page) == [], screen
    # The page itself does not scroll sideways.
    width = page.execute_script("return document.documentElement.scrollWidth - innerWidth")
    assert width <= 0
    small = page.execute_script(
        "return [...document.querySelectorAll('main *')].filter((e) => e.offsetParent && "
        "[...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && "
        "parseFloat(getComputedStyle(e).fontSize) < 11).map((e) => e.outerHTML)"
    )
    assert small == []


@pytest.mark.parametrize("section", ["explain", "attribute", "questions", "flow", "parity", "vjp"])
def test_view_has_no_violations(browser: Browser, url: str, section: str) -> None:
    page = open_page(browser, f"{url}/debug#tab={section}")
    cotangent = [round(math.sin(index), 2) for index in range(32)]
    set_value(page, "cotangent", json.dumps(cotangent))
    if section == "attribute":
        for method in ("grad_x_input", "saliency", "smoothgrad", "occlusion"):
            page.execute_script(f"document.querySelector('[value={method}]').checked = true")
    run(page, section)
    if section == "explain":
        second_opinion(page)
    if section in ("attribute", "flow", "parity"):
        until(lambda: find(page, f"#{section} .chart .main-svg").is_displayed())
    check(page)


def test_comparison_without_another_model_has_no_violations(browser: Browser, url: str) -> None:
    page = open_page(browser, f"{url}/debug#tab=compare")
    until(lambda: find(page, "#one-model").is_displayed())
    check(page)


@pytest.mark.parametrize("kind", ["embedding", "reranker", "multi", "sparse"])
def test_ranking_has_no_violations(
    browser: Browser, request: pytest.FixtureRequest, kind: str
) -> None:
    url = request.getfixturevalue("url" if kind == "embedding" else f"{kind}_url")
    page = open_page(browser, f"{url}/debug#tab=rank", kind)
    set_value(page, "passages", "w8 w9.\n\nw5 w6! w7 w8.\n\n" + "w5 w6 w7 w8! " * 200)
    type_text(page, "query", "w5 w6")
    run(page, "rank")
    until(lambda: find(page, "#rank .second").get_attribute("aria-busy") == "false")
    assert find(page, "#rank .cut").is_displayed()
    find(page, "#rank .row:last-child [data-action=expect]").click()
    until(lambda: find(page, "#rank .why h3").is_displayed())
    find(page, "#rank .unit").click()
    until(lambda: find(page, "#rank .after").text)
    find(page, "#rank [data-action=edit]").click()
    check(page)


def test_layernorm_with_a_wrong_operator_has_no_violations(browser: Browser, url: str) -> None:
    page = open_page(browser, f"{url}/debug#tab=layernorm&rows=own")
    assert "candidate: dx[0, " in run(page, "layernorm")
    check(page)


def test_problems_and_old_results_have_no_violations(browser: Browser, url: str) -> None:
    page = open_page(browser, f"{url}/debug#tab=explain&run=1")
    edit(page, "b", "A dog ran.")
    type_text(page, "a", " ")
    show(page, "attribute")
    until(lambda: find(page, "#attribute .cost.failed").is_displayed())
    check(page)
    run(page, "attribute")
    check(page)


def test_long_texts_have_no_violations(browser: Browser, url: str) -> None:
    page = open_page(browser, f"{url}/debug#tab=explain")
    set_value(page, "a", "A cat sat on it. " * 12)
    set_value(page, "b", "Rain fell on a dog. " * 8)
    run(page, "explain")
    open_details(page)
    second_opinion(page)
    open_details(page)
    assert "words of A and" in find(page, "#explain .result").text
    check(page)


def test_comparison_of_two_models_has_no_violations(browser: Browser, url_of_both: str) -> None:
    page = open_page(browser, f"{url_of_both}/debug?model=first#tab=compare")
    until(lambda: len(Select(find(page, "[name=other]")).options) == 1)
    type_text(page, "compare-texts", "The cat sat.\nA feline rested.\nRain fell on it.")
    assert "Where do the layers differ?" in run(page, "compare")
    until(lambda: find(page, "#compare .chart .main-svg").is_displayed())
    check(page)


@pytest.mark.parametrize("kind", ["reranker", "classifier", "multi", "sparse"])
def test_explanation_of_every_kind_has_no_violations(
    browser: Browser, request: pytest.FixtureRequest, kind: str
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    page = open_page(browser, f"{url}/debug#tab=explain", kind)
    type_text(page, "a", "w5 w6 w7")
    type_text(page, "b", "w8 w9")
    run(page, "explain")
    second_opinion(page)
    assert not find(page, "#explain > .problem").text
    check(page)


def test_results_begin_near_the_top_of_a_phone(browser: Browser, url: str) -> None:
    with shown_on(browser, "phone"):
        page = open_page(browser, f"{url}/debug#tab=explain&run=1")
        show(page, "explain")
        top = page.execute_script(
            "return document.querySelector('.figure').getBoundingClientRect().top + scrollY"
        )
    assert top < 480
