"""The embeddings of an encoder, which compute the input of the first layer."""

from typing import cast

import torch
from torch import Tensor, nn

from models.network.adapters import AdaptedEmbedding
from models.network.config import EncoderConfig
from models.network.norms import AddNorm, Norm
from models.network.taps import NO_TAP, Tap


class InputEmbeddings(nn.Module):
    """Sum of word, token type and position embeddings, followed by a norm and a linear layer.

    All parts except the word embeddings are optional, but position embeddings imply the norm.

    Attributes:
        last_step: Name of the last step, such as "embeddings.norm" (see `Tap`).
    """

    norm: Norm | AddNorm | None

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        E = config.embedding_width or config.d_model
        self.word = AdaptedEmbedding(config.vocab_size, E, config.adapters)
        self.token_type = (
            AdaptedEmbedding(config.type_vocab_size, E, config.adapters)
            if config.type_vocab_size
            else None
        )
        self.position = (
            nn.Embedding(config.max_positions, E) if config.position_embeddings else None
        )
        if self.position is not None:
            self.norm = config.norms.add_norm(E)
        else:
            self.norm = config.norms.norm(E) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self.projection = nn.Linear(E, config.d_model) if config.embedding_width else None
        parts = ("projection", self.projection), ("norm", self.norm), ("types", self.token_type)
        last = next((name for name, module in parts if module is not None), "words")
        self.last_step = f"embeddings.{last}"

    def forward(
        self,
        words: Tensor,
        positions: Tensor,
        token_types: Tensor | None = None,
        tap: Tap = NO_TAP,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the first layer, `(..., D)`.

        Args:
            words: Word embeddings, `(..., E)`.
            positions: Position of each token, `(...)`.
            token_types: Type of each token, `(...)`; None: type 0.
            tap: Tap that each step passes through.
            scales: Scale of each rank of the adapters, `(..., N * R)`; None: no adapters.

        Raises:
            ValueError: `token_types` is given, but the encoder has no token type embeddings.
        """
        if (types := self.token_type) is not None:

            def add_type(words: Tensor) -> Tensor:
                words = words + (types.weight[0] if token_types is None else types(token_types))
                if types.adapters is None or scales is None:
                    return words
                ids = torch.zeros_like(positions) if token_types is None else token_types
                return words + types.adapters(ids, scales)

            words = tap.step("embeddings.types", types, add_type, words)
        elif token_types is not None:
            raise ValueError("token_types must be None: this encoder has no token type embeddings")
        x = words
        if (table := self.position) is not None:
            offsets = tap.step("embeddings.positions", table, lambda: table(positions))
            norm = cast(AddNorm, self.norm)
            x, _ = tap.add_norm("embeddings.sum", "embeddings.norm", norm, words, offsets)
        elif self.norm is not None:
            x = tap.step("embeddings.norm", self.norm, self.norm, words)
        x = self.dropout(x)
        if (projection := self.projection) is not None:
            x = tap.step("embeddings.projection", projection, projection, x)
        return x
