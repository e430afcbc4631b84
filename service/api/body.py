"""Request bodies: reading, decompression, parsing and validation."""

import asyncio
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from models.json_reader import JsonError, check_depth, may_repeat_keys, parse_json
from service.api.body_budget import FREE_BYTES
from service.api.errors import BodyTimeout, Malformed, UnsupportedMedia
from service.api.headers import header
from service.api.http_protocol import cycle_of
from service.api.responses import JSON
from service.api.state import AppState
from service.inference.errors import InvalidInput, TooLarge, VitrineError
from service.request_trace import TRACE

Model = TypeVar("Model", bound=BaseModel)

# Maximum size in bytes of a body that is parsed in the event loop, which takes up to 1 ms. Gzip
# bodies are decompressed in chunks of this size.
_INLINE_BYTES = 65_536
# zlib's window bits for the gzip format, RFC 1952, with header and checksum.
_GZIP_WBITS = 16 + zlib.MAX_WBITS
# Maximum number of errors in a body of which the first is told. pydantic can only list all of them,
# and holds the GIL for a second with 300,000. Only unknown fields can be so many.
_MAX_ERRORS = 10_000
# Names of union members that are objects, and have no `type`. No other object has such a field.
_OBJECT_TAGS = ("object", "fields", "deletion", "terms")


async def read_inputs(
    request: Request,
    state: AppState,
    model: type[Model],
    field: str = "inputs",
    message: str = "{} inputs; the limit is {}",
    members: type = int,
) -> Model:
    """Check the number of inputs in the body of a request, and return the validated body.

    Args:
        request: The request.
        state: The application's state.
        model: Pydantic model of the body.
        field: Field of the model that holds the inputs.
        message: Error message for too many inputs, with two `{}` placeholders: the number of inputs
            and the limit.
        members: Type of the members of a list that is a single input, such as token ids.

    Raises:
        InvalidInput: There are more than `limits.max_inputs` inputs.
        VitrineError: Any error of `read_body`, under the same conditions.
    """
    limits = state.settings.limits

    def check(body: dict[str, Any]) -> Model:
        inputs = body.get(field)
        # Before validation, because pydantic would validate every input.
        if isinstance(inputs, list) and inputs and not isinstance(inputs[0], members):
            check_count(inputs, limits.max_inputs, field, message)
        return _validate(model, body)

    return await _read_and_check(request, state, check)


async def read_body(request: Request, state: AppState, model: type[Model]) -> Model:
    """Return the validated body of a request.

    Raises:
        UnsupportedMedia: The content type is not application/json, or the content encoding is
            neither gzip nor identity.
        TooLarge: The body exceeds `limits.max_body_bytes`, before or after decompression.
        Overloaded: The memory budget of request bodies is exceeded; see `BodyBudget`.
        BodyTimeout: The body did not arrive within `limits.body_s` seconds.
        Malformed: The body is not valid JSON, is nested too deeply, has an object with a duplicate
            key, or is not valid gzip although its content encoding is gzip.
        InvalidInput: The body is not a JSON object, or does not match the model.
    """
    return await _read_and_check(request, state, lambda body: _validate(model, body))


def check_count(inputs: Sequence[object], limit: int, field: str, message: str) -> None:
    """Raise `InvalidInput` if there are more than `limit` inputs; arguments as in `read_inputs`."""
    if len(inputs) > limit:
        raise InvalidInput(
            message.format(len(inputs), limit), code="too_many_inputs", pointer=f"/{field}"
        )


async def _read_and_check(
    request: Request, state: AppState, check: Callable[[dict[str, Any]], Model]
) -> Model:
    media_type = (header(request, "content-type") or "").partition(";")[0].strip().lower()
    if media_type != JSON:
        raise UnsupportedMedia("the content type must be application/json")
    encoding = (header(request, "content-encoding") or "").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise UnsupportedMedia("the content encoding must be gzip or identity")
    cycle = cycle_of(request.receive)
    max_bytes = state.settings.limits.max_body_bytes
    # Nearly always the server has received the whole body, which takes no time and no budget then.
    body = None
    if cycle is not None and "gzip" not in encoding:
        body = cycle.short_body(min(max_bytes, FREE_BYTES))
    if body is not None:
        checked = check(_parse(body))
    else:
        checked = await _receive_and_check(request, state, check, max_bytes, "gzip" in encoding)
    if (trace := TRACE.get()) is not None:
        trace.stages.append(("read", time.perf_counter()))
        if trace.keeps_content:
            trace.body = checked
    return checked


async def _receive_and_check(
    request: Request,
    state: AppState,
    check: Callable[[dict[str, Any]], Model],
    max_bytes: int,
    is_gzip: bool,
) -> Model:
    timeout_s = state.settings.limits.body_s
    with state.body_budget.reservation() as reserve:
        try:
            async with asyncio.timeout(timeout_s):
                body = await _read(request, max_bytes, reserve)
                if is_gzip:
                    body = await _decompress(body, max_bytes, reserve)
        except TimeoutError:
            raise BodyTimeout(
                f"timed out after {timeout_s:g} s while reading the request body"
            ) from None
        if len(body) <= _INLINE_BYTES:
            return check(_parse(body))
        # Parsing and validation each hold the GIL, but the event loop can run between the two.
        return await asyncio.to_thread(lambda: check(_parse(body)))


