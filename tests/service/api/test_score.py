"""`POST /score` of a reranker and of an embedding model, against sentence-transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import CrossEncoder, SentenceTransformer
from starlette.testclient import TestClient

import vitrine
from models.artifact import Artifact
from models.export.exporter import export
from models.export.sources import resolve
from tests.service.api.posting import ask, refused, wrong_model

pytestmark = pytest.mark.slow

QUERIES = ["w7 w9", "w21", "w5 w6 w7"]
DOCUMENTS = ["w21 w5", "w8 w15 w33 w6", "w40"]
# Texts as deletion and broken documents leave them.
NOTHING = ["", " ", "\0", "w8\0", "\u200b"]
LONG = "a" * 100_001  # characters

Json = dict[str, Any]


def test_reranker_gives_the_scores_of_the_cross_encoder(
    rerank_client: TestClient, cross_encoder: CrossEncoder
) -> None:
    body: Json = {"queries": QUERIES, "documents": DOCUMENTS}
    result = ask(rerank_client, "/score", **body)
    expected = cross_encoder.predict(list(zip(QUERIES, DOCUMENTS, strict=True)))
    assert result["kind"] == "cross_encoder"
    np.testing.assert_allclose(result["scores"], expected, rtol=1e-4)
    assert (result["tokens"], result["truncated"]) == ([7, 8, 7], [False] * 3)
    raw = ask(rerank_client, "/score", **body, raw_scores=True)["scores"]
    np.testing.assert_allclose(1 / (1 + np.exp(-np.array(raw))), expected, rtol=1e-4)
    result = ask(rerank_client, "/score", queries=QUERIES[0], documents=DOCUMENTS)
    expected = cross_encoder.predict([(QUERIES[0], document) for document in DOCUMENTS])
    np.testing.assert_allclose(result["scores"], expected, rtol=1e-4)


@pytest.fixture(scope="module")
def prompted(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Artifact]:
    """An embedding model with different prompts for queries and documents."""
    folder = tmp_path_factory.mktemp("prompted")
    model = SentenceTransformer(str(small_folder), device="cpu")
    model.prompts = {"query": "question: ", "document": "text: ", "other": "other: "}
    model.save(str(folder / "model"))
    return folder / "model", export(resolve(str(folder / "model")), folder / "artifact")[0]


def test_tokens_and_truncation_are_those_of_query_and_document(client: TestClient) -> None:
    long = "cat " * 600
    result = ask(client, "/score", queries=["cat", long], documents=["a dog", "dog"])
    tokens = client.post("/encode", json={"inputs": ["cat", long, "a dog", "dog"]}).json()["tokens"]
    assert result["tokens"] == [tokens[0] + tokens[2], tokens[1] + tokens[3]]
    assert result["truncated"] == [False, True]


@pytest.mark.parametrize(
    ("body", "pointer", "index", "message"),
    [
        (
            {"queries": ["a", "b"], "documents": ["a"]},
            "/queries",
            None,
            "2 queries and 1 documents",
        ),
        ({"queries": [], "documents": ["a"]}, "/queries", None, "at least 1 item"),
        ({"queries": ["a", LONG], "documents": ["a", "b"]}, "/queries/1", None, "the limit is"),
        ({"queries": LONG, "documents": ["a", "b"]}, "/queries", None, "the limit is"),
        ({"queries": "a", "documents": ["a", LONG]}, "/documents/1", 1, "the limit is"),
        ({"queries": "a", "documents": LONG}, "/documents", 0, "the limit is"),
        ({"queries": ["a", "b"], "documents": ["a", LONG]}, "/documents/1", 1, "the limit is"),
        ({"queries": "a", "documents": ["a", 3]}, "/documents/1", None, "valid string"),
        ({"queries": "a", "documents": 3}, "/documents", None, "a text or a list of texts"),
    ],
)
@pytest.mark.parametrize("kind", ["cross_encoder", "cosine"])
def test_invalid_requests_name_the_text(
    client: TestClient,
    rerank_client: TestClient,
    kind: str,
    body: Json,
    pointer: str,
    index: int | None,
    message: str,
) -> None:
    asked = rerank_client if kind == "cross_encoder" else client
    problem = refused(asked, "/score", **body)
    assert problem["status"] == (413 if "the limit is" in message else 422)
    assert (problem["pointer"], problem.get("index")) == (pointer, index)
    assert message in problem["detail"]
    assert ask(asked, "/score", queries="w5", documents="w6")["kind"] == kind


def test_classifier_has_no_scores_of_pairs(classify_client: TestClient) -> None:
    wrong_model(classify_client, "/score", queries="a", documents="b")


@pytest.mark.parametrize("chunking", [None, {"size": 8}])
def test_reranker_scores_empty_texts_as_the_cross_encoder_does(
    rerank_client: TestClient, cross_encoder: CrossEncoder, chunking: Json | None
) -> None:
    documents = ["w21 w5", *NOTHING]
    for query in ["w7 w9", *NOTHING]:
        fields = {"queries": query, "documents": documents, "chunking": chunking}
        expected = cross_encoder.predict([(query, document) for document in documents])
        actual = ask(rerank_client, "/score", **fields)["scores"]
        np.testing.assert_allclose(actual, expected, rtol=1e-4)


def test_embedding_model_scores_empty_texts_as_sentence_transformers_does(
    prompted: tuple[Path, Artifact],
) -> None:
    path, artifact = prompted
    oracle = SentenceTransformer(str(path), device="cpu")
    queries = oracle.encode_query(["A cat", *NOTHING], normalize_embeddings=True)
    documents = oracle.encode_document(["A dog", *NOTHING], normalize_embeddings=True)
    with vitrine.SyncModel(artifact.path, vitrine.ModelOptions(threads=2)) as model:
        for index, query in enumerate(["A cat", *NOTHING]):
            expected = documents @ queries[index]
            for chunking in (None, vitrine.Chunking(), vitrine.Chunking(late=True)):
                scores = model.score(query, ["A dog", *NOTHING], chunking=chunking).scores
                np.testing.assert_allclose(scores, expected, atol=1e-5)
            explained = model.rerank(query, ["A dog", *NOTHING], explain=vitrine.Terms())
            for number, explanation in explained.explanations.items():
                total = sum(term.value for term in explanation.terms) + explanation.other
                assert total == pytest.approx(expected[number], abs=1e-5)
