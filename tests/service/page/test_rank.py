"""The ranking of passages: list, colours, cut line, the expected passage, and edits."""

import json
import re
from collections.abc import Iterator
from functools import partial
from urllib.parse import urlencode

import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from tokenizers import Tokenizer

from models.artifact import Artifact
from tests.service.page.browsing import (
    Browser,
    Json,
    cells,
    find,
    number,
    open_details,
    open_page,
    served,
    shows,
    texts,
    type_text,
    until,
)
from tests.serving import lines_until, process

# A browser may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

QUERY = "Which plan includes phone support?"
PASSAGES = [
    "Plans can be changed in the settings. The new price applies from the next month.",
    "The Basic plan does not include phone support. Questions are answered by e-mail.",
    "Call our engineers from Monday to Friday. The Team plan has it.",
    "Rain fell on the town for three days.",
]
FILLER = "The museum was opened in {} by the mayor of the old town. "
ANSWER = "Every plan includes phone support."
# 463 words, with the answer behind the 256 tokens that the model reads.
LONG = (
    "".join(FILLER.format(1800 + index) for index in range(34))
    + ANSWER
    + " Call us by phone for support with your plan. Support by phone is open all day."
)
# Rounding of the engine, which depends on the batch of a text.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def minilm_url(artifact: Artifact) -> Iterator[str]:
    """A service with a trained model that reads 256 tokens."""
    settings = {"VITRINE_LIMITS__REQUEST_S": "300", "VITRINE_ENGINE__TIMEOUT_S": "300"}
    with process("-m", "service", VITRINE_MODEL__PATH=str(artifact.path), **settings) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        yield match[1]


def opened(
    browser: Browser,
    url: str,
    query: str = QUERY,
    passages: str = "\n\n".join(PASSAGES),
    kind: str = "embedding",
    model: str = "",
    **inputs: str,
) -> Browser:
    """Open the page with a ranking, and wait for its explanations."""
    fields = {"tab": "rank", "run": "1", "query": query, "passages": passages, **inputs}
    address = f"{url}/debug{model and f'?model={model}'}#{urlencode(fields)}"
    return explained(open_page(browser, address, kind, has_gradients=False))


def explained(page: Browser) -> Browser:
    until(lambda: find(page, "#rank .second").get_attribute("aria-busy") == "false")
    return page


def rows(page: Browser) -> list[WebElement]:
    return page.find_elements(By.CSS_SELECTOR, "#rank .row")


def row_of(page: Browser, passage: str) -> WebElement:
    (row,) = [row for row in rows(page) if passage in find_in(row, ".prose").text]
    return row


def find_in(row: WebElement, selector: str) -> WebElement:
    return row.find_element(By.CSS_SELECTOR, selector)


def ranked(page: Browser) -> list[tuple[int, float]]:
    """Return index and exact score of each row."""
    return [
        (
            int(row.get_attribute("data-index") or ""),
            float(find_in(row, ".score").get_attribute("data-score") or ""),
        )
        for row in rows(page)
    ]


def scores_of(url: str, query: str, passages: list[str], **fields: object) -> list[float]:
    scores: list[float] = served(url, "score", queries=query, documents=passages, **fields)[
        "scores"
    ]
    return scores


def place(scores: list[float], index: int) -> int:
    """Return the rank of a passage; equal scores by index."""
    return 1 + int(np.argsort(-np.array(scores), kind="stable").tolist().index(index))


def check_after(row: WebElement, scores: list[float], index: int) -> None:
    """Wait until a row has its new score and rank."""

    def holds() -> bool:
        match = re.match(r"now ([^,]+), rank (\d+)", find_in(row, ".after").text)
        expected = pytest.approx(scores[index], abs=1e-4)
        return (
            match is not None
            and number(match[1]) == expected
            and int(match[2]) == place(scores, index)
        )

    until(holds)


@pytest.mark.parametrize("kind", ["embedding", "reranker", "sparse", "multi"])
def test_list_has_the_order_and_the_scores_of_rerank(
    browser: Browser, plain_url: str, kind: str
) -> None:
    query, passages = "w7 w9", ["w21 w5 w33", "w8 w51! w7 w9", "w9", "w21 w5 w33"]
    page = opened(browser, plain_url, query, "\n\n".join(passages), kind, kind)
    raw = {"raw_scores": True} if kind == "reranker" else {}
    body = {"query": query, "documents": passages, "model": kind, **raw}
    results = served(plain_url, "rerank", **body)["results"]
    actual = ranked(page)
    assert [index for index, _ in actual] == [own["index"] for own in results]
    expected = [own["score"] for own in results]
    assert [score for _, score in actual] == pytest.approx(expected, abs=TOLERANCE)
    assert texts(page, "#rank .rank") == ["1", "2", "3", "4"]
    assert not find(page, "#rank > .problem").text
    assert len(page.find_elements(By.CSS_SELECTOR, "#rank .unit")) == 9


