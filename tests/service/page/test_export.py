"""Exports: files that need no service."""

import csv
import io
import json
import shlex
import subprocess
import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import httpx2
import numpy as np
import pytest
from PIL import Image

from tests.service.page.browsing import (
    CAT,
    FELINE,
    Browser,
    events,
    find,
    open_page,
    post,
    run,
    second_opinion,
    select,
    served,
    set_value,
    show,
    shows,
    strike,
    texts,
    type_text,
    until,
)

# A browser and torch may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

Export = Callable[[str, str], Path]


@pytest.fixture
def exported(browser: Browser, tmp_path: Path) -> Iterator[Export]:
    """A function that exports a section in a format and returns the file."""
    behavior = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", behavior)

    def export(section: str, format: str) -> Path:
        # By a script: a click at a place misses a button that moves while the page renders.
        button = find(browser, f"#{section} [data-export={format}]")
        browser.execute_script("arguments[0].click()", button)
        suffix = {"report": "html", "picture": "png"}.get(format, format)
        file = tmp_path / f"vitrine-{section}.{suffix}"
        # An empty file stands for the download until it is complete.
        until(lambda: file.exists() and file.stat().st_size)
        return file

    yield export
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "default"})


def test_json_has_requests_and_responses(page: Browser, url: str, exported: Export) -> None:
    second_opinion(page)
    record = json.loads(exported("explain", "json").read_text())
    first, _, pair, *_, last = record["runs"]
    body = {"queries": CAT, "documents": [FELINE], "explain": {"by": "words", "of": "both"}}
    assert (first["path"], first["request"]) == ("score", body)
    assert first["response"].keys() == served(url, "score", **body).keys()
    expected = post(url, "attribute/pair", a=CAT, b=FELINE)
    assert pair["response"]["matrix"] == [pytest.approx(row) for row in expected["matrix"]]
    assert last["path"] == "debug/attribute"
    assert record["model"] == httpx2.get(f"{url}/info").json()


def test_curl_sends_requests_that_are_too_long_for_an_argument(page: Browser) -> None:
    # Linux takes up to 128 KiB as one argument of a command.
    for name in ("a", "b"):
        set_value(page, name, f'it\'s "{name}" \\ $HOME `x` \n🦕 ' + "é cat " * 11_000)
    run(page, "explain")
    second_opinion(page)
    record = page.execute_script(
        "return import('./debug/assets/state.js').then(({sections}) => sections.explain.runs[0])"
    )
    find(page, "#explain [data-export=curl]").click()
    text = page.execute_script("return document.querySelector('#explain .curl').textContent")
    script = text.split("\ncurl ")[0].replace("curl", "curl --silent --show-error", 1)
    assert len(script.encode()) > 128 * 1024
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    response = json.loads(done.stdout)
    assert response["scores"] == pytest.approx(record["result"]["scores"], abs=1e-5)
    assert response["tokens"] == record["result"]["tokens"]


def test_curl_has_no_characters_that_a_terminal_takes_for_keys(page: Browser) -> None:
    text = "it's a cat\x7f \x1b[31m \x85 \x9b \u00a0"
    set_value(page, "a", text)
    run(page, "explain")
    find(page, "#explain [data-export=curl]").click()
    command = page.execute_script("return document.querySelector('#explain .curl').textContent")
    first = command.split("\ncurl ")[0]
    assert [character for character in first if unicodedata.category(character) == "Cc"] == []
    assert json.loads(shlex.split(first)[-1])["queries"] == text


def test_csv_has_the_exact_numbers_of_the_tables(page: Browser, url: str, exported: Export) -> None:
    type_text(page, "a", '=1+1, "quoted"')
    run(page, "attribute")
    rows = list(csv.reader(io.StringIO(exported("attribute", "csv").read_text())))
    text = '=1+1, "quoted"'
    result = post(url, "attribute", text=text, target={"type": "cosine", "text": FELINE})
    words = [(text[w["start"] : w["end"]], w["score"]) for w in result["words"]]
    start = rows.index(["Word or token", "Score"]) + 1
    found = [
        (word.removeprefix("'"), float(score))
        for word, score in rows[start : start + len(words) + 2]
    ]
    special = [(word, score) for word, score in found if word.startswith("[")]
    expected = sorted([*words, *special])
    assert [word for word, _ in sorted(found)] == [word for word, _ in expected]
    scores = [score for _, score in expected]
    assert [score for _, score in sorted(found)] == pytest.approx(scores, abs=1e-6)
    assert len(words) > 3
    # A spreadsheet would compute a cell that starts with "=".
    assert not any(cell.startswith("=") for row in rows for cell in row)


