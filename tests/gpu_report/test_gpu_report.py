"""The report of a GPU: every step on a CPU, and what faults leave of it."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from models.artifact import Artifact
from models.engines import Agreement, CpuEngine, Engine, measure_check
from models.gradients.layer_norm_implementations import IMPLEMENTATIONS, PassOutcome
from models.gradients.layer_norm_operands import Operands
from models.manifest import Output
from tests.benchmarks import bench_op
from tests.gpu_report import engine, figures, fused_norm
from tests.gpu_report.__main__ import main, run_step
from tests.gpu_report.results import ResultFile, Row, TableLine, read_results, write_report
from tests.gpu_report.step import FAILED, STEPS, Run

pytestmark = pytest.mark.slow

_FAULTS = "tests.gpu_report.test_gpu_report"
# Hides the packages that a machine with torch alone lacks.
_WITHOUT_PACKAGES = """
from importlib.machinery import PathFinder

ABSENT = {"fastapi", "starlette", "uvicorn", "orjson", "pydantic", "pydantic_settings", "openvino"}
find = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name in ABSENT else find(name, path, target)

PathFinder.find_spec = find_spec
"""


def crash(run: Run) -> None:
    run.recorder.add("Numbers", {"number": 1.0}, passes=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(run: Run) -> None:
    run.recorder.add("Numbers", {"number": 1.0}, passes=True)
    time.sleep(3600)


def exhaust(_run: Run) -> None:
    raise MemoryError("CUDA out of memory. Tried to allocate 80 GiB.\nMore lines")


def report_of(out: Path) -> list[TableLine]:
    content = json.loads((out / "report.json").read_text("utf-8"))
    return [TableLine(**result) for result in content["results"]]


def test_every_step_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(_WITHOUT_PACKAGES)
    out = tmp_path / "out"
    arguments = ["--dry-run", "--minutes", "120", "--out", str(out)]
    with monkeypatch.context() as without_packages:
        without_packages.setenv("PYTHONPATH", str(tmp_path))
        assert main([*arguments, "--only=a,b,c,d,e,g"]) == 0
        results = report_of(out)
        assert {result.step for result in results if result.table != FAILED} == {*"abcde"}
        assert [result.row["error"] for result in results if result.table == FAILED] == [
            "not run: the package fastapi is absent"
        ]
    assert main([*arguments, "--only=f,g"]) == 0
    served = report_of(out)
    assert {result.step for result in served} == {"f", "g"}
    for result in [*results, *served]:
        assert result.table != "Left out"
        assert result.passes is not False
        assert result.table != FAILED or result.step == "g"


def test_figures_replace_those_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before\n<!-- gpu-report -->\nold\n<!-- end of gpu-report -->\nAfter\n")
    size: Row = {"pass": "forward", "rows": 65536, "width": 1024, "dtype": "bf16"}
    small: Row = {**size, "rows": 1024}
    results = [
        TableLine("a", "Device", {"fact": "device", "value": "GPU X"}),
        TableLine("a", "Device", {"fact": "date", "value": "2026-01-02"}),
        TableLine(
            "c", "Times", {**size, "implementation": "vitrine (triton)", "us": 2, "of copy": 1}
        ),
        TableLine("c", "Times", {**size, "implementation": "eager", "us": 3, "of copy": 0.5}),
        TableLine("c", "Times", {**small, "implementation": "vitrine (triton)", "us": 2}),
        TableLine("f", "Mixed load", {"case": "one model", "requests/s": 1234.5}),
    ]
    write_report(tmp_path, {}, results)
    report = str(tmp_path / "report.json")
    for _ in range(2):  # the second time over its own lines
        assert figures.main([report, "--page", str(page)]) == 0
        text = page.read_text()
    assert text.startswith("Before\n<!-- gpu-report -->\nGPU X, ")
    assert text.endswith("<!-- end of gpu-report -->\nAfter\n")
    assert text.count("2026-01-02") == 1
    assert "| forward | 65536 | 1024 | bf16 | 2 | 1 | 1.5 |" in text
    assert "| one model | 1,234 |" in text
    assert "1024 | 1024" not in text
    page.write_text("A page without the comments")
    with pytest.raises(SystemExit):
        figures.main([report, "--page", str(page)])
    assert page.read_text() == "A page without the comments"


@pytest.mark.parametrize(
    ("device", "error"),
    [
        ("cuda:9", "finds 0 CUDA devices, not cuda:9"),
        ("gpu", "Expected one of cpu"),
    ],
)
def test_device_that_is_absent_is_named(tmp_path: Path, device: str, error: str) -> None:
    assert main(["--out", str(tmp_path), "--device", device, "--only=a,c", "--minutes=60"]) == 1
    results = report_of(tmp_path)
    assert [(result.step, result.table) for result in results] == [("a", FAILED), ("c", FAILED)]
    assert all(error in str(result.row["error"]) for result in results)
    assert "2 failed, 0 passed" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("crash", "the process ended by SIGSEGV; see x.log"),
        ("hang", "the step was killed 0.1 s after its time limit of 1 s"),
    ],
)
def test_results_before_a_crash_or_a_hang_are_kept(tmp_path: Path, fault: str, error: str) -> None:
    function = f"{_FAULTS}:{fault}"
    # The process of a step that hangs needs seconds to begin.
    seconds = 1.0 if fault == "hang" else 600.0
    results = run_step("x", function, "cpu", seconds, tmp_path, grace_s=0.1)
    assert results[-1] == TableLine("x", FAILED, {"error": error}, passes=False)
    if fault == "crash":
        assert results[0] == TableLine("x", "Numbers", {"number": 1.0}, passes=True)


def test_error_of_a_step_is_one_sentence_with_its_place(tmp_path: Path) -> None:
    [result] = run_step("x", f"{_FAULTS}:exhaust", "cpu", 600, tmp_path)
    error = "MemoryError: CUDA out of memory. Tried to allocate 80 GiB."
    assert (result.row, result.passes) == ({"error": error}, False)
    assert result.cause.startswith("tests/gpu_report/test_gpu_report.py, line ")
    assert "More lines" in (tmp_path / "x.log").read_text()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Yield a run of the step "x" on the CPU, whose results are in the folder "x.jsonl"."""
    with (tmp_path / "x.jsonl").open("w") as file:
        yield Run("cpu", tmp_path, math.inf, ResultFile("x", file))


