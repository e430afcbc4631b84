import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from models.artifact import Artifact
from models.gradients.inputs import InputRow
from service.api.errors import status_of
from service.debug.pair import PairJob, PairRequest
from service.debug.pipeline import frames
from service.debug.pipeline.messages import REPLY, Done, Opened, encode_job
from service.debug.pipeline.process import GradientProcess, cpu_s
from service.debug.vjp import VjpJob, VjpRequest
from service.inference.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotReady,
    Overloaded,
    VitrineError,
)
from service.settings import DebugSettings
from tests.eventually import eventually_async
from tests.service.debug.held_worker import held_worker_command

pytestmark = pytest.mark.slow  # starts processes

# A gradient process without gradients: the text of a job is a command, as JSON.
FAKE = """
import json, os, select, signal, sys
from pathlib import Path
from service.debug.pipeline import frames
from tests.eventually import eventually

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as torch does during a matrix product
stdin = open(0, "rb", buffering=0)

def send(message):
    sys.stdout.buffer.write(frames.frame(json.dumps(message).encode()))
    sys.stdout.buffer.flush()

send({"outcome": "opened", "layers": {"words": "step"}, "norms": [], "taps": [],
      "device": "", "torch": "", "op": {}, "manifest_sha256": ""})
while (body := frames.read(stdin)) is not None:
    command = json.loads(json.loads(body)["request"]["text"])
    if hold := command.get("hold"):
        Path(hold, "started").touch()
        eventually(Path(hold, "released").exists)
    if command.get("die"):
        os._exit(3)
    next_is_there = bool(select.select([0], [], [], 0)[0])
    result = {"pid": os.getpid(), "next_is_there": next_is_there}
    done = {"outcome": "done", "result": result, "nonfinite": [], "converged": True, "wall_ms": 1.0}
    send(command.get("reply", done))
    if "reply" not in command:
        for size in command.get("sizes", [0, 0]):
            sys.stdout.buffer.write(frames.frame(bytes(size)))
        sys.stdout.buffer.flush()
"""


def job(**command: object) -> VjpJob:
    request = VjpRequest(text=json.dumps(command), cotangent=[1.0])
    return VjpJob(request=request, rows=[])


MANIFESTS: Any = [SimpleNamespace(name=name, sha256="") for name in ("first", "second")]
ARTIFACT, OTHER = (Artifact(Path("artifact"), manifest) for manifest in MANIFESTS)


@asynccontextmanager
async def process_of(
    command: list[str] | None = None, **settings: object
) -> AsyncIterator[GradientProcess]:
    chosen = DebugSettings(**{"deadline_s": 300.0, **settings})
    process = GradientProcess(lambda _: command or [sys.executable, "-c", FAKE], chosen)
    try:
        yield process
    finally:
        await process.close()


async def run(process: GradientProcess, artifact: Artifact, job: VjpJob) -> Done:
    """Run a job without vectors and file."""
    completed = await process.run(artifact, job)
    assert completed[1:] == (b"", b"")
    return completed.done


