"""`open_model`: opens an artifact, verifies its engine, and starts the batcher of its model."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from models.artifact import Artifact, sha256
from models.engines import (
    Agreement,
    Engine,
    EngineError,
    Output,
    Precision,
    graph_of,
    open_engine,
    self_check,
)
from models.identity import identity_of
from models.manifest import CALIBRATION, CHECK, MANIFEST, SOURCE, TOKENIZER, Check
from models.packing import pack
from models.printable import reason_of
from models.quantization import Calibration, read_calibration
from models.spaces import Space, read_spaces
from service.inference.batching.attention_cost import AttentionCost
from service.inference.batching.batch_former import BatchFormer
from service.inference.batching.batcher import Batcher
from service.inference.batching.cache import ResultCache
from service.inference.batching.cached_batcher import CachedBatcher
from service.inference.batching.devices import Devices
from service.inference.model.model import Model
from service.inference.results.batch_run import BatchItem, copy_read_only, run_batch
from service.inference.results.metrics import InferenceMetrics, ModelMetrics
from service.inference.results.query_table import read_query_weights
from service.inference.results.token_pooling import check_poolable
from service.inference.results.vectors import RowResults, Vectors, unit_vectors
from service.inference.tokenizing.executor import BoundedExecutor
from service.inference.tokenizing.pair_rows import PairRows
from service.inference.tokenizing.rows import Row
from service.inference.tokenizing.tokenizer import TextTokenizer
from service.inference.tokenizing.word_rows import WordRows

log = logging.getLogger("vitrine")

# Maximum total number of characters that threads tokenise at the same time; they take some seconds.
_MAX_CHARS_IN_THREADS = 16 * 2**20
# Limit of the self-check's duration: a part for all models, and a part for the size of the weights.
# On two cores, all-MiniLM-L6-v2 with 90 MB takes 0.15 s of its 113 s.
_SELF_CHECK_S = 60.0
_SELF_CHECK_S_PER_BYTE = 600 / 2**30
# Cancellations of a self-check that does not end, and seconds between two of them.
_CANCELLATIONS = 20
_CANCELLATION_S = 0.1


# Minimum of the numbers of `ModelOptions`.
_MINIMUM = {
    **dict.fromkeys(("threads", "gpu", "max_cost", "cache_bytes"), 0),
    **dict.fromkeys(("max_queue_tokens", "max_chars", "max_token_vectors", "max_chunks"), 1),
}
# Number of row lengths whose cost of attention is kept.
_LENGTHS = 4096


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
        max_queue_tokens: Maximum number of queued tokens of each priority; calls beyond it raise
            `Overloaded`.
        max_chars: Maximum number of characters per text.
        max_whole_chars: See `TextTokenizer`.
        max_token_vectors: Maximum number of tokens per call of `encode_tokens`, `encode_multi`,
            `tag`, `tokenize` or late chunking, and of entities with `labels` per call of `tag`.
        max_chunks: Maximum number of chunks of all texts of a call, and of pairs with candidate
            labels.
        cache_bytes: Maximum size of the model's own cache of results, in bytes; 0: no cache.
        share: Weight in the division of the device's time among busy models; above 0.
        verify: PEM file with the public key, or the certificate of it, that must have signed the
            artifact, all files of which are then verified; None: no signature is required.
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
    max_whole_chars: int | None = None
    max_token_vectors: int = 16_384
    max_chunks: int = 2048
    cache_bytes: int = 0
    share: float = 1.0
    verify: str | Path | None = None

    def __post_init__(self) -> None:
        """Check the numbers: with a negative number of threads, no batch would ever run.

        Raises:
            ValueError: A number is too small.
        """
        for name, minimum in _MINIMUM.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be at least {minimum}")
        for name in ("run_timeout_s", "share"):
            if not getattr(self, name) > 0:  # NaN is not
                raise ValueError(f"{name} must be above 0")


DEFAULT_OPTIONS = ModelOptions()


async def open_model(
    path: Path | str,
    options: ModelOptions = DEFAULT_OPTIONS,
    *,
    metrics: ModelMetrics | None = None,
    cache: ResultCache[RowResults] | None = None,
    on_stop: Callable[[BaseException], None] | None = None,
    devices: Devices | None = None,
) -> Model:
    """Open the model of an artifact, run the self-check, and start the model's batcher.

    The batcher runs in the running event loop.

    Args:
        path: Folder of an artifact written by `vitrine-export`.
        options: Runtime options.
        metrics: Metrics of all versions of the model; None: new metrics in a separate registry.
        cache: Cache of results that several models share; None: the model's own, of
            `options.cache_bytes`.
        on_stop: Called with the error if the batcher stops because of a failure, such as a broken
            engine; None: the error is logged.
        devices: Devices that the model shares with other models; None: shared with no other model.

    Raises:
        ArtifactError: The artifact is incomplete or invalid, was modified after its export, or is
            not signed by the key of `options.verify`.
        EngineError: The engine is unknown or unavailable on this machine, or fails the self-check;
            or the model pools tokens, and scipy is not installed.
    """
    cache = cache or ResultCache(options.cache_bytes)
    devices = devices or Devices()
    parts = await asyncio.to_thread(_open, Path(path), options, devices)
    artifact, engine = parts.artifact, parts.engine
    agreement, self_check_s = await _self_check(engine, artifact)
    name = options.name or artifact.manifest.name
    if metrics is None:
        metrics = ModelMetrics(InferenceMetrics(CollectorRegistry(), longest_s=120.0), name)
    max_cost = options.max_cost or engine.batches.max_tokens
    attention_cost = _attention_cost_of(artifact, engine)
    graph = graph_of(artifact, engine.name, engine.precision)
    identity = identity_of(artifact, engine.name, engine.precision)
    if engine.target == "cuda":
        await asyncio.to_thread(_warm_up, engine, artifact, max_cost, attention_cost)
    direction = None
    if (calibration := parts.calibration) is not None:
        (direction,) = unit_vectors(calibration.mean[None])
    run = partial(run_batch, engine, metrics, direction)
    check = artifact.check()
    # The self-check runs the check inputs once per compiled graph.
    check_cost = sum(len(row) + attention_cost(len(row)) for row in check.rows)
    cost_s = self_check_s / (check_cost * len(engine.runs))
    batcher: Batcher[BatchItem, RowResults] = Batcher(
        run,
        attrgetter("tokens"),
        BatchFormer(
            streams=engine.streams,
            max_cost=max_cost,
            min_split_tokens=engine.batches.min_split_tokens,
            fixed_cost=engine.batches.fixed_cost,
            long_row=engine.batches.long_row,
            attention_cost=attention_cost,
        ),
        devices.pool(engine, options.gpu),
        share=options.share,
        probe=partial(run, [_probe_of(artifact, check)]),
        cancel=engine.cancel,
        max_queue_tokens=options.max_queue_tokens,
        timeout_s=options.run_timeout_s,
        cost_s=cost_s,
        on_stop=on_stop or log_stop,
    )
    model = Model(
        name=name,
        created=int(artifact.path.stat().st_mtime),
        artifact=artifact,
        tokenizer=parts.pair_rows.tokenizer,
        pair_rows=parts.pair_rows,
        word_rows=WordRows(parts.pair_rows.tokenizer),
        query_weights=parts.query_weights,
        calibration=calibration,
        spaces=parts.spaces,
        engine=engine,
        batcher=batcher,
        cache=_behind_cache(batcher, cache, identity) if cache.max_bytes else None,
        max_cost=max_cost,
        max_token_vectors=options.max_token_vectors,
        max_chunks=options.max_chunks,
        identity=identity,
        graph_sha256=artifact.graph_sha256(engine.name, graph.dtype),
        self_check=agreement,
        check=check,
        files={**artifact.manifest.files, MANIFEST: sha256(artifact.path / MANIFEST)},
        metrics=metrics,
        _executor=BoundedExecutor(_MAX_CHARS_IN_THREADS),
    )
    metrics.add_queue(batcher)
    batcher.start()
    return model


class _Parts(NamedTuple):
    """Parts of a model, read from its artifact; see `LoadedModel`."""

    artifact: Artifact
    pair_rows: PairRows
    query_weights: Vectors
    calibration: Calibration | None
    spaces: Mapping[str, Space]
    engine: Engine


def _open(path: Path, options: ModelOptions, devices: Devices) -> _Parts:
    artifact = Artifact.load(path, options.verify)
    check_poolable(artifact.manifest)
    with ThreadPoolExecutor(1) as thread:  # large vocabularies take a second, as compiling does
        limits = options.max_chars, options.max_whole_chars
        pair_rows = thread.submit(lambda: PairRows(TextTokenizer(artifact, *limits)))
        check = thread.submit(artifact.check)  # parsed here, not in the event loop
        query_weights = read_query_weights(artifact)
        calibration = read_calibration(artifact)
        spaces = read_spaces(artifact)
        engine = open_engine(
            *(artifact, options.engine, options.precision, options.threads, options.gpu),
            devices.cpu_runs,
        )
        _verify_unread(artifact, engine)
    check.result()
    return _Parts(artifact, pair_rows.result(), query_weights, calibration, spaces, engine)


def _attention_cost_of(artifact: Artifact, engine: Engine) -> Callable[[int], float]:
    """Return the cost of attention for a row of a given length, in tokens."""
    manifest = artifact.manifest
    # On GPUs, attention windows are masks: all pairs of tokens are computed.
    windows = manifest.windows if engine.target == "cpu" else (None,)
    cost = AttentionCost(windows, manifest.hidden_size, engine.batches.padding_cost)
    # The former asks for the same lengths again and again: a lookup takes a tenth of the time.
    return lru_cache(_LENGTHS)(cost)


def _probe_of(artifact: Artifact, check: Check) -> BatchItem:
    """Return an input of the self-check, on which a working engine does not fail."""
    words, labels = (each[0] if each else () for each in (check.words, check.labels))
    row = Row(check.rows[0], truncated=False, prompt_tokens=0, words=words, labels=labels)
    return BatchItem(row, artifact.manifest.outputs[:1])


async def _self_check(
    engine: Engine, artifact: Artifact
) -> tuple[Mapping[Output, Agreement], float]:
    """Run the self-check in a thread; return the agreement and the duration in seconds.

    If the check takes too long, or the caller is cancelled, its runs are cancelled too: a graph may
    compute for ever.
    """

    def run() -> tuple[Mapping[Output, Agreement], float]:
        started = time.monotonic()
        return self_check(engine, artifact), time.monotonic() - started

    graph = graph_of(artifact, engine.name, engine.precision)
    weight_bytes = (artifact.path / graph.weights).stat().st_size
    limit_s = _SELF_CHECK_S + _SELF_CHECK_S_PER_BYTE * weight_bytes
    check = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.shield(check)
    except TimeoutError:
        raise EngineError(
            f"self-check failed: the graph has computed for more than {limit_s:.0f} s, the limit"
        ) from None
    finally:
        for _ in range(_CANCELLATIONS):
            if not check.done():
                engine.cancel()  # again and again, because the check may have begun another run
                await asyncio.wait([check], timeout=_CANCELLATION_S)
        if not check.done():
            log.error("a run of the self-check does not end; its thread is abandoned")
        elif not check.cancelled():
            check.exception()  # retrieved: a cancelled caller gets no other error


def _verify_unread(artifact: Artifact, engine: Engine) -> None:
    """Verify the files that the opened model does not read; large ones if a signature is required.

    Weights of other engines and the reference model's files take as long as a start. Without a
    signature they are verified when they are read, and by `vitrine-serve --check`.

    Raises:
        ArtifactError: The SHA-256 of a file differs from the manifest's.
    """
    weights = {each.weights for each in artifact.manifest.graphs}
    graph = graph_of(artifact, engine.name, engine.precision)
    read = {TOKENIZER, CHECK, CALIBRATION, graph.file, graph.weights}
    for name in sorted(artifact.manifest.files.keys() - read):
        is_large = name in weights or name.startswith(f"{SOURCE}/")
        if artifact.signed_by is not None or not is_large:
            artifact.verify(name)


def _behind_cache(
    batcher: Batcher[BatchItem, RowResults], cache: ResultCache[RowResults], identity: str
) -> CachedBatcher[BatchItem, RowResults]:
    """Return a batcher whose results are those of models with this identity alone."""
    prefix = bytes.fromhex(identity)
    return CachedBatcher(
        batcher,
        cache,
        key=lambda item: prefix + item.key,
        length=attrgetter("tokens"),
        copy_read_only=copy_read_only,
    )


def log_stop(error: BaseException) -> None:
    """Log that the batcher of a model has stopped because of a failure."""
    log.critical("the engine has stopped: %s", error)


def _warm_up(
    engine: Engine, artifact: Artifact, max_cost: int, attention_cost: Callable[[int], float]
) -> None:
    """Run batches of one row and full batches on all streams, before the first request.

    Otherwise the first requests would wait while the GPU loads kernels and allocates memory. The
    row lengths are the maximum length, its half, its quarter and so on, down to 1.

    Raises:
        EngineError: A batch fails, such as for lack of memory.
    """
    length = max_tokens = artifact.manifest.max_tokens
    run = partial(engine.run, output=artifact.manifest.outputs[0])
    try:
        with ThreadPoolExecutor(engine.streams) as streams:
            while length:
                rows = int(max_cost / (length + attention_cost(length)))
                for count in {1, max(1, rows)}:
                    words, labels = (None, None)
                    if artifact.manifest.spans:
                        words, labels = [range(length)] * count, [range(1)] * count
                    batch = pack([[0] * length] * count, words=words, labels=labels)
                    list(streams.map(run, [batch] * engine.streams))
                length //= 2
    except Exception as error:  # runtimes document no errors
        raise EngineError(
            f"the GPU cannot run batches of up to {max_tokens} tokens per row: {reason_of(error)}"
        ) from error
