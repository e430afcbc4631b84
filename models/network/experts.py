"""Mixture of experts: feed-forward layers of which each token uses a few, chosen by a router.

Shapes: T tokens, E experts, K of them per token, width D, inner width F.
Source: Shazeer et al. 2017, arXiv:1701.06538; Nussbaum and Duderstadt 2025, arXiv:2502.07972.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library, register_fake

# The op is only a node of exported graphs: the number of an expert's tokens depends on values.
_LIBRARY = Library("vitrine", "FRAGMENT")
_LIBRARY.define(
    "expert_outputs(Tensor x, Tensor experts, Tensor w1, Tensor w2, int count) -> Tensor"
)


def _fake(x: Tensor, experts: Tensor, _w1: Tensor, _w2: Tensor, _count: int) -> Tensor:
    return x.new_empty(*experts.shape, x.shape[-1])


register_fake("vitrine::expert_outputs", _fake, lib=_LIBRARY)


@dataclass(frozen=True)
class ExpertsConfig:
    """Hyperparameters of the layers with experts.

    Attributes:
        count: Number of experts of a layer, E.
        per_token: Number of experts that a token uses, K.
        every: Every how many layers have experts, from the second layer on; at least 2.
    """

    count: int
    per_token: int
    every: int

    def in_layer(self, index: int) -> bool:
        """Return whether the layer with an index, from 0, has experts."""
        return index % self.every == 1


class Experts(nn.Module):
    """Feed-forward layer with experts: products of D x F and F x D, with an exact GELU between.

    Each expert computes its own tokens only, so the cost is that of K experts for each token. A
    token's outputs are weighted with the router's probabilities among all experts; they do not sum
    to 1.

    Attributes:
        w1, w2: Weights of all experts, `(E * F, D)` each, as in checkpoints.
        bias: Added once to the weighted sum, `(D,)`.
    """

    def __init__(self, d_model: int, dim_feedforward: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(d_model, config.count, bias=False)
        size = config.count * dim_feedforward, d_model
        self.w1 = nn.Parameter(torch.empty(size).normal_(std=0.02))
        self.w2 = nn.Parameter(torch.empty(size).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, in the shape of `x`, `(..., D)`."""
        flat = x.reshape(-1, x.shape[-1])  # (T, D)
        dtype = torch.promote_types(x.dtype, torch.float32)  # at least float32, as published
        probabilities = self.router(flat).softmax(-1, dtype=dtype)  # (T, E)
        weights, experts = probabilities.topk(self.config.per_token)  # (T, K)
        if torch.compiler.is_exporting():
            parameters = self.w1, self.w2, self.config.count
            outputs = torch.ops.vitrine.expert_outputs(flat, experts, *parameters)
        else:
            outputs = self._outputs(flat, experts)  # (T, K, D)
        mixed = (weights[..., None].to(x.dtype) * outputs).sum(-2) + self.bias  # (T, D)
        return mixed.view_as(x)

    def _outputs(self, x: Tensor, experts: Tensor) -> Tensor:
        """Return the outputs of the experts of each token, `(T, K, D)`, before their weights."""
        chosen = experts.flatten()  # (T * K,)
        places = [(chosen == e).nonzero().squeeze(1) for e in range(self.config.count)]
        outputs = [
            F.gelu(x[place // experts.shape[1]] @ w1.T) @ w2
            for place, (w1, w2) in zip(places, self.matrices(), strict=True)
        ]
        order = torch.cat(places).argsort()
        return torch.cat(outputs)[order].unflatten(0, experts.shape)

    def matrices(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the two weights of each expert, `(F, D)` each."""
        count = self.config.count
        return zip(self.w1.chunk(count), self.w2.chunk(count), strict=True)
