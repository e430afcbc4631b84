"""Loss of MaxSim by pooling of tokens, and its time, with the token vectors of a real model.

    python -m tests.benchmarks.bench_token_pooling [ARTIFACT]

The model is all-MiniLM-L6-v2, whose token vectors of unit length stand for those of ColBERT: no
checkpoint of ColBERT is in a package. Queries are sentences without every second word.
"""

import sys
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import vitrine
from service.inference.results.token_pooling import pool_vectors
from tests.sentences import SENTENCES

_FACTORS = (1.5, 2.0, 3.0, 4.0)
_LENGTHS = (64, 256, 512, 1024, 4096)


def main(path: str) -> None:
    texts = [text for text in SENTENCES if len(text.split()) >= 8]
    queries = [" ".join(text.split()[::2][:12]) for text in texts]
    with vitrine.SyncModel(path) as model:
        documents = model.encode_tokens(texts, normalize=True).vectors
        asked = model.encode_tokens(queries, normalize=True).vectors

    def scores(pooled: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
        return np.array([[float((q @ d.T).max(1).sum()) for d in pooled] for q in asked])

    exact = scores(documents)
    print(f"{len(texts)} documents of {np.mean([len(d) for d in documents]):.0f} tokens on average")
    print(f"{'factor':>6} {'vectors':>8} {'score':>8} {'own first':>10} {'top 10 kept':>12}")
    for factor in (1.0, *_FACTORS):
        pooled = [pool_vectors(own, factor, 1)[0] for own in documents]
        pooled = [own / np.linalg.norm(own, axis=1, keepdims=True) for own in pooled]
        actual = scores(pooled)
        share = sum(map(len, pooled)) / sum(map(len, documents))
        first = np.mean(actual.argmax(1) == np.arange(len(asked)))
        best = [np.argsort(-each, axis=1)[:, :10] for each in (exact, actual)]
        kept = np.mean([len({*a} & {*b}) / 10 for a, b in zip(*best, strict=True)])
        ratio = np.mean(actual.diagonal() / exact.diagonal())
        print(f"{factor:6} {share:8.2f} {ratio:8.3f} {first:10.3f} {kept:12.3f}")

    rng = np.random.default_rng(0)
    for length in _LENGTHS:
        vectors = rng.standard_normal((length, 128)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            pool_vectors(vectors, 2.0, 1)
            seconds.append(time.perf_counter() - started)
        print(f"{length} vectors of width 128: {sorted(seconds)[1] * 1e3:.1f} ms")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "artifacts/all-MiniLM-L6-v2")
