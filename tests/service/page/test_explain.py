"""The first view: explanations of a result, and counterfactuals."""

import json
import re
from pathlib import Path

import httpx2
import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from models.artifact import Artifact
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
    show,
    texts,
    type_text,
    until,
)

# A browser and torch may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def served(url: str, path: str, **body: object) -> Json:
    result: Json = httpx2.post(f"{url}/{path}", json=body, timeout=240).json()
    return result


def cosine(url: str, *inputs: str) -> float:
    a, b = map(np.array, served(url, "encode", inputs=inputs)["embeddings"])
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def scores(page: Browser, name: str) -> dict[str, float]:
    """Return the exact scores of a row of chips by its label, by word."""
    chips = page.find_elements(By.CSS_SELECTOR, f"#explain [aria-label='{name}'] .chip")
    return {
        chip.find_element(By.CSS_SELECTOR, ".word").text: float(
            chip.get_attribute("data-score") or "nan"
        )
        for chip in chips
    }


def test_page_explains_the_example_when_it_is_opened(page: Browser, url: str) -> None:
    result = post(url, "attribute/pair", a=CAT, b=FELINE)
    assert number(find(page, ".figure strong").text) == pytest.approx(
        result["similarity"], abs=1e-4
    )
    matrix = np.array(result["matrix"])
    words = {name: result[f"words_{name}"] for name in "ab"}
    summed = [
        [matrix[np.ix_(left["tokens"], right["tokens"])].sum() for right in words["b"]]
        for left in words["a"]
    ]
    spelled = [CAT[word["start"] : word["end"]] for word in words["a"]]
    shown = scores(page, "Words of text A")
    outside = [index for index, token in enumerate(result["tokens_b"]) if token["start"] is None]
    for word, row, unit in zip(spelled, summed, words["a"], strict=True):
        special = matrix[np.ix_(unit["tokens"], outside)].sum()
        assert shown[word] == pytest.approx(sum(row) + special, abs=1e-6)
    # Both texts' integrated gradients follow.
    for text, other, name in ((CAT, FELINE, "A"), (FELINE, CAT, "B")):
        target = {"type": "cosine", "text": other}
        attributed = post(url, "attribute", text=text, target=target, faithfulness="words")
        found = scores(page, f"Scores of Text {name}")
        for word in attributed["words"]:
            shown_score = found[text[word["start"] : word["end"]]]
            assert shown_score == pytest.approx(word["score"], abs=1e-5)
        assert f"Faithfulness of text {name}" in find(page, "#explain .result").text
        best = sorted(attributed["words"], key=lambda word: -word["score"])
        raising = [
            text[word["start"] : word["end"]]
            for word in best
            if text[word["start"]].isalpha() and word["score"] > 0
        ][:2]
        quoted = " and ".join(
            f"\N{LEFT DOUBLE QUOTATION MARK}{w}\N{RIGHT DOUBLE QUOTATION MARK}" for w in raising
        )
        assert not raising or f"{quoted} of text {name}" in find(page, ".reading").text


def test_reading_compares_with_unrelated_texts(page: Browser, url: str) -> None:
    reading = find(page, ".reading").text
    unrelated = re.search(
        r"text A has a cosine of (\S+) with 5 unrelated texts on average", reading
    )
    assert unrelated
    source = Path("service/debug/page/reading.js").read_text()
    sentences = re.findall(r'^  "(.+)",$', source.partition("UNRELATED = [")[2], re.MULTILINE)[:5]
    mean = np.mean([cosine(url, CAT, sentence) for sentence in sentences])
    assert number(unrelated[1]) == pytest.approx(mean, abs=0.006)


def test_ranked_pairs_are_sorted_by_a_click_on_a_heading(page: Browser, url: str) -> None:
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
    assert float(readout.rsplit(" ", 1)[1]) == scores(page, "Words of text A")["[SEP]"]


def test_struck_word_moves_the_similarity_of_the_served_model(page: Browser, url: str) -> None:
    target = {"type": "cosine", "text": FELINE}
    words = post(url, "attribute", text=CAT, target=target)["words"]
    (score,) = (w["score"] for w in words if CAT[w["start"] : w["end"]] == "cat")
    page.find_element(By.XPATH, "//*[@role='toolbar']/button[text()='cat']").click()
    assert find(page, "[name=edited-a]").get_property("value") == "The sat on the mat."
    until(lambda: texts(page, "#whatif td"))
    ((_, before, after, difference),) = cells(page, "Result of the served model")
    expected = cosine(url, CAT, FELINE), cosine(url, "The sat on the mat.", FELINE)
    assert [float(before), float(after)] == pytest.approx(expected, abs=1e-5)
    assert float(difference) == pytest.approx(expected[1] - expected[0], abs=2e-5)
    predicted = re.search(r"add up to (\S+):", find(page, "#whatif").text)
    assert predicted
    assert number(predicted[1]) == pytest.approx(score, rel=0.06)
    address = page.current_url
    find(page, "#whatif .undo").click()
    until(lambda: "Nothing is struck out or edited" in find(page, "#whatif").text)
    restored = open_page(page, address)
    until(lambda: texts(restored, "#whatif td"))
    assert texts(restored, ".strike[aria-pressed=true]") == ["cat"]
    assert float(cells(restored, "Result of the served model")[0][2]) == float(after)


