"""Inference-free sparse models over HTTP and from Python, against sentence-transformers."""

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SparseEncoder
from starlette.testclient import TestClient

import vitrine
from models.artifact import Artifact, sha256
from models.manifest import ArtifactError
from service.inference.batching.runs import ItemFailed
from service.inference.errors import InferenceFailed, NotReady, Overloaded
from service.inference.results.query_table import look_up, read_query_weights
from service.inference.results.vectors import SparseVector
from service.inference.tokenizing.tokenizer import TextTokenizer
from tests.models.checkpoints import write_json
from tests.service.api.posting import ask, post, refused, stages
from tests.serving import ready_model, values_of

pytestmark = pytest.mark.slow

QUERY = "Where did the cat sit?"
TEXTS = [
    QUERY,
    "the cat the cat THE CAT",
    "naïve \U0001fae8 Straße ⵣⵣ 東京",
    "[SEP] a [MASK] of [PAD] tokens",
    "unaffable antidisestablishmentarianism " * 9,
    "a",
]
DOCUMENTS = ["The cat sat on the mat.", "It rained, rained, rained.", "Cats? Where!"]
THREADS = vitrine.ModelOptions(threads=2)

Json = dict[str, Any]
Oracle = tuple[SparseEncoder, Artifact]


def rows_of(encoder: SparseEncoder, texts: Sequence[str], prompt_name: str | None) -> Any:  # noqa: ANN401
    """Return sentence-transformers' vectors `(B, V)`, each computed alone.

    In a batch it would also give zero to the padding token of a text that contains it.
    """
    functions = {"query": encoder.encode_query, "document": encoder.encode_document}
    encode = functions.get(prompt_name or "", partial(encoder.encode, prompt_name=prompt_name))
    return np.stack([encode(text, convert_to_sparse_tensor=False).numpy() for text in texts])


def dense(vectors: Sequence[Any], width: int) -> Any:  # noqa: ANN401
    rows = np.zeros((len(vectors), width), np.float32)
    for row, vector in zip(rows, vectors, strict=True):
        own: Json = vector._asdict() if isinstance(vector, SparseVector) else vector
        assert list(own["ids"]) == sorted(set(own["ids"]))
        assert 0 not in own["weights"]
        row[own["ids"]] = own["weights"]
    return rows


def test_weights_of_queries_are_exactly_those_of_sentence_transformers(
    inference_free: Oracle, inference_free_client: TestClient
) -> None:
    oracle, _ = inference_free
    expected = rows_of(oracle, TEXTS, "query")
    result = ask(inference_free_client, "/encode", inputs=TEXTS, prompt_name="query")
    actual = dense(result["embeddings"], result["dimensions"])
    np.testing.assert_array_equal(actual, expected)
    assert (expected < 0).any()
    ids = oracle.tokenizer([f"what is {text}" for text in TEXTS], add_special_tokens=False)
    lengths = [len(row) for row in ids["input_ids"]]
    assert result["tokens"] == [min(length, 16) for length in lengths]
    assert result["truncated"] == [length > 16 for length in lengths]
    assert {True, False} == set(result["truncated"])


@pytest.mark.parametrize("prompt_name", ["document", None, "title"])
def test_other_texts_pass_through_the_network(
    inference_free: Oracle, inference_free_client: TestClient, prompt_name: str | None
) -> None:
    oracle, _ = inference_free
    expected = rows_of(oracle, TEXTS, prompt_name)
    result = ask(inference_free_client, "/encode", inputs=TEXTS, prompt_name=prompt_name)
    actual = dense(result["embeddings"], result["dimensions"])
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert ((actual > 1e-4) == (expected > 1e-4)).all()
    assert max(result["tokens"]) == 24


