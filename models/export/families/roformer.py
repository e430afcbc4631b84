"""RoFormer: BERT with rotary positions.

Source: Su et al. 2021, arXiv:2104.09864.
"""

from typing import Any

import torch
from torch import Tensor

from models.export.families import bert, electra, rotary
from models.export.families.family import Classifier, Family, Settings, tensors
from models.network.config import AttentionConfig, EncoderConfig
from models.network.positions import Rotary, rotation

_BASE = 10000.0


def _derive(config: Settings) -> dict[str, Any]:
    width = config.get("embedding_size") or config["hidden_size"]
    head_width = config["hidden_size"] // config["num_attention_heads"]
    attention = AttentionConfig(rotary=rotary.read_rotary({}, head_width, _BASE))
    return {
        **electra.embedding_width({**config, "embedding_size": width}),
        "attention": (attention,) * config["num_hidden_layers"],
    }


def _positions(config: EncoderConfig) -> Tensor:
    """Return the sines, then the cosines, of each position's angles, `(max_positions, K)`."""
    positions = torch.arange(config.max_positions)
    own = rotation(positions, Rotary(_BASE), config.heads.width, torch.float32)
    return torch.cat([own.sin, own.cos], -1).flatten(1)


def _halves(projections: Tensor, config: EncoderConfig) -> Tensor:
    """Return the input projection with the elements of queries and keys reordered.

    In each head, the first elements of all pairs precede the second elements: RoFormer rotates
    pairs of adjacent elements, whereas the network pairs elements half a head apart.
    """
    q, k, v = projections.split(config.heads.widths)
    pairs = (part.unflatten(0, (config.num_heads, -1, 2)) for part in (q, k))
    return torch.cat([*(part.transpose(1, 2).flatten(0, 2) for part in pairs), v])


ROFORMER = Family(
    config=bert.CONFIG,
    defaults=bert.DEFAULTS,
    constants={"position_embeddings": False},
    derived=_derive,
    required={**bert.REQUIRED, "rotary_value": False},
    layouts=(
        tensors(
            weights=rotary.EMBEDDINGS,
            modules={**bert.MODULES, "embeddings.projection": "embeddings_project"},
        ),
    ),
    values={r"layers\.\d+\.self_attn\.in_proj_(weight|bias)": _halves},
    classifier=Classifier(
        dense="classifier.dense",
        activation="GELU",
        out="classifier.out_proj",
        required={"hidden_act": "gelu"},
    ),
    token_classifier=Classifier(),
    masked_lm=bert.MASKED_LM,
    prefixes=("roformer.",),
    fixed={"encoder.embed_positions.weight": _positions},
    ignored=(r"cls\..*",),
)
