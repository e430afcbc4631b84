"""A synchronous model that is interrupted, closed, forgotten, or open at the interpreter's exit."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitrine
from models.artifact import Artifact
from tests.eventually import HANG_S, eventually
from tests.service.inference.model.conftest import THREAD, HeldRuns

LONG = ["long text " * 50] * 200
# The model is closed before functions of atexit run.
OPEN = """
import atexit, os, sys, threading
import vitrine
model = vitrine.SyncModel(sys.argv[1])
model.encode("a text")
atexit.register(lambda: model.model.batcher.is_alive and os.write(1, b"the model is open"))
"""
BUSY = """
def encode():
    try:
        model.encode(["a b c " * 80] * 5000)
        print("all texts have run")
    except vitrine.NotReady:
        pass

threading.Thread(target=encode, daemon=True).start()
while not model.model.batcher.queued_tokens:
    pass
"""
# As a notebook's kernel is interrupted, while all runs of the model are held.
INTERRUPTED = """
import os, signal, time

gate, runner = threading.Event(), model.model.batcher._runner
run = runner._run

def held(items):
    gate.wait()
    return run(items)

def interrupt():
    while model.model.batcher.queued_tokens < 1000:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

runner._run = held
threading.Thread(target=interrupt).start()
try:
    model.encode(["long text " * 50] * 200)
except KeyboardInterrupt:
    while model.model.batcher.queued_tokens:
        time.sleep(0.01)
    gate.set()
    assert model.encode("a text").vectors.shape == (1, 32)
else:
    sys.exit("not interrupted")
"""
# The thread of the model is not in the child, which must not wait for it.
FORKED = """
import multiprocessing, warnings

def encode():
    try:
        model.encode("a text")
    except vitrine.NotReady:
        sys.exit(7)

warnings.simplefilter("ignore")
child = multiprocessing.get_context("fork").Process(target=encode)
child.start()
child.join()
assert child.exitcode == 7
model.encode("a text")
"""


@pytest.fixture
def model(small_artifact: Artifact) -> Iterator[vitrine.SyncModel]:
    with vitrine.SyncModel(small_artifact.path, THREAD) as model:
        yield model


@pytest.fixture
def gate(model: vitrine.SyncModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds all runs of the model until it is set."""
    runs = HeldRuns(model.model, monkeypatch)
    yield runs.gate
    runs.gate.set()


def test_closed_model_can_be_closed_again_and_calls_say_that_it_is_closed(
    small_artifact: Artifact,
) -> None:
    with vitrine.SyncModel(small_artifact.path, THREAD) as model:
        model.close()
        model.close()
    for call in (lambda: model.encode("a text"), lambda: model.score("a", "b", explain=True)):
        with pytest.raises(vitrine.NotReady, match=r"^the model is closed$"):
            call()
    assert not model._thread.is_alive()


def test_close_ends_the_calls_of_other_threads(
    model: vitrine.SyncModel, gate: threading.Event
) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: model.encode(LONG),
        lambda: model.encode_tokens(LONG[:20]),
        lambda: model.score("a", LONG[:20], explain=True),
        lambda: model.rerank("a", LONG[:20], explain=vitrine.Highlights()),
    ]
    with ThreadPoolExecutor(8) as threads:
        futures: list[Future[Any]] = [threads.submit(call) for call in calls]
        eventually(lambda: len(model.model.batcher._open) >= len(calls))
        closes = [threads.submit(model.close) for _ in range(2)]
        eventually(lambda: not model.model.batcher.is_alive)
        gate.set()
        for close in closes:
            close.result(HANG_S)
        for future in futures:
            assert isinstance(future.exception(HANG_S), vitrine.NotReady)


@pytest.mark.slow
def test_model_that_nobody_refers_to_ends_its_thread_and_frees_its_memory(
    small_artifact: Artifact,
) -> None:
    model = vitrine.SyncModel(small_artifact.path, THREAD)
    expected = model.encode("a text").vectors
    thread, engine = model._thread, weakref.ref(model.model.engine)
    model = vitrine.SyncModel(small_artifact.path, THREAD)  # as a cell of a notebook, run again
    gc.collect()
    eventually(lambda: not thread.is_alive())
    eventually(lambda: gc.collect() is not None and engine() is None)
    np.testing.assert_array_equal(model.encode("a text").vectors, expected)
    model.close()


@pytest.mark.parametrize(
    "options", [{"threads": -1}, {"max_chars": 0}, {"share": 0}, {"run_timeout_s": float("nan")}]
)
def test_options_with_which_no_call_would_end_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(options))} must be "):
        vitrine.ModelOptions(**options)


def test_failed_open_raises_and_leaves_no_thread(tmp_path: Path) -> None:
    threads = threading.active_count()
    with pytest.raises(vitrine.ArtifactError):
        vitrine.SyncModel(tmp_path)
    eventually(lambda: threading.active_count() <= threads)


@pytest.mark.slow
def test_interrupted_call_leaves_the_queue_and_the_model_usable(small_artifact: Artifact) -> None:
    check_script(OPEN + INTERRUPTED, small_artifact)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [OPEN, OPEN + BUSY, OPEN + FORKED], ids=["idle", "busy", "forked"]
)
def test_interpreter_exits_silently_with_an_open_model(
    small_artifact: Artifact, script: str
) -> None:
    check_script(script, small_artifact)


def check_script(script: str, small_artifact: Artifact) -> None:
    """Run a script with a model, which ends with status 0 and prints nothing."""
    command = [sys.executable, "-W", "error", "-c", script, str(small_artifact.path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    # onnxruntime logs each cancelled run itself.
    own = [line for line in ended.stderr.splitlines() if ":onnxruntime:" not in line]
    assert (ended.returncode, ended.stdout, own) == (0, "", [])
