"""Measures of rankings, compared with their formulas in float64."""

import math
import random
from collections.abc import Mapping

import pytest

from service.bulk.options import OptionError
from service.evaluation.measures import Measure, means, measure, parse_measures

ALL = [Measure(kind, cut) for kind in ("ndcg", "recall", "mrr", "hits") for cut in (1, 3, 10, 49)]


def expected(own: Measure, judged: Mapping[str, int], scores: Mapping[str, float]) -> float:
    """Return a measure of one query."""
    # Equal scores: the greater id first.
    ranking = sorted(scores, key=lambda document: (scores[document], document), reverse=True)
    gains = [max(0, judged.get(document, 0)) for document in ranking[: own.cut]]
    relevant = sorted((max(0, value) for value in judged.values()), reverse=True)
    if not any(relevant):
        return 0.0
    match own.kind:
        case "ndcg":
            best = sum(g / math.log2(rank + 2) for rank, g in enumerate(relevant[: own.cut]))
            return sum(g / math.log2(rank + 2) for rank, g in enumerate(gains)) / best
        case "recall":
            return sum(g > 0 for g in gains) / sum(g > 0 for g in relevant)
        case "mrr":
            return next((1 / (rank + 1) for rank, g in enumerate(gains) if g > 0), 0.0)
    return float(any(gains))


def test_measures_equal_their_formulas_with_ties_grades_and_queries_without_a_ranking() -> None:
    chance = random.Random(3)  # noqa: S311
    documents = [f"d{number}" for number in range(60)]
    judgements: dict[str, dict[str, int]] = {}
    rankings: dict[str, dict[str, float]] = {}
    for number in range(1000):
        query = f"q{number}"
        some = chance.sample(documents, chance.randint(1, 8))
        judgements[query] = {document: chance.choice([-1, 0, 0, 1, 2, 3]) for document in some}
        if chance.random() < 0.9:
            found = chance.sample(documents, chance.randint(1, 60))
            rankings[query] = {document: chance.randint(0, 6) / 4 for document in found}
    values = measure(ALL, judgements, rankings)
    assert values.keys() == judgements.keys()
    for query, judged in judgements.items():
        own = {str(one): expected(one, judged, rankings.get(query, {})) for one in ALL}
        assert values[query] == pytest.approx(own, abs=1e-12), query
    mean = sum(own["nDCG@10"] for own in values.values()) / 1000
    assert means(values)["nDCG@10"] == pytest.approx(mean)


def test_names_of_measures_are_read_in_any_case() -> None:
    assert parse_measures("ndcg@10, Recall@100,MRR@10,hits@1,nDCG@10") == [
        *(Measure("ndcg", 10), Measure("recall", 100), Measure("mrr", 10), Measure("hits", 1))
    ]
    assert [str(own) for own in parse_measures("NDCG@5,mrr@3")] == ["nDCG@5", "MRR@3"]


@pytest.mark.parametrize(
    "names", ["", "map@10", "nDCG", "nDCG@0", "nDCG@10001", "recall@x", "mrr@1,"]
)
def test_unknown_measures_are_refused_by_name(names: str) -> None:
    with pytest.raises(OptionError, match="is no measure; there are nDCG@K"):
        parse_measures(names)
