"""Sentences of the page about results, most of them in responses that the tests write."""

import json
from functools import partial

import pytest
from sentence_transformers import SparseEncoder

from models.artifact import Artifact
from tests.service.page.browsing import (
    Browser,
    Json,
    find,
    number,
    open_page,
    shows,
    texts,
    type_text,
    until,
)
from tests.service.page.test_accessibility import shown_on

# A browser may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def value_of(page: Browser, module: str, expression: str, *values: object) -> str:
    """Return the text of an expression with a module of the page, `own`, and `values`."""
    value: str = page.execute_script(
        f"const values = [...arguments]; return import('./debug/assets/{module}.js')"
        f".then((own) => {expression})",
        *values,
    )
    return value


Words = dict[str, float | None]


def explained(words: Words) -> Json:
    """Return the explanation of a text of these words: the score less that without the word."""
    units, start = [], 0
    for rank, (word, left_out) in enumerate(words.items(), start=1):
        end = start + len(word)
        numbers = {"left_out": left_out, "alone": left_out, "rank": rank}
        units.append({"start": start, "end": end, **numbers})
        start = end + 1
    text = {"start": 0, "end": start - 1, "whole": 0.5, "empty": 0.0}
    return {**text, "by": "words", "units": units}


def score_run(query: Words, document: Words, again: Words = {}, other: Words = {}) -> Json:  # noqa: B006
    """Return a request of two texts with its response, or of three: query, document and other.

    `again` are the numbers of the query in the score of the other document.
    """
    pairs = [(query, document), (again, other)] if other else [(query, document)]
    explanations = [{"texts": [explained(text) for text in pair]} for pair in pairs]
    body = {"queries": " ".join(query), "documents": [" ".join(words) for _, words in pairs]}
    result = {"kind": "cosine", "scores": [0.5, 0.25][: len(pairs)], "explanations": explanations}
    return {"key": "deletion", "path": "score", "body": body, "result": result}


def card(page: Browser, run: Json) -> str:
    """Return the text of the evidence for a run."""
    drawn = "own.deletionCard(values[0], {kind: 'embedding'}).textContent"
    return value_of(page, "deletion", drawn, run)


def difference_run() -> Json:
    """Return the explanation of a document that is ranked first by "cat", against "dog"."""
    return score_run(
        {"pet": 0.1}, {"cat": 0.3, "a": 0.0}, {"pet": 0.2}, {"dog": 0.25, "the": -0.15}
    )


def test_words_of_two_documents_speak_for_one_of_them(shared_page: Browser) -> None:
    shown = card(shared_page, difference_run())
    # "the" lowers the score of the other document, and so speaks for the first one.
    assert "“cat” (text B) and “the” (text C) speak most for text B." in shown
    assert "“dog” (text C) and “pet” (text A) speak most for text C." in shown
    assert "for text C \N{MINUS SIGN}0.300+0.300  for text B" in shown
    assert "A word that raises the score of text C lowers the difference" in shown


def test_effects_as_small_as_rounding_are_no_effects(shared_page: Browser) -> None:
    shown = card(shared_page, score_run({"pet": 4e-6, "a": 0.0}, {"cat": -1e-8}))
    assert "No word changes the cosine similarity." in shown
    assert "“pet” (text A) raises the cosine similarity most." in card(
        shared_page, score_run({"pet": 6e-6, "a": 0.0}, {"cat": -1e-8})
    )


def test_words_that_the_vocabulary_lacks_are_named(shared_page: Browser) -> None:
    run = score_run({"pet": 0.1}, dict.fromkeys("abcdefgh", 0.1))
    document = run["result"]["explanations"][0]["texts"][1]
    document["unknown"] = [{"start": 2 * index, "end": 2 * index + 1} for index in range(7)]
    listed = "“a”, “b”, “c”, “d”, “e” and 2 more of text B"
    sentence = f"The vocabulary lacks {listed}: the model cannot tell such parts apart."
    shown = card(shared_page, run)
    assert sentence in shown
    assert shown.count("lacks") == 1


def test_titles_with_two_documents_are_neutral(browser: Browser, plain_url: str) -> None:
    address = f"{plain_url}/debug?model=embedding#tab=explain&run=1"
    page = open_page(browser, address, has_gradients=False)
    assert find(page, "#explain h2").text == "Why are these two texts similar?"
    type_text(page, "c", "A dog ran.")
    assert find(page, "#explain h2").text == "Why is text A closer to one of texts B and C?"
    assert card(page, difference_run()).startswith("Words that speak for text B or for text C")


