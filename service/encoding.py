"""What every route that encodes does between the body of its request and its answer."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray

from models.engines import Output
from service.backlog import Backlog, BacklogFull
from service.errors import DeadlineExceeded, InvalidInput, Malformed
from service.metrics import Metrics, telling_outcome
from service.routing import full, runtime_of, submit, while_connected
from service.tokenizer import OnOverflow, Row, Span, TextTokenizer
from service.vectors import JSON

Result = TypeVar("Result")

TIMEOUT = "X-Request-Timeout-Ms"

# So much is tokenised, and so many numbers written, within a millisecond or two. A thread of its
# own would wait longer for its turn, where engines keep every core busy.
_INPUTS_AT_ONCE = 8
_CHARACTERS_AT_ONCE = 4000
_NUMBERS_AT_ONCE = 20_000


@dataclass(frozen=True)
class Encoded:
    """What came of the inputs of a request, in their order.

    Attributes:
        rows: What the model saw of each.
        vectors: Of each, `(B, W)`, or of the tokens of all, `(T, D)`; not normalised.
        spans: Of each input's tokens, see `TextTokenizer.spans`; none where they are not wanted.
        seconds: What each stage took.
    """

    rows: Sequence[Row]
    vectors: NDArray[np.float32]
    spans: Sequence[Sequence[Span | None] | None]
    seconds: Mapping[str, float]


async def encode(
    request: Request,
    inputs: Sequence[str | Sequence[int]],
    prompt_name: str | None,
    on_overflow: OnOverflow,
    output: Output = "pooled",
) -> Encoded:
    """Return the vectors of texts and rows of ids, or of their tokens, unless the client goes away.

    Raises:
        InvalidInput: An input is not what it should be; see `TextTokenizer.rows`; or
            there are more tokens than vectors of tokens are given for.
        TooLarge: A text has too many characters.
        Malformed: The client's deadline is no number of milliseconds.
        DeadlineExceeded: It, or the service's own, has passed.
        Overloaded: The queue is full.
        InferenceFailed: The engine fails on one of the inputs.
        NotReady: There is no engine, or it has stopped.
    """
    metrics: Metrics = request.app.state.metrics
    seconds = _seconds_allowed(request)
    metrics.inputs_received.inc(len(inputs))
    with telling_outcome(lambda outcome: metrics.inputs[outcome].inc(len(inputs))):
        work = _encode(request, inputs, prompt_name, on_overflow, output)
        return await _within(seconds, work)


async def _encode(
    request: Request,
    inputs: Sequence[str | Sequence[int]],
    prompt_name: str | None,
    on_overflow: OnOverflow,
    output: Output,
) -> Encoded:
    runtime = runtime_of(request)
    if runtime.batcher.is_full:  # known before anything is tokenised in vain
        raise full(runtime)
    started = time.perf_counter()
    tokenized = partial(_tokenize, runtime.tokenizer, inputs, prompt_name, on_overflow, output)
    rows, spans = await _in_tokenizer(request, tokenized, inputs)
    tokenize_s = time.perf_counter() - started
    if output == "tokens":
        _check_size(rows, request.app.state.settings.limits.max_token_vectors)
    outcome = await while_connected(request, submit(runtime, rows, output))
    seconds = {"tokenize": tokenize_s, "queue": outcome.queue_s, "infer": outcome.run_s}
    joined = np.array if output == "pooled" else np.concatenate
    return Encoded(rows, joined(outcome.results), spans, seconds)


async def tokenizing(
    request: Request, work: Callable[[], Result], inputs: Sequence[str | Sequence[int]]
) -> Result:
    """Return what the tokenizer makes of the inputs, within the request's deadline.

    Args:
        request: The request.
        work: Calls the tokenizer.
        inputs: What it is called with.

    Raises:
        Malformed: The client's deadline is no number of milliseconds.
        DeadlineExceeded: It, or the service's own, has passed.
        Overloaded: The inputs are long, and so are those that wait.
    """
    return await _within(_seconds_allowed(request), _in_tokenizer(request, work, inputs))


async def _in_tokenizer(
    request: Request, work: Callable[[], Result], inputs: Sequence[str | Sequence[int]]
) -> Result:
    characters = sum(map(len, inputs))
    if len(inputs) <= _INPUTS_AT_ONCE and characters <= _CHARACTERS_AT_ONCE:
        return work()
    backlog: Backlog = request.app.state.tokenizer_backlog
    try:
        return await backlog.run(work, characters)
    except BacklogFull:
        raise full(runtime_of(request)) from None


def _tokenize(
    tokenizer: TextTokenizer,
    inputs: Sequence[str | Sequence[int]],
    prompt_name: str | None,
    on_overflow: OnOverflow,
    output: Output,
) -> tuple[list[Row], Sequence[Sequence[Span | None] | None]]:
    rows = tokenizer.rows(inputs, prompt_name, on_overflow)
    return rows, tokenizer.spans(inputs, prompt_name) if output == "tokens" else ()


async def _within(seconds: float, work: Coroutine[Any, Any, Result]) -> Result:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(f"it was not done within {seconds:g} s") from None


def _seconds_allowed(request: Request) -> float:
    longest: float = request.app.state.settings.limits.request_s
    given = request.headers.get(TIMEOUT)
    if given is None:
        return longest
    if not (given.isascii() and given.isdecimal() and 0 < len(given) < 10 and int(given)):
        raise Malformed(f"{TIMEOUT} must be a number of milliseconds", code="timeout")
    return min(int(given) / 1e3, longest)


def check_dimensions(request: Request, dimensions: int | None) -> None:
    """Refuse more dimensions than the model's vectors have.

    Raises:
        InvalidInput: They are.
    """
    width = runtime_of(request).artifact.manifest.width
    if dimensions is not None and dimensions > width:
        raise InvalidInput(
            f"the model has {width} dimensions", pointer="/dimensions", code="dimensions"
        )


def _check_size(rows: Sequence[Row], most: int) -> None:
    tokens = sum(len(row.ids) for row in rows)
    if tokens > most:
        raise InvalidInput(
            f"the inputs have {tokens} tokens; vectors of {most} are given in one answer",
            code="too_many_tokens",
            pointer="/inputs",
        )


async def respond(
    request: Request,
    encoded: Encoded,
    write: Callable[[], bytes],
    media_type: str = JSON,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    """Return what `write` makes of the vectors, and tell where the time went."""
    metrics: Metrics = request.app.state.metrics
    engine = runtime_of(request).engine
    started = time.perf_counter()
    is_short = encoded.vectors.size <= _NUMBERS_AT_ONCE
    body = write() if is_short else await asyncio.to_thread(write)
    stages = {**encoded.seconds, "serialize": time.perf_counter() - started}
    for stage, seconds in stages.items():
        metrics.stage_seconds[stage].observe(seconds)
    told = {
        "Server-Timing": ", ".join(f"{name};dur={s * 1e3:.3f}" for name, s in stages.items()),
        "X-Engine": f"{engine.name}; precision={engine.precision}",
    }
    return Response(body, headers={**told, **headers}, media_type=media_type)
