"""Static models over HTTP, against Model2Vec."""

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from model2vec import StaticModel

from models.export.exporter import export
from models.export.sources import resolve
from tests.models.static_models import save_model2vec, save_static_embedding, word_pieces
from tests.service.api.conftest import client_of

TEXTS = ["The cat sat on the mat.", "語 文", "Why is the sky blue?"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StaticModel, TestClient]]:
    """A model of Model2Vec, and a client of a service with it."""
    folder: Path = tmp_path_factory.mktemp("static")
    oracle = save_model2vec(folder / "model", word_pieces(), normalize=True)
    artifact, _ = export(resolve(str(folder / "model")), folder / "artifact")
    for client in client_of(artifact):
        yield oracle, client


def test_vectors_of_all_routes_equal_those_of_model2vec(
    served: tuple[StaticModel, TestClient],
) -> None:
    oracle, client = served
    expected = oracle.encode(TEXTS)
    own = client.post("/encode", json={"inputs": TEXTS}).json()
    tei = client.post("/tei/embed", json={"inputs": TEXTS}).json()
    body = {"model": "model", "input": TEXTS, "encoding_format": "base64"}
    encoded = client.post("/v1/embeddings", json=body).json()["data"]
    openai = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in encoded]
    for actual in (own["embeddings"], tei, openai):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def test_info_describes_the_table(served: tuple[StaticModel, TestClient]) -> None:
    _, client = served
    info = client.get("/info").json()
    assert info["family"] == "static"
    assert (info["engine"], info["precision"]) == ("numpy", "float32")
    assert (info["dimensions"], info["limits"]["max_tokens"]) == (16, 512)


def test_tei_info_of_a_table_without_a_limit_allows_a_request(tmp_path: Path) -> None:
    save_static_embedding(tmp_path / "model", word_pieces())
    artifact, _ = export(resolve(str(tmp_path / "model")), tmp_path / "artifact")
    for client in client_of(artifact):
        info = client.get("/tei/info").json()
    assert info["max_input_length"] > 1_000_000
    assert info["max_concurrent_requests"] == 1


def test_score_of_an_unknown_word_is_zero_and_has_explanations(
    served: tuple[StaticModel, TestClient],
) -> None:
    oracle, client = served
    body = {"queries": "the cat", "documents": ["語", "a cat"], "explain": True}
    response = client.post("/score", json=body)
    assert response.status_code == 200
    a, b = oracle.encode(["the cat", "a cat"])
    np.testing.assert_allclose(response.json()["scores"], [0, a @ b], atol=1e-6)


def test_gradient_routes_refuse_a_static_model(served: tuple[StaticModel, TestClient]) -> None:
    _, client = served
    for response in (client.post("/debug/parity", json={}), client.get("/debug/capabilities")):
        assert response.json()["code"] == "wrong_model"
        assert "is static: it has no network" in response.json()["detail"]
