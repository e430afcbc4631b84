"""The view of all targets and methods."""

import json
import math
import re
from functools import partial
from urllib.parse import quote

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from tests.service.page.browsing import (
    CAT,
    FELINE,
    Browser,
    Json,
    chip_scores,
    find,
    number,
    open_details,
    open_page,
    post,
    run,
    select,
    set_value,
    show,
    shows,
    texts,
    type_text,
    until,
)

# A browser and torch may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def page(browser: Browser, url: str) -> Browser:
    """Return the newly opened page, which computes nothing by itself."""
    return open_page(browser, f"{url}/debug#tab=explain")


def test_tokens_show_the_scores_of_the_route_and_their_sum(page: Browser, url: str) -> None:
    show(page, "attribute")
    type_text(page, "a", "A cat on a mat")
    target = {"type": "cosine", "text": FELINE}
    body = {"text": "A cat on a mat", "target": target, "faithfulness": "words"}
    cost = post(url, "attribute", **body, dry_run=True)["cost"]["token_steps"]
    until(partial(shows, page, "#attribute .cost", f"up to {cost:,} of 131,072 token steps"))
    shown = run(page, "attribute")
    result = post(url, "attribute", **body)
    scores = chip_scores(page, "attribute")
    assert scores == pytest.approx(result["scores"], abs=1e-5)
    words = ["[CLS]", "A", "cat", "on", "a", "mat", "[SEP]"]
    assert texts(page, "#attribute .chip .word") == words
    legend = find(page, "#attribute .legend").text
    unit = {"thousandths": 1e-3, "millionths": 1e-6}.get(legend.split()[-1], 1)
    displayed = [number(s) * unit for s in texts(page, "#attribute .chip .score")]
    assert displayed == pytest.approx(scores, abs=0.005 * max(map(abs, scores)))
    assert f"sum of scores\n{result['sum']:.4f}" in shown
    assert "converged" in shown
    assert "not converged" not in shown
    lamps = texts(page, "#attribute .lamps .good span:last-child")
    agreement = re.fullmatch(r"as the served model, within (\S+)", lamps[0])
    assert agreement
    assert number(agreement[1]) < 1e-6
    assert lamps[1:] == ["baseline and scores add up to the result"]
    faithful = result["faithfulness"]
    figures = [
        figure[name]
        for name in ("comprehensiveness", "sufficiency")
        for figure in (faithful, faithful["random"])
    ]
    open_details(page)
    cells = texts(page, "#attribute .faithfulness td.number")[:4]
    assert list(map(number, cells)) == pytest.approx(figures, rel=0.06, abs=1e-4)
    until(lambda: find(page, "#attribute .chart .main-svg").is_displayed())


def test_words_and_tokens_have_the_same_sum(page: Browser, url: str) -> None:
    text = "It doesn't purr."
    show(page, "attribute")
    type_text(page, "a", text)
    run(page, "attribute")
    result = post(url, "attribute", text=text, target={"type": "cosine", "text": FELINE})
    chips = "#attribute .chip .word"
    assert texts(page, chips) == ["[CLS]", "It", "doesn't", "purr", ".", "[SEP]"]
    words = [0.0, *(word["score"] for word in result["words"]), 0.0]
    assert chip_scores(page, "attribute") == pytest.approx(words, abs=1e-5)
    find(page, "[name=units][value=tokens]").click()
    spelled = ["[CLS]", "It", "doesn", "'", "t", "pu", "rr", ".", "[SEP]"]
    assert texts(page, chips) == spelled
    assert chip_scores(page, "attribute") == pytest.approx(result["scores"], abs=1e-5)
    assert "units=tokens" in page.current_url
    restored = open_page(page, page.current_url)
    assert find(restored, "[name=units][value=tokens]").get_property("checked") is True


def chips_of_passages(page: Browser) -> list[list[str]]:
    rows = page.find_elements(By.CSS_SELECTOR, "#attribute .passage")
    return [[c.text for c in row.find_elements(By.CSS_SELECTOR, ".chip .word")] for row in rows]


