"""The complete network: encoder, pooling and heads as one module."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn

from models.manifest import Output
from models.network.encoder import Encoder
from models.network.heads import DenseHead, Head, NormHead, TruncateHead
from models.network.packed_attention import Rows
from models.network.pooling import pool
from models.network.spans import SpanHead
from models.network.sparse import SparseHead
from models.network.taps import NO_TAP, Tap

# Fields of `models.packing.PackedWords`, by name.
Words = Mapping[str, Tensor]


class SentenceEncoder(nn.Module):
    """Network that turns the token ids of each row into one vector, or into one per token.

    A final normalisation of embeddings to unit length is not part of the network.

    Args:
        encoder: Encoder that computes the token vectors.
        pooling: Names of the poolings in `models.network.pooling.POOLINGS`. Their results are
            concatenated.
        heads: Modules applied to the pooled vector, in order.
        outputs: Names of the outputs of the exported graph.
        token_heads: Modules applied to every token vector, in order, by output: "tags", "multi" or
            "weights".
        sparse: Head that computes the output "sparse".
        spans: Head that computes the output "spans".
        pools_logits: Whether the heads are applied to each token, and the results are pooled.
        skipped_id: Token id that pooling skips, wherever it is in a row; None: no token is skipped.
        has_token_types: Whether token types are an input of the exported graph.

    Attributes:
        width: Width of a vector of the first output, W.

    Raises:
        ValueError: The input width of a head differs from the output width of the preceding head,
            pooling or encoder.
    """

    def __init__(
        self,
        encoder: Encoder,
        pooling: Sequence[str],
        heads: Sequence[Head] = (),
        *,
        outputs: tuple[Output, ...] = ("pooled", "tokens"),
        token_heads: Mapping[Output, Sequence[Head]] = MappingProxyType({}),
        sparse: SparseHead | None = None,
        spans: SpanHead | None = None,
        pools_logits: bool = False,
        skipped_id: int | None = None,
        has_token_types: bool = False,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.pooling = tuple(pooling)
        self.outputs = outputs
        self.pools_logits = pools_logits
        self.skipped_id = skipped_id
        self.has_token_types = has_token_types
        self.heads = nn.ModuleList(heads)
        self.token_heads = nn.ModuleDict(
            {output: nn.ModuleList(own) for output, own in token_heads.items()}
        )
        self.sparse = sparse
        self.spans = spans
        width = encoder.config.d_model
        widths = {output: _output_width(width, own) for output, own in token_heads.items()}
        pooled = _output_width(width * len(self.pooling), heads)
        self.width = encoder.config.vocab_size if sparse else widths.get(outputs[0], pooled)
        if spans is not None:
            self.width = spans.max_width

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        pooling_mask: Tensor,
        tap: Tap = NO_TAP,
        adapters: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Return the vectors of the first output for a dense batch, `(B, W)` or `(B, L, W)`.

        Args:
            input_ids: Token ids, `(B, L)`.
            attention_mask: `(B, L)`, 1.0 at tokens and 0.0 at padding; None: no padding.
            pooling_mask: `(B, L)`, 1.0 at the tokens to pool and 0.0 elsewhere.
            tap: Tap that each step passes through.
            adapters: Index of each row's adapter, `(B,)`; -1: no adapter. None: no adapters.
            token_types: Type of each token, `(B, L)`; None: type 0.
        """
        tokens = self.encoder(input_ids, attention_mask, token_types, tap=tap, adapters=adapters)
        return self.row_vectors(tokens, self.without_skipped(pooling_mask, input_ids), tap)

    def forward_all(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        pooling_mask: Tensor,
        adapters: Tensor | None = None,
        token_types: Tensor | None = None,
        words: Words | None = None,
    ) -> tuple[Tensor, ...]:
        """Return each of `outputs` for a dense batch, `(B, W)` or `(B, L, W)`; see `forward`.

        The output "spans", `(P, W)`, needs `words`, the fields of `models.packing.PackedWords` by
        name, and a single row.
        """
        tokens = self.encoder(input_ids, attention_mask, token_types, adapters=adapters)
        if words is not None:
            return (self._span_scores(tokens[0], words),)
        mask = self.without_skipped(pooling_mask, input_ids)
        return tuple(self._output(output, tokens, mask) for output in self.outputs)

    def forward_packed(
        self,
        input_ids: Tensor,
        padded_index: Tensor,
        packed_index: Tensor,
        attention_mask: Tensor,
        pooling_mask: Tensor,
        adapters: Tensor | None = None,
        token_types: Tensor | None = None,
        **words: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return each of `outputs` for a packed batch, in float32.

        The arguments are the fields of `models.packing.PackedBatch`, and for the output "spans"
        those of `PackedWords`.
        """
        inputs = input_ids, padded_index, packed_index, attention_mask
        if self.reads_first_tokens:
            first = self.encoder.forward_packed(  # (B, D)
                *inputs, token_types=token_types, first_only=True
            )
            return (self.head(first[:, None], pooling_mask[:, :1]),)
        tokens = self.encoder.forward_packed(*inputs, adapters, token_types)  # (T, D)
        if words:
            return (self._span_scores(tokens, words),)
        pad = Rows(padded_index, packed_index).pad
        mask = self.without_skipped(pooling_mask, pad(input_ids))
        return tuple(self._output(output, tokens, mask, pad=pad) for output in self.outputs)

    def _span_scores(self, tokens: Tensor, words: Words) -> Tensor:
        """Return the output "spans", `(P, W)`, of token vectors `(T, D)`."""
        if self.spans is None:
            raise ValueError("words must be None: this model has no output 'spans'")
        return self.spans(tokens, **words)

    def _output(
        self,
        output: Output,
        tokens: Tensor,
        pooling_mask: Tensor,
        tap: Tap = NO_TAP,
        pad: Callable[[Tensor], Tensor] = lambda x: x,
        entries: Sequence[int] | None = None,
    ) -> Tensor:
        """Return an output of token vectors; see `head` and `row_vectors`."""
        if output == "tokens":
            return tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        if output in self.token_heads:
            return _apply(cast(nn.ModuleList, self.token_heads[output]), tokens, tap)
        if self.sparse is not None and output == "sparse":
            return self.sparse(tokens, pooling_mask, pad, entries)
        return self.head(tokens, pooling_mask, tap, pad)

    def row_vectors(
        self,
        tokens: Tensor,
        pooling_mask: Tensor,
        tap: Tap = NO_TAP,
        entries: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the vectors of the first output, `(B, W)` or `(B, L, W)`, of token vectors.

        Args:
            tokens: Token vectors, `(B, L, D)`.
            pooling_mask: `(B, L)`, 1.0 at the tokens to pool and 0.0 elsewhere.
            tap: Tap that each step of pooling and heads passes through.
            entries: Elements of sparse vectors to compute, in place of all W; None: all.
        """
        return self._output(self.outputs[0], tokens, pooling_mask, tap, entries=entries)

    @property
    def reads_first_tokens(self) -> bool:
        """Whether the outputs need first tokens alone, so that the last layer can skip others."""
        is_first = self.outputs in (("logits",), ("pooled",)) and self.pooling == ("cls",)
        return is_first and self.encoder.config.can_compute_first_tokens

    def without_skipped(self, pooling_mask: Tensor, input_ids: Tensor) -> Tensor:
        """Return the pooling mask of token ids `(B, L)` without the tokens that pooling skips."""
        if self.skipped_id is None:
            return pooling_mask
        return pooling_mask * (input_ids != self.skipped_id)

    def head(
        self,
        tokens: Tensor,
        pooling_mask: Tensor,
        tap: Tap = NO_TAP,
        pad: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Tensor:
        """Pool the token vectors and apply the heads; return row vectors `(B, W)`.

        The result is float32, or float64 for float64 token vectors.

        Args:
            tokens: Token vectors, `(B, L, D)` or, of a packed batch, `(T, D)`.
            pooling_mask: `(B, L)`, 1.0 at the tokens to pool and 0.0 elsewhere.
            tap: Tap that each step passes through.
            pad: Returns packed values `(T, ...)` as `(B, L, ...)`.
        """
        wide = torch.promote_types(tokens.dtype, torch.float32)
        mask = pooling_mask.to(wide)  # (B, L)

        def pool_rows(x: Tensor) -> Tensor:
            return tap.step("pooling", None, lambda x: pool(self.pooling, pad(x).to(wide), mask), x)

        if self.pools_logits:
            return pool_rows(_apply(self.heads, tokens, tap))
        return _apply(self.heads, pool_rows(tokens), tap)


def _apply(heads: Iterable[nn.Module], x: Tensor, tap: Tap) -> Tensor:
    """Apply heads to vectors `(..., D)`; the result has the dtype that `head` describes."""
    wide = torch.promote_types(x.dtype, torch.float32)
    for index, head in enumerate(heads):
        x = tap.step(f"heads.{index}", head, head, x)
    return x.to(wide)


def _output_width(width: int, heads: Sequence[Head]) -> int:
    """Return the width of the vectors after the heads, given their width before.

    Raises:
        ValueError: A head does not fit the width of its input.
    """
    for head in heads:
        if isinstance(head, TruncateHead):
            width = min(width, head.width)
        elif isinstance(head, DenseHead | NormHead):
            if head.in_features != width:
                raise ValueError(
                    f"a head needs vectors of width {head.in_features}; its input has the width "
                    f"{width}"
                )
            width = head.out_features
    return width
