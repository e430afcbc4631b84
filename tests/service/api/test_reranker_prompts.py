"""Prompts of rerankers and classifiers, against sentence-transformers' CrossEncoder."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from starlette.testclient import TestClient

import vitrine
from models.artifact import Artifact
from models.export.exporter import export
from models.export.sources import resolve
from service.inference.errors import InvalidInput
from tests.conftest import Export
from tests.models.checkpoints import edit_json, save_classifier, save_tokenizer
from tests.service.api.conftest import client_of
from tests.service.api.posting import ask, refused

pytestmark = pytest.mark.slow

QUERY = "w7 w9"
DOCUMENTS = ["w21 w5 w33", "w8", "w5 " * 40]
PROMPTS = {"search": "w9 w10 ", "fact": "w30 w31 w32 "}

Json = dict[str, Any]
Prompted = tuple[CrossEncoder, Artifact]


@pytest.fixture(scope="module")
def prompted(exported: Export) -> Prompted:
    """A BERT with one label and prompts, of which "search" is the default; and its artifact."""

    def write(out: Any) -> None:  # noqa: ANN401
        model, saved = out.with_name("model"), out.with_name("saved")
        save_classifier(model, "bert", 1)
        save_tokenizer(model)
        names = ["input_ids", "token_type_ids", "attention_mask"]
        edit_json(model / "tokenizer_config.json", model_input_names=names)
        encoder = CrossEncoder(
            str(model), device="cpu", prompts=PROMPTS, default_prompt_name="search"
        )
        encoder.save(str(saved))
        export(resolve(str(saved)), out)

    artifact = exported("prompted-reranker", write)
    return CrossEncoder(str(artifact.path.with_name("saved")), device="cpu"), artifact


@pytest.fixture(scope="module")
def prompted_client(prompted: Prompted) -> Iterator[TestClient]:
    yield from client_of(prompted[1])


@pytest.mark.parametrize("prompt_name", [None, "search", "fact", "query"])
def test_scores_equal_those_of_the_cross_encoder(
    prompted: Prompted, prompted_client: TestClient, prompt_name: str | None
) -> None:
    oracle, _ = prompted
    pairs = [(QUERY, document) for document in DOCUMENTS]
    if prompt_name == "query":  # always exists, and is empty
        assert "query" not in oracle.prompts
        expected = oracle.predict(pairs, prompt="")
    else:
        expected = oracle.predict(pairs, prompt_name=prompt_name)
    fields: Json = {"prompt_name": prompt_name}
    scores = ask(prompted_client, "/score", queries=QUERY, documents=DOCUMENTS, **fields)
    np.testing.assert_allclose(scores["scores"], expected, rtol=1e-4)
    ranking = ask(prompted_client, "/rerank", query=QUERY, documents=DOCUMENTS, **fields)
    best = np.argsort(-expected)
    assert [one["index"] for one in ranking["results"]] == best.tolist()
    np.testing.assert_allclose(
        [one["score"] for one in ranking["results"]], expected[best], rtol=1e-4
    )
    labels = ask(prompted_client, "/classify", inputs=[list(pair) for pair in pairs], **fields)
    actual = [one["score"] for (one,) in labels["labels"]]
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    prompt = oracle.prompts.get(prompt_name or "search", "")
    assert scores["tokens"][0] == 8 + len(prompt.split())
    assert scores["truncated"] == [False, False, True]


def test_texts_have_the_prompt_too(prompted: Prompted, prompted_client: TestClient) -> None:
    oracle, _ = prompted
    features = oracle.preprocess([QUERY, DOCUMENTS[0]], prompt=PROMPTS["fact"])
    with torch.no_grad():
        expected = oracle(features)["scores"][:, 0].sigmoid().numpy()
    body: Json = {"inputs": [QUERY, DOCUMENTS[0]], "prompt_name": "fact"}
    labels = ask(prompted_client, "/classify", **body)["labels"]
    np.testing.assert_allclose([one["score"] for (one,) in labels], expected, rtol=1e-4)


def test_limit_of_a_query_does_not_count_the_prompt(prompted: Prompted) -> None:
    oracle, artifact = prompted
    expected = oracle.predict([("w7 w8", "w21")], prompt_name="fact")
    with vitrine.SyncModel(artifact.path, vitrine.ModelOptions(threads=1)) as model:
        result = model.rerank("w7 w8 w9", ["w21"], prompt_name="fact", max_tokens_per_query=2)
    np.testing.assert_allclose(result.scores, expected, rtol=1e-4)
    assert result.truncated == [True]


def test_compatible_routes_use_the_default_prompt(
    prompted: Prompted, prompted_client: TestClient
) -> None:
    oracle, _ = prompted
    expected = oracle.predict([(QUERY, document) for document in DOCUMENTS])
    body: Json = {"query": QUERY, "documents": DOCUMENTS}
    results = ask(prompted_client, "/v2/rerank", **body)["results"]
    actual = {one["index"]: one["relevance_score"] for one in results}
    np.testing.assert_allclose([actual[index] for index in range(3)], expected, rtol=1e-4)


def test_unknown_prompts_are_refused(prompted_client: TestClient) -> None:
    bodies: dict[str, Json] = {
        "/classify": {"inputs": "w5"},
        "/rerank": {"query": "w5", "documents": ["w6"]},
        "/score": {"queries": "w5", "documents": ["w6"]},
    }
    for path, body in bodies.items():
        problem = refused(prompted_client, path, **body, prompt_name="other")
        assert (problem["status"], problem["code"]) == (422, "unknown_prompt")
        assert problem["pointer"] == "/prompt_name"
        assert "document, fact, query, search" in problem["detail"]


def test_models_of_vectors_refuse_other_prompts(sparse_encoder: tuple[object, Artifact]) -> None:
    with (
        vitrine.SyncModel(sparse_encoder[1].path) as model,
        pytest.raises(InvalidInput, match="prompt_name applies to rerankers") as refusal,
    ):
        model.score("w5", "w6", prompt_name="query")
    assert refusal.value.pointer == "/prompt_name"


def test_attribution_leaves_the_prompt_out_of_the_words(
    prompted: Prompted, prompted_client: TestClient
) -> None:
    oracle, _ = prompted
    fields: Json = {"target": {"type": "score"}, "method": "saliency", "text_pair": "w21 w5"}
    body: Json = {"text": {"text": QUERY, "prompt_name": "fact"}, **fields}
    result = ask(prompted_client, "/debug/attribute", **body)
    identity = torch.nn.Identity()
    expected = oracle.predict([(QUERY, "w21 w5")], prompt_name="fact", activation_fn=identity)
    assert result["value"] == pytest.approx(float(expected[0]), rel=1e-4)
    assert [(token["token"], token["text"], token["start"]) for token in result["tokens"]] == [
        ("[CLS]", None, None),
        *((word, None, None) for word in PROMPTS["fact"].split()),
        *(("w7", 0, 0), ("w9", 0, 3)),
        ("[SEP]", None, None),
        *(("w21", 1, 0), ("w5", 1, 4)),
        ("[SEP]", None, None),
    ]
    assert [(word["text"], word["start"], word["end"]) for word in result["words"]] == [
        *((0, 0, 2), (0, 3, 5)),
        *((1, 0, 3), (1, 4, 6)),
    ]
    without = ask(prompted_client, "/debug/attribute", text=QUERY, **fields)
    by_default = oracle.predict([(QUERY, "w21 w5")], activation_fn=identity)
    assert without["value"] == pytest.approx(float(by_default[0]), rel=1e-4)
