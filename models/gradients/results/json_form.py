"""JSON form of results: their fields and properties, and the number of dimensions of arrays."""

from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

# The metadata of `Annotated` is the number of array dimensions.
Vector = Annotated[NDArray[Any], 1]
Matrix = Annotated[NDArray[Any], 2]

Phase = Literal["forward", "backward"]


def properties(result: type) -> dict[str, property]:
    """Return the properties of a result type, by name.

    In JSON, they appear in addition to the fields.
    """
    return {name: value for name, value in vars(result).items() if isinstance(value, property)}


def as_dict(result: object) -> Any:  # noqa: ANN401 - JSON, except for arrays
    """Return a result, with its properties, as nested dictionaries, lists and numpy arrays."""
    if is_dataclass(result) and not isinstance(result, type):
        names = [field.name for field in fields(result)] + list(properties(type(result)))
        return {name: as_dict(getattr(result, name)) for name in names}
    if isinstance(result, list | tuple):
        return [as_dict(value) for value in result]
    # orjson serialises C-contiguous arrays only.
    return np.ascontiguousarray(result) if isinstance(result, np.ndarray) else result
