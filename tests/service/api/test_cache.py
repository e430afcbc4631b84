"""The cache of results, over HTTP and from Python."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from starlette.testclient import TestClient

import vitrine
from models.artifact import Artifact
from service.inference.batching.cache import CacheCounts, ResultCache
from service.inference.results.batch_run import BatchItem, copy_read_only
from service.inference.results.vectors import RowResults, SparseVector
from service.inference.tokenizing.rows import Row
from tests.conftest import FamilyArtifact
from tests.eventually import eventually
from tests.service.api.posting import ask, post, stages
from tests.serving import ready_model, served, values_of

pytestmark = pytest.mark.slow

ROW = Row([1, 2, 3], False, 0)
TEXTS = ["The cat sat.", "rain", "The cat sat.", "a cat on a mat " * 6]


@pytest.fixture(scope="module")
def client(small_artifact: Artifact) -> Iterator[TestClient]:
    with served(small_artifact.path, cache={"max_bytes": 2**20}) as client:
        yield client


def metric(client: TestClient, name: str) -> float:
    return values_of(client.get("/metrics").text)[name]


def test_cached_vectors_are_those_of_the_engine(client: TestClient) -> None:
    before = metric(client, 'vitrine_cache_items_total{result="hit"}')
    first = post(client, inputs=TEXTS)
    again = post(client, inputs=TEXTS)
    assert again.json() == first.json()
    assert metric(client, 'vitrine_cache_items_total{result="hit"}') - before == len(TEXTS)
    assert metric(client, 'vitrine_cache_items_total{result="shared"}') >= 1
    assert metric(client, "vitrine_cache_saved_tokens_total") > 0
    assert metric(client, "vitrine_cache_bytes") > 3 * 4 * first.json()["dimensions"]
    for response in (first, again):
        assert list(stages(response)) == ["tokenize", "queue", "infer", "cache", "serialize"]
    assert 'cache;desc="hits=0 shared=1 misses=3";dur=' in first.headers["Server-Timing"]
    assert stages(again)["infer"] == 0
    assert 'cache;desc="hits=4 shared=0 misses=0";dur=' in again.headers["Server-Timing"]


def test_stages_are_observed_only_if_something_was_computed(client: TestClient) -> None:
    def counts() -> dict[str, float]:
        values = values_of(client.get("/metrics").text)
        return {
            stage: values[f'vitrine_stage_seconds_count{{stage="{stage}"}}']
            for stage in ("tokenize", "cache", "queue", "infer")
        }

    def change(*texts: str) -> list[float]:
        before = counts()
        post(client, inputs=texts)
        return [after - before[stage] for stage, after in counts().items()]

    assert change("a text", "another") == [1, 1, 1, 1]
    assert change("a text", "another") == [1, 1, 0, 0]
    assert change("a text", "a third") == [1, 1, 1, 1]


def test_routes_share_results_and_post_processing_does_not_change_them(client: TestClient) -> None:
    vectors = ask(client, inputs=TEXTS)["embeddings"]
    truncated = ask(client, inputs=TEXTS, dimensions=4, normalize=False)["embeddings"]
    openai = ask(client, "/v1/embeddings", input=TEXTS, model="small")["data"]
    np.testing.assert_allclose([item["embedding"] for item in openai], vectors, atol=1e-6)
    assert ask(client, inputs=TEXTS)["embeddings"] == vectors
    assert np.shape(truncated) == (len(TEXTS), 4)


def test_token_vectors_are_not_cached(client: TestClient) -> None:
    post(client, inputs=TEXTS, output="tokens")
    size = metric(client, "vitrine_cache_bytes")
    assert "cache" not in stages(post(client, inputs=["new text"], output="tokens"))
    assert metric(client, "vitrine_cache_bytes") == size


def test_results_cannot_be_changed_before_and_after_they_are_cached(
    small_artifact: Artifact,
) -> None:
    async def arrays() -> list[bool]:
        options = vitrine.ModelOptions(threads=1, cache_bytes=2**20)
        async with await vitrine.open_model(small_artifact.path, options) as model:
            outcomes = [await model.encode_rows([ROW], ("pooled",)) for _ in range(2)]
        with pytest.raises(vitrine.NotReady):  # the cache has the row, but the model is closed
            await model.encode_rows([ROW], ("pooled",))
        results = [outcome.results[0][0] for outcome in outcomes]
        return [isinstance(result, np.ndarray) and result.flags.writeable for result in results]

    assert asyncio.run(arrays()) == [False, False]


def test_rows_can_be_computed_again(client: TestClient) -> None:
    async def encode_twice() -> None:
        model = ready_model(client)
        row = Row([0, 5, 2], False, 0)
        for _ in range(2):
            await model.encode_rows([row], ("pooled",), uses_cache=False)

    before = metric(client, "vitrine_batch_rows_count")
    assert client.portal is not None
    client.portal.call(encode_twice)
    assert metric(client, "vitrine_batch_rows_count") - before == 2


def test_python_results_survive_eviction(small_artifact: Artifact) -> None:
    options = vitrine.ModelOptions(threads=1)
    small = vitrine.ModelOptions(threads=1, cache_bytes=2500)
    texts = [f"text {index % 7}" for index in range(40)]
    with (
        vitrine.SyncModel(small_artifact.path, options) as plain,
        vitrine.SyncModel(small_artifact.path, small) as cached,
    ):
        for text in texts:
            np.testing.assert_array_equal(cached.encode(text).vectors, plain.encode(text).vectors)


@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_changes_of_results_change_no_other_results(
    small_artifact: Artifact,
    sparse_encoder: tuple[SparseEncoder, Artifact],
    multi_encoder: tuple[MultiVectorEncoder, Artifact],
    cache_bytes: int,
) -> None:
    def arrays(kind: str, result: Any) -> list[list[np.ndarray[Any, Any]]]:  # noqa: ANN401
        return [list(own) if kind == "sparse" else [own] for own in result.vectors]

    artifacts = {
        "encode": small_artifact,
        "encode_tokens": small_artifact,
        "encode_sparse": sparse_encoder[1],
        "encode_multi": multi_encoder[1],
    }
    options = vitrine.ModelOptions(threads=1, cache_bytes=cache_bytes)
    for method, artifact in artifacts.items():
        with vitrine.SyncModel(artifact.path, options) as model:
            kind = method.removeprefix("encode_")
            first = arrays(kind, getattr(model, method)(["w5 w9", "w7", "w5 w9"]))
            expected = [array.copy() for array in first[2]]
            for array in first[0]:
                array[...] = 7
            again = arrays(kind, getattr(model, method)(["w5 w9"]))
            for own in (first[2], *again):
                for array, unchanged in zip(own, expected, strict=True):
                    np.testing.assert_allclose(array, unchanged, rtol=0, atol=1e-6)


async def counts_of(
    path: Path, cache: ResultCache[RowResults], options: vitrine.ModelOptions
) -> CacheCounts | None:
    async with await vitrine.open_model(path, options, cache=cache) as model:
        return (await model.encode_rows([ROW], ("pooled",))).cache_counts


def test_model_finds_results_of_the_same_graph_in_a_shared_cache(small_artifact: Artifact) -> None:
    async def counts() -> list[CacheCounts | None]:
        cache: ResultCache[RowResults] = ResultCache(2**20)
        options = vitrine.ModelOptions(threads=1)
        renamed = replace(options, name="other")
        return [await counts_of(small_artifact.path, cache, own) for own in (options, renamed)]

    first, again = asyncio.run(counts())
    assert first == CacheCounts(misses=1)
    assert again == CacheCounts(hits=1, saved_tokens=3)


def test_model_does_not_get_results_of_another_graph_or_engine(
    small_artifact: Artifact, family_artifact: FamilyArtifact
) -> None:
    async def counts() -> list[CacheCounts | None]:
        cache: ResultCache[RowResults] = ResultCache(2**20)
        default = vitrine.ModelOptions(threads=1)
        openvino = vitrine.ModelOptions(threads=1, engine="openvino")
        other = family_artifact("bert")
        return [
            await counts_of(small_artifact.path, cache, default),
            await counts_of(small_artifact.path, cache, openvino),
            await counts_of(other.path, cache, default),
        ]

    assert asyncio.run(counts()) == [CacheCounts(misses=1)] * 3


def test_shared_cache_has_no_reference_to_a_closed_model(small_artifact: Artifact) -> None:
    async def closed(cache: ResultCache[RowResults]) -> "list[weakref.ref[object]]":
        options = vitrine.ModelOptions(threads=1)
        async with await vitrine.open_model(small_artifact.path, options, cache=cache) as model:
            await model.encode_rows([ROW], ("pooled",))
            return [weakref.ref(model.engine), weakref.ref(model.batcher)]

    cache: ResultCache[RowResults] = ResultCache(2**20)
    references = asyncio.run(closed(cache))

    def is_free() -> bool:  # the engine's threads may still be ending
        gc.collect()
        return all(reference() is None for reference in references)

    eventually(is_free)
    assert cache.size > 0


# Equal numbers in another order of the parts.
SPLIT = [Row([1, 2, 0, 0], False, 0), Row([1, 2], False, 0, token_types=[0, 0])]
OTHERS: dict[str, Any] = {
    "ids": [1, 2, 4],
    "prompt_tokens": 1,
    "adapter": 1,
    "token_types": [0, 0, 1],
    "unattended": 1,
    "words": [1],
    "labels": [1],
}


def test_keys_cover_everything_that_results_depend_on() -> None:
    key = BatchItem(ROW, ("pooled",)).key
    assert key == BatchItem(replace(ROW, truncated=True, offsets=[None] * 3), ("pooled",)).key
    assert key != BatchItem(ROW, ("sparse",)).key
    for name, value in OTHERS.items():
        assert key != BatchItem(replace(ROW, **{name: value}), ("pooled",)).key, name
    assert len({BatchItem(row, ("pooled",)).key for row in SPLIT}) == 2
    # Fields that the engine never sees; rows that are looked up do not reach the cache.
    unseen = {"truncated", "offsets", "continues", "is_looked_up"}
    assert {field.name for field in fields(Row)} == OTHERS.keys() | unseen


def test_kept_results_are_copies_that_cannot_be_changed() -> None:
    batch = np.ones((1000, 4), np.float32)
    sparse = SparseVector(np.arange(3), np.ones(3, np.float32))
    (vector, weights), size = copy_read_only((batch[5], sparse))
    assert isinstance(vector, np.ndarray)
    assert isinstance(weights, SparseVector)
    assert vector.base is None  # the batch is not kept
    assert not any(array.flags.writeable for array in (vector, *weights))
    assert 4 * 4 + 3 * 8 + 3 * 4 < size < 2000
