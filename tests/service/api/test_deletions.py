"""Explanations by deletion over HTTP: every number can be had from two requests to `/score`."""

from typing import Any

import pytest
from starlette.testclient import TestClient

import vitrine
from tests.service.api.posting import ask, post, refused, stages
from tests.serving import values_of

pytestmark = pytest.mark.slow

KINDS = ["client", "rerank_client", "sparse_client", "multi_client"]
QUERY, DOCUMENT = "w5 w9 cat", "w9 w40. w5 w6 sat."


@pytest.fixture(params=KINDS)
def any_client(request: pytest.FixtureRequest) -> TestClient:
    """A client of a model of each kind that scores pairs."""
    client: TestClient = request.getfixturevalue(request.param)
    return client


@pytest.mark.parametrize("raw", [False, True])
def test_left_out_and_alone_are_differences_of_two_scores(
    any_client: TestClient, raw: bool
) -> None:
    def score(document: str) -> float:
        body = {"queries": QUERY, "documents": document, "raw_scores": raw}
        return float(ask(any_client, "/score", **body)["scores"][0])

    response = ask(
        any_client,
        "/score",
        queries=QUERY,
        documents=DOCUMENT,
        raw_scores=raw,
        explain={},
    )
    (explanation,) = response["explanations"]
    assert explanation["method"] == "deletion"
    assert response["explanation_tokens"] > 0
    (text,) = explanation["texts"]
    assert (text["side"], text["by"]) == ("document", "words")
    assert (text["start"], text["end"]) == (0, len(DOCUMENT))
    assert text["whole"] == response["scores"][0]
    assert text["empty"] == pytest.approx(score(""), abs=1e-5)
    units = text["units"]
    words = ["w9", "w40", ".", "w5", "w6", "sat", "."]
    assert [DOCUMENT[unit["start"] : unit["end"]] for unit in units] == words
    without = ["w40. w5 w6 sat.", "w9 . w5 w6 sat.", "w9 w40 w5 w6 sat.", "w9 w40. w6 sat."]
    for unit, word, variant in zip(units, words, without, strict=False):
        assert unit["left_out"] == pytest.approx(score(DOCUMENT) - score(variant), abs=2e-5)
        assert unit["alone"] == pytest.approx(score(word) - score(""), abs=2e-5)
    assert sorted(unit["rank"] for unit in units) == [*range(1, 8)]


@pytest.mark.parametrize("side", ["query", "document"])
@pytest.mark.parametrize("method", ["deletion", "shapley"])
def test_variants_have_the_part_of_the_other_text_that_the_model_reads(
    any_client: TestClient, side: str, method: str
) -> None:
    texts = {"query": "w5 w9 cat", "document": "w9 w40. w5"}
    (other,) = texts.keys() - {side}
    texts[other] = " ".join(f"w{index % 50} unbelievable." for index in range(400))

    def score(texts: dict[str, str]) -> float:
        body = {"queries": texts["query"], "documents": texts["document"]}
        return float(ask(any_client, "/score", **body)["scores"][0])

    response = ask(
        any_client,
        "/score",
        queries=texts["query"],
        documents=texts["document"],
        explain={"by": "words", "of": side, "method": method},
    )
    (explanation,) = response["explanations"]
    (text,) = explanation["texts"]
    part = explanation["other"]
    assert (text["side"], part["side"]) == (side, other)
    assert 0 == part["start"] < part["end"] < len(texts[other]) / 2
    texts[other] = texts[other][: part["end"]]
    assert text["whole"] == pytest.approx(score(texts), abs=5e-5)
    # Without the units of the one text, more tokens of the whole other one would fit.
    assert text["empty"] == pytest.approx(score({**texts, side: ""}), abs=5e-5)


def test_without_another_text_there_is_no_part_of_it(
    client: TestClient, classify_client: TestClient
) -> None:
    body = {"queries": QUERY, "documents": DOCUMENT, "explain": {"of": "both"}}
    assert "other" not in ask(client, "/score", **body)["explanations"][0]
    response = ask(classify_client, "/classify", inputs=[["w5", "w9 w5"], "w5"], explain=True)
    assert all("other" not in explanation for explanation in response["explanations"])


