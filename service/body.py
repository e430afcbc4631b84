"""A request's body to a checked `EncodeRequest`, or to the error that says what is wrong."""

import orjson
from pydantic import ValidationError
from starlette.requests import Request

from service.errors import InvalidInput, Malformed, TooLarge, UnsupportedMedia
from service.schemas import EncodeRequest
from service.settings import LimitSettings
from service.vectors import JSON


async def read_encode_request(request: Request, limits: LimitSettings) -> EncodeRequest:
    """Return the body of `POST /encode`.

    Raises:
        UnsupportedMedia: It is not plain application/json.
        TooLarge: It has too many bytes.
        Malformed: It is not JSON.
        InvalidInput: It is JSON of another shape, or has too many inputs.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != JSON:
        raise UnsupportedMedia("the body must be application/json")
    if request.headers.get("content-encoding", "").lower() not in ("", "identity"):
        raise UnsupportedMedia("a compressed body is not taken")
    return parse(await _read(request, limits.max_body_bytes), limits.max_inputs)


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


def parse(body: bytes, max_inputs: int) -> EncodeRequest:
    """Return the checked request; errors are those of `read_encode_request`."""
    try:
        given = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Malformed(f"the body is not JSON: {error.msg}, at character {error.pos}") from None
    if not isinstance(given, dict):
        raise InvalidInput("the body must be a JSON object")
    # Known fields and the number of inputs are looked at first: pydantic would report each.
    if given.keys() - EncodeRequest.model_fields.keys():
        raise InvalidInput(
            f"there is an unknown field; the fields are: {', '.join(EncodeRequest.model_fields)}",
            code="unknown_field",
        )
    inputs = given.get("inputs")
    if isinstance(inputs, list) and len(inputs) > max_inputs:
        raise InvalidInput(
            f"there are {len(inputs)} inputs; {max_inputs} are taken",
            code="too_many_inputs",
            pointer="/inputs",
        )
    try:
        return EncodeRequest.model_validate(given)
    except ValidationError as error:
        raise _first(error) from None


def _first(error: ValidationError) -> InvalidInput:
    """The first thing that pydantic found, without the value that it found."""
    found = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field, *path = found["loc"]
    # Between a field and its element stands the name of the member of the union.
    places = [part for part in path if isinstance(part, int)]
    return InvalidInput(
        found["msg"],
        index=places[0] if field == "inputs" and places else None,
        pointer="/" + "/".join(map(str, [field, *places])),
    )
