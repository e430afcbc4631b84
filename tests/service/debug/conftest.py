"""Clients of services with gradient routes, for small models of every kind but embeddings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from starlette.testclient import TestClient

from models.artifact import Artifact
from service.app import create_app
from service.settings import DebugSettings, EngineSettings, LimitSettings, ModelSettings, Settings
from tests.service.api.conftest import (  # noqa: F401 - fixtures
    classifier,
    cross_encoder,
    multi_encoder,
    reranker,
    sparse_encoder,
)
from tests.service.debug.held_worker import NO_FILE, held_workers
from tests.serving import serving


def debugging(artifact: Artifact) -> Settings:
    """Return settings of a service with the gradient routes of a model."""
    # No deadline is hit by accident on a slow machine.
    return Settings(
        model=ModelSettings(path=artifact.path),
        engine=EngineSettings(threads=1, timeout_s=300),
        limits=LimitSettings(request_s=300),
        debug=DebugSettings(enabled=True, hosts=("testserver",), device="cpu", deadline_s=300),
    )


def client_of(artifact: Artifact) -> Iterator[TestClient]:
    """Yield a client of a service with the gradient routes of a model."""
    with held_workers(Path(NO_FILE)):
        app = create_app(debugging(artifact))
    with serving(app) as client:
        yield client


def ask(client: TestClient, path: str, **body: object) -> dict[str, Any]:
    """Return the response of a gradient route, whose status must be 200."""
    response = client.post(f"/debug/{path}", json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


@pytest.fixture(scope="package")
def ranker(reranker: Artifact) -> Iterator[TestClient]:  # noqa: F811
    yield from client_of(reranker)


@pytest.fixture(scope="package")
def labeler(classifier: Artifact) -> Iterator[TestClient]:  # noqa: F811
    yield from client_of(classifier)


@pytest.fixture(scope="package")
def splade(sparse_encoder: tuple[SparseEncoder, Artifact]) -> Iterator[TestClient]:  # noqa: F811
    yield from client_of(sparse_encoder[1])


@pytest.fixture(scope="package")
def colbert(
    multi_encoder: tuple[MultiVectorEncoder, Artifact],  # noqa: F811
) -> Iterator[TestClient]:
    yield from client_of(multi_encoder[1])
