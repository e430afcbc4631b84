"""Tests of tokenizers that models share."""

import gc
import json
import random
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from models.artifact import Artifact
from models.manifest import TOKENIZER, ArtifactError
from service.inference.tokenizing import plain_texts
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
# Words and punctuation of plain texts, and parts of other texts.
WORDS = st.sampled_from(
    ["The ", "CAT", "can't ", "e-mail, ", "x" * 99, "x" * 101, " ", "  ", "3.14 ", "~!@ ", *PARTS]
) | st.text("abYZ09 .,-'~", max_size=9)
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


def test_added_tokens_that_are_equal_after_normalisation_are_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens([AddedToken("Foo", normalized=True), AddedToken("foo", normalized=False)])
    shared_tokenizer(tokenizer.to_str().encode())
    tokenizer.add_tokens([AddedToken("FOO", normalized=True)])
    own = tokenizer.to_str()
    loads = [Tokenizer.from_str(own) for _ in range(40)]
    assert len({tuple(load.encode("fOO").ids) for load in loads}) > 1
    with pytest.raises(ArtifactError, match="makes the added tokens 'Foo' and 'FOO' equal; export"):
        shared_tokenizer(own.encode())


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


def test_divisions_of_equal_probability_are_those_of_the_scores_in_the_file() -> None:
    # Runs of a sign have many divisions into the same pieces, whose sums differ by rounding alone.
    pieces = [sign * length for sign in ("-", "ha") for length in range(1, 7)]
    for seed in range(20):
        rng = random.Random(seed)  # noqa: S311 - no cryptography
        vocabulary = [("<unk>", 0.0), *((piece, -rng.uniform(3, 14)) for piece in pieces)]
        oracle = Tokenizer(models.Unigram(vocabulary, 0, byte_fallback=False))
        content = oracle.to_str()
        assert json.loads(content)["model"]["vocab"] == [list(entry) for entry in vocabulary]
        shared = SharedTokenizer(content.encode())
        texts = [piece * count for piece in ("-", "ha") for count in range(7, 40)]
        expected = [encoding.ids for encoding in oracle.encode_batch(texts)]
        for variant in (shared.variant(40), shared.variant(None)):
            assert [encoding.ids for encoding in variant.encode_batch(texts)] == expected


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
    @example(["an elan "], True)  # as an added token is normalised
    @given(TEXTS, st.booleans())
    def check(texts: list[str], with_special: bool) -> None:
        expected = oracle.encode_batch(texts, add_special_tokens=with_special)
        actual = encodings.encode_truncated(texts, 7, with_offsets=True, with_special=with_special)
        for a, b in zip(actual, expected, strict=True):
            assert (a.ids, a.offsets, a.tokens) == (b.ids, b.offsets, b.tokens)
            assert a.special_tokens_mask == b.special_tokens_mask
            assert [each.ids for each in a.overflowing] == [each.ids for each in b.overflowing]
        is_plain.update(normalized(shared, text) is not None for text in texts)

    check()
    assert is_plain == {False, change is not without_normalizer}


def test_plain_texts_are_ascii_without_control_characters_and_added_tokens(content: bytes) -> None:
    shared = SharedTokenizer(content)
    assert normalized(shared, "The CAT.") == "the cat."
    others = "[CLS]", "a [", "a\tb", "é", "\x7f"
    assert [normalized(shared, text) for text in others] == [None] * 5


def with_special_tokens_of_roberta(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))


def without_special_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")


@pytest.mark.parametrize(
    "change",
    [
        lowercasing,
        cased,
        with_normalized_token,
        with_special_tokens_of_roberta,
        without_special_tokens,
    ],
)
@pytest.mark.parametrize("kept_words", [plain_texts._MAX_WORDS, 9])
def test_plain_texts_have_the_tokens_of_their_words(
    content: bytes,
    change: Callable[[Tokenizer], None],
    kept_words: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain_texts, "_MAX_WORDS", kept_words)
    oracle = Tokenizer.from_buffer(content)
    oracle.no_truncation()
    change(oracle)
    own = SharedTokenizer(oracle.to_str().encode()).plain_texts
    assert own is not None
    found = 0

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.lists(WORDS, max_size=12).map("".join))
    def check(text: str) -> None:
        nonlocal found
        for _ in range(3):  # the words of a text are learnt a few at a time
            ids = own.ids(text)
            if ids is not None:
                found += 1
                assert ids == oracle.encode(text).ids
        if own.normalize(text) is None:
            assert ids is None

    check()
    assert found > 30
    assert len(own._ids) <= kept_words + plain_texts._MAX_NEW_WORDS


def test_words_of_a_text_are_looked_up_a_few_at_a_time(content: bytes) -> None:
    own = SharedTokenizer(content).plain_texts
    assert own is not None
    text = "one two three four five six"
    assert own.ids("one two") is not None
    assert own.ids("three four five six seven") is None
    assert own.ids("three four five six seven") is not None
    assert own.ids(text) == Tokenizer.from_buffer(content).encode(text).ids
    assert own.ids("one " + "x" * 24) is not None
    assert own.ids("one " + "x" * 25) is None  # it could have many tokens
    assert own.ids("!" * 10) is not None


def test_words_that_another_thread_adds_meanwhile_are_known(content: bytes) -> None:
    class Late(dict[str, list[int]]):
        misses = 1

        def __getitem__(self, word: str) -> list[int]:
            if self.misses:
                self.misses -= 1
                raise KeyError(word)
            return super().__getitem__(word)

    own = SharedTokenizer(content).plain_texts
    assert own is not None
    ids = own.ids("one two")
    own._ids = Late(own._ids)
    assert own.ids("one two") == ids == Tokenizer.from_buffer(content).encode("one two").ids


@pytest.mark.parametrize(
    "pre_tokenizer", [pre_tokenizers.Whitespace(), pre_tokenizers.WhitespaceSplit()]
)
def test_other_pre_tokenizers_have_no_words(
    content: bytes, pre_tokenizer: pre_tokenizers.PreTokenizer
) -> None:
    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.pre_tokenizer = pre_tokenizer
    own = SharedTokenizer(tokenizer.to_str().encode()).plain_texts
    assert own is not None
    assert own.normalize("the cat") == "the cat"
    assert own.ids("the cat") is None


def test_short_texts_are_tokenised_by_their_words_unless_they_are_too_long_for_the_model(
    content: bytes,
) -> None:
    encodings = TextEncodings(SharedTokenizer(content), 100)
    short = "one two"
    ids = Tokenizer.from_buffer(content).encode(short).ids
    encoded = encodings.of_words([short, short], len(ids))
    assert encoded is not None
    assert [each.ids for each in encoded] == [ids, ids]
    assert encodings.of_words([short], len(ids) - 1) is None
    assert encodings.of_words([short, "naïve"], len(ids)) is None
    assert encodings.of_words(["one " * 26], 100) is None  # more than may be tokenised at once


def normalized(shared: SharedTokenizer, text: str) -> str | None:
    return None if shared.plain_texts is None else shared.plain_texts.normalize(text)
