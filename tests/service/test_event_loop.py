"""The event loop is free for others while huge requests are served."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray
from starlette.testclient import TestClient

from service.app import create_app
from service.settings import LimitSettings, Settings
from service.tokenizer import Row, TextTokenizer
from service.vectors import as_json
from tests.serving import serving

MANY = 4000


@pytest.fixture(scope="module")
def roomy(settings: Settings) -> Iterator[TestClient]:
    """A client that may send many texts at once."""
    limits = LimitSettings(max_inputs=MANY)
    app = create_app(settings.model_copy(update={"limits": limits}), on_fatal=pytest.fail)
    with serving(app) as client:
        yield client


def vectors(rows: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=(rows, 384)).astype(np.float32)


def write(rows: NDArray[np.float32]) -> bytes:
    return as_json("model", rows, [3] * len(rows), [False] * len(rows), in_base64=False)


def cpu_seconds_of(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


# In CPU seconds of the loop's thread, against those that one of these answers takes to write: the
# machine's speed, and what else it does, do not count. In one run each, the longest stretch is
# 0.18, and 2.18 with the answers written in the event loop.
def test_the_event_loop_works_on_nothing_for_long(roomy: TestClient) -> None:
    stretches: list[float] = []

    async def watch() -> None:
        worked = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            before, worked = worked, time.thread_time()
            stretches.append(worked - before)

    assert roomy.portal is not None
    watching = roomy.portal.start_task_soon(watch)
    try:
        with ThreadPoolExecutor(4) as clients:
            many = [f"text {i}" for i in range(MANY)]
            bodies = [{"inputs": inputs} for inputs in (many, ["word " * 19_000] * 40, many, many)]
            answers = clients.map(lambda body: roomy.post("/encode", json=body), bodies)
            assert [answer.status_code for answer in answers] == [200] * 4
    finally:
        watching.cancel()
    rows = vectors(MANY)
    unit = cpu_seconds_of(lambda: write(rows))
    assert max(stretches) < unit / 2


def test_long_texts_are_tokenized_outside_the_event_loop(
    roomy: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def rows(self: TextTokenizer, *arguments: object) -> list[Row]:
        threads.append(threading.get_ident())
        return rows_as_it_is(self, *arguments)

    rows_as_it_is: Callable[..., list[Row]] = TextTokenizer.rows
    monkeypatch.setattr(TextTokenizer, "rows", rows)
    assert roomy.portal is not None
    loop = roomy.portal.call(threading.get_ident)
    for inputs, is_long in (["short"], False), (["word " * 5_000], True), (["short"] * 100, True):
        assert roomy.post("/encode", json={"inputs": inputs}).status_code == 200
        assert (threads.pop() != loop) == is_long


def test_other_threads_have_their_turn_while_a_huge_answer_is_written() -> None:
    turns = 0

    def take_turns() -> None:
        nonlocal turns
        while not written.is_set():
            turns += 1
            written.wait(0.001)

    rows, written = vectors(2 * MANY), threading.Event()
    other = threading.Thread(target=take_turns)
    other.start()
    write(rows)
    written.set()
    other.join()
    assert turns > 8  # twenty and more, and two where orjson writes all in one call
