"""Inputs, URLs, errors and the keyboard."""

import json
import shutil
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from models.artifact import Artifact
from models.manifest import MANIFEST
from tests.models.checkpoints import edit_json
from tests.service.debug.held_worker import held
from tests.service.page.browsing import (
    CAT,
    Browser,
    Json,
    check_console,
    events,
    find,
    number,
    open_page,
    post,
    run,
    second_opinion,
    select,
    set_value,
    show,
    shows,
    texts,
    type_text,
    until,
)
from tests.service.page.test_accessibility import shown_on
from tests.serving import lines_until, process

# A browser and torch may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(("section", "field"), [("explain", "b"), ("attribute", "a")])
def test_error_of_a_run_names_and_marks_the_field_and_survives_another_tab(
    page: Browser, section: str, field: str
) -> None:
    show(page, section)
    set_value(page, field, {"explain": "a" * 100_001, "attribute": " "}[section])
    run(page, section)
    problem = find(page, f"#{section} > .problem")
    sentence = problem.text
    assert sentence.startswith(f"Text {field.upper()}: ")
    assert sentence.endswith(".")
    assert "/text" not in sentence
    invalid = find(page, f"[name={field}]")
    assert invalid.get_attribute("aria-invalid") == "true"
    show(page, "flow")
    show(page, section)
    assert problem.text == sentence
    assert invalid.get_attribute("aria-invalid") == "true"
    type_text(page, field, "A cat")
    run(page, section)
    assert not problem.text
    assert invalid.get_attribute("aria-invalid") is None


@pytest.mark.parametrize(
    ("field", "value", "label"),
    [
        ("tolerance", "7", "Tolerance"),
        ("evaluations", "3", "Maximum evaluations"),
        ("sigma", "11", "Sigma"),
        ("a", "", "Text A"),
        ("b", "", "Text B"),
    ],
)
def test_dry_run_refuses_what_the_run_refuses(
    page: Browser, field: str, value: str, label: str
) -> None:
    show(page, "attribute")
    page.execute_script("document.querySelector('#attribute details').open = true")
    # In one step: a dry run between clearing and typing would refuse the empty field.
    find(page, f"[name={field}]").send_keys(Keys.CONTROL, "a", Keys.NULL, value or Keys.DELETE)
    find(page, f"[name={field}]").send_keys(Keys.TAB)
    until(partial(shows, page, "#attribute .cost.failed", f"{label}: "))
    refused = find(page, "#attribute .cost").text
    run(page, "attribute")
    assert find(page, "#attribute > .problem").text == refused


def test_dry_run_refuses_a_baseline_that_the_text_equals(url: str) -> None:
    body = {"text": "[PAD]", "target": {"type": "norm"}, "baseline": "pad"}
    answers = [
        httpx2.post(f"{url}/debug/attribute", json={**body, "dry_run": dry}, timeout=240).json()
        for dry in (True, False)
    ]
    assert [answer["code"] for answer in answers] == ["baseline_equals_input"] * 2


def test_edited_text_marks_the_result_as_old_and_removes_its_checks(page: Browser) -> None:
    second_opinion(page)
    assert texts(page, "#explain .lamps li")
    type_text(page, "a", "Another text")
    assert find(page, "#explain .stale").text == "These results are of other inputs: run again."
    assert "old" in (find(page, "#explain .result").get_attribute("class") or "")
    assert not texts(page, "#explain .lamps li")
    type_text(page, "a", CAT)
    assert not find(page, "#explain .stale").is_displayed()
    assert texts(page, "#explain .lamps li")


def test_markup_in_a_text_is_shown_as_text(page: Browser) -> None:
    type_text(page, "a", "<img src=x onerror=alert(1)>")
    run(page, "explain")
    words = texts(page, "#explain [aria-label='Effects in text A'] .word")
    assert "".join(words) == "<imgsrc=xonerror=alert(1)>"
    second_opinion(page)
    run(page, "attribute")
    assert not page.find_elements(By.CSS_SELECTOR, "img[src=x]")