def test_token_ids_of_queries_are_looked_up_without_the_prompt(
    inference_free: Oracle, inference_free_client: TestClient
) -> None:
    _, artifact = inference_free
    weights = np.load(artifact.path / "query_weights.npy", allow_pickle=False)
    ids = [[1996, 4937, 4937, 7], list(range(2000, 2030)), [0]]
    result = ask(inference_free_client, "/encode", inputs=ids, prompt_name="query")
    expected = np.zeros((3, len(weights)), np.float32)
    for row, own in zip(expected, ids, strict=True):
        row[own[:16]] = weights[own[:16]]
    np.testing.assert_array_equal(dense(result["embeddings"], len(weights)), expected)
    assert (result["tokens"], result["truncated"]) == ([4, 16, 1], [False, True, False])
    assert result["embeddings"][2] == {"ids": [], "weights": []}  # the weight of token 0 is zero
    document = [[101, 1996, 4937, 102]]
    through = ask(inference_free_client, "/encode", inputs=document, prompt_name="document")
    assert (
        through["embeddings"]
        == ask(inference_free_client, "/encode", inputs=document)["embeddings"]
    )


def test_concurrent_queries_and_documents_keep_their_own_weights(
    inference_free: Oracle, inference_free_client: TestClient
) -> None:
    oracle, _ = inference_free
    requests = [(text, kind) for text in TEXTS for kind in ("query", "document")] * 3

    def encode(request: tuple[str, str]) -> Any:  # noqa: ANN401 - array
        text, kind = request
        result = ask(inference_free_client, "/encode", inputs=[text], prompt_name=kind)
        return dense(result["embeddings"], result["dimensions"])[0]

    with ThreadPoolExecutor(6) as threads:
        actual = list(threads.map(encode, requests))
    expected = {kind: rows_of(oracle, TEXTS, kind) for kind in ("query", "document")}
    for (text, kind), row in zip(requests, actual, strict=True):
        of_text = expected[kind][TEXTS.index(text)]
        np.testing.assert_allclose(row, of_text, rtol=1e-4, atol=1e-5)


def test_scores_are_products_of_query_weights_and_document_vectors(
    inference_free: Oracle, inference_free_client: TestClient
) -> None:
    oracle, _ = inference_free
    queries, documents = rows_of(oracle, TEXTS, "query"), rows_of(oracle, DOCUMENTS, "document")
    products = queries[0] * documents  # (documents, V)
    expected = products.sum(1)
    body: Json = {"queries": QUERY, "documents": DOCUMENTS}
    result = ask(inference_free_client, "/score", **body)
    np.testing.assert_allclose(result["scores"], expected, rtol=1e-4)
    similarity = oracle.similarity(oracle.encode_query([QUERY]), oracle.encode_document(DOCUMENTS))
    np.testing.assert_allclose(result["scores"], similarity[0].numpy(), rtol=1e-4)
    assert result["kind"] == "dot"
    query_tokens = ask(inference_free_client, "/encode", inputs=QUERY, prompt_name="query")[
        "tokens"
    ]
    of_documents = ask(inference_free_client, "/encode", inputs=DOCUMENTS, prompt_name="document")
    assert result["tokens"] == [query_tokens[0] + own for own in of_documents["tokens"]]

    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "explain": {"method": "terms"}}
    best = ask(inference_free_client, "/rerank", **body)["results"]
    assert [one["index"] for one in best] == np.argsort(-expected)[:2].tolist()
    for one in best:
        terms, own = one["explanation"]["terms"], products[one["index"]]
        assert terms
        values = [term["value"] for term in terms]
        ids = [term["query"]["id"] for term in terms]
        np.testing.assert_allclose(values, own[ids], rtol=1e-3, atol=1e-6)
        assert sum(values) + one["explanation"]["other"] == pytest.approx(one["score"], rel=1e-5)


def test_pairs_have_a_query_each(inference_free: Oracle) -> None:
    oracle, artifact = inference_free
    queries = TEXTS[: len(DOCUMENTS)]
    with vitrine.SyncModel(artifact.path, THREADS) as model:
        scores = model.score(queries, DOCUMENTS).scores
    products = rows_of(oracle, queries, "query") * rows_of(oracle, DOCUMENTS, "document")
    np.testing.assert_allclose(scores, products.sum(1), rtol=1e-4)