def test_wrong_kernel_fails_with_norm_rows_width_and_pass(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_wrong_gradient(operands: Operands) -> PassOutcome:
        outputs, gradients = IMPLEMENTATIONS["cpp"](operands)
        assert not isinstance(gradients, str)
        dx = gradients["dx"]
        assert dx is not None
        return PassOutcome(outputs, {**gradients, "dx": 2 * dx})

    monkeypatch.setattr(fused_norm, "IMPLEMENTATIONS", {"cpp": with_wrong_gradient})
    fused_norm._hostile_rows(run)
    results = read_results(run.folder / "x.jsonl")
    passes = {
        (result.row["rows"], result.row["pass"]): result.passes
        for result in results
        if (result.row["norm"], result.row["width"]) == ("LayerNorm", 64)
    }
    assert (passes["normal", "forward"], passes["normal", "backward"]) == (True, False)
    causes = [result.cause for result in results if result.passes is False]
    assert all("dx" in cause for cause in causes)
    assert any(cause.startswith("LayerNorm, normal, width 64, backward: ") for cause in causes)


def test_value_that_is_not_a_number_is_no_small_error() -> None:
    exact = torch.ones(3, dtype=torch.float64)
    assert fused_norm._error(torch.tensor([1.0, math.nan, 1.0]), exact, 1e-6, 0.0) == math.inf
    assert fused_norm._error(torch.ones(3), exact, 1e-6, 0.0) == 0


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_every_gpu_is_timed_with_cuda_graphs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_op, "cuda_seconds", lambda _run: 7.0)
    assert bench_op.timer(lambda: None, device)() == {"us": 7e6}


