"""Inputs, URLs, errors, keyboard and accessibility of the page."""

# A browser and torch may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


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
