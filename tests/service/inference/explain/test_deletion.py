"""Variants of texts without a unit, and the effects that results of them have."""

import re
from unicodedata import normalize

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.inference.errors import InvalidInput
from service.inference.explain.deletion import (
    Deletions,
    TextEffects,
    effects_of,
    highlights_of,
    unit_spans,
    with_units,
    without,
)
from service.inference.explain.options import Deletion

TEXTS = st.text("ab'.,!? \n\t猫眠é😀", max_size=40)


def units(text: str, by: str = "words") -> list[str]:
    return [text[start:end] for start, end in unit_spans(text, by)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The cat sat.", ["The", "cat", "sat", "."]),
        ("Don't pay 3.14!", ["Don't", "pay", "3.14", "!"]),
        ("\u0663\u066b\u0661 من", ["\u0663\u066b\u0661", "من"]),
        ("猫が眠い", ["猫", "が", "眠", "い"]),
        ("ｶﾅです", ["ｶ", "ﾅ", "で", "す"]),
        ("a 😀 b", ["a", "😀", "b"]),
        (" \n", []),
        ("", []),
    ],
)
def test_words_of_a_text(text: str, words: list[str]) -> None:
    assert units(text) == words


@given(st.text("aé'\u2019.,1٣ -", max_size=12))
@example("Renoir\u2019s café\u2019s menu")
def test_decomposed_text_has_the_words_of_the_composed_one(text: str) -> None:
    decomposed = [normalize("NFC", word) for word in units(normalize("NFD", text))]
    assert decomposed == units(normalize("NFC", text))


def test_sentences_of_a_text_have_no_white_space_around_them() -> None:
    text = " One. Two is\nlong!  \n\nThree 。四。 "
    assert units(text, "sentences") == ["One.", "Two is\nlong!", "Three 。", "四。"]
    assert units(" \n ", "sentences") == []


@pytest.mark.parametrize(
    ("text", "unit", "left"),
    [
        ("The cat sat.", "The", "cat sat."),
        ("The cat sat.", "cat", "The sat."),
        ("The cat sat.", "sat", "The cat ."),
        ("A cat. It sat", ".", "A cat It sat"),
        ("A cat (it sat)", "(", "A cat it sat)"),
        ("The cat sat.", ".", "The cat sat"),
        ("A.\n\nB. C.", "B.", "A.\n\nC."),
        ("A. B.", "B.", "A."),
        ("(b) c", "b", "() c"),
        (" one ", "one", ""),
        ("猫が眠い", "が", "猫眠い"),
    ],
)
def test_white_space_on_one_side_of_a_unit_goes_with_it_if_it_is_on_both(
    text: str, unit: str, left: str
) -> None:
    start = text.index(unit)
    assert without(text, (start, start + len(unit))) == left


@given(TEXTS, st.sampled_from(["words", "sentences"]))
def test_all_characters_but_those_of_the_unit_are_left(text: str, by: str) -> None:
    spans = unit_spans(text, by)  # type: ignore[arg-type]
    visible = re.sub(r"\s", "", text)
    assert "".join(re.sub(r"\s", "", text[slice(*span)]) for span in spans) == visible
    for start, end in spans:
        assert text[start:end] == text[start:end].strip()
        rest = re.sub(r"\s", "", text[:start] + text[end:])
        left = without(text, (start, end))
        assert re.sub(r"\s", "", left) == rest
        assert left or not rest
        # White space between two units is left between them.
        before, after = text[:start], text[end:]
        if before.strip() and after.strip():
            is_apart = before[-1].isspace() or after[0].isspace()
            assert left[len(before.rstrip())].isspace() == is_apart


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        ((1, 1, 1, 1), "The cat sat."),
        ((0, 1, 0, 1), "cat ."),
        ((1, 0, 0, 0), "The"),
        ((0, 0, 0, 1), "."),
        ((0, 0, 0, 0), ""),
    ],
)
def test_units_that_are_not_kept_are_removed_the_last_first(
    kept: tuple[int, ...], left: str
) -> None:
    text = "The cat sat."
    assert with_units(text, unit_spans(text, "words"), list(map(bool, kept))) == left


