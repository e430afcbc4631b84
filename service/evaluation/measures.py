"""Measures of rankings, as trec_eval computes them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytrec_eval

from service.bulk.options import OptionError
from service.evaluation.collection import Judgements
from service.evaluation.ranking import Rankings

# Names of trec_eval's measures by ours. That of MRR has no cut: see `_value`.
_TREC = {"ndcg": "ndcg_cut", "recall": "recall", "hits": "success", "mrr": "recip_rank"}
_SPELLINGS = {"ndcg": "nDCG", "mrr": "MRR"}
DEFAULT = "nDCG@10,recall@10,recall@100,MRR@10,hits@1,hits@10"
_MAX_CUT = 10_000


@dataclass(frozen=True)
class Measure:
    """A measure of the first documents of a ranking.

    Attributes:
        kind: "ndcg": discounted gain of relevance, relative to the best ranking; "recall": share of
            the relevant documents; "mrr": 1 / rank of the first relevant document, or 0; "hits": 1
            if there is a relevant document, or 0.
        cut: Number of documents.
    """

    kind: str
    cut: int

    def __str__(self) -> str:
        return f"{_SPELLINGS.get(self.kind, self.kind)}@{self.cut}"


def parse_measures(names: str) -> list[Measure]:
    """Return the measures in a list with commas, such as "nDCG@10,recall@100".

    Raises:
        OptionError: A name is unknown.
    """
    measures = []
    for name in names.split(","):
        match = re.fullmatch(r"(ndcg|recall|mrr|hits)@(\d{1,5})", name.strip().lower())
        if match is None or not 1 <= int(match[2]) <= _MAX_CUT:
            raise OptionError(
                f"{name.strip()!r} is no measure; there are nDCG@K, recall@K, MRR@K and hits@K, "
                f"with K from 1 to {_MAX_CUT}"
            )
        measures.append(Measure(match[1], int(match[2])))
    return list(dict.fromkeys(measures))


def measure(
    measures: Sequence[Measure], judgements: Judgements, rankings: Rankings
) -> dict[str, dict[str, float]]:
    """Return the value of each measure for each judged query, by query and measure.

    A query without a ranking has 0 in all of them, as in ir_measures. Among equal scores, the
    document with the greater id is first, as in trec_eval.
    """
    names = {_TREC[own.kind] + ("" if own.kind == "mrr" else f".{own.cut}") for own in measures}
    evaluator = pytrec_eval.RelevanceEvaluator(judgements, names)
    results = evaluator.evaluate({query: dict(own) for query, own in rankings.items()})
    return {
        query: {str(own): _value(own, results.get(query, {})) for own in measures}
        for query in judgements
    }


def _value(own: Measure, results: Mapping[str, float]) -> float:
    if own.kind != "mrr":
        return results.get(f"{_TREC[own.kind]}_{own.cut}", 0.0)
    value = results.get("recip_rank", 0.0)
    return value if value and round(1 / value) <= own.cut else 0.0


def means(values: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each measure over all queries."""
    names = next(iter(values.values()))
    return {name: sum(own[name] for own in values.values()) / len(values) for name in names}
