"""What an exported graph computes: encoder, pooling and dense head as one module."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from models.encoder import Encoder, Rows
from models.pooling import pool

HEAD_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": nn.functional.gelu,
    "Sigmoid": torch.sigmoid,
}


class DenseHead(nn.Module):
    """A linear layer and an activation, as sentence-transformers' `Dense`."""

    def __init__(self, in_features: int, out_features: int, bias: bool, activation: str) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation = HEAD_ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Return `(B, out_features)` of `(B, in_features)`."""
        return self.activation(self.linear(x.to(self.linear.weight.dtype)))


class SentenceEncoder(nn.Module):
    """Token ids to one vector per row, not normalised.

    Args:
        encoder: Gives the token vectors.
        pooling: Names in `models.pooling.POOLINGS`; several are put side by side.
        heads: Applied in turn to the pooled vector.

    Attributes:
        width: Width of a row's vector.

    Raises:
        ValueError: A head does not take what comes before it.
    """

    def __init__(
        self, encoder: Encoder, pooling: Sequence[str], heads: Sequence[DenseHead] = ()
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.pooling = tuple(pooling)
        self.heads = nn.ModuleList(heads)
        self.width = encoder.config.d_model * len(self.pooling)
        for head in heads:
            if head.linear.in_features != self.width:
                raise ValueError(
                    f"a dense head takes {head.linear.in_features} features; {self.width} come in"
                )
            self.width = head.linear.out_features

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pooling_mask: Tensor) -> Tensor:
        """Return `(B, width)` of a dense batch.

        Args:
            input_ids: `(B, L)`.
            attention_mask: `(B, L)`, 1.0 at tokens and 0.0 at padding.
            pooling_mask: `(B, L)`, 1.0 at tokens that pooling counts.
        """
        return self.head(self.encoder(input_ids, attention_mask), pooling_mask)

    def forward_packed(
        self,
        input_ids: Tensor,
        padded_index: Tensor,
        packed_index: Tensor,
        attention_mask: Tensor,
        pooling_mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return row vectors `(B, width)` and token vectors `(T, D)` of a packed batch.

        Arguments are the fields of `models.packing.PackedBatch`.
        """
        tokens = self.encoder.forward_packed(
            input_ids, padded_index, packed_index, attention_mask
        )  # (T, D)
        padded = Rows(None, padded_index, packed_index).pad(tokens)  # (B, L, D)
        return self.head(padded, pooling_mask), tokens

    def head(self, tokens: Tensor, pooling_mask: Tensor) -> Tensor:
        """Return `(B, width)` of token vectors `(B, L, D)`, pooled in float32 or wider."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        x = pool(self.pooling, tokens.to(wide), pooling_mask.to(wide))
        for head in self.heads:
            x = head(x)
        return x.to(wide)
