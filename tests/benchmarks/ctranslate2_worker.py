"""Encode token ids with CTranslate2 in a separate environment, on request.

python ctranslate2_worker.py MODEL CONVERTED PRECISION BATCHES.json VECTORS.npy
Converts the folder MODEL of a BERT checkpoint to the folder CONVERTED if that is missing. For each
line on standard input it encodes all batches once, one per core at a time, and prints the duration
in seconds.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np


def main() -> None:
    """Encode once per line of standard input."""
    # Only this worker's own environment has the package.
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    model, converted, precision, batches_file, vectors_file = sys.argv[1:]
    if not Path(converted).exists():
        TransformersConverter(model).convert(converted)
    cores = os.cpu_count() or 1
    encoder = ctranslate2.Encoder(
        converted, compute_type=precision, inter_threads=cores, intra_threads=1
    )
    batches = json.loads(Path(batches_file).read_text("utf-8"))

    def mean_pooled(batch: list[list[int]]) -> np.ndarray:
        output = encoder.forward_batch(batch).last_hidden_state
        tokens = np.asarray(output)  # (B, L, D), without a copy
        return np.stack([row[: len(ids)].mean(0) for row, ids in zip(tokens, batch, strict=True)])

    with ThreadPoolExecutor(cores) as streams:
        np.save(vectors_file, np.concatenate(list(streams.map(mean_pooled, batches))))
        for _ in sys.stdin:
            started = time.perf_counter()
            list(streams.map(mean_pooled, batches))
            print(f"SECONDS {time.perf_counter() - started}", flush=True)


if __name__ == "__main__":
    main()
