"""The page as a person uses it: a browser, and the service as a process of its own."""

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait
from starlette.testclient import TestClient

from models.artifact import Artifact
from tests.serving import lines_until, process

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
def url(artifact: Artifact) -> Iterator[str]:
    with process(VITRINE_MODEL__PATH=str(artifact.path), VITRINE_DEBUG__ENABLED="true") as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        yield match[1]


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
    """The page as it is when it has just been opened."""
    return opened(browser, f"{url}/debug")


def opened(browser: Browser, address: str) -> Browser:
    browser.get("about:blank")  # another hash alone would load nothing
    browser.get(address)
    until(browser, lambda: "MiniLM" in browser.find_element(By.ID, "model").text)
    return browser


def until(browser: Browser, holds: Callable[[], object]) -> None:
    # A job runs at the lowest priority, behind whatever else the machine does.
    WebDriverWait(browser, 60, poll_frequency=0.1).until(lambda _: holds())


def found(page: Browser, selector: str) -> WebElement:
    return page.find_element(By.CSS_SELECTOR, selector)


def words(page: Browser, selector: str) -> list[str]:
    return [element.text for element in page.find_elements(By.CSS_SELECTOR, selector)]


def typed(page: Browser, name: str, text: str) -> None:
    field = found(page, f"[name={name}]")
    field.clear()
    field.send_keys(text)


def chosen(page: Browser, name: str, choice: str) -> None:
    Select(found(page, f"[name={name}]")).select_by_visible_text(choice)


def run(page: Browser, section: str) -> str:
    """Choose a section, run it, and return the text of what it shows."""
    found(page, f"#tab-{section}").click()
    found(page, f"#{section} .go").click()
    until(page, lambda: found(page, f"#{section} .go").is_enabled())
    return found(page, f"#{section} .answer").text


def asked(url: str, path: str, **body: object) -> Json:
    answer: Json = httpx2.post(f"{url}/debug/{path}", json=body, timeout=240).json()
    return answer


def test_the_tokens_show_the_scores_of_the_route_and_their_sum(page: Browser, url: str) -> None:
    typed(page, "a", "A cat on a mat")
    until(page, lambda: found(page, "#attribute .cost").text == "1,792 of 131,072 token steps")
    shown = run(page, "attribute")
    target = {"type": "cosine", "text": FELINE}
    answer = asked(url, "attribute", text="A cat on a mat", target=target)
    chips = page.find_elements(By.CSS_SELECTOR, "#attribute .chip")
    scores = [float(chip.get_attribute("data-score") or "nan") for chip in chips]
    assert scores == pytest.approx(answer["scores"], abs=1e-5)
    assert words(page, ".chip .word") == ["[CLS]", "A", "cat", "on", "a", "mat", "[SEP]"]
    assert f"{scores[2]:.3f}" == words(page, ".chip .score")[2]
    assert f"sum of scores\n{answer['sum']:.4f}" in shown
    assert "converged" in shown
    assert "not converged" not in shown
    lamps = words(page, "#lamps .good span:last-child")
    assert lamps == ["cosine 1.000000", "converged", "all numbers"]
    until(page, lambda: found(page, "#attribute .chart .main-svg").is_displayed())


def test_each_chosen_method_has_a_row_of_tokens(page: Browser) -> None:
    for method in ("integrated_gradients", "saliency", "grad_x_input"):
        found(page, f"[value={method}]").click()
    run(page, "attribute")
    assert words(page, "#attribute h3") == ["Gradient \u00d7 input", "Saliency"]
    assert len(words(page, "#attribute .chip")) == 2 * 9


def test_the_pairs_add_up_to_the_cosine(page: Browser, url: str) -> None:
    run(page, "pair")
    answer = asked(url, "attribute/pair", a=CAT, b=FELINE)
    numbers = words(page, ".equation strong")
    assert numbers == [f"{answer['sum']:.4f}", "0", "0", "0", f"{answer['cosine']:.4f}"]
    assert numbers[0] == numbers[-1]
    until(page, lambda: {"cat", "line", "[SEP]"} <= set(words(page, "#pair .chart text")))


def test_the_flow_shows_sizes_and_says_where_numbers_break(page: Browser) -> None:
    shown = run(page, "flow")
    assert "Every number is finite, forward and backward." in shown
    until(page, lambda: "layers.3" in words(page, "#flow .chart text"))
    chosen(page, "emulate", "float16")
    typed(page, "scale", str(2**32))
    shown = run(page, "flow")
    assert "non-finite number appears in the backward pass at objective" in shown
    assert "some are NaN" in found(page, "#lamps").text
    found(page, "#flow summary").click()
    assert "NaN" in words(page, "#flow td")


