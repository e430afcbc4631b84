"""Multi-vectors over HTTP, against sentence-transformers."""

import asyncio
import base64
import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling
from starlette.testclient import TestClient

import vitrine
from models.artifact import Artifact
from service.inference import call_options
from service.inference.results import token_pooling
from service.inference.results import vectors as vector_results
from service.serve_command import example_request
from tests.service.api.conftest import client_of
from tests.service.api.posting import ask, refused, wrong_model

pytestmark = pytest.mark.slow

TEXTS = ["The cat sat.", "rain, rain!", "a cat on a mat " * 6]
QUERIES = ["Where did the cat sit?", "rain", "Who?"]
NOTHING = [" ", "\0", "\u200b", "!\0?"]

Json = dict[str, Any]
Multi = tuple[MultiVectorEncoder, Artifact]


@pytest.mark.parametrize("fields", [{}, {"output": "multi"}, {"normalize": True}])
@pytest.mark.parametrize("prompt", ["query", "document", None])
def test_vectors_equal_those_of_sentence_transformers(
    multi_client: TestClient, multi_encoder: Multi, prompt: str | None, fields: Json
) -> None:
    oracle = multi_encoder[0]
    encode = {"query": oracle.encode_query, "document": oracle.encode_document, None: oracle.encode}
    texts = [*TEXTS, *NOTHING]
    expected = encode[prompt](texts, convert_to_numpy=True)
    result = ask(multi_client, "/encode", inputs=texts, prompt_name=prompt, **fields)
    assert result["dimensions"] == 12
    for vectors, ids, offsets, own in zip(
        result["embeddings"], result["ids"], result["offsets"], expected, strict=True
    ):
        assert len(ids) == len(offsets) == len(own)
        np.testing.assert_allclose(vectors, own, rtol=1e-4, atol=1e-5)


def test_lengths_of_queries_and_documents(multi_client: TestClient) -> None:
    queries = ask(multi_client, "/encode", inputs=TEXTS, prompt_name="query")
    assert (queries["tokens"], queries["truncated"]) == ([16] * 3, [False, False, True])
    documents = ask(multi_client, "/encode", inputs=TEXTS, prompt_name="document")
    assert (documents["tokens"], documents["truncated"]) == ([9, 9, 20], [False, False, True])
    # Without punctuation, of which the prompt has two characters.
    assert list(map(len, documents["ids"])) == [6, 5, 18]