def test_page_url_keeps_the_question_and_not_the_key(browser: Browser, url: str) -> None:
    page = open_page(browser, f"{url}/debug#tab=attribute")
    type_text(page, "a", "1 + 1 = 2 & more, 100 % ünïcode")
    find(page, ".key summary").click()
    find(page, "#key").send_keys("a-secret-key")
    page.execute_script("document.querySelector('#attribute details').open = true")
    select(page, "layer", "layers.0")
    find(page, "[value=occlusion]").click()
    run(page, "attribute")
    before = texts(page, "#attribute .chip")
    address = page.current_url
    assert "secret" not in address
    restored = open_page(browser, address)
    assert find(restored, "[name=a]").get_property("value") == "1 + 1 = 2 & more, 100 % ünïcode"
    assert find(restored, "[name=layer]").get_property("value") == "layers.0"
    assert find(restored, "[value=occlusion]").get_property("checked") is True
    # A cheap question is asked again.
    assert texts(restored, "#attribute .chip") == before
    find(restored, "#attribute [data-export=curl]").click()
    command = find(restored, "#attribute .curl").text
    assert command.startswith(f"curl '{url}/debug/attribute' -H 'Authorization: Bearer KEY'")
    find(restored, "#attribute [data-export=link]").click()
    link = find(restored, "#attribute .curl").text
    assert urlsplit(link).query.startswith("model=")
    assert "secret" not in link
    browser.execute_script("sessionStorage.clear()")


def test_missing_and_unknown_keys_are_asked_for_in_the_field_of_the_page(
    browser: Browser, small_artifact: Artifact
) -> None:
    key = "at-least-16-letters"
    settings = {
        "VITRINE_MODEL__PATH": str(small_artifact.path),
        "VITRINE_AUTH__KEYS": json.dumps([{"name": "me", "key": key, "scopes": ["encode"]}]),
    }
    with process("-m", "service", **settings) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        browser.get(f"{match[1]}/debug")
        until(lambda: find(browser, "#unavailable").text)
        assert find(browser, "#unavailable").text == "The service needs an API key: enter it above."
        assert find(browser, "#key").is_displayed()
        find(browser, "#key").send_keys("unknown", Keys.TAB)
        until(lambda: shows(browser, "#unavailable", "The API key is unknown."))
        find(browser, "#key").clear()
        find(browser, "#key").send_keys(key, Keys.TAB)
        until(lambda: shows(browser, "#model", "(embedding) on"))
        assert not find(browser, "#unavailable").text
        browser.execute_script("sessionStorage.clear()")


# Holds the response to a path for the key "first", and enters keys.
_HOLD_FIRST_KEY = """
const [path, late] = arguments, fetched = window.fetch;
window.fetch = (url, options) => {
  const isHeld = url === path && options.headers.Authorization === "Bearer first";
  if (!isHeld) return fetched(url, options);
  const headers = {"Content-Type": "application/json"}, status = late.detail ? 401 : 200;
  const response = new Response(JSON.stringify(late), {status, headers});
  return new Promise((resolve) => { window.release = () => resolve(response); });
};
window.enter = (key) => {
  const field = document.querySelector("#key");
  field.value = key;
  field.dispatchEvent(new Event("change"));
};
const requests = () => performance.getEntriesByType("resource").map(({name}) => name);
window.lists = () => requests().filter((name) => name.endsWith("/models")).length;
enter("first");
"""


@pytest.mark.parametrize(
    ("path", "late"),
    [
        ("info", {"detail": "late"}),
        ("info", {"model": "late", "outputs": ["pooled"], "labels": []}),
        ("models", {"models": []}),
    ],
)
def test_late_response_for_an_earlier_key_changes_nothing(
    browser: Browser, plain_url: str, path: str, late: Json
) -> None:
    page = open_page(browser, f"{plain_url}/debug#tab=explain", has_gradients=False)
    until(lambda: len(texts(page, "#models a")) > 1)
    shown = texts(page, "#model, #models, #unavailable")
    page.execute_script(_HOLD_FIRST_KEY, path, late)
    until(lambda: page.execute_script("return Boolean(window.release)"))
    page.execute_script("enter('second')")
    until(lambda: page.execute_script("return lists()") == 2)
    page.execute_async_script("release(); setTimeout(arguments[0], 100)")
    assert texts(page, "#model, #models, #unavailable") == shown
    browser.execute_script("sessionStorage.clear()")


