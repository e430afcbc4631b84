"""Work in threads, up to a total size."""

import asyncio
import gc
import threading

import pytest

from service.inference.tokenizing.executor import BoundedExecutor, ExecutorFull
from tests.eventually import eventually_async


async def test_run_returns_the_result_or_raises_the_error() -> None:
    executor = BoundedExecutor(10)
    assert await executor.run(lambda: 3, size=1) == 3
    with pytest.raises(ZeroDivisionError):
        await executor.run(lambda: 1 // 0, size=1)


async def test_full_executor_raises_executor_full_until_it_has_room() -> None:
    executor, gate = BoundedExecutor(10), threading.Event()
    under_way = [asyncio.ensure_future(executor.run(gate.wait, size)) for size in (6, 4)]
    await asyncio.sleep(0)
    with pytest.raises(ExecutorFull):
        await executor.run(gate.wait, size=1)
    gate.set()
    await asyncio.gather(*under_way)
    assert await executor.run(lambda: "taken", size=10) == "taken"


async def test_idle_executor_accepts_work_of_any_size() -> None:
    assert await BoundedExecutor(10).run(lambda: "taken", size=1000) == "taken"


async def test_error_of_cancelled_work_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        gate.wait()
        raise ZeroDivisionError

    executor, gate = BoundedExecutor(10), threading.Event()
    leaving = asyncio.ensure_future(executor.run(fail, size=1))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    gate.set()
    await eventually_async(lambda: not executor._size)
    gc.collect()  # asyncio logs errors that nobody has seen when their tasks are collected
    assert not caplog.records


async def test_cancelled_work_counts_until_its_thread_is_done() -> None:
    executor, gate = BoundedExecutor(10), threading.Event()
    leaving = asyncio.ensure_future(executor.run(gate.wait, size=10))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    with pytest.raises(ExecutorFull):
        await executor.run(gate.wait, size=1)
    gate.set()
    await eventually_async(lambda: not executor._size)
    assert await executor.run(lambda: "taken", size=1) == "taken"