def test_answer_with_two_documents_is_the_difference(shared_page: Browser) -> None:
    drawn = "own.drawExplanation([values[0]], {}, {kind: 'embedding'}).firstChild.textContent"
    shown = value_of(shared_page, "explain", drawn, difference_run())
    assert shown.startswith("+0.2500 difference in cosine similarity")
    assert "Text B ranks above text C, whose score is 0.2500." in shown
    assert "The cosine similarity of text B is 0.5000." in shown


def test_word_that_was_measured_for_one_document_alone_is_said_to_be(shared_page: Browser) -> None:
    run = score_run({"pet": 0.1, "?": 0.1}, {"cat": 0.3}, {"pet": 0.2, "?": None}, {"dog": 0.2})
    assert ", or it was measured for one of the documents alone" in card(shared_page, run)
    run = score_run({"pet": 0.1, "?": None}, {"cat": 0.3})
    assert "“\N{EN DASH}” was not measured" in card(shared_page, run)
    assert "for one of the documents alone" not in card(shared_page, run)


def test_first_document_that_is_not_explained_is_named_beside_both_scores(
    shared_page: Browser,
) -> None:
    run = difference_run()
    run["result"]["explanations"][0] = None  # the tokens of the request suffice for the other alone
    drawn = "own.drawExplanation([values[0]], {}, {kind: 'embedding'}).textContent"
    shown = value_of(shared_page, "explain", drawn, run)
    assert shown.startswith("+0.2500 difference in cosine similarity")
    assert "The tokens of a request do not suffice to explain text B" in shown
    asked = "String(own.secondRequests({}, {kind: 'embedding', gradients: {}}, [values[0]]).length)"
    assert value_of(shared_page, "second", asked, run) == "0"


@pytest.mark.parametrize("kind", ["embedding", "multi"])
@pytest.mark.parametrize("has_other", [True, False])
def test_second_opinion_is_of_a_difference_only_if_the_first_answer_is(
    shared_page: Browser, kind: str, has_other: bool
) -> None:
    run = difference_run()
    if not has_other:
        # The tokens of the request did not suffice for the other document.
        run["result"]["explanations"][1] = None
    inputs = {"a": "pet", "b": "cat a", "c": "dog the", "pair-layer": "output"}
    gradients = {"routes": ["attribute"], "targets": ["maxsim"], "baselines": ["pad"]}
    model = {"kind": kind, "similarity": "cosine", "prompts": [], "gradients": gradients}
    sent = value_of(
        shared_page,
        "second",
        "JSON.stringify(own.secondRequests(values[0], values[1], [values[2]]))",
        inputs,
        model,
        run,
    )
    requests = json.loads(sent)
    targets = [request["body"]["target"] for request in requests]
    others = {target.get("negative") or target.get("versus") for target in targets}
    assert others == ({"dog the"} if has_other else {None})


def test_emoji_and_flags_are_named_as_words_are(shared_page: Browser) -> None:
    family, flag = "\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea"
    shown = card(shared_page, score_run({"love": 0.1, family: 0.3}, {flag: -0.2, "!": 0.9}))
    assert f"“{family}” (text A) and “love” (text A) raise" in shown
    assert f"“{flag}” (text B) lowers it most." in shown


def test_word_reorders_nothing_of_the_sentence_around_it(shared_page: Browser) -> None:
    # The second one ends the isolate around it.
    words: Words = {"a\u202ecat": 0.3, "\u2069\u202edog": 0.2}
    shown = card(shared_page, score_run(words, {"b": 0.1}))
    assert "“a\\u202ecat” (text A), “\\u2069\\u202edog” (text A) and “b” (text B) raise" in shown
    hebrew, other_script, with_mark = "\u05d7\u05ea\u05d5\u05dc", "\u07ca\U0001e900", "cat\u200f"
    for word in (hebrew, other_script, with_mark):
        shown = card(shared_page, score_run({word: 0.3}, {"b": 0.1}))
        assert f"“\u2068{word}\u2069” (text A) and “b” (text B) raise" in shown
    # Between letters of Hebrew and the number, the colon would be on the other side of both.
    drawn = (
        "{ const [unit] = values; const {node, paint} = own.chips([unit], 'a'); paint([-0.5], 1);"
        "node.querySelector('li').dispatchEvent(new Event('focus'));"
        "return node.querySelector('p').textContent; }"
    )
    unit = {"text": 0, "content": hebrew, "spelled": hebrew}
    readout = value_of(shared_page, "tokens", drawn, unit)
    assert readout == f"\u2068{hebrew}\u2069 (\u2068{hebrew}\u2069): \N{MINUS SIGN}0.5"