def test_first_request_ranks_all_and_the_next_ones_explain_the_best_first(
    browser: Browser, minilm_url: str
) -> None:
    passages = [f"The cat has {index} toys. Rain fell." for index in range(10)]
    page = opened(browser, minilm_url, "a cat", "\n\n".join(passages))
    find(page, "#rank [data-export=curl]").click()
    bodies = [
        json.loads(line.split(" -d '")[1].removesuffix("'"))
        for line in find(page, "#rank .curl").text.split("\n")
    ]
    assert bodies[0] == {"queries": "a cat", "documents": passages}
    order = [passages[index] for index, _ in ranked(page)]
    explained_bodies = [body for body in bodies if "explain" in body]
    assert [body["documents"] for body in explained_bodies] == [order[:4], order[4:8], order[8:]]
    assert {body["explain"]["by"] for body in explained_bodies} == {"sentences"}


def test_colours_have_the_signs_of_scores_without_each_sentence(
    browser: Browser, minilm_url: str
) -> None:
    page = opened(browser, minilm_url)
    signs = set()
    for index, score in ranked(page):
        row = row_of(page, PASSAGES[index])
        for unit in row.find_elements(By.CSS_SELECTOR, ".unit"):
            rest = PASSAGES[index].replace(unit.text, "", 1).replace("  ", " ").strip()
            (without,) = scores_of(minilm_url, QUERY, [rest])
            effect = float(unit.get_attribute("data-score") or "")
            assert effect == pytest.approx(score - without, abs=2 * TOLERANCE)
            channels = unit.value_of_css_property("background-color").split("(")[1].split(",")
            red, blue = float(channels[0]), float(channels[2].strip(" )"))
            if abs(effect) > 1e-3:
                assert np.sign(red - blue) == np.sign(effect)
                signs.add(np.sign(effect))
    assert signs == {1.0, -1.0}


def test_words_of_a_single_sentence_are_coloured(browser: Browser, minilm_url: str) -> None:
    # In the second one, no space is behind the question mark.
    passages = [PASSAGES[3], "Did rain fall?- on the town", *PASSAGES[:2]]
    page = opened(browser, minilm_url, QUERY, "\n\n".join(passages))
    for passage, expected in (
        (passages[0], [*PASSAGES[3].removesuffix(".").split(), "."]),
        (passages[1], ["Did", "rain", "fall", "?-", "on", "the", "town"]),
    ):
        units = row_of(page, passage).find_elements(By.CSS_SELECTOR, ".unit")
        assert [unit.text for unit in units] == expected


def test_passage_is_named_by_its_first_words_or_letters(browser: Browser, minilm_url: str) -> None:
    page = open_page(browser, f"{minilm_url}/debug", has_gradients=False)
    letters = "\N{CJK UNIFIED IDEOGRAPH-732B}" * 60  # of a language without spaces
    contents = [letters, letters[:50], "a  b", "a b c d e f", "a b c d e f g"]
    names = page.execute_script(
        "return import('./debug/assets/rank.js').then(({nameOfPassage}) => "
        "arguments[0].map((text) => nameOfPassage([{id: null, text}], 0)))",
        contents,
    )
    expected = [f"{letters[:50]} …", letters[:50], "a b", "a b c d e f", "a b c d e f …"]
    assert names == [f"“{name}”" for name in expected]


def test_prose_of_arabic_runs_from_right_to_left(browser: Browser, minilm_url: str) -> None:
    passages = "القط cat. هل هذا صحيح؟\n\nA cat sat. It rained."
    address = urlencode({"tab": "rank", "run": "1", "query": "cat", "passages": passages})
    page = open_page(browser, f"{minilm_url}/debug#{address}", has_gradients=False)
    until(lambda: len(page.find_elements(By.CSS_SELECTOR, ".row[data-by]")) == 2)
    for index, is_reversed in ((0, True), (1, False)):
        units = page.find_elements(By.CSS_SELECTOR, f".row[data-index='{index}'] .unit")
        assert len(units) == 2
        assert (units[0].rect["x"] > units[1].rect["x"]) is is_reversed


