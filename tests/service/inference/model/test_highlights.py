"""Highlights: the best sentences of each document, as an explanation by deletion ranks them."""

import pytest

import vitrine
from tests.service.inference.model.conftest import BOUNDS, KINDS, Models

pytestmark = pytest.mark.slow

QUERY = "w7 cat"
DOCUMENTS = ["It is w5. A cat w7. It is w9.", "w40 not", "", "A dog. A cat."]


@pytest.mark.parametrize("kind", KINDS)
def test_highlights_are_the_best_sentences_of_an_explanation_by_deletion(
    models: Models, kind: str
) -> None:
    model = models[kind]
    deletion = vitrine.Deletion(by="sentences", top_n=len(DOCUMENTS))
    expected = model.rerank(QUERY, DOCUMENTS, explain=deletion)
    result = model.rerank(QUERY, DOCUMENTS, explain=vitrine.Highlights(2))
    assert result.scores == pytest.approx(expected.scores, abs=1e-5)
    assert result.explanation_tokens > 0
    for index in range(len(DOCUMENTS)):
        for own, whole in (
            (result.deletions[index].texts, expected.deletions[index].texts),
            (result.deletions[index].raw_texts, expected.deletions[index].raw_texts),
        ):
            units = {unit.start: unit for unit in whole[0].units}
            assert len(own[0].units) == min(2, len(units))
            for unit in own[0].units:
                other = units[unit.start]
                assert unit.end == other.end
                bound = 2 * BOUNDS.get(kind, 5e-6)
                assert unit.left_out == pytest.approx(other.left_out, abs=bound)
                assert unit.alone == pytest.approx(other.alone, abs=bound)
        ranks = [unit.rank for unit in result.deletions[index].raw_texts[0].units]
        assert ranks == [*range(1, len(ranks) + 1)]


@pytest.mark.parametrize("kind", ["cosine", "reranker"])
def test_the_best_documents_have_highlights_as_far_as_the_tokens_suffice(
    models: Models, kind: str
) -> None:
    documents = [f"It is w{index} cat. A w{index + 1} dog. A cat." for index in range(5, 45)] * 20
    result = models[kind].rerank(QUERY, documents, explain=vitrine.Highlights())
    assert result.scores == pytest.approx(models[kind].rerank(QUERY, documents).scores, abs=1e-5)
    explained = [index in result.deletions for index in result.ranking()]
    count = sum(explained)
    assert 0 < count < len(documents)
    assert explained == [True] * count + [False] * (len(documents) - count)
    assert result.explanation_tokens <= 20_000


@pytest.mark.parametrize("kind", ["cosine", "reranker"])
def test_the_best_sentences_alone_are_left_out_however_few_the_tokens(
    models: Models, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("service.inference.model.explanations._HIGHLIGHTS", (1, 1))
    documents = [" ".join(f"W{a + b}." for b in range(10)) for a in range(5, 45)]
    result = models[kind].rerank("w6", documents, explain=vitrine.Highlights(10))
    assert len(result.deletions) > 2
    for found in result.deletions.values():
        units = found.texts[0].units
        alone = sorted(unit.alone or 0 for unit in units)
        measured = sorted(unit.alone or 0 for unit in units if unit.left_out is not None)
        assert len(measured) >= 3
        assert measured == alone[-len(measured) :]


@pytest.mark.parametrize("kind", ["cosine", "reranker"])
@pytest.mark.parametrize("document", ["It is w{} cat, a dog and w9.", "It is w{} cat. A w9 dog."])
def test_all_of_many_short_documents_have_highlights(
    models: Models, kind: str, document: str
) -> None:
    documents = [document.format(index % 50 + 5) for index in range(500)]
    result = models[kind].rerank(QUERY, documents, explain=vitrine.Highlights())
    assert [*result.deletions] == result.ranking()
    assert result.explanation_tokens <= 20_000


def test_documents_that_are_cut_have_highlights_too(models: Models) -> None:
    document = " ".join(f"It is w{index} cat." for index in range(5, 45)) * 4
    documents = [f"w{index} {document}" for index in range(5, 55)]
    result = models["cosine"].rerank(QUERY, documents, explain=vitrine.Highlights())
    assert all(result.truncated)
    assert 10 < len(result.deletions) < len(documents)
    assert 8_000 < result.explanation_tokens <= 20_000


def test_a_long_query_takes_no_highlights_from_a_short_document(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each sentence alone costs the query again, more than this aim.
    monkeypatch.setattr("service.inference.model.explanations._HIGHLIGHTS", (1, 1))
    document = "A cat. It is. w5. A. It. A dog."
    result = models["reranker"].rerank("w5 w6 w7", [document], explain=vitrine.Highlights())
    (text,) = result.deletions[0].texts
    assert all(unit.alone is not None for unit in text.units)


# Less than the document has, and less than its sentences alone.
@pytest.mark.parametrize("max_tokens", [5, 20])
def test_documents_for_which_the_tokens_do_not_suffice_have_their_scores_alone(
    models: Models, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    monkeypatch.setattr("service.inference.model.deletion_planner.MAX_TOKENS", max_tokens)
    result = models["cosine"].rerank(QUERY, DOCUMENTS[:1], explain=vitrine.Highlights())
    assert not result.deletions
    expected = models["cosine"].rerank(QUERY, DOCUMENTS[:1])
    assert result.scores == pytest.approx(expected.scores, abs=1e-5)


@pytest.mark.parametrize("count", [0, 11, 1.5, None])
def test_an_invalid_count_is_refused(count: object) -> None:
    with pytest.raises(vitrine.InvalidInput, match="from 1 to 10") as raised:
        vitrine.Highlights(count)  # type: ignore[arg-type]
    assert raised.value.pointer == "/highlight"
