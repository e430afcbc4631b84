"""DeBERTa's disentangled attention: terms of the scores that depend on distances of tokens.

A learnt embedding stands for each distance, or for a bucket of distances. Projected as keys and as
queries, they meet the queries and keys of the tokens.

Source: He et al. 2020, arXiv:2006.03654.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.network.norms import Norm, NormConfig

# Terms of the scores: of a token's query with the key of the distance, and the reverse.
CONTENT_TO_POSITION, POSITION_TO_CONTENT = "c2p", "p2c"
TERMS = frozenset({CONTENT_TO_POSITION, POSITION_TO_CONTENT})


@dataclass(frozen=True, kw_only=True)
class DistanceConfig:
    """Hyperparameters of disentangled attention.

    Attributes:
        span: Half the number of distance embeddings, S: those below it are for keys after the
            query.
        max_distance: Length of rows for which the buckets are made; 0: no buckets, each distance
            below `span` has an embedding.
        terms: Names in `TERMS`; not empty.
        shared: Whether distances are projected by the matrices of the tokens' queries and keys.
        norm: Whether the embeddings have a norm.
    """

    span: int
    max_distance: int = 0
    terms: frozenset[str] = TERMS
    shared: bool = False
    norm: bool = False


@dataclass(frozen=True)
class Distances:
    """Embeddings of distances, and which of them stand for the distances in a batch.

    Attributes:
        embeddings: `(2 * S, D)`.
        of_queries: `(2 * L,)`, index of the embedding for each position of a key less that of its
            query, from `-L`.
        of_keys: `(2 * L,)`, index of the embedding for each position of a query less that of its
            key, from `-L`.
        terms: Names in `TERMS`.
    """

    embeddings: Tensor
    of_queries: Tensor
    of_keys: Tensor
    terms: frozenset[str]


class DistanceEmbeddings(nn.Module):
    """Learnt embeddings of the distances of tokens, `(2 * S, D)`."""

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
        """Return the embeddings after their norm, `(2 * S, D)`."""
        return self.weight if self.norm is None else self.norm(self.weight)

    def distances(self, embeddings: Tensor, length: int) -> Distances:
        """Return the distances in rows of up to L tokens; L is `length`."""
        steps = torch.arange(2 * length, device=embeddings.device) - length  # (2L,)
        of_queries = self.index_of.index_select(0, self.max_positions - steps)
        of_keys = self.index_of.index_select(0, self.max_positions + steps)
        return Distances(embeddings, of_queries, of_keys, self.terms)


def embedding_index(distance: Tensor, config: DistanceConfig) -> Tensor:
    """Return the index of the embedding of each query-minus-key distance, int64.

    With buckets, distances up to half of `span` have one each. The others cover ranges that grow
    exponentially. Distances beyond the last embedding have the last one.
    """
    span = config.span
    if config.max_distance:
        exact = span // 2
        size = distance.abs().clamp(min=exact).float()
        # The order of operations is that of transformers: the results are rounded up.
        ratio = torch.log(size / exact) / torch.log(torch.tensor((config.max_distance - 1) / exact))
        coarse = torch.ceil(ratio * (exact - 1)).long() + exact
        distance = torch.where(distance.abs() <= exact, distance, coarse * distance.sign())
    return (distance + span).clamp(0, 2 * span - 1)


def distance_scores(
    heads: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    distances: Distances,
) -> Tensor:
    """Return the terms of the attention scores that depend on distances, `(B, H, L, L)`.

    Args:
        heads: Queries and keys of the tokens, `(B, H, L, K)` each.
        tables: Queries and keys of the distance embeddings, scaled, `(2 * S, H * K)` each.
        distances: Indices of the embeddings.
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
    """Return the products of each token with the embeddings of its distances to all tokens.

    Args:
        x: Queries or keys, `(B, H, L, K)`.
        table: Keys or queries of the distance embeddings, `(2 * S, H * K)`.
        index: `(2 * L,)`, index into the table for each distance, from `-L`.

    Returns:
        `(B, H, L, L)`.
    """
    _, H, L, K = x.shape
    table = table.index_select(0, index)  # (2L, H * K)
    products = x @ table.unflatten(-1, (H, K)).permute(1, 2, 0)  # (B, H, L, 2L)
    # The product of tokens i and j is at i * 2L + L + j - i, which is L + i * (2L - 1) + j.
    rows = products.flatten(-2)[..., L:].unflatten(-1, (L, 2 * L - 1))
    return rows[..., :L]