def test_cut_line_is_where_the_tokenizer_truncates(
    browser: Browser, minilm_url: str, artifact: Artifact
) -> None:
    assert len(LONG.split()) == 463
    page = opened(browser, minilm_url, QUERY, "\n\n".join([*PASSAGES, LONG]))
    row = row_of(page, "the mayor of the old town")
    tokenizer = Tokenizer.from_file(str(artifact.path / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = tokenizer.encode(LONG).offsets[254][1]  # the last of 256 tokens is special
    assert find_in(row, ".cut").text == "the model read up to here: 256 tokens"
    before, after = page.execute_script(
        "const cut = arguments[0].querySelector('.cut');"
        "const before = document.createRange(); before.setStart(cut.parentNode, 0);"
        "before.setEndBefore(cut);"
        "return [before.toString(), cut.nextSibling.textContent]",
        row,
    )
    assert (before, after) == (LONG[:end], LONG[end:])
    assert len(page.find_elements(By.CSS_SELECTOR, "#rank .cut")) == 1


def test_long_passage_is_drawn_in_part_which_says_how_much_is_missing(
    browser: Browser, plain_url: str
) -> None:
    most = 10_000
    text = "A cat sat. " * 200 + "\N{CAT FACE}" * (most + 7)
    page = opened(browser, plain_url, QUERY, text, model="embedding")
    unread = find(page, "#rank .unread").get_attribute("textContent") or ""
    read = (find(page, "#rank .prose").get_attribute("textContent") or "").partition("the model")[0]
    missing = len(text) - len(read) - most
    drawn, _, note = unread.partition(" \N{HORIZONTAL ELLIPSIS} ")
    assert drawn == text[len(read) :][:most]
    assert note == f"({missing:,} more characters, not shown)"
    find(page, "#rank [data-action=edit]").click()
    assert find(page, "#rank .editor textarea").get_attribute("value") == text


def test_a_query_that_is_not_read_whole_is_named_beside_a_passage_that_is_not(
    browser: Browser, minilm_url: str
) -> None:
    page = opened(browser, minilm_url, LONG, "\n\n".join([PASSAGES[0], LONG]))
    assert len(page.find_elements(By.CSS_SELECTOR, "#rank .cut")) == 1
    readouts = [find_in(row, ".readout").text for row in rows(page)]
    assert readouts == ["The model did not read all of the query."] * 2


def test_bars_of_cosines_begin_at_unrelated_texts(browser: Browser, minilm_url: str) -> None:
    page = opened(browser, minilm_url)
    unrelated = page.execute_script(
        "return import('./debug/assets/reading.js').then(({UNRELATED}) => UNRELATED)"
    )
    low = np.mean(scores_of(minilm_url, QUERY, unrelated))
    for row, (_, score) in zip(rows(page), ranked(page), strict=True):
        width = find_in(row, ".level > span").get_attribute("style") or ""
        share = float(width.split("width: ")[1].split("%")[0])
        expected = 100 * np.clip((score - low) / (1 - low), 0, 1)
        assert share == pytest.approx(expected, abs=0.1)


def test_expected_passage_is_compared_with_the_first(browser: Browser, minilm_url: str) -> None:
    page = opened(browser, minilm_url)
    scores = scores_of(minilm_url, QUERY, PASSAGES)
    assert place(scores, 1) == 1
    find_in(row_of(page, PASSAGES[2]), "[data-action=expect]").click()
    until(lambda: texts(page, "#rank .why li"))
    margin, sentence, *words, step = texts(page, "#rank .why li")
    assert f"rank {place(scores, 2)} with {scores[2]:.4f}" in margin
    assert f"{scores[1] - scores[2]:.4f} more" in margin
    first = PASSAGES[1].split(". ")[0] + "."
    (without,) = scores_of(minilm_url, QUERY, [PASSAGES[1].replace(first, "").strip()])
    assert without < scores[2]
    assert sentence.startswith(f"Without “{first}”, the first would have {without:.4f}")
    effects = {}
    for word in ("phone", "support"):
        rest = QUERY.replace(f" {word}", "")
        before, after = (
            [own[1], own[2]] for own in (scores, scores_of(minilm_url, rest, PASSAGES))
        )
        effects[word] = [one - other for one, other in zip(before, after, strict=True)]
    there, here = effects["phone"]
    assert there > here
    assert (
        f"“phone” ({there:+.4f} there, {here:+.4f} here)".replace("-", "\N{MINUS SIGN}")
        in (words[0])
    )
    assert step.startswith("Next: ")
    assert "expected=2" in page.current_url
    find_in(row_of(page, PASSAGES[2]), "[data-action=unexpect]").click()
    assert not texts(page, "#rank .why li")


def unit(text: str, content: str, left_out: float | None) -> Json:
    start = text.index(content)
    return {"start": start, "end": start + len(content), "left_out": left_out}


def side(by: str, units: list[Json], text: str) -> Json:
    return {"by": by, "units": units, "start": 0, "end": len(text)}


def reasons(
    page: Browser, queries: list[Json], documents: list[Json], *, is_truncated: bool = False
) -> list[str]:
    """Return why the second of two passages is not first."""
    ranking = {
        "query": "phone support",
        "passages": [{"text": text, "id": None} for text in PASSAGES[:2]],
        "order": [0, 1],
        "scores": [0.5, 0.4],
        "truncated": [is_truncated] * 2,
    }
    explanations = [{"texts": texts} for texts in zip(queries, documents, strict=True)]
    runs = [{"key": "margin", "result": {"explanations": explanations}}]
    sentences: list[str] = page.execute_script(
        "const [ranking, runs] = arguments;"
        "return import('./debug/assets/rank_expected.js').then(({drawExpected}) => ["
        "...drawExpected(ranking, 1, runs).querySelectorAll('li')].map((own) => own.textContent))",
        ranking,
        runs,
    )
    return sentences


def query_side(phone: float | None, support: float | None) -> Json:
    words = [unit("phone support", "phone", phone), unit("phone support", "support", support)]
    return side("words", words, "phone support")


def document_side(index: int, *effects: float | None) -> Json:
    text = PASSAGES[index]
    first = text.split(". ")[0] + "."
    contents = [first, text.removeprefix(first).strip()]
    units = [unit(text, *pair) for pair in zip(contents, effects, strict=True)]
    return side("sentences", units, text)


def test_unmeasured_word_of_the_query_is_not_called_missing(page: Browser) -> None:
    documents = [document_side(0, 0.1, 0.0), document_side(1, 0.1, 0.0)]
    queries = [query_side(0.3, 0.2), query_side(None, 0.2)]
    *_, step = reasons(page, queries, documents)
    assert "no measured word of the query is missing" in step
    *_, step = reasons(page, [queries[0], query_side(0.0, 0.2)], documents)
    assert "say more about “phone”, from which" in step


def test_sentences_about_units_are_about_the_measured_ones(page: Browser) -> None:
    queries = [query_side(0.3, 0.2)] * 2
    whole, partial = ([document_side(index, 0.0, last) for index in (0, 1)] for last in (0.0, None))
    _, first, *_, step = reasons(page, queries, whole)
    assert first == "No sentence of the first passage raises its score."
    assert "no sentence lowers its score" in step
    _, first, *_, step = reasons(page, queries, partial)
    assert first == "No measured sentence of the first passage raises its score."
    assert "no measured sentence lowers its score" in step
    words = [{**own, "by": "words"} for own in whole]
    assert "no word lowers its score" in reasons(page, queries, words)[-1]


def test_predictions_for_truncated_passages_are_about_the_read_part(page: Browser) -> None:
    queries = [query_side(0.3, 0.2)] * 2
    documents = [document_side(0, 0.2, 0.0), document_side(1, 0.1, -0.2)]
    for is_truncated, first, second in (
        (False, "the first would have 0.3", "it would have 0.6"),
        (True, "the part that the model reads of the first", "the part that the model reads would"),
    ):
        _, sentence, *_, step = reasons(page, queries, documents, is_truncated=is_truncated)
        assert first in sentence
        assert second in step


def test_part_behind_the_cut_line_is_scored_in_chunks(browser: Browser, minilm_url: str) -> None:
    page = opened(browser, minilm_url, QUERY, "\n\n".join([*PASSAGES, LONG]), expected="4")
    until(lambda: texts(page, "#rank .why li"))
    sentences = texts(page, "#rank .why li")
    chunking = {"strategy": "sentences", "size": 64}
    scores = scores_of(minilm_url, QUERY, [*PASSAGES, LONG])
    assert place(scores, 4) > 1
    (best,) = scores_of(minilm_url, QUERY, [LONG], chunking=chunking)
    assert best > scores[4]
    (cut,) = [sentence for sentence in sentences if "behind the cut line" in sentence]
    assert f"with {best:.4f}." in cut
    rank = place([*scores[:4], best], 4)
    assert sentences[-1].startswith("Next: divide it into chunks.")
    assert f"rank {rank}," in sentences[-1]


def test_problem_of_the_chunks_is_shown_in_the_comparison_alone(
    browser: Browser, minilm_url: str
) -> None:
    page = opened(browser, minilm_url, QUERY, "\n\n".join([*PASSAGES, LONG]))
    page.execute_script(
        "const send = window.fetch;"
        "window.fetch = (url, options) => options?.body?.includes('chunking')"
        " ? Promise.resolve(Response.json({detail: 'too long'}, {status: 400}))"
        " : send(url, options);"
    )
    problem = "The chunks behind the cut line could not be scored: too long."
    find_in(row_of(page, "the mayor of the old town"), "[data-action=expect]").click()
    until(lambda: problem in texts(page, "#rank .why li"))
    find(page, "#rank [data-action=unexpect]").click()
    until(lambda: not texts(page, "#rank .why li"))
    assert problem not in texts(page, "#rank .second p")


def test_missing_passage_is_added_and_expected(browser: Browser, minilm_url: str) -> None:
    page = opened(browser, minilm_url)
    find(page, "#missing").send_keys(ANSWER, Keys.TAB, Keys.ENTER)
    until(lambda: len(rows(page)) == 5)
    explained(page)
    assert ranked(page)[0][0] == 4
    until(lambda: "is first" in find(page, "#rank .why").text)
    assert "should be first" in row_of(page, ANSWER).text
    assert find(page, "[name=passages]").get_property("value") == "\n\n".join([*PASSAGES, ANSWER])


def test_struck_sentence_has_the_score_and_the_rank_of_the_rest(
    browser: Browser, minilm_url: str
) -> None:
    page = opened(browser, minilm_url)
    row = row_of(page, PASSAGES[1])
    unit = find_in(row, ".unit")
    rest = PASSAGES[1].replace(unit.text, "").strip()
    old = scores_of(minilm_url, QUERY, PASSAGES)
    scores = scores_of(minilm_url, QUERY, [PASSAGES[0], rest, *PASSAGES[2:]])
    assert place(scores, 1) > place(old, 1) == 1
    unit.click()
    check_after(row, scores, 1)
    for index in (0, 2, 3):
        words = find_in(row_of(page, PASSAGES[index]), ".after").text
        rank, before = place(scores, index), place(old, index)
        assert words == ("" if rank == before else f"now rank {rank}")
    assert unit.get_attribute("aria-pressed") == "true"
    find_in(row, "[data-action=undo]").click()
    until(lambda: not any(texts(page, "#rank .after")))
    assert unit.get_attribute("aria-pressed") == "false"


def test_edited_passage_and_query_have_the_scores_of_the_new_texts(
    browser: Browser, minilm_url: str
) -> None:
    page = opened(browser, minilm_url)
    row = row_of(page, PASSAGES[3])
    find_in(row, "[data-action=edit]").click()
    field = find_in(row, ".editor textarea")
    field.clear()
    field.send_keys(ANSWER)
    edited = [*PASSAGES[:3], ANSWER]
    check_after(row, scores_of(minilm_url, QUERY, edited), 3)
    query = find(page, "[data-option=query]")
    query.clear()
    query.send_keys("Rain in town")
    scores = scores_of(minilm_url, "Rain in town", edited)
    for index, passage in enumerate(PASSAGES):
        check_after(row_of(page, passage), scores, index)
    find(page, "#rank [data-action=undo-all]").click()
    until(partial(shows, page, "#rank-whatif .outcome", "Nothing is struck out or edited."))
    assert not any(texts(page, "#rank .after"))
    assert query.get_property("value") == QUERY
    page.execute_script("window.fetch = () => Promise.reject(new TypeError())")
    query.send_keys("!")
    until(partial(shows, page, "#rank-whatif .problem", "could not be reached"))
    assert find(page, "#rank [data-action=undo-all]").is_displayed()
    assert not find(page, "#rank-whatif .outcome").text


def test_chunks_have_the_scores_of_the_best_chunks(browser: Browser, minilm_url: str) -> None:
    passages = [*PASSAGES, LONG]
    page = opened(browser, minilm_url, QUERY, "\n\n".join(passages))
    find(page, "[data-option=size]").send_keys("32")
    find(page, "[data-option=overlap]").send_keys("8")
    scores = scores_of(minilm_url, QUERY, passages, chunking={"size": 32, "overlap": 8})
    check_after(row_of(page, "the mayor of the old town"), scores, 4)
    for index, passage in enumerate(PASSAGES):
        check_after(row_of(page, passage), scores, index)


def test_url_has_the_edits(browser: Browser, minilm_url: str) -> None:
    page = opened(browser, minilm_url)
    unit = find_in(row_of(page, PASSAGES[0]), ".unit")
    unit.click()
    find(page, "[data-option=query]").send_keys(" Rain?")
    find(page, "[data-option=size]").send_keys("6")
    find(page, "[data-option=overlap]").send_keys("2")
    row = row_of(page, PASSAGES[3])
    find_in(row, "[data-action=edit]").click()
    find_in(row, ".editor textarea").send_keys(" " + ANSWER)
    edited = [
        "The new price applies from the next month.",
        *PASSAGES[1:3],
        f"{PASSAGES[3]} {ANSWER}",
    ]
    scores = scores_of(minilm_url, f"{QUERY} Rain?", edited, chunking={"size": 6, "overlap": 2})
    for own, index in ((row, 3), (row_of(page, PASSAGES[1]), 1)):
        check_after(own, scores, index)
    again = explained(open_page(browser, page.current_url, has_gradients=False))
    for index, passage in enumerate(PASSAGES):
        check_after(row_of(again, passage), scores, index)
    struck = find_in(row_of(again, PASSAGES[0]), ".unit")
    assert struck.get_attribute("aria-pressed") == "true"
    find(again, "#rank [data-action=undo-all]").click()
    until(lambda: "rank-edits" not in again.current_url)
    again = opened(browser, minilm_url, **{"rank-edits": "[1"})
    assert shows(again, "#rank-whatif .problem", "The edits in the URL cannot be read.")


def test_other_model_has_its_own_scores(browser: Browser, url_of_both: str) -> None:
    page = opened(browser, url_of_both, "a cat", "The cat sat.\n\nA dog ran.", model="first")
    until(lambda: find(page, "[data-option=model]").is_displayed())
    find(page, "[data-option=model]").send_keys("second")
    texts_of_passages = ["The cat sat.", "A dog ran."]
    scores = scores_of(url_of_both, "a cat", texts_of_passages, model="second")
    for index, passage in enumerate(texts_of_passages):
        check_after(row_of(page, passage), scores, index)


def test_only_models_that_rank_are_offered(browser: Browser, plain_url: str) -> None:
    page = opened(browser, plain_url, "w4 w5", "w6 w7")
    until(lambda: find(page, "[data-option=model]").is_displayed())
    offered = texts(page, "[data-option=model] option")
    assert offered == ["this model", "identity-reranker", "multi", "reranker", "sparse"]


def choose_model(page: Browser, name: str) -> None:
    page.execute_script(
        "arguments[0].value = arguments[1];"
        "arguments[0].dispatchEvent(new Event('input', { bubbles: true }))",
        find(page, "[data-option=model]"),
        name,
    )


def test_other_model_that_is_a_reranker_has_its_logits(browser: Browser, plain_url: str) -> None:
    passages = ["w6 w7", "w8 w9 w10"]
    page = opened(browser, plain_url, "w4 w5", "\n\n".join(passages))
    until(lambda: find(page, "[data-option=model]").is_displayed())
    choose_model(page, "reranker")
    scores = scores_of(plain_url, "w4 w5", passages, model="reranker", raw_scores=True)
    for index, passage in enumerate(passages):
        check_after(row_of(page, passage), scores, index)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\n\ntwo\nlines\n \n\nthree", [("one", None), ("two\nlines", None), ("three", None)]),
        ('"one"\n{"text": "two\\n\\n", "id": 7}', [("one", None), ("two\n\n", "7")]),
        ('{"text": "one", "id": 1234567890123456789}', [("one", "1234567890123456789")]),
        (
            '{"passage": "a"}\n{"document": "b"}\n{"content": "c"}',
            [("a", None), ("b", None), ("c", None)],
        ),
        (
            'id,text\nx,"a, ""b""\nc"\ny,d',
            [("a, “b”\nc".replace("“", '"').replace("”", '"'), "x"), ("d", "y")],
        ),
        ("Content\na\nb", [("a", None), ("b", None)]),
        ('text\n"a\n\nb"', [("a\n\nb", None)]),
        ("Content", [("Content", None)]),
        ("Content\n\na", [("Content", None), ("a", None)]),
        (
            '"Yes," she said.\n\nText, or passage.',
            [('"Yes," she said.', None), ("Text, or passage.", None)],
        ),
    ],
)
def test_passages_are_read_by_the_format_of_their_text(
    page: Browser, text: str, expected: list[tuple[str, str | None]]
) -> None:
    again = "writePassages(readPassages(arguments[0]))"
    for source in ("arguments[0]", again):
        actual = page.execute_script(
            "return import('./debug/assets/rank_passages.js').then("
            f"({{readPassages, writePassages}}) => readPassages({source}))",
            text,
        )
        assert [(own["text"], own["id"]) for own in actual] == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('"a"\n"b"\nc', "line 3 of the passages is not JSON"),
        (
            '{"text": "a"}\n\n{"body": "b"}',
            "line 3 of the passages is neither a text nor an object",
        ),
        ('text,id\na,1\n"b\nc",2,3', "line 3 of the passages: 3 cells, and the header has 2"),
        ('text,id\n"a,1', "line 2 of the passages: a quote is not closed"),
        ("\n\n".join(["a"] * 51), "51 passages; the limit of this view is 50"),
        (" ", "write at least one passage"),
    ],
)
def test_wrong_passages_are_named(
    browser: Browser, plain_url: str, text: str, problem: str
) -> None:
    page = open_page(browser, f"{plain_url}/debug#tab=rank", has_gradients=False)
    page.execute_script("document.querySelector('[name=passages]').value = arguments[0]", text)
    until(lambda: find(page, "#rank .go").is_enabled())
    find(page, "#rank .go").click()
    until(partial(shows, page, "#rank > .problem", f"Passages: {problem}"))
    assert find(page, "[name=passages]").get_attribute("aria-invalid") == "true"


