"""Relevance of long documents to queries: a document has the score of its best chunk."""

import asyncio
from collections.abc import Sequence

import numpy as np

from service.inference.call_options import CallOptions
from service.inference.errors import InferenceFailed, InvalidInput, convert_index
from service.inference.model.pair_scores import PairScores
from service.inference.model.similarity import EncodedTexts, compare, similarity_of, token_limit
from service.inference.results.chunked_texts import ChunkedTexts
from service.inference.results.late_chunking import check_late
from service.inference.results.loaded_model import LoadedModel
from service.inference.results.scores import ACTIVATIONS, Scores
from service.inference.results.token_pooling import run_pooling
from service.inference.tokenizing.chunking import Chunking
from service.inference.tokenizing.pairs import PairLimits
from service.inference.tokenizing.rows import Row


def check_chunking(model: LoadedModel, chunking: Chunking, limits: PairLimits) -> None:
    """Check that a model can score the chunks of documents.

    Args:
        model: A model of any kind.
        chunking: How to divide the documents.
        limits: Maximum number of tokens of each query and of each document.

    Raises:
        InvalidInput: It cannot, or an argument excludes chunking.
    """
    if limits[1] is not None:
        raise InvalidInput(
            "max_tokens_per_doc excludes chunking, which drops no part of a document",
            pointer="/max_tokens_per_doc",
        )
    if chunking.late:
        model.check_outputs(("pooled",))
        check_late(model.artifact.manifest, model.name)


async def score_pairs(
    model: LoadedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    chunking: Chunking,
    limits: PairLimits,
    options: CallOptions,
) -> PairScores:
    """Return the scores of a reranker for the documents' best chunks; see `scoring.score`."""
    tokenizer = model.tokenizer
    chunked = ChunkedTexts(tokenizer, documents, chunking, model.max_chunks)
    count = len(queries)

    def tokenize() -> list[Row]:
        for index, query in enumerate(queries):
            tokenizer.check_text(query, index)
        with convert_index(lambda document: count + document):
            return chunked.pair_rows(model.pair_rows, queries, limits, options)

    with convert_index(lambda row: count + chunked.owners[row], InferenceFailed):
        rows, (results,), seconds = await model.run(
            [*queries, *chunked.parts], len(documents), tokenize, ("logits",), options
        )
    logits = np.array(results, np.float64)  # (N, 1)
    best = chunked.best(logits[:, 0])
    return PairScores(
        ACTIVATIONS[model.artifact.manifest.activation](logits)[best, 0],
        logits[best, 0],
        "cross_encoder",
        chunked.tokens(rows),
        [rows[index].truncated for index in best],
        seconds,
        best_chunks=chunked.at(best),
    )


async def score_vectors(
    model: LoadedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    chunking: Chunking,
    options: CallOptions,
) -> PairScores:
    """Return similarities of queries and the documents' best chunks; see `scoring.score`."""
    output, similarity = similarity_of(model)
    chunked = ChunkedTexts(model.tokenizer, documents, chunking, model.max_chunks)
    count = len(queries)

    def tokenize() -> list[Row]:
        rows = model.tokenizer.rows_of_texts(queries, "query", options.on_overflow)
        with convert_index(lambda document: count + document):
            return rows + chunked.rows("document")

    def text_of(row: int) -> int:
        return row if row < count else count + chunked.owners[row - count]

    with convert_index(text_of, InferenceFailed):
        rows, results, seconds = await model.run(
            *([*queries, *chunked.parts], count + len(documents), tokenize),
            *((output, "tokens") if chunking.late else (output,), options),
            max_tokens=token_limit(model, output),
        )

    def compare_chunks() -> Scores:
        vectors = results[0][count:]
        if chunking.late:
            vectors = chunked.vectors(model.artifact.manifest, results[1][count:])
        encoded = EncodedTexts(rows, [[*results[0][:count], *vectors]], count)
        pairs = [(owner % count, count + index) for index, owner in enumerate(chunked.chunk_owners)]
        scores, _ = compare(similarity, model, encoded, pairs, 0, options.deadline)
        return scores

    is_long = chunking.late or output == "multi"
    run = run_pooling if model.artifact.manifest.pools_tokens else asyncio.to_thread
    with convert_index(text_of, InvalidInput):
        scores = await run(compare_chunks) if is_long else compare_chunks()
    best = chunked.best(scores)
    own = [rows[index % count] for index in range(len(documents))]
    lengths = chunked.tokens(rows[count:])
    return PairScores(
        scores[best],
        scores[best],
        similarity.kind,
        [len(query.ids) + length for query, length in zip(own, lengths, strict=True)],
        [query.truncated for query in own],
        seconds,
        best_chunks=chunked.at(best),
    )
