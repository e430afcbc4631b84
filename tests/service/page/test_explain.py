"""The first answer: explanations by deletion, from a service without PyTorch and gradients."""

import re
from functools import partial
from urllib.parse import urlencode, urlsplit

import httpx2
import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from sentence_transformers import CrossEncoder

from service.app import create_app
from service.inference.explain.deletion import unit_spans, without
from service.settings import Settings
from tests.service.page.browsing import (
    CAT,
    FELINE,
    Browser,
    Json,
    cells,
    check_console,
    edit,
    events,
    find,
    number,
    open_details,
    open_page,
    run,
    served,
    shows,
    strike,
    texts,
    until,
)
from tests.serving import serving

# A browser may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

QUERY, DOCUMENT, OTHER = "w7 w9", "w21 w5 w33", "w8 w51"
EFFECTS = "Effect of each word or sentence on the "
# Rounding of the engine, which depends on the batch of a text.
TOLERANCE = 2e-5


def opened(browser: Browser, url: str, model: str, **inputs: str) -> Browser:
    """Open the page of a model with inputs, which it explains at once."""
    address = f"{url}/debug?model={model}#{urlencode({'tab': 'explain', 'run': '1', **inputs})}"
    page = open_page(browser, address, model.removeprefix("identity-"), has_gradients=False)
    open_details(page)
    return page


def scored(url: str, kind: str, query: str, *documents: str, **fields: object) -> Json:
    raw = {"raw_scores": True} if kind == "reranker" else {}
    body = {"queries": query, "documents": documents, **raw, **fields}
    return served(url, "score", model=kind, **body)


def rows_of(explained: Json, content: str, name: str) -> list[list[str | float]]:
    """Return the rows of the table for a text of an explanation."""
    return [
        [content[unit["start"] : unit["end"]], name, unit["left_out"], unit["alone"], unit["rank"]]
        for unit in explained["units"]
    ]


def check_rows(page: Browser, expected: list[list[str | float]]) -> None:
    """Compare the exact table of the effects, and the numbers of the coloured words, with rows."""
    actual = cells(page, EFFECTS)
    assert [row[:2] for row in actual] == [row[:2] for row in expected]
    numbers = [[float(cell) for cell in row[2:]] for row in actual]
    for own, row in zip(numbers, expected, strict=True):
        assert own == pytest.approx(row[2:], abs=TOLERANCE)
    chips = page.find_elements(By.CSS_SELECTOR, "#explain .passage .chip")
    assert [chip.get_attribute("data-score") for chip in chips] == [row[2] for row in actual]


@pytest.mark.parametrize(
    ("kind", "query", "document", "names"),
    [
        ("embedding", CAT, FELINE, ("Text A", "Text B")),
        ("reranker", QUERY, DOCUMENT, ("Query", "Document")),
        ("sparse", QUERY, DOCUMENT, ("Query", "Document")),
        ("multi", "Where did it sit?", "The cat sat.", ("Query", "Document")),
    ],
)
def test_words_have_the_numbers_of_score(
    browser: Browser, plain_url: str, kind: str, query: str, document: str, names: tuple[str, str]
) -> None:
    page = opened(browser, plain_url, kind, a=query, b=document)
    explain = {"by": "words", "of": "both"}
    result = scored(plain_url, kind, query, document, explain=explain)
    assert number(find(page, ".figure strong").text) == pytest.approx(result["scores"][0], abs=1e-4)
    (explanation,) = result["explanations"]
    expected = [
        row
        for explained, content, name in zip(
            explanation["texts"], (query, document), names, strict=True
        )
        for row in rows_of(explained, content, name)
    ]
    check_rows(page, expected)
    assert not find(page, "#unavailable").text
    assert not find(page, "#explain > .problem").text
    assert [tab for tab in texts(page, "[role=tab]") if tab][:2] == ["Rank", "Explain"]
    assert "All targets and methods" not in texts(page, "[role=tab]")
    assert "VITRINE_DEBUG__ENABLED" in find(page, ".second").text


