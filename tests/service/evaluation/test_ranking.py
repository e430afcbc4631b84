"""Exact search through blocks of documents."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from service.evaluation import ranking
from service.evaluation.ranking import VectorFiles, VectorSpace, rank


def write(folder: Path, vectors: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> Path:
    """Write vectors as a bulk job does, in two parts; the third row has an error."""
    folder.mkdir()
    for number, start in enumerate((0, len(vectors) // 2)):
        own = vectors[start : len(vectors) // 2 if number == 0 else None]
        rows = range(start, start + len(own))
        column = pa.array(own.tolist(), pa.list_(pa.float32(), own.shape[1]))
        errors = pa.array(["failed" if row == 2 else None for row in rows], pa.string())
        table = {"row": pa.array(rows, pa.int64()), "embedding": column, "error": errors}
        pq.write_table(pa.table(table), folder / f"part-{number:05}.parquet")
    return folder


def test_best_documents_of_many_blocks_are_those_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "_DOCUMENTS", 7)
    monkeypatch.setattr(ranking, "_QUERIES", 2)
    draw = np.random.default_rng(0)
    # Small integers: many documents have equal scores.
    documents, queries = (draw.integers(-1, 2, (n, 3)).astype(np.float32) for n in (60, 5))
    ids = [f"d{number}" for number in draw.permutation(60)]
    names = [f"q{number}" for number in range(5)]
    shares: list[float] = []
    found = rank(
        VectorFiles(write(tmp_path / "queries", queries), names, "dense"),
        VectorFiles(write(tmp_path / "documents", documents), ids, "dense"),
        VectorSpace("dot", 0),
        9,
        shares.append,
    )
    assert found.keys() == {"q0", "q1", "q3", "q4"}
    for query, own in found.items():
        scores = documents @ queries[int(query[1:])]
        rows = [row for row in range(60) if row != 2]
        rows.sort(key=lambda row: (scores[row], ids[row]), reverse=True)
        assert list(own.items()) == [(ids[row], float(scores[row])) for row in rows[:9]]
    assert shares == sorted(shares)
    assert len(shares) > 10
    assert shares[-1] == 1.0
