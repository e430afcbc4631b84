"""Texts of any characters have the tokens and vectors that the reference libraries give them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

import vitrine
from models.artifact import Artifact
from models.export.checkpoint import load
from models.export.model_folder import ModelFolder
from models.export.tokenizer_file import read_tokenizer
from service.inference.call_options import OnOverflow
from service.inference.errors import InvalidInput
from service.inference.tokenizing.pair_rows import PairRows
from service.inference.tokenizing.pairs import NO_LIMITS
from service.inference.tokenizing.rows import Span
from service.inference.tokenizing.tokenizer import TextTokenizer
from tests.models.checkpoints import (
    save_byte_fallback,
    save_byte_level,
    save_checkpoint,
    save_sentencepiece,
    write_json,
)
from tests.small_tokenizers import served_by

MAX_TOKENS = 24
# It ends with a character that most vocabularies lack, which can be in a token with the next ones.
PROMPT = "cat \N{PARTY POPPER}"
# By tokenizer class: the family of the model, and how to save a tokenizer.
SAVE: dict[str, tuple[str, Callable[[Path, str], None]]] = {
    "XLMRobertaTokenizer": ("xlm-roberta", save_sentencepiece),
    "AlbertTokenizer": ("albert", save_sentencepiece),
    "DebertaV2Tokenizer": ("deberta-v2", save_sentencepiece),
    "RobertaTokenizer": ("roberta", save_byte_level),
    "Qwen2Tokenizer": ("qwen3", save_byte_level),  # adds no special tokens
    "GemmaTokenizer": ("gemma3_text", save_byte_fallback),
}


class Tokenizers(NamedTuple):
    """A tokenizer of the service, and the same of transformers."""

    served: TextTokenizer
    reference: Any


@pytest.fixture(scope="module", params=["BertTokenizer", *SAVE])
def tokenizers(
    request: pytest.FixtureRequest,
    small_artifact: Artifact,
    minilm_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Tokenizers:
    prompted = replace(small_artifact.manifest, prompts={"ask": PROMPT})
    if request.param == "BertTokenizer":
        manifest = replace(prompted, max_tokens=MAX_TOKENS)
        served = TextTokenizer(Artifact(small_artifact.path, manifest), max_chars=10**9)
        return Tokenizers(served, transformers.AutoTokenizer.from_pretrained(minilm_folder))
    folder = tmp_path_factory.mktemp("tokenizer")
    family, save = SAVE[request.param]
    save(folder, request.param)
    write_json(folder / "config.json", {"model_type": family})
    save_checkpoint(folder / "model", "bert")
    config = replace(load(folder / "model")[1], family=family)
    tokenizer = read_tokenizer(ModelFolder(folder), config, 500)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    artifact = replace(small_artifact, manifest=prompted)
    return Tokenizers(served_by(tokenizer, artifact, folder, MAX_TOKENS), reference)


CHARACTERS = [
    *(
        " ",
        "\t",
        "\n",
        "\r",
        "\x0b",
        "\x1c",
        "\x85",
        "\xa0",
        "\u1680",
        "\u2003",
        "\u2028",
        "\u3000",
    ),
    *("\0", "\x01", "\x7f", "\x9f", "\xad", "\u200b", "\u200d", "\u2060", "\ufeff", "\ufffd"),
    *("\u0301", "\u20dd", "\ufe0f", "\u0640", "\u202e", "\u200f", "\ue000", "\U000e0041"),
    *("a", "Z", "5", ".", "é", "ß", "İ", "שלום", "عربى", "日本", "ｶ", "ﬁ", "½", "🎉", "👩‍💻", "🇩🇪"),
    *("the", " cat", "[SEP]", "</s>", "<mask>", "▁", "Ġ", "##", "\U0010ffff"),
]
# Pieces of the kinds that normalisers treat on their own, between any characters.
texts = st.lists(
    st.sampled_from(CHARACTERS) | st.characters(exclude_categories=["Cs"]), max_size=12
).map("".join)


@settings(max_examples=150)
@example(text="")
@example(text=" \t\n")
@example(text="\0")
@example(text="cat \0 c\0at\0\0")
@example(text="\u200b\u0301")
@example(text="the cat " * 40)
@given(text=texts)
def test_tokens_of_a_text_are_those_of_transformers(tokenizers: Tokenizers, text: str) -> None:
    expected = tokenizers.reference(
        text, truncation=True, max_length=MAX_TOKENS, return_offsets_mapping=True
    )
    if not expected["input_ids"]:
        with pytest.raises(InvalidInput, match="no tokens of its own"):
            tokenizers.served.rows_of_texts([text], None, "truncate")
        return
    (row,) = tokenizers.served.rows_of_texts([text], None, "truncate", with_offsets=True)
    assert row.ids == expected["input_ids"]
    # transformers gives special tokens the span (0, 0), which other tokens can have too.
    assert [span or (0, 0) for span in row.offsets or ()] == expected["offset_mapping"]


@settings(max_examples=150)
@example(pair=("", "x"))
@example(pair=("x", ""))
@example(pair=("", ""))
@example(pair=(" ", "\0"))
@example(pair=("the cat " * 40, ""))
@given(pair=st.tuples(texts, texts))
def test_tokens_of_a_pair_are_those_of_transformers(
    tokenizers: Tokenizers, pair: tuple[str, str]
) -> None:
    # As a batch: transformers takes the second text of a single pair for missing if it is empty.
    expected = tokenizers.reference(
        *([text] for text in pair),
        truncation="longest_first",
        max_length=MAX_TOKENS,
        return_token_type_ids=True,
    )
    if not expected["input_ids"][0]:
        with pytest.raises(InvalidInput, match="no tokens of its own"):
            PairRows(tokenizers.served).rows([pair], None, "truncate")
        return
    (row,) = PairRows(tokenizers.served).rows([pair], None, "truncate")
    assert row.ids == expected["input_ids"][0]
    assert row.token_types == expected["token_type_ids"][0]


def unknown(reference: Any, encoding: Any, texts: Sequence[str]) -> list[list[Span]]:  # noqa: ANN401
    """Return the spans of the unknown tokens of each text, without the white space around them.

    The first text begins with the prompt, which no span covers.
    """
    spans: list[list[Span]] = [[] for _ in texts]
    rows = zip(
        encoding["input_ids"][0],
        encoding["offset_mapping"][0],
        encoding.sequence_ids(0),
        strict=True,
    )
    for token, (start, end), index in rows:
        if token == reference.unk_token_id and index is not None:
            prompt = 0 if index else len(PROMPT)
            begin = max(start, prompt)
            own = texts[index][begin:end]
            if own.strip():
                begin += len(own) - len(own.lstrip()) - prompt
                spans[index].append((begin, begin + len(own.strip())))
    return spans


@settings(max_examples=150)
@example(pair=("cat \U0001f995 " * 20, "\U0001f995 cat \U0001f995" * 20), on_overflow="truncate")
@example(
    pair=("\U0001f995 cat \U0001f995" * 20, "cat \U0001f995 " * 20), on_overflow="truncate_left"
)
@example(pair=("cat", "[UNK] <unk>"), on_overflow="truncate")
@given(pair=st.tuples(texts, texts), on_overflow=st.sampled_from(["truncate", "truncate_left"]))
def test_unknown_parts_are_those_that_transformers_reads(
    tokenizers: Tokenizers, pair: tuple[str, str], on_overflow: OnOverflow
) -> None:
    served, reference = tokenizers
    reference.truncation_side = "left" if on_overflow == "truncate_left" else "right"
    options = {"max_length": MAX_TOKENS, "return_offsets_mapping": True}
    prompted = PROMPT + pair[0], pair[1]
    try:
        alone = reference([prompted[0]], truncation=True, **options)
        together = reference(*([text] for text in prompted), truncation="longest_first", **options)
    finally:
        reference.truncation_side = "right"
    actual = served.unknown_spans(pair[0], "ask", on_overflow)
    assert [actual] == unknown(reference, alone, prompted[:1])
    spans = PairRows(served).unknown_spans(pair, "ask", on_overflow, NO_LIMITS)
    assert [*spans] == unknown(reference, together, prompted)


@pytest.fixture(scope="module")
def sentence_transformer(small_folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(small_folder), device="cpu")


@pytest.fixture(scope="module")
def model(small_artifact: Artifact) -> Any:  # noqa: ANN401 - a generator
    with vitrine.SyncModel(small_artifact.path, vitrine.ModelOptions(threads=1)) as model:
        yield model


@settings(max_examples=40)
@example(batch=[" ", "\t\n", "a\0 cat", "\0", "\u200b", "\0rain"])
@given(batch=st.lists(texts.filter(bool), min_size=1, max_size=6))
def test_vectors_are_those_of_sentence_transformers(
    model: vitrine.SyncModel, sentence_transformer: SentenceTransformer, batch: list[str]
) -> None:
    expected = sentence_transformer.encode(batch)
    np.testing.assert_allclose(model.encode(batch).vectors, expected, rtol=0, atol=1e-5)
    tokens = sentence_transformer.encode(batch, output_value="token_embeddings")
    for actual, own in zip(model.encode_tokens(batch).vectors, tokens, strict=True):
        np.testing.assert_allclose(actual, own.numpy(), rtol=0, atol=1e-4)
