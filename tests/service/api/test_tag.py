"""`POST /tag`, against the token classification pipeline of transformers."""

from typing import Any

import numpy as np
import pytest
import transformers
from starlette.testclient import TestClient

import vitrine
from models.artifact import Artifact
from tests.service.api.posting import ask, post, refused, stages, wrong_model
from tests.serving import ready_model

pytestmark = pytest.mark.slow

TEXTS = ["w7 w9 w21 w5 w8 w15", "w40 w33", "w5 🎉 w6 w21", "w5 w9 " * 40, "", " ", "\n", "w7 \0 w9"]
Json = dict[str, Any]


@pytest.fixture(scope="module")
def pipeline(tagger: Artifact) -> Any:  # noqa: ANN401
    return transformers.pipeline("token-classification", str(tagger.path / "source"))


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
def test_entities_equal_the_pipeline(
    aggregation: str,
    tag_client: TestClient,
    pipeline: Any,  # noqa: ANN401
) -> None:
    result = ask(tag_client, "/tag", inputs=TEXTS, aggregation=aggregation)
    assert result["tokens"] == [8, 4, 6, 24, 2, 2, 2, 5]
    assert result["truncated"] == [False] * 3 + [True] + [False] * 4
    for text, actual in zip(TEXTS, result["entities"], strict=True):
        lines = pipeline(text, aggregation_strategy=aggregation)
        expected = [
            {
                "label": line["entity" if aggregation == "none" else "entity_group"],
                "score": pytest.approx(line["score"], rel=1e-4),
                "start": line["start"],
                "end": line["end"],
                "text": text[line["start"] : line["end"]],
                **({"index": line["index"]} if aggregation == "none" else {}),
            }
            for line in lines
        ]
        assert actual == expected
    assert sum(map(len, result["entities"])) > 8
    assert result["entities"][4:7] == [[], [], []]


def test_simple_is_the_default_and_one_text_needs_no_list(tag_client: TestClient) -> None:
    simple = ask(tag_client, "/tag", inputs=TEXTS[:1], aggregation="simple")
    assert ask(tag_client, "/tag", inputs=TEXTS[0]) == simple
    assert ask(tag_client, "/tag", inputs=TEXTS[0], aggregation="none") != simple


def test_python_and_http_give_the_same_entities(tagger: Artifact, tag_client: TestClient) -> None:
    with vitrine.SyncModel(tagger.path, vitrine.ModelOptions(threads=1)) as model:
        result = model.tag(TEXTS)
    expected = ask(tag_client, "/tag", inputs=TEXTS)["entities"]
    for actual, entities in zip(result.entities, expected, strict=True):
        spans = [(entity.label, entity.start, entity.end, entity.text) for entity in actual]
        assert spans == [(e["label"], e["start"], e["end"], e["text"]) for e in entities]
        scores = [entity["score"] for entity in entities]
        np.testing.assert_allclose([entity.score for entity in actual], scores, rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "index", "pointer", "message"),
    [
        ({"inputs": []}, None, "/inputs", "at least 1 item, not 0"),
        ({"inputs": ["w5", 3]}, 1, "/inputs/1", "valid string"),
        ({"inputs": [["w5", "w6"]]}, 0, "/inputs/0", "valid string"),
        ({"inputs": 3}, None, "/inputs", "a text or a list of texts"),
        ({"inputs": ["w5"] * 9}, None, "/inputs", "9 inputs; the limit is 8"),
        ({"inputs": "w5", "aggregation": "last"}, None, "/aggregation", "'none', 'simple'"),
        ({"inputs": "w5", "top_k": 1}, None, None, "allowed fields: inputs, labels"),
        (
            {"inputs": ["w5", "w6 " * 30], "on_overflow": "error"},
            1,
            "/inputs/1",
            "more than 24 tokens",
        ),
    ],
)
def test_invalid_requests_name_the_item(
    tag_client: TestClient, body: Json, index: int | None, pointer: str | None, message: str
) -> None:
    problem = refused(tag_client, "/tag", **body)
    actual = problem["status"], problem.get("index"), problem.get("pointer")
    assert actual == (422, index, pointer)
    assert message in problem["detail"]


def test_number_of_tokens_is_limited(
    tag_client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ready_model(tag_client)
    monkeypatch.setitem(model.__dict__, "max_token_vectors", 10)
    problem = refused(tag_client, "/tag", inputs=TEXTS[:2])
    assert (problem["status"], problem["code"]) == (422, "too_many_tokens")
    assert ask(tag_client, "/tag", inputs=TEXTS[0])["tokens"] == [8]


def test_deadline_and_metrics_are_those_of_other_routes(tag_client: TestClient) -> None:
    headers = {"X-Request-Timeout-Ms": "0"}
    response = tag_client.post("/tag", json={"inputs": "w5"}, headers=headers)
    assert (response.status_code, response.json()["code"]) == (400, "timeout")
    response = post(tag_client, "/tag", inputs=TEXTS)
    assert list(stages(response)) == ["tokenize", "queue", "infer", "serialize"]
    metrics = tag_client.get("/metrics").text
    assert 'vitrine_requests_total{route="/tag",status="200"}' in metrics


def test_routes_of_other_models_say_what_the_model_can_do(
    tag_client: TestClient, classify_client: TestClient, client: TestClient
) -> None:
    can = "; it can tag the tokens of texts"
    documents = {"documents": ["w5"]}
    assert "cannot encode texts" + can in wrong_model(tag_client, "/encode", inputs="w5")
    tokens = {"inputs": "w5", "output": "tokens"}
    assert "cannot encode tokens" + can in wrong_model(tag_client, "/encode", **tokens)
    assert "cannot classify texts" in wrong_model(tag_client, "/classify", inputs="w5")
    assert can in wrong_model(tag_client, "/classify", inputs="w5")
    assert can in wrong_model(tag_client, "/rerank", query="w5", **documents)
    assert can in wrong_model(tag_client, "/score", queries="w5", **documents)
    for other, use in ((classify_client, "classify texts"), (client, "encode texts")):
        detail = wrong_model(other, "/tag", inputs="w5")
        assert f"cannot tag the tokens of texts; it can {use}" in detail
    gradients = wrong_model(tag_client, "/debug/attribute", text="w5", target={"type": "norm"})
    assert "is of another kind" in gradients


def test_info_lists_the_output_and_the_labels(tag_client: TestClient) -> None:
    info = tag_client.get("/info").json()
    assert (info["outputs"], info["dimensions"]) == (["tags"], None)
    assert info["labels"] == ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    assert info["self_check"].keys() == {"tags"}
    # text-embeddings-inference has no such models.
    assert tag_client.get("/tei/info").json()["model_type"] == {}
