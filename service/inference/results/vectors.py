"""Results of encoding, and the truncation and normalisation of vectors."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, TypedDict

import numpy as np
from numpy.typing import DTypeLike, NDArray

from models.manifest import TokenRules
from service.inference.batching.cache import CacheCounts
from service.inference.call_options import Deadline
from service.inference.errors import InvalidInput
from service.inference.results.token_pooling import pool_vectors
from service.inference.tokenizing.rows import Row, Span

Vectors = NDArray[np.float32]
# Kinds of vectors that a model can compute.
EncodeOutput = Literal["pooled", "tokens", "sparse", "multi"]


class SparseVector(NamedTuple):
    """Nonzero weights of a vector.

    Attributes:
        ids: Token ids of the nonzero weights, in ascending order.
        weights: Weight of each of these token ids.
    """

    ids: NDArray[np.intp]
    weights: Vectors

    def __repr__(self) -> str:
        return f"SparseVector({len(self.ids)} nonzero weights, {self.weights.dtype})"


# Result of one row: a vector, vectors of its tokens, or a sparse vector.
RowResult = Vectors | SparseVector
# Results of one row, one per requested output.
RowResults = tuple[RowResult, ...]

_TINY = np.finfo(np.float32).tiny


class VectorOptions(NamedTuple):
    """The options of a call for pooled vectors; see `Model.encode`."""

    dimensions: int | None = None
    truncate_dim: int | None = None
    normalize: bool | None = None


class Stages(dict[str, float]):
    """Duration in seconds of each stage of a call, by name.

    Args:
        seconds: Duration of each stage.
        cache_counts: Counts of the call's rows in the cache; None: they were not looked up.
    """

    def __init__(
        self, seconds: Mapping[str, float], cache_counts: CacheCounts | None = None
    ) -> None:
        super().__init__(seconds)
        self.cache_counts = cache_counts

    def __add__(self, other: "Stages") -> "Stages":
        """Return the durations and counts of two calls together."""
        names = {**self, **other}
        counts = [stages.cache_counts for stages in (self, other) if stages.cache_counts]
        return Stages(
            {name: self.get(name, 0.0) + other.get(name, 0.0) for name in names},
            sum(counts, CacheCounts()) if counts else None,
        )


def cost_of(rows: Sequence[Row], seconds: Stages) -> str:
    """Return the tokens, truncations and total duration of a call, for the repr of its result."""
    return cost_of_lengths(
        [len(row.ids) for row in rows], sum(row.truncated for row in rows), seconds
    )


def cost_of_lengths(lengths: Sequence[int], truncated: int, seconds: Stages) -> str:
    """Return the same as `cost_of`, given the number of tokens of each input."""
    cut = f" ({truncated} truncated)" if truncated else ""
    return f"{sum(lengths)} tokens{cut}, {sum(seconds.values()):.3g} s"


def size_of(vectors: Sequence[Vectors]) -> str:
    """Return the size of the vectors of each input, for the repr of a result."""
    shape = f"{sum(map(len, vectors))} x {vectors[0].shape[1]} {vectors[0].dtype}"
    return f"{len(vectors)} inputs, {shape}"


def refuse_array(remedy: str) -> Callable[..., NoReturn]:
    """Return a method `__array__` that raises TypeError; numpy would make an array of objects."""

    def refuse(self: object, *_: object, **__: object) -> NoReturn:
        raise TypeError(f"{type(self).__name__} is not a matrix; {remedy}")

    return refuse


@dataclass(frozen=True)
class Embeddings:
    """One vector per input.

    `np.asarray` of it is `vectors`.

    Attributes:
        vectors: Pooled vectors `(B, W)` of B inputs, in the order of the inputs.
        rows: Token ids of each input, and whether it was truncated.
        seconds: Duration in seconds of each stage: "tokenize", "queue" and "infer".
    """

    vectors: Vectors
    rows: Sequence[Row]
    seconds: Stages

    @property
    def size(self) -> int:
        """Total number of vector elements."""
        return self.vectors.size

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> Vectors:
        """Return the vector of an input, `(W,)`."""
        vector: Vectors = self.vectors[index]
        return vector

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.vectors, dtype, copy=copy)

    def __repr__(self) -> str:
        count, width = self.vectors.shape
        cost = cost_of(self.rows, self.seconds)
        return f"Embeddings({count} x {width} {self.vectors.dtype}, {cost})"


@dataclass(frozen=True)
class TokenEmbeddings:
    """One vector per token.

    Attributes:
        vectors: Token vectors `(L, D)` of each input of L tokens, in the order of the inputs.
        rows: Token ids and offsets of each input, and whether it was truncated.
        seconds: Duration in seconds of each stage: "tokenize", "queue" and "infer".
    """

    vectors: Sequence[Vectors]
    rows: Sequence[Row]
    seconds: Stages

    @property
    def size(self) -> int:
        """Total number of vector elements."""
        return sum(part.size for part in self.vectors)

    __array__ = refuse_array("texts have different numbers of tokens: take those of one, result[0]")

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> Vectors:
        """Return the token vectors of an input, `(L, D)`."""
        return self.vectors[index]

    def __repr__(self) -> str:
        return f"TokenEmbeddings({size_of(self.vectors)}, {cost_of(self.rows, self.seconds)})"

    @property
    def ids(self) -> list[Sequence[int]]:
        """Token id of each vector of each input."""
        return [row.ids for row in self.rows]

    @property
    def offsets(self) -> list[Sequence[Span | None] | None]:
        """Span of each vector's token in its text, in characters; see `Row.offsets`."""
        return [row.offsets for row in self.rows]


