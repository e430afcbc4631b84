import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from models.artifact import Artifact
from service.debug import frames
from service.debug.process import GradientProcess, worker_command
from service.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotReady,
    Overloaded,
    ServiceError,
)
from service.settings import DebugSettings

# A gradient process without gradients: what it does with a job, the job says.
FAKE = """
import os, signal, sys, time
from service.debug import frames

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as deaf as torch in the middle of a product

def send(message):
    sys.stdout.buffer.write(frames.encode(message))
    sys.stdout.buffer.flush()

send({"points": ["words"]})
while (job := frames.read(sys.stdin.buffer)) is not None:
    time.sleep(job.get("seconds", 0))
    if job.get("die"):
        os._exit(3)
    send(job.get("reply", {"answer": {"pid": os.getpid(), "at": time.monotonic()}}))
"""


@asynccontextmanager
async def process_of(
    command: list[str] | None = None, **settings: object
) -> AsyncIterator[GradientProcess]:
    chosen = DebugSettings(**{"deadline_s": 20.0, **settings})
    process = GradientProcess(command or [sys.executable, "-c", FAKE], chosen)
    try:
        yield process
    finally:
        await process.close()


async def pid(process: GradientProcess) -> int:
    found = (await process.run({}))["answer"]["pid"]
    assert isinstance(found, int)
    return found


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_it_starts_with_the_first_job_and_stays() -> None:
    async with process_of() as process:
        assert process.pid is None
        assert await pid(process) == await pid(process) == process.pid
    assert process.pid is None


async def test_jobs_run_one_at_a_time() -> None:
    async with process_of() as process:
        replies = await asyncio.gather(*(process.run({"seconds": 0.1}) for _ in range(3)))
        ends = sorted(reply["answer"]["at"] for reply in replies)
        assert all(later - earlier >= 0.1 for earlier, later in itertools.pairwise(ends))


async def test_more_than_may_wait_are_refused_and_the_others_get_their_answers() -> None:
    async with process_of(max_waiting=1) as process:
        jobs = [asyncio.create_task(process.run({"seconds": 0.2})) for _ in range(3)]
        done = await asyncio.gather(*jobs, return_exceptions=True)
        refused = [error for error in done if isinstance(error, Overloaded)]
        assert [error.code for error in refused] == ["busy"]
        assert len([reply for reply in done if isinstance(reply, dict)]) == 2
        assert await pid(process)


async def ended(pid: int) -> None:
    while is_alive(pid):
        await asyncio.sleep(0.01)


async def test_a_job_that_takes_too_long_is_killed_and_the_next_one_works() -> None:
    async with process_of(deadline_s=0.3) as process:
        first = await pid(process)
        with pytest.raises(DeadlineExceeded, match=r"longer than 0\.3 s"):
            await process.run({"seconds": 60})
        await asyncio.wait_for(ended(first), 5)
        assert await pid(process) != first


async def test_a_caller_that_leaves_takes_its_job_with_it_and_the_next_one_works() -> None:
    async with process_of() as process:
        first = await pid(process)
        job = asyncio.create_task(process.run({"seconds": 60}))
        await asyncio.sleep(0.1)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        await asyncio.wait_for(ended(first), 5)
        assert await pid(process) != first


async def test_a_caller_that_leaves_the_queue_disturbs_nobody() -> None:
    async with process_of() as process:
        first = await pid(process)
        running = asyncio.create_task(process.run({"seconds": 0.3}))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(process.run({}))
        await asyncio.sleep(0.05)
        waiting.cancel()
        assert (await running)["answer"]["pid"] == first


async def test_a_process_that_dies_gives_a_clear_error_and_the_next_job_works() -> None:
    async with process_of() as process:
        first = await pid(process)
        with pytest.raises(NotReady, match="died; the next request starts a new one") as error:
            await process.run({"die": True})
        assert error.value.code == "gradients_unavailable"
        assert await pid(process) != first


async def test_a_process_that_died_between_jobs_is_replaced_unnoticed() -> None:
    async with process_of() as process:
        first = await pid(process)
        os.kill(first, signal.SIGKILL)
        await asyncio.sleep(0.1)
        assert process.pid is None
        assert (await process.start())["points"] == ["words"]
        assert process.pid not in (None, first)
        assert await pid(process) == process.pid


async def test_a_caller_that_leaves_while_it_starts_leaves_no_process_behind(
    tmp_path: Path,
) -> None:
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); "
    async with process_of([sys.executable, "-c", script + "time.sleep(60)"]) as process:
        job = asyncio.create_task(process.run({}))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        await asyncio.wait_for(ended(int((tmp_path / "pid").read_text())), 5)
        assert process.pid is None


