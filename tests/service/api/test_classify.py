"""`POST /classify` and `POST /rerank`, against transformers and sentence-transformers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from sentence_transformers import CrossEncoder
from starlette.testclient import TestClient
from transformers import pipeline

import vitrine
from models.artifact import Artifact
from tests.service.api.conftest import client_of
from tests.service.api.posting import ask, refused, wrong_model

pytestmark = pytest.mark.slow

QUERY = "w7 w9"
DOCUMENTS = ["w21 w5", "w8 w15 w33 w6", "w40", "w5 " * 40, "w21 w5"]
Json = dict[str, Any]


def test_ranking_equals_the_cross_encoder(
    rerank_client: TestClient, cross_encoder: CrossEncoder
) -> None:
    expected = cross_encoder.rank(QUERY, DOCUMENTS)
    result = ask(rerank_client, "/rerank", query=QUERY, documents=DOCUMENTS)
    assert [line["index"] for line in result["results"]] == [line["corpus_id"] for line in expected]
    scores = [line["score"] for line in result["results"]]
    np.testing.assert_allclose(scores, [line["score"] for line in expected], rtol=1e-4)
    assert result["tokens"] == [7, 9, 6, 24, 7]
    assert result["truncated"] == [False, False, False, True, False]
    # Documents with equal scores are in the order of the request.
    order = [line["index"] for line in result["results"]]
    assert order.index(0) == order.index(4) - 1


def test_raw_scores_top_n_and_documents(
    rerank_client: TestClient, cross_encoder: CrossEncoder
) -> None:
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    fields = {"top_n": 2, "return_documents": True, "raw_scores": True}
    results = ask(rerank_client, "/rerank", query=QUERY, documents=documents, **fields)["results"]
    pairs = [(QUERY, text) for text in DOCUMENTS[:3]]
    logits = cross_encoder.predict(pairs, activation_fn=lambda logits: logits)
    best = np.argsort(-logits)[:2]
    assert [line["index"] for line in results] == best.tolist()
    assert [line["document"] for line in results] == [{"text": DOCUMENTS[i]} for i in best]
    np.testing.assert_allclose([line["score"] for line in results], logits[best], rtol=1e-4)


def test_query_and_documents_are_truncated_to_limits_of_their_own(
    rerank_client: TestClient, cross_encoder: CrossEncoder
) -> None:
    query, documents = "w7 " * 9, ["w5 " * 40, "w21 w5"]
    limits = {"max_tokens_per_query": 3, "max_tokens_per_doc": 4}
    result = ask(rerank_client, "/rerank", query=query, documents=documents, **limits)
    expected = cross_encoder.predict([("w7 " * 3, "w5 " * 4), ("w7 " * 3, "w21 w5")])
    scores = {line["index"]: line["score"] for line in result["results"]}
    np.testing.assert_allclose([scores[0], scores[1]], expected, rtol=1e-4)
    assert result["tokens"] == [3 + 3 + 4, 3 + 3 + 2]
    assert result["truncated"] == [True, True]
    # The limits are a request to truncate: only the limit of the model is an error.
    fields = {"documents": documents, "on_overflow": "error"}
    assert ask(rerank_client, "/rerank", query=query, **fields, **limits) == result
    problem = refused(rerank_client, "/rerank", query=query, **fields)
    assert (problem["status"], problem["pointer"]) == (422, "/documents/0")


def test_labels_equal_the_pipeline_of_transformers(
    classify_client: TestClient, classifier: Artifact
) -> None:
    classify = pipeline("text-classification", str(classifier.path / "source"), top_k=None)
    texts = ["w5 w6 w7", "w21", "", " ", "\0", "w5\0w6"]
    pair = ["w5 w6", "w33 w8"]
    result = ask(classify_client, "/classify", inputs=[*texts, pair])
    expected = [*classify(texts), classify({"text": pair[0], "text_pair": pair[1]})]
    for actual, labels in zip(result["labels"], expected, strict=True):
        assert [line["label"] for line in actual] == [line["label"] for line in labels]
        scores = [line["score"] for line in labels]
        np.testing.assert_allclose([line["score"] for line in actual], scores, rtol=1e-4)
    (alone,) = ask(classify_client, "/classify", inputs=texts[0], top_k=1)["labels"]
    assert alone == [pytest.approx(result["labels"][0][0])]
    raw = ask(classify_client, "/classify", inputs=texts[0], raw_scores=True)["labels"][0]
    (logits,) = classify(texts[:1], function_to_apply="none")
    np.testing.assert_allclose(
        [line["score"] for line in raw], [line["score"] for line in logits], rtol=1e-4, atol=1e-5
    )


@pytest.fixture(scope="module")
def entailment_client(entailment: Artifact) -> Iterator[TestClient]:
    yield from client_of(entailment)


def test_candidate_labels_equal_the_pipeline_of_transformers(
    entailment_client: TestClient, entailment: Artifact
) -> None:
    classify = pipeline("zero-shot-classification", str(entailment.path / "source"), device="cpu")
    texts, labels = ["w5 w6 w7", "w21"], ["w8", "w9 w10", "w11"]
    for fields in ({}, {"multi_label": True, "hypothesis_template": "w5 {0}"}):
        result = ask(
            entailment_client, "/classify", inputs=texts, candidate_labels=labels, **fields
        )
        for actual, expected in zip(
            result["labels"], classify(texts, labels, **fields), strict=True
        ):
            assert [line["label"] for line in actual] == expected["labels"]
            scores = [line["score"] for line in actual]
            assert scores == pytest.approx(expected["scores"], abs=1e-5)
    # Each text is in a pair with each hypothesis, of five, six and five tokens at least.
    assert result["tokens"][0] > 3 * (3 + 3)
    best = ask(
        entailment_client,
        "/classify",
        inputs=texts[0],
        candidate_labels=labels,
        top_k=1,
        explain={"by": "words", "label": "w8"},
    )
    assert len(best["labels"][0]) == 1
    assert best["explanations"][0]["label"] == "w8"


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"candidate_labels": []}, "/candidate_labels"),
        ({"candidate_labels": ["a", ""]}, "/candidate_labels/1"),
        ({"candidate_labels": ["a", "a"]}, "/candidate_labels"),
        ({"candidate_labels": ["a"], "hypothesis_template": "a"}, "/hypothesis_template"),
        ({"hypothesis_template": "a {}"}, "/hypothesis_template"),
        ({"multi_label": True}, "/multi_label"),
        ({"candidate_labels": ["a", "b", "c", "d", "e"]}, "/candidate_labels"),
        ({"candidate_labels": ["a"], "inputs": ["a", ["a", "b"]]}, "/inputs/1"),
        ({"candidate_labels": ["a"], "explain": {"label": "b"}}, "/explain/label"),
    ],
)
def test_wrong_candidate_labels_are_named(
    entailment_client: TestClient, fields: Json, pointer: str
) -> None:
    problem = refused(entailment_client, "/classify", **{"inputs": ["w5", "w6"], **fields})
    assert (problem["status"], problem["pointer"]) == (422, pointer)


def test_other_classifiers_have_no_candidate_labels(classify_client: TestClient) -> None:
    wrong_model(classify_client, "/classify", inputs="w5", candidate_labels=["a"])


def test_python_scores_equal_those_of_the_cross_encoder(
    reranker: Artifact, cross_encoder: CrossEncoder
) -> None:
    pairs = [(QUERY, text) for text in DOCUMENTS]
    with vitrine.SyncModel(reranker.path, vitrine.ModelOptions(threads=2)) as model:
        result = model.classify(pairs)
        ranked = model.rerank(QUERY, DOCUMENTS)
    np.testing.assert_allclose(result.scores[:, 0], cross_encoder.predict(pairs), rtol=1e-4)
    np.testing.assert_allclose(result.logits[:, 0], ranked.raw_scores, rtol=1e-5)
    assert result.labels == ("LABEL_0",)


@pytest.mark.parametrize(
    ("body", "pointer", "message"),
    [
        ({"query": "w5", "documents": []}, "/documents", "at least 1 item"),
        ({"query": "w5", "documents": ["w5", 3]}, "/documents/1", "a text, or an object with"),
        ({"query": "w5", "documents": [{"txt": "a"}]}, "/documents/0/text", "Field required"),
        ({"query": "w5", "documents": [{"object": {}}]}, "/documents/0/text", "Field required"),
        (
            {"query": "w5", "documents": [{"type": "text", "object": {"text": "a"}, "text": 1}]},
            "/documents/0/text",
            "valid string",
        ),
        ({"query": "w5", "documents": ["w5"] * 9}, "/documents", "9 documents; the limit is 8"),
        (
            {"query": "w5", "documents": ["w5"], "max_tokens_per_doc": 0},
            "/max_tokens_per_doc",
            "greater than or equal to 1",
        ),
        (
            {"query": "w5", "documents": ["w5", "w6 " * 30], "on_overflow": "error"},
            "/documents/1",
            "more than 24 tokens",
        ),
    ],
)
def test_invalid_requests_to_rerank_name_the_item(
    rerank_client: TestClient, body: Json, pointer: str, message: str
) -> None:
    problem = refused(rerank_client, "/rerank", **body)
    assert (problem["status"], problem["pointer"]) == (422, pointer)
    assert message in problem["detail"]
    assert ask(rerank_client, "/rerank", query=QUERY, documents=DOCUMENTS[:1])["results"]


@pytest.mark.parametrize(
    ("inputs", "pointer"),
    [([["a"]], "/inputs/0"), ([["w5", "w6"], ["w5", None]], "/inputs/1/1"), ([], "/inputs")],
)
def test_invalid_requests_to_classify_name_the_item(
    classify_client: TestClient, inputs: object, pointer: str
) -> None:
    problem = refused(classify_client, "/classify", inputs=inputs)
    assert (problem["status"], problem["pointer"]) == (422, pointer)


def test_routes_of_other_models_say_what_the_model_can_do(
    rerank_client: TestClient, classify_client: TestClient, client: TestClient
) -> None:
    for fields in ({}, {"dimensions": 1}, {"dimensions": 256}, {"truncate_dim": 256}):
        assert "cannot encode texts; it can classify" in wrong_model(
            rerank_client, "/encode", inputs="w5", **fields
        )
    documents = {"query": QUERY, "documents": DOCUMENTS}
    assert "has 3 labels; scores of pairs need a model with one" in wrong_model(
        classify_client, "/rerank", **documents
    )
    assert "it can encode texts" in wrong_model(client, "/classify", inputs="cat")
    flow = {"texts": ["w5"], "objective": {"type": "cosine"}}
    assert "is for embedding models" in wrong_model(rerank_client, "/debug/flow", **flow)


def test_calls_with_texts_in_place_of_lists_are_refused(reranker: Artifact) -> None:
    with vitrine.SyncModel(reranker.path, vitrine.ModelOptions(threads=2)) as model:
        assert len(model.classify("w5 w6").scores) == 1
        with pytest.raises(vitrine.InvalidInput, match=r"pass a single pair as \[\(a, b\)\]"):
            model.classify(("w5", "w6"))
        wrong: list[str | list[str]] = ["w5", []]
        for documents in wrong:
            with pytest.raises(vitrine.InvalidInput, match=r"documents must be a .*list"):
                model.rerank("w5", documents)


def test_tei_info_names_the_kind_of_model(
    rerank_client: TestClient, classify_client: TestClient
) -> None:
    assert rerank_client.get("/tei/info").json()["model_type"].keys() == {"reranker"}
    kind = classify_client.get("/tei/info").json()["model_type"]
    assert kind["classifier"]["id2label"] == {"0": "sad", "1": "neutral", "2": "happy"}


def test_info_lists_outputs_and_labels(classify_client: TestClient, client: TestClient) -> None:
    info = classify_client.get("/info").json()
    assert (info["outputs"], info["labels"]) == (["logits"], ["sad", "neutral", "happy"])
    assert info["activation"] == "softmax"
    assert info["self_check"].keys() == {"logits"}
    info = client.get("/info").json()
    assert (info["outputs"], info["labels"]) == (["pooled", "tokens"], [])
    assert info["activation"] is None
