"""Encode a file with sentence-transformers on all cores, in a separate environment.

python sentence_transformers_bulk.py MODEL BACKEND ARGUMENTS TEXTS.jsonl VECTORS.npy
It prints the duration in seconds, from reading the file to the end, without the load of the model.
The backend torch runs in one process per core. Models of the others cannot be sent to processes,
and run in one process on all cores.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer


def main() -> None:
    """Encode the file."""
    folder, backend, arguments, texts_file, vectors_file = sys.argv[1:]
    model = SentenceTransformer(
        folder, device="cpu", backend=backend, model_kwargs=json.loads(arguments)
    )
    pool = None
    if backend == "torch":
        pool = model.start_multi_process_pool(["cpu"] * len(os.sched_getaffinity(0)))
    model.encode(["warm-up"] * 64, pool=pool)
    started = time.perf_counter()
    lines = Path(texts_file).read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    np.save(vectors_file, model.encode(texts, pool=pool))
    print(time.perf_counter() - started)
    if pool is not None:
        model.stop_multi_process_pool(pool)


if __name__ == "__main__":
    main()