def test_words_have_the_differences_of_cross_encoder(
    browser: Browser, plain_url: str, cross_encoder: CrossEncoder
) -> None:
    page = opened(browser, plain_url, "reranker", a=QUERY, b=DOCUMENT)
    pairs = [("w9", DOCUMENT), ("w7", DOCUMENT)]
    pairs += [(QUERY, "w5 w33"), (QUERY, "w21 w33"), (QUERY, "w21 w5")]
    whole, *others = cross_encoder.predict([(QUERY, DOCUMENT), *pairs], activation_fn=None)
    logits = [float(value) for value in (whole, *others)]
    inverse = [np.log(value / (1 - value)) for value in logits]  # predict applies the sigmoid
    expected = [inverse[0] - value for value in inverse[1:]]
    actual = [float(row[2]) for row in cells(page, EFFECTS)]
    assert actual == pytest.approx(expected, abs=1e-4)


def test_words_have_the_numbers_of_classify(browser: Browser, plain_url: str) -> None:
    text, second = "w5 w6 w7", "w33 w8"
    fields: Json = {"model": "classifier", "explain": {"by": "words"}}
    page = opened(browser, plain_url, "classifier", a=text)
    result = served(plain_url, "classify", inputs=[text], **fields)
    best = result["labels"][0][0]
    assert find(page, ".figure strong").text == best["label"]
    assert find(page, ".figure span").text == f"with a score of {100 * best['score']:.1f} %"
    (explained,) = result["explanations"][0]["texts"]
    check_rows(page, rows_of(explained, text, "Text"))
    page = opened(browser, plain_url, "classifier", a=text, b=second, label="sad")
    fields["explain"]["label"] = "sad"
    result = served(plain_url, "classify", inputs=[[text, second]], **fields)
    first, other = result["explanations"][0]["texts"]
    rows = [*rows_of(first, text, "First text"), *rows_of(other, second, "Second text")]
    check_rows(page, rows)
    assert "Words that raise or lower the score of sad" in texts(page, "#explain h3")


def test_scores_that_are_logits_are_no_percentages(browser: Browser, plain_url: str) -> None:
    texts_of = {"a": QUERY, "b": DOCUMENT}
    page = opened(browser, plain_url, "identity-classifier", **texts_of)
    pair = [[QUERY, DOCUMENT]]
    (labels,) = served(plain_url, "classify", inputs=pair, model="identity-classifier")["labels"]
    rows = cells(page, "Labels")
    shown = [
        find(page, ".figure span").text.removeprefix("with a score of "),
        *(r[1] for r in rows),
    ]
    scores = [label["score"] for label in labels]
    assert list(map(number, shown)) == pytest.approx([scores[0], *scores], abs=1e-4)
    assert "%" not in find(page, "#explain").text
    page = opened(browser, plain_url, "identity-reranker", **texts_of)
    assert "%" not in find(page, "#explain").text
    page = opened(browser, plain_url, "reranker", **texts_of)
    (relevance,) = served(
        plain_url, "score", queries=QUERY, documents=[DOCUMENT], model="reranker"
    )["scores"]
    assert f"is a relevance of {100 * relevance:.1f} %" in find(page, "#explain").text


