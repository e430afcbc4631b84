"""Mistakes in an output, and the self-check of an engine that makes them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from models.artifact import Artifact
from models.engines import Engine, EngineError, Output, Run, self_check
from models.packing import PackedBatch

Mistake = Callable[[NDArray[Any]], NDArray[Any]]

WRONG: dict[str, Mistake] = {
    "scaled": lambda own: 1.01 * own,
    "shifted": lambda own: own + 0.01,
    "negated": lambda own: -own,
    "columns in another order": lambda own: own[:, ::-1],
    "rows in another order": lambda own: own[::-1],
    "one row scaled": lambda own: np.where(
        (own == own.max()).any(1, keepdims=True), 1.01 * own, own
    ),
    "largest value lost": lambda own: np.where(own == own.max(), 0, own),
    "largest value not a number": lambda own: np.where(own == own.max(), np.nan, own),
}
# Those that the bounds of lower precisions detect.
GROSS: dict[str, Mistake] = {
    **{name: WRONG[name] for name in WRONG if "order" in name},
    "scaled": lambda own: 1.2 * own,
    "shifted": lambda own: own + 0.5,
    "negated": WRONG["negated"],
    "not a number": lambda own: own * np.float32("nan"),
}


def mistakes_in(expected: NDArray[Any], mistakes: Mapping[str, Mistake]) -> dict[str, Mistake]:
    """Return the mistakes that change an output: all, or one less if it has a single column."""
    names = [name for name in mistakes if name != "columns in another order"]
    return {name: mistakes[name] for name in (mistakes if expected.shape[1] > 1 else names)}


def assert_self_check_refuses(
    engine: Engine, artifact: Artifact, output: Output, mistakes: Mapping[str, Mistake] = WRONG
) -> None:
    """Check that an engine passes the self-check, but not with a mistake in an output."""
    self_check(engine, artifact)
    expected = np.asarray(artifact.check().outputs[output])
    prefix = f"self-check failed: the output '{output}' of {engine.name} in {engine.precision} has"
    for name, change in mistakes_in(expected, mistakes).items():
        error = ""
        with pytest.MonkeyPatch.context() as patch:
            runs = [_mistaken(run, output, change, len(expected)) for run in engine.runs]
            patch.setattr(engine, "runs", runs)
            try:
                self_check(engine, artifact)
            except EngineError as raised:
                error = str(raised)
        if not error.startswith(prefix):
            pytest.fail(f"{output}, {name}: {error or 'the self-check passed'}")


def _mistaken(run: Run, output: Output, change: Mistake, compared: int) -> Run:
    """Return the run with a mistake in the vectors that are compared with a reference."""

    def run_wrong(batch: PackedBatch, outputs: Sequence[Output]) -> list[NDArray[Any]]:
        pairs = zip(outputs, run(batch, outputs), strict=True)
        return [change(own[:compared]) if name == output else own for name, own in pairs]

    return run_wrong
