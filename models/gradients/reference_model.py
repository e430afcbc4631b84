"""The reference model of a served graph: the same weights in PyTorch, for gradients.

A layer name denotes a point of the forward pass between token ids and the row's vector: an
embedding, logits, sparse weights, or a multi-vector. At a layer, the model returns the token
vectors `(L, D)` of a row, or continues the forward pass from other token vectors. So gradients are
taken with respect to a function's argument. Module hooks would not separate the texts that run
through a layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.artifact import Artifact
from models.export.checkpoint import load
from models.export.model_folder import source_folder
from models.export.sentence_config import overrides_of
from models.gradients.inputs import InputRow
from models.manifest import SOURCE, ArtifactError, SimilarityName
from models.network.sentence_encoder import SentenceEncoder
from models.network.taps import NO_TAP, OutputTap, Tap


class ReferenceModel:
    """A sentence encoder whose token vectors can be read and replaced between layers.

    Args:
        network: Network in evaluation mode, with frozen parameters.
        normalize: Whether served vectors are normalised to unit length.
        similarity: Similarity of served vectors; None for models without vectors.

    Attributes:
        steps: Maps each layer name, in order, to the name of the step that outputs the token
            vectors at the layer. The vectors at "words" are word embeddings, without positions;
            at "embeddings", the input of the first layer; at "layers.0", the output of the first
            layer, and so on; at "output", the input of pooling.
    """

    def __init__(
        self,
        network: SentenceEncoder,
        normalize: bool,
        similarity: SimilarityName | None = "cosine",
    ) -> None:
        self.network = network
        self.normalize = normalize
        self.similarity = similarity
        encoder = network.encoder
        self.steps = {
            "words": "embeddings.words",
            "embeddings": encoder.embeddings.last_step,
            **{f"layers.{i}": step for i, step in enumerate(encoder.layer_steps[:-1])},
            "output": encoder.last_step,
        }

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers at which token vectors can be read and replaced, in order."""
        return tuple(self.steps)

    @classmethod
    def open(cls, artifact: Artifact, device: str = "cpu") -> "ReferenceModel":
        """Return the reference model of an artifact.

        Raises:
            ArtifactError: The artifact was exported without its reference model, or the reference
                model's weights differ from the graph's.
            CheckpointError: The reference model's files cannot be loaded.
        """
        manifest = artifact.manifest
        weights = {f"{SOURCE}/{name}": sha256 for name, sha256 in manifest.weights_sha256.items()}
        for name, sha256 in weights.items():
            if name not in manifest.files:
                raise ArtifactError(
                    f"the artifact {artifact.path.name} was exported without its reference model, "
                    "which gradients need; export it again without --no-source"
                )
            if manifest.files[name] != sha256:
                raise ArtifactError(
                    f"{name} differs from the weights of the graph; export the model again"
                )
        network, _ = load(source_folder(artifact), overrides_of(artifact))
        return cls(network.to(device), manifest.normalize, manifest.similarity)

    def vector(self, row: InputRow) -> Tensor:
        """Return the row's vector `(W,)` or multi-vector `(L', W)`, not normalised."""
        return self.vectors(row)[0]

    def vectors(self, row: InputRow, tap: Tap = NO_TAP, versions: int = 1) -> Tensor:
        """Return the vectors `(S, W)` or multi-vectors `(S, L', W)` of a row, without gradients.

        They are not normalised. See `run` for the arguments.
        """
        with torch.no_grad():
            return _select(self.run(row, tap, versions), row)

    def run(self, row: InputRow, tap: Tap, versions: int = 1) -> Tensor:
        """Run every step through a tap and return the row's vectors, not normalised.

        The shape is `(S, W)`, or `(S, L, W)` with a vector for each token of a multi-vector model.

        Args:
            row: Input of the model.
            tap: Tap that each step passes through.
            versions: Number of equal rows in the batch, S, which a tap can change.
        """
        tokens = self._encode(row, row.ids, tap, versions)
        mask = self._pooling_mask(row).expand(versions, -1)  # (S, L)
        return self.network.row_vectors(tokens, mask, tap, row.entries)

    def tokens(self, layer_name: str, row: InputRow, ids: Sequence[int] | None = None) -> Tensor:
        """Return the row's token vectors `(L, D)` at a layer.

        Args:
            layer_name: One of `layer_names`.
            row: Input of the model.
            ids: Token ids to run instead of `row.ids`, of the same number; None: `row.ids`.
                Positions are always computed from `row.ids`, and token types are the row's.
        """
        step = self.steps[layer_name]
        tap = OutputTap([step])
        with torch.no_grad():
            self._encode(row, row.ids if ids is None else ids, tap)
        return tap.outputs[step][0]

    def _encode(self, row: InputRow, ids: Sequence[int], tap: Tap, versions: int = 1) -> Tensor:
        """Return token vectors `(S, L, D)`; see `run`, and `tokens` for `ids`."""

        def batch(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.expand(versions, *x.shape[1:])

        encoder = self.network.encoder
        return encoder(
            self._ids(ids).expand(versions, -1),
            batch(self._attention_mask(row)),
            batch(self._token_types(row)),
            batch(encoder.positions(self._ids(row.ids))),
            tap,
            batch(self._adapters(row)),
        )

    def continue_from(
        self,
        layer_name: str,
        tokens: Tensor,
        row: InputRow,
        tap: Tap = NO_TAP,
    ) -> Tensor:
        """Continue the forward pass from token vectors at a layer.

        Returns the vectors `(S, W)` or multi-vectors `(S, L', W)`. They are not normalised, and
        differentiable with respect to `tokens`.

        Args:
            layer_name: Layer of the token vectors, one of `layer_names`.
            tokens: S versions of the row's token vectors, `(S, L, D)`.
            row: Input of the model, from which positions, token types, adapter and masks are
                computed.
            tap: Tap that each step of pooling and heads passes through.
        """
        encoder, x = self.network.encoder, tokens
        index = self.layer_names.index(layer_name)
        positions = encoder.positions(self._ids(row.ids))  # (1, L)
        adapters = self._adapters(row)
        scales = encoder.scales(None if adapters is None else adapters[:, None])
        if index == 0:
            types = self._token_types(row)
            types = None if types is None else types.expand(len(x), -1)  # (S, L)
            x = encoder.embeddings(x, positions.expand(len(x), -1), types, scales=scales)
        attended = self._attention_mask(row)
        inputs = encoder.layer_inputs(x, positions, len(row.ids), attended, scales=scales)
        x = encoder.encode(x, inputs, first_layer=max(0, index - 1))
        mask = self._pooling_mask(row).expand(len(x), -1)  # (S, L)
        return _select(self.network.row_vectors(x, mask, tap, row.entries), row)

    def _attention_mask(self, row: InputRow) -> Tensor | None:
        if not row.unattended:
            return None
        mask = torch.ones_like(self._ids(row.ids))
        mask[:, -row.unattended :] = 0
        return mask  # (1, L)

    def _pooling_mask(self, row: InputRow) -> Tensor:
        mask = torch.arange(len(row.ids)) >= row.prompt_tokens  # (L,)
        mask = mask.to(self.network.encoder.embeddings.word.weight)[None]  # (1, L)
        return self.network.without_skipped(mask, self._ids(row.ids))

    def _token_types(self, row: InputRow) -> Tensor | None:
        # As in the served graph, which has no such input if the model does not use token types.
        has_types = self.network.has_token_types and row.token_types
        return self._ids(row.token_types) if has_types else None  # (1, L)

    def _adapters(self, row: InputRow) -> Tensor | None:
        # For a row without an adapter, the updates of all adapters are multiplied by zero, so their
        # parameters have gradients of zero instead of no gradient.
        if self.network.encoder.config.adapters is None:
            return None
        return torch.tensor(
            [row.adapter], device=self.network.encoder.embeddings.word.weight.device
        )

    def _ids(self, ids: Sequence[int]) -> Tensor:
        device = self.network.encoder.embeddings.word.weight.device
        return torch.tensor([ids], device=device)  # (1, L)


def _select(vectors: Tensor, row: InputRow) -> Tensor:
    """Return the vectors `(S, W)` of a row, or of `(S, L, W)` those of its multi-vector."""
    return vectors if row.vector_positions is None else vectors[:, list(row.vector_positions)]
