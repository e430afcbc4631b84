"""A loaded model: the tokenizer, engine and batcher of an artifact. Rows in, results out."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, get_args

from models.artifact import Artifact
from models.engines import OUTPUTS, Agreement, Engine, Output
from models.manifest import Check, Quality
from models.quantization import Calibration
from models.spaces import Space
from service.inference.batching.batcher import Batcher, Outcome, QueueFull, Stopped, TooLate
from service.inference.batching.cached_batcher import CachedBatcher
from service.inference.batching.runs import ItemFailed
from service.inference.call_options import NO_OPTIONS, CallOptions, Deadline
from service.inference.errors import (
    InferenceFailed,
    InvalidInput,
    NotReady,
    Overloaded,
)
from service.inference.results.batch_run import BatchItem
from service.inference.results.metrics import ModelMetrics, observe_stages, outcome_of
from service.inference.results.query_table import look_up
from service.inference.results.vectors import (
    EncodeOutput,
    RowResults,
    Stages,
    Vectors,
)
from service.inference.tokenizing.executor import BoundedExecutor, ExecutorFull
from service.inference.tokenizing.pair_rows import PairRows
from service.inference.tokenizing.rows import Row
from service.inference.tokenizing.tokenizer import TextTokenizer
from service.inference.tokenizing.word_rows import WordRows
from service.request_trace import TRACE

Result = TypeVar("Result")
# Uses of a model with each output, and the method of the Python API, for error messages.
_USES: Mapping[Output, tuple[str, str]] = {
    "pooled": ("encode texts", "encode"),
    "tokens": ("encode tokens", "encode_tokens"),
    "sparse": ("encode texts into sparse vectors", "encode_sparse"),
    "weights": ("encode texts into sparse vectors", "encode_sparse"),
    "multi": ("encode texts into multi-vectors", "encode_multi"),
    "logits": (
        "classify texts or, with one label, rerank documents",
        "classify or, with one label, rerank",
    ),
    "tags": ("tag the tokens of texts", "tag"),
    "spans": ("find entities with labels of the request", "tag with labels"),
}

# Outputs that are cached: one small result per row.
_CACHED: frozenset[Output] = frozenset({"pooled", "sparse", "weights", "logits"})
# Maximum number of inputs, and of characters in total, that are tokenised in the event loop, which
# takes 1 to 2 ms. While engines keep all cores busy, a thread would wait longer for a core.
_INLINE_INPUTS = 8
_INLINE_CHARS = 4000


@dataclass(frozen=True)
class LoadedModel:
    """A tokenizer, an engine, and a running batcher that connects them.

    Attributes:
        name: Name of the model.
        created: Modification time of the artifact, as a Unix timestamp in seconds.
        artifact: The artifact.
        tokenizer: The artifact's tokenizer.
        pair_rows: Tokenizer of pairs of texts.
        word_rows: Tokenizer of texts whose words are tagged.
        query_weights: Weights of queries that are looked up, `(V,)`; empty for other models.
        calibration: Ranges of pooled vectors, for int8 and uint8; None: not calibrated.
        spaces: Maps into the spaces of other models, by name.
        engine: The engine that runs the artifact's graph.
        batcher: Batcher that runs rows on the engine.
        cache: The batcher behind a cache of the results of rows; None: no cache.
        max_cost: Maximum cost of a batch, in tokens; see `batch_former`.
        max_token_vectors: See `ModelOptions`.
        max_chunks: See `ModelOptions`.
        identity: SHA-256 of everything that determines results; see `models.identity`.
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
    pair_rows: PairRows
    word_rows: WordRows
    query_weights: Vectors
    calibration: Calibration | None
    spaces: Mapping[str, Space]
    engine: Engine
    batcher: Batcher[BatchItem, RowResults]
    cache: CachedBatcher[BatchItem, RowResults] | None
    max_cost: int
    max_token_vectors: int
    max_chunks: int
    identity: str
    graph_sha256: str
    self_check: Mapping[Output, Agreement]
    check: Check
    files: Mapping[str, str]
    metrics: ModelMetrics
    _executor: BoundedExecutor

    @property
    def width(self) -> int:
        """Number of dimensions of a pooled vector, W."""
        return self.artifact.manifest.width

    @property
    def quality(self) -> Quality | None:
        """Quality of the int8 graph, measured at export; None in other precisions."""
        if self.engine.precision != "int8":
            return None
        return self.artifact.graph(self.engine.name, "int8").quality

    @cached_property
    def engine_label(self) -> str:
        """Engine, precision and, in int8, measured quality, as in the header X-Engine."""
        label = f"{self.engine.name}; precision={self.engine.precision}"
        measures = self.quality.measures if self.quality else {}
        return label + "".join(f"; {name}={value:.4f}" for name, value in measures.items())

    @property
    def version(self) -> str:
        """Version of the model: the start of its identity."""
        return self.identity[:12]

    @cached_property
    def default_output(self) -> EncodeOutput:
        """The first output that is a kind of vectors; "pooled" if there is none."""
        first = self.artifact.manifest.outputs[0]
        return next((name for name in get_args(EncodeOutput) if name == first), "pooled")

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Outputs that callers can request. "sparse" includes sparse vectors of token weights."""
        own = self.artifact.manifest.outputs
        return tuple("sparse" if output == "weights" else output for output in own)

    def graph_outputs(self, outputs: Sequence[Output]) -> tuple[Output, ...]:
        """Return the outputs of the graph from which the requested outputs are computed."""
        has_weights = "weights" in self.artifact.manifest.outputs
        return tuple(
            "weights" if output == "sparse" and has_weights else output for output in outputs
        )

    def __repr__(self) -> str:
        engine = f"{self.engine.name} {self.engine.precision}"
        return f"{type(self).__name__}({self.name!r}, {', '.join(self.outputs)}, {engine})"

    async def close(self) -> None:
        """Fail pending calls with `NotReady`, cancel running batches, and free the weights.

        Raises:
            RuntimeError: The running event loop is not that in which the model was opened.
        """
        await self.batcher.close()
        self.engine.close()
        # The metrics may outlive the model and must not keep its engine in memory.
        self.metrics.remove_queue(self.batcher)

    async def encode_rows(
        self,
        rows: Sequence[Row],
        outputs: tuple[Output, ...],
        options: CallOptions = NO_OPTIONS,
        *,
        uses_cache: bool = True,
    ) -> Outcome[RowResults]:
        """Return the results of each row, before any normalisation or activation.

        They are the engine's, except for rows whose weights are looked up.

        Args:
            rows: Rows of token ids.
            outputs: Outputs of the graph: "pooled" returns a vector `(W,)` per row, "tokens" token
                vectors `(L, D)`, "multi" multi-vectors `(L, W)`, "sparse" a sparse vector,
                "weights" token weights `(L, 1)`, "logits" logits `(C,)`, and "tags" the logits of
                each token, `(L, C)`. "spans" returns logits of spans, see `models.network.spans`.
            options: Options of the call, whose deadline and priority count here.
            uses_cache: Whether results can be those of equal rows, computed before.

        Raises:
            Overloaded: The queue is full, or the rows would not finish before the deadline.
            TimeoutError: The deadline has passed.
            InferenceFailed: The engine failed on one of the rows; `index` is the index of the row.
            NotReady: The model is closed, or its engine has stopped.
        """
        looked_up = [index for index, row in enumerate(rows) if row.is_looked_up]
        if not looked_up:
            indices = range(len(rows))
            return await self._run_on_engine(rows, indices, outputs, options, uses_cache)
        started = time.perf_counter()
        results: dict[int, RowResults] = await self._look_up(rows, looked_up, options.deadline)
        lookup_s = time.perf_counter() - started
        others = [index for index in range(len(rows)) if index not in results]
        if not others:
            return Outcome(list(results.values()), 0.0, lookup_s)
        outcome = await self._run_on_engine(rows, others, outputs, options, uses_cache)
        results |= zip(others, outcome.results, strict=True)
        ordered = [results[index] for index in range(len(rows))]
        return replace(outcome, results=ordered, run_s=lookup_s + outcome.run_s)

    async def _look_up(
        self, rows: Sequence[Row], indices: Sequence[int], deadline: Deadline | None
    ) -> dict[int, RowResults]:
        """Return the sparse vectors of the rows at the indices, by index."""
        if not self.batcher.is_alive:
            raise _stopped_error()
        ids = [rows[index].ids for index in indices]
        vectors = await self.run_tokenizer(
            lambda: [(look_up(self.query_weights, own),) for own in ids], ids, len(ids), deadline
        )
        return dict(zip(indices, vectors, strict=True))

    async def _run_on_engine(
        self,
        rows: Sequence[Row],
        indices: Sequence[int],
        outputs: tuple[Output, ...],
        options: CallOptions,
        uses_cache: bool,
    ) -> Outcome[RowResults]:
        """Return the engine's results for the rows at the indices; see `encode_rows`."""
        if not self.batcher.is_alive:
            raise _stopped_error()
        trace = TRACE.get()
        items = [BatchItem(rows[index], outputs, trace) for index in indices]
        is_cached = uses_cache and _CACHED.issuperset(outputs)
        batcher = self.cache if self.cache is not None and is_cached else self.batcher
        try:
            return await batcher.submit(
                items, timeout_s=options.remaining_s, priority=options.priority
            )
        except QueueFull:
            raise self._queue_full_error() from None
        except TooLate as error:
            raise Overloaded(
                "the queue is too long: the request would exceed its deadline by "
                f"{error.late_s:.1f} s",
                error.late_s,
            ) from None
        except ItemFailed as error:
            index = indices[error.index]
            raise InferenceFailed("the engine failed on this input", index=index) from error
        except Stopped:
            raise _stopped_error() from None

    async def run(
        self,
        parts: Sequence[str | Sequence[int]],
        count: int,
        tokenize: Callable[[], Sequence[Row]],
        outputs: tuple[Output, ...],
        options: CallOptions,
        *,
        max_tokens: int | None = None,
        needs_engine: bool = True,
        count_tokens: Callable[[int], None] | None = None,
    ) -> tuple[Sequence[Row], list[Any], Stages]:
        """Tokenize inputs and run them; return their rows, results and the duration of each stage.

        The results are a sequence per output, with the result of each input.

        Args:
            parts: Texts and lists of token ids that `tokenize` processes. Their number and total
                size decide whether `tokenize` runs in a thread.
            count: Number of inputs.
            tokenize: Returns the row of each input.
            outputs: Outputs of the graph to return.
            options: Options of the call, whose deadline and priority count here.
            max_tokens: Maximum number of tokens for results per token; None: `max_token_vectors`.
            needs_engine: Whether a full queue refuses the inputs before they are tokenised.
            count_tokens: Called with the number of tokens of all rows before they run, and may
                refuse them. Given for variants of the inputs of a call, which are counted as
                variants, and whose stages are parts of a stage of that call.

        Raises:
            InvalidInput: The model does not have the output, there are no inputs, or the tokenizer
                refuses one of them; `index` is the index of the input.
            VitrineError: Any error of `encode_rows`, under the same conditions.
            DeadlineExceeded: The deadline has passed.
        """
        self.check_outputs(outputs)
        if not count:
            raise InvalidInput("there are no inputs", code="empty", pointer="/inputs")
        outcomes = self.metrics.inputs if count_tokens is None else self.metrics.variants
        if count_tokens is None:
            self.metrics.inputs_received.inc(count)
        try:
            # Before tokenising inputs that will be refused.
            if needs_engine and self.cache is None and self.batcher.is_full(options.priority):
                raise self._queue_full_error()
            started = time.perf_counter()
            work = self._observe(tokenize) if count_tokens is None else tokenize
            rows = await self.run_tokenizer(work, parts, count, options.deadline)
            tokenize_s = time.perf_counter() - started
            if count_tokens is not None:
                count_tokens(sum(len(row.ids) for row in rows))
            specs = [OUTPUTS[output] for output in outputs if output != "weights"]
            if any(spec.per_token or spec.per_pair for spec in specs):
                self._check_token_count(rows, max_tokens or self.max_token_vectors)
            outcome = await self.encode_rows(rows, outputs, options)
        except BaseException as error:
            outcomes[outcome_of(error)].inc(count)
            if isinstance(error, TimeoutError) and options.deadline is not None:
                raise options.deadline.error() from None
            raise
        outcomes["done"].inc(count)
        seconds = Stages(
            {"tokenize": tokenize_s, "queue": outcome.queue_s, "infer": outcome.run_s},
            outcome.cache_counts,
        )
        if outcome.cache_s is not None:
            seconds["cache"] = outcome.cache_s
        if count_tokens is None:
            self._observe_stages(started, seconds)
        return rows, list(zip(*outcome.results, strict=True)), seconds

    def _observe(self, tokenize: Callable[[], Sequence[Row]]) -> Callable[[], Sequence[Row]]:
        """Return `tokenize`, which then records its rows too, in the thread that it runs in."""

        def observed() -> Sequence[Row]:
            rows = tokenize()
            self.metrics.observe_rows(rows, self.tokenizer.unknown_id)
            return rows

        return observed

    def _observe_stages(self, started: float, seconds: Mapping[str, float]) -> None:
        if "cache" in seconds and not seconds["infer"]:
            # Zeros of requests that computed nothing would hide the durations of the others.
            seconds = {stage: seconds[stage] for stage in ("tokenize", "cache")}
        observe_stages(self.metrics.stage_seconds, started, seconds)

    async def run_tokenizer(
        self,
        work: Callable[[], Result],
        inputs: Sequence[str | Sequence[int]],
        count: int,
        deadline: Deadline | None = None,
    ) -> Result:
        """Return the result of `work`, which runs in a thread unless the inputs are few and short.

        Args:
            work: Function that processes the inputs.
            inputs: Texts and lists of token ids.
            count: Number of results.
            deadline: Deadline of the caller; None: no deadline.

        Raises:
            Overloaded: Concurrent calls are already tokenising too many characters.
            TimeoutError: The deadline has passed.
        """
        size = sum(map(len, inputs))
        if count <= _INLINE_INPUTS and size <= _INLINE_CHARS:
            return work()
        try:
            async with asyncio.timeout(None if deadline is None else deadline.remaining_s):
                return await self._executor.run(work, size)
        except ExecutorFull:
            raise self._queue_full_error() from None

    def space(self, name: str, outputs: Sequence[str] = ("pooled",)) -> Space:
        """Return the map into a space; see `Model.encode`.

        Raises:
            InvalidInput: The model has no space of this name; the message has those that it has. Or
                no output is "pooled".
        """
        if "pooled" not in outputs:
            raise InvalidInput("space applies to the output pooled alone", pointer="/space")
        if name not in self.spaces:
            known = ", ".join(self.spaces) or "none; vitrine migrate adds them"
            raise InvalidInput(f"unknown space; the model has {known}", pointer="/space")
        return self.spaces[name]

    def check_outputs(self, outputs: Sequence[Output]) -> None:
        """Raise `InvalidInput` if the model does not have one of the outputs."""
        own = self.artifact.manifest.outputs
        for output in outputs:
            if output not in own:
                use, method = _USES[own[0]]
                detail = f"the model {self.name} cannot {_USES[output][0]}; it can {use}"
                if output == "tokens" and "pooled" in own:
                    detail += "; vitrine-export --tokens exports token vectors too"
                raise InvalidInput(detail, code="wrong_model", method=method)

    def _check_token_count(self, rows: Sequence[Row], limit: int) -> None:
        tokens = sum(len(row.ids) for row in rows)
        if tokens > limit:
            raise InvalidInput(
                f"the inputs have {tokens} tokens; the limit for results per token is {limit}",
                code="too_many_tokens",
                pointer="/inputs",
            )

    def _queue_full_error(self) -> Overloaded:
        return Overloaded("the queue is full; try again later", self.batcher.drain_s)


def _stopped_error() -> NotReady:
    return NotReady("the model is closed, or its engine has stopped")
