"""The twin of a served graph: the same weights in PyTorch, where gradients can be taken.

A point is a place on the way from token ids to the vector, where tokens are vectors `(L, D)`. The
twin says what a row's tokens are there, and goes on from any vectors put in their place. So a
gradient is taken by an input of a function, never by a hook inside a module: a hook on a layer that
two texts go through would see both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.artifact import TWIN, Artifact, ArtifactError
from models.checkpoint import load
from models.encoder import Rows
from models.model_folder import ModelFolder
from models.recipe import Overrides
from models.sentence_encoder import SentenceEncoder


@dataclass(frozen=True)
class Row:
    """One input of the model.

    Attributes:
        ids: Token ids, special tokens included.
        unpooled: Leading tokens that pooling leaves out, those of a prompt.
    """

    ids: Sequence[int]
    unpooled: int = 0


class Twin:
    """A sentence encoder, opened at its points.

    Args:
        model: In evaluation mode, its parameters frozen.
        normalize: Whether the vectors that are served have unit length.

    Attributes:
        points: Where tokens can be looked at, in order. "words" are the rows of the word table,
            before positions are added; "embeddings" go into the first layer; "layers.0" comes out
            of it, and so on; "output" is what pooling sees.
    """

    def __init__(self, model: SentenceEncoder, normalize: bool) -> None:
        self.model = model
        self.normalize = normalize
        between = range(model.encoder.config.num_layers - 1)
        self.points = ("words", "embeddings", *(f"layers.{i}" for i in between), "output")

    @classmethod
    def open(cls, artifact: Artifact, device: str = "cpu") -> "Twin":
        """Return the twin of an artifact.

        Raises:
            ArtifactError: The artifact was exported without its twin, or its weights are not those
                of the graph.
            CheckpointError: The twin's files are not understood.
        """
        manifest = artifact.manifest
        weights = {f"{TWIN}/{name}": sha256 for name, sha256 in manifest.weights_sha256.items()}
        for name, sha256 in weights.items():
            if name not in manifest.files:
                raise ArtifactError(
                    f"the artifact {artifact.path.name} was exported without its twin, which "
                    "gradients need"
                )
            if manifest.files[name] != sha256:
                raise ArtifactError(f"{name} is not what the graph was exported from")
        # Read through the artifact, which compares hashes: what is opened is what was compared.
        folder = ModelFolder(
            artifact.path / TWIN,
            read=lambda file: artifact.read(str(file.relative_to(artifact.path))),
        )
        model, _ = load(folder, Overrides(pooling=manifest.pooling))
        return cls(model.to(device), manifest.normalize)

    def vector(self, row: Row) -> Tensor:
        """Return the row's vector `(W,)`, not normalised."""
        with torch.no_grad():
            return self.onwards("words", self.tokens("words", row)[None], row)[0]

    def tokens(self, point: str, row: Row, ids: Sequence[int] | None = None) -> Tensor:
        """Return what the tokens of the row are at a point, `(L, D)`.

        Args:
            point: One of `points`.
            row: The row.
            ids: Stand in for the row's ids, as many as there are; positions stay those of the row.
        """
        encoder = self.model.encoder
        with torch.no_grad():
            x = encoder.embeddings.word(self._ids(row.ids if ids is None else ids))[None]
            for place in range(self.points.index(point)):
                x = self._step(place, x, row)
        return x[0]

    def onwards(self, point: str, tokens: Tensor, row: Row) -> Tensor:
        """Return the vectors `(S, W)` that come of tokens `(S, L, D)` at a point, not normalised.

        Differentiable by the tokens.

        Args:
            point: Where the tokens are put in.
            tokens: S versions of the row's tokens.
            row: Says where pooling looks, and its ids say what the positions are.
        """
        x = tokens
        for place in range(self.points.index(point), len(self.points) - 1):
            x = self._step(place, x, row)
        pooled = torch.arange(len(row.ids), device=x.device) >= row.unpooled  # (L,)
        return self.model.head(x, pooled.to(x.dtype).expand(len(x), -1))

    def _step(self, place: int, x: Tensor, row: Row) -> Tensor:
        """Return the tokens `(S, L, D)` at the point after the `place`-th."""
        encoder = self.model.encoder
        if place == 0:
            positions = encoder.positions(self._ids(row.ids)[None])  # (1, L)
            return encoder.embeddings.place(x, positions.expand(len(x), -1), None)
        rows = Rows(encoder.attention_bias(x, len(row.ids), None))
        return encoder.run_layer(place - 1, x, rows)

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, device=self.model.encoder.embeddings.word.weight.device)
