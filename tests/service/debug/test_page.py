"""The debug page in a browser, with the service as a process of its own."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select
from sentence_transformers import MultiVectorEncoder
from starlette.testclient import TestClient

from models.artifact import Artifact
from tests.eventually import eventually
from tests.service.debug.held_worker import held
from tests.serving import lines_until, process

# A browser and torch may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

Browser = webdriver.Chrome
Json = dict[str, Any]

CAT = "The cat sat on the mat."
FELINE = "A feline rested on the rug."
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1280,900",
)


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file; while it exists, no gradient job runs."""
    return tmp_path_factory.mktemp("hold") / "hold"


def served(artifact: Artifact, hold: Path) -> Iterator[str]:
    settings = {
        "VITRINE_MODEL__PATH": str(artifact.path),
        "VITRINE_DEBUG__ENABLED": "true",
        # No deadline is hit by accident on a slow machine.
        "VITRINE_DEBUG__DEADLINE_S": "300",
        "VITRINE_LIMITS__REQUEST_S": "300",
        "VITRINE_ENGINE__TIMEOUT_S": "300",
        "GRADIENT_HOLD": str(hold),
    }
    with process("-m", "tests.service.debug.held_worker", **settings) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        yield match[1]


@pytest.fixture(scope="module")
def url(small_artifact: Artifact, hold: Path) -> Iterator[str]:
    yield from served(small_artifact, hold)


@pytest.fixture(scope="module")
def reranker_url(reranker: Artifact, hold: Path) -> Iterator[str]:
    yield from served(reranker, hold)


@pytest.fixture(scope="module")
def classifier_url(classifier: Artifact, hold: Path) -> Iterator[str]:
    yield from served(classifier, hold)


@pytest.fixture(scope="module")
def multi_url(multi_encoder: tuple[MultiVectorEncoder, Artifact], hold: Path) -> Iterator[str]:
    yield from served(multi_encoder[1], hold)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("chromedriver is not installed: there is no browser to drive")
    options = webdriver.ChromeOptions()
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(executable_path=driver))
    yield started
    started.quit()


@pytest.fixture
def page(browser: Browser, url: str) -> Browser:
    """Return the newly opened page."""
    return open_page(browser, f"{url}/debug")


def open_page(browser: Browser, address: str, kind: str = "embedding") -> Browser:
    browser.get("about:blank")  # a change of the fragment alone would not load the page
    browser.get(address)
    until(lambda: f"({kind}) on cpu" in find(browser, "#model").text)
    return browser


def until(condition: Callable[[], object]) -> None:
    """Return when the condition is true; it may look for elements that are not there yet."""

    def holds() -> object:
        try:
            return condition()
        except NoSuchElementException:
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


def select(page: Browser, name: str, choice: str) -> None:
    Select(find(page, f"[name={name}]")).select_by_visible_text(choice)


def run(page: Browser, section: str) -> str:
    """Run a section, and return the text of its result."""
    find(page, f"#tab-{section}").click()
    # The page sets aria-busy to true and then to false: the end of an earlier run does not count.
    page.execute_script(f"document.getElementById('{section}').ariaBusy = null")
    find(page, f"#{section} .go").click()
    until(lambda: find(page, f"#{section}").get_attribute("aria-busy") == "false")
    return find(page, f"#{section} .result").text


def post(url: str, path: str, **body: object) -> Json:
    result: Json = httpx2.post(f"{url}/debug/{path}", json=body, timeout=240).json()
    return result


