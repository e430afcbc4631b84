"""From the engine's vectors to the bytes of an answer."""

import base64
from collections.abc import Iterable, Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

OCTETS = "application/octet-stream"
JSON = "application/json"

_TINY = np.finfo(np.float32).tiny


def prefers_octets(accept: str) -> bool:
    """Return whether an Accept header names octets, and likes them no less than JSON."""
    weights: dict[str, float] = {}
    for accepted in accept.lower().split(","):
        media, *parameters = (part.strip() for part in accepted.split(";"))
        given = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        try:
            weights[media] = float(given)
        except ValueError:
            weights[media] = 0.0
    return weights.get(OCTETS, 0.0) > 0 and weights[OCTETS] >= weights.get(JSON, 0.0)


def finish(
    vectors: NDArray[np.float32], dimensions: int | None, normalize: bool
) -> NDArray[np.float32]:
    """Return `(B, dimensions)`: cut first, then of unit length if asked for.

    A vector of zeros stays one.
    """
    cut = vectors[:, :dimensions]
    if normalize:
        norms = np.sqrt(np.einsum("bd,bd->b", cut, cut))[:, None]  # faster than linalg.norm
        cut = cut / np.maximum(norms, _TINY)
    return np.ascontiguousarray(cut, np.float32)


def as_json(
    model: str,
    vectors: NDArray[np.float32],
    tokens: Sequence[int],
    truncated: Sequence[bool],
    in_base64: bool,
) -> bytes:
    """Return the JSON answer; floats are written shortest, as they read back exactly."""
    return orjson.dumps(
        {
            "model": model,
            "dimensions": vectors.shape[1],
            "embeddings": written(vectors, in_base64),
            "tokens": tokens,
            "truncated": truncated,
        }
    )


def tokens_as_json(
    model: str,
    vectors: NDArray[np.float32],
    ids: Sequence[Sequence[int]],
    truncated: Sequence[bool],
    offsets: Sequence[Sequence[tuple[int, int] | None] | None],
    in_base64: bool,
) -> bytes:
    """Return the JSON answer with the vectors of all inputs' tokens, `(T, D)`, input by input."""
    lengths = [len(row) for row in ids]
    by_input = np.split(vectors, np.cumsum(lengths)[:-1])  # (L, D) each
    return orjson.dumps(
        {
            "model": model,
            "dimensions": vectors.shape[1],
            "embeddings": written(by_input, in_base64),
            "tokens": lengths,
            "truncated": truncated,
            "ids": ids,
            "offsets": offsets,
        }
    )


def written(
    vectors: Iterable[NDArray[np.float32]], in_base64: bool
) -> list[str] | list[orjson.Fragment]:
    """Return each part of the vectors as JSON numbers, or as base64 of its bytes."""
    if in_base64:
        return [base64.b64encode(raw(part)).decode() for part in vectors]
    return [orjson.Fragment(_numbers(part)) for part in vectors]


def _numbers(part: NDArray[np.float32]) -> bytes:
    # One by one, because orjson keeps the interpreter's lock while it writes.
    return orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)


def raw(vectors: NDArray[np.float32]) -> bytes:
    """Return the numbers as little-endian float32, row after row."""
    return vectors.astype("<f4", copy=False).tobytes()