@given(TEXTS, st.data())
def test_kept_units_keep_their_characters(text: str, data: st.DataObject) -> None:
    spans = unit_spans(text, "words")
    kept = [data.draw(st.booleans()) for _ in spans]
    left = with_units(text, spans, kept)
    own = "".join(text[slice(*span)] for span, is_kept in zip(spans, kept, strict=True) if is_kept)
    assert re.sub(r"\s", "", left) == own


def test_effects_are_differences_of_results_and_ranked_by_both() -> None:
    units = effects_of(
        5, [(0, 3), (4, 7), (8, 11)], whole=0.8, empty=0.1, without=[0.6, 0.2, 0.9],
        alone=[0.5, 0.4, 0.0],
    )  # fmt: skip
    assert [(unit.start, unit.end) for unit in units] == [(5, 8), (9, 12), (13, 16)]
    assert [unit.left_out for unit in units] == pytest.approx([0.2, 0.6, -0.1])
    assert [unit.alone for unit in units] == pytest.approx([0.4, 0.3, -0.1])
    assert [unit.rank for unit in units] == [2, 1, 3]


def test_a_result_that_does_not_exist_leaves_its_numbers_open() -> None:
    (unit,) = effects_of(0, [(0, 1)], whole=0.8, empty=None, without=[None], alone=[0.8])
    assert (unit.left_out, unit.alone, unit.rank) == (None, None, 1)


@pytest.mark.parametrize(
    ("options", "pointer"),
    [
        ({"by": "tokens"}, "/explain/by"),
        ({"by": ["words"]}, "/explain/by"),
        ({"of": "text"}, "/explain/of"),
        ({"top_n": 0}, "/explain/top_n"),
        ({"top_n": True}, "/explain/top_n"),
        ({"label": 1}, "/explain/label"),
        ({"method": "terms"}, "/explain/method"),
        ({"method": "shapley", "by": "auto"}, "/explain/by"),
        ({"method": "shapley", "samples": 0}, "/explain/samples"),
        ({"method": "shapley", "samples": 2049}, "/explain/samples"),
        ({"method": "shapley", "seed": -1}, "/explain/seed"),
        ({"samples": 64}, "/explain/samples"),
        ({"seed": 1}, "/explain/seed"),
        ({"max_tokens": 20_001}, "/explain/max_tokens"),
        ({"pairs": 11, "of": "both"}, "/explain/pairs"),
        ({"pairs": 1}, "/explain/pairs"),
        ({"priority": "high"}, "/explain/priority"),
        ({"pairs": 1, "of": "both", "method": "shapley"}, "/explain/pairs"),
        ({"max_tokens": 1.5}, "/explain/max_tokens"),
    ],
)
def test_invalid_options_are_named(options: dict[str, object], pointer: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        Deletion(**options)  # type: ignore[arg-type]
    assert raised.value.pointer == pointer


def test_highlights_of_scores_and_of_logits_are_those_with_their_own_first_places() -> None:
    # A sigmoid takes nearly all from the units without which the logit is still high.
    spans = [(0, 1), (1, 2), (2, 3)]
    logits = effects_of(0, spans, 8.0, -8.0, [7.0, 1.0, 2.0], [0.0, -4.0, -4.5])
    scores = effects_of(0, spans, 1.0, 0.0, [0.999, 0.73, 0.88], [0.5, 0.02, 0.01])
    texts = [
        TextEffects(1, "abc", (0, 3), 0.0, 0.0, "sentences", units) for units in (scores, logits)
    ]
    found = highlights_of(Deletions(texts[:1], texts[1:]), 2)
    for (text,) in (found.texts, found.raw_texts):
        assert [unit.rank for unit in text.units] == [1, 2]
    assert [unit.start for unit in found.texts[0].units] == [0, 1]
    assert [unit.start for unit in found.raw_texts[0].units] == [1, 2]
