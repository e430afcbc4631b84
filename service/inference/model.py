"""A model that encodes or classifies texts: the tokenizer, engine and batcher of an artifact."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from models.artifact import MANIFEST, Artifact, Check, sha256
from models.engines import Agreement, Engine, Output, Precision, open_engine, self_check
from models.packing import pack
from service.inference.batch_former import AttentionCost, BatchFormer
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
    TokenEmbeddings,
    Vectors,
    truncate_and_normalize,
)
from service.inference.scores import (
    ACTIVATIONS,
    DOCUMENT_PROMPTS,
    QUERY_PROMPTS,
    Classification,
    PairScores,
)
from service.inference.tokenizer import OnOverflow, Row, Span, TextTokenizer

log = logging.getLogger("vitrine")

Result = TypeVar("Result")
Inputs = str | Sequence[str | Sequence[int]]
# Uses of a model with each output, for error messages.
_USES: Mapping[Output, str] = {
    "pooled": "encode texts",
    "tokens": "encode tokens",
    "logits": "classify texts or, with one label, rerank documents",
}

# Maximum number of inputs, and of characters in total, that are tokenised in the event loop, which
# takes 1 to 2 ms. While engines keep all cores busy, a thread would wait longer for a core.
_INLINE_INPUTS = 8
_INLINE_CHARS = 4000
# Maximum total number of characters that threads tokenise at the same time; they take some seconds.
_MAX_CHARS_IN_THREADS = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Runtime options of a model.

    Attributes:
        name: Name of the model; None: the artifact's name.
        engine: Name of the engine; "auto": the first usable engine.
        precision: Precision of the engine.
        threads: Number of CPUs that a CPU engine keeps busy; 0: all CPUs of the process.
        gpu: Index of the GPU for the engine "cuda".
        run_timeout_s: Seconds after which a running batch is cancelled and retried in halves. A
            batch may always take ten times its expected duration.
        max_cost: Maximum cost of a batch, in tokens (see `batch_former`); 0: the engine's default.
        max_queue_tokens: Maximum number of queued tokens; calls beyond it raise `Overloaded`.
        max_chars: Maximum number of characters per text.
        max_token_vectors: Maximum number of tokens per call of `encode_tokens` or `tokenize`.
    """

    name: str | None = None
    engine: str = "auto"
    precision: Precision = "float32"
    threads: int = 0
    gpu: int = 0
    run_timeout_s: float = 10.0
    max_cost: int = 0
    max_queue_tokens: int = 1_000_000
    max_chars: int = 100_000
    max_token_vectors: int = 16_384