@pytest.fixture(scope="module")
def pooling(multi_encoder: Multi, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A copy of the artifact, with pooling of the documents' tokens."""
    folder = tmp_path_factory.mktemp("pooling") / "artifact"
    shutil.copytree(multi_encoder[1].path, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["token_rules"]["document"] |= {
        "pool_factor": 2.0,
        "protected": 1,
        "normalizes_pooled": True,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return Artifact.load(folder)


@pytest.fixture(scope="module")
def pooling_client(pooling: Artifact) -> Iterator[TestClient]:
    yield from client_of(pooling)


def test_pooled_documents_name_the_vector_of_each_token(
    multi_client: TestClient, pooling_client: TestClient
) -> None:
    whole = ask(multi_client, "/encode", inputs=TEXTS, prompt_name="document")
    assert "clusters" not in whole
    expected = HierarchicalTokenPooling(2.0).pool(list(map(torch.tensor, whole["embeddings"])))
    pooled = ask(pooling_client, "/encode", inputs=TEXTS, prompt_name="document")
    assert "clusters" not in ask(pooling_client, "/encode", inputs=TEXTS, prompt_name="query")
    body = {"inputs": TEXTS, "prompt_name": "document", "output": ["multi"]}
    listed = ask(pooling_client, "/encode", **body)["outputs"]["multi"]
    assert listed["clusters"] == pooled["clusters"]
    assert (pooled["ids"], pooled["offsets"]) == (whole["ids"], whole["offsets"])
    for vectors, clusters, ids, own in zip(
        pooled["embeddings"], pooled["clusters"], pooled["ids"], expected, strict=True
    ):
        np.testing.assert_allclose(vectors, own.numpy(), rtol=0, atol=1e-5)
        assert (len(clusters), {*clusters}) == (len(ids), {*range(len(vectors))})
    assert "pools the vectors of tokens" in wrong_model(pooling_client, "/debug/parity")


def test_example_at_startup_ranks_with_pooled_documents(
    pooling: Artifact, pooling_client: TestClient
) -> None:
    path, body = example_request(pooling.manifest)
    assert path == "/rerank"
    assert len(ask(pooling_client, path, **body)["results"]) == 2


def test_text_with_too_many_vectors_to_pool_is_named(
    pooling_client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = ["a cat", "a cat", "the cat sat on a mat. " * 3, "rain"]
    pairs = {"queries": "cat", "documents": documents}
    chunked: Json = {"query": "cat", "documents": ["! " * 40, documents[2]]}
    chunked["chunking"] = {"strategy": "sentences", "size": 9}
    monkeypatch.setattr(token_pooling, "MAX_POOLED", 7)
    for path, body, pointer in (
        ("/encode", {"inputs": documents, "prompt_name": "document"}, "/inputs/2"),
        ("/score", pairs, "/documents/2"),
        ("/score", {**pairs, "queries": ["cat", "dog", "cat", "cat"]}, "/documents/2"),
        ("/rerank", {"query": "cat", "documents": documents}, "/documents/2"),
        ("/rerank", chunked, "/documents/1"),
    ):
        problem = refused(pooling_client, path, **body)
        actual = problem["code"], problem["index"], problem["pointer"]
        assert actual == ("too_many_tokens", int(pointer[-1]), pointer), (path, problem)
        assert "at most 7 can be pooled" in problem["detail"]


def test_pooling_leaves_the_threads_of_other_requests(
    pooling: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def pool(*args: Any) -> Any:  # noqa: ANN401
        has_begun.set()
        may_end.wait(60)
        return token_pooling.pool_vectors(*args)

    monkeypatch.setattr(vector_results, "pool_vectors", pool)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        async with await vitrine.open_model(pooling.path) as model:
            chunking = vitrine.Chunking()
            calls = [
                asyncio.ensure_future(model.encode_multi(TEXTS, prompt_name="document")),
                asyncio.ensure_future(model.score("cat", TEXTS)),
                asyncio.ensure_future(model.rerank("cat", TEXTS, chunking=chunking)),
            ]
            try:
                with ThreadPoolExecutor(1) as own:
                    assert await loop.run_in_executor(own, has_begun.wait, 60)
                assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 30) == "free"
            finally:
                may_end.set()
            await asyncio.gather(*calls)

    asyncio.run(run())


def test_deadline_ends_pooling_between_texts(
    pooling: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    pooled = 0

    def pool(*args: Any) -> Any:  # noqa: ANN401
        nonlocal now, pooled
        now += 1000
        pooled += 1
        return token_pooling.pool_vectors(*args)

    monkeypatch.setattr(vector_results, "pool_vectors", pool)
    monkeypatch.setattr(call_options, "time", SimpleNamespace(monotonic=lambda: now))
    with vitrine.SyncModel(pooling.path, vitrine.ModelOptions(threads=1)) as model:
        with pytest.raises(vitrine.DeadlineExceeded, match="deadline of 999 s exceeded"):
            model.encode_multi(TEXTS, prompt_name="document", timeout_s=999)
        assert pooled == 1
        for count, chunking in ((2, None), (3, vitrine.Chunking())):
            with pytest.raises(vitrine.DeadlineExceeded, match="deadline of 999 s exceeded"):
                model.score("cat", TEXTS, chunking=chunking, timeout_s=999)
            assert pooled == count


def test_base64_has_the_same_vectors(multi_client: TestClient) -> None:
    body = {"inputs": TEXTS, "prompt_name": "document"}
    expected = ask(multi_client, "/encode", **body)["embeddings"]
    coded = ask(multi_client, "/encode", **body, encoding="base64")["embeddings"]
    for text, vectors in zip(coded, expected, strict=True):
        actual = np.frombuffer(base64.b64decode(text), "<f4").reshape(-1, 12)
        np.testing.assert_array_equal(actual, np.array(vectors, np.float32))


def test_vectors_without_normalisation_have_the_lengths_of_the_projection(
    multi_client: TestClient,
) -> None:
    plain = ask(multi_client, "/encode", inputs=TEXTS[:1], normalize=False)["embeddings"][0]
    units = ask(multi_client, "/encode", inputs=TEXTS[:1])["embeddings"][0]
    lengths = np.linalg.norm(plain, axis=1)
    assert np.abs(lengths - 1).min() > 0.01
    np.testing.assert_allclose(plain / lengths[:, None], units, atol=1e-5)


def test_scores_equal_those_of_sentence_transformers(
    multi_client: TestClient, multi_encoder: Multi
) -> None:
    oracle = multi_encoder[0]
    expected = oracle.similarity(oracle.encode_query(QUERIES), oracle.encode_document(TEXTS))
    for query, own in zip(QUERIES, expected.numpy(), strict=True):
        result = ask(multi_client, "/score", queries=query, documents=TEXTS)
        np.testing.assert_allclose(result["scores"], own, rtol=1e-4)
    assert (result["kind"], result["tokens"]) == ("maxsim", [25, 25, 36])
    assert result["truncated"] == [False, False, True]
    pairs = ask(multi_client, "/score", queries=QUERIES, documents=TEXTS)["scores"]
    np.testing.assert_allclose(pairs, np.diag(expected), rtol=1e-4)


def test_scores_have_no_limit_of_token_vectors(
    multi_client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = multi_client.app.state.vitrine.registry.current()  # type: ignore[attr-defined]
    monkeypatch.setitem(model.__dict__, "max_token_vectors", 20)
    problem = refused(multi_client, "/encode", inputs=TEXTS)
    assert (problem["status"], problem["code"]) == (422, "too_many_tokens")
    ask(multi_client, "/score", queries=QUERIES, documents=TEXTS)


@pytest.mark.parametrize(
    ("body", "pointer", "message"),
    [
        ({"inputs": ["cat", ""]}, "/inputs/1", "the text is empty"),
        ({"inputs": "cat", "prompt_name": "passage"}, "/prompt_name", "document, query"),
        ({"inputs": "cat", "output": "pooled"}, None, "it can encode texts into multi-vectors"),
        ({"inputs": "cat", "output": "sparse"}, None, "it can encode texts into multi-vectors"),
        ({"inputs": "cat", "dimensions": 4}, "/dimensions", 'not apply to the output "multi"'),
        ({"inputs": "cat", "truncate_dim": 4}, "/truncate_dim", "does not apply"),
        (
            {"inputs": "a " * 30, "prompt_name": "query", "on_overflow": "error"},
            "/inputs",
            "more than 16 tokens",
        ),
        (
            {"inputs": "a " * 30, "prompt_name": "document", "on_overflow": "error"},
            "/inputs",
            "more than 20 tokens",
        ),
    ],
)
def test_invalid_requests_are_refused(
    multi_client: TestClient, body: Json, pointer: str | None, message: str
) -> None:
    problem = refused(multi_client, "/encode", **body)
    assert (problem["status"], problem.get("pointer")) == (422, pointer)
    assert message in problem["detail"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/debug/attribute", {"text": "cat", "target": {"type": "norm"}}, 422),
        ("/classify", {"inputs": "cat"}, 422),
        ("/v1/embeddings", {"input": "cat", "model": "saved"}, 400),
        ("/tei/embed", {"inputs": "cat"}, 424),
        ("/tei/embed_sparse", {"inputs": "cat"}, 424),
        ("/tei/rerank", {"query": "cat", "texts": ["dog"]}, 424),
        ("/tei", {"inputs": "cat"}, 424),
    ],
)
def test_routes_of_other_models_refuse(
    multi_client: TestClient, path: str, body: Json, status: int
) -> None:
    response = multi_client.post(path, json=body)
    assert response.status_code == status
    expected = "do not have this target" if "debug" in path else "encode texts into multi-vectors"
    assert expected in response.text


def test_other_models_refuse_multi_vectors(client: TestClient) -> None:
    detail = wrong_model(client, "/encode", inputs="cat", output="multi")
    assert "cannot encode texts into multi-vectors" in detail


def test_info_has_the_lengths_of_queries_and_documents(multi_client: TestClient) -> None:
    info = multi_client.get("/info").json()
    assert (info["outputs"], info["dimensions"], info["pooling"]) == (["multi"], 12, [])
    assert info["max_tokens_by_prompt"] == {"query": 16, "document": 20}
    assert info["prompts"] == ["document", "query"]
    assert multi_client.get("/tei/info").json()["model_type"] == {"embedding": {"pooling": "none"}}