def test_picture_shows_the_result(page: Browser, exported: Export) -> None:
    second_opinion(page)
    size = find(page, "#explain .result").size
    picture = Image.open(exported("explain", "picture")).convert("RGB")
    assert picture.width == pytest.approx(2 * (size["width"] + 48), abs=4)
    # Nothing is cut, and nothing is empty: only the margin is below the last line.
    background = picture.getpixel((0, 0))
    assert background == (0xFF, 0xFF, 0xFF)
    rows = np.asarray(picture) != background
    last = int(np.flatnonzero(rows.any((1, 2)))[-1])
    assert picture.height - 120 < last < picture.height - 20
    # The warm colour of the highest score, and dark text.
    colours = {colour for _, colour in picture.getcolors(1 << 24) or []}
    assert (0xC9, 0x64, 0x0A) in colours
    assert len(colours) > 50


def test_picture_shows_texts_with_characters_that_xml_does_not_have(
    browser: Browser, url: str, exported: Export
) -> None:
    pages = quote("The first page.\fThe cat\a sat on the \uffff mat.")
    open_page(browser, f"{url}/debug#tab=explain&run=1&b={pages}")
    picture = exported("explain", "picture").read_bytes()
    assert picture.startswith(b"\x89PNG")


def test_picture_that_is_too_large_for_the_browser_is_a_problem(
    page: Browser, tmp_path: Path, exported: Export
) -> None:
    page.execute_script("document.querySelector('.answer').style.height = '40000px'")
    find(page, "#explain [data-export=picture]").click()
    until(partial(shows, page, "#explain > .problem", "too large for a picture"))
    exported("explain", "json")
    assert [file.name for file in tmp_path.iterdir()] == ["vitrine-explain.json"]


def test_report_opens_without_a_service_and_requests_nothing(
    page: Browser, url: str, exported: Export, logging_browser: Browser
) -> None:
    second_opinion(page)
    strike(page, "cat")
    until(lambda: "Difference" in find(page, "#whatif").text)
    figure = find(page, ".figure strong").text
    chips = texts(page, "#explain .chip")
    moved = texts(page, "#whatif td")
    report = exported("explain", "report")
    open_page(page, f"{url}/debug#tab=attribute")
    run(page, "attribute")
    until(lambda: find(page, "#attribute .chart .main-svg").is_displayed())
    reports = [report, exported("attribute", "report")]
    reader = logging_browser
    reader.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    reader.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    for file in reports:
        reader.get(file.as_uri())
        assert find(reader, "h1").is_displayed()
        sent = [
            event["params"]["request"]["url"]
            for event in events(reader)
            if event["method"] == "Network.requestWillBeSent"
        ]
        assert [address for address in sent if not address.startswith("data:")] == [file.as_uri()]
        if file == report:
            assert find(reader, ".figure strong").text == figure
            assert texts(reader, ".chip") == chips
            assert texts(reader, "h2 ~ .outcome td") == moved
        else:
            assert find(reader, ".chart svg").is_displayed()
        record = json.loads(find(reader, "#data").get_attribute("textContent") or "")
        assert record["runs"][0]["response"]["tokens" if file != report else "explanations"]
        assert "script" not in reader.execute_script(
            "return [...document.querySelectorAll('[src], script:not([type]), link')]"
            ".map((e) => e.tagName.toLowerCase())"
        )


def test_report_has_the_numbers_of_the_json_file(page: Browser, exported: Export) -> None:
    show(page, "flow")
    find(page, "#flow summary").click()
    select(page, "emulate", "float16")
    type_text(page, "scale", str(2**32))
    run(page, "flow")
    expected = json.loads(exported("flow", "json").read_text())
    assert "NaN" in json.dumps(expected["runs"])  # a text: JSON has no such number
    page.get(exported("flow", "report").as_uri())
    assert json.loads(find(page, "#data").get_attribute("textContent") or "") == expected


def test_report_of_old_results_has_the_texts_that_they_are_of(
    page: Browser, exported: Export
) -> None:
    type_text(page, "a", "Rain.")
    assert find(page, "#explain .stale").is_displayed()
    page.get(exported("explain", "report").as_uri())
    assert texts(page, ".facts dd")[:2] == [CAT, FELINE]
    link = find(page, "p a").get_attribute("href") or ""
    assert "a" not in parse_qs(urlsplit(link).fragment)
    record = json.loads(find(page, "#data").get_attribute("textContent") or "")
    assert record["runs"][0]["request"]["queries"] == CAT