def _parse(body: bytes | bytearray) -> dict[str, Any]:
    try:
        # Before parsing: a deep value could be read, but not written into a response.
        check_depth(body)
        parsed = orjson.loads(body)
        if not isinstance(parsed, dict):
            raise InvalidInput("the body must be a JSON object", pointer="")  # the whole document
        # orjson keeps the last of duplicate keys, while another parser may keep the first.
        if may_repeat_keys(body, len(parsed)):
            parse_json(body, has_unique_keys=True)
    except orjson.JSONDecodeError as error:
        raise Malformed(f"the body is not JSON: {error.msg}, at character {error.pos}") from None
    except JsonError as error:
        raise Malformed(f"the body cannot be read: {error}") from None
    return parsed


async def _read(request: Request, max_bytes: int, reserve: Callable[[int], None]) -> bytearray:
    declared = header(request, "content-length") or "0"
    if declared.isdecimal():
        if int(declared) > max_bytes:
            raise TooLarge(f"the body has {declared} bytes; the limit is {max_bytes}")
        reserve(int(declared))
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise TooLarge(f"the body exceeds the limit of {max_bytes} bytes")
        reserve(len(body))
    return body


async def _decompress(
    compressed: bytearray, max_bytes: int, reserve: Callable[[int], None]
) -> bytearray:
    """Return the decompressed gzip body, which may have at most `max_bytes` bytes too."""
    decompressor, body, rest = zlib.decompressobj(_GZIP_WBITS), bytearray(), bytes(compressed)
    try:
        while not decompressor.eof:
            part = decompressor.decompress(rest, _INLINE_BYTES)
            rest = decompressor.unconsumed_tail
            if not part and not rest and not decompressor.eof:
                raise Malformed("the gzip body is incomplete")
            body += part
            if len(body) > max_bytes:
                raise TooLarge(f"the decompressed body exceeds the limit of {max_bytes} bytes")
            reserve(len(compressed) + len(body))
            await asyncio.sleep(0)  # a part takes 0.2 ms; let other tasks run
    except zlib.error:
        raise Malformed("the body is not gzip") from None
    if decompressor.unused_data:
        raise Malformed("there is data after the end of the gzip body")
    return body


def _validate(model: type[Model], body: dict[str, Any]) -> Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        is_strict = model.model_config.get("extra") == "forbid"
        if is_strict and body.keys() - model.model_fields.keys():
            raise InvalidInput(
                f"unknown field; allowed fields: {', '.join(model.model_fields)}",
                code="unknown_field",
            ) from None
        raise _first_error(error, body) from None


def _first_error(error: ValidationError, body: dict[str, Any]) -> InvalidInput:
    """Return pydantic's first error as an `InvalidInput`, without the invalid value."""
    if error.error_count() > _MAX_ERRORS:
        return InvalidInput("too many unknown fields; see /docs for the allowed fields")
    first = error.errors(include_url=False, include_input=False)[0]
    *outer, last = first["loc"]
    path: list[int | str] = []
    value: Any = body
    is_tag_next = False
    # pydantic's location also has the names of union members. `path` omits them: a JSON pointer has
    # only keys and indices of the body. It omits the names of unknown fields, which are not echoed.
    for part in outer if first["type"] == "extra_forbidden" else (*outer, last):
        if is_tag_next and part in (*_OBJECT_TAGS, value.get("type")):
            is_tag_next = False
            continue
        try:
            value = value[part]
        except (LookupError, TypeError):
            continue
        path.append(part)
        is_tag_next = isinstance(value, dict)
    if first["type"] == "missing":
        path.append(last)
    indices = [part for part in path[1:] if isinstance(part, int)]
    inputs = body.get("inputs", body.get("input"))
    is_single = isinstance(inputs, list) and inputs and isinstance(inputs[0], int)
    has_index = path[:1] in (["inputs"], ["input"]) and indices and not is_single
    message = first["msg"].replace(" after validation", "")
    if first["type"] == "extra_forbidden":
        message = "unknown field in this object; see /docs for the allowed fields"
    elif first["type"] == "union_tag_invalid":  # pydantic's message repeats the invalid value
        message = f"unknown type; allowed types: {first['ctx']['expected_tags']}"
    elif first["type"] in ("model_type", "model_attributes_type", "dataclass_type"):
        message = "Input should be an object; see /docs for its fields"
    return InvalidInput(
        message,
        index=indices[0] if has_index else None,
        pointer="/" + "/".join(map(str, path)),
    )


@contextmanager
def pointing_at(inputs: object) -> Iterator[None]:
    """Set the JSON pointer of errors to `/inputs`, not `/inputs/0`, if `inputs` is one text."""
    try:
        yield
    except VitrineError as error:
        if isinstance(inputs, str) and error.index is not None:
            error.pointer = "/inputs"
        raise


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Replace names of arguments in errors; see `VitrineError.rename`."""
    try:
        yield
    except VitrineError as error:
        error.rename(names)
        raise