def test_link_that_is_opened_in_the_page_itself_runs_too(page: Browser, url: str) -> None:
    page.get(f"{url}/debug#tab=explain&run=1&a=Rain&edited-a=Sun")
    until(lambda: texts(page, "#explain [data-side=a] .word") == ["Rain"])
    assert find(page, "[name=edited-a]").get_property("value") == "Sun"


@pytest.mark.parametrize("tab", ["constructor", "toString", "nonsense", ""])
def test_page_url_with_an_unknown_tab_shows_the_first_tab(
    browser: Browser, url: str, tab: str
) -> None:
    page = open_page(browser, f"{url}/debug#tab={tab}")
    assert find(page, "#rank").is_displayed()
    assert find(page, "#tab-rank").get_attribute("aria-selected") == "true"


def test_cancel_button_aborts_the_running_job(page: Browser, hold: Path) -> None:
    show(page, "attribute")
    with held(hold):
        find(page, "#attribute .go").click()
        assert not find(page, "#attribute .go").is_enabled()
        find(page, "#attribute .cancel").click()
        messages = "Cancelled: the service has stopped the job."
        until(partial(shows, page, "#attribute > .problem", messages))
        until(lambda: find(page, "#attribute .go").is_enabled())
    # The cost of an edited text appears beside the message of the last run, not in its place.
    type_text(page, "a", "A cat on a mat")
    until(partial(shows, page, "#attribute .cost", "of 131,072 token steps"))
    assert find(page, "#attribute > .problem").text == messages


def test_invalid_input_is_named_before_the_run(page: Browser) -> None:
    show(page, "attribute")
    type_text(page, "a", " ")
    until(partial(shows, page, "#attribute .cost.failed", "Text A: "))
    type_text(page, "a", "A cat on a mat")
    until(partial(shows, page, "#attribute .cost", "of 131,072 token steps"))
    assert not page.find_elements(By.CSS_SELECTOR, "#attribute .cost.failed")
    assert find(page, "[name=a]").get_attribute("aria-invalid") is None


# The first dry run is slow, until after the time at which a changed input would be checked.
_SLOW_DRY_RUN = """
    const ask = window.fetch;
    window.fetch = async (path, options) => {
      if (options?.body?.includes("dry_run")) {
        window.fetch = ask;
        await new Promise((resolve, reject) => {
          setTimeout(resolve, 1500);
          options.signal.addEventListener("abort", () => reject(options.signal.reason));
        });
      }
      return ask(path, options);
    };
"""


def test_url_runs_a_view_whose_dry_run_is_slow(browser: Browser, url: str) -> None:
    added = {"source": _SLOW_DRY_RUN}
    script = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", added)
    try:
        page = open_page(browser, f"{url}/debug#tab=attribute&run=1")
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    until(lambda: texts(page, "#attribute .chip"))


def test_ctrl_enter_runs_and_tabs_move_by_the_keyboard(page: Browser, url: str) -> None:
    type_text(page, "b", "A dog ran.")
    page.execute_script("document.getElementById('explain').ariaBusy = null")
    find(page, "[name=b]").send_keys(Keys.CONTROL, Keys.ENTER)
    until(lambda: find(page, "#explain").get_attribute("aria-busy") == "false")
    cosine = post(url, "attribute/pair", a=CAT, b="A dog ran.")["similarity"]
    assert number(find(page, ".figure strong").text) == pytest.approx(cosine, abs=1e-3)
    find(page, "#tab-explain").click()
    for key, name in ((Keys.END, "compare"), (Keys.HOME, "rank"), (Keys.LEFT, "compare")):
        page.switch_to.active_element.send_keys(key)
        assert page.switch_to.active_element.get_attribute("id") == f"tab-{name}"
        assert find(page, f"#{name}").is_displayed()