@dataclass(frozen=True)
class MultiEmbeddings:
    """Multi-vectors: one vector per token that takes part in MaxSim.

    Attributes:
        vectors: Vectors `(L', W)` of each input, in the order of the inputs.
        positions: Position in its row of each token with a vector, `(L',)` for each input.
        clusters: Index of the vector of each of these tokens, for each input; None: they are not
            pooled, and each has a vector of its own.
        rows: Token ids and offsets of each input, and whether it was truncated. A query's row
            includes the tokens that expand it.
        seconds: Duration in seconds of each stage: "tokenize", "queue" and "infer".
    """

    vectors: Sequence[Vectors]
    positions: Sequence[NDArray[np.intp]]
    clusters: Sequence[NDArray[np.intp]] | None
    rows: Sequence[Row]
    seconds: Stages

    @property
    def size(self) -> int:
        """Total number of vector elements."""
        return sum(part.size for part in self.vectors)

    __array__ = refuse_array(
        "texts have different numbers of vectors: take those of one, result[0]"
    )

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> Vectors:
        """Return the vectors of an input, `(L', W)`."""
        return self.vectors[index]

    def __repr__(self) -> str:
        return f"MultiEmbeddings({size_of(self.vectors)}, {cost_of(self.rows, self.seconds)})"

    @property
    def ids(self) -> list[list[int]]:
        """Token id of each vector of each input, or of each token that is pooled."""
        pairs = zip(self.rows, self.positions, strict=True)
        return [[row.ids[i] for i in positions] for row, positions in pairs]

    @property
    def offsets(self) -> list[list[Span | None] | None]:
        """Span of each of these tokens in its text, in characters; see `Row.offsets`."""
        pairs = zip(self.rows, self.positions, strict=True)
        return [
            None if row.offsets is None else [row.offsets[i] for i in positions]
            for row, positions in pairs
        ]