@pytest.mark.parametrize("kind", ["embedding", "reranker", "sparse", "multi"])
def test_two_documents_are_explained_by_the_difference_of_their_scores(
    browser: Browser, plain_url: str, kind: str
) -> None:
    page = opened(browser, plain_url, kind, a=QUERY, b=DOCUMENT, c=OTHER)

    def difference(query: str, document: str, other: str) -> float:
        first, second = scored(plain_url, kind, query, document, other)["scores"]
        return float(first - second)

    whole = difference(QUERY, DOCUMENT, OTHER)
    variants = [("w9", DOCUMENT, OTHER), ("w7", DOCUMENT, OTHER)]
    variants += [(QUERY, rest, OTHER) for rest in ("w5 w33", "w21 w33", "w21 w5")]
    variants += [(QUERY, DOCUMENT, rest) for rest in ("w51", "w8")]
    rows = cells(page, EFFECTS)
    words = [word for text in (QUERY, DOCUMENT, OTHER) for word in text.split()]
    assert [row[0] for row in rows] == words
    expected = [whole - difference(*variant) for variant in variants]
    assert [float(row[2]) for row in rows] == pytest.approx(expected, abs=2 * TOLERANCE)
    place = "above" if whole >= 0 else "below"
    assert f" ranks {place} " in find(page, ".reading").text


def test_number_can_be_checked_as_the_page_says(browser: Browser, plain_url: str) -> None:
    page = opened(browser, plain_url, "embedding", a="cat", b=FELINE)
    rows = {(word, name): float(left_out) for word, name, left_out, *_ in cells(page, EFFECTS)}
    (word, name), largest = max(rows.items(), key=lambda item: abs(item[1]))
    sentence = next(text for text in texts(page, "#explain .muted") if "To check" in text)
    assert f"without “{word}” in {name.replace('T', 't')} the result is " in sentence
    shown = sentence.split("the result is ")[1].split(" ")[0]
    body = {"cat": ("", FELINE)}.get(word, ("cat", FELINE.replace(f"{word} ", "").strip()))
    (rest,) = scored(plain_url, "embedding", *body)["scores"]
    assert number(shown) == pytest.approx(rest, abs=1e-4)
    (whole,) = scored(plain_url, "embedding", "cat", FELINE)["scores"]
    assert largest == pytest.approx(whole - rest, abs=TOLERANCE)


def test_sentence_names_the_words_with_the_largest_effects(
    browser: Browser, plain_url: str
) -> None:
    page = opened(browser, plain_url, "embedding")
    rows = [(word, float(left_out)) for word, _, left_out, *_ in cells(page, EFFECTS)]
    best = max((row for row in rows if row[0].isalpha()), key=lambda row: row[1])[0]
    raising = find(page, "#explain .heading p").text.split(" raise")[0]
    assert f"“{best}”" in raising
    worst, least = min((row for row in rows if row[0].isalpha()), key=lambda row: row[1])
    if least < -max(abs(value) for _, value in rows) / 10:
        lowering = find(page, "#explain .heading p").text.split("most.")[1]
        assert f"“{worst}”" in lowering


LONG = "The committee will vote on Tuesday. " * 10 + "A cat sat on it. Rain fell."


def test_long_texts_are_explained_by_sentences_and_the_words_of_the_best(
    browser: Browser, plain_url: str
) -> None:
    page = opened(browser, plain_url, "embedding", a="Where did it sit?", b=LONG)
    explain = {"by": "auto", "of": "both"}
    result = scored(plain_url, "embedding", "Where did it sit?", LONG, explain=explain)
    query, document = result["explanations"][0]["texts"]
    assert document["by"] == "sentences"
    rows = rows_of(query, "Where did it sit?", "Text A") + rows_of(document, LONG, "Text B")
    rows += rows_of({"units": document["words"]}, LONG, "Text B")
    actual = cells(page, EFFECTS)
    assert [row[:2] for row in actual] == [row[:2] for row in rows]
    assert len(document["words"]) > 3
    find(page, "[name=by][value=sentences]").click()
    run(page, "explain")
    open_details(page)
    units = [row[0] for row in cells(page, EFFECTS)]
    assert units[0] == "Where did it sit?"
    assert units[-2:] == ["A cat sat on it.", "Rain fell."]
    find(page, "[name=by][value=words]").click()
    run(page, "explain")
    explain = {"by": "words", "of": "both"}
    result = scored(plain_url, "embedding", "Where did it sit?", LONG, explain=explain)
    open_details(page)
    count = sum(len(text["units"]) for text in result["explanations"][0]["texts"])
    assert len(cells(page, EFFECTS)) == count


