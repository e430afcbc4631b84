"""Clients of other services, each in one call and one error."""

import ast
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import CrossEncoder
from starlette.testclient import TestClient

pytestmark = pytest.mark.slow  # starts processes

FOLDER = Path(__file__).with_name("clients")
# Made by the Makefile: the clients do not agree on versions with what the service is tested with.
INSTALLED = Path(__file__).parents[4] / ".venv-bench"
PYTHON = INSTALLED / "clients/bin/python"
TEXTS = ["The cat sat on the mat.", "A feline rested on the rug."]
QUERY, DOCUMENTS = "w7 w9", ["w21 w5", "w8 w15 w33 w6", "w40"]

CLIENTS = {
    "llama_index_openai_like": "the text is empty",
    # It does not look at the status, and takes the error for vectors.
    "llama_index_tei": "'error_type': 'Empty'",
    "haystack_openai": "the text is empty",
    "haystack_tei": "`inputs` cannot be empty (at index 0)",
    "litellm_openai": "the text is empty",
    "litellm_huggingface": "`inputs` cannot be empty (at index 0)",
    "litellm_vllm": "the text is empty",
    "litellm_jina": "the text is empty",
    "litellm_cohere": "/texts/0: the text is empty",
    "chromadb_openai": "the text is empty",
    "pydantic_ai": "the text is empty",
    "cohere_v2": "/texts/0: the text is empty",
    "cohere_v1": "/texts/0: the text is empty",
    "langchain_cohere": "/texts/0: the text is empty",
}


RERANK_CLIENTS = {
    "cohere_v2": "/documents/3: the text has 120000 characters",
    "cohere_v1": "/documents/3: the text has 120000 characters",
    "langchain_cohere": "/documents/3: the text has 120000 characters",
    "langchain_jina": "RuntimeError: /documents/3: the text has 120000 characters",
    # It does not look at the status, and takes the error for scores.
    "llama_index_tei": "AssertionError",
    "litellm_cohere": "/documents/3: the text has 120000 characters",
    "litellm_jina": "/documents/3: the text has 120000 characters",
    "litellm_vllm": "input 3: the text has 120000 characters",
    "litellm_huggingface": "the limit is 100000 (at index 3)",
}


@pytest.fixture(scope="module")
def expected(client: TestClient) -> list[list[float]]:
    vectors: list[list[float]] = client.post("/encode", json={"inputs": TEXTS}).json()["embeddings"]
    return vectors


@pytest.fixture(scope="module")
def embedded(url: str, key: str) -> dict[str, dict[str, Any]]:
    """Results of the clients by name; one process imports what several of them use."""
    results: dict[str, dict[str, Any]] = result_of(PYTHON, FOLDER / "embed.py", url, key, *TEXTS)
    return results


@pytest.fixture(scope="module")
def reranked(rerank_url: str, key: str) -> dict[str, dict[str, Any]]:
    """Results of the clients by name."""
    arguments = (rerank_url, key, "a-reranker", QUERY, *DOCUMENTS)
    results: dict[str, dict[str, Any]] = result_of(PYTHON, FOLDER / "rerank.py", *arguments)
    return results


def result_of(*command: str | Path) -> Any:  # noqa: ANN401 - JSON
    quiet = {"ANONYMIZED_TELEMETRY": "False", "DO_NOT_TRACK": "1"}
    done = subprocess.run(
        [*map(str, command)], env={**os.environ, **quiet}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_client_of_the_script_is_tested() -> None:
    for script, clients in (("embed.py", CLIENTS), ("rerank.py", RERANK_CLIENTS)):
        functions = ast.walk(ast.parse((FOLDER / script).read_text()))
        names = {f.name for f in functions if isinstance(f, ast.FunctionDef)}
        names = {name for name in names if not name.startswith("_")}
        assert names - {"embed", "rerank", "main"} == clients.keys()


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.skipif(not PYTHON.exists(), reason="no clients: make test installs")
def test_a_python_client_gets_vectors_and_errors(
    embedded: dict[str, dict[str, Any]], expected: list[list[float]], name: str
) -> None:
    np.testing.assert_allclose(embedded[name]["vectors"], expected, atol=1e-6)
    assert CLIENTS[name] in embedded[name]["error"]


@pytest.mark.parametrize("name", RERANK_CLIENTS)
@pytest.mark.skipif(not PYTHON.exists(), reason="no clients: make test installs")
def test_rerank_clients_get_scores_and_errors(
    reranked: dict[str, dict[str, Any]], cross_encoder: CrossEncoder, name: str
) -> None:
    expected = cross_encoder.predict([(QUERY, document) for document in DOCUMENTS])
    np.testing.assert_allclose(reranked[name]["scores"], expected, rtol=1e-4)
    assert RERANK_CLIENTS[name] in reranked[name]["error"]


@pytest.mark.skipif(
    shutil.which("node") is None or not (INSTALLED / "node_modules").exists(),
    reason="no Node.js client: make test installs it, where there is npm",
)
def test_openais_client_for_javascript_gets_vectors_and_errors(
    url: str, key: str, expected: list[list[float]], tmp_path: Path
) -> None:
    # A module is looked for beside the script that imports it.
    (tmp_path / "node_modules").symlink_to(INSTALLED / "node_modules")
    script = shutil.copy(FOLDER / "embed.mjs", tmp_path)
    found = result_of("node", script, url, key, *TEXTS)
    np.testing.assert_allclose(found["vectors"], expected, atol=1e-6)
    assert found["error"] == "BadRequestError: 400 input 0: the text is empty"
