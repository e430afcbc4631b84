"""Long texts are tokenised in part, with the result of tokenising them whole."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    Encoding,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from models.artifact import Artifact
from models.manifest import TOKENIZER, TokenRules
from service.inference.call_options import OnOverflow
from service.inference.errors import InvalidInput
from service.inference.tokenizing.pair_rows import PairRows
from service.inference.tokenizing.text_parts import part_of, tokens_span_words
from service.inference.tokenizing.tokenizer import TextTokenizer
from tests.sentences import SENTENCES
from tests.small_tokenizers import TOKENIZERS, served_by

MAX_TOKENS = 24


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def tokenizer(
    request: pytest.FixtureRequest,
    small_artifact: Artifact,
    tmp_path_factory: pytest.TempPathFactory,
) -> TextTokenizer:
    """A tokenizer that truncates to `MAX_TOKENS` tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return served_by(TOKENIZERS[request.param](small_artifact), small_artifact, folder, MAX_TOKENS)


words = st.one_of(
    st.sampled_from([word for sentence in SENTENCES for word in sentence.split()]),
    st.sampled_from(
        ["[SEP]", "<mask>", "don't", "x" * 120, "日本語の文章です", "é", "e\u0301", "٣", "_"]
    ),
    st.text(min_size=1, max_size=6),
)
spaces = st.sampled_from(
    [" ", " ", " ", "  ", "\n", "\t", "\u00a0", "\u3000", " \u0301", "-", "\x1c", "\x85"]
)
passages = st.lists(st.tuples(words, spaces), min_size=1, max_size=60).map(
    lambda pairs: "".join(word + space for word, space in pairs)
)
texts = passages.map(lambda passage: passage * 30)


@pytest.mark.slow
@settings(max_examples=300)
@given(text=texts, on_overflow=st.sampled_from(["truncate", "truncate_left"]))
def test_part_of_a_text_gives_the_tokens_of_the_whole(
    tokenizer: TextTokenizer, text: str, on_overflow: OnOverflow
) -> None:
    is_left = on_overflow == "truncate_left"
    whole = tokenizer.shared.variant(MAX_TOKENS, is_left=is_left).encode(text)
    (part,) = tokenizer.encodings.encode_truncated([text], MAX_TOKENS, is_left=is_left)
    assert part.ids == whole.ids
    assert bool(part.overflowing) == bool(whole.overflowing)


def test_offsets_of_a_part_are_those_of_the_whole(tokenizer: TextTokenizer) -> None:
    text = " ".join(SENTENCES) * 20
    for is_left in (False, True):
        whole = tokenizer.shared.variant(MAX_TOKENS, is_left=is_left).encode(text)
        (part,) = tokenizer.encodings.encode_truncated(
            [text], MAX_TOKENS, is_left=is_left, with_offsets=True
        )
        assert part.offsets == whole.offsets


