"""Tests of `models.typed_json`: dataclasses from JSON of unknown origin."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.typed_json import FieldError, Number, form, length, read_dataclass, within


@dataclass(frozen=True)
class Fields:
    size: Annotated[int, within(1, 9)]
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Whole:
    name: Annotated[str, form("[a-z]+", "of small letters")]
    is_good: bool
    share: Number
    note: str | None
    limits: Annotated[tuple[Annotated[int, within(0, 9)] | None, ...], length(0, 3)]
    vectors: list[list[Number]]
    parts: Mapping[str, Fields]
    labels: Mapping[str, str] = field(default_factory=dict)


GOOD = {
    "name": "abc",
    "is_good": True,
    "share": 1,
    "note": None,
    "limits": [1, None],
    "vectors": [[0.5, 1], []],
    "parts": {"x": {"size": 3, "kind": "b"}, "y": {"size": 9}},
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts),
    max_leaves=5,
)


def test_good_object_is_read_with_defaults() -> None:
    parts = {"x": Fields(3, "b"), "y": Fields(9)}
    expected = Whole("abc", True, 1, None, (1, None), [[0.5, 1], []], parts)
    assert read_dataclass(Whole, GOOD) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "ABC"}, "name must be a text of small letters: 'ABC'"),
        ({"name": 1}, "name must be a text: 1"),
        ({"name": "\x1b" * 99}, r"name must be a text of small letters: '(\\x1b){9}"),
        ({"is_good": 1}, "is_good must be true or false: 1"),
        ({"share": True}, "share must be a number: True"),
        ({"share": float("inf")}, "share must be a number from .*: inf"),
        ({"note": 1}, "note must be a text: 1"),
        ({"limits": 1}, "limits must be a list: 1"),
        ({"limits": [0] * 4}, "limits must be a list or an object of length 0 to 3: a list of"),
        ({"limits": [0, 10]}, r"limits\[1\] must be an integer from 0 to 9: 10"),
        ({"limits": [10**400]}, r"limits\[0\] must be an integer from 0 to 9: a long integer"),
        ({"vectors": [[0.0], [0.0, "x"]]}, r"vectors\[1\]\[1\] must be a number: 'x'"),
        ({"vectors": [[0.0, float("inf")]]}, r"vectors\[0\]\[1\] must be a number from"),
        ({"vectors": [[0.0, True]]}, r"vectors\[0\]\[1\] must be a number: True"),
        ({"parts": []}, "parts must be an object: a list of length 0"),
        ({"parts": {"x": {}}}, r"the field parts\['x'\].size is missing; fields: size, kind"),
        ({"parts": {"x": 1}}, r"parts\['x'\] must be an object"),
        ({"parts": {"x": {"size": 0}}}, r"parts\['x'\].size must be an integer from 1 to 9: 0"),
        ({"parts": {"x": {"size": 1, "kind": "c"}}}, r"kind must be one of a, b: 'c'"),
        ({"parts": {"x": {"size": 1, "kind": []}}}, r"kind must be one of a, b: a list"),
        ({"what": 1}, "unknown field 'what'; fields: name"),
    ],
)
def test_wrong_value_is_named_with_its_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        read_dataclass(Whole, GOOD | change)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("value", [None, [], "x", 1])
def test_only_an_object_is_a_dataclass(value: object) -> None:
    with pytest.raises(FieldError, match="it must be an object"):
        read_dataclass(Whole, value)


@given(st.sampled_from([*GOOD]), VALUES)
def test_any_value_is_read_as_it_is_or_refused(name: str, value: object) -> None:
    changed = GOOD | {name: value}
    try:
        result = read_dataclass(Whole, changed)
    except FieldError:
        return
    written = json.loads(json.dumps(asdict(result)))
    assert written.pop("labels") == {}
    for part in written["parts"].values():
        if part["kind"] == "a":
            del part["kind"]  # the default
    for part in changed["parts"].values():  # type: ignore[attr-defined]
        if part.get("kind") == "a":
            del part["kind"]
    assert written == changed
    assert json.dumps(written, sort_keys=True) == json.dumps(changed, sort_keys=True)