def test_words_beyond_the_limit_of_tokens_are_said_not_to_be_measured(
    browser: Browser, plain_url: str
) -> None:
    text = "A cat sat on it. " * 60
    page = opened(browser, plain_url, "embedding", b=text, by="words")
    explain = {"by": "words", "of": "both"}
    result = scored(plain_url, "embedding", CAT, text, explain=explain)
    (own, other) = result["explanations"][0]["texts"]
    missing = [unit["left_out"] is None for unit in (*own["units"], *other["units"])]
    assert any(missing)
    shown = [row[2] == "not measured" for row in cells(page, EFFECTS)]
    assert shown == missing
    assert "was not measured" in find(page, "#explain .result").text


def test_text_beyond_the_maximum_length_is_said_to_be_cut(browser: Browser, plain_url: str) -> None:
    text = "A cat sat. " * 300
    page = opened(browser, plain_url, "embedding", b=text)
    explain = {"by": "auto", "of": "document"}
    (explained,) = scored(plain_url, "embedding", CAT, text, explain=explain)["explanations"][0][
        "texts"
    ]
    assert explained["end"] < len(text.strip())
    shown = find(page, "#explain .result").text
    span = f"characters {explained['start']} to {explained['end']} of the {len(text)} of text B"
    assert f"The model reads {span}" in shown


def test_number_beside_a_text_that_is_cut_is_checked_with_its_part(
    browser: Browser, plain_url: str
) -> None:
    document = "w21 w7 w5 w40 " * 10
    page = opened(browser, plain_url, "reranker", a=QUERY, b=document)
    sentence = next(text for text in texts(page, "#explain .muted") if "To check" in text)
    assert "send the parts of the texts that the model reads without the word" in sentence
    word, rest = re.findall(r"without “(.*)” in the query the result is (\S+) ", sentence)[0]
    explain = {"by": "words", "of": "query"}
    result = scored(plain_url, "reranker", QUERY, document, explain=explain)
    part = document[: result["explanations"][0]["other"]["end"]]
    query = QUERY.replace(word, "").strip()
    assert number(rest) == pytest.approx(
        scored(plain_url, "reranker", query, part)["scores"][0], abs=1e-3
    )
    # Without a word of the query, the model reads more of the document.
    strike(page, word)
    until(lambda: texts(page, "#whatif td"))
    assert "was left out before" not in find(page, "#whatif").text


def test_numbers_that_were_not_measured_are_said_to_be_missing(shared_page: Browser) -> None:
    """The drawing of a response of a model without a result for the empty text."""
    unit = {"start": 0, "end": 3, "left_out": None, "alone": None, "rank": 1}
    text = {"start": 0, "end": 3, "whole": 0.5, "empty": None, "by": "words", "units": [unit]}
    result = {"kind": "cosine", "scores": [0.5], "explanations": [{"texts": [text, text]}]}
    shown = shared_page.execute_script(
        "return import('./debug/assets/deletion.js').then(({deletionCard}) => {"
        "const card = deletionCard({path: 'score', body: {queries: 'cat', documents: ['cat']}, "
        "result: arguments[0]}, {kind: 'embedding'});"
        "return [card.textContent, [...card.querySelectorAll('.score, td')]"
        ".map((it) => it.textContent)]; })",
        result,
    )
    assert shown[1] == [
        *("\N{EN DASH}", "\N{EN DASH}"),
        *("cat", "Text A", "not measured", "not measured", "1"),
        *("cat", "Text B", "not measured", "not measured", "1"),
    ]
    assert "the rest of the text has no tokens" in shown[0]
    assert "the empty text has no tokens for this model" in shown[0]