def select_tokens(
    index: int,
    row: Row,
    vectors: Vectors,
    rules: TokenRules,
    deadline: Deadline | None,
    *,
    is_normalized: bool,
    normalize: bool | None = None,
) -> tuple[Vectors, NDArray[np.intp], NDArray[np.intp]]:
    """Return the vectors `(N, W)` of a text that take part in MaxSim.

    Also return the positions of the L' tokens that they stand for, and the index of the vector of
    each of these tokens, both `(L',)`. Without pooling, N is L'.

    Args:
        index: Index of the text, for errors.
        row: Token ids of the text.
        vectors: Vectors of all tokens of the row, `(L, W)`.
        rules: Rules for the tokens of the text.
        deadline: Time after which no pooling begins; None: no limit.
        is_normalized: Whether the model normalises its vectors, before they are pooled.
        normalize: Whether to scale the result to unit length; None: the model's own setting.

    Raises:
        InvalidInput: The text has too many vectors to pool.
        DeadlineExceeded: The deadline has passed before the vectors are pooled.
    """
    positions = vector_positions(row, rules)
    if rules.pool_factor == 1:
        own = is_normalized or rules.normalizes_pooled if normalize is None else normalize
        return _scaled(vectors[positions], own), positions, positions
    if deadline is not None:
        deadline.check()
    own_vectors = _scaled(vectors[positions], is_normalized)
    try:
        pooled, clusters = pool_vectors(own_vectors, rules.pool_factor, rules.protected)
    except InvalidInput as error:
        error.set_index(index)
        raise
    own = rules.normalizes_pooled if normalize is None else normalize
    return _scaled(pooled, own), positions, clusters


def vector_positions(row: Row, rules: TokenRules) -> NDArray[np.intp]:
    """Return the positions in the row of the tokens that take part in MaxSim, `(L',)`."""
    is_kept = ~np.isin(row.ids, rules.skipped)
    if rules.kept:
        is_kept &= np.isin(row.ids, rules.kept)
    is_kept[: rules.first] = False
    return np.flatnonzero(is_kept)


@dataclass(frozen=True)
class SparseEmbeddings:
    """One sparse vector per input.

    Attributes:
        vectors: Sparse vectors, in the order of the inputs.
        width: Number of entries of the vocabulary, V.
        rows: Token ids and truncation of each input.
        seconds: Duration in seconds of each stage: "tokenize", "queue" and "infer".
    """

    vectors: Sequence[SparseVector]
    width: int
    rows: Sequence[Row]
    seconds: Stages

    @property
    def size(self) -> int:
        """Size in JSON, in numbers: an id and its weight take as long to serialise as five."""
        return 5 * sum(len(vector.ids) for vector in self.vectors)

    __array__ = refuse_array("take the ids and weights of one text, result[0]")

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> SparseVector:
        """Return the sparse vector of an input."""
        return self.vectors[index]

    def __repr__(self) -> str:
        nonzero = sum(len(vector.ids) for vector in self.vectors)
        size = f"{len(self)} x {self.width} float32, {nonzero} nonzero"
        return f"SparseEmbeddings({size}, {cost_of(self.rows, self.seconds)})"


class Encoded(TypedDict, total=False):
    """Results of several outputs of one forward pass."""

    pooled: Embeddings
    tokens: TokenEmbeddings
    sparse: SparseEmbeddings
    multi: MultiEmbeddings


def pooled_vectors(vectors: Vectors, options: VectorOptions, *, is_normalized: bool) -> Vectors:
    """Return pooled vectors `(N, W)`, truncated and normalised.

    Args:
        vectors: Vectors `(N, W)` of the graph.
        options: Options of the call.
        is_normalized: Whether the model normalises its vectors.
    """
    normalizes = is_normalized if options.normalize is None else options.normalize
    vectors = _scaled(vectors[:, : options.dimensions], normalizes)
    if options.truncate_dim is not None:
        vectors = _scaled(vectors[:, : options.truncate_dim], bool(options.normalize))
    return vectors


def _scaled(vectors: Vectors, normalizes: bool) -> Vectors:
    return unit_vectors(vectors) if normalizes else np.ascontiguousarray(vectors, np.float32)


def unit_vectors(vectors: Vectors) -> Vectors:
    """Return vectors `(N, W)` scaled to unit length; zero vectors remain zero."""
    if len(vectors) == 1:  # most requests have one text, and this takes half the time
        length = max(math.sqrt(np.vdot(vectors, vectors)), float(_TINY))
        return np.asarray(vectors / length, np.float32)
    lengths = np.sqrt(np.vecdot(vectors, vectors))  # faster than linalg.norm
    return np.asarray(vectors / np.maximum(lengths, _TINY)[:, None], np.float32)
