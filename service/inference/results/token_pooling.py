"""Pooling of a multi-vector: clusters of similar vectors become their means.

The clusters are those of `HierarchicalTokenPooling` in sentence-transformers: Ward linkage on
cosine distances, cut at a number of clusters. Source: Clavié et al. 2024, arXiv:2409.14683.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from models.engines import EngineError
from models.engines.engine import how_to_install
from models.manifest import Manifest
from service.inference.errors import InvalidInput

# Maximum number of vectors of a text. The distances of all pairs take 64 MiB, and Ward linkage
# copies them.
MAX_POOLED = 4096
# Number of vectors whose distances from all others are computed at a time.
_BLOCK = 256
# One thread, so that concurrent requests do not add up their memory. In the event loop's default
# executor, those that wait for each other would take the threads of all other requests.
_executor = ThreadPoolExecutor(1, "token-pooling")

Result = TypeVar("Result")


def check_poolable(manifest: Manifest) -> None:
    """Check that scipy is installed if the model pools tokens.

    Raises:
        EngineError: It is not.
    """
    if manifest.pools_tokens and (reason := how_to_install("scipy", "pooling")):
        raise EngineError(f"the model pools the vectors of tokens, but {reason}")


async def run_pooling(work: Callable[[], Result]) -> Result:
    """Call `work`, which pools vectors, after all earlier calls, and return its result."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_executor, copy_context().run, work)


def pool_vectors(
    vectors: NDArray[np.float32], factor: float, protected: int
) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
    """Return the means of clusters of vectors, and the index of each vector's mean.

    Args:
        vectors: Vectors `(L, W)` of unit length.
        factor: Number of vectors per cluster, on average; at least 1.
        protected: Number of leading vectors that stay as they are, before the means.

    Raises:
        InvalidInput: There are more than `MAX_POOLED` vectors.
    """
    if len(vectors) > MAX_POOLED:
        raise InvalidInput(
            f"the text has {len(vectors)} vectors; at most {MAX_POOLED} can be pooled",
            code="too_many_tokens",
        )
    kept, others = vectors[:protected], vectors[protected:]
    count = max(int(len(others) // factor), 1)
    if count >= len(others):
        return vectors, np.arange(len(vectors))
    labels = _clusters(others, count)
    sizes = np.bincount(labels)
    means = np.zeros((len(sizes), vectors.shape[1]), np.float32)
    np.add.at(means, labels, others)
    means /= sizes[:, None].astype(np.float32)
    return np.concatenate([kept, means]), np.concatenate([np.arange(len(kept)), len(kept) + labels])


def _clusters(vectors: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Return the cluster of each vector, `(L,)`: up to `count`, fewer if distances are equal."""
    from scipy.cluster import hierarchy

    size = len(vectors)
    distances = np.empty(size * (size - 1) // 2)  # of each pair, in the order of scipy
    end = 0
    for start in range(0, size, _BLOCK):
        block = np.clip(1 - vectors[start : start + _BLOCK] @ vectors.T, 0, 2)  # float32
        for row, own in enumerate(block, start):
            begin, end = end, end + size - row - 1
            distances[begin:end] = own[row + 1 :]
    tree = hierarchy.linkage(distances, "ward")
    labels = hierarchy.fcluster(tree, count, "maxclust")
    return np.unique(labels, return_inverse=True)[1]
