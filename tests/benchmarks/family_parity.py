"""Worst difference between exported graphs and transformers by model family, as a table.

The models are those of tests/models/export/test_families.py: small, with random weights. Vectors
are mean-pooled and not normalised.
"""

import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.engines.with_onnxruntime import onnxruntime_session
from models.export.checkpoint import load
from models.export.onnx_graph import graph_for, trace
from models.packing import pack
from tests.models.checkpoints import save_checkpoint
from tests.models.export.test_families import CASES, LENGTHS, rows

Array = NDArray[np.float64]


def differences(family: str, changes: dict[str, object]) -> Array:
    """Return the worst 1 - cosine and the worst relative difference of norms of one config."""
    ids = rows(LENGTHS)
    with tempfile.TemporaryDirectory() as folder:
        reference = save_checkpoint(Path(folder), family, **changes)
        graph = graph_for("onnxruntime", trace(load(Path(folder))[0], "cpu"))
        session = onnxruntime_session(graph, 1)
    expected = np.stack([_vector(reference, row) for row in ids])  # (B, D)
    batches = ([[row] for row in ids], [ids])
    worst = []
    for batch in batches:
        runs = [session.run(["pooled"], pack(part).inputs())[0] for part in batch]
        actual = np.concatenate(runs).astype(np.float64)  # (B, D)
        norms = np.linalg.norm(actual, axis=1), np.linalg.norm(expected, axis=1)
        cosines = (actual * expected).sum(1) / (norms[0] * norms[1])
        worst.append(((1 - cosines).max(), np.abs(norms[0] / norms[1] - 1).max()))
    return np.max(worst, axis=0)  # type: ignore[no-any-return]


def _vector(reference: Any, row: list[int]) -> Array:  # noqa: ANN401
    with torch.no_grad():
        output = reference(torch.tensor([row]), attention_mask=torch.ones(1, len(row)))
    vector: Array = output.last_hidden_state[0].double().mean(0).numpy()
    return vector


def main() -> int:
    """Print the table."""
    by_family: dict[str, list[Array]] = defaultdict(list)
    for family, changes in CASES:
        by_family[family].append(differences(family, changes))
    lines = ["| family | configs | worst 1 - cosine | worst norm |", "|---|---|---|---|"]
    for family, results in by_family.items():
        cosine, norm = np.max(results, axis=0)
        lines.append(f"| {family} | {len(results)} | {cosine:.0e} | {norm:.0e} |")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
