"""The complete network: encoder, pooling and heads as one module."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.artifact import Output
from models.network.encoder import Encoder
from models.network.heads import Head, TruncateHead
from models.network.packed_attention import Rows
from models.network.pooling import pool
from models.network.sparse import SparseHead
from models.network.taps import NO_TAP, Tap


class SentenceEncoder(nn.Module):
    """Network that turns the token ids of each row into one vector: an embedding, or logits.

    A final normalisation of embeddings to unit length is not part of the network.

    Args:
        encoder: Encoder that computes the token vectors.
        pooling: Names of the poolings in `models.network.pooling.POOLINGS`. Their results are
            concatenated.
        heads: Modules applied to the pooled vector, in order.
        sparse: Head that computes sparse vectors, in place of pooling and heads.
        classifies: Whether the row vectors are logits.
        has_token_types: Whether token types are an input of the exported graph.

    Attributes:
        outputs: Names of the outputs of the exported graph.
        width: Width of a row vector, W.

    Raises:
        ValueError: The input width of a head differs from the output width of the preceding head
            or pooling, or truncation keeps more dimensions than the vectors have.
    """

    def __init__(
        self,
        encoder: Encoder,
        pooling: Sequence[str],
        heads: Sequence[Head] = (),
        *,
        sparse: SparseHead | None = None,
        classifies: bool = False,
        has_token_types: bool = False,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.pooling = tuple(pooling)
        self.outputs: tuple[Output, ...] = ("pooled", "tokens")
        if sparse is not None or classifies:
            self.outputs = ("logits",) if sparse is None else ("sparse",)
        self.has_token_types = has_token_types
        self.heads = nn.ModuleList(heads)
        self.sparse = sparse
        self.width = encoder.config.d_model * len(self.pooling)
        for head in heads:
            if head.in_features not in (None, self.width):
                raise ValueError(
                    f"a head needs vectors of width {head.in_features}; its input has the width "
                    f"{self.width}"
                )
            if isinstance(head, TruncateHead) and head.out_features > self.width:
                raise ValueError(
                    f"truncate_dim is {head.out_features}; vectors have the width {self.width}"
                )
            self.width = head.out_features or self.width
        if sparse is not None:
            self.width = encoder.config.vocab_size

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        pooling_mask: Tensor,
        tap: Tap = NO_TAP,
        adapters: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Return the row vectors `(B, W)` of a dense batch.

        Args:
            input_ids: Token ids, `(B, L)`.
            attention_mask: `(B, L)`, 1.0 at tokens and 0.0 at padding; None: no padding.
            pooling_mask: `(B, L)`, 1.0 at the tokens to pool and 0.0 elsewhere.
            tap: Tap that each step passes through.
            adapters: Index of each row's adapter, `(B,)`; -1: no adapter. None: no adapters.
            token_types: Type of each token, `(B, L)`; None: type 0.
        """
        tokens = self.encoder(input_ids, attention_mask, token_types, tap=tap, adapters=adapters)
        return self.row_vectors(tokens, pooling_mask, tap)

    def row_vectors(
        self,
        tokens: Tensor,
        pooling_mask: Tensor,
        tap: Tap = NO_TAP,
        entries: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the row vectors `(B, W)` of token vectors.

        Args:
            tokens: Token vectors, `(B, L, D)`.
            pooling_mask: `(B, L)`, 1.0 at the tokens to pool and 0.0 elsewhere.
            tap: Tap that each step of pooling and heads passes through.
            entries: Elements of sparse vectors to compute, in place of all W; None: all.
        """
        if self.sparse is None:
            return self.head(tokens, pooling_mask, tap)
        weights: Tensor = self.sparse(tokens, pooling_mask, entries=entries)
        return weights

    def forward_packed(
        self,
        input_ids: Tensor,
        padded_index: Tensor,
        packed_index: Tensor,
        attention_mask: Tensor,
        pooling_mask: Tensor,
        adapters: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return each of `outputs` for a packed batch, in float32.

        The arguments are the fields of `models.packing.PackedBatch`.
        """
        inputs = input_ids, padded_index, packed_index, attention_mask
        if self.reads_first_tokens:
            first = self.encoder.first_tokens(*inputs, token_types)  # (B, D)
            return (self.head(first[:, None], pooling_mask[:, :1]),)
        tokens = self.encoder.forward_packed(*inputs, adapters, token_types)  # (T, D)
        rows = Rows(padded_index, packed_index)

        def compute(output: Output) -> Tensor:
            if output == "tokens":
                return tokens.float()
            if output == "sparse" and self.sparse is not None:
                weights: Tensor = self.sparse(tokens, pooling_mask, rows.pad)
                return weights
            return self.head(rows.pad(tokens), pooling_mask)

        return tuple(map(compute, self.outputs))

    @property
    def reads_first_tokens(self) -> bool:
        """Whether logits need first tokens alone, so that the last layer can skip all others."""
        is_first = self.outputs == ("logits",) and self.pooling == ("cls",)
        return is_first and self.encoder.can_compute_first_tokens

    def head(self, tokens: Tensor, pooling_mask: Tensor, tap: Tap = NO_TAP) -> Tensor:
        """Pool the token vectors and apply the heads; return row vectors `(B, W)`.

        The result is float32, or float64 for float64 token vectors.

        Args:
            tokens: Token vectors, `(B, L, D)`.
            pooling_mask: `(B, L)`, 1.0 at the tokens to pool and 0.0 elsewhere.
            tap: Tap that each step passes through.
        """
        wide = torch.promote_types(tokens.dtype, torch.float32)
        mask = pooling_mask.to(wide)  # (B, L)
        x = tap.step("pooling", None, lambda x: pool(self.pooling, x.to(wide), mask), tokens)
        for index, head in enumerate(self.heads):
            x = tap.step(f"heads.{index}", head, head, x)
        return x.to(wide)
