"""Words of texts, from the tokens of three kinds of tokenizers."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from models.artifact import Artifact
from service.debug.pipeline.words import words_of
from service.inference.tokenizing.encodings import spans_of
from service.inference.tokenizing.rows import Row, TokenizedText
from tests.small_tokenizers import TOKENIZERS


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest, small_artifact: Artifact) -> Tokenizer:
    made = TOKENIZERS[request.param](small_artifact)
    made.no_truncation()
    made.no_padding()
    return made


def tokenized(tokenizer: Tokenizer, text: str) -> TokenizedText:
    encoding = tokenizer.encode(text)
    spans = spans_of(encoding, 0)
    indices = [None if span is None else 0 for span in spans]
    return TokenizedText([text], Row(encoding.ids, False, 0), encoding.tokens, spans, indices, {})


def split(tokenizer: Tokenizer, text: str) -> list[str]:
    return [text[word.start : word.end] for word in words_of(tokenized(tokenizer, text))]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The cats weren't purring.", ["The", "cats", "weren't", "purring", "."]),
        ("It don\u2019t  cost $3.14, or 1,000!",
         ["It", "don\u2019t", "cost", "$", "3.14", ",", "or", "1,000", "!"]),
        ("'quoted' (loudly): yes...", ["'", "quoted", "'", "(", "loudly", "):", "yes", "..."]),
        ("one\ntwo\n\n three \t", ["one", "two", "three"]),
        ("snake_case, C++", ["snake", "_", "case", ",", "C", "++"]),
        ("na\u00efve e\u0301te\u0301", ["na\u00efve", "e\u0301te\u0301"]),
        ("\u0939\u0948 ok", ["\u0939\u0948", "ok"]),
        ("\U0001f642\U0001f44d\U0001f3fd ok", ["\U0001f642\U0001f44d\U0001f3fd", "ok"]),
    ],
)  # fmt: skip
def test_words_of_a_text_are_the_same_for_every_tokenizer(
    tokenizer: Tokenizer, text: str, words: list[str]
) -> None:
    assert split(tokenizer, text) == words


def test_words_of_chinese_and_thai_are_tokens(tokenizer: Tokenizer) -> None:
    text = "\u6211\u559c\u6b22\u732b\u3002 ok"
    words = words_of(tokenized(tokenizer, text))
    assert words[-1].end == len(text)
    assert text[words[-2].start : words[-2].end] == "\u3002"
    # Unigram has one unknown token for all characters, and the others at least one for each.
    spans = {tokenized(tokenizer, text).spans[token] for token in words[0].tokens}
    assert (words[0].start, words[0].end) == (0, max(end for _, end in filter(None, spans)))
    thai = "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35"
    covered = "".join(split(tokenizer, thai))
    assert covered == thai  # with the vowels above the consonants


def test_token_across_two_words_joins_them() -> None:
    text = "-mail now"
    spans = [(0, 2), (2, 5), (5, 6), (6, 9)]
    pieces = TokenizedText([text], Row([4, 5, 6, 7], False, 0), [""] * 4, spans, [0] * 4, {})
    words = words_of(pieces)
    assert [(word.start, word.end, word.tokens) for word in words] == [
        (0, 5, [0, 1]),
        (6, 9, [2, 3]),  # the space belongs to the next word
    ]


def test_tokens_without_a_span_belong_to_no_word() -> None:
    texts = "a b", "c"
    spans = [None, (0, 1), (2, 3), None, (0, 1), (1, 1), None]
    indices = [None, 0, 0, None, 1, 1, None]
    pair = TokenizedText(texts, Row([0] * 7, False, 0), [""] * 7, spans, indices, {})
    assert [(word.text, word.start, word.end, word.tokens) for word in words_of(pair)] == [
        (0, 0, 1, [1]),
        (0, 2, 3, [2]),
        (1, 0, 1, [4, 5]),
    ]


texts = st.lists(
    st.one_of(
        st.sampled_from(["don't", "3.14", "e\u0301", "\u6211\u559c", "<mask>", "\u00bd", "\u200b"]),
        st.sampled_from([" ", "\n", "\u00a0", " \u0301", "-", "\x1c", "."]),
        st.text(min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=20,
).map("".join)


@settings(max_examples=200)
@given(text=texts)
def test_every_token_of_a_text_belongs_to_one_word(tokenizer: Tokenizer, text: str) -> None:
    pieces = tokenized(tokenizer, text)
    words = words_of(pieces)
    expected = [index for index, span in enumerate(pieces.spans) if span is not None]
    assert [token for word in words for token in word.tokens] == expected
    assert all(0 <= word.start <= word.end <= len(text) for word in words)
    assert all(a.end <= b.start for a, b in pairwise(words))
    shown = [text[word.start : word.end] for word in words]
    assert not any(" " in word.strip() for word in shown), (text, shown)
