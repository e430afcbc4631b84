"""ELECTRA: BERT whose embeddings can be narrower than its layers.

Source: Clark et al. 2020, arXiv:2003.10555.
"""

from models.export.families import bert
from models.export.families.family import (
    Classifier,
    Family,
    MaskedLM,
    Settings,
    read_count,
    tensors,
)


def embedding_width(config: Settings) -> dict[str, int]:
    """Return the `EncoderConfig` field `embedding_width`: 0 if the width equals `hidden_size`."""
    width = read_count(config, "embedding_size", 128)
    return {"embedding_width": 0 if width == config["hidden_size"] else width}


ELECTRA = Family(
    config=bert.CONFIG,
    defaults=bert.DEFAULTS,
    derived=embedding_width,
    required=bert.REQUIRED,
    layouts=(
        tensors(
            weights=bert.EMBEDDINGS,
            modules={**bert.MODULES, "embeddings.projection": "embeddings_project"},
        ),
    ),
    classifier=Classifier(dense="classifier.dense", activation="GELU", out="classifier.out_proj"),
    token_classifier=Classifier(),
    masked_lm=MaskedLM(
        dense="generator_predictions.dense",
        activation="gelu",
        norm="generator_predictions.LayerNorm",
        decoder="generator_lm_head",
    ),
    prefixes=("electra.",),
    ignored=(r"embeddings\.position_ids", r"(generator|discriminator)_.*"),
)