@pytest.mark.parametrize("edited", ["A dog ran.", " "])
def test_edited_text_moves_the_similarity(page: Browser, url: str, edited: str) -> None:
    type_text(page, "edited-b", edited)
    until(lambda: texts(page, "#whatif td"))
    until(
        lambda: (
            float(cells(page, "Result of the served model")[0][2])
            == pytest.approx(cosine(url, CAT, edited), abs=1e-5)
        )
    )


def encoded(url: str, model: str, *inputs: str) -> list[np.typing.NDArray[np.float64]]:
    return list(map(np.array, served(url, "encode", model=model, inputs=inputs)["embeddings"]))


def test_dot_products_are_explained_by_pairs_and_words(
    browser: Browser, url_of_similarities: str
) -> None:
    url = url_of_similarities
    page = open_page(browser, f"{url}/debug?model=dot")
    a, b, edited = encoded(url, "dot", CAT, FELINE, "The sat on the mat.")
    until(lambda: "The words that carry most of it" in find(page, ".reading").text)
    assert number(find(page, ".figure strong").text) == pytest.approx(a @ b, rel=1e-3)
    assert find(page, ".figure").text.endswith("dot product")
    assert f"and of {a @ a:.2f} with itself" in find(page, ".reading").text
    pair = post(url, "attribute/pair", model="dot", a=CAT, b=FELINE)
    assert pair["similarity"] == pytest.approx(a @ b, rel=1e-5)
    assert texts(page, "#explain .pairs th")[-1] == "Of the dot product"
    page.find_element(By.XPATH, "//*[@role='toolbar']/button[text()='cat']").click()
    until(lambda: texts(page, "#whatif td"))
    ((name, before, after, _),) = cells(page, "Result of the served model")
    assert name == "dot product"
    assert [float(before), float(after)] == pytest.approx([a @ b, edited @ b], rel=1e-4)


def test_distances_are_explained_by_words_alone(browser: Browser, url_of_similarities: str) -> None:
    url = url_of_similarities
    page = open_page(browser, f"{url}/debug?model=euclidean")
    a, b = encoded(url, "euclidean", CAT, FELINE)
    until(lambda: find(page, ".figure strong").text)
    distance = -np.linalg.norm(a - b)
    assert number(find(page, ".figure strong").text) == pytest.approx(distance, rel=1e-3)
    assert find(page, ".figure").text.endswith("negative Euclidean distance")
    assert "and of 0.00 with itself" in find(page, ".reading").text
    assert scores(page, "Scores of Text A").keys() >= {"cat", "mat"}
    assert not page.find_elements(By.CSS_SELECTOR, "#explain .pairs")
    options = page.find_elements(By.CSS_SELECTOR, "[name=target] option")
    values = [option.get_attribute("value") for option in options]
    assert values == ["similarity", "margin", "dot", "dim", "norm"]


def test_reranker_explains_score_and_rank(browser: Browser, reranker_url: str) -> None:
    page = open_page(browser, f"{reranker_url}/debug", "reranker")
    query, documents = "w7 w9", ["w21 w5 w33", "w8 w51"]
    for name, text in zip("abc", [query, *documents], strict=True):
        type_text(page, name, text)
    shown = run(page, "explain")
    scored = served(reranker_url, "score", queries=query, documents=documents, raw_scores=True)[
        "scores"
    ]
    assert number(find(page, ".figure strong").text) == pytest.approx(scored[0], abs=1e-3)
    place = "above" if scored[0] >= scored[1] else "below"
    assert f"The document ranks {place} the other one" in shown
    target = {"type": "score", "versus": documents[1]}
    result = post(reranker_url, "attribute", text=query, text_pair=documents[0], target=target)
    found = scores(page, "Scores of Document")
    for word in (w for w in result["words"] if w["text"] == 1):
        spelled = documents[0][word["start"] : word["end"]]
        assert found[spelled] == pytest.approx(word["score"], abs=1e-5)
    page.find_element(By.XPATH, "//*[@role='toolbar']/button[text()='w5']").click()
    until(lambda: texts(page, "#whatif td"))
    rows = {row[0]: row[1:] for row in cells(page, "Result of the served model")}
    after = served(reranker_url, "score", queries=query, documents=["w21 w33"], raw_scores=True)[
        "scores"
    ]
    assert float(rows["score (logit)"][1]) == pytest.approx(after[0], abs=1e-4)
    assert rows["rank of the document"][0] == ("1st of 2" if place == "above" else "2nd of 2")


