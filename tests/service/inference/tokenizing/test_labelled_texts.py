"""Rows of texts with labels, against the tokenizer on labels and words at once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Encoding, Tokenizer

from models.manifest import SpanRules
from models.packing import first_tokens
from service.inference.errors import InvalidInput
from service.inference.tokenizing.labelled_texts import _WORD, LabelledTexts
from tests.models.gliner import KINDS, save_gliner

LABELS = ["the cat", "sat é-b", "A_w5"]
TEXTS = [
    "the",
    "",
    " \n",
    "a <<ENT>> [SEP] b",
    "the \u200d cat 🎉 sat",
    "a" * 300,
    "b-c_d the " * 40,
]
TEXTS += ["the cat sat. " * count for count in range(1, 12)]


class SpyTokenizer:
    """A tokenizer that records the words that it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.words: list[str] = []
        self.token_to_id = tokenizer.token_to_id
        self._tokenizer = tokenizer

    def encode_batch(self, inputs: Sequence[Sequence[str]], **options: Any) -> list[Encoding]:  # noqa: ANN401
        self.words += [word for own in inputs for word in own]
        encodings: list[Encoding] = self._tokenizer.encode_batch(inputs, **options)
        return encodings


@pytest.fixture(params=KINDS)
def rules_and_tokenizer(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[SpanRules, Callable[[int], Tokenizer]]:
    config = save_gliner(tmp_path, request.param).config
    rules = SpanRules(
        label_marker=config["ent_token"],
        text_marker=config["sep_token"],
        max_words=30,
        max_width=config["max_width"],
    )

    def make(limit: int) -> Tokenizer:
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.enable_truncation(limit)
        return tokenizer

    return rules, make


@pytest.mark.parametrize("room", [1, 2, 7, 25, 400])
def test_rows_equal_those_of_labels_and_words_tokenised_at_once(
    room: int, rules_and_tokenizer: tuple[SpanRules, Callable[[int], Tokenizer]]
) -> None:
    rules, make = rules_and_tokenizer
    prompt = [word for label in LABELS for word in (rules.label_marker, label)]
    prompt.append(rules.text_marker)
    limit = len(make(1000).encode(prompt, is_pretokenized=True).ids) + room
    tokenizer = make(limit)
    rows = LabelledTexts(tokenizer, rules, limit).rows(TEXTS, LABELS)
    for text, row in zip(TEXTS, rows, strict=True):
        words = [match.span() for match in _WORD.finditer(text)]
        kept = words[: rules.max_words]
        inputs = [*prompt, *(text[start:end] for start, end in kept)]
        expected = tokenizer.encode(inputs, is_pretokenized=True)
        first = first_tokens(expected.word_ids)
        assert row.ids == expected.ids
        assert row.truncated == (bool(expected.overflowing) or len(words) > len(kept))
        assert row.labels == tuple(first[2 * index] for index in range(len(LABELS)))
        places = {first[word]: kept[word - len(prompt)] for word in first if word >= len(prompt)}
        assert row.offsets == [places.get(position) for position in range(len(expected.ids))]
        assert [position for position in row.words if position >= 0] == [*places]


def test_labels_are_tokenised_once(
    rules_and_tokenizer: tuple[SpanRules, Callable[[int], Tokenizer]],
) -> None:
    rules, make = rules_and_tokenizer
    spy: Any = SpyTokenizer(make(100))
    LabelledTexts(spy, rules, 100).rows(["the"] * 50, LABELS)
    assert [spy.words.count(label) for label in LABELS] == [1] * len(LABELS)


def test_labels_that_fill_the_maximum_length_are_refused(
    rules_and_tokenizer: tuple[SpanRules, Callable[[int], Tokenizer]],
) -> None:
    rules, make = rules_and_tokenizer
    with pytest.raises(InvalidInput, match="3 labels leave no room") as raised:
        LabelledTexts(make(12), rules, 12).rows(["the"], LABELS)
    assert (raised.value.code, raised.value.pointer) == ("too_long", "/labels")
