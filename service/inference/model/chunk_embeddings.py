"""Embeddings of long texts: one vector per chunk."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from service.inference.call_options import CallOptions
from service.inference.errors import InferenceFailed, convert_index
from service.inference.results.chunked_texts import ChunkedTexts
from service.inference.results.late_chunking import check_late
from service.inference.results.loaded_model import LoadedModel
from service.inference.results.vectors import (
    Stages,
    VectorOptions,
    Vectors,
    cost_of_lengths,
    pooled_vectors,
    refuse_array,
    size_of,
)
from service.inference.tokenizing.chunking import Chunk, Chunking
from service.inference.tokenizing.rows import Row
from service.inference.tokenizing.tokenizer import refuse_empty


@dataclass(frozen=True)
class ChunkEmbeddings:
    """One vector per chunk of each input.

    Attributes:
        vectors: Vectors `(C, W)` of the C chunks of each input, in the order of the inputs.
        chunks: The chunks of each input, in the order of the text.
        tokens: Number of encoded tokens of each input, with special tokens, prompts and overlap.
        seconds: Duration in seconds of each stage: "tokenize", "queue" and "infer".
    """

    vectors: Sequence[Vectors]
    chunks: Sequence[Sequence[Chunk]]
    tokens: Sequence[int]
    seconds: Stages

    @property
    def size(self) -> int:
        """Size in JSON, in numbers."""
        return sum(part.size for part in self.vectors) + 3 * sum(map(len, self.chunks))

    __array__ = refuse_array("np.concatenate(result.vectors) is that of all chunks")

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> Vectors:
        """Return the vectors of the chunks of an input, `(C, W)`."""
        return self.vectors[index]

    def __repr__(self) -> str:
        cost = cost_of_lengths(self.tokens, 0, self.seconds)
        return f"ChunkEmbeddings({size_of(self.vectors)}, {cost})"


async def encode_chunks(
    model: LoadedModel,
    texts: Sequence[str],
    chunking: Chunking,
    vector_options: VectorOptions,
    options: CallOptions,
) -> ChunkEmbeddings:
    """Encode texts into one vector per chunk; see `Model.encode_chunks`."""
    manifest = model.artifact.manifest
    model.check_outputs(("pooled",))
    if chunking.late:
        check_late(manifest, model.name)
    chunked = ChunkedTexts(model.tokenizer, texts, chunking, model.max_chunks)

    def tokenize() -> list[Row]:
        refuse_empty(texts)
        return chunked.rows(options.prompt_name)

    with convert_index(lambda row: chunked.owners[row], InferenceFailed):
        rows, (results,), seconds = await model.run(
            chunked.parts,
            len(texts),
            tokenize,
            ("tokens" if chunking.late else "pooled",),
            options,
        )

    def convert() -> list[Vectors]:
        vectors = pooled_vectors(
            chunked.vectors(manifest, results), vector_options, is_normalized=manifest.normalize
        )
        return chunked.by_text(vectors)

    # Means of many token vectors take longer than the event loop may stand still.
    vectors = await asyncio.to_thread(convert) if chunking.late else convert()
    return ChunkEmbeddings(vectors, chunked.chunks, chunked.tokens(rows), seconds)
