"""Arguments of the Python API, checked before the model reads them.

The HTTP API checks the types of its fields itself. Callers of the Python API pass columns with
holes, arrays, generators and results of other libraries.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from math import isnan
from typing import Any, get_args

import numpy as np

from models.quantization import OutputDtype
from service.inference.errors import InvalidInput
from service.inference.explain.options import Deletion, Highlights, Terms
from service.inference.results.loaded_model import LoadedModel
from service.inference.results.spans import EntityLabels
from service.inference.results.tags import Aggregation
from service.inference.results.vectors import EncodeOutput, VectorOptions
from service.inference.tokenizing.chunking import Chunking, is_integer

_TEXT = frozenset({str})
_TEXTS = "a text or a list"
_INTEGER = frozenset({int})
_BYTES = (bytes, bytearray, memoryview)
# Maximum number of labels of entities; each is part of every row.
MAX_ENTITY_LABELS = 100


def input_list(inputs: object) -> Sequence[str | Sequence[int]]:
    """Return one text, or several texts and rows of token ids, as a list.

    Rows of token ids can also be one-dimensional arrays.

    Raises:
        InvalidInput: `inputs` is something else; `index` is the index of the input at fault.
    """
    items = _items(inputs, "inputs")
    if _TEXT.issuperset(map(type, items)):  # nearly always; the loop takes ten times as long
        return items
    return [item if isinstance(item, str) else _ids(item, i) for i, item in enumerate(items)]


def id_lists(rows: object) -> Sequence[Sequence[int]]:
    """Return rows of token ids, which can be one-dimensional arrays, as lists.

    Raises:
        InvalidInput: `rows` is something else; `index` is the index of the row at fault.
    """
    lists = enumerate(_items(rows, "rows", "a list"))
    return [_ids(row, index, "a list of token ids") for index, row in lists]


def text_list(
    texts: object, name: str = "inputs", *, has_index: bool = True, allows_one: bool = True
) -> Sequence[str]:
    """Return one text, or several texts, as a list.

    Args:
        texts: One text, or an iterable of texts.
        name: Name of the argument, for the error.
        has_index: Whether the error has the index of the text; its pointer has it anyway.
        allows_one: Whether one text is valid too.

    Raises:
        InvalidInput: `texts` is something else; `index` is the index of the text at fault.
    """
    items = _items(texts, name, _TEXTS if allows_one else "a list")
    if _TEXT.issuperset(map(type, items)):
        return items
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise InvalidInput(
                f"expected a text, not {_type_of(item)}",
                index=index if has_index else None,
                pointer=f"/{name}/{index}",
            )
    return items


def explanation_of(explain: object) -> Deletion | Highlights | Terms | None:
    """Return how to explain results; None: not.

    Raises:
        InvalidInput: `explain` is neither a bool nor an option.
    """
    if isinstance(explain, bool | np.bool_):
        return Deletion() if explain else None
    if isinstance(explain, Deletion | Highlights | Terms):
        return explain
    raise InvalidInput(
        "explain must be a bool, a Deletion, Highlights or Terms", pointer="/explain"
    )


def explanation_of_scores(
    explain: object, chunking: object
) -> Deletion | Highlights | Terms | None:
    """Return how to explain scores; None: not. Scores of chunks are not explained.

    Raises:
        InvalidInput: An argument is invalid, or both are set.
    """
    chosen = explanation_of(explain)
    if chunking is not None:
        check_options(chunking=chunking)
        if chosen is not None:
            name = "highlight" if isinstance(chosen, Highlights) else "explain"
            raise InvalidInput(
                f"{name} does not apply to chunks; score the text of the best chunk instead",
                pointer=f"/{name}",
            )
    if isinstance(chosen, Deletion) and chosen.label is not None:
        raise InvalidInput("label is for classify; scores have none", pointer="/explain/label")
    return chosen


def entity_labels(labels: object, **options: Any) -> EntityLabels | None:  # noqa: ANN401
    """Return the labels of entities, and their options; None: no labels.

    Raises:
        InvalidInput: A label or an option is invalid, or an option is set without labels.
    """
    check_options(**options)
    if labels is None:
        for name, value in options.items():
            if value != getattr(EntityLabels, name):
                raise InvalidInput(
                    f"{name} applies to labels, which are not set", pointer=f"/{name}"
                )
        return None
    own = text_list(labels, "labels", has_index=False, allows_one=False)
    if not 1 <= len(own) <= MAX_ENTITY_LABELS:
        raise InvalidInput(f"labels must have 1 to {MAX_ENTITY_LABELS} labels", pointer="/labels")
    for index, label in enumerate(own):
        if not label.strip():
            raise InvalidInput("the label is empty", pointer=f"/labels/{index}")
    return EntityLabels(labels=tuple(own), **options)


def pair_list(inputs: object) -> Sequence[str | tuple[str, str]]:
    """Return one text, or several texts and pairs of texts, as a list.

    Raises:
        InvalidInput: `inputs` is something else; `index` is the index of the input at fault.
    """
    if isinstance(inputs, tuple):
        raise InvalidInput(
            "inputs must be a list; pass a single pair as [(a, b)]", pointer="/inputs"
        )
    items = _items(inputs, "inputs")
    if _TEXT.issuperset(map(type, items)):
        return items
    return [item if isinstance(item, str) else _pair(item, i) for i, item in enumerate(items)]


def check_vector_options(model: LoadedModel, options: VectorOptions) -> None:
    """Check the options of a call for vectors of the model.

    Raises:
        InvalidInput: An option is invalid, or both widths are set; `pointer` names the option.
    """
    check_options(**options._asdict())
    dimensions, truncate_dim, _ = options
    for name, value in (("dimensions", dimensions), ("truncate_dim", truncate_dim)):
        if value is not None and not 1 <= value <= model.width:
            model.check_outputs(("pooled",))  # another width would not help
            raise InvalidInput(
                f"{name} must be from 1 to {model.width}, the model's width",
                pointer=f"/{name}",
                code="dimensions",
            )
    if dimensions is not None and truncate_dim is not None:
        raise InvalidInput(
            "dimensions and truncate_dim are mutually exclusive; set only one of them",
            pointer="/truncate_dim",
        )


def _items(values: Any, name: str, allowed: str = _TEXTS) -> Sequence[Any]:  # noqa: ANN401
    """Return one text, or the elements of an iterable from any caller, as a list of its own.

    A caller may change its list while the call waits.
    """
    if type(values) is list:
        return values.copy()
    if isinstance(values, str) and allowed == _TEXTS:
        return [values]
    try:
        # Of texts they are characters, of bytes numbers, of mappings and tables the names of
        # columns, and those of sets have no order.
        if isinstance(values, (str, *_BYTES, Mapping, Set)) or hasattr(values, "columns"):
            raise TypeError
        iterator = iter(values)
    except TypeError:
        raise InvalidInput(
            f"{name} must be {allowed}, not {_type_of(values)}", pointer=f"/{name}"
        ) from None
    return values.to_pylist() if hasattr(values, "to_pylist") else list(iterator)  # of pyarrow


def _ids(
    row: Any,  # noqa: ANN401 - from any caller
    index: int,
    allowed: str = "a text or a list of token ids",
) -> Sequence[int]:
    """Return a row of token ids as a list; arrays of NumPy, torch and pandas have `tolist`."""
    is_array = hasattr(row, "tolist") and not isinstance(row, _BYTES)
    ids = row.tolist() if is_array else row
    if not isinstance(ids, (list, tuple, range)):
        raise InvalidInput(f"expected {allowed}, not {_type_of(row)}", index=index)
    if _INTEGER.issuperset(map(type, ids)):
        return list(ids)
    for number in ids:
        if not is_integer(number):
            detail = f"a token id must be an integer, not {_type_of(number)}"
            raise InvalidInput(detail, index=index)
    return [int(number) for number in ids]


def _pair(item: object, index: int) -> tuple[str, str]:
    if isinstance(item, (list, tuple)) and len(item) == 2:
        first, second = item
        if isinstance(first, str) and isinstance(second, str):
            return first, second
    raise InvalidInput(f"expected a text or a pair of texts, not {_type_of(item)}", index=index)


def _type_of(value: object) -> str:
    if isinstance(value, float) and isnan(value):
        return "NaN"
    return "None" if value is None else type(value).__name__


def _is_bool(value: object) -> bool:
    return isinstance(value, bool | np.bool_)


def _is_share(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
        return False
    return bool(0 <= value <= 1)


def _one_of(names: Sequence[str]) -> tuple[Callable[[Any], bool], str]:
    allowed = frozenset(names)
    return lambda value: isinstance(value, str) and value in allowed, f"one of {', '.join(names)}"


def _several_of(names: Sequence[str]) -> tuple[Callable[[Any], bool], str]:
    is_name, _ = _one_of(names)

    def is_valid(values: object) -> bool:
        return isinstance(values, list | tuple) and len(values) > 0 and all(map(is_name, values))

    return is_valid, f"a list of {', '.join(names)}"


# Options that can be None.
_OPTIONAL: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("dimensions", "truncate_dim", "top_n", "max_tokens_per_query", "max_tokens_per_doc"),
        (is_integer, "an integer or None"),
    ),
    "normalize": (_is_bool, "a bool or None"),
    "space": (lambda value: isinstance(value, str), "the name of a space or None"),
}
# Whether a value of an option is valid, and the valid ones for the message.
_OPTIONS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **_OPTIONAL,
    **dict.fromkeys(
        ("with_offsets", "add_special_tokens", "skip_special_tokens", "nested", "multi_label"),
        (_is_bool, "a bool"),
    ),
    "chunking": (lambda value: isinstance(value, Chunking), "a Chunking"),
    "outputs": _several_of(get_args(EncodeOutput)),
    "dtype": _one_of(get_args(OutputDtype)),
    "aggregation": _one_of(get_args(Aggregation)),
    "threshold": (_is_share, "a number from 0 to 1"),
}


# Outputs to which an option of `Model.encode_outputs` applies.
USERS: Mapping[str, frozenset[EncodeOutput]] = {
    "dimensions": frozenset({"pooled"}),
    "truncate_dim": frozenset({"pooled"}),
    "normalize": frozenset({"pooled", "tokens", "multi"}),
}


def refuse_unused(
    users: Mapping[str, frozenset[EncodeOutput]],
    outputs: Sequence[EncodeOutput],
    options: Mapping[str, object],
) -> None:
    """Raise `InvalidInput` if an option is set, not None, that applies to none of the outputs."""
    for name, value in options.items():
        if value is not None and users[name].isdisjoint(outputs):
            names = " or ".join(f'"{output}"' for output in outputs)
            raise InvalidInput(f"{name} does not apply to the output {names}", pointer=f"/{name}")


def refuse_with_space(**options: object) -> None:
    """Raise `InvalidInput` if an option is set that does not apply to vectors in a space."""
    for name, value in options.items():
        if value is not None:
            raise InvalidInput(f"{name} does not apply to vectors in a space", pointer=f"/{name}")


def check_options(**options: object) -> None:
    """Check the types of options of the Python API, and the values of those with a fixed set.

    Raises:
        InvalidInput: An option is invalid; `pointer` names it.
    """
    for name, value in options.items():
        if value is None and name in _OPTIONAL:
            continue
        is_valid, allowed = _OPTIONS[name]
        if not is_valid(value):
            raise InvalidInput(f"{name} must be {allowed}", pointer=f"/{name}")