def test_file_is_read_into_the_field(
    browser: Browser, minilm_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    page = opened(browser, minilm_url)
    file = tmp_path_factory.mktemp("passages") / "passages.csv"
    file.write_text("id,text\nx,The cat sat.\ny,A dog ran.\n")
    find(page, "#passages-file").send_keys(str(file))
    until(lambda: "The cat" in str(find(page, "[name=passages]").get_property("value")))
    drop = (
        "const data = new DataTransfer(); data.items.add(new File(arguments[0], 'a.jsonl'));"
        "document.querySelector('[name=passages]').dispatchEvent("
        "new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true}))"
    )
    page.execute_script(drop, ['"dropped"'])
    until(lambda: find(page, "[name=passages]").get_property("value") == '"dropped"')


@pytest.mark.parametrize(
    "body",
    [
        {"query": QUERY, "documents": [*PASSAGES[:2], {"text": "Two\n\nparts."}], "top_n": 2},
        {"queries": [QUERY], "documents": [*PASSAGES[:2], "Two\n\nparts."]},
        {
            "query": QUERY,
            "documents": [*PASSAGES[:2], {"text": "Two\n\nparts."}],
            "chunking": {"size": 9, "overlap": 2, "late": False},
        },
    ],
)
def test_url_with_a_request_ranks_its_documents(
    browser: Browser, minilm_url: str, body: Json
) -> None:
    address = f"{minilm_url}/debug?{urlencode({'request': json.dumps(body)})}"
    page = explained(open_page(browser, address, has_gradients=False))
    until(lambda: "request=" not in page.current_url)
    explained(page)
    documents = [*PASSAGES[:2], "Two\n\nparts."]
    results = served(minilm_url, "rerank", query=QUERY, documents=documents)["results"]
    assert [index for index, _ in ranked(page)] == [own["index"] for own in results]
    if "chunking" in body:
        scores = scores_of(minilm_url, QUERY, documents, chunking=body["chunking"])
        for index in range(len(documents)):
            check_after(find(page, f"#rank .row[data-index='{index}']"), scores, index)
    else:
        assert shows(page, "#rank-whatif .outcome", "Nothing is struck out or edited.")


def test_url_with_a_wrong_request_says_so(browser: Browser, plain_url: str) -> None:
    browser.get("about:blank")
    browser.get(f"{plain_url}/debug?request=%7Bquery")
    until(partial(shows, browser, "#rank > .problem", "the request in the URL is not JSON"))
    assert not rows(browser)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"queries": ["a", "b"]}, "the request in the URL has several queries"),
        (
            {"query": "a", "chunking": {"strategy": "sentences", "late": True}, "top_n": 1},
            "the request in the URL has chunking.strategy and chunking.late, without which",
        ),
        (
            {"query": "a", "instruction": "Is it about cats?"},
            "the request in the URL has instruction, without which",
        ),
    ],
)
def test_url_with_a_request_that_this_view_cannot_repeat_is_refused(
    browser: Browser, plain_url: str, fields: Json, problem: str
) -> None:
    body = {**fields, "documents": ["c", "d"]}
    browser.get("about:blank")
    browser.get(f"{plain_url}/debug?{urlencode({'request': json.dumps(body)})}")
    until(partial(shows, browser, "#rank > .problem", problem))
    assert not rows(browser)