def test_reranker_has_a_query_and_a_document(browser: Browser, reranker_url: str) -> None:
    page = open_page(browser, f"{reranker_url}/debug#tab=attribute", "reranker")
    debugging = ["LayerNorm", "All targets and methods"]
    assert [tab for tab in texts(page, "[role=tab]") if tab] == debugging
    find(page, "[data-entry=why]").click()
    assert [tab for tab in texts(page, "[role=tab]") if tab] == ["Rank", "Explain", "Questions"]
    show(page, "attribute")
    labels = [label.split("\n")[0] for label in texts(page, ".texts label") if label]
    assert labels == ["Query", "Document", "Other document (optional)"]
    assert not find(page, "[name=target]").is_displayed()
    query, document = "w7 w9", "w21 w5 w33"
    type_text(page, "a", query)
    type_text(page, "b", document)
    shown = run(page, "attribute")
    pair = {"text": query, "text_pair": document, "target": {"type": "score"}}
    result = post(reranker_url, "attribute", **pair)
    assert chips_of_passages(page) == [
        ["[CLS]", "w7", "w9", "[SEP]"],
        ["w21", "w5", "w33", "[SEP]"],
    ]
    assert chip_scores(page, "attribute") == pytest.approx(result["scores"], abs=1e-5)
    sums = [sum(w["score"] for w in result["words"] if w["text"] == index) for index in (0, 1)]
    for name, total in zip(("Query", "Document"), sums, strict=True):
        figure = re.search(rf"{name} sum (\S+)", shown)
        assert figure
        assert number(figure[1]) == pytest.approx(total, rel=0.06)
    assert "score (logit)" in shown
    lamps = texts(page, "#attribute .lamps .good span:last-child")
    assert lamps[0].startswith("as the served model, within ")
    assert lamps[1:] == ["baseline and scores add up to the result"]
    type_text(page, "b", "w5 " * 200)
    until(lambda: "tokens" in find(page, "#attribute .cost.failed").text)


def test_pair_with_an_empty_text_has_a_row_for_the_other(
    browser: Browser, reranker_url: str
) -> None:
    page = open_page(browser, f"{reranker_url}/debug#tab=attribute&a=&b=w5+w7", "reranker")
    assert "undefined" not in run(page, "attribute")
    assert texts(page, "#attribute .passage h4 ~ * .chip .word")[2:4] == ["w5", "w7"]
    assert find(page, "#attribute .passage h4").text.startswith("Document sum ")


def test_margin_over_another_document_has_a_row_for_each_text(
    browser: Browser, reranker_url: str
) -> None:
    page = open_page(browser, f"{reranker_url}/debug#tab=attribute", "reranker")
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
    assert chip_scores(page, "attribute") == pytest.approx(
        [*both, *scores[4:8], *scores[12:]], abs=1e-5
    )
    headings = ["Query sum", "Document sum", "Other document sum"]
    assert [text.rsplit(" ", 1)[0] for text in texts(page, ".passage h4")] == headings
    totals = [number(text.split()[-1]) for text in texts(page, ".passage h4")]
    assert sum(totals) == pytest.approx(result["sum"], abs=1e-3)
    assert f"margin (difference of logits)\n{result['value']:.4f}".replace("-", "\u2212") in shown
    restored = open_page(page, page.current_url, "reranker")
    assert find(restored, "[name=c]").get_property("value") == versus


def test_multi_vector_model_has_maxsim_and_its_alignment(browser: Browser, multi_url: str) -> None:
    page = open_page(browser, f"{multi_url}/debug#tab=attribute", "multi")
    assert not find(page, "[name=target]").is_displayed()
    query, document, versus = "Where did it sit?", "The cat sat.", "rain"
    type_text(page, "a", query)
    type_text(page, "b", document)
    shown = run(page, "attribute")
    assert find(page, "[name=tolerance]").get_property("value") == "0.05"
    body = {"text": query, "text_pair": document, "tolerance": 0.05, "max_evaluations": 512}
    result = post(multi_url, "attribute", **body, target={"type": "maxsim"})
    words = [["Where", "did", "it", "sit", "?"], ["The", "cat", "sat", "."]]
    special = [["[CLS]", "[[]", "[q]", "[]]"], ["[CLS]", "[[]", "[d]", "[]]"]]
    ends = [["[SEP]", *["[MASK]"] * 6], ["[SEP]"]]
    rows = chips_of_passages(page)
    assert rows == [s + w + e for s, w, e in zip(special, words, ends, strict=True)]
    assert chip_scores(page, "attribute") == pytest.approx(result["scores"], abs=1e-5)
    assert f"MaxSim\n{result['value']:.4f}" in shown
    assert f"Document: MaxSim {result['value']:.4f}" in texts(page, "#attribute caption")
    cells = texts(page, "#attribute .columns td")
    aligned = zip(result["alignment"], cells[::3], cells[1::3], cells[2::3], strict=True)
    spelled = [word for row in rows for word in row]
    for pair, own, other, value in aligned:
        assert (own, other) == (spelled[pair["query"]], spelled[pair["document"]])
        assert number(value) == pytest.approx(pair["value"], abs=1e-4)
    assert texts(page, "#attribute .lamps .good span:last-child")[0].startswith(
        "as the served model"
    )
    type_text(page, "c", versus)
    shown = run(page, "attribute")
    assert chips_of_passages(page)[2] == ["[CLS]", "[[]", "[d]", "[]]", "rain", "[SEP]"]
    margin = re.search(r"margin \(difference of MaxSim\)\n(\S+)", shown)
    values = [
        number(caption.rsplit(" ", 1)[1]) for caption in texts(page, "#attribute .columns caption")
    ]
    assert margin
    assert number(margin[1]) == pytest.approx(values[0] - values[1], abs=2e-4)


