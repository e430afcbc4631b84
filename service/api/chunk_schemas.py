"""Pydantic models of the field `chunking` of requests, and of chunks in responses."""

from typing import Annotated

from pydantic import BaseModel, Field

from service.api.strict_model import StrictModel
from service.inference.tokenizing.chunking import Chunking, Strategy


class ChunkingOptions(StrictModel):
    """How texts are divided into chunks."""

    strategy: Strategy = Field(
        "tokens",
        description="`tokens`: chunks of `size` tokens; `sentences`, `paragraphs`: as many whole "
        "ones as fit; a paragraph that is too long is divided into sentences, and such a sentence "
        "into tokens",
    )
    size: int | None = Field(
        None,
        ge=1,
        description="Maximum number of tokens of a chunk, special tokens and prompt not counted; "
        "null: as many as fit into the model's maximum length",
    )
    overlap: int = Field(
        0,
        ge=0,
        description="Number of a chunk's last tokens that the next chunk repeats; after a sentence "
        "or paragraph, as many whole ones as have at most this many tokens",
    )
    late: bool = Field(
        False,
        description="Late chunking: whether the text is encoded as a whole, and a chunk's vector "
        "is the mean of its tokens' vectors; only for models with mean pooling",
    )

    def chunking(self) -> Chunking:
        """Return the options as an argument of the methods of `Model`."""
        return Chunking(**self.model_dump())


class ChunkInfo(BaseModel):
    """A part of a text, without white space at its ends unless the text has nothing else."""

    start: int = Field(description="Index of the chunk's first character in the text")
    end: int = Field(description="Index after the chunk's last character")
    tokens: int = Field(description="Number of tokens, special tokens and prompt not counted")


class ChunksResponse(BaseModel):
    """One vector per chunk of each input, in order; the response to a request with `chunking`."""

    model: str
    dimensions: int
    embeddings: list[list[list[float]]] | list[list[str]] = Field(
        description="Vectors of the chunks of each input"
    )
    chunks: list[list[ChunkInfo]] = Field(description="The chunks of each input")
    tokens: list[int] = Field(
        description="Number of encoded tokens of each input, with special tokens, prompts and "
        "repeated tokens of overlapping chunks"
    )
    truncated: list[bool] = Field(description="Always false: no part of an input is dropped")


DocumentChunking = Annotated[
    ChunkingOptions | None,
    Field(
        description="How to divide documents that are too long for the model; a document has the "
        "score of its best chunk; null: a document is one input"
    ),
]