def test_tei_looks_up_queries(inference_free: Oracle, inference_free_client: TestClient) -> None:
    oracle, _ = inference_free
    body: Json = {"inputs": TEXTS, "prompt_name": "query", "truncate": True}
    response = inference_free_client.post("/tei/embed_sparse", json=body)
    named = [
        {"ids": [v["index"] for v in row], "weights": [v["value"] for v in row]}
        for row in response.json()
    ]
    expected = rows_of(oracle, TEXTS, "query")
    np.testing.assert_array_equal(dense(named, expected.shape[1]), expected)
    assert response.headers["x-queue-time"] == "0"


def test_durations_metrics_and_info(inference_free_client: TestClient) -> None:
    def count(name: str) -> float:
        return values_of(inference_free_client.get("/metrics").text)[name]

    names = 'vitrine_inputs_total{outcome="done"}', "vitrine_batch_rows_sum"
    before = [count(name) for name in names]
    body: Json = {"inputs": TEXTS, "prompt_name": "query"}
    durations = stages(post(inference_free_client, **body))
    after = [count(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [len(TEXTS), 0]
    assert list(durations) == ["tokenize", "queue", "infer", "serialize"]
    assert durations["queue"] == 0
    info = inference_free_client.get("/info").json()
    assert info["looked_up_prompts"] == ["query"]
    assert info["max_tokens_by_prompt"] == {"query": 16, "document": 24}


@pytest.mark.parametrize(
    ("fields", "pointer", "code"),
    [
        ({"inputs": ["cat", ""]}, "/inputs/1", "empty"),
        ({"inputs": ["cat", "cat " * 40], "on_overflow": "error"}, "/inputs/1", "too_long"),
        ({"inputs": [[7], [1, 40_000]]}, "/inputs/1", "id_out_of_range"),
        ({"inputs": "cat", "output": "pooled"}, None, "wrong_model"),
    ],
)
def test_invalid_queries_are_refused(
    inference_free_client: TestClient, fields: Json, pointer: str | None, code: str
) -> None:
    problem = refused(inference_free_client, "/encode", **fields, prompt_name="query")
    assert (problem["status"], problem["code"], problem.get("pointer")) == (422, code, pointer)


def test_query_without_tokens_has_no_weights(inference_free: Oracle) -> None:
    oracle, artifact = inference_free
    manifest = replace(artifact.manifest, prompts={"query": "", "document": ""})
    tokenizer = TextTokenizer(Artifact(artifact.path, manifest), max_chars=100)
    texts = ["cat", " ", "\u200b", "\0", "cat\0"]
    rows = tokenizer.rows(texts, "query", "truncate")
    assert [len(row.ids) for row in rows] == [1, 0, 0, 0, 1]
    assert all(row.is_looked_up for row in rows)
    weights = read_query_weights(artifact)
    expected = oracle.encode_query(texts, prompt="", convert_to_sparse_tensor=False).numpy()
    for row, own in zip(rows, expected, strict=True):
        vector = look_up(weights, row.ids)
        assert vector.ids.tolist() == np.flatnonzero(own).tolist()
        np.testing.assert_allclose(vector.weights, own[vector.ids], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.astype(np.float64), "dtype float64; the model requires shape"),
        (lambda weights: weights[1:], r"shape \(4999,\) and dtype float32; the model requires"),
        (lambda weights: weights.astype(object), "query_weights.npy is invalid: Object arrays"),
        (lambda weights: np.zeros_like(weights), None),
    ],
)
def test_invalid_table_stops_the_start(
    inference_free: Oracle, tmp_path: Path, change: Callable[[Any], Any], message: str | None
) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(inference_free[1].path, folder)
    file = folder / "query_weights.npy"
    np.save(file, change(np.load(file)), allow_pickle=True)
    with pytest.raises(ArtifactError, match="is not the exported file"):
        read_query_weights(Artifact.load(folder))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["query_weights.npy"] = sha256(file)
    write_json(folder / "manifest.json", manifest)
    if message is None:  # weights may be any numbers
        assert not read_query_weights(Artifact.load(folder)).any()
    else:
        with pytest.raises(ArtifactError, match=message):
            read_query_weights(Artifact.load(folder))


