"""The condition on which a new version replaces the served one: an evaluation of both."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from service.inference.errors import InvalidInput

COMPARISON = "comparison.json"
_VERSION = "model version"
# Settings of a job in which evaluations of two versions may differ.
_VERSION_SETTINGS = {
    *(_VERSION, "model", "artifact", "--engine", "--precision", "errors", "version"),
    "input sha256",  # the collection is the same; pairs for a reranker are of other documents
}
# Tolerance for rounding of a difference of two means.
_ROUNDING = 1e-9


class MeasureChange(BaseModel):
    """A measure of the old and the new version."""

    old: float
    new: float
    difference: float
    interval: tuple[float, float] = Field(
        description="Confidence interval of 95 % of the difference"
    )


class _Comparison(BaseModel):
    """The part of comparison.json that decides; see `service.evaluation.comparison.compare`."""

    measures: dict[str, MeasureChange]
    settings: dict[str, tuple[Any, Any]]


def check_evaluation(
    folder: Path, served: str, new: str, measure: str, max_drop: float
) -> MeasureChange:
    """Return how a measure differs between the served version and a new one.

    Args:
        folder: Output of `vitrine eval --against` of the new version, in place of the served one.
        served: Identity of the served version.
        new: Identity of the new version.
        measure: Name of the measure, such as "nDCG@10".
        max_drop: By how much its mean may be lower with the new version.

    Raises:
        InvalidInput: The folder has no comparison, or one of other versions or with other settings
            that differ. The measure is missing, or lower by more.
    """
    try:
        comparison = _Comparison.model_validate_json((folder / COMPARISON).read_bytes())
    except (OSError, ValueError):
        raise _refusal(
            f"the folder has no valid {COMPARISON}, which vitrine eval --against writes", "folder"
        ) from None
    changed = {name: name.partition(": ")[2] for name in comparison.settings}  # without the job
    versions = [comparison.settings[name] for name in changed if changed[name] == _VERSION]
    if not versions or any(pair != (served, new) for pair in versions):
        compared = {f"{str(old)[:12]} and {str(own)[:12]}" for old, own in versions}
        raise _refusal(
            f"the comparison is of {'; '.join(sorted(compared)) or 'no two versions of --model'}; "
            f"it must be of the served version and the new one, {served[:12]} and {new[:12]}, with "
            "the engine and precision of the service",
            "folder",
        )
    if others := [name for name, own in changed.items() if own not in _VERSION_SETTINGS]:
        raise _refusal(
            f"the two evaluations differ in more than the version: {', '.join(others)}", "folder"
        )
    if measure not in comparison.measures:
        known = ", ".join(comparison.measures) or "none"
        raise _refusal(f"the comparison lacks the measure; it has {known}", "measure")
    own = comparison.measures[measure]
    if not own.difference >= -max_drop - _ROUNDING:  # NaN is not
        raise _refusal(
            f"the new version is not good enough: the measure changes by {own.difference:+.6f}, "
            f"from {own.old:.6f} to {own.new:.6f}, and max_drop is {max_drop:g}",
            "max_drop",
        )
    return own


def _refusal(detail: str, field: str) -> InvalidInput:
    return InvalidInput(detail, code="eval", pointer=f"/eval/{field}")