def test_offsets_count_code_points(browser: Browser, plain_url: str) -> None:
    text = "\N{CAT FACE} A cat \N{GRINNING FACE} sat."
    page = opened(browser, plain_url, "embedding", a=text)
    words = [row[0] for row in cells(page, EFFECTS) if row[1] == "Text A"]
    assert words == ["\N{CAT FACE}", "A", "cat", "\N{GRINNING FACE}", "sat", "."]


def test_field_of_a_text_has_one_direction_that_of_its_first_letter(
    browser: Browser, plain_url: str
) -> None:
    page = opened(browser, plain_url, "embedding", a="1. القط جلس\nA cat sat.", b="A cat.", c="")
    styles = page.execute_script(
        "return [...document.querySelectorAll('textarea[name=a], textarea[name=b]')]"
        ".map(getComputedStyle).map(({direction, unicodeBidi}) => [direction, unicodeBidi])"
    )
    # A direction for each paragraph, "plaintext", takes seconds for a million characters.
    assert styles == [["rtl", "isolate"], ["ltr", "isolate"]]


def test_words_of_hebrew_and_arabic_run_from_right_to_left(
    browser: Browser, plain_url: str
) -> None:
    hebrew, arabic = "החתול ישב עם cat.", "القط جلس"
    page = opened(browser, plain_url, "embedding", a=hebrew, b=arabic, c="")
    for side in ("a", "b"):
        chips = page.find_elements(By.CSS_SELECTOR, f"[data-side={side}] .chip")
        places = [chip.rect["x"] for chip in chips]
        assert places == sorted(places, reverse=True)
        assert len(places) == {"a": 5, "b": 2}[side]
    numbers = page.find_elements(By.CSS_SELECTOR, ".chip .score")
    assert {number.value_of_css_property("direction") for number in numbers} == {"ltr"}
    page.execute_script("document.querySelector('[data-side=a] .chip').focus()")
    for pressed in (
        Keys.ARROW_LEFT,
        Keys.ENTER,
        Keys.ARROW_LEFT,
        Keys.ARROW_RIGHT,
        Keys.ARROW_RIGHT,
    ):
        page.switch_to.active_element.send_keys(pressed)
    page.switch_to.active_element.send_keys(Keys.ENTER)
    assert texts(page, ".chip[aria-pressed=true] .word") == ["החתול", "ישב"]


@pytest.mark.parametrize("length", [60, 61])
def test_long_words_are_shortened_by_code_points(shared_page: Browser, length: int) -> None:
    content = "\N{GRINNING FACE}" * length
    quoted = shared_page.execute_script(
        "return import('./debug/assets/deletion.js').then(({quoted}) => quoted(arguments[0]))",
        {"content": content},
    )
    assert quoted == f"“{content[:60]}{'…' * (length > 60)}”"


def test_words_are_struck_out_by_the_rule_of_the_service(shared_page: Browser) -> None:
    contents = ["The cat sat.", " a  b ", "a\u2003b\n\nc", "w", "(a) b\x85"]
    contents += ["\N{CAT FACE} x\ufeff y", "it's 3.14", "\x1fa b"]
    variants = [
        (text, {"start": start, "end": end}, without(text, (start, end)))
        for text in contents
        for start, end in unit_spans(text, "words")
    ]
    actual = shared_page.execute_script(
        "return import('./debug/assets/tokens.js').then(({without}) => "
        "arguments[0].map(([text, unit]) => without(text, [unit])))",
        variants,
    )
    assert actual == [expected for *_, expected in variants]