def test_classifier_has_labels_and_an_optional_second_text(
    browser: Browser, classifier_url: str
) -> None:
    # The tab of another kind of model is not shown, even if the address has it.
    page = open_page(browser, f"{classifier_url}/debug#tab=flow", "classifier")
    assert find(page, "#explain").is_displayed()
    show(page, "attribute")
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
    assert chip_scores(page, "attribute") == pytest.approx(result["scores"], abs=1e-5)
    value = f"{result['value']:.4f}".replace("-", "\N{MINUS SIGN}")
    assert f"logit of happy \N{MINUS SIGN} sad\n{value}" in shown
    type_text(page, "b", "w33 w8")
    shown = run(page, "attribute")
    assert texts(page, "#attribute .chip .word")[4:] == ["[SEP]", "w33", "w8", "[SEP]"]
    assert "First text" in shown
    restored = open_page(page, page.current_url, "classifier")
    assert Select(find(restored, "[name=label]")).first_selected_option.text == "happy"
    assert find(restored, "[name=b]").get_property("value") == "w33 w8"


def test_labels_keep_their_white_space(browser: Browser, classifier_url: str) -> None:
    address = f"{classifier_url}/debug#tab=attribute&label={quote(' not  sad')}"
    page = open_page(browser, address, "classifier")
    values = "return [...document.querySelector('[name=label]').options].map((o) => o.value)"
    assert " not  sad" in page.execute_script(values)
    page.execute_async_script(
        "const [labels, done] = arguments;"
        "import('./debug/assets/inputs.js')"
        ".then(({ showChoices }) => done(showChoices({ labels })))",
        ["happy", " not  sad"],
    )
    assert page.execute_script(values) == ["", "happy", " not  sad"]
    assert find(page, "[name=label]").get_property("value") == " not  sad"


def test_each_selected_method_has_a_row_of_tokens(page: Browser) -> None:
    show(page, "attribute")
    for method in ("integrated_gradients", "saliency", "grad_x_input"):
        find(page, f"[value={method}]").click()
    run(page, "attribute")
    assert texts(page, "#attribute h3") == ["Gradient \u00d7 input", "Saliency"]
    assert len(texts(page, "#attribute .chip")) == 2 * 9
    # Saliency has no sign, so its colours have no negative end.
    legends = texts(page, "#attribute .legend")
    assert [legend[0] for legend in legends] == ["\N{MINUS SIGN}", "0"]


def test_margin_dot_and_smoothgrad_options_are_those_of_the_api(page: Browser, url: str) -> None:
    show(page, "attribute")
    select(page, "target", "closer to B than to C")
    find(page, "#attribute summary").click()
    for method in ("integrated_gradients", "smoothgrad"):
        find(page, f"[value={method}]").click()
    for name, value in {"c": "Rain.", "samples": "3", "sigma": "0.2", "seed": "5"}.items():
        type_text(page, name, value)
    run(page, "attribute")
    target: Json = {"type": "margin", "positive": FELINE, "negative": "Rain."}
    options = {"method": "smoothgrad", "samples": 3, "sigma": 0.2, "seed": 5}
    result = post(url, "attribute", text=CAT, target=target, **options)
    words = [0.0, *(word["score"] for word in result["words"]), 0.0]
    special = [result["scores"][0], *words[1:-1], result["scores"][-1]]
    assert chip_scores(page, "attribute") == pytest.approx(special, abs=1e-5)
    select(page, "target", "dot product with a vector")
    vector = [round(math.cos(index), 2) for index in range(32)]
    set_value(page, "vector", json.dumps(vector))
    find(page, "[value=occlusion]").click()
    find(page, "[value=smoothgrad]").click()
    run(page, "attribute")
    target = {"type": "dot", "vector": vector}
    result = post(url, "attribute", text=CAT, target=target, method="occlusion")
    assert sum(chip_scores(page, "attribute")) == pytest.approx(result["sum"], abs=1e-4)


def test_path_plot_has_only_evaluated_points(page: Browser, url: str) -> None:
    run(page, "attribute")
    result = post(url, "attribute", text=CAT, target={"type": "cosine", "text": FELINE})
    chart = "document.querySelector('#attribute .chart')"
    until(lambda: page.execute_script(f"return {chart}.data !== undefined"))
    trace = page.execute_script(f"const [t] = {chart}.data; return [[...t.x], t.mode]")
    assert trace == [pytest.approx([point for point, _ in result["path"]]), "markers"]


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour, `#rrggbb` or `rgb(r g b)`, as WCAG defines it."""
    if colour.startswith("#"):
        channels = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    else:
        channels = [int(channel) for channel in re.findall(r"\d+", colour)]
    parts = [channel / 255 for channel in channels]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_on_colours_have_contrast(shared_page: Browser, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    shared_page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    colours = shared_page.execute_script(
        "return import('./debug/assets/colours.js').then(({diverging}) => "
        "Array.from({length: 201}, (_, index) => diverging(index / 100 - 1, 1)))"
    )
    shared_page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    for pair in colours:
        dark, bright = sorted(luminance(pair[name]) for name in ("background", "color"))
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, pair
