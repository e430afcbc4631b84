"""Encoding with a loaded model: texts in, the vectors of one forward pass out."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from models.manifest import TokenRules
from models.spaces import Space
from service.inference.call_options import CallOptions
from service.inference.results.loaded_model import LoadedModel
from service.inference.results.token_pooling import run_pooling
from service.inference.results.vectors import (
    Embeddings,
    Encoded,
    EncodeOutput,
    MultiEmbeddings,
    SparseEmbeddings,
    SparseVector,
    TokenEmbeddings,
    VectorOptions,
    Vectors,
    pooled_vectors,
    select_tokens,
    unit_vectors,
)
from service.inference.tokenizing.rows import Row

# Maximum number of tokens whose vectors or weights are selected in the event loop, in about 2 ms.
_INLINE_TOKENS = 500


async def encode_outputs(
    model: LoadedModel,
    inputs: Sequence[str | Sequence[int]],
    outputs: tuple[EncodeOutput, ...],
    vector_options: VectorOptions,
    space: Space | None,
    with_offsets: bool,
    options: CallOptions,
) -> Encoded:
    """Encode inputs into several kinds of vectors; see `Model.encode_outputs`.

    Args:
        model: A model with these outputs.
        inputs: Texts and rows of token ids.
        outputs: Kinds of vectors, each once.
        vector_options: Widths of pooled vectors, and whether to normalise vectors.
        space: Map of pooled vectors into a space; None: they stay as they are.
        with_offsets: Whether the rows have token offsets.
        options: Options of the call.
    """
    tokenizer, is_normalized = model.tokenizer, model.artifact.manifest.normalize
    default_prompt = None if space is None else space.info.prompt_name
    rules = tokenizer.rules(default_prompt if options.prompt_name is None else options.prompt_name)
    rows, results, seconds = await model.run(
        inputs,
        len(inputs),
        lambda: tokenizer.rows(
            inputs, options.prompt_name, options.on_overflow, with_offsets, default_prompt
        ),
        model.graph_outputs(outputs),
        options,
        needs_engine=not rules.looks_up,
    )

    def convert(output: EncodeOutput, result: Sequence[Any]) -> object:
        match output:
            case "pooled":
                vectors = pooled_vectors(
                    np.array(result), vector_options, is_normalized=is_normalized
                )
                if space is not None:
                    vectors = space.map(vectors)
                    vectors = unit_vectors(vectors) if space.info.normalizes else vectors
                return Embeddings(vectors, rows, seconds)
            case "tokens":
                # A view would keep the results of all requests of its batch in memory.
                own = [
                    unit_vectors(part) if vector_options.normalize else part.copy()
                    for part in result
                ]
                return TokenEmbeddings(own, rows, seconds)
            case "sparse":
                width = model.artifact.manifest.vocab_size
                return SparseEmbeddings(_sparse_vectors(rows, result, rules), width, rows, seconds)
            case "multi":
                selected = [
                    select_tokens(
                        *(index, *pair, rules, options.deadline),
                        is_normalized=is_normalized,
                        normalize=vector_options.normalize,
                    )
                    for index, pair in enumerate(zip(rows, result, strict=True))
                ]
                multi, positions, clusters = zip(*selected, strict=True)
                own_clusters = clusters if rules.pool_factor > 1 else None
                return MultiEmbeddings(multi, positions, own_clusters, rows, seconds)

    def convert_all() -> Encoded:
        pairs = zip(outputs, results, strict=True)
        return cast(Encoded, {output: convert(output, result) for output, result in pairs})

    if rules.pool_factor > 1 and "multi" in outputs:
        return await run_pooling(convert_all)
    is_unmapped = outputs == ("pooled",) and space is None
    is_short = is_unmapped or sum(len(row.ids) for row in rows) <= _INLINE_TOKENS
    return convert_all() if is_short else await asyncio.to_thread(convert_all)


def _sparse_vectors(
    rows: Sequence[Row], results: Sequence[SparseVector | Vectors], rules: TokenRules
) -> list[SparseVector]:
    """Return the sparse vector of each row, in arrays of its own: results may be in the cache.

    Args:
        rows: Token ids of each input.
        results: Sparse vectors, or the weights of the tokens of each row, `(L, 1)`.
        rules: Rules for the tokens of the rows.
    """
    return [
        SparseVector(result.ids.copy(), result.weights.copy())
        if isinstance(result, SparseVector)
        else _largest(row.ids, result[:, 0], rules)
        for row, result in zip(rows, results, strict=True)
    ]


def _largest(ids: Sequence[int], weights: Vectors, rules: TokenRules) -> SparseVector:
    """Return the largest positive weight of each token id, given the weights `(L,)` of tokens."""
    is_kept = (weights > 0) & ~np.isin(ids, rules.unweighted)
    entries, index = np.unique(np.asarray(ids, np.intp)[is_kept], return_inverse=True)
    largest = np.zeros(len(entries), np.float32)
    np.maximum.at(largest, index, weights[is_kept])
    return SparseVector(entries, largest)