def test_number_stays_behind_a_label_that_runs_from_right_to_left(shared_page: Browser) -> None:
    hebrew = "\u05d7\u05ea\u05d5\u05dc"
    run = {"result": {"kind": "label", "explanations": [{"label": hebrew}]}}
    assert value_of(shared_page, "deletion", "own.nameOf(values[0])", run) == (
        f"score of \u2068{hebrew}\u2069"
    )
    drawn = "own.totals({value: 0.5, label: values[0]}, values[1]).textContent"
    target = {"type": "label", "versus": f"{hebrew} 2"}
    shown = f"logit of \u2068{hebrew}\u2069 \N{MINUS SIGN} \u2068{hebrew} 2\u2069"
    assert shown in value_of(shared_page, "attribution", drawn, hebrew, target)


def test_punctuation_is_never_named_as_evidence(shared_page: Browser) -> None:
    shown = card(shared_page, score_run({"cat": 0.1, "?": 0.4}, {"feline": 0.2, "...": -0.4}))
    for word in ("“?”", "“...”"):
        assert word not in shown
    assert "without “cat” in text A the result is 0.4000" in shown


@pytest.mark.parametrize(
    ("word", "effect", "is_said"),
    [
        ("not", 0.02, True),
        ("Never", -0.02, True),
        ("doesn't", 0.02, True),
        ("won\N{RIGHT SINGLE QUOTATION MARK}t", -0.02, True),
        ("not", -0.2, False),
        ("knot", 0.02, False),
        ("nothing", None, False),
    ],
)
def test_negation_that_hardly_moves_the_score_is_named(
    shared_page: Browser, word: str, effect: float | None, is_said: bool
) -> None:
    run = score_run({"cats": 0.4, word: effect}, {"cats": 0.3})
    shown = card(shared_page, run)
    assert (f"The model hardly sees the negation “{word}” of text A" in shown) == is_said
    if is_said:
        assert effect is not None
        change = f"{-effect:+.4f}".replace("-", "\N{MINUS SIGN}")
        assert f"changes by {change}, without another word by up to 0.4000" in shown


def test_negation_is_not_judged_by_a_difference(shared_page: Browser) -> None:
    run = score_run({"not": 0.1}, {"cat": 0.3}, {"not": 0.1}, {"dog": 0.2})
    assert "negation" not in card(shared_page, run)


@pytest.mark.parametrize(
    ("similarity", "words", "is_low"),
    [
        (0.95, "nearly the same", False),
        (0.7, "very similar", False),
        (0.55, "similar", False),
        (0.368, "weakly similar", True),
        (0.1, "no more similar than unrelated texts", True),
    ],
)
def test_similarity_is_read_by_its_distance_from_unrelated_texts(
    shared_page: Browser, similarity: float, words: str, is_low: bool
) -> None:
    drawn = "own.similarityReading(values[0], 'cosine similarity', {unrelated: 0.02, itself: 1})"
    shown = value_of(shared_page, "reading", f"{drawn}.textContent", similarity)
    assert f"These texts are {words}, for this model." in shown
    assert ("The model's card names its languages." in shown) == is_low


@pytest.mark.parametrize(("itself", "words"), [(0.9, "nearly the same"), (0.6, "no more similar")])
def test_similarity_of_a_text_with_itself_is_the_end_of_the_way(
    shared_page: Browser, itself: float, words: str
) -> None:
    """It is not 1 if queries and documents have different prompts, and can be low."""
    known = "{unrelated: 0.7, itself: values[0]}"
    drawn = f"own.similarityReading(values[0], 'cosine similarity', {known})"
    shown = value_of(shared_page, "reading", f"{drawn}.textContent", itself)
    assert f"These texts are {words}" in shown


@pytest.mark.parametrize("expression", ["rounded(-1e-9, 1)", "percent(-1e-9)", "fixed(-0.0004, 3)"])
def test_number_that_is_rounded_to_zero_has_no_sign(shared_page: Browser, expression: str) -> None:
    shown = value_of(shared_page, "dom", f"own.{expression}")
    assert number(shown.removesuffix(" %")) == 0
    assert shown[0] == "0"


def test_hover_shows_the_digits_of_float32(shared_page: Browser) -> None:
    assert value_of(shared_page, "dom", "own.exact(values[0])", 0.12345678912345678) == "0.123457"
    assert value_of(shared_page, "dom", "own.exact(null)") == "NaN"
    cells = shared_page.execute_script(
        "return [...document.querySelectorAll('#explain td.number')]"
        ".map(({title, dataset}) => [title, dataset.value])"
    )
    assert cells
    for title, value in cells:
        assert number(title) == pytest.approx(float(value), rel=1e-5)
        assert len(title.lstrip("\N{MINUS SIGN}0.")) <= len("123456e-10")


