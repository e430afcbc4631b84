"""Explanations by deletion with `by="auto"`: the numbers, and what the limit of tokens leaves."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vitrine
from service.inference.results.loaded_model import LoadedModel
from tests.service.inference.model.conftest import BOUNDS, Models, left, score

pytestmark = pytest.mark.slow

WORDS = ["w5", "w6", "w7", "w40", "not", "cat", "."]
SENTENCE = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(
    lambda words: f"It {' '.join(words)} w9."
)


def spelled(text: str, units: Sequence[vitrine.UnitEffect]) -> list[str]:
    return [text[unit.start : unit.end] for unit in units]


def test_a_text_of_one_sentence_is_explained_by_words(models: Models) -> None:
    document = "w5 cat. w6 w9"  # a sentence begins with a capital letter
    auto, words = (
        models["cosine"].score("w7", document, explain=vitrine.Deletion(by=by)).deletions[0]
        for by in ("auto", "words")
    )
    assert auto.texts[0].by == "words"
    assert spelled(document, auto.texts[0].units) == ["w5", "cat", ".", "w6", "w9"]
    for mine, theirs in zip(auto.texts[0].units, words.texts[0].units, strict=True):
        assert mine.left_out == pytest.approx(theirs.left_out, abs=1e-5)
        assert mine.alone == pytest.approx(theirs.alone, abs=1e-5)


@pytest.mark.parametrize("kind", ["cosine", "reranker"])
@settings(max_examples=5)
@given(sentences=st.lists(SENTENCE, min_size=2, max_size=4), max_tokens=st.integers(300, 2000))
def test_numbers_that_are_measured_are_differences_of_scores(
    models: Models, kind: str, sentences: list[str], max_tokens: int
) -> None:
    model, bound = models[kind], 2 * BOUNDS.get(kind, 5e-6)
    # Rerankers read at most 24 tokens: what is explained is the part that they read.
    document = " ".join(sentences)[: None if kind == "cosine" else 40]
    deletion = vitrine.Deletion(by="auto", max_tokens=max_tokens)
    result = model.score("w5 w9", document, explain=deletion)
    assert result.explanation_tokens <= max_tokens
    (text,) = result.deletions[0].texts
    part = document[slice(*text.read)]
    whole, empty = (score(model, "w5 w9", variant) for variant in (part, ""))
    for unit in (*text.units, *text.words):
        own = unit.start - text.read[0], unit.end - text.read[0]
        alone = score(model, "w5 w9", part[slice(*own)]) - empty
        assert unit.alone == pytest.approx(alone, abs=bound)
        if unit.left_out is not None:
            without = score(model, "w5 w9", left(part, *own))
            assert unit.left_out == pytest.approx(whole - without, abs=bound)


def test_words_of_the_best_sentences_are_left_out_next(models: Models) -> None:
    document = "It is w5. It is w6 w7. A cat is w8. A dog."
    result = models["cosine"].score("w7 cat", document, explain=vitrine.Deletion(by="auto"))
    (text,) = result.deletions[0].texts
    assert text.by == "sentences"
    assert spelled(document, text.units) == ["It is w5.", "It is w6 w7.", "A cat is w8.", "A dog."]
    assert all(unit.left_out is not None for unit in text.units)
    best = sorted(text.units, key=lambda unit: unit.rank)[:2]
    words = [
        document[unit.start : unit.end] for sentence in best for unit in words_in(text, sentence)
    ]
    assert "".join(words) == "".join(spelled(document, best)).replace(" ", "")
    assert len(words) == len(text.words)
    assert sorted(word.rank for word in text.words) == [*range(1, len(text.words) + 1)]


def words_in(text: vitrine.TextEffects, sentence: vitrine.UnitEffect) -> list[vitrine.UnitEffect]:
    return [
        word for word in text.words if sentence.start <= word.start and word.end <= sentence.end
    ]


def test_if_tokens_are_few_the_units_that_matter_alone_are_left_out(models: Models) -> None:
    document = " ".join(f"It is w{index} cat w{index + 1}." for index in range(5, 25))
    result = models["cosine"].score(
        "w7 cat", document, explain=vitrine.Deletion(by="auto", max_tokens=1000)
    )
    assert 600 < result.explanation_tokens <= 1000
    (text,) = result.deletions[0].texts
    assert (len(text.units), len(text.words)) == (20, 0)
    assert all(unit.alone is not None for unit in text.units)
    measured = [abs(unit.alone or 0) for unit in text.units if unit.left_out is not None]
    others = [abs(unit.alone or 0) for unit in text.units if unit.left_out is None]
    assert measured
    assert min(measured) >= max(others)


@pytest.mark.parametrize("max_tokens", [70, 80, 90, 100])
def test_adjacent_equal_units_are_all_left_out_or_none(models: Models, max_tokens: int) -> None:
    query = "w5 w5 w5 cat cat cat w6 w7 w7"
    deletion = vitrine.Deletion(by="words", of="query", max_tokens=max_tokens)
    result = models["cosine"].score(query, "w6 cat", explain=deletion)
    assert result.explanation_tokens <= max_tokens
    units = result.deletions[0].texts[0].units
    assert None in [unit.left_out for unit in units]
    for equal in (units[:3], units[3:6], units[7:]):
        assert len({unit.left_out for unit in equal}) == 1


def test_tokens_that_do_not_suffice_for_the_units_alone_are_refused(models: Models) -> None:
    document = "It is w5. It is w6. A cat is w7."
    way_out = "explain fewer or shorter texts, or with max_tokens up to 20000$"
    with pytest.raises(vitrine.InvalidInput, match=way_out) as raised:
        models["cosine"].score("w7", document, explain=vitrine.Deletion(by="auto", max_tokens=25))
    assert (raised.value.code, raised.value.pointer) == ("too_many_tokens", "/explain")


def test_several_documents_share_the_tokens(models: Models) -> None:
    documents = [
        " ".join(f"It is w{index} cat w{index + first}." for index in range(5, 25))
        for first in range(3)
    ]
    deletion = vitrine.Deletion(by="auto", max_tokens=3000, of="both")
    result = models["cosine"].rerank("w7 cat", documents, explain=deletion)
    assert result.explanation_tokens <= 3000
    assert sorted(result.deletions) == [0, 1, 2]
    for explanation in result.deletions.values():
        query, document = explanation.texts
        assert all(unit.left_out is not None for unit in query.units)
        assert any(unit.left_out is not None for unit in document.units)


def test_auto_fits_wherever_sentences_fit(models: Models) -> None:
    long = " ".join(f"It is w{index} cat w{index + 1}." for index in range(5, 25))
    documents = [long, *(f"It is w{index}. A cat is w9." for index in range(5, 25))]
    sentences = models["cosine"].score("w7", documents, explain=vitrine.Deletion(by="sentences"))
    limit = int(1.1 * sentences.explanation_tokens) + 2 * sum(sentences.tokens)
    deletion = vitrine.Deletion(by="auto", max_tokens=limit)
    result = models["cosine"].score("w7", documents, explain=deletion)
    assert result.explanation_tokens <= limit
    # The short documents leave the long one what they do not need.
    (text,) = result.deletions[0].texts
    assert sum(unit.left_out is not None for unit in text.units) >= 15


@pytest.mark.parametrize("kind", ["cosine", "reranker", "multi", "sparse"])
@settings(max_examples=6)
@given(
    data=st.data(),
    count=st.integers(1, 6),
    max_tokens=st.integers(400, 3000),
    of=st.sampled_from(["document", "query", "both"]),
)
def test_what_passes_the_first_check_fits_into_the_tokens(
    models: Models, kind: str, data: st.DataObject, count: int, max_tokens: int, of: str
) -> None:
    text = st.lists(SENTENCE, min_size=1, max_size=60).map(" ".join)
    queries, documents = (data.draw(st.lists(text, min_size=count, max_size=count)) for _ in "ab")
    deletion = vitrine.Deletion(by="auto", max_tokens=max_tokens, of=of)  # type: ignore[arg-type]
    runs: list[int] = []
    run = LoadedModel.run

    async def counted(model: LoadedModel, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        found = await run(model, *arguments, **named)
        if named.get("count_tokens"):  # of variants
            runs.append(sum(len(row.ids) for row in found[0]))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadedModel, "run", counted)
        try:
            result = models[kind].score(queries, documents, explain=deletion)
        except vitrine.InvalidInput:
            assert not runs
        else:
            assert result.explanation_tokens == sum(runs)
            assert result.explanation_tokens <= max_tokens


def test_long_texts_of_which_the_model_reads_a_part_are_explained(models: Models) -> None:
    documents = [f"It is w{index}. A cat is w9. " * 2500 for index in range(5, 9)]
    result = models["cosine"].rerank("w7", documents, explain=vitrine.Deletion(by="auto"))
    assert len(result.deletions) == 3
