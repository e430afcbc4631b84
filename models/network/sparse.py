"""Sparse vectors: one weight per entry of the vocabulary, as in SPLADE.

Source: Formal et al. 2021, arXiv:2109.10086.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from models.network.layer import ACTIVATIONS
from models.network.norms import Norm

# Number of vocabulary entries whose logits exist at the same time.
_BLOCK = 4096


class SparseHead(nn.Module):
    """Head of a masked language model, and pooling of its logits to one weight per entry.

    The weight of an entry is the maximum or the sum of log(1 + max(0, logit)) over the tokens.

    Args:
        width: Width of the token vectors, D.
        norm: Norm of the transformed token vectors, of width E.
        embedding_width: Width of the transformed token vectors, E.
        vocab_size: Number of vocabulary entries, V.
        activation: Name in `models.network.layer.ACTIVATIONS`.
        dense_bias: Whether the transformation of the token vectors has a bias.
        pooling: "max" or "sum".
        double_log: Whether the logarithm is applied twice.
    """

    def __init__(
        self,
        width: int,
        norm: Norm,
        embedding_width: int,
        vocab_size: int,
        activation: str,
        *,
        dense_bias: bool = True,
        pooling: str = "max",
        double_log: bool = False,
    ) -> None:
        super().__init__()
        self.dense = nn.Linear(width, embedding_width, bias=dense_bias)
        self.norm = norm
        self.decoder = nn.Linear(embedding_width, vocab_size)
        self.activation = ACTIVATIONS[activation]
        self.pooling = pooling
        self.double_log = double_log

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor,
        pad: Callable[[Tensor], Tensor] = lambda x: x,
        entries: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the weights of each row, `(B, V)`.

        Args:
            tokens: Token vectors, `(B, L, D)` or, of a packed batch, `(T, D)`.
            mask: `(B, L)`, 1.0 at the tokens to pool and 0.0 elsewhere.
            pad: Returns packed values `(T, ...)` as `(B, L, ...)`.
            entries: Vocabulary entries whose weights are returned; None: all.
        """
        x = self.dense(tokens.to(self.dense.weight.dtype))
        x = self.norm(self.activation(x))  # (..., E)
        mask = mask.to(x.dtype)[:, :, None]  # (B, L, 1)
        decoder: list[Tensor] = [self.decoder.weight, self.decoder.bias]  # (V, E), (V,)
        if entries is not None:
            decoder = [parameter[list(entries)] for parameter in decoder]
        blocks = zip(*(parameter.split(_BLOCK) for parameter in decoder), strict=True)
        pooled: list[Tensor] = []
        for weight, bias in blocks:
            logits = nn.functional.linear(x, weight, bias)  # (..., block)
            if self.pooling == "sum":
                pooled.append((pad(self._log(logits)) * mask).sum(1))
            else:  # the logarithm is monotonic
                pooled.append(self._log((pad(torch.relu(logits)) * mask).amax(1)))
        return torch.cat(pooled, dim=-1)

    def _log(self, logits: Tensor) -> Tensor:
        weights = torch.log1p(torch.relu(logits))
        return torch.log1p(weights) if self.double_log else weights
