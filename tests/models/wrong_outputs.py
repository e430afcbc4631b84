"""The self-check of an engine with wrong vectors."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from numpy.typing import NDArray

from models.artifact import Artifact
from models.engines import EngineError, Output, Run, open_engine, self_check
from models.packing import PackedBatch


def assert_self_check_refuses(
    artifact: Artifact, output: Output, change: Callable[[NDArray[Any]], NDArray[Any]]
) -> None:
    """Check that an artifact passes the self-check, but not with a change of an output."""
    engine = open_engine(artifact, "onnxruntime")
    assert self_check(engine, artifact)[output].norm < 1e-5

    def mistaken(run: Run) -> Run:
        def run_wrong(batch: PackedBatch, outputs: Sequence[Output]) -> list[NDArray[Any]]:
            pairs = zip(outputs, run(batch, outputs), strict=True)
            return [change(own) if name == output else own for name, own in pairs]

        return run_wrong

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "runs", [mistaken(run) for run in engine.runs])
        with pytest.raises(EngineError, match=f"self-check failed: the output '{output}'"):
            self_check(engine, artifact)
