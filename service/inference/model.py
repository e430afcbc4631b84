"""A model that encodes or classifies texts: the tokenizer, engine and batcher of an artifact."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.artifact import Artifact, Check
from models.engines import Agreement, Engine, Output
from models.packing import pack
from service.inference.batcher import (
    Batcher,
    ItemFailed,
    Outcome,
    QueueFull,
    Stopped,
    TooLate,
)
from service.inference.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidInput,
    NotReady,
    Overloaded,
    VitrineError,
)
from service.inference.executor import BoundedExecutor, ExecutorFull
from service.inference.metrics import InferenceMetrics, record_outcome
from service.inference.pairs import NO_LIMITS, PairLimits
from service.inference.results import (
    Embeddings,
    RowResult,
    SparseEmbeddings,
    SparseVector,
    TokenEmbeddings,
    truncate_and_normalize,
)
from service.inference.scores import (
    ACTIVATIONS,
    Classification,
    PairScores,
    cosines,
    dot_products,
)
from service.inference.tokenizer import OnOverflow, Row, Span, TextTokenizer

log = logging.getLogger("vitrine")

Result = TypeVar("Result")
Inputs = str | Sequence[str | Sequence[int]]
# Uses of a model with each output, for error messages.
_USES: Mapping[Output, str] = {
    "pooled": "encode texts",
    "tokens": "encode tokens",
    "sparse": "encode texts into sparse vectors",
    "logits": "classify texts or, with one label, rerank documents",
}

# Maximum number of inputs, and of characters in total, that are tokenised in the event loop, which
# takes 1 to 2 ms. While engines keep all cores busy, a thread would wait longer for a core.
_INLINE_INPUTS = 8
_INLINE_CHARS = 4000


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One item of a batch: a row of token ids, and the requested output."""

    row: Row
    output: Output

    @property
    def tokens(self) -> int:
        """Number of tokens of the row."""
        return len(self.row.ids)


class NotFinite(Exception):
    """The engine computed an infinity or a NaN."""


