"""Scoring with a loaded model: labels of texts, and the relevance of documents to queries."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from service.inference.call_options import CallOptions
from service.inference.errors import InvalidInput, VitrineError, convert_index, point_to
from service.inference.explain.terms import check_explainable
from service.inference.model.chunk_scores import check_chunking, score_pairs, score_vectors
from service.inference.model.classification import Classification
from service.inference.model.pair_scores import PairScores
from service.inference.model.pair_texts import PairTexts, pairs_of
from service.inference.model.similarity import EncodedTexts, compare, similarity_of, token_limit
from service.inference.results.loaded_model import LoadedModel
from service.inference.results.metrics import observe_stages
from service.inference.results.scores import ACTIVATIONS
from service.inference.results.token_pooling import run_pooling
from service.inference.tokenizing.chunking import Chunking
from service.inference.tokenizing.pairs import PairLimits
from service.inference.tokenizing.rows import Row

Pair = tuple[str, str]
Input = str | Pair

# Maximum number of pairs of vectors that are compared in the event loop. 1,000 pairs of sparse
# vectors with 120 entries take 8 ms, and 1,000 of embeddings with 384 dimensions 0.6 ms.
_INLINE_PAIRS = 100
# Names of the arguments with the limits of a query and of a document.
LIMITS = ("max_tokens_per_query", "max_tokens_per_doc")
CountTokens = Callable[[int], None]


async def classify(
    model: LoadedModel,
    items: Sequence[Input],
    limits: PairLimits,
    options: CallOptions,
    count_tokens: CountTokens | None = None,
) -> Classification:
    """Return the score of each label for each text or pair of texts; see `Model.classify`.

    Args:
        model: Sequence classification model.
        items: Texts and pairs of texts.
        limits: Maximum number of tokens of the first and of the second text of each pair.
        options: Options of the call; the prompt is that of texts and of the first text of pairs.
        count_tokens: See `LoadedModel.run`.
    """

    def tokenize() -> list[Row]:
        return model.pair_rows.rows(
            items,
            prompt_name=options.prompt_name,
            on_overflow=options.on_overflow,
            limits=limits,
            instruction=options.instruction,
        )

    manifest = model.artifact.manifest
    texts = [text for item in items for text in ([item] if isinstance(item, str) else item)]
    if manifest.pair_template is None:  # a query shared by many documents is tokenised once
        texts = [*{*texts}]
    rows, (results,), seconds = await model.run(
        *(texts, len(items), tokenize, ("logits",), options), count_tokens=count_tokens
    )
    logits = np.array(results, np.float64)  # (N, C)
    scores = ACTIVATIONS[manifest.activation](logits)
    return Classification(logits, scores, manifest.labels, rows, seconds)


async def score(
    model: LoadedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    limits: PairLimits,
    options: CallOptions,
    *,
    explained: int = 0,
    chunking: Chunking | None = None,
    count_tokens: CountTokens | None = None,
) -> PairScores:
    """Return the relevance of each document to the query, or to the query of the same index.

    Errors have the index among queries and documents, queries first.

    Args:
        model: A model of any kind.
        queries: One query for all documents, or one per document.
        documents: Text of each document.
        limits: Maximum number of tokens of each query and of each document. They apply to models
            that read query and document at once.
        options: Options of the call; only rerankers take a prompt, that of queries.
        explained: Number of best scores to explain by their terms.
        chunking: See `Model.score`.
        count_tokens: See `LoadedModel.run`; without `chunking`.
    """
    manifest = model.artifact.manifest
    _check_instruction(model, options.instruction)
    if "logits" in manifest.outputs:
        _check_labels(model)
    if explained:
        check_explainable(manifest, model.name)
    if chunking is not None:
        check_chunking(model, chunking, limits)
    if "logits" in manifest.outputs:
        if chunking is not None:
            return await score_pairs(model, queries, documents, chunking, limits, options)
        return await _score_pairs(model, queries, documents, limits, options, count_tokens)
    if options.prompt_name is not None:
        raise InvalidInput(
            "prompt_name applies to rerankers; this model has the prompts query and document",
            pointer="/prompt_name",
        )
    for name, maximum in zip(LIMITS, limits, strict=True):
        if maximum is not None and maximum < manifest.max_tokens:
            raise InvalidInput(
                f"{name} applies to rerankers, which read query and document at once",
                pointer=f"/{name}",
            )
    if chunking is not None:
        return await score_vectors(model, queries, documents, chunking, options)
    return await _score_vectors(model, queries, documents, explained, options, count_tokens)


async def rerank(
    model: LoadedModel,
    query: str,
    documents: Sequence[str],
    limits: PairLimits,
    options: CallOptions,
    *,
    explained: int,
    chunking: Chunking | None,
) -> PairScores:
    """Return the score of each document, with terms of the best scores; see `score`.

    If an explanation needs the token vectors of texts, only those of the best documents are
    computed, in a second pass. All of them could take gigabytes.
    """
    _, similarity = similarity_of(model)
    is_single_pass = explained >= len(documents) or not (explained and similarity.explained_by)
    if is_single_pass or chunking is not None:
        return await score(
            model, [query], documents, limits, options, explained=explained, chunking=chunking
        )
    check_explainable(model.artifact.manifest, model.name)
    model.check_outputs(similarity.explained_by)
    result = await score(model, [query], documents, limits, options)
    best = result.ranking(explained)
    kept = [documents[index] for index in best]
    with convert_index(lambda index: 1 + best[index - 1] if index else 0):  # 0 is the query
        second = await score(model, [query], kept, limits, options, explained=explained)
    explanations = {best[i]: explanation for i, explanation in second.explanations.items()}
    seconds = result.seconds + second.seconds
    return replace(result, seconds=seconds, explanations=explanations)


async def _score_pairs(
    model: LoadedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    limits: PairLimits,
    options: CallOptions,
    count_tokens: CountTokens | None,
) -> PairScores:
    """Return the scores of a reranker."""
    for index, query in enumerate(queries):
        model.tokenizer.check_text(query, index)
    pairs = pairs_of(queries, documents)
    with convert_index(lambda document: len(queries) + document):
        result = await classify(model, pairs, limits, options, count_tokens)
    return PairScores(
        result.scores[:, 0],
        result.logits[:, 0],
        "cross_encoder",
        [len(row.ids) for row in result.rows],
        [row.truncated for row in result.rows],
        result.seconds,
    )


async def _score_vectors(
    model: LoadedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    explained: int,
    options: CallOptions,
    count_tokens: CountTokens | None,
) -> PairScores:
    """Return similarities of vectors; each text is encoded once."""
    output, similarity = similarity_of(model)
    outputs = (output, *(similarity.explained_by if explained else ()))
    texts = PairTexts(queries, documents)

    def tokenize() -> list[Row]:
        return texts.rows(model.tokenizer, options.on_overflow, with_offsets=explained > 0)

    count = len(documents) if count_tokens else len(queries) + len(documents)
    with convert_index(texts.index_of):
        rows, results, seconds = await model.run(
            *([*texts.queries, *texts.documents], count, tokenize),
            *(outputs, options),
            max_tokens=token_limit(model, output),
            count_tokens=count_tokens,
        )
    compared = time.perf_counter()
    encoded, pairs = EncodedTexts(rows, results, len(texts.queries)), texts.pairs
    work = partial(compare, similarity, model, encoded, pairs, explained, options.deadline)
    is_long = explained > 0 or output == "multi" or len(pairs) > _INLINE_PAIRS
    run = run_pooling if model.artifact.manifest.pools_tokens else asyncio.to_thread
    with convert_index(texts.index_of):
        scores, explanations = await run(work) if is_long else work()
    if explained:
        seconds["explain"] = time.perf_counter() - compared
        observe_stages(model.metrics.stage_seconds, compared, {"explain": seconds["explain"]})
    both = [(rows[query], rows[document]) for query, document in pairs]
    tokens = [len(query.ids) + len(document.ids) for query, document in both]
    truncated = [query.truncated or document.truncated for query, document in both]
    return PairScores(scores, scores, similarity.kind, tokens, truncated, seconds, explanations)


def _check_instruction(model: LoadedModel, instruction: str | None) -> None:
    if instruction is None:
        return
    template = model.artifact.manifest.pair_template
    if template is None or not template.takes_instruction:
        raise InvalidInput(
            f"the model {model.name} takes no instruction; rerankers do whose template has one",
            code="wrong_model",
            pointer="/instruction",
        )
    with point_to("/instruction"):
        model.tokenizer.check_text(instruction, 0)


def _check_labels(model: LoadedModel) -> None:
    if len(labels := model.artifact.manifest.labels) > 1:
        raise InvalidInput(
            f"the model {model.name} has {len(labels)} labels; scores of pairs need a model with "
            "one label",
            code="wrong_model",
        )


@contextmanager
def point_to_inputs(queries: int, query_path: str, document_path: str) -> Iterator[None]:
    """Convert an error's index among queries and documents to a pointer and a document's index.

    Args:
        queries: Number of queries, which come before the documents.
        query_path: Pointer to a query, with a placeholder for its index if there is a list.
        document_path: The same for a document.
    """
    try:
        yield
    except VitrineError as error:
        if (index := error.index) is not None:
            is_query = index < queries
            error.index = None if is_query else index - queries
            path = query_path if is_query else document_path
            error.pointer = path.format(index if is_query else index - queries)
        elif error.pointer == "/inputs":  # all texts together
            error.pointer = "/documents"
        raise


@contextmanager
def of_variants() -> Iterator[None]:
    """Let errors of inputs that the caller did not send name the explanation."""
    try:
        yield
    except VitrineError as error:
        if error.index is not None or error.code == "too_many_tokens":
            error.index, error.pointer = None, "/explain"
        raise