@pytest.mark.parametrize("word", ["cat", "."])
def test_struck_word_has_the_number_of_the_explanation(
    browser: Browser, plain_url: str, word: str
) -> None:
    page = opened(browser, plain_url, "embedding")
    (left_out,) = (float(row[2]) for row in cells(page, EFFECTS) if row[:2] == [word, "Text A"])
    strike(page, word)
    until(lambda: texts(page, "#whatif td"))
    ((name, before, after, difference),) = cells(page, "Result of the served model")
    assert name == "cosine similarity"
    rest = {"cat": "The sat on the mat.", ".": "The cat sat on the mat"}[word]
    assert find(page, "[name=edited-a]").get_property("value") == rest
    (expected,) = scored(plain_url, "embedding", rest, FELINE)["scores"]
    assert float(after) == pytest.approx(expected, abs=TOLERANCE)
    assert float(difference) == pytest.approx(-left_out, abs=2 * TOLERANCE)
    assert float(after) - float(before) == pytest.approx(float(difference), abs=1e-9)
    assert f"“{word}” was left out before: the explanation says" in find(page, "#whatif").text
    address = page.current_url
    find(page, "#whatif .undo").click()
    until(lambda: "Nothing is struck out or edited" in find(page, "#whatif").text)
    restored = open_page(page, address, has_gradients=False)
    until(lambda: texts(restored, "#whatif td"))
    assert texts(restored, ".chip[aria-pressed=true] .word") == [word]
    assert float(cells(restored, "Result of the served model")[0][2]) == float(after)


def test_words_are_struck_out_by_the_keyboard(browser: Browser, plain_url: str) -> None:
    page = opened(browser, plain_url, "embedding")
    page.execute_script("document.querySelector('[data-side=a] .chip').focus()")
    for pressed in (Keys.ARROW_RIGHT, Keys.ENTER, Keys.END, Keys.SPACE):
        page.switch_to.active_element.send_keys(pressed)
    assert texts(page, ".chip[aria-pressed=true] .word") == ["cat", "."]
    assert find(page, "[name=edited-a]").get_property("value") == "The sat on the mat"


def test_sum_of_several_struck_words_is_said_to_be_inexact(
    browser: Browser, plain_url: str
) -> None:
    page = opened(browser, plain_url, "embedding")
    for word in ("cat", "sat"):
        strike(page, word)
    until(partial(shows, page, "#whatif", "The sum is not exact"))
    assert find(page, "[name=edited-a]").get_property("value") == "The on the mat."
    rows = {row[0]: float(row[2]) for row in cells(page, EFFECTS) if row[1] == "Text A"}
    shown = find(page, "#whatif .outcome").text.split("a change of ")[1].split(". The")[0]
    assert number(shown) == pytest.approx(-rows["cat"] - rows["sat"], abs=1e-4)


@pytest.mark.parametrize("edited", ["A dog ran.", " "])
def test_edited_text_moves_the_similarity(browser: Browser, plain_url: str, edited: str) -> None:
    page = opened(browser, plain_url, "embedding")
    edit(page, "b", edited)
    (expected,) = scored(plain_url, "embedding", CAT, edited)["scores"]
    ((_, _, after, _),) = cells(page, "Result of the served model")
    assert float(after) == pytest.approx(expected, abs=TOLERANCE)


def test_edited_text_moves_score_rank_and_labels(browser: Browser, plain_url: str) -> None:
    page = opened(browser, plain_url, "reranker", a=QUERY, b=DOCUMENT, c=OTHER)
    strike(page, "w5")
    until(lambda: texts(page, "#whatif td"))
    rows = {row[0]: row[1:] for row in cells(page, "Result of the served model")}
    first, other = scored(plain_url, "reranker", QUERY, "w21 w33", OTHER)["scores"]
    assert float(rows["score (logit)"][1]) == pytest.approx(first, abs=TOLERANCE)
    place = "1st of 2" if first >= other else "2nd of 2"
    assert rows["rank of the document"][1] == place
    page = opened(browser, plain_url, "classifier", a="w5 w6 w7")
    edit(page, "a", "w5 w6")
    (after,) = served(plain_url, "classify", model="classifier", inputs=["w5 w6"])["labels"]
    rows = {row[0]: row[1:] for row in cells(page, "Result of the served model")}
    assert rows["predicted label"][1] == after[0]["label"]
    for label in after:
        value = float(rows[f"score of {label['label']}"][1])
        assert value == pytest.approx(label["score"], abs=TOLERANCE)


