"""The Python API: `vitrine.open_model` and `vitrine.SyncModel`."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import vitrine
from models.artifact import Artifact
from service.inference.batching.devices import Devices
from service.inference.call_options import CallOptions
from service.inference.results.loaded_model import LoadedModel
from tests.eventually import HANG_S, eventually_async
from tests.service.inference.model.conftest import THREAD, HeldRuns

TEXTS = ["The cat sat on the mat.", "Strassenbahn", "a b c " * 40]
TWO_THREADS = vitrine.ModelOptions(threads=2)


@pytest.fixture
async def model(small_artifact: Artifact) -> AsyncIterator[vitrine.Model]:
    async with await vitrine.open_model(small_artifact.path, TWO_THREADS) as model:
        yield model


@pytest.fixture(scope="module")
def sync_model(small_artifact: Artifact) -> Iterator[vitrine.SyncModel]:
    with vitrine.SyncModel(small_artifact.path, TWO_THREADS) as model:
        yield model


async def test_encode_equals_sentence_transformers(
    model: vitrine.Model, small_folder: Path
) -> None:
    result = await model.encode(TEXTS)
    expected = SentenceTransformer(str(small_folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(result.vectors, expected, rtol=0, atol=1e-5)
    assert [len(row.ids) for row in result.rows] == [9, 6, 122]
    assert result.seconds.keys() == {"tokenize", "queue", "infer"}


async def test_inputs_that_are_changed_during_a_call_do_not_change_its_results(
    model: vitrine.Model, small_folder: Path
) -> None:
    texts = [f"{word} {number}" for number in range(5) for word in ("cat", "dog")]
    encoder = SentenceTransformer(str(small_folder), device="cpu")
    expected = encoder.encode(texts)
    rows = [encoder.tokenizer(text)["input_ids"] for text in texts]
    released = threading.Event()
    asyncio.get_running_loop().set_default_executor(threads := ThreadPoolExecutor(1))
    threads.submit(released.wait, HANG_S)  # so many inputs are tokenised after it
    calls = [asyncio.create_task(model.encode(inputs)) for inputs in (texts, rows)]
    await asyncio.sleep(0)
    texts.reverse()
    rows[0].clear()
    del rows[1:]
    released.set()
    for result in await asyncio.gather(*calls):
        np.testing.assert_allclose(result.vectors, expected, rtol=0, atol=1e-5)


def test_synchronous_model_has_every_method_of_the_model() -> None:
    methods = {
        name: method
        for name, method in vars(vitrine.Model).items()
        if inspect.iscoroutinefunction(method) and not name.startswith("_")
    }
    assert len(methods) >= 12
    for name, method in methods.items():
        assert inspect.signature(getattr(vitrine.SyncModel, name)) == inspect.signature(method)


def test_token_vectors_average_to_the_pooled_vector(sync_model: vitrine.SyncModel) -> None:
    tokens = sync_model.encode_tokens(TEXTS)
    assert [vectors.shape for vectors in tokens.vectors] == [(9, 32), (6, 32), (122, 32)]
    expected = sync_model.encode(TEXTS, normalize=False).vectors
    actual = [vectors.mean(axis=0) for vectors in tokens.vectors]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
async def test_token_vectors_do_not_keep_those_of_other_calls_in_memory(
    model: vitrine.Model, normalize: bool
) -> None:
    calls = [model.encode_tokens(text, normalize=normalize) for text in TEXTS]
    results = await asyncio.gather(*calls)  # some share a batch
    assert [result[0].base for result in results] == [None] * len(TEXTS)


def test_synchronous_model_is_shared_by_threads(sync_model: vitrine.SyncModel) -> None:
    texts = [f"text number {number}" for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        vectors = list(threads.map(lambda text: sync_model.encode([text]).vectors[0], texts))
    np.testing.assert_allclose(vectors, sync_model.encode(texts).vectors, rtol=0, atol=1e-5)


async def test_invalid_input_error_names_its_index_and_the_next_call_succeeds(
    model: vitrine.Model,
) -> None:
    with pytest.raises(vitrine.InvalidInput) as raised:
        await model.encode(["fine", ""])
    assert raised.value.index == 1
    assert len((await model.encode(["fine"])).vectors) == 1


async def test_cancelled_call_leaves_the_queue(
    model: vitrine.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = HeldRuns(model, monkeypatch)
    running = [asyncio.create_task(model.encode(["held"])) for _ in range(2)]
    await eventually_async(lambda: runs.sizes)
    queued = asyncio.create_task(model.encode(["queued " * 50] * 20))
    await eventually_async(lambda: model.batcher.queued_tokens > 1000)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    assert model.batcher.queued_tokens < 100
    runs.gate.set()
    await asyncio.gather(*running)


async def test_call_that_misses_its_deadline_raises_deadline_exceeded(
    model: vitrine.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = HeldRuns(model, monkeypatch)
    with pytest.raises(vitrine.DeadlineExceeded, match=r"deadline of 0\.1 s exceeded"):
        await model.encode(["late"], timeout_s=0.1)
    runs.gate.set()


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.encode("a", priority="bulk"),
        lambda model: model.encode_chunks("a", vitrine.Chunking(), priority="bulk"),
        lambda model: model.encode_tokens("a", priority="bulk"),
        lambda model: model.encode_sparse("a", priority="bulk"),
        lambda model: model.encode_multi("a", priority="bulk"),
        lambda model: model.encode_outputs("a", ["pooled"], priority="bulk"),
        lambda model: model.classify("a", priority="bulk"),
        lambda model: model.tag("a", priority="bulk"),
        lambda model: model.rerank("a", ["b", "c"], priority="bulk"),
        lambda model: model.rerank(
            "a", ["b", "c"], top_n=1, explain=vitrine.Terms(), priority="bulk"
        ),
        lambda model: model.score("a", ["b"], priority="bulk"),
        lambda model: model.score("a", ["b"], chunking=vitrine.Chunking(), priority="bulk"),
    ],
)
def test_every_method_passes_the_priority_on(
    sync_model: vitrine.SyncModel,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[vitrine.SyncModel], object],
) -> None:
    async def run(*arguments: object, **_: object) -> None:
        (options,) = (a for a in arguments if isinstance(a, CallOptions))
        raise RuntimeError(options.priority)

    monkeypatch.setattr(LoadedModel, "run", run)
    with pytest.raises(RuntimeError, match="bulk"):
        call(sync_model)


async def test_bulk_calls_are_queued_behind_interactive_ones(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await vitrine.open_model(small_artifact.path, THREAD) as model:
        runs = HeldRuns(model, monkeypatch)
        running = asyncio.create_task(model.encode(["held"]))
        await eventually_async(lambda: runs.sizes)
        bulk = asyncio.create_task(model.encode(["long text " * 20] * 100, priority="bulk"))
        await eventually_async(lambda: model.batcher.queued_tokens > 1000)
        before = model.batcher.queued_tokens
        interactive = asyncio.create_task(model.encode(["a", "b", "c", "d", "e"]))
        await eventually_async(lambda: model.batcher.queued_tokens > before)
        runs.gate.set()
        await asyncio.gather(running, interactive, bulk)
    assert runs.sizes[:2] == [1, 5]


async def test_models_of_a_process_share_its_devices(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*, is_long: bool) -> bool:
        runs.append(is_long)
        return begin_run(is_long=is_long)

    def engine_threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("engine")}

    before, devices, runs = engine_threads(), Devices(), list[bool]()
    begin_run = devices.cpu_runs.begin
    monkeypatch.setattr(devices.cpu_runs, "begin", begin)
    async with await vitrine.open_model(small_artifact.path, TWO_THREADS, devices=devices) as first:
        expected = (await first.encode(["a", "b"])).vectors
        assert len(runs) == 1
        async with await vitrine.open_model(
            small_artifact.path, replace(TWO_THREADS, share=2.0), devices=devices
        ) as second:
            await second.encode(["a"])
            assert len(runs) == 2
            results = await asyncio.gather(
                *(model.encode([text]) for text in "ab" * 20 for model in (first, second))
            )
            assert len(engine_threads() - before) <= 3  # two streams, and the spare one
        actual = np.concatenate([result.vectors for result in results])
        np.testing.assert_allclose(actual, np.tile(expected.repeat(2, axis=0), (20, 1)), atol=1e-6)
        np.testing.assert_allclose((await first.encode(["a"])).vectors, expected[:1], atol=1e-6)
        with pytest.raises(vitrine.NotReady):
            await second.encode(["a"])


async def test_call_in_another_event_loop_says_so_and_leaves_the_model_usable(
    model: vitrine.Model,
) -> None:
    for call in (model.encode(TEXTS), model.close()):
        with pytest.raises(RuntimeError, match="in the event loop in which it was opened"):
            await asyncio.to_thread(asyncio.run, call)
    assert len((await model.encode(TEXTS)).vectors) == len(TEXTS)


async def test_closed_model_raises_not_ready(small_artifact: Artifact) -> None:
    async with await vitrine.open_model(small_artifact.path, TWO_THREADS) as model:
        pass
    with pytest.raises(vitrine.NotReady):
        await model.encode(["too late"])


@pytest.mark.parametrize("method", ["encode", "encode_tokens", "encode_multi", "classify", "tag"])
def test_only_scores_take_an_instruction(sync_model: vitrine.SyncModel, method: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'instruction'"):
        getattr(sync_model, method)("the cat", instruction="Find dogs.")