def test_other_views_open_a_ranking(browser: Browser, minilm_url: str) -> None:
    page = open_page(browser, f"{minilm_url}/debug#tab=explain", has_gradients=False)
    page.execute_script(
        "return import('./debug/assets/rank_open.js').then("
        "({openRanking}) => openRanking(...arguments))",
        *(QUERY, PASSAGES, 2),
    )
    until(lambda: texts(page, "#rank .why li"))
    assert find(page, "#rank").is_displayed()
    assert "should be first" in row_of(page, PASSAGES[2]).text


def test_row_opens_in_the_detailed_view(browser: Browser, minilm_url: str) -> None:
    page = opened(browser, minilm_url)
    find_in(row_of(page, PASSAGES[2]), "[data-action=explain]").click()
    until(lambda: find(page, "#explain").get_attribute("aria-busy") == "false")
    (score,) = scores_of(minilm_url, QUERY, [PASSAGES[2]])
    assert number(find(page, "#explain .figure strong").text) == pytest.approx(score, abs=1e-4)


def test_keyboard_alone_strikes_edits_and_marks(browser: Browser, minilm_url: str) -> None:
    page = opened(browser, minilm_url)
    row = row_of(page, PASSAGES[1])
    page.execute_script("arguments[0].focus()", find_in(row, "[data-action=explain]"))
    page.switch_to.active_element.send_keys(Keys.TAB)
    page.switch_to.active_element.send_keys(Keys.RIGHT)
    unit = page.switch_to.active_element
    assert unit.text == "Questions are answered by e-mail."
    assert find_in(row, ".readout").text.startswith("Without this sentence, the score changes by ")
    unit.send_keys(Keys.SPACE)
    until(lambda: find_in(row, ".after").text)
    rest = PASSAGES[1].replace(unit.text, "").strip()
    check_after(row, scores_of(minilm_url, QUERY, [PASSAGES[0], rest, *PASSAGES[2:]]), 1)
    page.execute_script("arguments[0].focus()", find_in(row, "[data-action=expect]"))
    page.switch_to.active_element.send_keys(Keys.TAB)
    page.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.switch_to.active_element.tag_name == "textarea"
    assert page.switch_to.active_element.get_property("value") == rest
    page.execute_script("arguments[0].focus()", find_in(row, "[data-action=expect]"))
    page.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.switch_to.active_element.text == "Need not be first"
    # The list is drawn again, with the edits.
    assert find_in(row_of(page, PASSAGES[1]), ".after").text.startswith("now ")


