"""Responses of the gradient routes, derived from the results of `models.gradients.results`."""

import inspect
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Field, create_model

from models.gradients import results
from service.debug.messages import NonFinite


class Token(BaseModel):
    """A token of a text."""

    token: str = Field(description="Token in the vocabulary's spelling")
    start: int | None = Field(
        description="Index of the first character; null for tokens that are not of the text"
    )
    end: int | None = Field(description="Index after the last character")


class Hashes(BaseModel):
    """Served model."""

    name: str
    weights_sha256: dict[str, str]
    graph_sha256: str
    tokenizer_sha256: str


class VectorParity(BaseModel):
    """Worst differences between the reference model's vectors of the texts and the served ones."""

    cosine: float = Field(description="Lowest cosine")
    norm: float = Field(description="Largest relative difference of lengths")
    max_abs: float = Field(description="Largest difference of a number")
    engine: str = Field(description="Engine and precision of the served vectors")


class Cost(BaseModel):
    """Upper bound of the cost."""

    token_steps: int = Field(description="Tokens that run through the reference model")
    limit: int = Field(description="Limit per request")


class CostResponse(BaseModel):
    """Cost of a request with `dry_run`."""

    model: Hashes
    cost: Cost


class GradientResponse(BaseModel):
    """Fields that all results have."""

    model: Hashes
    parity: VectorParity | None = Field(description="null for requests without a text")
    cost: Cost
    wall_ms: float = Field(description="Duration in the gradient process")
    warnings: list[str]
    nonfinite: list[NonFinite] = Field(description="Numbers that null stands for in the response")


def _json_type(annotation: Any) -> Any:  # noqa: ANN401 - a type expression
    """Return the type of a result's field in JSON; floats may be null."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is float:
        return float | None
    if isinstance(annotation, type) and is_dataclass(annotation):
        return _model(annotation)
    if annotation in (results.Vector, results.Matrix):
        nested: Any = float | None
        for _ in range(annotation.__metadata__[0]):
            nested = list[nested]
        return nested
    if origin is Annotated:
        return _json_type(arguments[0])
    if origin in (Union, UnionType):
        return reduce(or_, map(_json_type, arguments))
    if origin is tuple and arguments[1:] == (...,):
        return list[_json_type(arguments[0])]  # type: ignore[misc]
    if origin is tuple:
        return tuple[tuple(map(_json_type, arguments))]  # type: ignore[misc]
    return annotation


def _fields(result: type) -> dict[str, Any]:
    """Return the fields and properties of a result as fields of a pydantic model."""
    hints = get_type_hints(result, include_extras=True)
    descriptions = _descriptions(result)
    for name, value in results.properties(result).items():
        getter: Callable[..., Any] = value.fget  # type: ignore[assignment]
        hints[name] = get_type_hints(getter)["return"]
        descriptions[name] = inspect.getdoc(value) or ""
    return {
        name: (_json_type(hint), Field(description=descriptions[name]))
        for name, hint in hints.items()
    }


def _descriptions(result: type) -> dict[str, str]:
    """Return the text of each entry under "Attributes:" in a docstring."""
    _, _, section = (inspect.getdoc(result) or "").partition("\nAttributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in entries}


def _summary(result: type) -> str:
    return (inspect.getdoc(result) or "").partition("\nAttributes:\n")[0].strip()


@cache
def _model(result: type) -> type[BaseModel]:
    return create_model(result.__name__, __doc__=_summary(result), **_fields(result))


def _response(name: str, result: type, *tokens: str) -> type[GradientResponse]:
    """Return the response model of a result, with fields for the tokens of its texts."""
    fields: dict[str, Any] = dict.fromkeys(tokens, (list[Token], ...))
    return create_model(
        name,
        __base__=GradientResponse,
        __doc__=_summary(result),
        **(fields | _fields(result)),
    )


AttributeResponse = _response("AttributeResponse", results.Attribution, "tokens")
PairResponse = _response("PairResponse", results.PairAttribution, "tokens_a", "tokens_b")
FlowResponse = _response("FlowResponse", results.Flow)
LayerNormResponse = _response("LayerNormResponse", results.LayerNormCheck)
ParityResponse = _response("ParityResponse", results.Parity)
VjpResponse = _response("VjpResponse", results.TokenGradient, "tokens")


class DebugLimits(BaseModel):
    """Limits of the gradient routes."""

    max_tokens: int = Field(description="Tokens per text")
    max_token_steps: int = Field(description="Cost per request")
    deadline_s: float = Field(description="Seconds per job")


class Capabilities(BaseModel):
    """Choices, limits and device of the gradient routes."""

    model: Hashes
    layers: list[str]
    norms: list[str]
    methods: list[str]
    targets: list[str]
    baselines: list[str]
    objectives: list[str]
    distributions: list[str]
    device: str
    torch: str
    op: dict[str, str] = Field(description="Implementation of the fused operator, by pass")
    limits: DebugLimits