async def pid(process: GradientProcess) -> int:
    result = (await run(process, ARTIFACT, job())).result["pid"]
    assert isinstance(result, int)
    return result


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def held_job(process: GradientProcess, folder: Path) -> asyncio.Task[Done]:
    """Return a running job, which ends once the folder has a file "released"."""
    task = asyncio.create_task(run(process, ARTIFACT, job(hold=str(folder))))
    await eventually_async((folder / "started").exists)
    return task


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("policy", [None, "ACTIVE"])
async def test_threads_of_the_process_sleep_while_they_wait(
    policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    async with process_of() as process:
        environment = environment_of(await pid(process))
    assert f"OMP_WAIT_POLICY={policy or 'PASSIVE'}" in environment


def environment_of(process: int) -> list[str]:
    return Path(f"/proc/{process}/environ").read_text().split("\0")


async def test_process_starts_with_first_job_and_stays() -> None:
    async with process_of() as process:
        assert process.pid is None
        assert await pid(process) == await pid(process) == process.pid
    assert process.pid is None


async def test_second_start_waits_for_the_description() -> None:
    async with process_of() as process:
        first = asyncio.create_task(process.start(ARTIFACT))
        await eventually_async(lambda: process.pid is not None)
        assert not first.done()
        assert await process.start(ARTIFACT) == await first


async def test_jobs_run_one_at_a_time(tmp_path: Path) -> None:
    async with process_of() as process:
        first = await held_job(process, tmp_path)
        others = [asyncio.create_task(run(process, ARTIFACT, job())) for _ in range(2)]
        await asyncio.sleep(0)  # both have been submitted
        (tmp_path / "released").touch()
        replies = await asyncio.gather(first, *others)
        assert [reply.result["next_is_there"] for reply in replies] == [False] * 3


async def test_full_queue_refuses_at_once_and_the_other_jobs_finish(tmp_path: Path) -> None:
    async with process_of(max_waiting=1) as process:
        running = await held_job(process, tmp_path)
        waiting = asyncio.create_task(run(process, ARTIFACT, job()))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await run(process, ARTIFACT, job())
        assert refused.value.code == "busy"
        (tmp_path / "released").touch()
        assert (await running).result["pid"] == (await waiting).result["pid"] == process.pid


async def test_full_queue_refuses_to_start_the_process_for_another_model(tmp_path: Path) -> None:
    async with process_of(max_waiting=1) as process:
        running = await held_job(process, tmp_path)
        waiting = asyncio.create_task(process.start(OTHER))
        await asyncio.sleep(0)  # it has been queued
        with pytest.raises(Overloaded):
            await process.start(OTHER)
        assert (await process.start(ARTIFACT)).layers  # the running one has sent its description
        (tmp_path / "released").touch()
        await running
        assert (await waiting).layers
        assert process.artifact == OTHER


async def test_job_beyond_its_deadline_is_killed_and_the_next_one_works(tmp_path: Path) -> None:
    async with process_of(deadline_s=0.3) as process:
        await process.start(ARTIFACT)
        first = process.pid
        assert first is not None
        with pytest.raises(DeadlineExceeded, match=r"exceeded its deadline of 0\.3 s"):
            await run(process, ARTIFACT, job(hold=str(tmp_path)))
        await eventually_async(lambda: not is_alive(first))
        await process.start(ARTIFACT)
        assert process.pid not in (None, first)


async def test_cancelled_job_ends_its_process_and_the_next_one_works(tmp_path: Path) -> None:
    async with process_of() as process:
        first = await pid(process)
        task = await held_job(process, tmp_path)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually_async(lambda: not is_alive(first))
        assert await pid(process) != first


async def test_cancelled_job_in_the_queue_does_not_affect_the_running_one(tmp_path: Path) -> None:
    async with process_of() as process:
        first = await pid(process)
        running = await held_job(process, tmp_path)
        waiting = asyncio.create_task(run(process, ARTIFACT, job()))
        await asyncio.sleep(0)
        waiting.cancel()
        (tmp_path / "released").touch()
        assert (await running).result["pid"] == first


async def test_dead_process_gives_a_clear_error_and_the_next_job_works() -> None:
    async with process_of() as process:
        first = await pid(process)
        with pytest.raises(NotReady, match="died; the next request starts a new one") as error:
            await run(process, ARTIFACT, job(die=True))
        assert error.value.code == "gradients_unavailable"
        assert await pid(process) != first


async def test_process_that_died_between_jobs_is_replaced_without_an_error() -> None:
    async with process_of() as process:
        first = await pid(process)
        os.kill(first, signal.SIGKILL)
        await eventually_async(lambda: process.pid is None)
        assert (await process.start(ARTIFACT)).layers == {"words": "step"}
        assert process.pid not in (None, first)
        assert await pid(process) == process.pid


# Writes its process id to a file, and goes on with FAKE when there is a file "released".
SLOW_START = """
import os
from pathlib import Path
from tests.eventually import eventually
folder = Path({folder!r})
with (folder / "pids").open("a") as pids:
    print(os.getpid(), file=pids)
eventually((folder / "released").exists)
"""


@asynccontextmanager
async def starting_process(
    folder: Path,
) -> AsyncIterator[tuple[GradientProcess, asyncio.Task[int]]]:
    """Yield a process that is starting, until there is a file "released", and its first caller."""
    script = SLOW_START.format(folder=str(folder)) + FAKE
    async with process_of([sys.executable, "-c", script]) as process:
        caller = asyncio.create_task(pid(process))
        file = folder / "pids"  # empty between its creation and the first line
        await eventually_async(lambda: file.exists() and file.read_text().endswith("\n"))
        yield process, caller


def started_pids(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "pids").read_text().split()]