@dataclass(frozen=True)
class Model:
    """An open model with a running batcher, as returned by `open_model`.

    Attributes:
        name: Name of the model.
        created: Modification time of the artifact, as a Unix timestamp in seconds.
        artifact: The artifact.
        tokenizer: The artifact's tokenizer.
        engine: The engine that runs the artifact's graph.
        batcher: Batcher that runs rows on the engine.
        max_cost: Maximum cost of a batch, in tokens; see `batch_former`.
        max_token_vectors: Maximum number of tokens per call of `encode_tokens` or `tokenize`.
        graph_sha256: SHA-256 of the graph and its weights; see `Artifact.graph_sha256`.
        self_check: Agreement of the engine's outputs with the artifact's reference vectors, by
            output.
        check: Inputs of the self-check and their reference vectors.
        files: SHA-256 of every file of the artifact, by path: the hashes in the manifest, and the
            hash of the manifest itself when the model was opened.
        metrics: Metrics of this model.
    """

    name: str
    created: int
    artifact: Artifact
    tokenizer: TextTokenizer
    engine: Engine
    batcher: Batcher[BatchItem, RowResult]
    max_cost: int
    max_token_vectors: int
    graph_sha256: str
    self_check: Mapping[Output, Agreement]
    check: Check
    files: Mapping[str, str]
    metrics: InferenceMetrics
    _executor: BoundedExecutor

    @property
    def width(self) -> int:
        """Number of dimensions of a pooled vector, W."""
        return self.artifact.manifest.width

    async def __aenter__(self) -> "Model":
        """Return the model."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the model."""
        await self.close()

    async def close(self) -> None:
        """Fail pending calls with `NotReady`, cancel running batches, and stop the batcher."""
        await self.batcher.close()
        # The metrics may outlive the model and must not keep its engine in memory.
        self.metrics.queue_tokens.set_function(float)
        self.metrics.oldest_age.set_function(float)

    async def encode(
        self,
        inputs: Inputs,
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_dim: int | None = None,
        normalize: bool | None = None,
        on_overflow: OnOverflow = "truncate",
        timeout_s: float | None = None,
    ) -> Embeddings:
        """Encode texts or rows of token ids into one vector each.

        Concurrent calls share batches. Cancelling a call removes its inputs from the queue.

        Args:
            inputs: One text, or a list of texts and lists of token ids. Token ids get no prompt and
                no special tokens.
            prompt_name: Name of the prompt to prepend to each text; None: the model's default
                prompt. An adapter with the name of the prompt is applied too.
            dimensions: Number of leading dimensions to keep; None: all. Vectors are truncated
                before they are normalised, as by OpenAI.
            truncate_dim: Number of leading dimensions to keep; None: all. Vectors are truncated
                after the model's own normalisation, as by sentence-transformers, and normalised
                again if `normalize` is True.
            normalize: Whether to scale vectors to unit length; None: the model's own setting.
            on_overflow: Handling of inputs that exceed the model's maximum length. "truncate_left"
                drops the first tokens, and "truncate_right" the last. "truncate" drops tokens on
                the truncation side of the model, usually the right. "error" raises `InvalidInput`.
            timeout_s: Deadline of the call in seconds; None: no deadline.

        Raises:
            InvalidInput: An argument or an input is invalid; `index` is the index of the input.
            TooLarge: A text has too many characters.
            Overloaded: The queue is full, or the call would miss its deadline.
            DeadlineExceeded: The deadline has passed.
            InferenceFailed: The engine failed on an input; `index` is the index of the input.
            NotReady: The model is closed, or its engine has stopped.
        """
        for name, value in (("dimensions", dimensions), ("truncate_dim", truncate_dim)):
            if value is not None and not 1 <= value <= self.width:
                raise InvalidInput(
                    f"{name} must be from 1 to {self.width}, the model's width",
                    pointer=f"/{name}",
                    code="dimensions",
                )
        if dimensions is not None and truncate_dim is not None:
            raise InvalidInput(
                "dimensions and truncate_dim are mutually exclusive; set only one of them",
                pointer="/truncate_dim",
            )
        items = _as_list(inputs)
        tokenize = partial(self.tokenizer.rows, items, prompt_name, on_overflow)
        rows, results, seconds = await self._encode(
            items, len(items), tokenize, "pooled", timeout_s
        )
        normalizes = self.artifact.manifest.normalize if normalize is None else normalize
        vectors = truncate_and_normalize(np.array(results), dimensions, normalizes)  # (B, W)
        if truncate_dim is not None:
            vectors = truncate_and_normalize(vectors, truncate_dim, normalize is True)
        return Embeddings(vectors, rows, seconds)

    async def encode_tokens(
        self,
        inputs: Inputs,
        *,
        prompt_name: str | None = None,
        normalize: bool = False,
        on_overflow: OnOverflow = "truncate",
        with_offsets: bool = True,
        timeout_s: float | None = None,
    ) -> TokenEmbeddings:
        """Encode texts or rows of token ids into one vector per token.

        Args:
            inputs: See `encode`.
            prompt_name: See `encode`.
            normalize: Whether to scale each token vector to unit length.
            on_overflow: See `encode`.
            with_offsets: Whether the rows of the result have token offsets.
            timeout_s: See `encode`.

        Raises:
            InvalidInput: The inputs exceed `max_token_vectors` tokens in total.
            VitrineError: Any error of `encode`, under the same conditions.
        """
        items = _as_list(inputs)
        tokenize = partial(
            self.tokenizer.rows, items, prompt_name, on_overflow, with_offsets=with_offsets
        )
        rows, vectors, seconds = await self._encode(
            items, len(items), tokenize, "tokens", timeout_s
        )
        vectors = [truncate_and_normalize(part, None, normalize) for part in vectors]  # (L, D) each
        return TokenEmbeddings(vectors, rows, seconds)

    async def encode_sparse(
        self,
        inputs: Inputs,
        *,
        prompt_name: str | None = None,
        on_overflow: OnOverflow = "truncate",
        timeout_s: float | None = None,
    ) -> SparseEmbeddings:
        """Encode texts or rows of token ids into one sparse vector each.

        Args:
            inputs: See `encode`.
            prompt_name: See `encode`.
            on_overflow: See `encode`.
            timeout_s: See `encode`.

        Raises:
            VitrineError: Any error of `encode`, under the same conditions.
        """
        items = _as_list(inputs)
        tokenize = partial(self.tokenizer.rows, items, prompt_name, on_overflow)
        rows, vectors, seconds = await self._encode(
            items, len(items), tokenize, "sparse", timeout_s
        )
        return SparseEmbeddings(vectors, self.width, rows, seconds)

    async def classify(
        self,
        inputs: str | Sequence[str | tuple[str, str]],
        *,
        on_overflow: OnOverflow = "truncate",
        timeout_s: float | None = None,
    ) -> Classification:
        """Return the score of each label for each text or pair of texts.

        Args:
            inputs: A text, or a list of texts and of pairs of texts, such as query and document.
            on_overflow: See `encode`. In a pair that is too long, the longer text loses tokens
                first.
            timeout_s: See `encode`.

        Raises:
            InvalidInput: The model is not a sequence classification model, or an input is invalid;
                `index` is the index of the input.
            VitrineError: Any error of `encode`, under the same conditions.
        """
        items = [inputs] if isinstance(inputs, str) else inputs
        if isinstance(items, tuple):
            raise InvalidInput("inputs must be a list; pass a single pair as [(a, b)]")
        return await self._classify(items, NO_LIMITS, on_overflow, timeout_s)

    async def _classify(
        self,
        items: Sequence[str | tuple[str, str]],
        limits: PairLimits,
        on_overflow: OnOverflow,
        timeout_s: float | None,
    ) -> Classification:
        tokenize = partial(self.tokenizer.rows_of_pairs, items, on_overflow, limits)
        # A set, because a query shared by many documents is tokenised once.
        texts = {text for item in items for text in ([item] if isinstance(item, str) else item)}
        rows, results, seconds = await self._encode(
            list(texts), len(items), tokenize, "logits", timeout_s
        )
        manifest = self.artifact.manifest
        logits = np.array(results, np.float64)  # (N, C)
        scores = ACTIVATIONS[manifest.activation](logits)
        return Classification(logits, scores, manifest.labels, rows, seconds)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        max_tokens_per_query: int | None = None,
        max_tokens_per_doc: int | None = None,
        on_overflow: OnOverflow = "truncate",
        timeout_s: float | None = None,
    ) -> Classification:
        """Return the score of each document for a query, in the order of the documents.

        Args:
            query: Text of the query.
            documents: Text of each document.
            max_tokens_per_query: Number of tokens to which the query is truncated before the pair
                is truncated to the model's limit; None: only the latter.
            max_tokens_per_doc: The same for each document.
            on_overflow: See `classify`.
            timeout_s: See `encode`.

        Raises:
            InvalidInput: The model does not have exactly one label, or a text is invalid; `index`
                is the index of the document, or None for the query.
            VitrineError: Any error of `encode`, under the same conditions.
        """
        self._check_labels()
        if isinstance(documents, str) or not documents:
            raise InvalidInput("documents must be a non-empty list of texts", pointer="/documents")
        limits = (max_tokens_per_query, max_tokens_per_doc)
        names = ("max_tokens_per_query", "max_tokens_per_doc")
        for name, limit in zip(names, limits, strict=True):
            if limit is not None and limit < 1:
                raise InvalidInput(f"{name} must be at least 1", pointer=f"/{name}")
        pairs = [(query, document) for document in documents]
        with _locating(1, "/query", "/documents/{}"):
            self.tokenizer.check_text(query, 0)
            return await self._classify_documents([query], pairs, limits, on_overflow, timeout_s)

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        on_overflow: OnOverflow = "truncate",
        timeout_s: float | None = None,
    ) -> PairScores:
        """Return the relevance of documents to queries: one score per pair of query and document.

        A reranker scores each pair as in `rerank`. An embedding model gives the cosine similarity
        of query and document, and a model of sparse vectors their dot product. Both prepend their
        prompt for queries or for documents to each text, as `encode_query` and `encode_document`
        of sentence-transformers do.

        Args:
            queries: One query for all documents, or one query per document.
            documents: Text of each document.
            on_overflow: See `encode`; of a pair in a reranker, see `classify`.
            timeout_s: See `encode`.

        Raises:
            InvalidInput: The number of queries is neither 1 nor that of the documents, the model
                has more than one label, or a text is invalid; `pointer` names the text.
            VitrineError: Any error of `encode`, under the same conditions.
        """
        paths = [
            name if isinstance(texts, str) else f"{name}/{{}}"
            for name, texts in (("/queries", queries), ("/documents", documents))
        ]
        queries = [queries] if isinstance(queries, str) else queries
        documents = [documents] if isinstance(documents, str) else documents
        if not documents or len(queries) not in (1, len(documents)):
            raise InvalidInput(
                f"{len(queries)} queries and {len(documents)} documents; the number of queries "
                "must be 1, or that of the documents",
                pointer="/queries",
            )
        reads_pairs = "logits" in self.artifact.manifest.outputs
        score = self._score_pairs if reads_pairs else self._score_vectors
        with _locating(len(queries), *paths):
            return await score(queries, documents, on_overflow, timeout_s)

    async def _score_pairs(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        on_overflow: OnOverflow,
        timeout_s: float | None,
    ) -> PairScores:
        """Return the scores of a reranker; errors have the index among queries and documents."""
        self._check_labels()
        for index, query in enumerate(queries):
            self.tokenizer.check_text(query, index)
        pairs = list(zip(_repeated(queries, len(documents)), documents, strict=True))
        result = await self._classify_documents(queries, pairs, NO_LIMITS, on_overflow, timeout_s)
        return PairScores(
            result.scores[:, 0],
            result.logits[:, 0],
            "cross_encoder",
            [len(row.ids) for row in result.rows],
            [row.truncated for row in result.rows],
            result.seconds,
        )

    async def _score_vectors(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        on_overflow: OnOverflow,
        timeout_s: float | None,
    ) -> PairScores:
        """Return similarities of vectors; errors have the index among queries and documents."""
        output: Output = "sparse" if "sparse" in self.artifact.manifest.outputs else "pooled"

        def tokenize() -> list[Row]:
            rows = self.tokenizer.rows_of_texts(queries, "query", on_overflow)
            try:
                rows += self.tokenizer.rows_of_texts(documents, "document", on_overflow)
            except VitrineError as error:
                if error.index is not None:
                    error.index += len(queries)
                raise
            return rows

        texts, count = [*queries, *documents], len(queries)
        rows, vectors, seconds = await self._encode(texts, len(texts), tokenize, output, timeout_s)
        if output == "sparse":
            ours = _repeated(vectors[:count], len(documents))
            scores = dot_products(ours, vectors[count:], self.width)
        else:
            scores = cosines(np.array(vectors[:count]), np.array(vectors[count:]))
        pairs = list(zip(_repeated(rows[:count], len(documents)), rows[count:], strict=True))
        return PairScores(
            scores,
            scores,
            "dot" if output == "sparse" else "cosine",
            [len(query.ids) + len(document.ids) for query, document in pairs],
            [query.truncated or document.truncated for query, document in pairs],
            seconds,
        )

    async def _classify_documents(
        self,
        queries: Sequence[str],
        pairs: Sequence[tuple[str, str]],
        limits: PairLimits,
        on_overflow: OnOverflow,
        timeout_s: float | None,
    ) -> Classification:
        """Classify pairs of a query and a document; errors have the index among both."""
        try:
            return await self._classify(pairs, limits, on_overflow, timeout_s)
        except VitrineError as error:
            if error.index is not None:
                query = 0 if len(queries) == 1 else error.index
                is_of_query = error.code == "no_tokens" and not self.tokenizer.has_tokens(
                    queries[query]
                )
                error.index = query if is_of_query else len(queries) + error.index
            raise

    def _check_labels(self) -> None:
        if len(labels := self.artifact.manifest.labels) > 1:
            raise InvalidInput(
                f"the model {self.name} has {len(labels)} labels; scores of pairs need a model "
                "with one label",
                code="wrong_model",
            )

    async def tokenize(
        self,
        texts: Sequence[str],
        *,
        prompt_name: str | None = None,
        add_special_tokens: bool = True,
    ) -> list[list[tuple[int, str, Span | None]]]:
        """Return the id, text and byte span of each token of each text.

        See `TextTokenizer.tokenize`.

        Raises:
            Overloaded: Concurrent calls are already tokenising too many characters.
            VitrineError: Any error of `TextTokenizer.tokenize`, under the same conditions.
        """
        work = partial(
            self.tokenizer.tokenize,
            texts,
            prompt_name,
            add_special_tokens,
            self.max_token_vectors,
        )
        return await self._run_tokenizer(work, texts, len(texts))

    async def decode(
        self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """Return the text of each list of token ids.

        Raises:
            InvalidInput: A list is empty, or an id is not in the vocabulary.
            Overloaded: Concurrent calls are already tokenising too many characters or decoding too
                many token ids.
        """
        work = partial(self.tokenizer.decode, rows, skip_special_tokens)
        return await self._run_tokenizer(work, rows, len(rows))

    async def encode_rows(
        self, rows: Sequence[Row], output: Output = "pooled", timeout_s: float | None = None
    ) -> Outcome[RowResult]:
        """Return the engine's result for each row, before any normalisation or activation.

        Args:
            rows: Rows of token ids.
            output: Output of the graph: "pooled" returns a vector `(W,)` per row, "tokens" token
                vectors `(L, D)`, "sparse" a sparse vector, and "logits" logits `(C,)`.
            timeout_s: Seconds until the caller's deadline, which is checked on submission only;
                None: no deadline.

        Raises:
            Overloaded: The queue is full, or the rows would not finish within `timeout_s`.
            InferenceFailed: The engine failed on one of the rows; `index` is the index of the row.
            NotReady: The model is closed, or its engine has stopped.
        """
        try:
            return await self.batcher.submit([BatchItem(row, output) for row in rows], timeout_s)
        except QueueFull:
            raise self._queue_full_error() from None
        except TooLate as error:
            raise Overloaded(
                "the queue is too long: the request would exceed its deadline by "
                f"{error.late_s:.1f} s",
                error.late_s,
            ) from None
        except ItemFailed as error:
            raise InferenceFailed("the engine failed on this input", index=error.index) from error
        except Stopped:
            raise NotReady("the engine has stopped") from None

    async def _encode(
        self,
        parts: Sequence[str | Sequence[int]],
        count: int,
        tokenize: Callable[[], Sequence[Row]],
        output: Output,
        timeout_s: float | None,
    ) -> tuple[Sequence[Row], Sequence[Any], Mapping[str, float]]:
        """Return the row and the result of each input, and the duration of each stage.

        Args:
            parts: Texts and lists of token ids that `tokenize` processes. Their number and total
                size decide whether `tokenize` runs in a thread.
            count: Number of inputs.
            tokenize: Returns the row of each input.
            output: Output of the graph to compute.
            timeout_s: See `encode`.
        """
        if output not in self.artifact.manifest.outputs:
            raise InvalidInput(
                f"the model {self.name} cannot {_USES[output]}; it can "
                f"{_USES[self.artifact.manifest.outputs[0]]}",
                code="wrong_model",
            )
        if not count:
            raise InvalidInput("there are no inputs", code="empty", pointer="/inputs")
        self.metrics.inputs_received.inc(count)
        with record_outcome(lambda outcome: self.metrics.inputs[outcome].inc(count)):
            try:
                async with asyncio.timeout(timeout_s):
                    if self.batcher.is_full:  # before tokenising inputs that will be refused
                        raise self._queue_full_error()
                    started = time.perf_counter()
                    rows = await self._run_tokenizer(tokenize, parts, count)
                    tokenize_s = time.perf_counter() - started
                    if output == "tokens":
                        self._check_token_count(rows)
                    remaining_s = None if timeout_s is None else timeout_s - tokenize_s
                    outcome = await self.encode_rows(rows, output, remaining_s)
            except TimeoutError:
                raise DeadlineExceeded(f"deadline of {timeout_s:g} s exceeded") from None
        seconds = {"tokenize": tokenize_s, "queue": outcome.queue_s, "infer": outcome.run_s}
        for stage, duration in seconds.items():
            self.metrics.stage_seconds[stage].observe(duration)
        return rows, outcome.results, seconds

    async def _run_tokenizer(
        self,
        work: Callable[[], Result],
        inputs: Sequence[str | Sequence[int]],
        count: int,
    ) -> Result:
        size = sum(map(len, inputs))
        if count <= _INLINE_INPUTS and size <= _INLINE_CHARS:
            return work()
        try:
            return await self._executor.run(work, size)
        except ExecutorFull:
            raise self._queue_full_error() from None

    def _check_token_count(self, rows: Sequence[Row]) -> None:
        tokens = sum(len(row.ids) for row in rows)
        if tokens > self.max_token_vectors:
            raise InvalidInput(
                f"the inputs have {tokens} tokens; the limit for token vectors is "
                f"{self.max_token_vectors}",
                code="too_many_tokens",
                pointer="/inputs",
            )

    def _queue_full_error(self) -> Overloaded:
        return Overloaded("the queue is full; try again later", self.batcher.drain_s)


def _as_list(inputs: Inputs) -> Sequence[str | Sequence[int]]:
    return [inputs] if isinstance(inputs, str) else inputs


def _repeated(items: Sequence[Result], count: int) -> Sequence[Result]:
    return list(items) * count if len(items) == 1 else items


@contextmanager
def _locating(queries: int, query_path: str, document_path: str) -> Iterator[None]:
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
        raise


def run_batch(
    engine: Engine, metrics: InferenceMetrics, batch: Sequence[BatchItem]
) -> list[RowResult]:
    """Return the result of each item, with one run of the engine per requested output."""
    results: dict[int, RowResult] = {}
    for output in {item.output: None for item in batch}:
        indices = [index for index, item in enumerate(batch) if item.output == output]
        if indices:
            rows = [batch[index].row for index in indices]
            results |= zip(indices, _run_rows(engine, metrics, rows, output), strict=True)
    return [results[index] for index in range(len(batch))]


def _run_rows(
    engine: Engine, metrics: InferenceMetrics, rows: Sequence[Row], output: Output
) -> Sequence[RowResult]:
    has_types = any(row.token_types for row in rows)
    batch = pack(
        [row.ids for row in rows],
        [row.prompt_tokens for row in rows],
        [row.adapter for row in rows],
        [row.token_types or [0] * len(row.ids) for row in rows] if has_types else None,
    )
    with metrics.batch_seconds.time():
        vectors: NDArray[np.float32] = engine.run(batch, output)  # (B, W), or (T, D)
    if not np.isfinite(vectors).all():
        raise NotFinite
    metrics.batch_rows.observe(batch.rows)
    metrics.batch_tokens.observe(len(batch.input_ids))
    metrics.padded_tokens.inc(batch.padded_index.size)
    if output == "sparse":  # most weights are zero
        indices = [np.flatnonzero(vector) for vector in vectors]
        return [SparseVector(i, v[i]) for i, v in zip(indices, vectors, strict=True)]
    if output != "tokens":
        return list(vectors)
    return np.split(vectors, np.cumsum([len(row.ids) for row in rows])[:-1])
