"""Driving the debug page in a browser."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx2
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select

from tests.eventually import eventually

Browser = webdriver.Chrome
Json = dict[str, Any]

CAT = "The cat sat on the mat."
FELINE = "A feline rested on the rug."
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1280,900",
)


def open_page(
    browser: Browser, address: str, kind: str = "embedding", *, has_gradients: bool = True
) -> Browser:
    """Open the page, and wait for the explanation that it computes by itself.

    With `has_gradients`, wait for the gradient process too.
    """
    browser.get("about:blank")  # a change of the fragment alone would not load the page
    browser.get(address)
    until(lambda: f"({kind}) on" in find(browser, "#model").text)
    if has_gradients:
        until(lambda: find(browser, "#attribute .go").is_enabled())
    fragment = urlsplit(address).fragment
    if not fragment or "run=1" in fragment:
        until(lambda: browser.find_elements(By.CSS_SELECTOR, "[role=tabpanel][aria-busy=false]"))
    return browser


def until(condition: Callable[[], object]) -> None:
    """Return when the condition is true; its elements may be missing or replaced until then."""

    def holds() -> object:
        try:
            return condition()
        except (NoSuchElementException, StaleElementReferenceException):
            return False

    eventually(holds)


def find(page: Browser, selector: str) -> WebElement:
    return page.find_element(By.CSS_SELECTOR, selector)


def texts(page: Browser, selector: str) -> list[str]:
    return [element.text for element in page.find_elements(By.CSS_SELECTOR, selector)]


def type_text(page: Browser, name: str, text: str) -> None:
    field = find(page, f"[name={name}]")
    field.clear()
    field.send_keys(text)


def set_value(page: Browser, name: str, text: str) -> None:
    """Set the value of a field at once, without the events of typing."""
    field = f"document.querySelector('[name={name}]')"
    page.execute_script(f"{field}.value = arguments[0]", text)


def select(page: Browser, name: str, choice: str) -> None:
    Select(find(page, f"[name={name}]")).select_by_visible_text(choice)


def show(page: Browser, section: str) -> None:
    """Open the tab of a section, in the part of the page that has it."""
    tab = find(page, f"#tab-{section}")
    if not tab.is_displayed():
        find(page, "#entries [aria-pressed=false]").click()
    tab.click()


def run(page: Browser, section: str) -> str:
    """Run a section, and return the text of its result."""
    show(page, section)
    # The page sets aria-busy to true and then to false: the end of an earlier run does not count.
    page.execute_script(f"document.getElementById('{section}').ariaBusy = null")
    find(page, f"#{section} .go").click()
    until(lambda: find(page, f"#{section}").get_attribute("aria-busy") == "false")
    return find(page, f"#{section} .result").text


def strike(page: Browser, word: str) -> None:
    """Strike out the first word with this content in the explanation."""
    words = page.find_elements(By.CSS_SELECTOR, "#explain [role=toolbar] .chip .word")
    next(found for found in words if found.text == word).click()


def edit(page: Browser, side: str, text: str) -> None:
    """Type an edited text, and wait for its result: earlier ones are of what was typed so far."""
    type_text(page, f"edited-{side}", text)
    until(partial(shows, page, "#whatif .outcome", f"With “{text}”:"))


def second_opinion(page: Browser) -> str:
    """Wait until the gradients of the explanation are there, and return their text."""
    until(lambda: find(page, ".second").get_attribute("aria-busy") == "false")
    return find(page, ".second").text


def served(url: str, path: str, **body: object) -> Json:
    """Return the response of a route of the serving process, whose status must be 200."""
    response = httpx2.post(f"{url}/{path}", json=body, timeout=240)
    assert response.status_code == 200, response.text
    result: Json = response.json()
    return result


def post(url: str, path: str, **body: object) -> Json:
    """Return the response of a gradient route, whose status must be 200."""
    return served(url, f"debug/{path}", **body)


def chip_scores(page: Browser, section: str) -> list[float]:
    """Return the exact scores of the coloured words or tokens of a section."""
    chips = page.find_elements(By.CSS_SELECTOR, f"#{section} .chip")
    return [float(chip.get_attribute("data-score") or "nan") for chip in chips]


def number(text: str) -> float:
    """Return a number as the page shows it."""
    return float(text.replace("\N{MINUS SIGN}", "-"))


def shows(browser: Browser, selector: str, text: str) -> bool:
    """Whether the element has the text."""
    return text in find(browser, selector).text


def cells(page: Browser, caption: str) -> list[list[str]]:
    """Return the exact cells of the table with this start of its caption."""
    rows: list[list[str]] = page.execute_script(
        "const table = [...document.querySelectorAll('table')].find("
        "(table) => table.caption?.textContent.startsWith(arguments[0]) && table.offsetParent);"
        "return [...table.tBodies[0].rows].map((row) => [...row.cells].map("
        "(cell) => cell.dataset.value ?? cell.textContent))",
        caption,
    )
    return rows


def events(logging_browser: Browser) -> list[Json]:
    """Return the events of its pages and their requests since the last call."""
    entries = logging_browser.get_log("performance")  # type: ignore[no-untyped-call]
    return [json.loads(entry["message"])["message"] for entry in entries]


def check_console(logging_browser: Browser) -> None:
    """Check that its console has neither errors nor warnings."""
    for entry in logging_browser.get_log("browser"):  # type: ignore[no-untyped-call]
        assert entry["level"] not in ("SEVERE", "WARNING"), entry


def open_details(page: Browser) -> None:
    """Open all that a click on a summary shows."""
    page.execute_script("document.querySelectorAll('details').forEach((it) => { it.open = true; })")
