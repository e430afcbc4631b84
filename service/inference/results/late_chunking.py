"""Late chunking: the vector of a chunk is the mean of its tokens' vectors in the whole text.

Source: Günther et al. 2024, arXiv:2409.04701. As in their implementation (jina-ai/late-chunking),
the special tokens before the text, and a prompt, belong to the first chunk, and those after the
text to the last. So the vector of a text with one chunk is the text's ordinary vector.

A text beyond the model's maximum length is encoded in overlapping windows ("long late chunking",
their algorithm 2). A token in two windows has its vector from the first of them: the overlap gives
later tokens of the second window their context. Unlike in their implementation, each window has the
special tokens and the prompt, as all inputs of the model have; of these vectors, those of inner
windows are left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from models.manifest import Manifest
from service.inference.errors import InvalidInput
from service.inference.results.vectors import Vectors, unit_vectors
from service.inference.tokenizing.chunking import Piece
from service.inference.tokenizing.rows import Span

# Modules after pooling, by class name in `models.network.heads`, as functions of pooled vectors and
# the model's width. Others compute something else for means of chunks than for those of texts.
_HEADS: Mapping[str, Callable[[Vectors, int], Vectors]] = {
    "NormalizeHead": lambda vectors, _width: unit_vectors(vectors),
    "TruncateHead": lambda vectors, width: vectors[:, :width],
}


def check_late(manifest: Manifest, name: str) -> None:
    """Check that the vectors of a model are means of token vectors.

    Args:
        manifest: Manifest of an embedding model.
        name: Name of the model, for the error.

    Raises:
        InvalidInput: They are not.
    """
    reason = ""
    if manifest.is_static:
        reason = "it is static, and the text around a chunk does not change its vector"
    elif manifest.pooling != ("mean",):
        reason = f"its pooling is {' and '.join(manifest.pooling)}, not mean"
    elif others := [head for head in manifest.heads if head not in _HEADS]:
        reason = f"its vectors pass through {others[0]}"
    if reason:
        raise InvalidInput(
            f"late chunking does not apply to the model {name}, because {reason}",
            code="wrong_model",
            pointer="/chunking/late",
        )


@dataclass(frozen=True)
class LateText:
    """The tokens of a text that is encoded as a whole.

    Attributes:
        ids: Token ids, with special tokens and prompt.
        first: Index of the first token of the text.
        last: Index after the last token of the text.
        max_tokens: Maximum number of tokens of a window, with special tokens and prompt.
        unpooled: Number of leading tokens that are not pooled; see `Row.prompt_tokens`.
        pieces: Chunks of the text.
    """

    ids: Sequence[int]
    first: int
    last: int
    max_tokens: int
    unpooled: int
    pieces: Sequence[Piece]

    @property
    def windows(self) -> list[Span]:
        """Range of the tokens of each window, among the tokens of the text."""
        count = self.last - self.first
        room = self.max_tokens - (len(self.ids) - count)
        step = room - room // 4
        starts = range(0, max(count - room, 0) + step, step)
        return [(start, min(start + room, count)) for start in starts]

    def rows(self) -> list[Sequence[int]]:
        """Return the token ids of each window, with special tokens and prompt."""
        before, after = self.ids[: self.first], self.ids[self.last :]
        return [
            [*before, *self.ids[self.first + start : self.first + end], *after]
            for start, end in self.windows
        ]

    def pool(self, windows: Sequence[Vectors]) -> Vectors:
        """Return the mean of the token vectors of each chunk, `(C, D)`.

        Args:
            windows: Vectors of the tokens of each window, `(L, D)`.
        """
        vectors = self._join(windows)
        ranges = [self._pool(piece) for piece in self.pieces]
        means = [vectors[start:end].mean(axis=0, dtype=np.float64) for start, end in ranges]
        return np.array(means, np.float32)

    def _join(self, windows: Sequence[Vectors]) -> Vectors:
        """Return one vector for each of `ids`, `(L, D)`."""
        parts: list[Vectors] = []
        reached = 0
        for (start, end), vectors in zip(self.windows, windows, strict=True):
            is_first, is_last = start == 0, end == self.last - self.first
            begin = 0 if is_first else self.first + reached - start
            parts.append(vectors[begin : len(vectors) if is_last else self.first + end - start])
            reached = end
        return np.concatenate(parts)

    def _pool(self, piece: Piece) -> Span:
        """Return the range of the tokens of a chunk among `ids`."""
        is_last = piece.last == self.last - self.first
        end = len(self.ids) if is_last else self.first + piece.last
        start = 0 if piece.first == 0 else self.first + piece.first
        # The last token of a prompt can merge with the text's first, which is then not pooled.
        return min(max(start, self.unpooled), end - 1), end


def apply_heads(manifest: Manifest, vectors: Vectors) -> Vectors:
    """Return pooled vectors `(N, D)` after the model's modules that follow, `(N, W)`."""
    for head in manifest.heads:
        vectors = _HEADS[head](vectors, manifest.width)
    return vectors