async def test_start_survives_its_caller(tmp_path: Path) -> None:
    async with starting_process(tmp_path) as (process, caller):
        for _ in range(3):  # their deadlines pass
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
            caller = asyncio.create_task(pid(process))
            await asyncio.sleep(0)
        (tmp_path / "released").touch()
        assert [await caller] == started_pids(tmp_path)


async def test_close_ends_a_start(tmp_path: Path) -> None:
    async with starting_process(tmp_path) as (process, caller):
        (started,) = started_pids(tmp_path)
        await process.close()
        with pytest.raises(NotReady, match="the service is stopping"):
            await caller
        assert process.pid is None
        assert not is_alive(started)


async def test_close_ends_a_start_that_has_no_process_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released = asyncio.Event(), asyncio.Event()
    create = asyncio.create_subprocess_exec

    async def late(*args: str, **options: Any) -> asyncio.subprocess.Process:  # noqa: ANN401
        begun.set()
        await released.wait()
        return await create(*args, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", late)
    async with process_of() as process:
        caller = asyncio.create_task(pid(process))
        await begun.wait()
        caller.cancel()
        await asyncio.wait({caller})
        (start,) = asyncio.all_tasks() - {asyncio.current_task()}
        await process.close()
        released.set()
        await asyncio.wait({start})
        assert process.pid is None


async def test_start_for_another_reference_model_ends_an_abandoned_start(tmp_path: Path) -> None:
    async with starting_process(tmp_path) as (process, caller):
        caller.cancel()
        await asyncio.wait({caller})
        (tmp_path / "released").touch()
        other = await run(process, OTHER, job())
        assert other.result["pid"] == started_pids(tmp_path)[-1] == process.pid
        assert not is_alive(started_pids(tmp_path)[0])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
async def test_job_beyond_its_deadline_says_whether_the_host_was_busy(tmp_path: Path) -> None:
    async with process_of(deadline_s=0.5) as process:
        await process.start(ARTIFACT)
        with pytest.raises(DeadlineExceeded, match=r"the host was busy, and the job got 0\.. s of"):
            await run(process, ARTIFACT, job(hold=str(tmp_path)))


@pytest.mark.parametrize(
    ("used_s", "message"),
    [
        (0.1, "the host was busy, and the job got 0.1 s of CPU time"),
        (9.0, "use fewer or shorter texts, fewer evaluations or fewer samples"),
        (math.nan, "use fewer or shorter texts, fewer evaluations or fewer samples"),
    ],
)
async def test_deadline_error_blames_the_text_only_if_the_job_had_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, used_s: float, message: str
) -> None:
    times = iter([0.0, used_s])
    monkeypatch.setattr("service.debug.pipeline.process.cpu_s", lambda _: next(times))
    async with process_of(deadline_s=0.5) as process:
        await process.start(ARTIFACT)
        with pytest.raises(DeadlineExceeded, match=f"exceeded its deadline of 0.5 s; {message}"):
            await run(process, ARTIFACT, job(hold=str(tmp_path)))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_cpu_time_of_a_process_is_that_of_the_system() -> None:
    actual, expected = cpu_s(os.getpid()), time.process_time()
    assert actual == pytest.approx(expected, abs=0.05)
    assert math.isnan(cpu_s(2**22 + 1))  # beyond the largest process id


async def test_process_is_replaced_after_max_jobs() -> None:
    async with process_of(max_jobs=2) as process:
        pids = [await pid(process) for _ in range(4)]
        assert pids[0] == pids[1] != pids[2] == pids[3]