@pytest.mark.parametrize("method", ["deletion", "shapley"])
def test_parts_that_the_vocabulary_lacks_are_named(
    any_client: TestClient, classify_client: TestClient, method: str
) -> None:
    explain = {"by": "words", "method": method}
    body = {"queries": "w5 \N{SAUROPOD}", "documents": ["\N{SAUROPOD} w6", "w6 w7"]}
    first, second = ask(any_client, "/score", **body, explain=explain)["explanations"]
    assert first["texts"][0]["unknown"] == [{"start": 0, "end": 1}]
    assert first["other"]["unknown"] == [{"start": 3, "end": 4}]
    assert "unknown" not in second["texts"][0]
    inputs = [["w5 w6", "w7 \N{SAUROPOD}"]]
    (labels,) = ask(classify_client, "/classify", inputs=inputs, explain=explain)["explanations"]
    assert "unknown" not in labels["texts"][0]
    assert labels["texts"][1]["unknown"] == [{"start": 3, "end": 4}]


def test_rerank_explains_the_best_three(any_client: TestClient) -> None:
    documents = ["w9", "w40 w5", "w5 w6", "w9 w5", "sat"]
    body = {"query": QUERY, "documents": documents}
    explain = {"by": "sentences", "of": "both"}
    response = ask(any_client, "/rerank", **body, explain=explain)
    assert response["explanation_tokens"] > 0
    results = response["results"]
    plain = ask(any_client, "/rerank", **body)["results"]
    assert [result["index"] for result in results] == [result["index"] for result in plain]
    explained = [result["explanation"] is not None for result in results]
    assert explained == [True, True, True, False, False]
    texts = results[0]["explanation"]["texts"]
    assert [text["side"] for text in texts] == ["query", "document"]
    own = documents[results[0]["index"]]
    assert [(unit["start"], unit["end"]) for unit in texts[1]["units"]] == [(0, len(own))]
    # A text of one unit is empty without it, so that both numbers are the same.
    (unit,) = texts[1]["units"]
    assert unit["left_out"] == pytest.approx(unit["alone"], abs=2e-5)


def test_score_explains_as_many_documents_as_requested(client: TestClient) -> None:
    body = {"queries": QUERY, "documents": ["w9", DOCUMENT, "sat"], "explain": {"top_n": 1}}
    response = ask(client, "/score", **body)
    best = max(range(3), key=lambda index: response["scores"][index])
    explained = [index for index in range(3) if response["explanations"][index] is not None]
    assert explained == [best]


@pytest.mark.parametrize(
    ("explain", "pointer", "detail"),
    [
        ("words", "/explain", "Input should be true, false, or an object"),
        (1, "/explain", "Input should be true, false, or an object"),
        (
            {"by": "tokens"},
            "/explain/by",
            "Input should be 'words', 'sentences', 'chunks' or 'auto'",
        ),
        ({"of": "text"}, "/explain/of", "Input should be 'document', 'query' or 'both'"),
        ({"top_n": 0}, "/explain/top_n", "greater than or equal to 1"),
        ({"max_tokens": 20_001}, "/explain/max_tokens", "less than or equal to 20000"),
        ({"unit": "words"}, "/explain", "unknown field in this object"),
        ({"max_tokens": 5}, "/explain", "takes more than 5 tokens"),
    ],
)
def test_invalid_explanations_are_refused_by_name(
    client: TestClient, explain: object, pointer: str, detail: str
) -> None:
    body = {"queries": QUERY, "documents": [DOCUMENT], "explain": explain}
    problem = refused(client, "/score", **body)
    assert (problem["status"], problem["pointer"]) == (422, pointer)
    assert detail in problem["detail"]


