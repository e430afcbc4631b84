"""Responses with inference results: serialisation, compression and timing headers."""

import asyncio
import base64
import gzip
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, cast

import orjson
from fastapi import Request, Response

from models.quantization import Codes
from service.api.accept import accepts_gzip, preferred_type
from service.api.headers import header
from service.api.state import AppState
from service.inference.model.model import Model
from service.inference.results.metrics import observe_stages
from service.inference.results.quantization import Quantizer
from service.inference.results.vectors import (
    Embeddings,
    Encoded,
    MultiEmbeddings,
    SparseEmbeddings,
    Stages,
    TokenEmbeddings,
    Vectors,
)
from service.inference.tokenizing.rows import Row
from service.request_trace import TRACE

OutputResult = Embeddings | TokenEmbeddings | SparseEmbeddings | MultiEmbeddings

OCTETS = "application/octet-stream"
JSON = "application/json"

# Results of up to this many numbers are serialised in the event loop, in 1 to 2 ms. A thread would
# wait longer for a core while engines keep all cores busy.
_INLINE_NUMBERS = 20_000
# Minimum size in bytes of a compressed response; compression gains nothing for smaller ones.
_GZIP_MIN_BYTES = 1024
# Level 1 compresses a vector in JSON by a factor of 2.25 in 0.08 ms; level 9, by 2.5 in 0.7 ms.
_GZIP_LEVEL = 1


class Result(Protocol):
    """A result of inference."""

    @property
    def size(self) -> int:
        """Size in JSON, in numbers."""

    @property
    def seconds(self) -> Stages:
        """Duration in seconds of each stage."""


@dataclass(frozen=True)
class SeveralResults:
    """Results of several outputs of one forward pass."""

    results: Sequence[Result]

    @property
    def size(self) -> int:
        """Size in JSON, in numbers."""
        return sum(result.size for result in self.results)

    @property
    def seconds(self) -> Stages:
        """Duration in seconds of each stage."""
        return self.results[0].seconds


async def respond(
    request: Request,
    state: AppState,
    model: Model,
    result: Result,
    serialize: Callable[[], bytes],
    media_type: str = JSON,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    """Return a response with the serialised result, and stage durations in `Server-Timing`."""
    started = time.perf_counter()
    if (trace := TRACE.get()) is not None and trace.keeps_content:
        trace.result = result
    is_short = result.size <= _INLINE_NUMBERS
    body = serialize() if is_short else await asyncio.to_thread(serialize)
    if state.settings.server.gzip:
        headers = {**headers, **_vary(headers)}
        accepted = header(request, "accept-encoding") or ""
        if len(body) >= _GZIP_MIN_BYTES and accepts_gzip(accepted):
            body = await asyncio.to_thread(gzip.compress, body, _GZIP_LEVEL, mtime=0)
            headers["Content-Encoding"] = "gzip"
    serialize_s = time.perf_counter() - started
    observe_stages(model.metrics.stage_seconds, started, {"serialize": serialize_s})
    return Response(
        body,
        headers={
            "Server-Timing": _server_timing(result.seconds, serialize_s),
            "X-Model-Version": model.version,
            "X-Engine": model.engine_label,
            **headers,
        },
        media_type=media_type,
    )


def _server_timing(stages: Stages, serialize_s: float) -> str:
    """Return a Server-Timing header, in which the counts describe the stage "cache"."""
    cache = "cache"
    if (counts := stages.cache_counts) is not None:
        cache += f';desc="hits={counts.hits} shared={counts.shared} misses={counts.misses}"'
    entries = [
        f"{cache if name == 'cache' else name};dur={duration * 1e3:.3f}"
        for name, duration in stages.items()
    ]
    return ", ".join([*entries, f"serialize;dur={serialize_s * 1e3:.3f}"])


def _vary(headers: Mapping[str, str]) -> dict[str, str]:
    return {"Vary": ", ".join(filter(None, (headers.get("Vary"), "Accept-Encoding")))}


def prefers_octets(request: Request) -> bool:
    """Return whether the client prefers octet-stream over JSON."""
    return preferred_type(request, (JSON, OCTETS)) == OCTETS


def encode_json(model: str, result: OutputResult, in_base64: bool, quantizer: Quantizer) -> bytes:
    """Return the JSON of a `POST /encode` response with one output.

    Floats round-trip exactly. Pooled vectors are quantised.
    """
    fields = _fields(result, in_base64, quantizer)
    return orjson.dumps({"model": model, **fields, **_counts(result.rows)})


def encode_outputs_json(
    model: str, encoded: Encoded, in_base64: bool, quantizer: Quantizer
) -> bytes:
    """Return the JSON of a `POST /encode` response with several outputs."""
    results = cast(Mapping[str, OutputResult], encoded)
    outputs = {output: _fields(result, in_base64, quantizer) for output, result in results.items()}
    first = next(iter(results.values()))
    return orjson.dumps({"model": model, "outputs": outputs, **_counts(first.rows)})


def encode_octets(vectors: Vectors, quantizer: Quantizer) -> bytes:
    """Return the body of a `POST /encode` response with nothing but the quantised vectors."""
    return to_bytes(quantizer(vectors))


def _fields(result: OutputResult, in_base64: bool, quantizer: Quantizer) -> dict[str, Any]:
    """Return the fields of a response that depend on the output."""
    match result:
        case Embeddings():
            rows = serialize_rows(quantizer(result.vectors), in_base64)
            return {"dimensions": result.vectors.shape[1], "embeddings": rows}
        case SparseEmbeddings():
            # One vector at a time, because orjson holds the GIL during a call.
            sparse = [
                orjson.Fragment(orjson.dumps(vector._asdict(), option=orjson.OPT_SERIALIZE_NUMPY))
                for vector in result.vectors
            ]
            return {"dimensions": result.width, "embeddings": sparse}
        case TokenEmbeddings() | MultiEmbeddings():
            clusters = result.clusters if isinstance(result, MultiEmbeddings) else None
            return {
                "dimensions": result.vectors[0].shape[1],
                "embeddings": serialize_rows(result.vectors, in_base64),
                "ids": result.ids,
                "offsets": result.offsets,
                **({"clusters": [own.tolist() for own in clusters]} if clusters else {}),
            }


def _counts(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "tokens": [len(row.ids) for row in rows],
        "truncated": [row.truncated for row in rows],
    }


def serialize_rows(
    vectors: Iterable[Codes], in_base64: bool
) -> Sequence[str] | Sequence[orjson.Fragment]:
    """Return each array of `vectors` as JSON numbers, or as base64 of its bytes."""
    if in_base64:
        return [base64.b64encode(to_bytes(part)).decode() for part in vectors]
    # One array at a time, because orjson holds the GIL during a call.
    return [
        orjson.Fragment(orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)) for part in vectors
    ]


def to_bytes(vectors: Codes) -> bytes:
    """Return the vectors as bytes, row by row, little-endian."""
    return vectors.astype(vectors.dtype.newbyteorder("<"), copy=False).tobytes()
