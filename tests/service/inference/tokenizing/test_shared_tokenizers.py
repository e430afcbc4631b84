"""Tests of tokenizers that models share."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers

from models.artifact import TOKENIZER, Artifact
from service.inference.tokenizing.encodings import TextEncodings
from service.inference.tokenizing.shared_tokenizers import SharedTokenizer, shared_tokenizer

TEXT = "one two three four five six seven"

# Texts that the normalizer of BERT leaves, lowercases or changes, with added tokens in any case.
PARTS = (
    "The CAT ",
    "naïve ",
    "[CLS]",
    "[cls]",
    "[",
    "Élan",
    "elan ",
    "\t",
    "\n",
    "\x7f",
    "\x00",
    "語",
)
TEXTS = st.lists(
    st.lists(st.sampled_from(PARTS) | st.text("abYZ09 .,-'[]~", max_size=9), max_size=6).map(
        "".join
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture
def content(small_artifact: Artifact) -> bytes:
    """The content of a tokenizer file."""
    return small_artifact.read(TOKENIZER)


def test_equal_files_share_a_tokenizer_and_others_do_not(content: bytes) -> None:
    first = shared_tokenizer(content)
    assert shared_tokenizer(bytes(content)) is first
    assert shared_tokenizer(content + b"\n") is not first


def test_threads_that_load_equal_files_get_one_tokenizer(content: bytes) -> None:
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(shared_tokenizer, [content] * 32))
        assert len({id(shared) for shared in loaded}) == 1
        variants = list(pool.map(loaded[0].variant, [5, 6] * 16))
    assert len({id(variant) for variant in variants}) == 2


def test_tokenizer_is_freed_with_its_last_user(content: bytes) -> None:
    users = [shared_tokenizer(content + b" "), shared_tokenizer(content + b" ")]
    kept = weakref.ref(users[0])
    users.pop()
    gc.collect()
    assert kept() is not None
    users.pop()
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("first", [None, 4])
def test_variants_truncate_as_the_library_does(content: bytes, first: int | None) -> None:
    shared = SharedTokenizer(content)
    shared.variant(first)
    for limit, side in ((4, "right"), (4, "left"), (6, "right"), (None, "right")):
        oracle = Tokenizer.from_buffer(content)
        oracle.no_truncation()
        if limit is not None:
            oracle.enable_truncation(limit, direction=side)
        variant = shared.variant(limit, is_left=side == "left")
        assert variant.encode(TEXT).ids == oracle.encode(TEXT).ids


def lowercasing(_: Tokenizer) -> None:
    """Leave the tokenizer as it is."""


def cased(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)


def with_normalized_token(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("Élan", normalized=True)])


def without_normalizer(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([])


@pytest.mark.parametrize("change", [lowercasing, cased, with_normalized_token, without_normalizer])
def test_plain_texts_have_the_tokens_that_they_have_with_the_normalizer(
    content: bytes, change: Callable[[Tokenizer], None]
) -> None:
    oracle = Tokenizer.from_buffer(content)
    oracle.no_truncation()
    change(oracle)
    shared = SharedTokenizer(oracle.to_str().encode())
    encodings = TextEncodings(shared, 10_000)
    oracle.enable_truncation(7)
    is_plain: set[bool] = set()

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(TEXTS, st.booleans())
    def check(texts: list[str], with_special: bool) -> None:
        expected = oracle.encode_batch(texts, add_special_tokens=with_special)
        actual = encodings.truncated(texts, 7, with_offsets=True, with_special=with_special)
        for a, b in zip(actual, expected, strict=True):
            assert (a.ids, a.offsets, a.tokens) == (b.ids, b.offsets, b.tokens)
            assert a.special_tokens_mask == b.special_tokens_mask
            assert [each.ids for each in a.overflowing] == [each.ids for each in b.overflowing]
        is_plain.update(shared.plain(text) is not None for text in texts)

    check()
    assert is_plain == {False, change is not without_normalizer}


def test_plain_texts_are_ascii_without_control_characters_and_added_tokens(content: bytes) -> None:
    shared = SharedTokenizer(content)
    assert shared.plain("The CAT.") == "the cat."
    assert [shared.plain(text) for text in ("[CLS]", "a [", "a\tb", "é", "\x7f")] == [None] * 5
