"""Gradient routes of models with other similarities than the cosine."""

import shutil
from collections.abc import Iterator

import numpy as np
import pytest
from sentence_transformers.util import SimilarityFunction
from starlette.testclient import TestClient

from models.artifact import Artifact
from models.manifest import MANIFEST
from tests.models.checkpoints import edit_json
from tests.service.debug.conftest import CAT, FELINE, ask, problem_of, service_of

pytestmark = pytest.mark.slow

DOG = "A dog ran."


@pytest.fixture(scope="module", params=["dot", "euclidean", "manhattan"])
def similarity(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def client(
    similarity: str, small_artifact: Artifact, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestClient]:
    """A client of the small model, with another similarity of vectors of any length."""
    folder = tmp_path_factory.mktemp("similarity") / similarity
    shutil.copytree(small_artifact.path, folder)
    edit_json(folder / MANIFEST, similarity=similarity, normalize=False)
    with service_of(Artifact.load(folder)) as client:
        yield client


def expected(client: TestClient, similarity: str, a: str, b: str) -> float:
    """Return the similarity of the served vectors of two texts."""
    vectors = client.post("/encode", json={"inputs": [a, b]}).json()["embeddings"]
    x, y = np.array(vectors, np.float32)
    assert np.linalg.norm(x) != pytest.approx(1, abs=0.01)
    compare = SimilarityFunction.to_similarity_pairwise_fn(similarity)
    return float(compare(x[None], y[None])[0])


def test_attributed_similarity_is_the_served_score(client: TestClient, similarity: str) -> None:
    score = client.post("/score", json={"queries": CAT, "documents": FELINE}).json()["scores"][0]
    result = ask(
        client, "attribute", text=CAT, target={"type": "similarity", "text": FELINE}, tolerance=0.05
    )
    assert result["value"] == pytest.approx(score, rel=1e-5)
    assert score == pytest.approx(expected(client, similarity, CAT, FELINE), rel=1e-5)
    change = result["value"] - result["baseline_value"]
    assert result["sum"] == pytest.approx(change, abs=0.05 * abs(change))
    margin = {"type": "margin", "positive": FELINE, "negative": DOG}
    result = ask(client, "attribute", text=CAT, target=margin, method="saliency")
    assert result["value"] == pytest.approx(
        score - expected(client, similarity, CAT, DOG), abs=1e-4
    )


def test_cosine_is_no_target_of_other_similarities(client: TestClient, similarity: str) -> None:
    body = {"text": CAT, "target": {"type": "cosine", "text": FELINE}}
    problem = problem_of(client, "attribute", body)
    assert (problem["code"], problem["pointer"]) == ("wrong_target", "/target/type")
    assert f"embedding models with the similarity {similarity} do not have" in problem["detail"]
    assert "their targets: similarity, margin, dot, dim, norm" in problem["detail"]
    capabilities = client.get("/debug/capabilities").json()
    assert capabilities["similarity"] == similarity
    assert capabilities["targets"] == ["similarity", "margin", "dot", "dim", "norm"]
    assert ("attribute/pair" in capabilities["routes"]) == (similarity == "dot")


def test_pairs_add_up_to_the_dot_product_and_distances_have_none(
    client: TestClient, similarity: str
) -> None:
    response = client.post("/debug/attribute/pair", json={"a": CAT, "b": FELINE})
    if similarity != "dot":
        assert (response.status_code, response.json()["code"]) == (422, "wrong_model")
        assert response.json()["detail"].endswith(f" is {similarity}")
        return
    result = response.json()
    dot = expected(client, "dot", CAT, FELINE)
    assert result["similarity"] == pytest.approx(dot, rel=1e-5)
    assert np.array(result["matrix"]).sum() == pytest.approx(dot, rel=1e-4)
