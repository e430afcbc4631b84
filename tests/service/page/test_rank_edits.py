"""Edits of a ranking: struck sentences, other texts, chunks and models."""

from functools import partial

import pytest
from selenium.webdriver.common.keys import Keys

from tests.service.page.browsing import (
    Browser,
    find,
    open_page,
    shows,
    texts,
    until,
)
from tests.service.page.ranking import (
    ANSWER,
    LONG,
    PASSAGES,
    QUERY,
    check_after,
    explained,
    find_in,
    opened,
    place,
    row_of,
    scores_of,
)

# A browser may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


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
