"""Sparse vectors over HTTP and from Python, against sentence-transformers."""

from typing import Any

import numpy as np
import pytest
from sentence_transformers import SparseEncoder
from starlette.testclient import TestClient

import vitrine
from models.artifact import Artifact
from tests.service.api.posting import ask, refused, wrong_model

pytestmark = pytest.mark.slow

TEXTS = ["w5 w6 w7", "w21", "w8 w15 w33 w6 w40 w12", "w5 " * 40, " ", "w5\0w6"]

Json = dict[str, Any]


@pytest.fixture(scope="module")
def expected(sparse_encoder: tuple[SparseEncoder, Artifact]) -> Any:  # noqa: ANN401 - array
    return sparse_encoder[0].encode(TEXTS, convert_to_sparse_tensor=False).numpy()


def dense(vectors: list[Json], width: int) -> Any:  # noqa: ANN401 - array
    rows = np.zeros((len(vectors), width))
    for row, vector in zip(rows, vectors, strict=True):
        assert vector["ids"] == sorted(set(vector["ids"]))
        row[vector["ids"]] = vector["weights"]
    return rows


@pytest.mark.parametrize("fields", [{}, {"output": "sparse"}])
def test_weights_equal_those_of_sentence_transformers(
    sparse_client: TestClient,
    expected: Any,  # noqa: ANN401 - array
    fields: Json,
) -> None:
    result = ask(sparse_client, "/encode", inputs=TEXTS, **fields)
    actual = dense(result["embeddings"], result["dimensions"])
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert ((actual > 1e-4) == (expected > 1e-4)).all()
    assert result["tokens"] == [5, 3, 8, 24, 2, 5]
    assert result["truncated"] == [False] * 3 + [True] + [False] * 2
    (alone,) = ask(sparse_client, "/encode", inputs=TEXTS[0])["embeddings"]
    np.testing.assert_allclose(
        dense([alone], actual.shape[1])[0], expected[0], rtol=1e-4, atol=1e-5
    )


def test_prompts_and_token_ids(
    sparse_client: TestClient,
    sparse_encoder: tuple[SparseEncoder, Artifact],
    expected: Any,  # noqa: ANN401
) -> None:
    oracle = sparse_encoder[0]
    prompted = oracle.encode_query(TEXTS[:1], convert_to_sparse_tensor=False).numpy()
    result = ask(sparse_client, "/encode", inputs=TEXTS[:1], prompt_name="query")
    actual = dense(result["embeddings"], prompted.shape[1])
    np.testing.assert_allclose(actual, prompted, rtol=1e-4, atol=1e-5)
    result = ask(sparse_client, "/encode", inputs=[[0, 5, 6, 7, 2]])
    actual = dense(result["embeddings"], prompted.shape[1])
    np.testing.assert_allclose(actual, expected[:1], rtol=1e-4, atol=1e-5)


def test_python_vectors_and_scores_equal_those_of_sentence_transformers(
    sparse_encoder: tuple[SparseEncoder, Artifact],
    expected: Any,  # noqa: ANN401
) -> None:
    oracle, artifact = sparse_encoder
    with vitrine.SyncModel(artifact.path, vitrine.ModelOptions(threads=2)) as model:
        result = model.encode_sparse(TEXTS)
        scores = model.score(TEXTS[1], TEXTS)
    for vector, row in zip(result.vectors, expected, strict=True):
        np.testing.assert_allclose(vector.weights, row[vector.ids], rtol=1e-4, atol=1e-5)
    assert result.width == expected.shape[1]
    assert scores.kind == "dot"
    # Dense tensors, because torch warns of products of sparse ones.
    query = oracle.encode_query(TEXTS[1:2], convert_to_sparse_tensor=False)
    documents = oracle.encode_document(TEXTS, convert_to_sparse_tensor=False)
    similarity = oracle.similarity(query, documents)
    np.testing.assert_allclose(scores.scores, similarity[0].numpy(), rtol=1e-4)


@pytest.mark.parametrize("path", ["/tei/embed_sparse", "/tei"])
def test_tei_gives_indices_and_values(sparse_client: TestClient, expected: Any, path: str) -> None:  # noqa: ANN401
    result = ask(sparse_client, path, inputs=TEXTS, truncate=True)
    named = [
        {"ids": [v["index"] for v in row], "weights": [v["value"] for v in row]} for row in result
    ]
    actual = dense(named, expected.shape[1])
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert sparse_client.get("/tei/info").json()["model_type"] == {
        "embedding": {"pooling": "splade"}
    }


@pytest.mark.parametrize(
    ("body", "pointer", "message"),
    [
        ({"inputs": ["w5", ""]}, "/inputs/1", "the text is empty"),
        ({"inputs": "w5", "output": "pooled"}, None, "it can encode texts into sparse vectors"),
        ({"inputs": "w5", "output": "tokens"}, None, "it can encode texts into sparse vectors"),
        ({"inputs": "w5", "dimensions": 4}, "/dimensions", 'does not apply to the output "sparse"'),
        ({"inputs": "w5", "normalize": True}, "/normalize", "does not apply"),
        ({"inputs": "w5", "encoding": "base64"}, "/encoding", "does not apply"),
    ],
)
def test_invalid_requests_are_refused(
    sparse_client: TestClient, body: Json, pointer: str | None, message: str
) -> None:
    problem = refused(sparse_client, "/encode", **body)
    assert (problem["status"], problem.get("pointer")) == (422, pointer)
    assert message in problem["detail"]


def test_other_models_and_routes_say_what_they_can_do(
    sparse_client: TestClient, client: TestClient
) -> None:
    wrong_model(client, "/encode", inputs="cat", output="sparse")
    wrong_model(sparse_client, "/debug/flow", texts=["w5"], objective={"type": "cosine"})
    info = sparse_client.get("/info").json()
    assert (info["outputs"], info["dimensions"], info["pooling"]) == (["sparse"], None, [])