def test_labels_are_explained_by_the_texts_without_each_unit(classify_client: TestClient) -> None:
    def best(*texts: str) -> dict[str, float]:
        inputs = [texts[0] if len(texts) == 1 else list(texts)]
        (labels,) = ask(classify_client, "/classify", inputs=inputs)["labels"]
        return {label["label"]: label["score"] for label in labels}

    body = {"inputs": [DOCUMENT, ["cat", "w5 w6"]]}
    response = ask(classify_client, "/classify", **body, explain={})
    plain = ask(classify_client, "/classify", **body)
    assert list(plain) == ["model", "labels", "tokens", "truncated"]
    assert response["tokens"] == plain["tokens"]
    assert response["explanation_tokens"] > sum(response["tokens"])
    single, pair = response["explanations"]
    assert single["label"] == response["labels"][0][0]["label"]
    (text,) = single["texts"]
    assert text["text"] == 0
    unit = text["units"][0]
    without = best("w40. w5 w6 sat.")[single["label"]]
    assert unit["left_out"] == pytest.approx(text["whole"] - without, abs=2e-5)
    assert [own["text"] for own in pair["texts"]] == [0, 1]
    unit = pair["texts"][1]["units"][1]
    without = best("cat", "w5")[pair["label"]]
    assert unit["left_out"] == pytest.approx(pair["texts"][1]["whole"] - without, abs=2e-5)
    named = ask(classify_client, "/classify", **body, explain={"label": "happy", "by": "auto"})
    assert [own["label"] for own in named["explanations"]] == ["happy", "happy"]


@pytest.mark.parametrize(
    ("explain", "pointer", "detail"),
    [
        ("words", "/explain", "should be"),
        ({"of": "both"}, "/explain", "unknown field in this object"),
        ({"label": "w"}, "/explain/label", "has no such label"),
        ({"max_tokens": 3}, "/explain", "takes more than 3 tokens"),
    ],
)
def test_invalid_explanations_of_labels_are_refused_by_name(
    classify_client: TestClient, explain: object, pointer: str, detail: str
) -> None:
    problem = refused(classify_client, "/classify", inputs="w5", explain=explain)
    assert (problem["status"], problem["pointer"]) == (422, pointer)
    assert detail in problem["detail"]


def test_auto_explains_by_sentences_and_then_by_words(any_client: TestClient) -> None:
    document = "It is w9. It is w40 w5."
    body = {"queries": QUERY, "documents": document, "explain": {"by": "auto", "of": "both"}}
    response = ask(any_client, "/score", **body)
    query, text = response["explanations"][0]["texts"]
    assert (query["by"], text["by"]) == ("words", "sentences")
    assert "words" not in query
    words = ["It", "is", "w9", ".", "It", "is", "w40", "w5", "."]
    assert [document[word["start"] : word["end"]] for word in text["words"]] == words


def test_shapley_values_sum_to_the_score_less_that_of_the_empty_text(
    any_client: TestClient,
) -> None:
    body = {"queries": QUERY, "documents": "w9 w40 sat", "explain": {"method": "shapley"}}
    response = ask(any_client, "/score", **body)
    (explanation,) = response["explanations"]
    assert explanation["method"] == "shapley"
    (text,) = explanation["texts"]
    assert (text["side"], text["by"]) == ("document", "words")
    assert len(text["units"]) == 3
    total = sum(unit["value"] for unit in text["units"])
    assert total == pytest.approx(text["whole"] - text["empty"], abs=1e-6)
    assert {unit["standard_error"] for unit in text["units"]} == {0.0}
    assert response["explanation_tokens"] > 0


def test_shapley_values_of_labels(classify_client: TestClient) -> None:
    body = {"inputs": [["w9 w5", "cat"]], "explain": {"method": "shapley", "label": "sad"}}
    (explanation,) = ask(classify_client, "/classify", **body)["explanations"]
    assert (explanation["method"], explanation["label"]) == ("shapley", "sad")
    assert [text["text"] for text in explanation["texts"]] == [0, 1]


def test_true_is_an_explanation_by_deletion_with_all_defaults(any_client: TestClient) -> None:
    body = {"query": QUERY, "documents": ["w9 w40. A w5.", "w6"]}
    by_default, by_auto = (
        ask(any_client, "/rerank", **body, explain=explain)
        for explain in (True, {"by": "auto", "method": "deletion"})
    )
    assert by_default["explanation_tokens"] == by_auto["explanation_tokens"]
    for own, other in zip(by_default["results"], by_auto["results"], strict=True):
        (text,), (expected,) = (each["explanation"]["texts"] for each in (own, other))
        assert text["by"] == expected["by"]
        for name in ("units", "words"):
            pairs = zip(text.get(name, ()), expected.get(name, ()), strict=True)
            assert all(a["left_out"] == pytest.approx(b["left_out"], abs=2e-5) for a, b in pairs)


