"""The second opinion: gradients beside the explanation by deletion, and pairs of words."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from models.artifact import Artifact
from models.manifest import MANIFEST
from tests.models.checkpoints import edit_json
from tests.service.debug.held_worker import held
from tests.service.page.browsing import (
    CAT,
    FELINE,
    Browser,
    Json,
    cells,
    find,
    number,
    open_details,
    open_page,
    post,
    run,
    second_opinion,
    served,
    show,
    texts,
    type_text,
    until,
)
from tests.service.page.conftest import served as started

# A browser and torch may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

BOTH = "Deletion and integrated gradients"


def scores(page: Browser, name: str) -> dict[str, float]:
    """Return the exact scores of a row of chips by its label, by word."""
    chips = page.find_elements(By.CSS_SELECTOR, f"#explain [aria-label='{name}'] .chip")
    return {
        chip.find_element(By.CSS_SELECTOR, ".word").text: float(
            chip.get_attribute("data-score") or "nan"
        )
        for chip in chips
    }


def opposite(rows: list[list[str]]) -> list[str]:
    """Return the words of a text with opposite signs, of those that matter."""
    largest = max(abs(float(left_out)) for _, _, left_out, *_ in rows)
    return [
        word
        for word, _, left_out, gradient, _ in rows
        if abs(float(left_out)) >= largest / 10 and float(left_out) * float(gradient) < 0
    ]


def test_gradients_of_both_texts_follow_the_first_answer(page: Browser, url: str) -> None:
    shown = second_opinion(page)
    open_details(page)
    rows = cells(page, BOTH)
    explain = {"by": "words", "of": "both"}
    body = {"queries": CAT, "documents": [FELINE], "explain": explain}
    explained = served(url, "score", **body)["explanations"][0]["texts"]
    all_opposite, verdicts = [], []
    for text, other, name, own in (
        (CAT, FELINE, "Text A", explained[0]),
        (FELINE, CAT, "Text B", explained[1]),
    ):
        target = {"type": "cosine", "text": other}
        attributed = post(url, "attribute", text=text, target=target, faithfulness="words")
        measured = attributed["faithfulness"]
        verdicts.append(not measured["opposite_signs"] and measured["rank_correlation"] >= 0.7)
        order = f"{measured['rank_correlation']:.2f}".replace("-", "\N{MINUS SIGN}")
        assert f"rank correlation with deletion is {order}" in shown
        gradients = {(w["start"], w["end"]): w["score"] for w in attributed["words"]}
        mine = [row for row in rows if row[1] == name]
        for row, unit in zip(mine, own["units"], strict=True):
            assert float(row[2]) == pytest.approx(unit["left_out"], abs=2e-5)
            score = gradients[unit["start"], unit["end"]]
            assert float(row[3]) == pytest.approx(score, abs=1e-5)
        all_opposite += opposite(mine)
        marked = [row[0] for row in mine if row[4] == "opposite"]
        assert marked == opposite(mine)
    chips = texts(page, ".second .chip.opposite .word")
    assert chips == all_opposite
    if all_opposite:
        assert f"Opposite signs: “{all_opposite[0]}” (left out " in shown
    else:
        assert "No word that matters has the opposite sign." in shown
    state = "good" if all(verdicts) and not all_opposite else "bad"
    assert "Agrees with deletion" in "".join(texts(page, f"#explain .lamps .{state}"))


def test_gradients_of_a_reranker_and_a_classifier_are_of_the_explained_number(
    browser: Browser, reranker_url: str, classifier_url: str
) -> None:
    query, document, versus = "w7 w9", "w21 w5 w33", "w8 w51"
    page = open_page(browser, f"{reranker_url}/debug#tab=explain&run=1", "reranker")
    for name, text in zip("abc", [query, document, versus], strict=True):
        type_text(page, name, text)
    run(page, "explain")
    second_opinion(page)
    open_details(page)
    target = {"type": "score", "versus": versus}
    body = {"text": query, "text_pair": document, "target": target}
    words = [
        word
        for of, indices in (("text", (0,)), ("text_pair", (1, 2)))
        for word in post(reranker_url, "attribute", **body, of=of)["words"]
        if word["text"] in indices
    ]
    # The query is read with each of both documents.
    expected = [
        sum(
            word["score"]
            for word in words
            if word["text"] == index and text[word["start"] : word["end"]] == unit
        )
        for index, text in enumerate((query, document, versus))
        for unit in text.split()
    ]
    rows = cells(page, BOTH)
    assert [float(row[3]) for row in rows] == pytest.approx(expected, abs=1e-5)
    text = "w5 w6 w7"
    page = open_page(browser, f"{classifier_url}/debug#tab=explain&run=1", "classifier")
    type_text(page, "a", text)
    run(page, "explain")
    second_opinion(page)
    open_details(page)
    ((best, other, *_),) = served(classifier_url, "classify", inputs=[text])["labels"]
    target = {"type": "label", "label": best["label"], "versus": other["label"]}
    result = post(classifier_url, "attribute", text=text, target=target)
    rows = cells(page, BOTH)
    expected = [word["score"] for word in result["words"]]
    assert [float(row[3]) for row in rows] == pytest.approx(expected, abs=1e-5)


def test_similarity_of_a_model_with_prompts_has_gradients_with_these_prompts(
    browser: Browser, small_artifact: Artifact, hold: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "prompted"
    shutil.copytree(small_artifact.path, copied)
    edit_json(copied / MANIFEST, prompts={"query": "find: ", "document": "it says: "})
    for url in started(Artifact.load(copied), hold):
        page = open_page(browser, f"{url}/debug#tab=explain&run=1")
        second_opinion(page)
        open_details(page)
        text = {"text": CAT, "prompt_name": "query"}
        target = {"type": "cosine", "text": {"text": FELINE, "prompt_name": "document"}}
        result = post(url, "attribute", text=text, target=target)
        (score,) = served(url, "score", queries=CAT, documents=[FELINE])["scores"]
        assert result["value"] == pytest.approx(score, abs=1e-5)
        rows = [row for row in cells(page, BOTH) if row[1] == "Text A"]
        expected = [word["score"] for word in result["words"]]
        assert [float(row[3]) for row in rows] == pytest.approx(expected, abs=1e-5)


def test_multi_vector_model_has_the_alignment_of_its_tokens(
    browser: Browser, multi_url: str
) -> None:
    page = open_page(browser, f"{multi_url}/debug#tab=explain", "multi")
    query, document = "Where did it sit?", "The cat sat."
    type_text(page, "a", query)
    type_text(page, "b", document)
    run(page, "explain")
    second_opinion(page)
    assert len(cells(page, "Document: MaxSim")) > len(query.split())


def test_sparse_encoder_has_no_gradients_of_its_scores(browser: Browser, sparse_url: str) -> None:
    page = open_page(browser, f"{sparse_url}/debug#tab=explain&run=1", "sparse")
    assert not second_opinion(page)
    assert not find(page, "#second-options").is_displayed()
    show(page, "attribute")
    assert find(page, "[name=token]").is_displayed()


def test_first_answer_does_not_wait_for_gradients(page: Browser, hold: Path) -> None:
    second_opinion(page)
    with held(hold):
        type_text(page, "a", "A cat sat.")
        run(page, "explain")
        assert find(page, ".figure strong").is_displayed()
        assert "cat" in scores(page, "Effects in text A")
        assert find(page, ".second").get_attribute("aria-busy") == "true"
        # The next question does not wait either.
        type_text(page, "a", "A dog sat.")
        run(page, "explain")
        assert "dog" in scores(page, "Effects in text A")
        until(lambda: find(page, "#explain .progress").is_displayed())
        elapsed = find(page, "#explain .elapsed").text
        assert re.match(r"\d+\.\d s: contribution of each pair of words \(1 of 3\), about", elapsed)
    second_opinion(page)
    assert "dog" in scores(page, "Integrated gradients of text A")
    assert not find(page, "#explain .progress").is_displayed()
    assert not find(page, "#explain > .problem").text


def test_cancelled_second_opinion_leaves_the_first_answer(page: Browser, hold: Path) -> None:
    second_opinion(page)
    with held(hold):
        type_text(page, "a", "A cat sat.")
        run(page, "explain")
        find(page, "#explain .cancel").click()
        assert second_opinion(page).endswith("They were not computed.")
    assert "cat" in scores(page, "Effects in text A")
    assert not find(page, "#explain .cancel").is_displayed()


def test_model_without_source_is_explained_without_gradients(
    browser: Browser, small_artifact: Artifact, hold: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "artifact"
    shutil.copytree(small_artifact.path, copied)
    shutil.rmtree(copied / "source")
    files = {k: v for k, v in small_artifact.manifest.files.items() if not k.startswith("source/")}
    edit_json(copied / MANIFEST, files=files)
    for url in started(Artifact.load(copied), hold):
        page = open_page(browser, f"{url}/debug#tab=explain&run=1", has_gradients=False)
        assert "cat" in scores(page, "Effects in text A")
        assert second_opinion(page).startswith("Second opinion\nGradients are not available: ")
        assert [tab for tab in texts(page, "[role=tab]") if tab] == [
            "Rank",
            "Explain",
            "Questions",
            "Compare models",
        ]
        assert not find(page, "#entries").is_displayed()
        assert not find(page, "#second-options").is_displayed()


def test_problem_of_a_gradient_job_is_said_in_its_place(page: Browser) -> None:
    type_text(page, "b", "A cat sat on it. " * 100)
    run(page, "explain")
    shown = second_opinion(page)
    assert "The second opinion could not be computed: " in shown
    assert find(page, ".figure strong").is_displayed()
    assert not find(page, "#explain > .problem").text


@pytest.mark.parametrize(
    ("order", "share", "verdict"),
    [
        (0.9, 0.0, "they agree with deletion"),
        (0.9, 0.2, "they do not agree with deletion"),
        (0.3, 0.0, "they do not agree with deletion"),
        (-0.9, 0.0, "they do not agree with deletion"),
        (None, None, None),
    ],
)
def test_verdict_is_by_rank_correlation_and_opposite_signs(
    shared_page: Browser, order: float | None, share: float | None, verdict: str | None
) -> None:
    zeros = {"comprehensiveness": 0.2, "sufficiency": 0.2}
    measured: Json = {"units": "words", "points": [], **zeros, "random": zeros}
    measured |= {"rank_correlation": order, "opposite_signs": share}
    marks = shared_page.execute_script(
        "return import('./debug/assets/faithfulness.js').then(({faithfulness}) => "
        "[...faithfulness({faithfulness: arguments[0]})[0].querySelectorAll(':scope > p .mark')]"
        ".map(({textContent}) => textContent))",
        measured,
    )
    assert marks == ([verdict] if verdict else [])


@pytest.mark.parametrize(
    ("activation", "other", "versus"),
    [
        ("softmax", "spam", "spam"),
        ("softmax", "toxic", None),
        ("sigmoid", "spam", None),
        ("identity", "spam", None),
    ],
)
def test_labels_of_a_softmax_alone_are_explained_against_the_next_one(
    shared_page: Browser, activation: str, other: str, versus: str | None
) -> None:
    """Sigmoids of independent labels can add up to 1 too, and two labels can have one name."""
    labels = [{"label": "toxic", "score": 0.9998}, {"label": other, "score": 0.0002}]
    result = {"labels": [labels], "explanations": [{"label": "toxic"}]}
    model = {
        "kind": "classifier",
        "info": {"activation": activation},
        "gradients": {"targets": ["label"], "routes": [], "baselines": ["pad"]},
    }
    (target,) = shared_page.execute_script(
        "return import('./debug/assets/second.js').then(({secondRequests}) => "
        "secondRequests({a: 'text', b: '', c: ''}, arguments[0], [arguments[1]])"
        ".map(({body}) => body.target))",
        model,
        {"key": "deletion", "result": result},
    )
    assert target == {"type": "label", "label": "toxic", "versus": versus}


@pytest.mark.parametrize(
    ("removed", "alone", "verdict"),
    [
        (0.4, 0.1, "matter more than random ones, in both tests"),
        (0.4, 0.3, "matter more than random ones in one test of two"),
        (0.1, 0.1, "matter more than random ones in one test of two"),
        (0.1, 0.3, "matter no more than random ones"),
        (None, 0.3, "could not be compared with random ones"),
        (0.4, None, "could not be compared with random ones"),
    ],
)
def test_faithfulness_is_judged_by_random_words(
    page: Browser, removed: float | None, alone: float | None, verdict: str
) -> None:
    measured: Json = {
        "units": "words",
        "points": [],
        "comprehensiveness": removed,
        "sufficiency": alone,
        "random": {"comprehensiveness": 0.2, "sufficiency": 0.2},
    }
    sentence = page.execute_script(
        "return import('./debug/assets/faithfulness.js').then(({faithfulness}) => "
        "faithfulness({faithfulness: arguments[0]})[0].textContent)",
        measured,
    )
    assert verdict in sentence


def test_pairs_of_words_have_the_contributions_of_the_route(page: Browser, url: str) -> None:
    second_opinion(page)
    result = post(url, "attribute/pair", a=CAT, b=FELINE)
    matrix = np.array(result["matrix"])
    shown = scores(page, "Words of text A")
    for unit in result["words_a"]:
        expected = matrix[unit["tokens"]].sum()
        assert shown[CAT[unit["start"] : unit["end"]]] == pytest.approx(expected, abs=1e-6)


def test_colours_of_many_pairs_have_the_scale_of_the_largest(page: Browser) -> None:
    """A pair of texts of 510 words, as many as models with 512 positions read."""
    values = np.random.default_rng(0).normal(size=510 * 510)
    largest = page.execute_script(
        "return import('./debug/assets/tokens.js').then(({largest}) => largest(arguments[0]))",
        values.tolist(),
    )
    assert largest == np.abs(values).max()


def test_ranked_pairs_are_sorted_by_a_click_on_a_heading(page: Browser, url: str) -> None:
    second_opinion(page)
    rows = cells(page, "Top 12 of")
    values = [float(row[-2]) for row in rows]
    assert values == sorted(values, reverse=True)
    pair = post(url, "attribute/pair", a=CAT, b=FELINE)
    words = [
        [word for word in pair[f"words_{name}"] if text[word["start"]].isalpha()]
        for name, text in (("a", CAT), ("b", FELINE))
    ]
    matrix = np.array(pair["matrix"])
    sums = [matrix[np.ix_(a["tokens"], b["tokens"])].sum() for a in words[0] for b in words[1]]
    assert values[0] == pytest.approx(max(sums), abs=1e-6)
    # What the list leaves out is named, so that all adds up to the similarity.
    figures = [number(text.split(",")[0]) for text in texts(page, "#explain .pairs .facts dd")]
    assert sum(values) + sum(figures) == pytest.approx(matrix.sum(), abs=1e-3)
    heading = page.find_element(By.XPATH, "//button[text()='Contribution']")
    for order in ("descending", "ascending"):
        heading.click()
        assert heading.find_element(By.XPATH, "..").get_attribute("aria-sort") == order
        sorted_values = [float(row[-2]) for row in cells(page, "Top 12 of")]
        assert sorted_values == sorted(values, reverse=order == "descending")


def test_focused_word_shows_its_partners_in_the_other_text(page: Browser, url: str) -> None:
    second_opinion(page)
    result = post(url, "attribute/pair", a=CAT, b=FELINE)
    row = next(i for i, t in enumerate(result["tokens_a"]) if t["token"] == CAT[4:7])
    open_details(page)
    first = find(page, "[aria-label='Words of text A'] .chip")
    page.execute_script("arguments[0].focus()", first)
    for _ in range(row):
        page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert page.switch_to.active_element.find_element(By.CSS_SELECTOR, ".word").text == "cat"
    partners = scores(page, "Words of text B")
    (word,) = (w for w in result["words_b"] if FELINE[w["start"] : w["end"]] == "rug")
    expected = sum(result["matrix"][row][token] for token in word["tokens"])
    assert partners["rug"] == pytest.approx(expected, abs=1e-7)
    lit = texts(page, ".heatmap .lit")
    assert lit == ["cat"]
    assert "“cat” goes best with “" in find(page, "#explain .result").text
    # A row of words is one tab stop.
    stops = page.find_elements(By.CSS_SELECTOR, "#explain .chips .chip[tabindex='0']")
    assert len(stops) == len(page.find_elements(By.CSS_SELECTOR, "#explain .chips"))
    page.switch_to.active_element.send_keys(Keys.END)
    assert page.switch_to.active_element.text.startswith("[SEP]")
    readout = find(page, "[aria-label='Words of text A'] + .readout").text
    shown = number(readout.rsplit(" ", 1)[1])
    assert shown == pytest.approx(scores(page, "Words of text A")["[SEP]"], rel=1e-5)


def test_dot_products_are_explained_by_pairs_and_words(
    browser: Browser, url_of_similarities: str
) -> None:
    url = url_of_similarities
    page = open_page(browser, f"{url}/debug?model=dot#tab=explain&run=1")
    second_opinion(page)
    (score,) = served(url, "score", model="dot", queries=CAT, documents=[FELINE])["scores"]
    (own,) = served(url, "score", model="dot", queries=CAT, documents=[CAT])["scores"]
    assert number(find(page, ".figure strong").text) == pytest.approx(score, rel=1e-3)
    assert find(page, ".figure").text.endswith("dot product")
    assert f"and of {own:.2f} with itself" in find(page, ".reading").text
    pair = post(url, "attribute/pair", model="dot", a=CAT, b=FELINE)
    assert pair["similarity"] == pytest.approx(score, rel=1e-5)
    assert texts(page, "#explain .pairs th")[-1] == "Of the dot product"


def test_distances_are_explained_by_words_alone(browser: Browser, url_of_similarities: str) -> None:
    url = url_of_similarities
    page = open_page(browser, f"{url}/debug?model=euclidean#tab=explain&run=1")
    second_opinion(page)
    body = {"model": "euclidean", "inputs": [CAT, FELINE]}
    a, b = map(np.array, served(url, "encode", **body)["embeddings"])
    distance = -np.linalg.norm(a - b)
    assert number(find(page, ".figure strong").text) == pytest.approx(distance, rel=1e-3)
    assert find(page, ".figure").text.endswith("negative Euclidean distance")
    assert "and of 0.00 with itself" in find(page, ".reading").text
    assert scores(page, "Integrated gradients of text A").keys() >= {"cat", "mat"}
    assert not page.find_elements(By.CSS_SELECTOR, "#explain .pairs")
    options = page.find_elements(By.CSS_SELECTOR, "[name=target] option")
    values = [option.get_attribute("value") for option in options]
    assert values == ["similarity", "margin", "dot", "dim", "norm"]