@pytest.mark.parametrize("kind", ["small", "reranker"])
def test_engine_that_differs_fails_with_its_results_without_optimisations(
    kind: str, run: Run, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "small":
        artifact: Artifact = request.getfixturevalue("small_artifact")
    else:
        artifact = engine._of_kind(run, kind)

    def wrong_once(own: Engine, artifact: Artifact) -> dict[Output, Agreement]:
        agreements = measure_check(own, artifact)
        if not isinstance(own, CpuEngine):
            return agreements
        return {output: Agreement(0.5, 0.0) for output in agreements}

    monkeypatch.setattr(engine, "measure_check", wrong_once)
    engine._compare(run, kind, artifact)
    results = read_results(run.folder / "x.jsonl")
    assert len(results) == len(artifact.manifest.outputs)
    for result in results:
        assert (result.passes, result.row["1 - cosine"]) == (False, 0.5)
        assert "a worst cosine of 1.000000, and of 1.000000 without optimisations" in result.cause


def test_work_that_no_time_is_left_for_is_named(tmp_path: Path) -> None:
    with (tmp_path / "x.jsonl").open("w") as file:
        run = Run("cpu", tmp_path, time.monotonic() + 1000, ResultFile("x", file))
        assert run.has_time("one", 100)
        assert not run.has_time("two", 2000)
    row = {"what": "two", "reason": "the time limit of the step"}
    assert read_results(tmp_path / "x.jsonl") == [TableLine("x", "Left out", row)]


def test_line_that_a_dying_process_left_incomplete_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    assert read_results(file) == []
    with file.open("w") as stream:
        ResultFile("x", stream).add("Numbers", {"number": 2})
        stream.write('{"step": "x", "tab')
    assert read_results(file) == [TableLine("x", "Numbers", {"number": 2})]


def test_report_has_a_table_per_title_and_the_causes(tmp_path: Path) -> None:
    results = [
        TableLine("a", "Rates", {"case": "one|two", "rate": 1234.5}, passes=True),
        TableLine("a", "Rates", {"case": "three", "note": None}, passes=False, cause="too slow"),
        TableLine("b", "Facts", {"fact": 0.01234}),
    ]
    write_report(tmp_path, {"a": "First", "b": "Second", "c": "Third"}, results)
    assert (tmp_path / "report.md").read_text() == (
        "# GPU report: 1 failed, 1 passed\n\n## a. First\n\n### Rates\n\n"
        "| case | rate | note | passes |\n|---|---|---|---|\n"
        "| one\\|two | 1,234 |  | yes |\n| three |  |  | **no** |\n\n- too slow\n\n"
        "## b. Second\n\n### Facts\n\n| fact |\n|---|\n| 0.0123 |\n"
    )
    assert report_of(tmp_path) == results


def test_unknown_step_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--only=a,z"])
    assert f"unknown step 'z'; steps: {', '.join(STEPS)}" in capsys.readouterr().err


_ROOT = Path(__file__).parents[2]
# Stands for pip in `bundle.sh` and `join.sh`, which need an index and CPython 3.12.
_PYTHON = """#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in
  -) exec {python} - "$2" ;;
  --dest) touch "$2/package-1-py3-none-any.whl" ;;
  --target) mkdir -p "$2" ;;
  esac
  shift
done
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that packs a bundle into the folder "out"."""
    python = tmp_path / "bin/python3"
    python.parent.mkdir()
    python.write_text(_PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    model, wheel = tmp_path / "model", tmp_path / "engine-1-py3-none-any.whl"
    model.mkdir()
    (model / "manifest.json").write_text("{}")
    (model / "weights").write_bytes(os.urandom(2_500_000))
    wheel.write_bytes(b"wheel")
    script = _ROOT / "tests/gpu_report/bundle.sh"

    def pack(*options: str, model: Path = model) -> subprocess.CompletedProcess[str]:
        command: list[str | Path] = [script, *options, python, model, tmp_path / "out", wheel]
        return subprocess.run(command, cwd=_ROOT, check=False, capture_output=True, text=True)

    return pack


def join(folder: Path) -> subprocess.CompletedProcess[str]:
    """Join the parts in the folder "out" into the folder "joined"."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    command = [folder / "out/join.sh", folder / "joined"]
    return subprocess.run(command, env={"PATH": path}, check=False, capture_output=True, text=True)


def test_bundle_is_joined_in_an_empty_folder(
    bundle: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    packed = bundle("--part-mb", "1")
    assert packed.returncode == 0, packed.stderr
    parts = sorted((tmp_path / "out").glob("part-*"))
    assert len(parts) > 2
    assert all(part.stat().st_size <= 1_000_000 for part in parts)
    joined = join(tmp_path)
    assert joined.returncode == 0, joined.stderr
    assert "python3 -m tests.gpu_report --out" in joined.stdout
    folder = tmp_path / "joined"
    committed = ["git", "ls-tree", "-r", "--name-only", "HEAD"]
    names = subprocess.run(committed, cwd=_ROOT, check=True, capture_output=True, text=True).stdout
    assert all((folder / "vitrine" / name).is_file() for name in names.splitlines())
    weights = folder / "vitrine/artifacts/model/weights"
    assert weights.read_bytes() == (tmp_path / "model/weights").read_bytes()
    assert (folder / "given/engine-1-py3-none-any.whl").read_bytes() == b"wheel"
    requirements = (folder / "wheels/requirements.txt").read_text()
    assert "fastapi>=" in requirements
    assert "torch" not in requirements


def test_damaged_part_is_named(
    bundle: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    bundle("--part-mb", "1")
    with (tmp_path / "out/part-001").open("r+b") as part:
        part.write(b"damage")
    joined = join(tmp_path)
    assert joined.returncode != 0
    assert "part-001: FAILED" in joined.stdout
    assert not (tmp_path / "joined").exists()


@pytest.mark.parametrize(
    ("options", "model", "error"),
    [
        (("--part-mb", "0"), None, "--part-mb must be a number of megabytes, not 0"),
        ((), Path("/nonexistent"), "/nonexistent is not an artifact"),
    ],
)
def test_bundle_with_wrong_arguments_is_refused(
    bundle: Callable[..., subprocess.CompletedProcess[str]],
    options: tuple[str, ...],
    model: Path | None,
    error: str,
) -> None:
    packed = bundle(*options, **({} if model is None else {"model": model}))
    assert packed.returncode == 2
    assert error in packed.stderr
