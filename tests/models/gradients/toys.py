"""Random test inputs: a small encoder in float64, for exact finite differences, and token rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from models.add_layer_norm.reference import Array
from models.gradients.attribution import TargetFunction, attribute
from models.gradients.inputs import InputRow, Side
from models.gradients.layer_norm_operands import EPS, Operands
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.attribution import Attribution
from models.network.adapters import AdapterConfig
from models.network.config import AttentionConfig, EncoderConfig
from models.network.disentangled import DistanceConfig
from models.network.encoder import Encoder
from models.network.heads import Head
from models.network.positions import Rotary
from models.network.sentence_encoder import SentenceEncoder

# The choices of ModernBERT: pre-norm, gates, rotary positions, and a window in the second layer.
GATED: dict[str, Any] = {
    "norm_first": True,
    "first_norm": False,
    "gated": True,
    "biases": frozenset[str](),
    "position_embeddings": False,
    "type_vocab_size": 0,
    "attention": (
        AttentionConfig(rotary=Rotary(20.0)),
        AttentionConfig(rotary=Rotary(5.0, scale=1.5), window=1),
    ),
}
# Those of ELECTRA and of GTE together: narrow embeddings, and post-norm layers with gates.
NARROW: dict[str, Any] = {
    "embedding_width": 8,
    "gated": True,
    "attention": (AttentionConfig(rotary=Rotary(20.0)),) * 2,
}

# Those of Qwen3 and EmbeddingGemma together: RMS norms everywhere, shared heads of another width,
# causal attention and a window.
LLAMA: dict[str, Any] = {
    **GATED,
    "first_norm": True,
    "norm": "rms_norm",
    "branch_norms": True,
    "embedding_norm": False,
    "num_kv_heads": 2,
    "head_width": 6,
    "qk_norm": "head",
    "attention": (
        AttentionConfig(rotary=Rotary(20.0), causal=True),
        AttentionConfig(rotary=Rotary(5.0), window=1),
    ),
}

# Those of DeBERTa: embeddings of distances, in place of positions.
DEBERTA: dict[str, Any] = {
    "position_embeddings": False,
    "distances": DistanceConfig(span=4, max_distance=9, norm=True),
}

# Those of Jina v3: adapters.
ADAPTED: dict[str, Any] = {
    "adapters": AdapterConfig(("first", "second"), rank=2, scale=0.5),
}

# Rows and width of the operands of a norm.
N, D = 4, 16

A = InputRow([0, 7, 21, 4, 9, 2])
B = InputRow([0, 33, 8, 15, 2])


def toy_model(
    *,
    normalize: bool = True,
    pooling: str = "mean",
    heads: Sequence[Head] = (),
    norm_first: bool = False,
    **changes: object,
) -> ReferenceModel:
    """Build a reference model of two layers and width 16; `changes` override its config."""
    torch.manual_seed(0)
    config = {
        "vocab_size": 40,
        "d_model": 16,
        "num_layers": 2,
        "num_heads": 4,
        "dim_feedforward": 24,
        "max_positions": 12,
        "type_vocab_size": 2,
        "norm_first": norm_first,
        **changes,
    }
    model = SentenceEncoder(Encoder(EncoderConfig(**config)), [pooling], heads).double()  # type: ignore[arg-type]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return ReferenceModel(model.eval().requires_grad_(False), normalize)


def random_case(
    residual: bool = True, dtype: type = np.float64, *, centred: bool = True
) -> Operands:
    rng = np.random.default_rng(0)
    x, other, dout = rng.normal(size=(3, N, D)).astype(dtype)
    gamma, beta = rng.normal(size=(2, D)).astype(dtype)
    beta = beta * centred
    return Operands(x, other if residual else None, gamma, beta, EPS, dout, None, centred)


def by_torch(operands: Operands) -> dict[str, Array]:
    """Return the output and its gradients by torch, in float64."""
    x, residual, gamma, beta, eps, dout, _, centred = operands
    rows = x.astype(np.float64) + (0 if residual is None else residual.astype(np.float64))
    leaves = [torch.tensor(a, dtype=torch.float64).requires_grad_() for a in (rows, gamma, beta)]
    if centred:
        out = F.layer_norm(leaves[0], (x.shape[-1],), leaves[1], leaves[2], eps)
    else:
        out = F.rms_norm(leaves[0], (x.shape[-1],), leaves[1], eps) + leaves[2]
    gradients = torch.autograd.grad(out, leaves, torch.tensor(dout, dtype=torch.float64))
    by_name = dict(zip(("dx", "dgamma", "dbeta"), (g.numpy() for g in gradients), strict=True))
    return {"out": out.detach().numpy(), **by_name}


def assert_complete(result: Attribution, rel: float, *, least: float = 0.0) -> None:
    """Check that the scores add up to the change of the value, which is more than `least`."""
    assert result.completeness is not None
    assert result.completeness.converged
    assert result.baseline_value is not None
    change = result.value - result.baseline_value
    assert abs(change) > least
    assert result.scores.sum() == pytest.approx(change, rel=rel)


def attribute_row(
    model: ReferenceModel,
    row: InputRow,
    target: TargetFunction,
    *,
    baseline: Sequence[int] | None = None,
    **options: Any,  # noqa: ANN401 - see `attribute`
) -> Attribution:
    """Attribute a scalar of one row to its tokens."""
    return attribute(model, [Side(row, baseline)], target, **options)