@pytest.mark.parametrize(
    ("kind", "question"), [("embedding", f"b={'longword' * 12}"), ("reranker", "a=w4&b=w5&c=w6")]
)
def test_words_are_not_clipped_on_a_narrow_screen(
    browser: Browser, plain_url: str, kind: str, question: str
) -> None:
    metrics = {"width": 330, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    with shown_on(browser, "phone"):
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        page = open_page(
            browser,
            f"{plain_url}/debug?model={kind}#tab=explain&run=1&{question}",
            kind,
            has_gradients=False,
        )
        until(lambda: texts(page, "#explain .chip"))
        outside = page.execute_script(
            "return [...document.querySelectorAll('.chip, textarea')].filter((part) => "
            "part.offsetParent && (part.getBoundingClientRect().right > 330 || "
            "part.scrollWidth > part.clientWidth)).map((part) => part.outerHTML)"
        )
        assert outside == []
        assert page.execute_script("return document.documentElement.scrollWidth") <= 330
        overlapping = page.execute_script(
            "const boxes = [...document.querySelectorAll('.tick small')]"
            ".map((label) => label.getBoundingClientRect());"
            "return boxes.filter((one) => boxes.some((other) => other !== one "
            "&& one.left < other.right && other.left < one.right "
            "&& one.top < other.bottom && other.top < one.bottom))"
        )
        assert overlapping == []


def test_nothing_is_asked_before_the_model_is_known(browser: Browser, plain_url: str) -> None:
    browser.get(f"{plain_url}/debug?model=unknown")
    until(lambda: find(browser, "#unavailable").text)
    assert not find(browser, ".texts").is_displayed()
    assert not find(browser, "#explain").is_displayed()


def test_entries_of_a_sparse_vector_are_offered_with_their_weights(
    browser: Browser, sparse_url: str, sparse_encoder: tuple[SparseEncoder, Artifact]
) -> None:
    page = open_page(browser, f"{sparse_url}/debug#tab=attribute", "sparse")
    type_text(page, "a", "w7 w9")
    expected = sparse_encoder[0].encode(["w7 w9"], convert_to_sparse_tensor=False)[0]
    until(partial(shows, page, "#vocabulary", f"{expected.max():.2f}"))
    entries = [entry.rsplit(" ", 1) for entry in texts(page, "#vocabulary button")]
    assert len(entries) == 10
    ids = sparse_encoder[0].tokenizer.convert_tokens_to_ids([token for token, _ in entries])
    weights = [number(weight) for _, weight in entries]
    assert weights == pytest.approx(expected[ids].tolist(), abs=0.006)
    assert weights == sorted(weights, reverse=True)
    page.find_elements("css selector", "#vocabulary button")[2].click()
    assert find(page, "[name=token]").get_property("value") == entries[2][0]
    assert f"token={entries[2][0]}" in page.current_url


def test_entries_are_those_of_the_text_that_stands_there(browser: Browser, sparse_url: str) -> None:
    page = open_page(browser, f"{sparse_url}/debug#tab=attribute&a=w7", "sparse")
    until(lambda: texts(page, "#vocabulary button"))
    requested = page.execute_async_script("""
        const [text, done] = [document.querySelector("[name=a]"), arguments[0]];
        const [ask, bodies] = [window.fetch, []];
        window.fetch = (path, options) => { bodies.push(options.body); return ask(path, options); };
        for (const value of ["w11", "w7"]) {
          text.value = value;
          text.dispatchEvent(new Event("input"));
        }
        setTimeout(() => { window.fetch = ask; done(bodies); }, 2000);
    """)
    assert not any("w11" in body for body in requested)


def test_entries_are_requested_again_after_a_failed_request(
    browser: Browser, sparse_url: str
) -> None:
    page = open_page(browser, f"{sparse_url}/debug#tab=attribute&a=w7", "sparse")
    until(lambda: texts(page, "#vocabulary button"))
    page.execute_script("""
        window.answered = window.fetch;
        window.fetch = () => Promise.reject(new TypeError());
    """)
    type_text(page, "a", "w11")
    until(lambda: not texts(page, "#vocabulary button"))
    page.execute_script("window.fetch = window.answered")
    find(page, "[name=token]").send_keys("w")
    until(lambda: texts(page, "#vocabulary button"))
