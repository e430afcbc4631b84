"""Weights of queries in inference-free sparse models: one per vocabulary entry, in a table."""

from collections.abc import Sequence
from io import BytesIO

import numpy as np

from models.artifact import Artifact
from models.manifest import QUERY_WEIGHTS, ArtifactError
from models.printable import reason_of
from service.inference.results.vectors import SparseVector, Vectors


def read_query_weights(artifact: Artifact) -> Vectors:
    """Return the weights of queries, `(V,)`; empty if queries pass through the graph.

    Raises:
        ArtifactError: The file is missing, was changed since the export, or is invalid.
    """
    manifest = artifact.manifest
    if not any(rules.looks_up for rules in manifest.token_rules.values()):
        return np.zeros(0, np.float32)
    content = artifact.read(QUERY_WEIGHTS)
    try:
        weights = np.load(BytesIO(content), allow_pickle=False)
    except Exception as error:  # numpy documents few of its errors
        raise ArtifactError(f"{QUERY_WEIGHTS} is invalid: {reason_of(error)}") from error
    if not isinstance(weights, np.ndarray):
        raise ArtifactError(f"{QUERY_WEIGHTS} is invalid: it is an archive, not an array")
    if weights.shape != (manifest.width,) or weights.dtype != np.float32:
        raise ArtifactError(
            f"{QUERY_WEIGHTS} has shape {weights.shape} and dtype {weights.dtype}; the model "
            f"requires shape {(manifest.width,)} and dtype float32"
        )
    if not np.isfinite(weights).all():
        raise ArtifactError(f"{QUERY_WEIGHTS} has an infinity or a NaN")
    return np.asarray(weights)


def look_up(weights: Vectors, ids: Sequence[int]) -> SparseVector:
    """Return the weights of the tokens that occur in a row; each counts once.

    Args:
        weights: Weight of each vocabulary entry, `(V,)`.
        ids: Token ids of the row.
    """
    entries = np.array(sorted(set(ids)), np.intp)
    entry_weights = weights[entries]
    is_weighted = entry_weights != 0
    return SparseVector(entries[is_weighted], entry_weights[is_weighted])