def test_the_norm_is_shown_as_a_circuit_with_statistics_of_the_chosen_step(page: Browser) -> None:
    shown = run(page, "layernorm")
    assert "The op is right on these rows." in shown
    assert len(words(page, ".step")) == 11 + 13
    found(page, "[data-step=dxhat]").click()
    assert found(page, ".chosen").text.startswith("dxhat\npass\nbackward\nshape\n9 \u00d7 384")
    assert any(row.startswith("aten backward passes") for row in words(page, "#layernorm tr"))
    assert "not run" in shown


def test_parity_shows_a_lamp_for_each_comparison(page: Browser) -> None:
    shown = run(page, "parity")
    lamps = [lamp.split()[0] for lamp in words(page, "#parity .lamp.good")]
    assert lamps == ["Files", "Vectors", "Weights", "Tokens", "LayerNorm"]
    assert "The served graph agrees with the reference model." in shown
    until(page, lambda: "layers.3" in words(page, "#parity .chart text"))


def test_an_error_is_a_sentence_beside_the_button(page: Browser) -> None:
    typed(page, "a", " ")
    run(page, "attribute")
    (sentence,) = words(page, "#attribute [role=alert]")
    assert "(at /text)" in sentence
    assert sentence.endswith(".")


def test_text_with_markup_is_shown_as_text(page: Browser) -> None:
    typed(page, "a", "<img src=x onerror=alert(1)>")
    run(page, "attribute")
    assert "".join(words(page, ".chip .word")[1:-1]) == "<imgsrc=xonerror=alert(1)>"
    run(page, "pair")
    until(page, lambda: "<" in words(page, "#pair .chart text"))
    assert not page.find_elements(By.CSS_SELECTOR, "img[src=x]")


def test_the_address_keeps_the_inputs_and_not_the_key(browser: Browser, url: str) -> None:
    page = opened(browser, f"{url}/debug")
    typed(page, "a", "1 + 1 = 2 & more, 100 % ünïcode")
    found(page, "#key").send_keys("a-secret-key")
    chosen(page, "layer", "layers.1")
    found(page, "[value=occlusion]").click()
    found(page, "#tab-pair").click()
    address = page.current_url
    assert "secret" not in address
    restored = opened(browser, address)
    assert found(restored, "[name=a]").get_property("value") == "1 + 1 = 2 & more, 100 % ünïcode"
    assert found(restored, "[name=layer]").get_property("value") == "layers.1"
    assert found(restored, "[value=occlusion]").get_property("checked") is True
    assert found(restored, "#pair").is_displayed()
    run(restored, "parity")
    found(restored, "#parity .copy").click()
    command = found(restored, "#parity .curl").text
    assert command.startswith(f"curl '{url}/debug/parity' -H 'Authorization: Bearer KEY'")
    browser.execute_script("sessionStorage.clear()")


@pytest.mark.parametrize("tab", ["constructor", "toString", "nonsense", ""])
def test_an_address_that_names_no_tab_shows_the_first(browser: Browser, url: str, tab: str) -> None:
    page = opened(browser, f"{url}/debug#tab={tab}")
    assert found(page, "#attribute").is_displayed()
    assert found(page, "#tab-attribute").get_attribute("aria-selected") == "true"


def test_a_run_can_be_cancelled(page: Browser) -> None:
    typed(page, "tolerance", "0.000000001")  # so that it takes all its evaluations
    typed(page, "evaluations", "4096")
    found(page, "#attribute .go").click()
    assert not found(page, "#attribute .go").is_enabled()
    found(page, "#attribute .cancel").click()
    told = ["Cancelled: the service has stopped the job."]
    until(page, lambda: words(page, "#attribute [role=alert]") == told)
    until(page, lambda: found(page, "#attribute .go").is_enabled())


def test_nothing_comes_from_another_host_and_the_console_has_no_errors(
    browser: Browser, url: str
) -> None:
    # Of all that the tests above have done.
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]  # type: ignore[no-untyped-call]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    addresses = [urlsplit(request["request"]["url"]) for request in sent]
    # The browser's own first tab is of its own scheme.
    hosts = {address.netloc for address in addresses if address.scheme.startswith(("http", "ws"))}
    assert hosts == {urlsplit(url).netloc}
    assert "/debug/assets/plotly.min.js" in {address.path for address in addresses}
    for entry in browser.get_log("browser"):  # type: ignore[no-untyped-call]
        refused = entry["source"] == "network" and "status of 422" in entry["message"]
        assert refused or entry["level"] not in ("SEVERE", "WARNING"), entry


def test_the_page_is_for_its_own_hosts_and_only_where_it_is_switched_on(
    client: TestClient, url: str
) -> None:
    policy = httpx2.get(f"{url}/debug").headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe-eval" not in policy
    for path in ("/debug", "/debug/assets/page.js"):
        assert httpx2.get(url + path).status_code == 200
        assert httpx2.get(url + path, headers={"Host": "evil.example"}).status_code == 403
        assert client.get(path).status_code == 404
