"""Results of activation patching."""

from dataclasses import dataclass

from models.gradients.results.json_form import Vector


@dataclass(frozen=True)
class TapPatch:
    """Scalar after token vectors were replaced at a tap.

    Attributes:
        tap: Name of the tap.
        value: Scalar after the replacement; null if there is one per position.
        values: Scalar after the replacement of each position alone; null if there is one.
        effect: Change of the scalar, divided by the difference of `source_value` and `value` of the
            response: 0 if the replacement changes nothing, 1 if it gives the scalar of the source.
            A list if there are `values`. Null if the two scalars are equal.
    """

    tap: str
    value: float | None
    values: Vector | None
    effect: float | Vector


@dataclass(frozen=True)
class Patching:
    """Effect of token vectors of another text on a scalar, by tap.

    Attributes:
        value: Scalar of the text.
        source_value: Scalar of the source.
        taps: Scalars after the replacement, by tap.
    """

    value: float
    source_value: float
    taps: tuple[TapPatch, ...]
