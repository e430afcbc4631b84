"""Models, rows and gradients for the tests of `models.gradients.flow`."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from models.gradients.inputs import InputRow, Objective
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.flow import (
    Flow,
    FlowStep,
    GradientSizes,
    NonFiniteStep,
    ParameterGradient,
)
from models.network.heads import DenseHead
from models.network.layer import EncoderLayer
from models.network.sentence_encoder import SentenceEncoder
from models.packing import NO_ADAPTER
from tests.models.gradients.toys import ADAPTED, DEBERTA, GATED, LLAMA, NARROW

C = InputRow([0, 5, 2])
E = InputRow([0, 17, 30, 30, 12, 11, 2], prompt_tokens=2)
COSINE = Objective("cosine")

KINDS: list[dict[str, Any]] = [
    {},
    {"norm_first": True},
    {"relative_buckets": 8, "position_padding_id": 1, "type_vocab_size": 0},
    {"norm_first": True, "relative_buckets": 8, "pooling": "cls", "normalize": False},
    GATED,
    NARROW,
    LLAMA,
    DEBERTA,
    ADAPTED,
]


def with_heads(model: ReferenceModel) -> ReferenceModel:
    """Return the model with two concatenated poolings and two dense heads."""
    torch.manual_seed(1)
    heads = [DenseHead(32, 12, True, "Tanh"), DenseHead(12, 8, False, "GELU", residual=True)]
    network = SentenceEncoder(model.network.encoder, ["mean", "max"], heads).double().eval()
    return ReferenceModel(network.requires_grad_(False), model.normalize)


def adapted(rows: Sequence[InputRow], kind: dict[str, Any]) -> list[InputRow]:
    """Return the rows with the adapters of a model in turn."""
    count = len(kind["adapters"].names) if "adapters" in kind else 0
    return [replace(row, adapter=i % count if count else NO_ADAPTER) for i, row in enumerate(rows)]


def layer(model: ReferenceModel, index: int) -> EncoderLayer:
    return cast(EncoderLayer, model.network.encoder.layers[index])


def layer_norm(module: torch.nn.Module | None) -> torch.nn.LayerNorm:
    assert isinstance(module, torch.nn.LayerNorm)
    return module


def at(result: Flow, name: str) -> FlowStep:
    return next(step for step in result.steps if step.name == name)


def names(result: Flow) -> list[str]:
    return [step.name for step in result.steps]


def gradient(result: Flow, name: str) -> GradientSizes:
    own = at(result, name).gradient
    assert own is not None
    return own


def parameters(result: Flow, name: str) -> ParameterGradient:
    own = at(result, name).parameters
    assert own is not None
    return own


def first_nonfinite(result: Flow) -> NonFiniteStep:
    assert result.first_nonfinite is not None
    return result.first_nonfinite


def cosines(vectors: Tensor) -> Tensor:
    return F.cosine_similarity(vectors[::2], vectors[1::2]).sum()


def forward_all(model: ReferenceModel, rows: Sequence[InputRow]) -> Tensor:
    """Return the vectors of the rows from the model's own forward pass."""
    vectors = []
    for row in rows:
        ones = torch.ones(1, len(row.ids), dtype=torch.float64)
        pooled = ones.clone()
        pooled[:, : row.prompt_tokens] = 0
        own = None if row.adapter == NO_ADAPTER else torch.tensor([row.adapter])
        vectors.append(model.network(torch.tensor([row.ids]), ones, pooled, adapters=own))
    return torch.cat(vectors)


def layer_gradients(model: ReferenceModel, index: int, rows: Sequence[InputRow]) -> list[Tensor]:
    """Return the gradients `(L, D)` of the cosines by a layer's output, through autograd."""
    layer_name = model.layer_names[2 + index]
    inputs = [model.tokens(layer_name, row).requires_grad_() for row in rows]
    vectors = [
        model.continue_from(layer_name, x[None], row) for x, row in zip(inputs, rows, strict=True)
    ]
    return list(torch.autograd.grad(cosines(torch.cat(vectors)), inputs))


def layer_gradient(model: ReferenceModel, index: int, rows: Sequence[InputRow]) -> float:
    return torch.cat([g.flatten() for g in layer_gradients(model, index, rows)]).norm().item()


def with_nan_gradient(x: Tensor, index: tuple[int, ...]) -> Tensor:
    """Return a copy of the tensor whose backward pass sets one element to NaN."""

    def spoil(dy: Tensor) -> Tensor:
        dy = dy.clone()
        dy[index] = math.nan
        return dy

    y = x.clone()
    y.register_hook(spoil)
    return y