def test_only_a_part_of_a_long_text_is_tokenised(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encodings = tokenizer.encodings
    ordinary = encodings._encode

    def counting(*arguments: Any) -> object:  # noqa: ANN401
        lengths.extend(map(len, arguments[-1]))
        return ordinary(*arguments)

    monkeypatch.setattr(encodings, "_encode", counting)
    long, short = "the cat sat on the mat and looked " * 30_000, "a cat"
    for is_left in (False, True):
        first, second, third = encodings.encode_truncated(
            [long, short, long], MAX_TOKENS, is_left=is_left
        )
        assert first.ids == third.ids
        assert second.ids == encodings.encode_truncated([short], MAX_TOKENS)[0].ids
    assert sum(lengths) < 10_000


def test_part_grows_until_it_has_enough_tokens(tokenizer: TextTokenizer) -> None:
    # Spaces and long words have few tokens, so the first part has too few.
    text = ("x" * 150 + " y" + " " * 700) * 200
    whole = tokenizer.shared.variant(MAX_TOKENS).encode(text)
    assert tokenizer.encodings.encode_truncated([text], MAX_TOKENS)[0].ids == whole.ids


def test_parts_end_at_word_boundaries() -> None:
    text = "one two three " * 100
    assert part_of(text, 20) == "one two three one"
    assert part_of(text, 21, at_end=True) == " three one two three "
    assert part_of(text, 700) == text  # not much longer
    assert part_of("x" * 1000, 20) == "x" * 1000  # no boundary
    assert part_of("a \u0301b" * 1000, 20) == "a \u0301b" * 1000  # a space with an accent


def _trained(model: Any, trainer: Any, **steps: object) -> Tokenizer:  # noqa: ANN401
    tokenizer = Tokenizer(model)
    for name, step in steps.items():
        setattr(tokenizer, name, step)
    options = {"vocab_size": 400, "special_tokens": ["[UNK]"], "show_progress": False}
    tokenizer.train_from_iterator([*SENTENCES, "a cat " * 20], trainer(**options))
    return tokenizer


def _words(**steps: object) -> Tokenizer:
    model = models.WordPiece(unk_token="[UNK]")  # noqa: S106
    return _trained(model, trainers.WordPieceTrainer, **steps)


def _pairs(**steps: object) -> Tokenizer:
    return _trained(models.BPE(), trainers.BpeTrainer, **steps)


SPANNING: dict[str, Callable[[], Tokenizer]] = {
    "a word of 100 characters is unknown": lambda: _words(
        pre_tokenizer=pre_tokenizers.CharDelimiterSplit("|")
    ),
    "all of the text is a word": _words,
    "parts have a fixed length": lambda: _pairs(pre_tokenizer=pre_tokenizers.FixedLength(5)),
    "tokens have several words": lambda: _pairs(
        pre_tokenizer=pre_tokenizers.Metaspace(split=False)
    ),
    "spaces are removed": lambda: _pairs(normalizer=normalizers.Replace(" ", "")),
}


@pytest.mark.parametrize("case", SPANNING)
@pytest.mark.parametrize("on_overflow", ["truncate", "truncate_left"])
def test_text_is_tokenised_whole_if_its_words_are_not_apart(
    small_artifact: Artifact, tmp_path: Path, case: str, on_overflow: OnOverflow
) -> None:
    limit, sentence = 8, "The cat sat on the mat. "
    served = served_by(SPANNING[case](), small_artifact, tmp_path, limit)
    oracle = served.shared.variant(limit, is_left=on_overflow == "truncate_left")
    for text in (sentence * 99, f"{sentence * 5}|" * 20, "a cat " * 999):
        (row,) = served.rows_of_texts([text], None, on_overflow)
        assert row.ids == oracle.encode(text).ids


@pytest.mark.parametrize(
    "steps",
    [
        {},
        {"normalizer": normalizers.Replace(" ", "▁")},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(use_regex=False)},
    ],
)
def test_tokens_of_one_word_span_none(steps: dict[str, object]) -> None:
    words = Tokenizer(models.BPE({"▁": 0, "Ġ": 1, "▁the": 2, "Ġcat": 3, "\n\n": 4}, []))
    for name, step in steps.items():
        setattr(words, name, step)
    assert not tokens_span_words(words)
    words.add_tokens(["New York"])
    assert tokens_span_words(words)


