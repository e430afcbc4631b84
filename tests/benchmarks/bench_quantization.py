"""Recall@10 of quantised vectors, for a calibrated artifact.

By number of rescored candidates, see `models.export.calibration`; and of dot products of int8 codes
that are not dequantised. The texts must be those of `vitrine-export --calibrate`: every second one
is left out, because the ranges are computed from it.

    python -m tests.benchmarks.bench_quantization ARTIFACT TEXTS
"""

import argparse
from pathlib import Path

import numpy as np

from models.export.calibration import distinct, measure_recall
from models.quantization import Vectors
from service.inference.model.opening import ModelOptions
from service.inference.model.sync_model import SyncModel

_CANDIDATES = (40, 100, 200, 1000)
_QUERIES = 1000


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("texts", type=Path, help="file with one text per line")
    arguments = parser.parse_args()
    texts = distinct(arguments.texts.read_text("utf-8").split("\n"))[1::2]
    with SyncModel(arguments.artifact, ModelOptions(max_queue_tokens=10**9)) as model:
        vectors = model.encode(texts).vectors
        quantizer = model.quantizer("int8")
    assert quantizer.ranges is not None
    for candidates in _CANDIDATES:
        recall = measure_recall(vectors, quantizer.ranges, candidates)
        shares = " ".join(f"{method} {share:.3f}" for method, share in recall.items())
        print(f"{len(texts)} texts, {candidates} candidates: {shares}", flush=True)
    codes = np.asarray(quantizer(vectors), np.float32)
    pairs = zip(_nearest(vectors), _nearest(codes), strict=True)
    shared = np.mean([len({*expected} & {*actual}) / 10 for expected, actual in pairs])
    print(f"{len(texts)} texts, dot products of int8 codes: {shared:.3f}")


def _nearest(vectors: Vectors) -> list[list[int]]:
    """Return the 10 texts with the largest dot products with each of the first texts."""
    scores = vectors[:_QUERIES] @ vectors.T
    np.fill_diagonal(scores, -np.inf)
    nearest: list[list[int]] = np.argpartition(-scores, 10, axis=1)[:, :10].tolist()
    return nearest


if __name__ == "__main__":
    main()
