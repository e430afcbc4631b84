"""A service in a process of its own, for the clients of other servers."""

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from tests.serving import process, url_of

KEY = "a-key-that-encodes"


@pytest.fixture(scope="package")
def url(artifact: Artifact) -> Iterator[str]:
    """The address of a service with the default model."""
    yield from _url_of(artifact)


@pytest.fixture(scope="package")
def rerank_url(reranker: Artifact) -> Iterator[str]:
    """The address of a service with a reranker."""
    yield from _url_of(reranker, VITRINE_MODEL__NAME="a-reranker")


@pytest.fixture(scope="package")
def classify_url(classifier: Artifact) -> Iterator[str]:
    """The address of a service with a classifier."""
    yield from _url_of(classifier)


@pytest.fixture(scope="package")
def entailment_url(entailment: Artifact) -> Iterator[str]:
    """The address of a service with a model of language inference."""
    yield from _url_of(entailment)


def _url_of(artifact: Artifact, **settings: str) -> Iterator[str]:
    settings["VITRINE_AUTH__KEYS"] = f'[{{"name": "tests", "key": "{KEY}", "scopes": ["encode"]}}]'
    with process(VITRINE_MODEL__PATH=str(artifact.path), **settings) as started:
        yield url_of(started)


@pytest.fixture(scope="session")
def client(minilm_client: TestClient) -> TestClient:
    """The client of the default model's service: its vectors are compared with those of others."""
    return minilm_client


@pytest.fixture(scope="session")
def key() -> str:
    return KEY