async def test_refused_jobs_are_invalid_inputs_and_failed_jobs_are_errors() -> None:
    async with process_of() as process:
        refused = {"detail": "unknown layer", "code": "unknown_layer", "pointer": "/layer"}
        with pytest.raises(InvalidInput) as invalid:
            await run(process, ARTIFACT, job(reply={"outcome": "refused", **refused}))
        assert (invalid.value.code, invalid.value.pointer) == ("unknown_layer", "/layer")
        with pytest.raises(VitrineError) as failed:
            await run(process, ARTIFACT, job(reply={"outcome": "failed"}))
        assert (status_of(failed.value), failed.value.code) == (500, "gradients_failed")
        assert await pid(process)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "raise SystemExit(1)",
            "the gradient process timed out or exited during startup; see the log",
        ),
        # As where torch is not installed.
        (
            "import sys; sys.modules['torch'] = None; sys.argv = ['', 'nowhere', 'cpu', 'text']; "
            "from service.debug.child.__main__ import main; main()",
            "the gradient process could not load the reference model; see the log",
        ),
    ],
    ids=["ends", "without torch"],
)
async def test_process_that_cannot_start_gives_the_same_error_each_time(
    script: str, reason: str
) -> None:
    async with process_of([sys.executable, "-c", script]) as process:
        for _ in range(2):
            with pytest.raises(NotReady) as error:
                await run(process, ARTIFACT, job())
            assert (error.value.code, error.value.detail) == ("gradients_unavailable", reason)
            assert process.pid is None