def test_edited_text_moves_the_explained_label_and_labels_of_one_name(shared_page: Browser) -> None:
    before = [("a", 0.3), ("b", 0.2), ("a", 0.15), ("c", 0.1), ("d", 0.09), ("e", 0.08)]
    before.append(("f", 0.07))
    after = [("f", 0.4), ("a", 0.3), ("e", 0.1), ("d", 0.09), ("c", 0.05), ("b", 0.04)]
    after.append(("a", 0.02))
    responses = [
        {"labels": [[{"label": label, "score": score} for label, score in labels]]}
        for labels in (before, after)
    ]
    rows = shared_page.execute_script(
        "const [before, after] = arguments[0].map((own) => Response.json(own));"
        "const { fetch } = window;"
        "window.fetch = async (_, { body }) => (body.includes('edited') ? after : before);"
        "const [text, edited] = ['text', 'edited'].map((a) => ({ a, b: '' }));"
        "return import('./debug/assets/measure.js').then(({measure}) =>"
        " measure(text, edited, {kind: 'classifier'}, 'score of f', ''))"
        ".finally(() => { window.fetch = fetch; })",
        responses,
    )
    moved = [(row["name"], row["before"], row["after"]) for row in rows]
    assert moved == [
        ("predicted label", "a", "f"),
        ("score of a", 0.3, 0.3),
        ("score of b", 0.2, 0.04),
        ("score of a", 0.15, 0.02),
        ("score of c", 0.1, 0.05),
        ("score of d", 0.09, 0.09),
        ("score of f", 0.07, 0.4),
    ]


def test_reading_compares_with_unrelated_texts(browser: Browser, plain_url: str) -> None:
    page = opened(browser, plain_url, "embedding")
    unrelated = page.execute_script(
        "return import('./debug/assets/reading.js').then(({UNRELATED}) => UNRELATED)"
    )
    mean = np.mean(scored(plain_url, "embedding", CAT, *unrelated)["scores"])
    reading = find(page, ".reading").text
    shown = reading.split("text A has a cosine similarity of ")[1].split(" ")[0]
    assert number(shown) == pytest.approx(mean, abs=0.006)


def test_token_classifier_is_said_to_have_no_explanation(browser: Browser, plain_url: str) -> None:
    browser.get(f"{plain_url}/debug?model=tags")
    page = browser
    until(lambda: find(page, "#unexplained").is_displayed())
    assert "this page has no explanation" in find(page, "#unexplained").text
    assert not find(page, "#explain").is_displayed()
    assert not find(page, ".texts").is_displayed()


def test_page_without_gradients_has_no_failing_requests(
    logging_browser: Browser, plain_url: str
) -> None:
    opened(logging_browser, plain_url, "embedding")
    responses = [
        event["params"]["response"]
        for event in events(logging_browser)
        if event["method"].endswith("eceived") and "response" in event["params"]
    ]
    answers = {urlsplit(own["url"]).path: own["status"] for own in responses}
    assert {"/score", "/debug"} <= answers.keys()
    assert {status for path, status in answers.items() if path} == {200}
    assert not [path for path in answers if path.startswith("/debug/") and "assets" not in path]
    check_console(logging_browser)


def test_charts_are_absent_without_their_library(plain_url: str) -> None:
    assert httpx2.get(f"{plain_url}/debug/assets/plotly.min.js").status_code == 404
    assert httpx2.get(f"{plain_url}/debug/assets/charts.js").status_code == 200


def test_page_is_absent_if_it_is_disabled(settings: Settings) -> None:
    server = settings.server.model_copy(update={"page": False})
    with serving(create_app(settings.model_copy(update={"server": server}))) as client:
        for path in ("/debug", "/debug/assets/page.js"):
            response = client.get(path)
            assert response.status_code == 404
            assert "VITRINE_SERVER__PAGE" in response.json()["detail"]
