"""A request's body to a checked model, or to the error that says what is wrong."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from service.errors import BodyTooSlow, InvalidInput, Malformed, TooLarge, UnsupportedMedia
from service.settings import LimitSettings
from service.vectors import JSON

Model = TypeVar("Model", bound=BaseModel)

# So much is parsed within a millisecond.
_BYTES_AT_ONCE = 65_536


async def read_inputs(
    request: Request,
    model: type[Model],
    field: str,
    too_many: str = "there are {} inputs; {} are taken",
) -> Model:
    """Return the body of a request for vectors; errors are those of `read_request`.

    Args:
        request: The request.
        model: What its body should be.
        field: Of the model; it holds the inputs.
        too_many: How those are told who send more inputs than are taken.

    Raises:
        InvalidInput: It has too many inputs.
    """
    limits: LimitSettings = request.app.state.settings.limits

    def check(given: dict[str, Any]) -> Model:
        inputs = given.get(field)
        # Counted first, because pydantic would look at each. A list of numbers is one input.
        if isinstance(inputs, list) and inputs and not isinstance(inputs[0], int):
            check_count(inputs, limits.max_inputs, field, too_many)
        return _check(model, given)

    return await _checked(request, check, limits.max_body_bytes)


def check_count(inputs: Sequence[object], most: int, field: str, too_many: str) -> None:
    """Refuse more inputs than are taken; see `read_inputs`."""
    if len(inputs) > most:
        told = too_many.format(len(inputs), most)
        raise InvalidInput(told, code="too_many_inputs", pointer=f"/{field}")


async def read_request(request: Request, model: type[Model], max_bytes: int) -> Model:
    """Return the body of a request.

    Raises:
        UnsupportedMedia: It is not plain application/json.
        TooLarge: It has too many bytes.
        BodyTooSlow: It is not there in time.
        Malformed: It is not JSON.
        InvalidInput: It is JSON of another shape.
    """
    return await _checked(request, lambda given: _check(model, given), max_bytes)


async def _checked(
    request: Request, check: Callable[[dict[str, Any]], Model], max_bytes: int
) -> Model:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != JSON:
        raise UnsupportedMedia("the body must be application/json")
    if request.headers.get("content-encoding", "").lower() not in ("", "identity"):
        raise UnsupportedMedia("a compressed body is not taken")
    seconds = request.app.state.settings.limits.body_s
    try:
        async with asyncio.timeout(seconds):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise BodyTooSlow(f"the body was not there within {seconds:g} s") from None
    if len(body) <= _BYTES_AT_ONCE:
        return check(_parse(body))
    # Each step holds the interpreter's lock, but others have their turn between them.
    return await asyncio.to_thread(lambda: check(_parse(body)))


def _parse(body: bytes) -> dict[str, Any]:
    try:
        given = orjson.loads(body)
        if not isinstance(given, dict):
            raise InvalidInput("the body must be a JSON object")
        # orjson keeps the last of equal keys, and another reader the first. Each key has a colon:
        # where there are no more colons than keys, none is there twice.
        if body.count(b":") > len(given):
            json.loads(body, object_pairs_hook=_unique)
    except orjson.JSONDecodeError as error:
        raise Malformed(f"the body is not JSON: {error.msg}, at character {error.pos}") from None
    except RecursionError:
        raise Malformed("the body is not JSON that is taken: it is nested too deeply") from None
    return given


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise Malformed("the body has a key twice")


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise TooLarge(f"the body has {declared} bytes; {max_bytes} are taken")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise TooLarge(f"the body has more than the {max_bytes} bytes that are taken")
    return bytes(body)


def _check(model: type[Model], given: dict[str, Any]) -> Model:
    is_strict = model.model_config.get("extra") == "forbid"
    if is_strict and given.keys() - model.model_fields.keys():
        raise InvalidInput(
            f"there is an unknown field; the fields are: {', '.join(model.model_fields)}",
            code="unknown_field",
        )
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _first(error, given) from None


def _first(error: ValidationError, given: dict[str, Any]) -> InvalidInput:
    """The first thing that pydantic found, without the value that it found."""
    found = error.errors(include_url=False, include_input=False)[0]
    *outer, last = found["loc"]
    kept: list[int | str] = []
    value: Any = given
    # Names of members of unions stand in the location too; what is there in the body is kept.
    for part in (*outer, last):
        try:
            value = value[part]
        except (LookupError, TypeError):
            continue
        kept.append(part)
    if found["type"] == "missing":
        kept.append(last)
    elif found["type"] == "extra_forbidden":
        kept.pop()  # a name of the client's own
    places = [part for part in kept[1:] if isinstance(part, int)]
    inputs = given.get("inputs", given.get("input"))
    is_row = isinstance(inputs, list) and inputs and isinstance(inputs[0], int)
    message = found["msg"]
    if found["type"] == "union_tag_invalid":  # which repeats what was given
        message = f"there is no such type; there are: {found['ctx']['expected_tags']}"
    return InvalidInput(
        message,
        index=places[0] if kept[:1] in (["inputs"], ["input"]) and places and not is_row else None,
        pointer="/" + "/".join(map(str, kept)),
    )