@contextmanager
def worker_of(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker in the folder until the block ends."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=folder) as worker:
        try:
            yield worker
        finally:
            worker.kill()


def reply_of(worker: subprocess.Popen[bytes]) -> Any:  # noqa: ANN401 - one of the replies
    assert worker.stdout is not None
    body = frames.read(worker.stdout)
    assert body is not None
    return REPLY.validate_json(body)


def test_output_of_libraries_does_not_mix_with_frames_and_encoding_has_priority(
    tmp_path: Path,
) -> None:
    script = (
        "import os, sys, threading\n"
        "from service.debug.child import __main__ as worker, jobs\n"
        "from service.debug.pipeline.messages import Completed, Done, Opened\n"
        "class Jobs:\n"
        "    def __init__(self, *_):\n"
        "        os.write(1, b'noise'); print('noise', flush=True)\n"
        "        self.start, self.end = os.nice(0), threading.Event()\n"
        "        self.thread = threading.Thread(target=self.end.wait, daemon=True)\n"
        "        self.thread.start()\n"
        "    def describe(self): return Opened({}, [], '', '', {}, [], '')\n"
        "    def run(self, job):\n"
        "        other = os.getpriority(os.PRIO_PROCESS, self.thread.native_id)\n"
        "        nice = {'start': self.start, 'job': os.nice(0), 'other': other}\n"
        "        done = Done(nice, [], True, 1.0)\n"
        "        return Completed(done, b'', b'')\n"
        "jobs.Jobs = Jobs\n"
        "sys.argv = ['', 'nowhere', 'cpu', 'text']\n"
        "worker.main()\n"
    )
    with worker_of([sys.executable, "-c", script], tmp_path) as worker:
        assert worker.stdin is not None
        assert isinstance(reply_of(worker), Opened)
        worker.stdin.write(frames.frame(encode_job(job())))
        worker.stdin.flush()
        start = min(os.nice(0) + 5, 19)
        assert reply_of(worker).result == {"start": start, "job": 19, "other": 19}
        worker.stdin.close()


def test_worker_ends_with_its_input_even_within_a_job(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    command = held_worker_command(tmp_path / "hold", small_artifact.path.absolute(), "cpu", "text")
    with worker_of(command, tmp_path) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert reply_of(worker).layers["words"] == "embeddings.words"
        rows = [InputRow(list(range(1000, 1100)))] * 2
        request = PairRequest(a="", b="", layer="words", tolerance=1e-9, max_evaluations=4096)
        long = PairJob(request=request, rows=rows, baselines=[None, None])
        worker.stdin.write(frames.frame(encode_job(long)))
        worker.stdin.close()
        assert worker.stdout.read() == b""  # the job has not finished
        assert worker.wait() == 0


@pytest.mark.parametrize("rest", [b"", b"\x00\x00\x03\xe8{half"], ids=["nothing", "half a frame"])
def test_worker_ends_with_its_input_but_not_at_an_interrupt(
    small_artifact: Artifact, rest: bytes, tmp_path: Path
) -> None:
    # A package of the same name in the current directory is not imported.
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").write_text("raise SystemExit(9)")
    command = held_worker_command(tmp_path / "hold", small_artifact.path.absolute(), "cpu", "text")
    with worker_of(command, tmp_path) as worker:
        assert worker.stdin is not None
        assert isinstance(reply_of(worker), Opened)
        worker.send_signal(signal.SIGINT)
        # The job after the interrupt has a reply.
        request = VjpRequest(text="", cotangent=[1.0] * 32, layer="nowhere")
        unknown = VjpJob(request=request, rows=[InputRow([101, 102])])
        worker.stdin.write(frames.frame(encode_job(unknown)))
        worker.stdin.flush()
        assert reply_of(worker).code == "unknown_layer"
        worker.stdin.write(rest)
        worker.stdin.close()
        assert worker.wait() == 0


async def test_vectors_and_file_of_a_job_follow_its_reply() -> None:
    async with process_of() as process:
        for sizes in ((4, 3), (8, 5_000_000), (0, 1)):
            done, vectors, file = await process.run(ARTIFACT, job(sizes=sizes))
            assert (vectors, file) == (bytes(sizes[0]), bytes(sizes[1]))
            assert done.result["pid"] == await pid(process)


@pytest.mark.parametrize("reply", [{"outcome": "done"}, {"outcome": "unknown"}])
async def test_process_with_a_malformed_reply_is_replaced(reply: dict[str, str]) -> None:
    async with process_of() as process:
        first = await pid(process)
        with pytest.raises(ValidationError):
            await run(process, ARTIFACT, job(reply=reply))
        assert process.pid is None
        assert await pid(process) != first


async def test_process_with_a_malformed_description_is_not_used() -> None:
    script = "from service.debug.pipeline.frames import frame; import sys; sys.stdout.buffer.write("
    script += "frame(b'{}')); sys.stdout.flush(); sys.stdin.read()"
    async with process_of([sys.executable, "-c", script]) as process:
        for _ in range(2):
            with pytest.raises(ValidationError):
                await process.start(ARTIFACT)
            assert process.pid is None


async def test_start_does_not_wait_for_a_running_job(tmp_path: Path) -> None:
    async with process_of() as process:
        assert (await process.start(ARTIFACT)).layers == {"words": "step"}
        task = await held_job(process, tmp_path)
        assert (await process.start(ARTIFACT)).layers == {"words": "step"}
        assert not task.done()
        task.cancel()


@pytest.mark.parametrize("change", [{"path": Path("other")}, {"manifest": OTHER.manifest}])
async def test_job_for_another_reference_model_restarts_the_process(change: dict[str, Any]) -> None:
    other = replace(ARTIFACT, **change)
    async with process_of() as process:
        first = await pid(process)
        assert await pid(process) == first
        second = (await run(process, other, job())).result["pid"]
        assert second != first
        assert (await run(process, other, job())).result["pid"] == second
        assert await pid(process) not in (first, second)


async def test_closed_process_starts_no_more(tmp_path: Path) -> None:
    async with process_of() as process:
        assert await pid(process)
        running = await held_job(process, tmp_path)
        waiting = asyncio.create_task(run(process, ARTIFACT, job()))
        await asyncio.sleep(0)
        await process.close()
        done = await asyncio.gather(running, waiting, return_exceptions=True)
        assert all(isinstance(error, NotReady) for error in done)
        assert process.pid is None


def test_service_does_not_import_torch_for_its_gradient_routes() -> None:
    script = "import service.app, service.debug.routes, sys; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", script], cwd=root, check=False).returncode == 0