@pytest.mark.parametrize("raw", [False, True])
def test_highlights_are_the_best_sentences_of_each_result(
    any_client: TestClient, raw: bool
) -> None:
    documents = ["It is w9. A w5 w9. It sat.", "w6"]
    body = {"query": QUERY, "documents": documents, "raw_scores": raw}
    ranked = ask(any_client, "/rerank", **body, highlight=2)
    explained = ask(any_client, "/rerank", **body, explain={"by": "sentences"})
    assert ranked["explanation_tokens"] > 0
    for own, other in zip(ranked["results"], explained["results"], strict=True):
        assert "explanation" not in own
        (text,) = other["explanation"]["texts"]
        units = {unit["start"]: unit for unit in text["units"]}
        assert len(own["highlights"]) == min(2, len(units))
        for unit in own["highlights"]:
            assert unit["end"] == units[unit["start"]]["end"]
            expected = units[unit["start"]]["left_out"]
            assert unit["left_out"] == pytest.approx(expected, abs=2e-5)
    body = {"queries": QUERY, "documents": documents, "raw_scores": raw}
    scored = ask(any_client, "/score", **body, highlight=2)
    by_index = {own["index"]: own["highlights"] for own in ranked["results"]}
    for index, found in enumerate(scored["highlights"]):
        spans = [
            [(unit["start"], unit["end"]) for unit in each] for each in (found, by_index[index])
        ]
        assert spans[0] == spans[1]


@pytest.mark.parametrize(
    ("fields", "pointer", "detail"),
    [
        ({"highlight": 0}, "/highlight", "greater than or equal to 1"),
        ({"highlight": 11}, "/highlight", "less than or equal to 10"),
        ({"highlight": True}, "/highlight", "integer"),
        ({"highlight": 2, "explain": True}, "/highlight", "excludes explain"),
        ({"highlight": 2, "chunking": {}}, "/highlight", "does not apply to chunks"),
        ({"explain": {"method": "terms", "by": "words"}}, "/explain", "unknown field"),
    ],
)
def test_invalid_highlights_are_refused_by_name(
    client: TestClient, fields: dict[str, object], pointer: str, detail: str
) -> None:
    problem = refused(client, "/rerank", query=QUERY, documents=["w5", "w6"], **fields)
    assert (problem["status"], problem["pointer"]) == (422, pointer)
    assert detail in problem["detail"]


@pytest.mark.parametrize("raw", [False, True])
def test_effects_of_pairs_are_those_of_four_scores(any_client: TestClient, raw: bool) -> None:
    query, document = "w5 w9 cat", "w9 w40 w5"

    def score(query: str, document: str) -> float:
        body = {"queries": query, "documents": document, "raw_scores": raw}
        return float(ask(any_client, "/score", **body)["scores"][0])

    explain = {"of": "both", "pairs": 2}
    response = ask(
        any_client, "/score", queries=query, documents=document, raw_scores=raw, explain=explain
    )
    (explanation,) = response["explanations"]
    pairs = explanation["pairs"]
    assert len(pairs) == 4
    assert [pair["value"] for pair in pairs] == sorted((p["value"] for p in pairs), reverse=True)
    for pair in pairs:
        without = []
        for text, name in zip(explanation["texts"], ("query", "document"), strict=True):
            unit = text["units"][pair[name]]
            assert unit["rank"] <= 2
            whole = {"query": query, "document": document}[name]
            words = whole.split()
            words.remove(whole[unit["start"] : unit["end"]])
            without.append(" ".join(words))
        expected = score(query, document) + score(*without)
        expected -= score(without[0], document) + score(query, without[1])
        assert pair["value"] == pytest.approx(expected, abs=4e-5)


def test_without_tokens_for_pairs_there_are_none(client: TestClient) -> None:
    words = " ".join(f"w{index}" for index in range(5, 17))
    few, many = (
        ask(
            client,
            "/score",
            queries=words,
            documents=words,
            explain={"by": "words", "of": "both", "pairs": 10, "max_tokens": max_tokens},
        )
        for max_tokens in (800, 3000)
    )
    assert few["explanations"][0]["pairs"] == []
    assert len(many["explanations"][0]["pairs"]) == 100
    assert few["explanation_tokens"] <= 800
    assert many["explanation_tokens"] <= 3000
    plain = ask(client, "/score", queries="w5", documents="w6", explain=True)
    assert "pairs" not in plain["explanations"][0]


