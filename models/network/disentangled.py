"""DeBERTa's disentangled attention: score terms that depend on the distance of query and key.

Each distance, or bucket of distances, has a learnt embedding. The embeddings are projected to keys
and queries, which are multiplied with the tokens' queries and keys.

Source: He et al. 2020, arXiv:2006.03654.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.network.norms import Norm, NormConfig

# Terms of the scores: the token's query times the distance's key, and the token's key times the
# distance's query.
CONTENT_TO_POSITION, POSITION_TO_CONTENT = "c2p", "p2c"
TERMS = frozenset({CONTENT_TO_POSITION, POSITION_TO_CONTENT})


@dataclass(frozen=True, kw_only=True)
class DistanceConfig:
    """Hyperparameters of disentangled attention.

    Attributes:
        span: Half the number of distance embeddings, S. Embeddings with an index below S are for
            keys after the query.
        max_distance: Length of the longest row whose distances the buckets cover; 0: no buckets,
            each distance below `span` has its own embedding.
        terms: Names in `TERMS`; not empty.
        shared: Whether the distance embeddings are projected by the token projections of queries
            and keys, instead of separate projections.
        norm: Whether the distance embeddings have a norm.
    """

    span: int
    max_distance: int = 0
    terms: frozenset[str] = TERMS
    shared: bool = False
    norm: bool = False


@dataclass(frozen=True)
class Distances:
    """Distance embeddings, and their indices for the distances in rows of up to L tokens.

    Attributes:
        embeddings: Distance embeddings, `(2 * S, D)`.
        of_queries: Embedding index of each key-minus-query distance from `-L` to `L - 1`,
            `(2 * L,)`.
        of_keys: Embedding index of each query-minus-key distance from `-L` to `L - 1`, `(2 * L,)`.
        terms: Names in `TERMS`.
    """

    embeddings: Tensor
    of_queries: Tensor
    of_keys: Tensor
    terms: frozenset[str]


class DistanceEmbeddings(nn.Module):
    """Learnt embeddings of the distances between tokens, `(2 * S, D)`, with an optional norm."""

    index_of: Tensor
    norm: Norm | None

    def __init__(
        self, config: DistanceConfig, norm: NormConfig, d_model: int, max_positions: int
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * config.span, d_model))
        nn.init.normal_(self.weight, std=0.02)
        self.norm = norm.norm(d_model) if config.norm else None
        self.terms = config.terms
        self.max_positions = max_positions
        distance = torch.arange(-max_positions, max_positions + 1)
        self.register_buffer("index_of", embedding_index(distance, config), persistent=False)

    def forward(self) -> Tensor:
        """Return the distance embeddings `(2 * S, D)`, after the norm if there is one."""
        return self.weight if self.norm is None else self.norm(self.weight)

    def distances(self, embeddings: Tensor, length: int) -> Distances:
        """Return `embeddings` with their indices for rows of up to `length` tokens."""
        steps = torch.arange(2 * length, device=embeddings.device) - length  # (2L,)
        of_queries = self.index_of.index_select(0, self.max_positions - steps)
        of_keys = self.index_of.index_select(0, self.max_positions + steps)
        return Distances(embeddings, of_queries, of_keys, self.terms)


def embedding_index(distance: Tensor, config: DistanceConfig) -> Tensor:
    """Return the embedding index of each query-minus-key distance, int64, shaped as `distance`.

    With buckets, each distance up to `span // 2` has its own bucket. The other buckets cover ranges
    that grow exponentially. Indices are clamped to the first and last embedding.
    """
    span = config.span
    if config.max_distance:
        exact = span // 2
        size = distance.abs().clamp(min=exact).float()
        # Same order of operations as in transformers: rounding up amplifies other rounding errors.
        ratio = torch.log(size / exact) / torch.log(torch.tensor((config.max_distance - 1) / exact))
        coarse = torch.ceil(ratio * (exact - 1)).long() + exact
        distance = torch.where(distance.abs() <= exact, distance, coarse * distance.sign())
    return (distance + span).clamp(0, 2 * span - 1)


def distance_scores(
    heads: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    distances: Distances,
) -> Tensor:
    """Return the sum of the distance terms of the attention scores, `(B, H, L, L)`.

    Args:
        heads: Queries and keys of the tokens, `(B, H, L, K)` each.
        tables: Queries and keys of the distance embeddings, divided by `sqrt(K)`,
            `(2 * S, H * K)` each.
        distances: Embedding indices of the distances, and the terms to compute.
    """
    q, k = heads
    queries, keys = tables
    parts: list[Tensor] = []
    if CONTENT_TO_POSITION in distances.terms:
        parts.append(_by_distance(q, keys, distances.of_queries))
    if POSITION_TO_CONTENT in distances.terms:
        parts.append(_by_distance(k, queries, distances.of_keys).transpose(-1, -2))
    return sum(parts[1:], start=parts[0])


def _by_distance(x: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Return the product of each token with the distance embedding for every other token.

    Args:
        x: Queries or keys, `(B, H, L, K)`.
        table: Keys or queries of the distance embeddings, `(2 * S, H * K)`.
        index: Index into the table of each distance from `-L` to `L - 1`, `(2 * L,)`.

    Returns:
        The products, `(B, H, L, L)`: tokens of `x`, then the tokens at the other end of the
        distance.
    """
    _, H, L, K = x.shape
    table = table.index_select(0, index)  # (2L, H * K)
    products = x @ table.unflatten(-1, (H, K)).permute(1, 2, 0)  # (B, H, L, 2L)
    # In the flattened axes, the product for tokens i and j is at i * 2L + L + j - i, which is
    # L + i * (2L - 1) + j.
    rows = products.flatten(-2)[..., L:].unflatten(-1, (L, 2 * L - 1))
    return rows[..., :L]
