"""Response models: the common fields of all questions, and those derived from a result type."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Field, create_model

from models.gradients.results.json_form import Matrix, Vector, properties
from service.debug.pipeline.messages import MAX_NONFINITE, NonFinite
from service.inference.model.model import Model


class Token(BaseModel):
    """A token of a text."""

    token: str = Field(description="Token as spelled in the vocabulary")
    start: int | None = Field(
        description="Index of the token's first character in the text; null for special tokens and "
        "prompts"
    )
    end: int | None = Field(
        description="Index after the token's last character in the text; null if `start` is null"
    )
    text: int | None = Field(
        description="Index of the text: 0, 1 for a token of `text_pair`, or 2 for a token of the "
        "target's `versus`; null if `start` is null"
    )
    input: int = Field(
        description="Index of the model input. Most targets have one. `maxsim` has an input for "
        "each text, and `score` with `versus` one for each pair of query and document"
    )


@dataclass(frozen=True)
class WordSpan:
    """A word of a text, made of tokens without white space between them."""

    start: Annotated[int, Field(description="Index of the word's first character in the text")]
    end: Annotated[int, Field(description="Index after the word's last character in the text")]
    tokens: Annotated[
        Sequence[int], Field(description="Indices of the word's tokens in the list of tokens")
    ]


@dataclass(frozen=True)
class TextWord(WordSpan):
    """A word, and the text that it belongs to."""

    text: Annotated[
        int,
        Field(
            description="Index of the text: 0, 1 for a word of `text_pair`, or 2 for a word of the "
            "target's `versus`"
        ),
    ]


class Hashes(BaseModel):
    """Name and version of the served model, and SHA-256 of its weights, graph and tokenizer."""

    name: str
    version: str = Field(description="Version of the model, as in the header X-Model-Version")
    weights_sha256: dict[str, str]
    graph_sha256: str
    tokenizer_sha256: str


def hashes_of(model: Model) -> Hashes:
    """Return the name and version of a served model, and the hashes of its parts."""
    manifest = model.artifact.manifest
    return Hashes(
        name=model.name,
        version=model.version,
        weights_sha256=dict(manifest.weights_sha256),
        graph_sha256=model.graph_sha256,
        tokenizer_sha256=manifest.files["tokenizer.json"],
    )


class VectorParity(BaseModel):
    """Largest differences between served vectors and reference model's vectors of some inputs.

    A logit, or weight of a sparse vector, z is compared as the vector (z, 1).
    """

    cosine: float = Field(description="Lowest cosine similarity of two vectors")
    norm: float = Field(
        description="Largest difference of two vectors' norms, relative to the norm of the "
        "reference model's vector"
    )
    agrees: bool = Field(
        description="Whether the model served is the reference model: `cosine` and `norm` are "
        "within bounds that every engine keeps in every precision"
    )
    max_abs: float = Field(description="Largest absolute element-wise difference")
    engine: str = Field(description="Engine and precision of the served vectors")


class Cost(BaseModel):
    """Upper bound of the cost of a request."""

    token_steps: int = Field(
        description="Cost in token steps. A token step is one token run once through the reference "
        "model. `flow` and `parity` cost 4 token steps per token, and `flow` another 150 per text"
    )
    limit: int = Field(description="Maximum token steps per request")


class CostResponse(BaseModel):
    """Response to a request with `dry_run`."""

    model: Hashes
    cost: Cost


class GradientResponse(BaseModel):
    """Common fields of all responses with a result."""

    model: Hashes
    parity: VectorParity | None = Field(
        description="Largest differences between the served vectors (embeddings, logits, sparse "
        "vectors or multi-vectors) and the reference model's vectors of the request's texts, texts "
        "in the target excluded, or of the artifact's check inputs "
        "(`/debug/parity` without texts). Null for `/debug/layernorm` without a text"
    )
    cost: Cost
    wall_ms: float = Field(
        description="Duration of the job in the gradient process, in milliseconds"
    )
    warnings: list[str] = Field(
        description="Reasons why the result may be inaccurate or incomplete"
    )
    nonfinite: list[NonFinite] = Field(
        description="Numbers that are NaN or infinite, and therefore null in the response; only "
        f"the first {MAX_NONFINITE}"
    )


def response_model(
    name: str,
    result: type,
    base: type[GradientResponse] = GradientResponse,
    **lists: Any,  # noqa: ANN401 - a type expression
) -> type[GradientResponse]:
    """Create the response model of a result type, with further lists: item type by field name."""
    fields: dict[str, Any] = {name: (list[item], ...) for name, item in lists.items()}  # type: ignore[valid-type]
    return create_model(
        name,
        __base__=base,
        __doc__=_summary(result),
        **(fields | _fields(result)),
    )


def _json_type(annotation: Any) -> Any:  # noqa: ANN401 - a type expression
    """Return the JSON type of a result's field.

    Floats are nullable, because non-finite numbers are null in JSON.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is float:
        return float | None
    if isinstance(annotation, type) and is_dataclass(annotation):
        return _model(annotation)
    if annotation in (Vector, Matrix):
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
    for name, value in properties(result).items():
        getter: Callable[..., Any] = value.fget  # type: ignore[assignment]
        hints[name] = get_type_hints(getter)["return"]
        descriptions[name] = inspect.getdoc(value) or ""
    return {
        name: (_json_type(hint), Field(description=descriptions.get(name)))
        for name, hint in hints.items()
    }


def _descriptions(result: type) -> dict[str, str]:
    """Return the description of each attribute in a result's docstring, by name."""
    _, _, section = (inspect.getdoc(result) or "").partition("\nAttributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in entries}


def _summary(result: type) -> str:
    return (inspect.getdoc(result) or "").partition("\nAttributes:\n")[0].strip()


@cache
def _model(result: type) -> type[BaseModel]:
    return create_model(result.__name__, __doc__=_summary(result), **_fields(result))