def test_classifier_explains_the_predicted_label(browser: Browser, classifier_url: str) -> None:
    page = open_page(browser, f"{classifier_url}/debug#tab=explain", "classifier")
    type_text(page, "a", "w5 w6 w7")
    run(page, "explain")
    ((best, *_),) = served(classifier_url, "classify", inputs=["w5 w6 w7"])["labels"]
    assert find(page, ".figure strong").text == best["label"]
    result = post(classifier_url, "attribute", text="w5 w6 w7", target={"type": "label"})
    found = scores(page, "Scores of First text")
    for word in result["words"]:
        assert found["w5 w6 w7"[word["start"] : word["end"]]] == pytest.approx(
            word["score"], abs=1e-5
        )
    type_text(page, "edited-a", "w5 w6")
    until(lambda: texts(page, "#whatif td"))
    (after,) = served(classifier_url, "classify", inputs=["w5 w6"])["labels"]
    rows = {row[0]: row[1:] for row in cells(page, "Result of the served model")}
    assert rows["predicted label"][1] == after[0]["label"]
    for label in after:
        value = float(rows[f"probability of {label['label']}"][1])
        assert value == pytest.approx(label["score"], abs=1e-5)


def test_multi_vector_model_explains_maxsim(browser: Browser, multi_url: str) -> None:
    page = open_page(browser, f"{multi_url}/debug#tab=explain", "multi")
    query, document = "Where did it sit?", "The cat sat."
    type_text(page, "a", query)
    type_text(page, "b", document)
    run(page, "explain")
    (score,) = served(multi_url, "score", queries=query, documents=[document])["scores"]
    assert number(find(page, ".figure strong").text) == pytest.approx(score, abs=1e-3)
    assert len(cells(page, "Document: MaxSim")) > len(query.split())


def test_sparse_encoder_explains_the_weight_of_an_entry(
    browser: Browser, sparse_url: str, sparse_encoder: tuple[object, Artifact]
) -> None:
    page = open_page(browser, f"{sparse_url}/debug#tab=explain", "sparse")
    type_text(page, "a", "w5 w6 w7")
    type_text(page, "token", "w5")
    shown = run(page, "explain")
    target = {"type": "sparse", "token": "w5"}
    result = post(sparse_url, "attribute", text="w5 w6 w7", target=target)
    assert number(find(page, ".figure strong").text) == pytest.approx(result["value"], abs=1e-3)
    assert ("is active" if result["value"] > 0 else "not active") in shown
    type_text(page, "edited-a", "w6 w7")
    until(lambda: texts(page, "#whatif td"))
    ids = json.loads((sparse_encoder[1].path / "tokenizer.json").read_text())["model"]["vocab"]
    ((vector),) = served(sparse_url, "encode", inputs=["w6 w7"], output="sparse")["embeddings"]
    weights = dict(zip(vector["ids"], vector["weights"], strict=True))
    after = float(cells(page, "Result of the served model")[0][2])
    assert after == pytest.approx(weights.get(ids["w5"], 0.0), abs=1e-4)


@pytest.mark.parametrize(
    ("removed", "alone", "verdict"),
    [
        (0.4, 0.1, "matter more than random ones, in both tests"),
        (0.4, 0.3, "matter more than random ones in one test of two"),
        (0.1, 0.1, "matter more than random ones in one test of two"),
        (0.1, 0.3, "matter no more than random ones"),
    ],
)
def test_faithfulness_is_judged_by_random_words(
    page: Browser, removed: float, alone: float, verdict: str
) -> None:
    measured = {
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


def test_first_picture_is_drawn_before_the_integrals(page: Browser, hold: Path) -> None:
    """The cheap requests come first, and their results are shown while others run."""
    requested = page.execute_script(
        "return import('./debug/assets/questions.js').then((questions) => "
        "questions.explainRequests({a: 'x', b: 'y'}, {kind: 'embedding', similarity: 'cosine', "
        "routes: ['attribute/pair']}).map(({path}) => path))"
    )
    assert requested[0] == "debug/attribute/pair"
    with held(hold):
        show(page, "explain")
        find(page, "#explain .go").click()
        until(lambda: find(page, "#explain .progress").is_displayed())
        assert re.match(
            r"\d+\.\d s: pairs of words \(1 of 4\), about \d+ %", find(page, ".elapsed").text
        )
    until(lambda: find(page, "#explain").get_attribute("aria-busy") == "false")
    assert not find(page, "#explain .progress").is_displayed()
