"""Runs of jobs, with stubs of the gradient process and of the served model."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import Request
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter
from starlette.requests import ClientDisconnect

from models.artifact import MANIFEST
from models.gradients.inputs import Row
from service.debug.pipeline import call
from service.debug.pipeline.call import Call, JobOutcome
from service.debug.pipeline.messages import Completed, Done
from service.debug.vjp import VjpJob, VjpRequest
from service.inference.errors import DeadlineExceeded

JOB = VjpJob(request=VjpRequest(text="", cotangent=[1.0]), row=Row([1]), compare=[Row([1])])


async def run_job(
    reference: NDArray[np.float32],
    receive: Callable[[], Awaitable[Any]],
    request_s: float = 300.0,
) -> JobOutcome:
    """Run a job whose reference model has these vectors."""

    async def run(*_: object) -> Completed:
        return Completed(Done({}, [], True, 1.0), reference.tobytes(), b"file")

    counter = Counter("jobs", "", ["kind", "outcome"], registry=CollectorRegistry())
    limits = SimpleNamespace(request_s=request_s)
    state: Any = SimpleNamespace(
        jobs=counter,
        gradients=SimpleNamespace(run=run),
        settings=SimpleNamespace(limits=limits),
    )
    artifact = SimpleNamespace(path="", manifest=SimpleNamespace(outputs=["pooled"]))
    model: Any = SimpleNamespace(
        artifact=artifact, files={MANIFEST: ""}, quality=None, engine_label="cpu"
    )
    request = Request({"type": "http", "headers": [], "state": {}}, receive)
    return await Call(request, state, model).run(JOB)


async def never() -> None:
    await asyncio.Event().wait()


async def test_comparison_ends_when_the_client_disconnects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoding = asyncio.Event()

    async def encode(*_: object) -> None:
        encoding.set()
        await never()

    async def disconnect() -> dict[str, str]:
        await encoding.wait()
        return {"type": "http.disconnect"}

    monkeypatch.setattr(call, "encode", encode)
    with pytest.raises(ClientDisconnect):
        async with asyncio.timeout(60):
            await run_job(np.ones((1, 2), np.float32), disconnect)


async def test_comparison_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []

    async def encode(*_: object) -> None:
        encoded.append(True)
        await never()

    monkeypatch.setattr(call, "encode", encode)
    with pytest.raises(DeadlineExceeded):
        async with asyncio.timeout(60):
            await run_job(np.ones((1, 2), np.float32), never, request_s=1e-3)
    assert encoded


@pytest.mark.parametrize("bad", [np.nan, np.inf])
async def test_non_finite_reference_vectors_do_not_agree(
    monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    served = np.ones((2, 3), np.float32)

    async def encode(*_: object) -> NDArray[np.float32]:
        return served

    monkeypatch.setattr(call, "encode", encode)
    reference = served.copy()
    outcome = await run_job(reference, never)
    assert (outcome.warnings, outcome.file) == ([], b"file")
    assert outcome.parity is not None
    assert outcome.parity.agrees
    reference[1, 2] = bad
    with np.errstate(invalid="ignore"):
        outcome = await run_job(reference, never)
    assert outcome.parity is not None
    assert not outcome.parity.agrees
    assert outcome.warnings[0].startswith("the served vectors differ")
