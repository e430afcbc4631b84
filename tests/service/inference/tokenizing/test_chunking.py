"""Chunks of texts: sizes, spans and boundaries, with tokenizers of three kinds."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
import regex
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from models.artifact import Artifact
from models.manifest import TOKENIZER
from service.inference.errors import InvalidInput
from service.inference.results.chunked_texts import ChunkedTexts
from service.inference.tokenizing.chunking import Chunk, Chunking, Strategy, split
from service.inference.tokenizing.sentences import paragraph_starts, sentence_starts
from service.inference.tokenizing.tokenizer import TextTokenizer
from tests.sentences import SENTENCES
from tests.small_tokenizers import TOKENIZERS, served_by, untrimmed_bpe

MAX_TOKENS = 66
KINDS = {**TOKENIZERS, "untrimmed BPE": untrimmed_bpe}
LARGE = 10**6


class TokenizerKind(NamedTuple):
    """A tokenizer of the service, and the same of the tokenizers library."""

    served: TextTokenizer
    plain: Tokenizer
    artifact: Artifact


@pytest.fixture(scope="module", params=list(KINDS))
def kind(
    request: pytest.FixtureRequest,
    small_artifact: Artifact,
    tmp_path_factory: pytest.TempPathFactory,
) -> TokenizerKind:
    return kind_of(request.param, small_artifact, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def word_pieces(
    small_artifact: Artifact, tmp_path_factory: pytest.TempPathFactory
) -> TokenizerKind:
    return kind_of("WordPiece", small_artifact, tmp_path_factory.mktemp("word-pieces"))


def kind_of(name: str, artifact: Artifact, folder: Path) -> TokenizerKind:
    tokenizer = served_by(KINDS[name](artifact), artifact, folder, MAX_TOKENS)
    plain = Tokenizer.from_file(str(folder / TOKENIZER))
    plain.no_truncation()
    return TokenizerKind(tokenizer, plain, Artifact(folder, tokenizer.manifest))


def chunks_of(kind: TokenizerKind, text: str, **options: object) -> list[Chunk]:
    chunked = ChunkedTexts(kind.served, [text], Chunking(**options), LARGE)  # type: ignore[arg-type]
    chunked.rows(None)
    return chunked.chunks[0]


def words_of(text: str, chunks: list[Chunk]) -> list[str]:
    return [text[chunk.start : chunk.end] for chunk in chunks]


def tokens_of(plain: Tokenizer, text: str) -> int:
    return len(plain.encode(text, add_special_tokens=False).ids)


words = st.one_of(
    st.sampled_from([word for sentence in SENTENCES for word in sentence.split()]),
    st.sampled_from(
        ["[SEP]", "<mask>", "x" * 40, "日本語。文章です！", "e\u0301", "👩‍💻", "unhappiness"]
    ),
    st.text(min_size=1, max_size=6),
    st.sampled_from(["\0", "\u200b", " \0 ", "\n \n"]),
)
spaces = st.sampled_from(
    [" ", " ", " ", "  ", "\n", "\n\n", ". ", "! ", "?\n", "\u3000", "-", "", "\x85"]
)
passages = st.lists(st.tuples(words, spaces), min_size=1, max_size=80).map(
    lambda pairs: "".join(word + space for word, space in pairs)
) | st.text(st.sampled_from(" \t\n\0\u200b\u3000"), min_size=1, max_size=200)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    text=passages,
    strategy=st.sampled_from(get_args(Strategy)),
    size=st.integers(20, MAX_TOKENS - 2),
    overlap=st.integers(0, 19),
    late=st.booleans(),
)
@example(text="\u200b" + "\u3000" * 9, strategy="tokens", size=20, overlap=0, late=False)
def test_chunks_are_ordered_cover_the_text_and_have_at_most_size_tokens(
    kind: TokenizerKind, text: str, strategy: Strategy, size: int, overlap: int, late: bool
) -> None:
    if not kind.plain.encode(text).ids:
        with pytest.raises(InvalidInput, match="no tokens of its own"):
            chunks_of(kind, text, late=late)
        return
    # Of a text that is encoded as a whole, the tokens of the white space behind a chunk count too,
    # beside those of a character, which are at most four.
    runs = re.findall(r"\s+", text) if late and not text.isspace() else []
    assume(all(len(kind.plain.encode(run).ids) < size - 8 for run in runs))
    chunks = chunks_of(kind, text, strategy=strategy, size=size, overlap=overlap, late=late)
    for previous, chunk in pairwise(chunks):
        assert previous.start < chunk.start
        assert previous.end < chunk.end
        assert overlap or not text[previous.end : chunk.start].strip()
        assert overlap or previous.end <= chunk.start
    covered = {index for chunk in chunks for index in range(chunk.start, chunk.end)}
    is_blank = text.isspace()
    assert covered >= {i for i, char in enumerate(text) if is_blank or not char.isspace()}
    for part, chunk in zip(words_of(text, chunks), chunks, strict=True):
        assert part == (part if is_blank else part.strip()) != ""
        assert chunk.tokens <= size
        if not late:
            assert chunk.tokens == tokens_of(kind.plain, part)


@pytest.mark.slow
@settings(max_examples=100)
@given(text=passages, size=st.integers(20, 40), overlap=st.integers(0, 19))
def test_windows_of_tokens_are_full_and_overlap_exactly(
    word_pieces: TokenizerKind, text: str, size: int, overlap: int
) -> None:
    plain = word_pieces.plain
    assume(text.strip() and tokens_of(plain, text))
    spans = plain.encode(text, add_special_tokens=False).offsets
    starts = [start for start, _ in spans]
    # Without characters of several tokens, as of some normalised ones.
    assume(all(a[1] <= b[0] for a, b in pairwise(spans)))
    chunks = chunks_of(word_pieces, text, size=size, overlap=overlap, late=True)
    assert [chunk.tokens for chunk in chunks[:-1]] == [size] * (len(chunks) - 1)
    first = 0
    for chunk in chunks:
        assert first == 0 or starts[first] == chunk.start
        first += size - overlap


@pytest.mark.slow
@settings(max_examples=100)
@given(
    text=passages,
    strategy=st.sampled_from(["sentences", "paragraphs"]),
    size=st.integers(20, 40),
)
@example(text=f"\x08\n\nHello {'x' * 40} ", strategy="sentences", size=20)
def test_chunk_ends_at_the_last_boundary_that_fits(
    kind: TokenizerKind, text: str, strategy: Strategy, size: int
) -> None:
    assume(text.strip() and tokens_of(kind.plain, text))
    chunks = chunks_of(kind, text, strategy=strategy, size=size)
    levels = {"paragraphs": [paragraph_starts, sentence_starts], "sentences": [sentence_starts]}
    offsets = kind.plain.encode(text, add_special_tokens=False).offsets
    spans = [(b - len(text[a:b].lstrip()), b) for a, b in offsets]
    for starts_of in levels[strategy]:
        # A boundary within a token, such as one of two Chinese characters, is none.
        between = [p for p in starts_of(text) if not any(a < p < b for a, b in spans)]
        starts = [min((a for a, _ in spans if a >= p), default=len(text)) for p in between]
        boundaries = {len(text) - len(text[start:].lstrip()) for start in starts}
        for chunk, following in pairwise(chunks):
            # A chunk has a token: a boundary behind characters without any is none.
            first = min(a for a, _ in spans if a >= chunk.start)
            inside = [b for b in boundaries if first < b <= chunk.end]
            assert following.start in boundaries or not inside
        if all(chunk.start in boundaries for chunk in chunks[1:]):
            break


SENTENCE_CASES = [
    "The cat sat. |It slept! |Did it?",
    "He paid 3.50 for it. |Done",
    'She said "Go!" |He went. |(It rained.) |End',
    "See e.g. this one. |And this",
    'See e.g. "cats", cf. (dogs) and z.B. »hunde« there. |"It rained." |End',
    'The firm (Acme Inc.) was "sold etc." and closed. |It said “No.” |He left.',
    "今天很好。|我们去公园！|「走吧。」|好",
    "wrapped\nline. |First\n\n|Title\n\n|Text",
    "क्या हाल है। |ठीक है",
    "Wait... |What?! |Yes…",
    "円は３．１４です。|ｗｗｗ．ａ．ｊｐ．|終",
    "x.y.z",
]


@pytest.mark.parametrize("case", SENTENCE_CASES)
def test_sentences_end_at_terminators_before_white_space(case: str) -> None:
    parts = case.split("|")
    text = "".join(parts)
    starts, position = [], 0
    for part in parts[:-1]:
        position += len(part)
        starts.append(position)
    assert sorted({start for start in sentence_starts(text) if start < len(text)}) == starts


def test_sentences_end_at_the_terminators_of_every_script() -> None:
    # The package regex has Unicode's Sentence_Break; surrogates are no characters.
    plane = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10000)]))
    terminators = regex.findall(r"\p{Sentence_Break=STerm}", plane)
    assert {"։", "።", "។", "။"} <= set(terminators)
    for char in terminators:
        assert sentence_starts(f"א{char} א") == [3], f"U+{ord(char):04X}"


def test_sentences_are_packed_and_whole_last_ones_repeated(word_pieces: TokenizerKind) -> None:
    text = "One two three. Four five. Six seven. Eight nine ten. Eleven."
    chunks = chunks_of(word_pieces, text, strategy="sentences", size=8)
    assert words_of(text, chunks) == [
        "One two three. Four five.",
        "Six seven. Eight nine ten.",
        "Eleven.",
    ]
    chunks = chunks_of(word_pieces, text, strategy="sentences", size=8, overlap=3)
    assert words_of(text, chunks) == [
        "One two three. Four five.",
        "Four five. Six seven.",
        "Six seven. Eight nine ten.",
        "Eleven.",
    ]


def test_long_sentence_falls_back_to_tokens_and_long_paragraph_to_sentences(
    word_pieces: TokenizerKind,
) -> None:
    text = "Short one.\n\nA cat sat here. It slept.\n\none two three four five six seven. End."
    chunks = chunks_of(word_pieces, text, strategy="paragraphs", size=6)
    assert words_of(text, chunks) == [
        "Short one.",
        "A cat sat here.",
        "It slept.",
        "one two three four five six",
        "seven. End.",
    ]
    assert words_of(text, chunks_of(word_pieces, text, strategy="paragraphs", size=8)) == [
        "Short one.",
        "A cat sat here. It slept.",
        "one two three four five six seven.",
        "End.",
    ]


def test_characters_of_several_tokens_are_never_split(kind: TokenizerKind) -> None:
    text = "🎉👩‍💻漢字é½" * 20
    for size in (7, 8, 9, 10, 11, 12):
        for late in (False, True):
            chunks = chunks_of(kind, text, size=size, late=late)
            assert "".join(words_of(text, chunks)) == text


def test_token_of_parts_of_two_characters_is_never_split() -> None:
    # As in byte-level BPE, the second token has the last byte of "a" and the first of "b".
    spans = [(0, 1), (0, 2), (1, 2), (2, 3)]
    pieces = list(split("abc", spans, "tokens", 3, 0, lambda _, tokens: (tokens, tokens - 3)))
    assert [(piece.chunk.start, piece.chunk.end) for piece in pieces] == [(0, 2), (2, 3)]
    assert [(piece.first, piece.last) for piece in pieces] == [(0, 3), (3, 4)]
    with pytest.raises(InvalidInput, match="size is too small"):
        list(split("abc", spans, "tokens", 2, 0, lambda _, tokens: (tokens, tokens - 2)))


def test_character_with_more_tokens_than_a_chunk_is_refused(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    kind = kind_of("byte-level BPE", small_artifact, tmp_path)
    with pytest.raises(InvalidInput, match="size is too small") as raised:
        chunks_of(kind, "ab 𓀀", size=2)
    assert raised.value.pointer == "/chunking/size"


def test_chunk_that_grows_when_tokenised_alone_is_shortened(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    # Within the text, "ca" continues a word; alone it begins one, with more tokens.
    kind = kind_of("byte-level BPE", small_artifact, tmp_path)
    text = "".join(SENTENCES).replace(" ", "") * 3
    chunks = chunks_of(kind, text, size=20)
    late = chunks_of(kind, text, size=20, late=True)
    assert max(tokens_of(kind.plain, part) for part in words_of(text, late)) > 20
    assert max(tokens_of(kind.plain, part) for part in words_of(text, chunks)) == 20


def test_chunk_fits_with_a_prompt_whose_tokens_merge_with_the_chunks(kind: TokenizerKind) -> None:
    # "prereceipt" has more tokens than "pre" and "receipt", for most tokenizers.
    manifest = replace(kind.artifact.manifest, prompts={"joined": "pre"})
    tokenizer = TextTokenizer(replace(kind.artifact, manifest=manifest), LARGE)
    text = "receipt. " * 40 + "except The delivered " * 20
    chunked = ChunkedTexts(tokenizer, [text], Chunking(), LARGE)
    rows = chunked.rows("joined")
    assert MAX_TOKENS - 3 <= max(len(row.ids) for row in rows) <= MAX_TOKENS
    parts = words_of(text, chunked.chunks[0])
    assert [row.ids for row in rows] == [
        row.ids for row in tokenizer.rows_of_texts(parts, "joined", "error")
    ]


@pytest.mark.parametrize(
    ("options", "pointer", "message"),
    [
        ({"size": 65}, "/chunking/size", "at most 64 tokens"),
        ({"size": 10, "overlap": 10}, "/chunking/overlap", "less than the size of chunks, 10"),
        ({"overlap": 64}, "/chunking/overlap", "less than the size of chunks, 64"),
        ({"size": 0}, "/chunking/size", "at least 1"),
        ({"overlap": -1}, "/chunking/overlap", "at least 0"),
        ({"strategy": "words"}, "/chunking/strategy", "tokens, sentences, paragraphs"),
    ],
)
def test_invalid_options_are_named(
    word_pieces: TokenizerKind, options: dict[str, object], pointer: str, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as raised:
        chunks_of(word_pieces, "a cat", **options)
    assert raised.value.pointer == pointer


def test_chunks_are_as_large_as_fit_without_a_size(word_pieces: TokenizerKind) -> None:
    chunks = chunks_of(word_pieces, "cat " * 100)
    assert [chunk.tokens for chunk in chunks] == [64, 36]


def test_number_of_chunks_is_limited(word_pieces: TokenizerKind) -> None:
    texts, chunking = ["cat " * 30] * 3, Chunking(size=10)
    ChunkedTexts(word_pieces.served, texts, chunking, 9).rows(None)
    with pytest.raises(InvalidInput, match="more than 8 chunks") as raised:
        ChunkedTexts(word_pieces.served, texts, chunking, 8).rows(None)
    assert raised.value.code == "too_many_inputs"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [(0, 0, 0)]),
        (" \n ", [(0, 3, 0)]),
        (" \u200b ", [(1, 2, 0)]),
        ("\0", [(0, 1, 0)]),
        ("\0 cat \0", [(0, 7, 1)]),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_text_without_tokens_is_one_chunk(
    word_pieces: TokenizerKind, text: str, expected: list[tuple[int, int, int]], late: bool
) -> None:
    for strategy in get_args(Strategy):
        chunks = chunks_of(word_pieces, text, strategy=strategy, size=1, late=late)
        assert [(chunk.start, chunk.end, chunk.tokens) for chunk in chunks] == expected


def test_white_space_that_has_tokens_is_divided_like_other_characters(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    kind = kind_of("untrimmed BPE", small_artifact, tmp_path)
    text = "\n\t" * 20
    assert tokens_of(kind.plain, text) == 40
    chunks = chunks_of(kind, text, size=16)
    assert [(chunk.start, chunk.end, chunk.tokens) for chunk in chunks] == [
        (0, 16, 16),
        (16, 32, 16),
        (32, 40, 8),
    ]