DEFAULT_OPTIONS = ModelOptions()


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One item of a batch: a row of token ids, and the requested output."""

    row: Row
    output: Output


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
    batcher: Batcher[BatchItem, Vectors]
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
        self.tokenizer.check_text(query, "/query")
        pairs = [(query, document) for document in documents]
        with _locating(lambda index: f"/documents/{index}"):
            return await self._classify(pairs, limits, on_overflow, timeout_s)

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
        of query and document. It prepends its prompt for queries or for documents to each text, as
        `encode_query` and `encode_document` of sentence-transformers do.

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
        queries = [queries] if isinstance(queries, str) else queries
        documents = [documents] if isinstance(documents, str) else documents
        if not documents or len(queries) not in (1, len(documents)):
            raise InvalidInput(
                f"{len(queries)} queries and {len(documents)} documents; the number of queries "
                "must be 1, or that of the documents",
                pointer="/queries",
            )
        if "logits" in self.artifact.manifest.outputs:
            return await self._score_pairs(queries, documents, on_overflow, timeout_s)
        return await self._score_vectors(queries, documents, on_overflow, timeout_s)

    async def _score_pairs(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        on_overflow: OnOverflow,
        timeout_s: float | None,
    ) -> PairScores:
        self._check_labels()
        for index, query in enumerate(queries):
            self.tokenizer.check_text(query, f"/queries/{index}")
        pairs = list(zip(_repeated(queries, len(documents)), documents, strict=True))
        with _locating(lambda index: f"/documents/{index}"):
            result = await self._classify(pairs, NO_LIMITS, on_overflow, timeout_s)
        return PairScores(
            result.scores[:, 0],
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
        prompts = self.artifact.manifest.prompts

        def tokenize() -> list[Row]:
            rows: list[Row] = []
            for texts, names in ((queries, QUERY_PROMPTS), (documents, DOCUMENT_PROMPTS)):
                prompt = next((name for name in names if name in prompts), None)
                try:
                    rows += self.tokenizer.rows_of_texts(texts, prompt, on_overflow)
                except VitrineError as error:
                    if error.index is not None:
                        error.index += len(rows)
                    raise
            return rows

        count = len(queries)
        texts = [*queries, *documents]
        with _locating(lambda i: f"/queries/{i}" if i < count else f"/documents/{i - count}"):
            rows, results, seconds = await self._encode(
                texts, len(texts), tokenize, "pooled", timeout_s
            )
        vectors = truncate_and_normalize(np.array(results), None, normalize=True)  # (Q + N, W)
        cosines = np.einsum("nw,nw->n", *np.broadcast_arrays(vectors[:count], vectors[count:]))
        pairs = list(zip(_repeated(rows[:count], len(documents)), rows[count:], strict=True))
        return PairScores(
            cosines.astype(np.float64),
            "cosine",
            [len(query.ids) + len(document.ids) for query, document in pairs],
            [query.truncated or document.truncated for query, document in pairs],
            seconds,
        )

    def _check_labels(self) -> None:
        if len(labels := self.artifact.manifest.labels) > 1:
            raise InvalidInput(
                f"the model {self.name} has {len(labels)} labels; reranking needs a model with one",
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
        return await self._run_tokenizer(work, texts)

    async def decode(
        self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """Return the text of each list of token ids.

        Raises:
            InvalidInput: A list is empty, or an id is not in the vocabulary.
            Overloaded: Concurrent calls are already tokenising too many characters or decoding too
                many token ids.
        """
        return await self._run_tokenizer(
            partial(self.tokenizer.decode, rows, skip_special_tokens), rows
        )

    async def encode_rows(
        self, rows: Sequence[Row], output: Output = "pooled", timeout_s: float | None = None
    ) -> Outcome[Vectors]:
        """Return the engine's result for each row, before any normalisation or activation.

        Args:
            rows: Rows of token ids.
            output: Output of the graph: "pooled" returns a vector `(W,)` per row, "tokens" token
                vectors `(L, D)`, and "logits" logits `(C,)`.
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
    ) -> tuple[Sequence[Row], Sequence[Vectors], Mapping[str, float]]:
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
                    rows = await self._run_tokenizer(tokenize, parts)
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
    ) -> Result:
        size = sum(map(len, inputs))
        if len(inputs) <= _INLINE_INPUTS and size <= _INLINE_CHARS:
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


async def open_model(
    path: Path | str,
    options: ModelOptions = DEFAULT_OPTIONS,
    *,
    metrics: InferenceMetrics | None = None,
    on_stop: Callable[[BaseException], None] | None = None,
) -> Model:
    """Open the model of an artifact, run the self-check, and start the model's batcher.

    The batcher runs in the running event loop.

    Args:
        path: Folder of an artifact written by `vitrine-export`.
        options: Runtime options.
        metrics: Metrics of the model; None: new metrics in a separate registry.
        on_stop: Called with the error if the batcher stops because of a failure, such as a broken
            engine; None: the error is logged.

    Raises:
        ArtifactError: The artifact is incomplete or invalid, or was modified after its export.
        EngineError: The engine is unknown or unavailable on this machine, or fails the self-check.
    """
    metrics = metrics or InferenceMetrics(CollectorRegistry(), longest_s=120.0)
    opened = await asyncio.to_thread(_open, Path(path), options)
    artifact, tokenizer, engine, agreement, self_check_s = opened
    max_cost = options.max_cost or engine.batches.max_tokens
    # On GPUs, attention windows are masks: all pairs of tokens are computed.
    windows = artifact.manifest.windows if engine.target == "cpu" else (None,)
    attention_cost = AttentionCost(windows, artifact.manifest.hidden_size)
    if engine.target == "cuda":
        await asyncio.to_thread(_warm_up, engine, artifact, max_cost, attention_cost)

    run = partial(_run, engine, metrics)
    check = artifact.check()
    # The self-check runs the check inputs once per output and compiled graph.
    check_cost = sum(len(row) + attention_cost(len(row)) for row in check.rows)
    cost_s = self_check_s / (check_cost * len(engine.runs) * len(artifact.manifest.outputs))
    row = Row(check.rows[0], truncated=False, prompt_tokens=0)
    probe = [BatchItem(row, artifact.manifest.outputs[0])]
    batcher: Batcher[BatchItem, Vectors] = Batcher(
        run,
        lambda item: len(item.row.ids),
        BatchFormer(
            streams=engine.streams,
            max_cost=max_cost,
            min_split_tokens=engine.batches.min_split_tokens,
            fixed_cost=engine.batches.fixed_cost,
            long_row=engine.batches.long_row,
            attention_cost=attention_cost,
        ),
        probe=partial(run, probe),
        cancel=engine.cancel,
        max_queue_tokens=options.max_queue_tokens,
        timeout_s=options.run_timeout_s,
        cost_s=cost_s,
        on_stop=on_stop or _log_stop,
    )
    model = Model(
        name=options.name or artifact.manifest.name,
        created=int(artifact.path.stat().st_mtime),
        artifact=artifact,
        tokenizer=tokenizer,
        engine=engine,
        batcher=batcher,
        max_cost=max_cost,
        max_token_vectors=options.max_token_vectors,
        graph_sha256=artifact.graph_sha256(engine.name),
        self_check=agreement,
        check=check,
        files={**artifact.manifest.files, MANIFEST: sha256(artifact.path / MANIFEST)},
        metrics=metrics,
        _executor=BoundedExecutor(_MAX_CHARS_IN_THREADS),
    )
    metrics.queue_tokens.set_function(lambda: batcher.queued_tokens)
    metrics.oldest_age.set_function(lambda: batcher.oldest_s)
    metrics.model.info(
        {
            "model": model.name,
            "graph": model.graph_sha256[:12],
            "engine": engine.name,
            "precision": engine.precision,
        }
    )
    batcher.start()
    return model


