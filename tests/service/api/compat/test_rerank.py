"""The rerank and classify routes of TEI, Jina, Cohere and vLLM, without their clients."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from sentence_transformers import CrossEncoder
from starlette.testclient import TestClient
from transformers import pipeline

from models.artifact import Artifact
from tests.service.api.posting import ask
from tests.serving import served

pytestmark = pytest.mark.slow

QUERY = "w7 w9"
DOCUMENTS = ["w21 w5", "w8 w15 w33 w6", "w40"]
PAIRS = [(QUERY, document) for document in DOCUMENTS]


@pytest.fixture(scope="module")
def identity(cross_encoder: CrossEncoder) -> Any:  # noqa: ANN401 - array
    return cross_encoder.predict(PAIRS, activation_fn=lambda logits: logits)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/vllm/rerank"])
def test_rerank_gives_the_scores_of_the_cross_encoder(
    rerank_client: TestClient, cross_encoder: CrossEncoder, path: str
) -> None:
    result = ask(rerank_client, path, query=QUERY, documents=DOCUMENTS)
    expected = cross_encoder.rank(QUERY, DOCUMENTS)
    assert [line["index"] for line in result["results"]] == [line["corpus_id"] for line in expected]
    scores = [line["relevance_score"] for line in result["results"]]
    np.testing.assert_allclose(scores, [line["score"] for line in expected], rtol=1e-4)
    assert result["usage"] == {"prompt_tokens": 7 + 9 + 6, "total_tokens": 7 + 9 + 6}
    documents = [line.get("document") for line in result["results"]]
    texts = [{"text": DOCUMENTS[line["index"]]} for line in result["results"]]
    assert documents == ([None] * 3 if path == "/v2/rerank" else texts)


def test_options_of_rerank(rerank_client: TestClient, identity: Any) -> None:  # noqa: ANN401
    fields = {
        "query": QUERY,
        "documents": [{"text": text} for text in DOCUMENTS],
        "top_n": 1,
        "return_documents": False,
        "use_activation": False,
    }
    (best,) = ask(rerank_client, "/v1/rerank", **fields)["results"]
    assert best["index"] == np.argmax(identity)
    assert best["relevance_score"] == pytest.approx(identity.max(), rel=1e-4)
    assert "document" not in best
    assert len(ask(rerank_client, "/v1/rerank", **{**fields, "top_n": 0})["results"]) == 3
    loose = {"max_tokens_per_doc": 0, "max_tokens_per_query": 0, "priority": 3, "user": "me"}
    assert ask(rerank_client, "/vllm/rerank", **fields, **loose)["results"] == [best]
    cut = ask(rerank_client, "/v1/rerank", **fields, max_tokens_per_doc=1, max_tokens_per_query=1)
    assert cut["usage"]["total_tokens"] == 3 * 5


def test_fields_of_documents_are_returned(rerank_client: TestClient) -> None:
    documents = [{"text": text, "title": f"title {i}"} for i, text in enumerate(DOCUMENTS)]
    fields = {"query": QUERY, "documents": documents, "rank_fields": ["text"]}
    for line in ask(rerank_client, "/v1/rerank", **fields)["results"]:
        assert line["document"] == documents[line["index"]]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rank_fields", ["title"], "Input should be 'text'"),
        ("truncate_prompt_tokens", 4, "Input should be None"),
        ("documents", ["w5 " * 40], "more than 24 tokens"),
    ],
)
def test_fields_that_would_change_scores_are_refused(
    rerank_client: TestClient, field: str, value: object, message: str
) -> None:
    body = {"query": "w5", "documents": ["w5"], "truncation": False, field: value}
    response = rerank_client.post("/v1/rerank", json=body)
    assert (response.status_code, message in response.json()["message"]) == (422, True)
    assert field in response.json()["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_errors_of_rerank_have_the_members_of_jina_and_cohere(
    rerank_client: TestClient, path: str
) -> None:
    response = rerank_client.post(path, json={"query": "w5", "documents": ["w5", "w5 " * 40_000]})
    text = "/documents/1: the text has 120000 characters; the limit is 100000"
    assert (response.status_code, response.json()["message"]) == (413, text)
    assert response.json()["detail"] == text
    response = rerank_client.post(path, json={"query": "a", "documents": ["b"], "model": "other"})
    assert (response.status_code, "unknown model" in response.json()["message"]) == (404, True)


def test_vllm_scores_pairs_under_all_names_of_its_fields(
    rerank_client: TestClient, client: TestClient, cross_encoder: CrossEncoder
) -> None:
    names = [("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2")]
    for queries, documents in names:
        body = {queries: QUERY, documents: DOCUMENTS}
        result = ask(rerank_client, "/vllm/score", **body)
        scores = [line["score"] for line in result["data"]]
        np.testing.assert_allclose(scores, cross_encoder.predict(PAIRS), rtol=1e-4)
    raw = ask(rerank_client, "/vllm/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False)
    logits = cross_encoder.predict(PAIRS, activation_fn=lambda logits: logits)
    np.testing.assert_allclose([line["score"] for line in raw["data"]], logits, rtol=1e-4)
    limits = {"max_tokens_per_doc": 0, "max_tokens_per_query": 3}
    error = rerank_client.post("/vllm/score", json={"text_1": "w5", "text_2": ["w5"], **limits})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "max_tokens_per_query")
    cosines = ask(client, "/vllm/v1/score", queries=["cat"] * 2, items=["cat", "a dog"])["data"]
    assert cosines[0]["score"] == pytest.approx(1, abs=1e-6)
    assert cosines[1]["score"] < 1
    error = rerank_client.post("/vllm/score", json={"text_1": "w5", "text_2": ["w5"] * 9}).json()
    assert error["error"]["message"] == "9 documents; the limit is 8"


@pytest.mark.parametrize(
    ("names", "nulls", "status"),
    [
        (["queries", "items"], [], 200),
        (["text_1", "documents"], [], 200),
        (["data_1", "data_2"], [], 200),
        (["queries", "text_1", "text_2"], [], 400),
        (["data_1", "items", "data_2"], [], 400),
        (["text_2"], [], 400),
        (["queries"], [], 400),
        # A name with null is absent.
        (["text_1", "text_2"], ["queries", "data_1", "items"], 200),
        (["queries", "text_2"], ["text_1"], 200),
        (["text_2"], ["text_1", "queries"], 400),
    ],
)
def test_names_of_vllm_are_in_the_openapi_document_and_a_field_has_one(
    rerank_client: TestClient, names: list[str], nulls: list[str], status: int
) -> None:
    body = dict.fromkeys(names, "w5") | dict.fromkeys(nulls)
    response = rerank_client.post("/vllm/score", json=body)
    assert response.status_code == status
    document = rerank_client.get("/openapi.json").json()
    schemas = {"components": document["components"]}
    schema = {"$ref": "#/components/schemas/VLLMScoreRequest", **schemas}
    assert jsonschema_rs.is_valid(schema, body) == (status == 200)
    for name in names:
        assert not jsonschema_rs.is_valid(schema, body | {name: 3})
    if status == 200:
        (expected,) = ask(rerank_client, "/vllm/score", text_1="w5", text_2="w5")["data"]
        assert response.json()["data"] == [expected]
    if len(names) == 3:
        error = response.json()["error"]
        assert error["param"] in names
        assert "are names of the same field" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("score", {"text_1": "w5", "text_2": ["w5", 3]}, "text_2/1: Input should be"),
        ("score", {"text_1": ["w5", "w5 " * 40_000], "text_2": ["w5"] * 2}, "text_1/1: the text"),
        ("score", {"queries": ["w5", "w5 " * 40_000], "items": ["w5"] * 2}, "queries/1: the text"),
        ("score", {"data_1": "w5", "data_2": ["w5", "w5 " * 40_000]}, "input 1: the text"),
        ("score", {"data_1": ["w5"] * 3, "data_2": ["w5"] * 2}, "data_1: 3 queries and 2"),
        ("score", {"data_1": "w5", "data_2": ["w5"] * 9}, "9 documents"),
        ("rerank", {"query": "w5", "documents": ["w5", 3]}, "documents/1: Input should be"),
        ("rerank", {"query": "w5", "documents": [""] * 9}, "9 documents"),
    ],
)
def test_errors_of_vllm_name_the_text(
    rerank_client: TestClient, path: str, fields: dict[str, object], message: str
) -> None:
    error = rerank_client.post(f"/vllm/{path}", json=fields).json()["error"]
    assert error["message"].startswith(message)
    assert error["param"] in fields


def test_vllm_classes_equal_the_pipeline_of_transformers(
    classify_client: TestClient, classifier: Artifact
) -> None:
    classify = pipeline("text-classification", str(classifier.path / "source"), top_k=None)
    texts = ["w5 w6 w7", "w21"]
    result = ask(classify_client, "/vllm/classify", input=texts)
    body = {"input": texts, "add_special_tokens": False}
    error = classify_client.post("/vllm/classify", json=body)
    assert (error.status_code, error.json()["error"]["param"]) == (400, "add_special_tokens")
    for line, labels in zip(result["data"], classify(texts), strict=True):
        assert line["label"] == labels[0]["label"]
        assert line["num_classes"] == 3
        expected = {label["label"]: label["score"] for label in labels}
        probs = [expected[name] for name in classifier.manifest.labels]
        np.testing.assert_allclose(line["probs"], probs, rtol=1e-4)
    (logits,) = classify(texts[:1], function_to_apply="none")
    (raw,) = ask(classify_client, "/vllm/classify", input=texts[0], use_activation=False)["data"]
    assert max(raw["probs"]) == pytest.approx(logits[0]["score"], rel=1e-4)


def test_tei_rerank_gives_sigmoids_and_texts(
    rerank_client: TestClient,
    identity: Any,  # noqa: ANN401
) -> None:
    body = {"query": QUERY, "texts": DOCUMENTS}
    result = ask(rerank_client, "/tei/rerank", **body, return_text=True)
    best = np.argsort(-identity)
    assert [line["index"] for line in result] == best.tolist()
    assert [line["text"] for line in result] == [DOCUMENTS[index] for index in best]
    sigmoids = 1 / (1 + np.exp(-identity[best]))
    np.testing.assert_allclose([line["score"] for line in result], sigmoids, rtol=1e-4)
    raw = ask(rerank_client, "/tei/rerank", **body, raw_scores=True)
    np.testing.assert_allclose([line["score"] for line in raw], identity[best], rtol=1e-4)
    assert "text" not in raw[0]
    # The route of all kinds of models.
    assert ask(rerank_client, "/tei", **body, raw_scores=True) == raw


def test_tei_rerank_counts_the_query_with_each_text(rerank_client: TestClient) -> None:
    headers = rerank_client.post("/tei/rerank", json={"query": "ab", "texts": ["c", "def"]}).headers
    assert headers["x-compute-characters"] == "8"  # `query_chars * batch_size` in TEI's server.rs


def test_tei_predict_mirrors_the_shape_of_its_inputs(
    classify_client: TestClient, classifier: Artifact
) -> None:
    classify = pipeline("text-classification", str(classifier.path / "source"), top_k=None)
    one = classify("w5 w6 w7", top_k=None)
    pair = classify({"text": "w5 w6", "text_pair": "w33 w8"})
    for inputs, expected in (
        ("w5 w6 w7", one),
        (["w5 w6 w7"], one),
        (["w5 w6", "w33 w8"], pair),
        ([["w5 w6 w7"], ["w5 w6", "w33 w8"]], [one, pair]),
    ):
        for path in ("/tei/predict", "/tei"):
            actual = ask(classify_client, path, inputs=inputs)
            lines = actual if isinstance(actual[0], dict) else [*chain(*actual)]
            wanted = expected if isinstance(expected[0], dict) else [*chain(*expected)]
            assert [line["label"] for line in lines] == [line["label"] for line in wanted]
            np.testing.assert_allclose(
                [line["score"] for line in lines], [line["score"] for line in wanted], rtol=1e-4
            )
            assert isinstance(actual[0], dict) == isinstance(expected[0], dict)


def test_tei_predict_counts_a_pair_as_one_input(classifier: Artifact) -> None:
    classify = pipeline("text-classification", str(classifier.path / "source"), top_k=None)
    expected = classify({"text": "w5 w6", "text_pair": "w33 w8"})
    with served(classifier.path, limits={"max_inputs": 1}) as client:
        for inputs in (["w5 w6", "w33 w8"], [["w5 w6", "w33 w8"]]):
            actual = ask(client, "/tei/predict", inputs=inputs)
            labels = actual if isinstance(actual[0], dict) else actual[0]
            assert [line["label"] for line in labels] == [line["label"] for line in expected]
        two = client.post("/tei/predict", json={"inputs": [["w5"], ["w6"]]})
    assert (two.status_code, two.json()["error_type"]) == (422, "Validation")
    assert "batch size 2 > maximum allowed batch size 1" in two.json()["error"]


@pytest.mark.parametrize("function", ["sigmoid", "softmax", "none"])
def test_tei_predict_applies_the_parameters_of_the_pipeline(
    classify_client: TestClient, classifier: Artifact, function: str
) -> None:
    parameters = {"function_to_apply": function, "top_k": 2}
    classify = pipeline("text-classification", str(classifier.path / "source"), **parameters)
    texts = ["w5 w6 w7", "w21"]
    inputs = [[text] for text in texts]
    actual = ask(classify_client, "/tei/predict", inputs=inputs, parameters=parameters)
    for lines, expected in zip(actual, classify(texts), strict=True):
        assert [line["label"] for line in lines] == [line["label"] for line in expected]
        scores = [line["score"] for line in expected]
        assert [line["score"] for line in lines] == pytest.approx(scores, rel=1e-4)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"multi_label": True}, "/parameters/multi_label: multi_label needs candidate_labels"),
        (
            {"hypothesis_template": "w9 {}"},
            "/parameters/hypothesis_template: hypothesis_template needs candidate_labels",
        ),
        (
            {"candidate_labels": ["w5"], "function_to_apply": "none"},
            "/parameters/function_to_apply: function_to_apply does not apply to candidate_labels",
        ),
        (
            {"candidate_labels": ["w5", "w5"]},
            "/parameters/candidate_labels: candidate_labels must have at least one label, and each",
        ),
        ({"candidate_labels": ["w5", " "]}, "/parameters/candidate_labels/1: the label is empty"),
        (
            {"candidate_labels": ["w5"], "hypothesis_template": "w9"},
            "/parameters/hypothesis_template: hypothesis_template must have {}",
        ),
    ],
)
def test_tei_predict_refuses_parameters_of_other_labels(
    classify_client: TestClient, parameters: dict[str, object], message: str
) -> None:
    body = {"inputs": "w5", "parameters": parameters}
    response = classify_client.post("/tei/predict", json=body)
    assert (response.status_code, response.text.startswith(message)) == (422, True)


def test_errors_of_tei_name_the_field(
    rerank_client: TestClient, classify_client: TestClient, client: TestClient
) -> None:
    def error(client: TestClient, path: str, **body: object) -> tuple[int, str, str]:
        response = client.post(path, json=body)
        return response.status_code, response.json()["error_type"], response.json()["error"]

    path = "/tei/rerank"
    empty = (400, "Empty", "Input validation error: `texts` cannot be empty")
    assert error(rerank_client, path, query="a", texts=[]) == empty
    long = "w5 " * 40_000
    limit = "the text has 120000 characters; the limit is 100000"
    assert error(rerank_client, path, query="a", texts=["w5", long])[2].endswith(
        f"{limit} (at index 1)"
    )
    assert error(rerank_client, path, query=long, texts=["w5"])[2].endswith(limit)
    status, kind, message = error(rerank_client, path, query="a", texts=["w5"] * 9)
    assert (status, kind) == (422, "Validation")
    assert "batch size 9 > maximum allowed batch size 8" in message
    assert error(classify_client, path, query="a", texts=["w5"])[:2] == (424, "Backend")
    assert error(client, "/tei/predict", inputs="w5")[:2] == (424, "Backend")
    response = classify_client.post("/tei/predict", json={"inputs": ["a", "b", "c"]})
    assert (response.status_code, response.text[:8]) == (422, "/inputs:")


@pytest.fixture(scope="module")
def root_client(reranker: Artifact) -> Iterator[TestClient]:
    with served(reranker.path, server={"tei_at_root": True}) as client:
        yield client


def test_with_tei_at_root_rerank_is_that_of_tei(root_client: TestClient) -> None:
    body = {"query": QUERY, "texts": DOCUMENTS}
    expected = ask(root_client, "/tei/rerank", **body)
    assert ask(root_client, "/rerank", **body) == expected
    assert ask(root_client, "/", **body) == expected
    error = root_client.post("/rerank", json={"query": QUERY, "texts": []}).json()
    assert error["error_type"] == "Empty"
    # The document has TEI's routes with the prefix alone, and none that they replace.
    paths = root_client.get("/openapi.json").json()["paths"].keys()
    assert {"/rerank", "/tei/rerank", "/score"} & paths == {"/tei/rerank", "/score"}