def test_edited_input_marks_the_ranking_as_old(browser: Browser, minilm_url: str) -> None:
    page = opened(browser, minilm_url, expected="2")
    type_text(page, "query", "rain")
    assert find(page, "#rank .stale").text == "These results are of other inputs: run again."
    find(page, "[name=passages]").send_keys(" ")
    assert find(page, "[name=expected]").get_property("value") == ""


def test_list_is_there_before_the_explanations_which_an_edited_input_cancels(
    browser: Browser, minilm_url: str
) -> None:
    page = open_page(browser, f"{minilm_url}/debug#tab=rank", has_gradients=False)
    until(lambda: find(page, "#rank .go").is_enabled())
    page.execute_script(
        "const send = window.fetch;"
        "window.fetch = (url, options) => options?.body?.includes('explain')"
        " ? new Promise((_, fail) => { window.isAsked = true;"
        " options.signal.addEventListener('abort', () => {"
        " window.isCancelled = true; fail(options.signal.reason); }); }) : send(url, options);"
    )
    find(page, "#rank .go").click()
    until(lambda: page.execute_script("return window.isAsked"))
    assert len(rows(page)) == 4
    assert find(page, "#rank .second").get_attribute("aria-busy") == "true"
    assert not page.find_elements(By.CSS_SELECTOR, "#rank .unit")
    type_text(page, "query", "rain")
    until(lambda: page.execute_script("return window.isCancelled"))
    explained(page)
    assert len(rows(page)) == 4


