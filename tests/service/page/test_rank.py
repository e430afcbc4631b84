"""The ranking of passages: list, colours, cut line, and the expected passage."""

import json
from urllib.parse import urlencode

import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
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
    texts,
    type_text,
    until,
)
from tests.service.page.ranking import (
    ANSWER,
    LONG,
    PASSAGES,
    QUERY,
    TOLERANCE,
    explained,
    find_in,
    opened,
    place,
    ranked,
    row_of,
    rows,
    scores_of,
)

# A browser may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


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


def test_words_that_the_vocabulary_lacks_are_named_below_a_passage(
    browser: Browser, plain_url: str
) -> None:
    passages = "w21 \N{SAUROPOD} w5\n\nw8 w51 w7 w9"
    page = opened(browser, plain_url, "w7 \N{BAT}", passages)
    until(lambda: len(page.find_elements(By.CSS_SELECTOR, "#rank .row[data-by]")) == 2)
    of_both, of_query = (
        f"The vocabulary lacks {parts}: the model cannot tell such parts apart."
        for parts in (
            "“\N{BAT}” of the query and “\N{SAUROPOD}” of the passage",
            "“\N{BAT}” of the query",
        )
    )
    shown = {row.get_attribute("data-index"): find_in(row, ".readout").text for row in rows(page)}
    assert shown == {"0": of_both, "1": of_query}


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


def test_passage_is_named_by_its_first_words_or_letters(shared_page: Browser) -> None:
    letters = "\N{CJK UNIFIED IDEOGRAPH-732B}" * 60  # of a language without spaces
    contents = [letters, letters[:50], "a  b", "a b c d e f", "a b c d e f g"]
    names = shared_page.execute_script(
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


def test_row_opens_in_the_detailed_view(browser: Browser, minilm_url: str) -> None:
    page = opened(browser, minilm_url)
    find_in(row_of(page, PASSAGES[2]), "[data-action=explain]").click()
    until(lambda: find(page, "#explain").get_attribute("aria-busy") == "false")
    (score,) = scores_of(minilm_url, QUERY, [PASSAGES[2]])
    assert number(find(page, "#explain .figure strong").text) == pytest.approx(score, abs=1e-4)


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
