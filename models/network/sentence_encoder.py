"""The complete network: encoder, pooling and heads as one module."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from models.artifact import Output
from models.network.encoder import Encoder
from models.network.norms import Norm
from models.network.packed_attention import Rows
from models.network.pooling import pool
from models.network.sparse import SparseHead
from models.network.taps import NO_TAP, Tap

HEAD_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "LeakyReLU": nn.functional.leaky_relu,
    "SiLU": nn.functional.silu,
    "GELU": nn.functional.gelu,
    "Sigmoid": torch.sigmoid,
}


class DenseHead(nn.Module):
    """A linear layer and an activation, equivalent to sentence-transformers' `Dense` module.

    Attributes:
        in_features: Width of the input.
        out_features: Width of the output.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, activation: str) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation = HEAD_ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's output `(B, out_features)` for the input `x`, `(B, in_features)`."""
        return self.activation(self.linear(x.to(self.linear.weight.dtype)))


class NormHead(nn.Module):
    """A norm after pooling, such as sentence-transformers' `LayerNorm` module.

    Args:
        norm: Norm for rows of `width` elements.
        width: Width of the input and of the output.

    Attributes:
        in_features: Width of the input.
        out_features: Width of the output, equal to `in_features`.
    """

    def __init__(self, norm: Norm, width: int) -> None:
        super().__init__()
        self.in_features = self.out_features = width
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised rows of `x`, `(B, width)`."""
        normed: Tensor = self.norm(x.to(self.norm.weight.dtype))
        return normed


class NormalizeHead(nn.Module):
    """Normalisation to unit length, equivalent to sentence-transformers' `Normalize` module.

    Attributes:
        in_features: None, because the input can have any width.
        out_features: None, because the output has the width of the input.
    """

    in_features: int | None = None
    out_features: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, `(B, W)`, with its rows scaled to unit length."""
        return nn.functional.normalize(x)


class TruncateHead(nn.Module):
    """Truncation to the leading dimensions, equivalent to sentence-transformers' `truncate_dim`.

    Attributes:
        in_features: None, because the input can have any width of at least `out_features`.
        out_features: Width of the output.
    """

    in_features: int | None = None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out_features = width

    def forward(self, x: Tensor) -> Tensor:
        """Return the leading dimensions of `x`, `(B, W)`, as `(B, out_features)`."""
        return x[:, : self.out_features]


Head = DenseHead | NormHead | NormalizeHead | TruncateHead


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
        if self.sparse is not None:
            weights: Tensor = self.sparse(tokens, pooling_mask)
            return weights
        return self.head(tokens, pooling_mask, tap)

    def forward_packed(
        self,
        input_ids: Tensor,
        padded_index: Tensor,
        packed_index: Tensor,
        attention_mask: Tensor,
        pooling_mask: Tensor,
        adapters: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the row vectors `(B, W)` and the token vectors `(T, D)` of a packed batch.

        If `reads_first_tokens`, the token vectors are those of first tokens alone, `(B, D)`.

        The arguments are the fields of `models.packing.PackedBatch`.
        """
        inputs = input_ids, padded_index, packed_index, attention_mask
        if self.reads_first_tokens:
            tokens = self.encoder.first_tokens(*inputs, token_types)  # (B, D)
            return self.head(tokens[:, None], pooling_mask[:, :1]), tokens
        tokens = self.encoder.forward_packed(*inputs, adapters, token_types)  # (T, D)
        rows = Rows(padded_index, packed_index)
        if self.sparse is not None:
            return self.sparse(tokens, pooling_mask, rows.pad), tokens
        return self.head(rows.pad(tokens), pooling_mask), tokens

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