def test_variants_are_not_counted_as_inputs(rerank_client: TestClient) -> None:
    def counts() -> dict[str, float]:
        values = values_of(rerank_client.get("/metrics").text)
        return {
            name: values[name]
            for name in (
                "vitrine_inputs_received_total",
                'vitrine_inputs_total{outcome="done"}',
                'vitrine_variants_total{outcome="done"}',
                'vitrine_variants_total{outcome="refused"}',
                'vitrine_stage_seconds_count{stage="tokenize"}',
                'vitrine_stage_seconds_count{stage="explain"}',
            )
        }

    before = counts()
    # The empty text, and each of three words alone and left out.
    documents = [f"w{index} w{index + 1} w{index + 2}" for index in range(20, 44, 3)]
    body = {"query": "w5", "documents": documents, "explain": {"by": "words", "top_n": 1}}
    ask(rerank_client, "/rerank", **body)
    after = counts()
    assert [after[name] - before[name] for name in before] == [8, 8, 7, 0, 1, 1]


@pytest.mark.parametrize("explain", [{}, {"method": "terms"}, {"method": "shapley"}])
def test_server_timing_has_the_explanations(client: TestClient, explain: object) -> None:
    body = {"queries": QUERY, "documents": [DOCUMENT]}
    plain = post(client, "/score", **body)
    explained = post(client, "/score", **body, explain=explain)
    names = ["tokenize", "queue", "infer", "serialize"]
    assert list(stages(plain)) == names
    assert list(stages(explained)) == [*names[:3], "explain", names[3]]


def test_server_timing_has_the_explanations_of_labels_and_highlights(
    classify_client: TestClient, client: TestClient
) -> None:
    labels = post(classify_client, "/classify", inputs=["w5 w9"], explain=True)
    best = post(client, "/rerank", query=QUERY, documents=[DOCUMENT], highlight=1)
    assert "explain" in stages(labels)
    assert "explain" in stages(best)


def test_chunks_are_units_over_http(client: TestClient) -> None:
    document = " ".join(f"It is w{index}." for index in range(5, 45))
    body = {"queries": QUERY, "documents": document, "explain": {"by": "chunks"}}
    (text,) = ask(client, "/score", **body)["explanations"][0]["texts"]
    assert text["by"] == "chunks"
    assert [document[unit["start"] : unit["end"]].count(".") for unit in text["units"]] == [
        12,
        12,
        12,
        4,
    ]


@pytest.mark.parametrize("name", ["DeletionOptions", "LabelDeletionOptions"])
def test_schema_has_the_defaults_and_ranges_of_the_python_api(
    client: TestClient, name: str
) -> None:
    schema = client.get("/openapi.json").json()["components"]["schemas"][name]
    # Other options with which a field is valid.
    needs = {
        "samples": {"method": "shapley"},
        "seed": {"method": "shapley"},
        "pairs": {"of": "both"},
    }
    bounded = set()
    for field, own in schema["properties"].items():
        assert own["default"] == getattr(vitrine.Deletion(), field)
        kinds = own.get("anyOf", [own])
        rest: dict[str, Any] = needs.get(field, {})
        for value in [value for kind in kinds for value in kind.get("enum", ())]:
            vitrine.Deletion(**{field: value, **rest})
        for kind in [kind for kind in kinds if kind["type"] == "integer"]:
            least = kind["minimum"]
            most = kind.get("maximum", kind.get("exclusiveMaximum", 2**40 + 1) - 1)
            for value in (least, most):
                vitrine.Deletion(**{field: value, **rest})
            beyond = [least - 1] if most == 2**40 else [least - 1, most + 1]
            for value in beyond:
                with pytest.raises(vitrine.InvalidInput) as raised:
                    vitrine.Deletion(**{field: value, **rest})
                assert raised.value.pointer == f"/explain/{field}"
            bounded.add(field)
    assert {"samples", "seed", "max_tokens"} <= bounded


def test_routes_declare_the_errors_of_explanations(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    for path in ("/score", "/rerank", "/classify"):
        assert {"422", "429", "500", "504"} <= paths[path]["post"]["responses"].keys()
