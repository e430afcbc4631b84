"""Steps f and g: the service under load, beside gradients, and what a worker needs."""

import json
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path

import numpy as np

from tests.benchmarks.servers import ServerKind, ServerProcess
from tests.gpu_report.clients import latencies_of_clients
from tests.gpu_report.engine import artifact_of, engine_of
from tests.gpu_report.results import Row
from tests.gpu_report.step import Run

_JOBS: dict[str, dict[str, object]] = {
    "attribute": {"text": "w5 w6 w7 w8 w9", "target": {"type": "cosine", "text": "w10 w11 w12"}},
    "flow": {"texts": ["w5 w6 w7 w8 w9", "w10 w11 w12"], "objective": {"type": "cosine"}},
    "parity": {"texts": ["w5 w6 w7 w8 w9", "w10 w11 w12"]},
}
_PROCESSES, _THREADS = 4, 16
# Packages that take more disk space are listed.
_LARGE_MB = 20.0


def serve(run: Run) -> None:
    """Measure `/encode` alone, with a second model, and beside gradient jobs."""
    import_module("service.app")  # says which package is absent
    with _served(run, ("MiniLM",)) as server:
        _load(run, server, "one model", ["MiniLM"])
    names = ("MiniLM", "BERT-base")
    with _served(run, names) as server:
        _load(run, server, "two models", names)
    device = "cpu" if run.is_dry else run.device
    options = ("--debug.enabled=true", f"--debug.device={device}", "--debug.deadline_s=60")
    with _served(run, ("MiniLM",), *options) as server:
        for name, job in _JOBS.items():
            if not run.has_time(f"gradients: {name}", 15):
                return
            started = time.perf_counter()
            response = server.post(job, f"/debug/{name}")
            row: Row = {"job": name, "seconds, the first time": time.perf_counter() - started}
            started = time.perf_counter()
            server.post(job, f"/debug/{name}")
            row["seconds, the second time"] = time.perf_counter() - started
            row["warnings"] = json.dumps(response.get("warnings", []))
            run.recorder.add("Gradients", row)
        with _repeated(server, "/debug/attribute", _JOBS["attribute"]) as count:
            _load(run, server, "beside gradient jobs", ["MiniLM"])
        run.recorder.add("Gradient jobs beside the load", {"answered": count[0]})
        run.recorder.add("Memory beside gradients", _memory(server))


def needs(run: Run) -> None:
    """Measure the start, the memory and the packages of a worker."""
    import_module("service.app")  # says which package is absent
    for name in ("MiniLM",) if run.is_dry else ("MiniLM", "BERT-base"):
        with _served(run, (name,)) as server:
            server.post({"inputs": ["w5 w6 w7"] * 64})
            row: Row = {"model": name, "start, s": server.ready_s, **_memory(server)}
            run.recorder.add("A worker", row)
    sizes = {
        own.metadata["Name"]: sum(
            path.stat().st_size
            for file in own.files or ()
            if (path := Path(str(own.locate_file(file)))).is_file()
        )
        for own in distributions()
    }
    for package, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size / 1e6 > _LARGE_MB:
            run.recorder.add("Installed packages", {"package": package, "MB": size / 1e6})


@contextmanager
def _served(run: Run, names: Sequence[str], *options: str) -> Iterator[ServerProcess]:
    """Start the service with the models, the first of which is the default."""
    engine, precision = engine_of(run)
    served = [{"path": str(artifact_of(run, name).path), "name": name} for name in names]
    command = (
        *(sys.executable, "-m", "service", "--server.port={port}"),
        *(f"--engine.name={engine}", f"--engine.precision={precision}"),
        f"--models.served={json.dumps(served)}",
        f"--models.default={names[0]}",
        *options,
    )
    with ServerProcess(ServerKind(command)) as server, server.awake():
        yield server


@contextmanager
def _repeated(server: ServerProcess, path: str, job: dict[str, object]) -> Iterator[list[int]]:
    """Send a job again and again during the block; the list has the number of answers."""
    count, end = [0], threading.Event()

    def ask() -> None:
        while not end.is_set():
            server.post(job, path)
            count[0] += 1

    with ThreadPoolExecutor(1) as client:
        asked = client.submit(ask)
        try:
            yield count
        finally:
            end.set()
        asked.result()


def _load(run: Run, server: ServerProcess, case: str, models: Sequence[str]) -> None:
    """Send texts of mixed lengths from many connections, and record rate and latencies."""
    seconds = 0.2 if run.is_dry else 8.0
    if not run.has_time(f"load: {case}", 2 * seconds):
        return
    processes, threads = (1, 2) if run.is_dry else (_PROCESSES, _THREADS)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        # The first second is for imports and for shapes that are new to the engine.
        for length in (min(1.0, seconds), seconds):
            clients = partial(latencies_of_clients, server.port, list(models), threads, length)
            latencies = np.concatenate(pool.map(clients, range(processes)))
    row: Row = {
        "case": case,
        "connections": processes * threads,
        "requests/s": len(latencies) / seconds,
        "p50, ms": float(np.median(latencies)) * 1e3,
        "p99, ms": float(np.quantile(latencies, 0.99)) * 1e3,
    }
    run.recorder.add("Mixed load", row)


def _memory(server: ServerProcess) -> dict[str, float | str]:
    """Return the memory of the service, and that of all processes on the GPUs."""
    command = ["nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
        on_gpu: float | str = sum(map(float, output.stdout.split()))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        on_gpu = f"nvidia-smi does not tell: {error}"
    return {"resident memory, MB": server.resident_mb(), "GPU memory, MiB": on_gpu}