def test_tokens_show_the_scores_of_the_route_and_their_sum(page: Browser, url: str) -> None:
    type_text(page, "a", "A cat on a mat")
    until(lambda: find(page, "#attribute .cost").text == "1,792 of 131,072 token steps")
    shown = run(page, "attribute")
    target = {"type": "cosine", "text": FELINE}
    result = post(url, "attribute", text="A cat on a mat", target=target)
    chips = page.find_elements(By.CSS_SELECTOR, "#attribute .chip")
    scores = [float(chip.get_attribute("data-score") or "nan") for chip in chips]
    assert scores == pytest.approx(result["scores"], abs=1e-5)
    assert texts(page, ".chip .word") == ["[CLS]", "A", "cat", "on", "a", "mat", "[SEP]"]
    displayed = [float(s.replace("\u2212", "-")) for s in texts(page, ".chip .score")]
    assert displayed == pytest.approx(scores, abs=0.005 * max(map(abs, scores)))
    assert f"sum of scores\n{result['sum']:.4f}" in shown
    assert "converged" in shown
    assert "not converged" not in shown
    lamps = texts(page, "#lamps .good span:last-child")
    assert lamps == ["cosine 1.000000", "converged", "all numbers"]
    until(lambda: find(page, "#attribute .chart .main-svg").is_displayed())


def scores_of_chips(page: Browser) -> list[float]:
    chips = page.find_elements(By.CSS_SELECTOR, "#attribute .chip")
    return [float(chip.get_attribute("data-score") or "nan") for chip in chips]


def test_words_and_tokens_have_the_same_sum(page: Browser, url: str) -> None:
    text = "It doesn't purr."
    type_text(page, "a", text)
    run(page, "attribute")
    result = post(url, "attribute", text=text, target={"type": "cosine", "text": FELINE})
    assert texts(page, ".chip .word") == ["[CLS]", "It", "doesn't", "purr", ".", "[SEP]"]
    words = [0.0, *(word["score"] for word in result["words"]), 0.0]
    assert scores_of_chips(page) == pytest.approx(words, abs=1e-5)
    find(page, "[name=units][value=tokens]").click()
    spelled = ["[CLS]", "It", "doesn", "'", "t", "pu", "rr", ".", "[SEP]"]
    assert texts(page, ".chip .word") == spelled
    assert scores_of_chips(page) == pytest.approx(result["scores"], abs=1e-5)
    assert "units=tokens" in page.current_url
    restored = open_page(page, page.current_url)
    assert find(restored, "[name=units][value=tokens]").get_property("checked") is True


def test_reranker_has_a_query_and_a_document(browser: Browser, reranker_url: str) -> None:
    page = open_page(browser, f"{reranker_url}/debug", "reranker")
    assert [tab for tab in texts(page, "[role=tab]") if tab] == ["Attribute", "LayerNorm"]
    assert [label.split("\n")[0] for label in texts(page, ".texts label")] == [
        "Query",
        "Document",
        "Versus (other document, optional)",
        "API key (optional)",
    ]
    assert not find(page, "[name=target]").is_displayed()
    query, document = "w7 w9", "w21 w5 w33"
    type_text(page, "a", query)
    type_text(page, "b", document)
    until(lambda: find(page, "#attribute .cost").text == "2,048 of 131,072 token steps")
    shown = run(page, "attribute")
    pair = {"text": query, "text_pair": document, "target": {"type": "score"}}
    result = post(reranker_url, "attribute", **pair)
    rows = page.find_elements(By.CSS_SELECTOR, "#attribute .passage")
    chips = [row.find_elements(By.CSS_SELECTOR, ".chip .word") for row in rows]
    assert [[chip.text for chip in row] for row in chips] == [
        ["[CLS]", "w7", "w9", "[SEP]"],
        ["w21", "w5", "w33", "[SEP]"],
    ]
    assert scores_of_chips(page) == pytest.approx(result["scores"], abs=1e-5)
    sums = [sum(w["score"] for w in result["words"] if w["text"] == index) for index in (0, 1)]
    for name, total in zip(("Query", "Document"), sums, strict=True):
        figure = re.search(rf"{name} sum (\S+)", shown)
        assert figure
        assert float(figure[1].replace("\N{MINUS SIGN}", "-")) == pytest.approx(total, rel=0.06)
    assert "score (logit)" in shown
    lamps = texts(page, "#lamps .good span:last-child")
    assert lamps[0].startswith("difference ")
    assert lamps[1:] == ["converged", "all numbers"]
    type_text(page, "b", " ")
    until(lambda: "(at /text_pair)" in find(page, "#attribute .cost.failed").text)


