import ctypes
import itertools
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from models.artifact import Artifact
from models.engines import (
    ENGINES,
    OUTPUTS,
    Agreement,
    CompiledGraph,
    CpuEngine,
    CpuRuns,
    Engine,
    EngineError,
    Hardware,
    Output,
    Precision,
    available_cpus,
    cosines,
    open_engine,
    self_check,
)
from models.engines.outputs import compare
from models.engines.with_numpy import TableEngine
from models.manifest import TABLE_ENGINE
from models.packing import PackedBatch, pack
from tests.eventually import eventually
from tests.models.export.cuda_graphs import for_cpu
from tests.models.wrong_outputs import assert_self_check_refuses

# Bound of each wait for another thread. A test that passes never gets near it.
WAIT_S = 60
ON_CPU = [
    pytest.param((name, precision), id=f"{name}-{precision}", marks=pytest.mark.slow)
    for name, entry in ENGINES.items()
    for precision in entry.precisions
    # int8 has a graph and tests of its own, in export/test_int8.py.
    if entry.target == "cpu"
    and precision != "int8"
    and entry.unusable(precision) is None
    # Static models have tests of their own, in export/test_static.py.
    and name != TABLE_ENGINE
]
CUDA_UNUSABLE = ENGINES["cuda"].unusable("float16")
ON_GPU = pytest.param(
    ("cuda", "float16"),
    id="cuda-float16",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(CUDA_UNUSABLE is not None, reason=str(CUDA_UNUSABLE)),
    ],
)


@pytest.fixture(scope="module", params=[*ON_CPU, ON_GPU])
def engine(request: pytest.FixtureRequest) -> Engine:
    name, precision = request.param
    holder = "artifact" if ENGINES[name].target == "cpu" else "half_artifact"
    return open_engine(request.getfixturevalue(holder), name, precision, threads=2)


def assert_agree(
    engine: Engine,
    actual: NDArray[np.float32],
    expected: NDArray[np.float32],
    output: Output = "pooled",
) -> None:
    if engine.precision == "float32":
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    assert compare("pooled", actual, expected).is_within(OUTPUTS[output].bounds[engine.precision])
    assert cosines(actual, expected).mean() >= 0.9999


@pytest.fixture(scope="module")
def reference(artifact: Artifact) -> Engine:
    return open_engine(artifact, "onnxruntime")


def random_rows(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(1000, 30000, int(rng.integers(2, 257))).tolist() for _ in range(count)]


def test_vector_does_not_depend_on_the_batch(engine: Engine) -> None:
    rows = random_rows(12)
    alone = np.concatenate([engine.run(pack([row])) for row in rows])
    order = np.random.default_rng(4).permutation(len(rows))
    batched = engine.run(pack([rows[i] for i in order]))[np.argsort(order)]
    assert_agree(engine, batched, alone)


def test_every_engine_agrees_with_onnxruntime(engine: Engine, reference: Engine) -> None:
    batch = pack(random_rows(12), prompt_tokens=[1] * 12)
    assert_agree(engine, engine.run(batch), reference.run(batch))
    assert_agree(engine, engine.run(batch, "tokens"), reference.run(batch, "tokens"), "tokens")


def test_concurrent_runs_keep_their_vectors_apart(engine: Engine) -> None:
    rows = random_rows(12)
    alone = np.concatenate([engine.run(pack([row])) for row in rows])
    with ThreadPoolExecutor(engine.streams) as streams:
        at_once = list(streams.map(lambda row: engine.run(pack([row])), rows * 3))
    assert_agree(engine, np.concatenate(at_once), np.tile(alone, (3, 1)))


def test_token_vectors_average_to_the_row_vector(engine: Engine) -> None:
    rows = random_rows(3)
    batch = pack(rows)
    tokens = engine.run(batch, "tokens")
    assert tokens.shape == (sum(map(len, rows)), 384)
    ends = np.cumsum([len(row) for row in rows])[:-1]
    means = np.stack([part.mean(0) for part in np.split(tokens, ends)])
    assert_agree(engine, engine.run(batch), means)


