import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.artifact import Artifact
from models.engines import (
    ENGINES,
    Engine,
    EngineError,
    Output,
    Precision,
    available_cpus,
    open_engine,
    self_check,
)
from models.packing import PackedBatch, pack


@pytest.fixture(scope="module")
def engine(artifact: Artifact) -> Engine:
    return open_engine(artifact, threads=2)


def random_rows(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(1000, 30000, int(rng.integers(2, 257))).tolist() for _ in range(count)]


def test_a_row_has_one_vector_whatever_batch_it_is_in(engine: Engine) -> None:
    rows = random_rows(24)
    alone = np.concatenate([engine.run(pack([row])) for row in rows])
    order = np.random.default_rng(4).permutation(len(rows))
    batched = engine.run(pack([rows[i] for i in order]))[np.argsort(order)]
    np.testing.assert_allclose(batched, alone, rtol=0, atol=5e-6)


def test_token_vectors_average_to_the_row_vector(engine: Engine) -> None:
    rows = random_rows(3)
    batch = pack(rows)
    tokens = engine.run(batch, "tokens")
    assert tokens.shape == (sum(map(len, rows)), 384)
    ends = np.cumsum([len(row) for row in rows])[:-1]
    means = np.stack([part.mean(0) for part in np.split(tokens, ends)])
    np.testing.assert_allclose(engine.run(batch), means, rtol=0, atol=1e-5)


def test_the_self_check_passes_on_the_artifact(engine: Engine, artifact: Artifact) -> None:
    assert self_check(engine, artifact) > 1 - 1e-9


class Drifting:
    """An engine whose vectors are off, or not numbers."""

    name = "drifting"
    precision: Precision = "float32"
    threads = 1

    def __init__(self, engine: Engine, noise: float) -> None:
        self.engine = engine
        self.noise = noise

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        vectors = self.engine.run(batch, output)
        noise = np.random.default_rng(0).normal(size=vectors.shape).astype(np.float32)
        return vectors + self.noise * noise


@pytest.mark.parametrize("noise", [1e-2, float("nan")])
def test_the_self_check_refuses_an_engine_that_drifts(
    engine: Engine, artifact: Artifact, noise: float
) -> None:
    with pytest.raises(EngineError, match=r"self-check failed: drifting in float32.*is needed"):
        self_check(Drifting(engine, noise), artifact)


def test_an_unknown_engine_is_refused_with_those_there_are(artifact: Artifact) -> None:
    with pytest.raises(EngineError, match="no engine 'tensorrt'; there are: auto, onnxruntime"):
        open_engine(artifact, "tensorrt")


@pytest.mark.parametrize("name", ["onnxruntime", "auto"])
def test_an_engine_that_is_not_installed_is_refused_with_what_would_help(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(EngineError, match=r"onnxruntime is not installed; pip install 'vitrine\["):
        open_engine(artifact, name)


def test_a_precision_that_an_engine_lacks_is_refused(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = replace(ENGINES["onnxruntime"], precisions=())
    monkeypatch.setitem(ENGINES, "onnxruntime", entry)
    with pytest.raises(EngineError, match="onnxruntime in float32 is not usable: it computes in"):
        open_engine(artifact)


@pytest.mark.skipif(sys.platform != "linux", reason="affinity and cgroups are Linux's")
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
def test_threads_come_from_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str | None, content: str, cpus: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    if file:
        path = tmp_path / "sys/fs/cgroup" / file
        path.parent.mkdir(parents=True)
        path.write_text(content)
        path.with_name("cpu.cfs_period_us").write_text("100000")
    assert available_cpus(tmp_path) == cpus
