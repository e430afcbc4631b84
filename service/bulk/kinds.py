"""The kinds of results: how a model computes them, and their Arrow columns."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from models.manifest import Manifest, Output
from service.bulk.options import (
    DTYPES,
    HIGHLIGHTS,
    TOKENS,
    TRUNCATED,
    BulkOptions,
    Dtype,
    Kind,
    OptionError,
)
from service.inference.errors import VitrineError
from service.inference.explain.options import Highlights
from service.inference.model.model import Model
from service.inference.model.pair_scores import PairScores
from service.inference.results.vectors import Vectors
from service.inference.tokenizing.chunking import Chunking

Columns = dict[str, Any]


@dataclass(frozen=True)
class ResultKind:
    """A kind of result.

    Attributes:
        outputs: Outputs of a model, one of which the kind needs.
        compute: Returns the columns of the results of some items, in the order of the output.
        row_bytes: Returns the approximate size in bytes of the results of a text with a number of
            characters.
        dtypes: Types of the output's numbers.
    """

    outputs: frozenset[Output]
    compute: Callable[[Model, Sequence[Any], BulkOptions], Awaitable[Columns]]
    row_bytes: Callable[[Model, BulkOptions, int], int]
    dtypes: Sequence[Dtype] = ("float32",)


def _vector_array(vectors: NDArray[Any]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])


def _quantizer(model: Model, options: BulkOptions) -> Callable[[Vectors], NDArray[Any]]:
    """Return the function that converts vectors to the type of the output."""
    if options.dtype == "float16":
        return lambda vectors: vectors.astype(np.float16)
    return model.quantizer(options.dtype, dimensions=options.dimensions)


def _lists(parts: Sequence[NDArray[Any]], values: pa.Array) -> pa.Array:
    offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _counts(rows: Sequence[Any]) -> Columns:
    return {
        TOKENS: pa.array([len(row.ids) for row in rows], pa.int32()),
        TRUNCATED: pa.array([row.truncated for row in rows]),
    }


async def _dense(model: Model, texts: Sequence[str], options: BulkOptions) -> Columns:
    result = await model.encode(
        texts,
        prompt_name=options.prompt_name,
        dimensions=options.dimensions,
    )
    codes = _quantizer(model, options)(result.vectors)
    return {"embedding": _vector_array(codes), **_counts(result.rows)}


_SPAN = [("start", pa.int32()), ("end", pa.int32())]
_CHUNK = pa.struct([*_SPAN, ("tokens", pa.int32())])


async def _chunks(model: Model, texts: Sequence[str], options: BulkOptions) -> Columns:
    result = await model.encode_chunks(
        texts,
        options.chunking or Chunking(),
        prompt_name=options.prompt_name,
        dimensions=options.dimensions,
    )
    codes = _quantizer(model, options)(np.concatenate(result.vectors))
    return {
        "embedding": _lists(result.vectors, _vector_array(codes)),
        "chunks": pa.array(
            [list(map(asdict, chunks)) for chunks in result.chunks], pa.list_(_CHUNK)
        ),
        TOKENS: pa.array(result.tokens, pa.int32()),
        TRUNCATED: pa.array([False] * len(texts)),
    }


async def _sparse(model: Model, texts: Sequence[str], options: BulkOptions) -> Columns:
    result = await model.encode_sparse(texts, prompt_name=options.prompt_name)
    ids = [vector.ids.astype(np.int32) for vector in result.vectors]
    weights = [vector.weights for vector in result.vectors]
    return {
        "ids": _lists(ids, pa.array(np.concatenate(ids))),
        "weights": _lists(weights, pa.array(np.concatenate(weights))),
        **_counts(result.rows),
    }


async def _multi(model: Model, texts: Sequence[str], options: BulkOptions) -> Columns:
    result = await model.encode_multi(texts, prompt_name=options.prompt_name, with_offsets=False)
    vectors = _vector_array(np.concatenate(result.vectors).astype(options.dtype, copy=False))
    return {"embedding": _lists(result.vectors, vectors), **_counts(result.rows)}


_HIGHLIGHT = pa.struct([*_SPAN, ("left_out", pa.float64()), ("alone", pa.float64())])


async def _scores(model: Model, pairs: Sequence[tuple[str, str]], options: BulkOptions) -> Columns:
    if options.highlight is not None:
        return await _highlights(model, pairs, options, Highlights(options.highlight))
    queries, documents = zip(*pairs, strict=True)
    result = await model.score(
        queries, documents, prompt_name=options.prompt_name, chunking=options.chunking
    )
    best = pa.array(list(map(asdict, result.best_chunks)), _CHUNK)
    return {
        "score": pa.array(result.scores),
        **({} if options.chunking is None else {"best_chunk": best}),
        TOKENS: pa.array(result.tokens, pa.int32()),
        TRUNCATED: pa.array(result.truncated),
    }


async def _highlights(
    model: Model, pairs: Sequence[tuple[str, str]], options: BulkOptions, explain: Highlights
) -> Columns:
    # One call for each pair, because the texts of a call share their limit of tokens.
    calls = [
        model.score(
            *(query, document),
            prompt_name=options.prompt_name,
            chunking=options.chunking,
            explain=explain,
        )
        for query, document in pairs
    ]
    results: list[PairScores] = []
    for index, result in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
        if isinstance(result, BaseException):
            if isinstance(result, VitrineError):
                result.pointer = f"/documents/{index}"
            raise result
        results.append(result)
    return {
        "score": pa.array([result.scores[0] for result in results]),
        HIGHLIGHTS: pa.array(list(map(_best_sentences, results)), pa.list_(_HIGHLIGHT)),
        TOKENS: pa.array([result.tokens[0] for result in results], pa.int32()),
        TRUNCATED: pa.array([result.truncated[0] for result in results]),
    }


def _best_sentences(result: PairScores) -> list[dict[str, object]] | None:
    if not result.deletions:
        return None
    (text,) = result.deletions[0].texts
    return [{name: getattr(unit, name) for name in _HIGHLIGHT.names} for unit in text.units]


async def _labels(model: Model, texts: Sequence[str], options: BulkOptions) -> Columns:
    result = await model.classify(texts, prompt_name=options.prompt_name)
    best = [columns[0] for columns in result.best_labels(1)]
    scores = pa.array(result.scores.reshape(-1))
    return {
        "label": pa.array([result.labels[column] for column in best]),
        "score": pa.array(result.scores[np.arange(len(best)), best]),
        "scores": pa.FixedSizeListArray.from_arrays(scores, len(result.labels)),
        **_counts(result.rows),
    }


def _tokens(model: Model, chars: int) -> int:
    return min(model.artifact.manifest.max_tokens, chars)


def _chunk_bytes(model: Model, options: BulkOptions, chars: int) -> int:
    size = (options.chunking and options.chunking.size) or model.artifact.manifest.max_tokens
    chars_per_token = 4
    return 8 * model.width * (1 + chars // (chars_per_token * size))


RESULT_KINDS: Mapping[Kind, ResultKind] = {
    "dense": ResultKind(frozenset({"pooled"}), _dense, lambda model, *_: 8 * model.width, DTYPES),
    "chunks": ResultKind(
        frozenset({"pooled"}),
        _chunks,
        _chunk_bytes,
        DTYPES,
    ),
    "sparse": ResultKind(
        frozenset({"sparse", "weights"}),
        _sparse,
        lambda model, _, chars: 100 * _tokens(model, chars),
    ),
    "multi": ResultKind(
        frozenset({"multi"}),
        _multi,
        lambda model, _, chars: 8 * model.width * _tokens(model, chars),
        ("float32", "float16"),
    ),
    "labels": ResultKind(
        frozenset({"logits"}),
        _labels,
        lambda model, *_: 8 * len(model.artifact.manifest.labels),
    ),
    # Every kind of model can score pairs.
    "scores": ResultKind(
        frozenset({"pooled", "sparse", "weights", "multi", "logits"}),
        _scores,
        lambda _, options, __: 8 + 24 * (options.highlight or 0),
    ),
}


def kind_of(manifest: Manifest, kind: Kind | None) -> Kind:
    """Return the kind of the results of a model: the requested one, or its first.

    Raises:
        OptionError: The model cannot compute the kind.
    """
    available = {
        name: result
        for name, result in RESULT_KINDS.items()
        if not result.outputs.isdisjoint(manifest.outputs)
    }
    if kind is None and manifest.outputs[0] == "logits" and len(manifest.labels) == 1:
        return "scores"  # a reranker
    if kind is None:
        kind = next(
            (name for name in available if manifest.outputs[0] in available[name].outputs), None
        )
    if kind not in available:
        raise OptionError(
            f"the model {manifest.name} cannot compute {kind or 'vectors or scores'}; "
            f"it can compute: {', '.join(available) or 'nothing that is stored by row'}"
        )
    return kind