def test_self_check_passes_on_the_artifact(engine: Engine, artifact: Artifact) -> None:
    agreements = self_check(engine, artifact)
    assert set(agreements) == {"pooled", "tokens"}
    if engine.precision == "float32":
        assert agreements["pooled"].is_within(Agreement(1 - 1e-9, 1e-5))


def test_bfloat16_on_an_unsupported_cpu_raises_without_fallback(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openvino.Core.get_property", lambda *_: ["FP32", "INT8"])
    for name in ("openvino", "auto"):
        with pytest.raises(EngineError, match=r"openvino in bfloat16 is not usable: this CPU has"):
            open_engine(artifact, name, "bfloat16")
    with pytest.raises(EngineError, match="onnxruntime in bfloat16 is not usable: it supports"):
        open_engine(artifact, "onnxruntime", "bfloat16")


@pytest.mark.parametrize("output", ["pooled", "tokens"])
def test_self_check_rejects_wrong_vectors(
    reference: Engine, artifact: Artifact, output: Output
) -> None:
    assert_self_check_refuses(reference, artifact, output)


def test_run_uses_all_threads_only_when_no_run_overlaps() -> None:
    gate, graphs_used = threading.Event(), queue.SimpleQueue[str]()

    def compiled(name: str) -> CompiledGraph:
        def run(batch: PackedBatch, _outputs: Sequence[Output]) -> list[NDArray[np.float32]]:
            graphs_used.put(name)
            assert batch.rows == 1 or gate.wait(WAIT_S)
            return [np.zeros((batch.rows, 1), np.float32)]

        return CompiledGraph(run, cancel=lambda: None)

    graphs = {2: compiled("one"), 1: compiled("all")}
    engine = CpuEngine("fake", "float32", Hardware(2, 0, CpuRuns()), 0, graphs.__getitem__)
    short, held = pack([[1]]), pack([[1], [2]])
    engine.run(short)
    engine.run(short)
    assert [graphs_used.get(), graphs_used.get()] == ["all", "all"]
    with ThreadPoolExecutor(1) as stream:
        overlapped = stream.submit(engine.run, held)
        assert graphs_used.get(timeout=WAIT_S) == "all"
        engine.run(short)
        gate.set()
        overlapped.result()
    engine.run(short)
    engine.run(short)
    assert [graphs_used.get() for _ in range(3)] == ["one", "one", "all"]
    gate.clear()
    with ThreadPoolExecutor(1) as stream:
        overlapped = stream.submit(engine.run, held)
        assert graphs_used.get(timeout=WAIT_S) == "all"
        engine.run(pack([[1] * 2000]))  # a long batch
        gate.set()
        overlapped.result()
    assert graphs_used.get() == "all"


def test_runs_of_other_engines_on_the_cpu_overlap_too() -> None:
    gate, begun = threading.Event(), queue.SimpleQueue[str]()

    def engine_of(name: str, cpu_runs: CpuRuns) -> CpuEngine:
        def compile_graph(concurrent_runs: int) -> CompiledGraph:
            def run(batch: PackedBatch, _outputs: Sequence[Output]) -> list[NDArray[np.float32]]:
                begun.put(f"{name}, {2 // concurrent_runs} threads")
                assert batch.rows == 1 or gate.wait(WAIT_S)
                return [np.zeros((batch.rows, 1), np.float32)]

            return CompiledGraph(run, cancel=lambda: None)

        return CpuEngine("fake", "float32", Hardware(2, 0, cpu_runs), 0, compile_graph)

    cpu_runs = CpuRuns()
    first, second = engine_of("first", cpu_runs), engine_of("second", cpu_runs)
    short, held, long_row = pack([[1]]), pack([[1] * 2000, [2]]), pack([[1] * 2000])
    first.run(short)
    second.run(short)
    assert [begun.get(), begun.get()] == ["first, 2 threads", "second, 2 threads"]
    with ThreadPoolExecutor(1) as stream:
        overlapped = stream.submit(first.run, held)
        assert begun.get(timeout=WAIT_S) == "first, 2 threads"
        second.run(short)
        second.run(long_row)  # one long row at a time has all threads
        gate.set()
        overlapped.result()
    second.run(long_row)
    second.run(short)
    assert [begun.get() for _ in range(4)] == [
        *("second, 1 threads", "second, 1 threads"),
        *("second, 2 threads", "second, 2 threads"),
    ]


# On the CPU only: a GPU finishes the work that it has accepted.
@pytest.mark.parametrize("engine", ON_CPU, indirect=True)
def test_cancelled_run_raises_and_the_next_run_succeeds(engine: Engine) -> None:
    batch = pack([[1000 + i for i in range(256)]] * 64)  # seconds of work
    with ThreadPoolExecutor(1) as stream:
        running = stream.submit(engine.run, batch)

        def cancelled() -> bool:
            engine.cancel()  # repeated, because a run that has not begun is not cancelled
            return running.done()

        eventually(cancelled)
        with pytest.raises(Exception, match=r"terminate flag|was canceled"):
            running.result()
    engine.cancel()  # without a run
    assert np.isfinite(engine.run(pack([[1000, 1001]]))).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_runs_after_a_cancelled_one_have_the_same_vectors(
    small_artifact: Artifact, threads: int
) -> None:
    """A compiled graph of OpenVINO keeps shapes of an aborted run, at whatever node that was."""
    engine = open_engine(small_artifact, "openvino", threads=threads)
    batches = [pack([[1000 + i for i in range(length)]]) for length in (1, 5)]
    expected = [engine.run(batch) for batch in batches]
    large = pack([[1000 + i for i in range(500)]] * 4)
    started = time.monotonic()
    engine.run(large)
    duration = time.monotonic() - started
    errors = []
    with ThreadPoolExecutor(1) as stream:
        for share in np.linspace(0.05, 0.95, 25):
            running = stream.submit(engine.run, large)
            time.sleep(share * duration)
            engine.cancel()
            errors.append(str(running.exception()))
            for batch, vectors in zip(batches, expected, strict=True):
                np.testing.assert_allclose(engine.run(batch), vectors, rtol=0, atol=1e-5)
    assert any("Infer Request was canceled" in error for error in errors)  # by OpenVINO


def test_openvino_compiles_its_graph_again_after_a_failed_run(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes stay after an error too: where memory ran out, all later runs failed."""
    import openvino

    engine = open_engine(small_artifact, "openvino", threads=2)
    batch = pack([[1000, 1001]])
    expected = engine.run(batch)
    compiled: list[object] = []
    own = openvino.Core.compile_model

    def compile_model(*arguments: Any) -> object:  # noqa: ANN401
        compiled.append(own(*arguments))
        return compiled[-1]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to allocate 46080000 bytes of memory")

    monkeypatch.setattr("openvino.Core.compile_model", compile_model)
    for runs in (1, 2):
        with monkeypatch.context() as failing:
            failing.setattr("openvino.InferRequest.infer", fail)
            with pytest.raises(RuntimeError, match="Failed to allocate"):
                engine.run(batch)
        for _ in range(2):
            np.testing.assert_allclose(engine.run(batch), expected, rtol=0, atol=1e-5)
        assert len(compiled) == runs


def test_run_beside_a_failed_one_is_repeated_and_does_not_fail(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openvino

    engine = open_engine(small_artifact, "openvino", threads=2)
    run, batch = engine.runs[-1], pack([[1000, 1001]])
    (expected,) = run(batch, ["pooled"])
    began, failed, calls = threading.Event(), threading.Event(), itertools.count()
    own = openvino.InferRequest.infer

    def infer(*arguments: Any, **options: Any) -> object:  # noqa: ANN401
        call = next(calls)
        if call == 0:
            began.set()
            assert failed.wait(WAIT_S)
        elif call == 1:
            raise RuntimeError("Failed to allocate 46080000 bytes of memory")
        return own(*arguments, **options)

    monkeypatch.setattr("openvino.InferRequest.infer", infer)
    with ThreadPoolExecutor(1) as stream:
        beside = stream.submit(run, batch, ["pooled"])
        assert began.wait(WAIT_S)
        with pytest.raises(RuntimeError, match="Failed to allocate"):
            run(batch, ["pooled"])
        failed.set()
        (actual,) = beside.result()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    assert next(calls) == 3


class Mallinfo(ctypes.Structure):
    """glibc's allocation statistics; see mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_mb() -> float:
    """Return the memory currently allocated through glibc, in MB."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    statistics = libc.mallinfo2()
    return float(statistics.uordblks + statistics.hblkhd) / 1e6


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_shapes(engine: Engine) -> None:
    rng = np.random.default_rng(5)

    def run_shapes(count: int) -> None:
        for _ in range(count):
            longest = int(rng.integers(2, 64))
            lengths = rng.integers(1, longest + 1, int(rng.integers(0, 12)))
            engine.run(pack([[1000] * longest, *([1000] * length for length in lengths)]))

    run_shapes(150)
    before = allocated_mb()
    run_shapes(100)
    # Measured with OpenVINO: 1 MB more, and 13 MB more without a bound on its cache.
    assert allocated_mb() < before + 8


@pytest.mark.slow
def test_memory_of_a_large_batch_is_given_back_at_its_end(artifact: Artifact) -> None:
    engine = open_engine(artifact, "onnxruntime", threads=1)
    engine.run(pack([[1000] * 64] * 4))
    before = allocated_mb()
    # The scores of one layer alone: 12 heads * 16 rows * 256 * 256 floats are 50 MB.
    engine.run(pack([[1000] * 256] * 15 + [[1000] * 255]))
    assert allocated_mb() < before + 20


REPEATED_SHAPE = """
import resource, sys
from pathlib import Path
from models.artifact import Artifact
from models.engines import open_engine
from models.packing import pack
engine = open_engine(Artifact.load(Path(sys.argv[1])), "onnxruntime", threads=1)
peaks = []
for _ in range(3):
    engine.run(pack([[1000] * 256] * 16))
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(max(peaks) - peaks[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit")
def test_peak_memory_does_not_grow_when_a_shape_repeats(artifact: Artifact) -> None:
    command = [sys.executable, "-c", REPEATED_SHAPE, str(artifact.path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    vectors_kib = 16 * 256 * 384 * 4 / 1024
    assert int(output) < 2 * vectors_kib


def test_closing_a_table_keeps_it_for_the_run_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.random.default_rng(0).standard_normal((9, 4), np.float32)
    engine = TableEngine(table, Hardware(1, 0, CpuRuns()))
    argsort = np.argsort

    def close_and_sort(*args: Any, **options: Any) -> Any:  # noqa: ANN401
        engine.close()  # as another thread does
        return argsort(*args, **options)

    monkeypatch.setattr(np, "argsort", close_and_sort)
    pooled, tokens = engine.run_outputs(pack([[1, 8], [5]]), ("pooled", "tokens"))
    np.testing.assert_allclose(pooled, [table[[1, 8]].mean(0), table[5]], rtol=1e-6)
    np.testing.assert_array_equal(tokens, table[[1, 8, 5]])
    assert engine.runs == ()


def test_thousands_of_threads_are_refused(artifact: Artifact) -> None:
    with pytest.raises(EngineError, match="at most 16 per CPU of this machine"):
        open_engine(artifact, "onnxruntime", threads=100_000)


def test_single_threaded_engine_compiles_the_graph_once(artifact: Artifact) -> None:
    engine = open_engine(artifact, threads=1)
    assert engine.streams == 1
    assert len(set(engine.runs)) == 1


def test_unknown_engine_error_lists_the_engines(artifact: Artifact) -> None:
    with pytest.raises(EngineError, match="unknown engine 'tensorrt'; engines: auto, cuda, onnx"):
        open_engine(artifact, "tensorrt")


@pytest.mark.parametrize("name", ["onnxruntime", "auto"])
def test_missing_engine_package_error_names_the_extra(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        EngineError, match="onnxruntime is not installed; install Vitrine with its extra 'cpu'"
    ):
        open_engine(artifact, name)


def test_unsupported_precision_raises_engine_error(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, entry in ENGINES.items():
        other = replace(entry, precisions={"bfloat16": "float32"})
        monkeypatch.setitem(ENGINES, name, other)
    with pytest.raises(EngineError, match="onnxruntime in float32 is not usable: it supports only"):
        open_engine(artifact)


class FakeDriver:
    """Stands in for the NVIDIA driver library that ctypes loads."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus

    def cuInit(self, _flags: int) -> int:  # noqa: N802
        return 0 if self.gpus else 100

    def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802
        count._obj.value = self.gpus  # type: ignore[attr-defined]
        return 0


def onnxruntime_with_cuda(
    monkeypatch: pytest.MonkeyPatch, *, gpus: int, has_libraries: bool = True
) -> list[dict[str, object]]:
    """Make onnxruntime report CUDA support while its sessions run on the CPU.

    Without CUDA's libraries a session falls back to the CPU and only logs that, as onnxruntime
    does. Returns the list to which each session opened for a GPU adds its options.
    """
    sessions: list[dict[str, object]] = []
    session = onnxruntime.InferenceSession

    def open_session(
        graph: str,
        options: onnxruntime.SessionOptions,
        providers: list[tuple[str, dict[str, object]]],
        enable_fallback: int,
    ) -> onnxruntime.InferenceSession:
        [(provider, provider_options)] = providers
        sessions.append({"enable_fallback": enable_fallback, **provider_options})
        if int(str(provider_options["device_id"])) >= gpus:
            raise RuntimeError("CUDA failure 101: invalid device ordinal")
        on_cpu = session(for_cpu(Path(graph)), options, providers=["CPUExecutionProvider"])
        if has_libraries:
            on_cpu.get_providers = lambda: [provider, "CPUExecutionProvider"]
        return on_cpu

    monkeypatch.setattr("onnxruntime.InferenceSession", open_session)
    monkeypatch.setattr(
        "onnxruntime.get_available_providers",
        lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"],
    )
    monkeypatch.setattr("ctypes.CDLL", lambda _: FakeDriver(gpus))
    return sessions


def test_cuda_engine_on_cpu_kernels_gives_the_reference_vectors(
    half_artifact: Artifact, reference: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = onnxruntime_with_cuda(monkeypatch, gpus=2)
    engine = open_engine(half_artifact, "auto", "float16", gpu=1)
    assert sessions == [{"device_id": 1, "use_tf32": 0, "enable_fallback": 0}]
    assert (engine.name, engine.precision) == ("cuda", "float16")
    assert self_check(engine, half_artifact)["pooled"].cosine > 0.9999
    batches = [pack([row]) for row in random_rows(8)]
    with ThreadPoolExecutor(engine.streams) as streams:
        at_once = list(streams.map(engine.run, batches))
    for batch, actual in zip(batches, at_once, strict=True):
        assert_agree(engine, actual, reference.run(batch))
        assert_agree(engine, engine.run(batch, "tokens"), reference.run(batch, "tokens"))


def test_unusable_gpu_raises_without_fallback(
    artifact: Artifact, half_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_error(artifact: Artifact, precision: Precision, gpu: int = 0) -> str:
        with pytest.raises(EngineError) as error:
            open_engine(artifact, "cuda", precision, gpu=gpu)
        return str(error.value)

    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "the installed onnxruntime supports CPUs only" in open_error(half_artifact, "float16")
    with monkeypatch.context() as patch:
        onnxruntime_with_cuda(patch, gpus=1)
        message = open_error(half_artifact, "float16", gpu=1)
        assert "onnxruntime cannot compute on GPU 1: CUDA failure 101" in message
        message = open_error(half_artifact, "float32")
        assert (
            "no graph for cuda in float32; export it with --target cuda --dtype float32" in message
        )
        assert "no graph for cuda in float16" in open_error(artifact, "float16")
        assert "it supports only float32, float16" in open_error(half_artifact, "bfloat16")
    with monkeypatch.context() as patch:
        onnxruntime_with_cuda(patch, gpus=1, has_libraries=False)
        assert "cannot compute on GPU 0; see the log of onnxruntime" in open_error(
            half_artifact, "float16"
        )
    with monkeypatch.context() as patch:
        onnxruntime_with_cuda(patch, gpus=0)
        assert "the NVIDIA driver finds no GPU" in open_error(half_artifact, "float16")
        patch.setattr("ctypes.CDLL", no_library)
        assert "no NVIDIA driver is installed" in open_error(half_artifact, "float16")


def no_library(_: str) -> None:
    raise OSError


@pytest.mark.skipif(sys.platform != "linux", reason="affinity and cgroups exist on Linux only")
@pytest.mark.parametrize(
    ("file", "content", "cpus"),
    [
        ("cpu.max", "150000 100000", 2),
        ("cpu.max", "50000 100000", 1),
        ("cpu.max", "max 100000", 8),
        ("cpu/cpu.cfs_quota_us", "300000", 3),
        ("cpu/cpu.cfs_quota_us", "-1", 8),
        (None, "", 8),
    ],
)
def test_available_cpus_follow_the_cgroup_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str | None, content: str, cpus: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    if file:
        path = tmp_path / "sys/fs/cgroup" / file
        path.parent.mkdir(parents=True)
        path.write_text(content)
        path.with_name("cpu.cfs_period_us").write_text("100000")
    assert available_cpus(tmp_path) == cpus


@pytest.mark.skipif(sys.platform != "linux", reason="affinity and cgroups exist on Linux only")
@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        ("0::/a.slice/b.service", {"a.slice/b.service/cpu.max": "300000 100000"}, 3),
        (
            "0::/a.slice/b.service",
            {"a.slice/cpu.max": "200000 100000", "a.slice/b.service/cpu.max": "max 100000"},
            2,
        ),
        (
            "0::/a.slice/b.service",
            {"a.slice/cpu.max": "500000 100000", "a.slice/b.service/cpu.max": "350000 100000"},
            4,
        ),
        ("0::/a.slice", {"a.slice/b.service/cpu.max": "300000 100000"}, 8),
        (
            "5:cpu,cpuacct:/a\n2:cpuset:/b\n0::/c",
            {
                "cpu/a/cpu.cfs_quota_us": "300000",
                "cpu/a/cpu.cfs_period_us": "100000",
                "cpu/b/cpu.cfs_quota_us": "100000",
                "cpu/b/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        # A container has the path that its cgroup has on the host, and the files at the root.
        ("0::/docker/1f2e", {"cpu.max": "300000 100000"}, 3),
    ],
)
def test_available_cpus_follow_the_quotas_of_all_cgroups_around_the_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: Mapping[str, str],
    cpus: int,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{groups}\n")
    for name, content in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert available_cpus(tmp_path) == cpus


def test_available_cpus_without_affinity_are_all_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.sched_getaffinity")  # absent on macOS
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert available_cpus(tmp_path) == 6


def test_large_graph_is_compiled_once_and_runs_one_batch_at_a_time() -> None:
    compiled: list[int] = []

    def compile_graph(concurrent_runs: int) -> CompiledGraph:
        compiled.append(concurrent_runs)
        return CompiledGraph(lambda *_: [np.zeros((1, 1), np.float32)], lambda: None)

    four, one = (Hardware(threads, 0, CpuRuns()) for threads in (4, 1))
    engine = CpuEngine("fake", "float32", four, 10**9, compile_graph)
    assert (compiled, engine.streams, engine.threads, len(engine.runs)) == ([1], 1, 4, 1)
    compiled.clear()
    engine = CpuEngine("fake", "float32", four, 10**8, compile_graph)
    assert (compiled, engine.streams, engine.threads, len(engine.runs)) == ([1, 4], 4, 4, 2)
    compiled.clear()
    CpuEngine("fake", "float32", one, 10**8, compile_graph)
    assert compiled == [1]