async def test_it_is_replaced_after_so_many_jobs() -> None:
    async with process_of(max_jobs=2) as process:
        pids = [await pid(process) for _ in range(4)]
        assert pids[0] == pids[1] != pids[2] == pids[3]


async def test_what_the_twin_refuses_is_an_invalid_input_and_what_fails_is_an_error() -> None:
    async with process_of() as process:
        refused = {"detail": "no such point", "code": "unknown_point", "field": "/point"}
        with pytest.raises(InvalidInput) as invalid:
            await process.run({"reply": {"refused": refused}})
        assert (invalid.value.code, invalid.value.pointer) == ("unknown_point", "/point")
        with pytest.raises(ServiceError) as failed:
            await process.run({"reply": {"failed": "its log says why"}})
        assert (failed.value.status, failed.value.code) == (500, "gradients_failed")
        assert await pid(process)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("raise SystemExit(1)", "the gradient process did not start; its log says why"),
        # As where torch is not installed.
        (
            "import sys; sys.modules['torch'] = None; sys.argv = ['', 'nowhere', 'cpu', 'text']; "
            "from service.debug.worker import main; main()",
            "gradients cannot be taken here; the log says why",
        ),
    ],
    ids=["ends", "without torch"],
)
async def test_a_process_that_cannot_start_says_so_each_time(script: str, reason: str) -> None:
    async with process_of([sys.executable, "-c", script]) as process:
        for _ in range(2):
            with pytest.raises(NotReady) as error:
                await process.run({})
            assert (error.value.code, error.value.detail) == ("gradients_unavailable", reason)
            assert process.pid is None


def test_what_a_library_prints_falls_between_no_frames_and_it_gives_way_to_encoding() -> None:
    script = (
        "import os, sys\n"
        "from service.debug import jobs, worker\n"
        "def opened(*_): os.write(1, b'noise'); print('noise', flush=True); return {'points': []}\n"
        "jobs.open_twin = opened\n"
        "jobs.run = lambda job: {'answer': os.sched_getscheduler(0)}\n"
        "sys.argv = ['', 'nowhere', 'cpu', 'text']\n"
        "worker.main()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert frames.read(worker.stdout) == {"points": []}
        worker.stdin.write(frames.encode({}))
        worker.stdin.flush()
        reply = frames.read(worker.stdout)
        assert reply is not None
        assert reply["answer"] == os.SCHED_IDLE
        worker.stdin.close()


def test_the_worker_ends_with_its_input_even_within_a_job(artifact: Artifact) -> None:
    command = worker_command(artifact.path, "cpu", "text")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        opened = frames.read(worker.stdout)
        assert opened is not None
        assert opened["points"][0] == "words"
        side = {"row": {"ids": list(range(1000, 1100)), "unpooled": 0}, "baseline": None}
        long = {"a": side, "b": side, "point": "words", "tolerance": 1e-9, "max_evaluations": 4096}
        worker.stdin.write(frames.encode({"kind": "pair", "compare": [], **long}))
        worker.stdin.close()
        assert worker.wait(10) == 0


@pytest.mark.parametrize("rest", [b"", b"\x00\x00\x03\xe8{half"], ids=["nothing", "half a frame"])
def test_the_worker_ends_when_its_input_breaks_off_but_not_at_an_interrupt(
    artifact: Artifact, rest: bytes, tmp_path: Path
) -> None:
    # Nor does it import what lies about in the directory that the service was started in.
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").write_text("raise SystemExit(9)")
    command = worker_command(artifact.path.absolute(), "cpu", "text")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=tmp_path) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        opened = frames.read(worker.stdout)
        assert opened is not None
        assert "failed" not in opened
        worker.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.3)
        worker.stdin.write(rest)
        worker.stdin.close()
        assert worker.wait(10) == 0


async def test_who_asks_what_there_is_does_not_wait_for_a_job() -> None:
    async with process_of() as process:
        assert (await process.start())["points"] == ["words"]
        job = asyncio.create_task(process.run({"seconds": 60}))
        await asyncio.sleep(0.1)
        assert (await asyncio.wait_for(process.start(), 1))["points"] == ["words"]
        job.cancel()


async def test_once_closed_it_starts_no_more() -> None:
    async with process_of() as process:
        assert await pid(process)
        running = asyncio.create_task(process.run({"seconds": 60}))
        waiting = asyncio.create_task(process.run({}))
        await asyncio.sleep(0.1)
        await process.close()
        done = await asyncio.gather(running, waiting, return_exceptions=True)
        assert all(isinstance(error, NotReady) for error in done)
        assert process.pid is None


def test_the_service_does_not_import_torch_for_its_gradient_routes() -> None:
    script = "import service.app, service.debug.routes, sys; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", script], cwd=root, check=False).returncode == 0