def chips_of_passages(page: Browser) -> list[list[str]]:
    rows = page.find_elements(By.CSS_SELECTOR, "#attribute .passage")
    return [[c.text for c in row.find_elements(By.CSS_SELECTOR, ".chip .word")] for row in rows]


def number(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-"))


def test_margin_over_another_document_has_a_row_for_each_text(
    browser: Browser, reranker_url: str
) -> None:
    page = open_page(browser, f"{reranker_url}/debug", "reranker")
    query, document, versus = "w7 w9", "w21 w5 w33", "w8 w51"
    for name, text in {"a": query, "b": document, "c": versus}.items():
        type_text(page, name, text)
    shown = run(page, "attribute")
    target = {"type": "score", "versus": versus}
    result = post(reranker_url, "attribute", text=query, text_pair=document, target=target)
    assert chips_of_passages(page) == [
        ["[CLS]", "w7", "w9", "[SEP]"],
        ["w21", "w5", "w33", "[SEP]"],
        ["w8", "w51", "[SEP]"],
    ]
    scores = result["scores"]
    # The query is read with both documents: its tokens have the sums of their scores.
    both = [a + b for a, b in zip(scores[:4], scores[8:12], strict=True)]
    assert scores_of_chips(page) == pytest.approx([*both, *scores[4:8], *scores[12:]], abs=1e-5)
    headings = ["Query sum", "Document sum", "Versus sum"]
    assert [text.rsplit(" ", 1)[0] for text in texts(page, ".passage h4")] == headings
    totals = [number(text.split()[-1]) for text in texts(page, ".passage h4")]
    assert sum(totals) == pytest.approx(result["sum"], abs=1e-3)
    assert f"margin (difference of logits)\n{result['value']:.4f}".replace("-", "\u2212") in shown
    restored = open_page(page, page.current_url, "reranker")
    assert find(restored, "[name=c]").get_property("value") == versus


def test_multi_vector_model_has_maxsim_and_its_alignment(browser: Browser, multi_url: str) -> None:
    page = open_page(browser, f"{multi_url}/debug", "multi")
    assert [tab for tab in texts(page, "[role=tab]") if tab] == ["Attribute", "LayerNorm"]
    assert not find(page, "[name=target]").is_displayed()
    query, document, versus = "Where did it sit?", "The cat sat.", "rain"
    type_text(page, "a", query)
    type_text(page, "b", document)
    until(lambda: find(page, "#attribute .cost").text == "12,800 of 131,072 token steps")
    shown = run(page, "attribute")
    assert find(page, "[name=tolerance]").get_property("value") == "0.05"
    body = {"text": query, "text_pair": document, "tolerance": 0.05, "max_evaluations": 512}
    result = post(multi_url, "attribute", **body, target={"type": "maxsim"})
    words = [["Where", "did", "it", "sit", "?"], ["The", "cat", "sat", "."]]
    special = [["[CLS]", "[[]", "[q]", "[]]"], ["[CLS]", "[[]", "[d]", "[]]"]]
    ends = [["[SEP]", *["[MASK]"] * 6], ["[SEP]"]]
    rows = chips_of_passages(page)
    assert rows == [s + w + e for s, w, e in zip(special, words, ends, strict=True)]
    assert scores_of_chips(page) == pytest.approx(result["scores"], abs=1e-5)
    assert f"MaxSim\n{result['value']:.4f}" in shown
    assert texts(page, "caption") == [f"Document: MaxSim {result['value']:.4f}"]
    cells = texts(page, "#attribute td")
    aligned = zip(result["alignment"], cells[::3], cells[1::3], cells[2::3], strict=True)
    spelled = [word for row in rows for word in row]
    for pair, own, other, value in aligned:
        assert (own, other) == (spelled[pair["query"]], spelled[pair["document"]])
        assert number(value) == pytest.approx(pair["value"], abs=1e-4)
    assert texts(page, "#lamps .good span:last-child")[0] == "cosine 1.000000"
    type_text(page, "c", versus)
    shown = run(page, "attribute")
    assert chips_of_passages(page)[2] == ["[CLS]", "[[]", "[d]", "[]]", "rain", "[SEP]"]
    margin = re.search(r"margin \(difference of MaxSim\)\n(\S+)", shown)
    values = [number(caption.rsplit(" ", 1)[1]) for caption in texts(page, "caption")]
    assert margin
    assert number(margin[1]) == pytest.approx(values[0] - values[1], abs=2e-4)


def test_classifier_has_labels_and_an_optional_second_text(
    browser: Browser, classifier_url: str
) -> None:
    # The tab of another kind of model is not shown, even if the address has it.
    page = open_page(browser, f"{classifier_url}/debug#tab=flow", "classifier")
    assert find(page, "#attribute").is_displayed()
    labels = [option.text for option in Select(find(page, "[name=label]")).options]
    assert labels == ["predicted label", "sad", "neutral", "happy"]
    assert Select(find(page, "[name=versus]")).first_selected_option.text == "no other label"
    type_text(page, "a", "w5 w6 w7")
    predicted = post(classifier_url, "attribute", text="w5 w6 w7", target={"type": "label"})
    assert f"logit of {predicted['label']}\n" in run(page, "attribute")
    select(page, "label", "happy")
    select(page, "versus", "sad")
    shown = run(page, "attribute")
    target = {"type": "label", "label": "happy", "versus": "sad"}
    result = post(classifier_url, "attribute", text="w5 w6 w7", target=target)
    assert scores_of_chips(page) == pytest.approx(result["scores"], abs=1e-5)
    value = f"{result['value']:.4f}".replace("-", "\N{MINUS SIGN}")
    assert f"logit of happy \N{MINUS SIGN} sad\n{value}" in shown
    type_text(page, "b", "w33 w8")
    shown = run(page, "attribute")
    assert texts(page, "#attribute .chip .word")[4:] == ["[SEP]", "w33", "w8", "[SEP]"]
    assert "First text" in shown
    restored = open_page(page, page.current_url, "classifier")
    assert Select(find(restored, "[name=label]")).first_selected_option.text == "happy"
    assert find(restored, "[name=b]").get_property("value") == "w33 w8"


def test_each_selected_method_has_a_row_of_tokens(page: Browser) -> None:
    for method in ("integrated_gradients", "saliency", "grad_x_input"):
        find(page, f"[value={method}]").click()
    run(page, "attribute")
    assert texts(page, "#attribute h3") == ["Gradient \u00d7 input", "Saliency"]
    assert len(texts(page, "#attribute .chip")) == 2 * 9


def test_pair_equation_adds_up_to_the_cosine(page: Browser, url: str) -> None:
    run(page, "pair")
    result = post(url, "attribute/pair", a=CAT, b=FELINE)
    numbers = texts(page, ".equation strong")
    assert numbers == [f"{result['sum']:.4f}", "0", "0", "0", f"{result['cosine']:.4f}"]
    assert numbers[0] == numbers[-1]
    until(lambda: {"cat", "line", "[SEP]"} <= set(texts(page, "#pair .chart text")))


def test_flow_shows_gradient_sizes_and_the_first_non_finite_number(page: Browser) -> None:
    shown = run(page, "flow")
    assert "All numbers are finite in the forward and the backward pass." in shown
    until(lambda: "layers.0" in texts(page, "#flow .chart text"))
    select(page, "emulate", "float16")
    type_text(page, "scale", str(2**32))
    shown = run(page, "flow")
    assert "non-finite number appears in the backward pass at objective" in shown
    assert "some are NaN" in find(page, "#lamps").text
    find(page, "#flow summary").click()
    assert "NaN" in texts(page, "#flow td")


@pytest.mark.parametrize("objective", ["mnrl", "dot", "mse", "cotangent"])
def test_flow_has_every_objective_of_the_api(page: Browser, url: str, objective: str) -> None:
    labels = {
        "mnrl": "ranking of pairs",
        "dot": "dot product",
        "mse": "squared error",
        "cotangent": "cotangents",
    }
    find(page, "#tab-flow").click()
    select(page, "objective", labels[objective])
    more = ["A dog barks.", "A hound howls."]
    type_text(page, "more-texts", "\n".join(more))
    vector = [round(math.sin(index), 2) for index in range(32)]
    vectors = {"mnrl": [], "dot": [vector]}.get(objective, [vector] * 4)
    assert find(page, "[name=vectors]").is_displayed() == bool(vectors)
    field = "document.querySelector('[name=vectors]')"
    page.execute_script(f"{field}.value = arguments[0]", "\n".join(map(json.dumps, vectors)))
    shown = run(page, "flow")
    given: Json = {"dot": {"vector": vector}, "mnrl": {}}.get(objective, {"vectors": vectors})
    texts = [CAT, FELINE, *more]
    expected = post(url, "flow", texts=texts, objective={"type": objective, **given})
    figures = dict(re.findall(r"^(objective|steps)\n(\S+)$", shown, re.MULTILINE))
    assert int(figures["steps"]) == len(expected["steps"])
    value = float(figures["objective"].replace("\N{MINUS SIGN}", "-"))
    assert value == pytest.approx(expected["objective"], rel=1e-2)


def test_layernorm_shows_its_steps_and_the_statistics_of_the_selected_one(page: Browser) -> None:
    shown = run(page, "layernorm")
    assert "All implementations are correct on these rows." in shown
    assert len(texts(page, ".step")) == 11 + 13
    find(page, "[data-step=dxhat]").click()
    assert find(page, ".chosen").text.startswith("dxhat\npass\nbackward\nshape\n9 \u00d7 32")
    assert any(row.startswith("cpp backward passes") for row in texts(page, "#layernorm tr"))
    assert "no verdict" in shown


def test_parity_shows_a_lamp_for_each_comparison(page: Browser) -> None:
    shown = run(page, "parity")
    lamps = [lamp.split()[0] for lamp in texts(page, "#parity .lamp.good")]
    assert lamps == ["Files", "Tokenizer", "Vectors", "Weights", "Tokens", "LayerNorm"]
    assert "The served model agrees with the reference model." in shown
    until(lambda: "layers.0" in texts(page, "#parity .chart text"))


@pytest.mark.parametrize("after_cost", [False, True])
def test_request_error_is_shown_as_a_sentence_with_its_pointer(
    page: Browser, after_cost: bool
) -> None:
    type_text(page, "a", " ")
    if after_cost:  # which fails too, in a place of its own
        until(lambda: "(at /text)" in find(page, "#attribute .cost").text)
    run(page, "attribute")
    (sentence,) = texts(page, "#attribute [role=alert]")
    assert "(at /text)" in sentence
    assert sentence.endswith(".")


def test_markup_in_a_text_is_shown_as_text(page: Browser) -> None:
    type_text(page, "a", "<img src=x onerror=alert(1)>")
    run(page, "attribute")
    assert "".join(texts(page, ".chip .word")[1:-1]) == "<imgsrc=xonerror=alert(1)>"
    run(page, "pair")
    until(lambda: "<" in texts(page, "#pair .chart text"))
    assert not page.find_elements(By.CSS_SELECTOR, "img[src=x]")


def test_page_url_keeps_the_inputs_and_not_the_key(browser: Browser, url: str) -> None:
    page = open_page(browser, f"{url}/debug")
    type_text(page, "a", "1 + 1 = 2 & more, 100 % ünïcode")
    find(page, "#key").send_keys("a-secret-key")
    select(page, "layer", "layers.0")
    find(page, "[value=occlusion]").click()
    find(page, "#tab-pair").click()
    address = page.current_url
    assert "secret" not in address
    restored = open_page(browser, address)
    assert find(restored, "[name=a]").get_property("value") == "1 + 1 = 2 & more, 100 % ünïcode"
    assert find(restored, "[name=layer]").get_property("value") == "layers.0"
    assert find(restored, "[value=occlusion]").get_property("checked") is True
    assert find(restored, "#pair").is_displayed()
    run(restored, "parity")
    find(restored, "#parity .copy").click()
    command = find(restored, "#parity .curl").text
    assert command.startswith(f"curl '{url}/debug/parity' -H 'Authorization: Bearer KEY'")
    browser.execute_script("sessionStorage.clear()")


@pytest.mark.parametrize("tab", ["constructor", "toString", "nonsense", ""])
def test_page_url_with_an_unknown_tab_shows_the_first_tab(
    browser: Browser, url: str, tab: str
) -> None:
    page = open_page(browser, f"{url}/debug#tab={tab}")
    assert find(page, "#attribute").is_displayed()
    assert find(page, "#tab-attribute").get_attribute("aria-selected") == "true"


def test_cancel_button_aborts_the_running_job(page: Browser, hold: Path) -> None:
    with held(hold):
        find(page, "#attribute .go").click()
        assert not find(page, "#attribute .go").is_enabled()
        find(page, "#attribute .cancel").click()
        messages = ["Cancelled: the service has stopped the job."]
        until(lambda: texts(page, "#attribute [role=alert]") == messages)
        until(lambda: find(page, "#attribute .go").is_enabled())
    # The cost of an edited text appears beside the message of the last run, not in its place.
    type_text(page, "a", "A cat on a mat")
    until(lambda: find(page, "#attribute .cost").text == "1,792 of 131,072 token steps")
    assert texts(page, "#attribute [role=alert]") == messages


def test_invalid_input_is_named_before_the_run(page: Browser) -> None:
    type_text(page, "a", " ")
    until(lambda: "(at /text)" in find(page, "#attribute .cost.failed").text)
    type_text(page, "a", "A cat on a mat")
    until(lambda: find(page, "#attribute .cost").text == "1,792 of 131,072 token steps")
    assert not page.find_elements(By.CSS_SELECTOR, "#attribute .cost.failed")


def test_page_loads_from_its_own_host_only_and_logs_no_console_errors(
    page: Browser, url: str, reranker_url: str, classifier_url: str, multi_url: str
) -> None:
    run(page, "attribute")
    until(lambda: find(page, "#attribute .chart .main-svg").is_displayed())
    # The logs have the requests of the earlier tests too, to four services.
    entries = page.get_log("performance")  # type: ignore[no-untyped-call]
    events = [json.loads(entry["message"])["message"] for entry in entries]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    addresses = [urlsplit(request["request"]["url"]) for request in sent]
    # The browser's first tab has a scheme of its own.
    hosts = {address.netloc for address in addresses if address.scheme.startswith(("http", "ws"))}
    assert urlsplit(url).netloc in hosts
    served_urls = url, reranker_url, classifier_url, multi_url
    assert hosts <= {urlsplit(each).netloc for each in served_urls}
    assert "/debug/assets/plotly.min.js" in {address.path for address in addresses}
    for entry in page.get_log("browser"):  # type: ignore[no-untyped-call]
        refused = entry["source"] == "network" and "status of 422" in entry["message"]
        assert refused or entry["level"] not in ("SEVERE", "WARNING"), entry


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
        until(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#models a")) == 2)
        for name, kind in (("reranker", "reranker"), ("org/embedder", "embedding")):
            browser.find_element(By.LINK_TEXT, name).click()
            until(partial(shows, browser, "#model", f"{name} ({kind}) on cpu"))
            until(partial(shows, browser, "#models [aria-current=true]", name))
            find(browser, "#attribute .go").click()
            until(lambda: find(browser, "#attribute .result").text)
            assert not find(browser, "#attribute .problem").text


def shows(browser: Browser, selector: str, text: str) -> bool:
    return text in find(browser, selector).text


def test_page_is_refused_for_other_hosts_and_absent_if_disabled(
    client: TestClient, url: str
) -> None:
    policy = httpx2.get(f"{url}/debug").headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe-eval" not in policy
    for path in ("/debug", "/debug/assets/page.js"):
        assert httpx2.get(url + path).status_code == 200
        assert httpx2.get(url + path, headers={"Host": "evil.example"}).status_code == 403
        assert client.get(path).status_code == 404