@pytest.mark.parametrize("selector", ["#tab-explain", "#explain .chip"])
def test_keys_of_the_browser_do_not_move_inside_the_page(page: Browser, selector: str) -> None:
    find(page, selector).send_keys(Keys.ALT, Keys.RIGHT)
    assert page.switch_to.active_element == find(page, selector)


def test_page_loads_from_its_own_host_only_and_logs_no_console_errors(
    logging_browser: Browser, url: str
) -> None:
    page = open_page(logging_browser, f"{url}/debug#tab=explain&run=1")
    run(page, "attribute")
    until(lambda: find(page, "#attribute .chart .main-svg").is_displayed())
    sent = [
        event["params"] for event in events(page) if event["method"] == "Network.requestWillBeSent"
    ]
    addresses = [urlsplit(request["request"]["url"]) for request in sent]
    hosts = {address.netloc for address in addresses if address.scheme.startswith(("http", "ws"))}
    assert hosts == {urlsplit(url).netloc}
    assert "/debug/assets/plotly.min.js" in {address.path for address in addresses}
    check_console(page)


def test_page_of_several_models_links_to_the_page_of_each(
    browser: Browser, small_artifact: Artifact, reranker: Artifact, hold: Path
) -> None:
    models = [
        {"name": "org/embedder", "path": str(small_artifact.path)},
        {"name": "reranker", "path": str(reranker.path)},
    ]
    settings = {"VITRINE_MODELS__SERVED": json.dumps(models), "VITRINE_DEBUG__ENABLED": "true"}
    arguments = ("-m", "tests.service.debug.held_worker")
    with process(*arguments, GRADIENT_HOLD=str(hold), **settings) as started:
        url = lines_until(started, r"Serving .* on (http://\S+)")[1][1]
        browser.get(f"{url}/debug")
        until(lambda: "served models: org/embedder, reranker" in find(browser, "#unavailable").text)
        assert not find(browser, "#key").is_displayed()
        until(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#models a")) == 2)
        for name, kind in (("reranker", "reranker"), ("org/embedder", "embedding")):
            browser.find_element(By.LINK_TEXT, name).click()
            until(partial(shows, browser, "#model", f"{name} ({kind}) on"))
            until(partial(shows, browser, "#models [aria-current=true]", name))
            until(lambda: find(browser, "#rank").get_attribute("aria-busy") == "false")
            assert find(browser, "#rank .result").text
            assert not find(browser, "#rank > .problem").text


def test_long_labels_and_the_key_fit_into_a_phone(
    browser: Browser, classifier: Artifact, tmp_path: Path
) -> None:
    models = []
    for name in ("first", "second"):
        shutil.copytree(classifier.path, tmp_path / name)
        labels = [f"{kind} about {'w' * 60} or another thing" for kind in ("good", "bad", "none")]
        edit_json(tmp_path / name / MANIFEST, labels=labels)
        models.append({"name": name, "path": str(tmp_path / name)})
    with (
        process("-m", "service", VITRINE_MODELS__SERVED=json.dumps(models)) as started,
        shown_on(browser, "phone"),
    ):
        url = lines_until(started, r"Serving .* on (http://\S+)")[1][1]
        address = f"{url}/debug?model=first#tab=explain&run=1"
        page = open_page(browser, address, "classifier", has_gradients=False)
        find(page, ".key summary").click()
        for selector in ("#key", ".figure strong"):
            left, right, width = page.execute_script(
                "const {left, right} = document.querySelector(arguments[0])"
                ".getBoundingClientRect(); return [left, right, innerWidth]",
                selector,
            )
            assert 0 <= left < right <= width, selector


def test_page_runs_scripts_of_its_own_host_only(url: str) -> None:
    policy = httpx2.get(f"{url}/debug").headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe-eval" not in policy