def test_tables_have_the_effects_before_the_scores(browser: Browser, minilm_url: str) -> None:
    page = opened(browser, minilm_url)
    open_details(page)
    captions = [own for own in texts(page, "#rank caption") if own]
    assert captions == [
        "Effect of each sentence or word on the cosine similarity",
        "Passages by score",
    ]
    effects = cells(page, "Effect of each sentence")
    order = [index for index, _ in ranked(page)]
    explain = {"by": "sentences"}
    best = PASSAGES[order[0]]
    result = served(minilm_url, "score", queries=QUERY, documents=[best], explain=explain)
    (document,) = result["explanations"][0]["texts"]
    for unit, row in zip(document["units"], effects, strict=False):
        assert row[:2] == ["1", best[unit["start"] : unit["end"]]]
        expected = [unit["left_out"], unit["alone"]]
        assert [float(cell) for cell in row[2:]] == pytest.approx(expected, abs=2 * TOLERANCE)
    assert [row[3] for row in cells(page, "Passages by score")] == [PASSAGES[own] for own in order]


def test_classifier_has_no_ranking(browser: Browser, plain_url: str) -> None:
    page = open_page(
        browser, f"{plain_url}/debug?model=classifier", "classifier", has_gradients=False
    )
    until(lambda: find(page, "#explain").is_displayed())
    assert not find(page, "#tab-rank").is_displayed()