def _open(
    path: Path, options: ModelOptions
) -> tuple[Artifact, TextTokenizer, Engine, Mapping[Output, Agreement], float]:
    """Return the parts of a model, the self-check's agreement, and its duration in seconds."""
    artifact = Artifact.load(path)
    tokenizer = TextTokenizer(artifact, options.max_chars)
    engine = open_engine(artifact, options.engine, options.precision, options.threads, options.gpu)
    started = time.monotonic()
    agreement = self_check(engine, artifact)
    return artifact, tokenizer, engine, agreement, time.monotonic() - started


def _as_list(inputs: Inputs) -> Sequence[str | Sequence[int]]:
    return [inputs] if isinstance(inputs, str) else inputs


def _repeated(items: Sequence[Result], count: int) -> Sequence[Result]:
    return list(items) * count if len(items) == 1 else items


@contextmanager
def _locating(pointer_to: Callable[[int], str]) -> Iterator[None]:
    """Set the pointer of errors with the index of an input."""
    try:
        yield
    except VitrineError as error:
        if error.index is not None:
            error.pointer = pointer_to(error.index)
        raise


def _log_stop(error: BaseException) -> None:
    log.critical("the engine has stopped: %s", error)


def _run(engine: Engine, metrics: InferenceMetrics, batch: Sequence[BatchItem]) -> list[Vectors]:
    """Return the result of each item, with one run of the engine per requested output."""
    results: dict[int, Vectors] = {}
    for output in {item.output: None for item in batch}:
        indices = [index for index, item in enumerate(batch) if item.output == output]
        if indices:
            rows = [batch[index].row for index in indices]
            results |= zip(indices, _run_rows(engine, metrics, rows, output), strict=True)
    return [results[index] for index in range(len(batch))]


def _run_rows(
    engine: Engine, metrics: InferenceMetrics, rows: Sequence[Row], output: Output
) -> Sequence[Vectors]:
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
    if output != "tokens":
        return list(vectors)
    return np.split(vectors, np.cumsum([len(row.ids) for row in rows])[:-1])


def _warm_up(
    engine: Engine, artifact: Artifact, max_cost: int, attention_cost: AttentionCost
) -> None:
    """Run batches of one row and full batches on all streams, before the first request.

    Otherwise the first requests would wait while the GPU loads kernels and allocates memory. The
    row lengths are the maximum length, its half, its quarter and so on, down to 1.
    """
    length = artifact.manifest.max_tokens
    run = partial(engine.run, output=artifact.manifest.outputs[0])
    with ThreadPoolExecutor(engine.streams) as streams:
        while length:
            rows = int(max_cost / (length + attention_cost(length)))
            for count in {1, max(1, rows)}:
                batch = pack([[0] * length] * count)
                list(streams.map(run, [batch] * engine.streams))
            length //= 2
