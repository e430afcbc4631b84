"""A small random encoder in float64, where finite differences and other people's sums are exact."""

import torch

from models.encoder import Encoder, EncoderConfig
from models.gradients.twin import Row, Twin
from models.sentence_encoder import SentenceEncoder

A = Row([0, 7, 21, 4, 9, 2])
B = Row([0, 33, 8, 15, 2])


def toy_twin(
    *, normalize: bool = True, pooling: str = "mean", norm_first: bool = False, **changes: object
) -> Twin:
    """A twin of two layers and 16 dimensions; `changes` go into its `EncoderConfig`."""
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
    model = SentenceEncoder(Encoder(EncoderConfig(**config)), [pooling]).double()  # type: ignore[arg-type]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return Twin(model.eval().requires_grad_(False), normalize)