async def test_queries_need_neither_engine_nor_queue(
    inference_free: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, artifact = inference_free
    expected = rows_of(oracle, TEXTS, "query")
    model = await vitrine.open_model(artifact.path, THREADS)
    async with model:
        monkeypatch.setattr(model.batcher, "_max_queue_tokens", 0)
        result = await model.encode_sparse(TEXTS, prompt_name="query")
        np.testing.assert_array_equal(dense(result.vectors, result.width), expected)
        for work in (model.encode_sparse(TEXTS), model.score(QUERY, DOCUMENTS)):
            with pytest.raises(Overloaded):
                await work
    with pytest.raises(NotReady):
        await model.encode_sparse(TEXTS, prompt_name="query")


async def test_many_queries_leave_the_event_loop_free(
    inference_free: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, artifact = inference_free
    texts = TEXTS * 200
    expected = np.tile(rows_of(oracle, TEXTS, "query"), (200, 1))
    threads: list[int] = []
    async with await vitrine.open_model(artifact.path, THREADS) as model:
        ordinary = model._executor.run

        async def counting(work: Any, size: int) -> Any:  # noqa: ANN401
            threads.append(size)
            return await ordinary(work, size)

        monkeypatch.setattr(model._executor, "run", counting)
        result = await model.encode_sparse(texts, prompt_name="query")
    np.testing.assert_array_equal(dense(result.vectors, result.width), expected)
    assert len(threads) == 2  # to tokenise the texts and to look up their tokens


async def test_failing_document_has_its_own_index(
    inference_free: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, artifact = inference_free
    async with await vitrine.open_model(artifact.path, THREADS) as model:

        async def fail(*_: object, **__: object) -> None:
            raise ItemFailed(1)

        monkeypatch.setattr(model.batcher, "submit", fail)
        with pytest.raises(InferenceFailed) as failure:
            await model.score(QUERY, DOCUMENTS)
    assert (failure.value.index, failure.value.pointer) == (1, "/documents/1")


def test_long_queries_are_truncated_as_by_sentence_transformers(inference_free: Oracle) -> None:
    oracle, artifact = inference_free
    long = "the cat " * 10 + " ".join(f"word{i}" for i in range(20_000))
    with vitrine.SyncModel(artifact.path, vitrine.ModelOptions(max_chars=10**6)) as model:
        result = model.encode_sparse([long], prompt_name="query")
    np.testing.assert_array_equal(
        dense(result.vectors, result.width), rows_of(oracle, [long], "query")
    )
    assert result.rows[0].truncated


def test_gradients_explain_documents_only(inference_free_client: TestClient) -> None:
    model = ready_model(inference_free_client)
    target = {"type": "sparse", "token": "cat"}
    text = {"text": "the cat", "prompt_name": "query"}
    problem = refused(inference_free_client, "/debug/attribute", text=text, target=target)
    expected = (422, "no_gradient", "/text")
    assert (problem["status"], problem["code"], problem["pointer"]) == expected
    assert "without the network; choose another prompt_name" in problem["detail"]
    (weights,) = ask(
        inference_free_client, "/encode", inputs=["the cat sat"], prompt_name="document"
    )["embeddings"]
    best = int(np.argmax(weights["weights"]))
    target["token"] = model.tokenizer.token(weights["ids"][best])
    text = {"text": "the cat sat", "prompt_name": "document"}
    result = ask(
        inference_free_client, "/debug/attribute", text=text, target=target, method="saliency"
    )
    assert result["value"] == pytest.approx(weights["weights"][best], rel=1e-4)
    assert result["parity"]["agrees"]
