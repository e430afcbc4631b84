"""Shapley values of words and sentences, against all orders of the units of small texts."""

from itertools import permutations

import numpy as np
import pytest

import vitrine
from service.inference.explain.deletion import unit_spans, with_units
from tests.service.inference.model.conftest import BOUNDS, Models, score

pytestmark = pytest.mark.slow

QUERY, DOCUMENT = "w5 cat", "w9 w40 not cat."


def exact(results: dict[tuple[bool, ...], float]) -> list[float]:
    """The mean change when each unit is added, over all orders."""
    count = len(next(iter(results)))
    totals = np.zeros(count)
    orders = list(permutations(range(count)))
    for order in orders:
        kept = [False] * count
        for unit in order:
            before = results[tuple(kept)]
            kept[unit] = True
            totals[unit] += results[tuple(kept)] - before
    return list(map(float, totals / len(orders)))


@pytest.mark.parametrize("kind", ["cosine", "dot", "sparse", "multi", "reranker"])
def test_values_are_the_mean_changes_over_all_orders(models: Models, kind: str) -> None:
    model, bound = models[kind], 4 * BOUNDS.get(kind, 5e-6)
    result = model.score(QUERY, DOCUMENT, explain=vitrine.Deletion(method="shapley"))
    assert not result.deletions
    spans = unit_spans(DOCUMENT, "words")
    for raw in (False, True):
        found = result.shapley_values[0]
        (text,) = found.raw_texts if raw else found.texts
        results = {
            kept: score(model, QUERY, with_units(DOCUMENT, spans, kept), raw=raw)
            for kept in np.ndindex(*[2] * len(spans))
        }
        results = {tuple(map(bool, kept)): value for kept, value in results.items()}
        assert [unit.value for unit in text.units] == pytest.approx(exact(results), abs=bound)
        assert sum(unit.value for unit in text.units) == pytest.approx(
            text.whole - text.empty, abs=1e-6
        )
        assert {unit.standard_error for unit in text.units} == {0.0}
        order = sorted(text.units, key=lambda unit: unit.rank)
        assert order == sorted(text.units, key=lambda unit: -unit.value)


def test_values_of_many_units_are_estimated_and_sum_exactly(models: Models) -> None:
    document = " ".join(f"w{index}" for index in range(5, 25))
    deletion = vitrine.Deletion(method="shapley", samples=100, seed=1)
    model = models["cosine"]
    one, two = (
        model.score(QUERY, document, explain=deletion).shapley_values[0].texts[0] for _ in "ab"
    )
    assert len(one.units) == 20
    assert sum(unit.value for unit in one.units) == pytest.approx(one.whole - one.empty, abs=1e-6)
    assert all(unit.standard_error > 0 for unit in one.units)
    assert [unit.value for unit in two.units] == pytest.approx(
        [unit.value for unit in one.units], abs=1e-4
    )
    other = vitrine.Deletion(method="shapley", samples=100, seed=2)
    (text,) = model.score(QUERY, document, explain=other).shapley_values[0].texts
    assert [unit.value for unit in text.units] != [unit.value for unit in one.units]


def test_values_of_labels_and_of_both_texts(models: Models, labeler: vitrine.SyncModel) -> None:
    result = labeler.classify(
        ["w5 w9", ("cat", "w7 w8")], explain=vitrine.Deletion(method="shapley", by="words")
    )
    assert [len(values.texts) for values in result.shapley_values.values()] == [1, 2]
    for values in result.shapley_values.values():
        for text in values.texts:
            total = sum(unit.value for unit in text.units)
            assert total == pytest.approx(text.whole - text.empty, abs=1e-6)
    deletion = vitrine.Deletion(method="shapley", of="both", by="sentences")
    ranked = models["reranker"].rerank(QUERY, ["w9", "It. A."], explain=deletion)
    assert [len(values.texts) for values in ranked.shapley_values.values()] == [2, 2]
    document = " ".join(f"It is w{index}." for index in range(5, 45))
    chunks = vitrine.Deletion(method="shapley", by="chunks")
    (text,) = models["cosine"].score(QUERY, document, explain=chunks).shapley_values[0].texts
    assert (text.by, len(text.units)) == ("chunks", 4)
    assert sum(unit.value for unit in text.units) == pytest.approx(
        text.whole - text.empty, abs=1e-6
    )


def test_too_few_samples_are_refused(models: Models) -> None:
    deletion = vitrine.Deletion(method="shapley", samples=10)
    with pytest.raises(vitrine.InvalidInput, match="needs at least 14") as raised:
        models["cosine"].score(QUERY, DOCUMENT, explain=deletion)
    assert raised.value.pointer == "/explain/samples"


@pytest.mark.parametrize(
    "document",
    [
        # A run of more than 100 characters is one token, so that the tokens are few.
        pytest.param(("a" * 200 + "!") * 200, id="long words"),
        pytest.param("w5 " * 200, id="many words"),
    ],
)
def test_too_many_texts_are_refused_before_they_are_made(
    models: Models, monkeypatch: pytest.MonkeyPatch, document: str
) -> None:
    def make(*_: object) -> str:
        pytest.fail("variants were made")

    for name in ("with_units", "subsets_of"):
        monkeypatch.setattr(f"service.inference.model.deletion_planner.{name}", make)
    deletion = vitrine.Deletion(method="shapley")
    with pytest.raises(
        vitrine.InvalidInput, match=r"takes more than 20000 tokens; [^_]*$"
    ) as raised:
        models["cosine"].score("a", document, explain=deletion)
    assert (raised.value.code, raised.value.pointer) == ("too_many_tokens", "/explain")


@pytest.mark.parametrize("max_tokens", [None, 3000])
def test_of_many_pairs_the_first_have_values_as_far_as_the_tokens_suffice(
    models: Models, max_tokens: int | None
) -> None:
    documents = [f"w5 w6 w7 w8 w{at}" for at in range(9, 109)]
    deletion = vitrine.Deletion(method="shapley", max_tokens=max_tokens)
    result = models["reranker"].score("w5 " * 12, documents, explain=deletion)
    count = len(result.shapley_values)
    assert 0 < count < len(documents)
    assert [*result.shapley_values] == [*range(count)]
    limit = max_tokens or 20_000
    assert 0.4 * limit < result.explanation_tokens <= limit


def test_of_many_inputs_to_classify_those_that_fit_have_values(labeler: vitrine.SyncModel) -> None:
    long = " ".join(f"w{index}" for index in range(5, 25))
    deletion = vitrine.Deletion(method="shapley", max_tokens=500)
    result = labeler.classify([long, "w5 w6 w7", "w8 cat"], explain=deletion)
    assert len(result.rows) == 3
    assert [*result.shapley_values] == [1, 2]
    assert result.explanation_tokens <= 500
    with pytest.raises(vitrine.InvalidInput, match="more than 500 tokens"):
        labeler.classify([long, long], explain=deletion)