def test_text_is_tokenised_whole_if_an_added_token_contains_a_space(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_buffer(small_artifact.read(TOKENIZER))
    # As long as a part, so that every cut of the text is within a token.
    tokenizer.add_tokens(["mat and " * 1000])
    served = served_by(tokenizer, small_artifact, tmp_path, MAX_TOKENS)
    text = "mat and " * 20_000
    whole = served.shared.variant(MAX_TOKENS).encode(text)
    assert len(whole.ids) == 2 + 20
    assert served.encodings.encode_truncated([text], MAX_TOKENS)[0].ids == whole.ids


def assert_pair(tokenizer: TextTokenizer, pair: tuple[str, str], on_overflow: OnOverflow) -> None:
    is_left = on_overflow == "truncate_left"
    oracle = tokenizer.shared.variant(tokenizer.manifest.max_tokens, is_left=is_left)
    expected = oracle.encode(*pair)
    if not expected.ids:
        with pytest.raises(InvalidInput, match="no tokens of its own"):
            PairRows(tokenizer).rows([pair], None, on_overflow)
        return
    (row,) = PairRows(tokenizer).rows([pair], None, on_overflow)
    assert row.ids == expected.ids
    assert row.token_types == expected.type_ids
    assert row.truncated == bool(expected.overflowing)


@settings(max_examples=200)
@given(
    counts=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    on_overflow=st.sampled_from(["truncate", "truncate_left"]),
)
def test_pairs_are_truncated_as_by_tokenizers(
    tokenizer: TextTokenizer, counts: tuple[int, int], on_overflow: OnOverflow
) -> None:
    a, b = (" ".join(["cat", "dog", "bird"] * 14)[: 4 * count] for count in counts)
    assert_pair(tokenizer, (a, b), on_overflow)


@pytest.mark.parametrize("on_overflow", ["truncate", "truncate_left"])
def test_tokenizer_without_latin_letters_reads_pairs(
    on_overflow: OnOverflow, small_artifact: Artifact, tmp_path: Path
) -> None:
    own = Tokenizer(models.BPE({"[SEP]": 0, "[CLS]": 1, "日": 2, "本": 3, "語": 4}, []))
    own.post_processor = processors.BertProcessing(("[SEP]", 0), ("[CLS]", 1))
    tokenizer = served_by(own, small_artifact, tmp_path, 12)
    for pair in (("日本", "語語"), ("日" * 20, "本語"), ("語本" * 20, "日" * 9), ("", "日a本")):
        assert_pair(tokenizer, pair, on_overflow)


# tokenizers keeps every combination of the truncated parts of two texts, so that most texts of the
# pairs are shorter.
texts_of_pairs = st.builds(str.__mul__, passages, st.sampled_from([1, 10, 30]))


@pytest.mark.slow
@settings(max_examples=50)
@given(
    pair=st.tuples(texts_of_pairs, texts_of_pairs),
    on_overflow=st.sampled_from(["truncate", "truncate_left"]),
)
def test_long_pairs_have_the_tokens_of_the_whole_texts(
    tokenizer: TextTokenizer, pair: tuple[str, str], on_overflow: OnOverflow
) -> None:
    assert_pair(tokenizer, pair, on_overflow)


def test_query_of_many_documents_is_tokenised_once(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    ordinary = tokenizer.encodings.without_special

    def recording(batch: list[str]) -> list[Encoding]:
        seen.extend(batch)
        return ordinary(batch)

    monkeypatch.setattr(tokenizer.encodings, "without_special", recording)
    query = "the cat sat on the mat and looked " * 3_000
    documents = [f"document {index}" for index in range(50)]
    pairs = [(query, document) for document in documents]
    rows = PairRows(tokenizer).rows(pairs, None, "truncate")
    assert len(rows) == 50
    assert len(seen) == 51
    assert max(map(len, seen)) < 2_000


NOTHING = ["", " ", "\t\n", "\0", "\u200b", "\u3000\ufeff"]


@pytest.mark.parametrize("nothing", NOTHING)
def test_text_without_tokens_of_its_own_has_those_of_the_pair(
    small_artifact: Artifact, nothing: str
) -> None:
    tokenizer = TextTokenizer(small_artifact, max_chars=1000)
    for pair in (("cat", nothing), (nothing, "cat"), (nothing, nothing)):
        assert_pair(tokenizer, pair, "error")
    (row,) = tokenizer.rows_of_texts([nothing], None, "error")
    assert row.ids == tokenizer.rows_of_texts(["\u200b"], None, "error")[0].ids == [101, 102]


def test_query_without_tokens_of_its_own_has_those_of_the_prompt(small_artifact: Artifact) -> None:
    manifest = replace(small_artifact.manifest, prompts={"ask": "question: "})
    tokenizer = TextTokenizer(Artifact(small_artifact.path, manifest), max_chars=1000)
    (row,) = PairRows(tokenizer).rows([("cat", "dog")], "ask", "truncate")
    assert len(row.ids) == 3 + 2 + 2  # question, :
    for query in NOTHING:
        (own,) = PairRows(tokenizer).rows([(query, "dog")], "ask", "truncate")
        assert own.ids == [token for token in row.ids if token != tokenizer.token_id("cat")]


@pytest.mark.parametrize("kind", ["byte-level BPE", "unigram"])
def test_text_without_any_token_is_refused(
    kind: str, small_artifact: Artifact, tmp_path: Path
) -> None:
    made = TOKENIZERS[kind](small_artifact)  # adds no special tokens
    tokenizer = served_by(made, small_artifact, tmp_path, MAX_TOKENS)
    nothing = "" if kind == "byte-level BPE" else " "
    with pytest.raises(InvalidInput) as of_text:
        tokenizer.rows_of_texts(["cat", nothing], None, "truncate")
    with pytest.raises(InvalidInput) as of_pair:
        PairRows(tokenizer).rows([("cat", nothing), ("", nothing)], None, "truncate")
    for raised in (of_text, of_pair):
        assert (raised.value.code, raised.value.index) == ("no_tokens", 1)


def test_text_whose_tokens_the_prompt_absorbs_is_refused(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    made = TOKENIZERS["unigram"](small_artifact)
    served = served_by(made, small_artifact, tmp_path, MAX_TOKENS)
    manifest = replace(served.manifest, prompts={"ask": "cat: "}, include_prompt=False)
    tokenizer = TextTokenizer(Artifact(tmp_path, manifest), max_chars=1000)
    assert len(tokenizer.rows_of_texts(["cat"], "ask", "error")[0].ids) > 0
    with pytest.raises(InvalidInput, match="joins them to the prompt") as raised:
        tokenizer.rows_of_texts(["cat", " "], "ask", "error")
    assert (raised.value.code, raised.value.index) == ("no_tokens", 1)


@pytest.mark.parametrize("looks_up", [False, True])
def test_unknown_parts_are_those_within_the_length_of_texts_with_the_prompt(
    small_artifact: Artifact, looks_up: bool
) -> None:
    rules = {"query": TokenRules(max_tokens=2 * MAX_TOKENS, looks_up=looks_up)}
    manifest = replace(small_artifact.manifest, max_tokens=MAX_TOKENS, token_rules=rules)
    tokenizer = TextTokenizer(Artifact(small_artifact.path, manifest), max_chars=1000)
    spans = [(at, at + 1) for at in range(0, 400, 2)]
    for prompt_name, limit in ((None, MAX_TOKENS), ("query", 2 * MAX_TOKENS)):
        count = limit if looks_up and prompt_name else limit - 2  # [CLS] and [SEP]
        text = "\N{SAUROPOD} " * 200
        assert tokenizer.unknown_spans(text, prompt_name, "truncate") == spans[:count]


@pytest.mark.parametrize("text", ["", "a\ud83d", "\udfff"])
def test_first_text_that_cannot_be_encoded_is_named(small_artifact: Artifact, text: str) -> None:
    tokenizer = TextTokenizer(small_artifact, max_chars=1000)
    code = "invalid" if text else "empty"
    for refused in (
        lambda: tokenizer.rows(["fine", text, text], None, "truncate"),
        lambda: tokenizer.tokenize(["fine", text, text], None, True, 100),
    ):
        with pytest.raises(InvalidInput) as raised:
            refused()
        assert (raised.value.code, raised.value.index) == (code, 1)
