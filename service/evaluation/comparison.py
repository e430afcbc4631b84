"""Comparison of two evaluations with the same documents and queries: of two models, or settings.

Two rankings of a query are compared without judgements too: by the documents that both have among
the first ten, and by the order of those that both have at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from pydantic import BaseModel, ValidationError

from service.bulk.options import OptionError
from service.evaluation.ranking import Rankings

# Settings of the ranking in results.json.
_OF_RANKING = ("rerank_top", "ignores_identical_ids")
# Number of first documents whose overlap is measured.
TOP = 10
_CONFIDENCE = 0.95
_RESAMPLES = 9999
# Approximate number of differences in the resamples that exist at once.
_BATCH_NUMBERS = 2**20


@dataclass(frozen=True)
class Evaluated:
    """A finished evaluation.

    Attributes:
        folder: Its folder.
        results: Content of results.json.
        collection: Hash of the collection.
        rankings: Rankings of run.trec.
    """

    folder: Path
    results: Mapping[str, Any]
    collection: str
    rankings: Rankings


class _Collection(BaseModel):
    sha256: str


class _Jobs(BaseModel):
    documents: dict[str, Any]
    queries: dict[str, Any]
    pairs: dict[str, Any] = {}


class _Query(BaseModel):
    measures: dict[str, float]
    relevant: dict[str, int]


class _Results(BaseModel):
    """The part of results.json that is read."""

    measures: dict[str, float]
    known_items: bool
    collection: _Collection
    jobs: _Jobs
    rerank_top: int | None
    ignores_identical_ids: bool
    queries: dict[str, _Query]


def read_evaluation(folder: Path) -> Evaluated:
    """Read a finished evaluation.

    Raises:
        OptionError: The folder has none, or a damaged one.
    """
    rankings: dict[str, dict[str, float]] = {}
    try:
        results = orjson.loads((folder / "results.json").read_bytes())
        _Results.model_validate(results)
        for line in (folder / "run.trec").read_text("utf-8").splitlines():
            query, _, document, _, score, _ = line.split(" ")
            rankings.setdefault(query, {})[document] = float(score)
        return Evaluated(folder, results, results["collection"]["sha256"], rankings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise OptionError(f"{folder}/results.json is damaged: {where}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise OptionError(f"{folder} has no finished evaluation: {error}") from error


def compare(old: Evaluated, new: Evaluated) -> dict[str, Any]:
    """Return the differences of two evaluations.

    Measures have the mean difference with its confidence interval of 95 %, by resampling the
    queries. Queries are in the order of how much they changed. Settings are those that differ, with
    the old value and the new one.

    Raises:
        OptionError: They are of different collections.
    """
    if old.collection != new.collection:
        raise OptionError(f"{old.folder} is of another collection than {new.folder}")
    changed = [_query(old, new, query) for query in new.results["queries"]]
    names = [name for name in new.results["measures"] if name in old.results["measures"]]
    first = names[0] if names else None
    changed.sort(
        key=lambda own: (-abs(own["measures"][first]["difference"]) if first else 0, own["overlap"])
    )
    return {
        "measures": {name: _measure(old.results, new.results, name) for name in names},
        "settings": _settings(old.results, new.results),
        f"overlap@{TOP}": _mean([own["overlap"] for own in changed]),
        "rank_correlation": _mean([own["rank_correlation"] for own in changed]),
        "unchanged_queries": sum(own["is_equal"] for own in changed),
        "queries": changed,
    }


def _settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    jobs = [
        {**own["jobs"], "ranking": {name: own[name] for name in _OF_RANKING}} for own in (old, new)
    ]
    names = dict.fromkeys((job, name) for own in jobs for job in own for name in own[job])
    pairs = {f"{job}: {name}": [own.get(job, {}).get(name) for own in jobs] for job, name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _measure(old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> dict[str, Any]:
    from scipy.stats import bootstrap  # takes 60 MB, which evaluations without a comparison save

    queries = list(new["queries"])
    before, after = (
        np.array([results["queries"][query]["measures"][name] for query in queries])
        for results in (old, new)
    )
    differences = after - before
    low = high = float(differences.mean())
    if len(differences) > 1 and np.ptp(differences):  # all resamples of equal ones are equal
        interval = bootstrap(
            (differences,),
            np.mean,
            confidence_level=_CONFIDENCE,
            n_resamples=_RESAMPLES,
            batch=max(1, _BATCH_NUMBERS // len(differences)),
            method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval
        low, high = float(interval.low), float(interval.high)
    return {
        "old": float(before.mean()),
        "new": float(after.mean()),
        "difference": float(differences.mean()),
        "interval": [low, high],
        "better": int((differences > 0).sum()),
        "worse": int((differences < 0).sum()),
    }


def _query(old: Evaluated, new: Evaluated, query: str) -> dict[str, Any]:
    from scipy.stats import kendalltau

    before, after = (
        {document: place for place, document in enumerate(own.rankings.get(query, ()), 1)}
        for own in (old, new)
    )
    common = before.keys() & after.keys()
    orders = [[places[document] for document in common] for places in (before, after)]
    correlation = float(kendalltau(*orders).statistic) if len(common) > 1 else None
    heads = [list(islice(places, TOP)) for places in (before, after)]
    firsts = [set(head) for head in heads]
    length = max(map(len, firsts))
    values = [own.results["queries"][query]["measures"] for own in (old, new)]
    relevant = new.results["queries"][query]["relevant"]
    return {
        "query": query,
        "measures": {
            name: {"old": value, "new": values[1][name], "difference": values[1][name] - value}
            for name, value in values[0].items()
            if name in values[1]
        },
        "overlap": len(firsts[0] & firsts[1]) / length if length else 1.0,
        "rank_correlation": correlation,
        "is_equal": heads[0] == heads[1],
        "documents": [
            {
                "id": document,
                "relevance": relevant.get(document, 0),
                "old_rank": before.get(document),
                "new_rank": after.get(document),
            }
            for document in dict.fromkeys([*heads[0], *heads[1]])
        ],
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
