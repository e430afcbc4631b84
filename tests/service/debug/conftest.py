"""Services with the gradient routes of a small model of each kind, and requests to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from starlette.testclient import TestClient
from transformers import AutoModel

from models.artifact import Artifact
from service.app import create_app
from service.settings import DebugSettings, EngineSettings, LimitSettings, ModelSettings, Settings
from tests.conftest import FamilyArtifact
from tests.service.api.conftest import (  # noqa: F401 - fixtures
    classifier,
    cross_encoder,
    multi_encoder,
    reranker,
    sparse_encoder,
)
from tests.service.debug.held_worker import NO_FILE, held_workers
from tests.serving import serving

CAT = "The cat sat on the mat."
FELINE = "A feline rested on the rug."
COSINE = {"type": "cosine", "text": FELINE}

Json = dict[str, Any]


@contextmanager
def service_of(
    artifact: Artifact, hold: Path = Path(NO_FILE), **debug: object
) -> Iterator[TestClient]:
    """Yield a client of a service with the gradient routes of a model.

    Args:
        artifact: Artifact of the model.
        hold: File; while it exists, no gradient job runs.
        debug: Settings of the gradient routes.
    """
    # No deadline is hit by accident on a slow machine.
    chosen = {"enabled": True, "hosts": ("testserver",), "device": "cpu", "deadline_s": 300}
    settings = Settings(
        model=ModelSettings(path=artifact.path),
        engine=EngineSettings(threads=1, timeout_s=300),
        limits=LimitSettings(request_s=300),
        debug=DebugSettings(**{**chosen, **debug}),
    )
    with held_workers(hold):
        app = create_app(settings)
    with serving(app) as client:
        yield client


def ask(client: TestClient, path: str, **body: object) -> Json:
    """Return the response of a gradient route, whose status must be 200."""
    response = client.post(f"/debug/{path}", json=body)
    assert response.status_code == 200, response.text
    result: Json = response.json()
    return result


def problem_of(client: TestClient, path: str, body: object, status: int = 422) -> Json:
    """Return the error of a gradient route, which must not repeat "secret" from the request."""
    response = client.post(f"/debug/{path}", json=body)
    assert response.status_code == status, response.text
    assert "secret" not in response.text
    problem: Json = response.json()
    return problem


def vector(client: TestClient, text: str, *, normalize: bool = True) -> np.ndarray:
    """Return the served vector of a text."""
    result = client.post("/encode", json={"inputs": text, "normalize": normalize}).json()
    return np.array(result["embeddings"][0])


@pytest.fixture(scope="package")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file; while it exists, no gradient job of `client` runs."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="package")
def client(small_artifact: Artifact, hold: Path) -> Iterator[TestClient]:
    with service_of(small_artifact, hold) as client:
        yield client


@pytest.fixture(scope="package")
def ranker(reranker: Artifact) -> Iterator[TestClient]:  # noqa: F811
    with service_of(reranker) as client:
        yield client


@pytest.fixture(scope="package")
def labeler(classifier: Artifact) -> Iterator[TestClient]:  # noqa: F811
    with service_of(classifier) as client:
        yield client


@pytest.fixture(scope="package")
def splade(sparse_encoder: tuple[SparseEncoder, Artifact]) -> Iterator[TestClient]:  # noqa: F811
    with service_of(sparse_encoder[1]) as client:
        yield client


@pytest.fixture(scope="package")
def colbert(
    multi_encoder: tuple[MultiVectorEncoder, Artifact],  # noqa: F811
) -> Iterator[TestClient]:
    with service_of(multi_encoder[1]) as client:
        yield client


@pytest.fixture(scope="package")
def embedder(family_artifact: FamilyArtifact) -> Iterator[TestClient]:
    with service_of(family_artifact("roberta")) as client:
        yield client


@pytest.fixture(scope="package")
def roberta(family_artifact: FamilyArtifact) -> Any:  # noqa: ANN401 - a model of transformers
    return AutoModel.from_pretrained(family_artifact("roberta").path / "source").eval()
