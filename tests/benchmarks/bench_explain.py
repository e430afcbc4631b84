"""Methods that explain a result by words, on texts whose deciding words are known.

Small models are trained on texts of made-up words in which known words decide the result, and are
exported and served. Each method then ranks the words of held-out texts. The known evidence is
ground truth that no method defines, other than comprehensiveness and sufficiency, which delete
words and so favour methods that do.

    python -m tests.benchmarks.bench_explain
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from models.gradients.budget import removal_counts
from tests.benchmarks.comparison import Turns, report
from tests.benchmarks.explain.kinds import KINDS
from tests.benchmarks.explain.methods import Explained, methods_of, text_of
from tests.benchmarks.explain.served import TrainedModel
from tests.benchmarks.explain.tasks import EvidenceCase, held_out_cases, variants_of_kind

_FIRST = "Share of cases whose first word is a planted one"
_THREE = "Share of cases with a planted word among the first three"
_SIGNS = "Share of planted words with the right sign"
_TIME = "Time per case, median in ms"
_COMPREHENSIVENESS = "Comprehensiveness: higher is better; biased towards deletion"
_SUFFICIENCY = "Sufficiency: lower is better; biased towards deletion"
MEASURES = (_FIRST, _THREE, _SIGNS, _TIME, _COMPREHENSIVENESS, _SUFFICIENCY)
_HIDDEN_SIZE = 64
_ACCURACY_CASES = 1000


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--cases", type=int, default=200, help="held-out texts per variant")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tables = {title: Turns(contenders_in_rows=True) for title in MEASURES}
    notes = []
    for kind in arguments.kinds:
        with (
            tempfile.TemporaryDirectory() as folder,
            TrainedModel(kind, Path(folder), _HIDDEN_SIZE, KINDS[kind].steps) as served,
        ):
            accuracy = served.check_accuracy(_ACCURACY_CASES)
            notes.append(f"- {kind}: held-out accuracy {accuracy:.3f}")
            measure(tables, served, arguments.cases)
    parts = [part for title, table in tables.items() for part in (f"**{title}**", table)]
    report(*parts, "\n".join(notes))


def measure(tables: Mapping[str, Turns], served: TrainedModel, cases: int) -> None:
    """Add the measures of all methods for all variants of a kind to the tables.

    Args:
        tables: Table of each of `MEASURES`.
        served: Model of the kind.
        cases: Number of held-out cases of each variant.
    """
    for variant in variants_of_kind(served.kind):
        held_out = held_out_cases(served.kind, variant, cases)
        _measure_variant(tables, served, f"{served.kind}, {variant}", held_out)


def _measure_variant(
    tables: Mapping[str, Turns], served: TrainedModel, column: str, cases: Sequence[EvidenceCase]
) -> None:
    known: list[dict[str, float]] = [{} for _ in cases]  # results that are not measured again
    for name, method in methods_of(served.kind).items():
        method(served, cases[0])  # warm-up
        figures = []
        for case, results in zip(cases, known, strict=True):
            started = time.perf_counter()
            explained = method(served, case)
            milliseconds = (time.perf_counter() - started) * 1000
            faithfulness = _faithfulness(served, case, explained.order, results)
            figures.append((*_evidence(case, explained), milliseconds, *faithfulness))
        print(f"{column}: {name}", flush=True)
        columns = np.array(figures).T
        for title, values in zip(MEASURES, columns, strict=True):
            value = np.median(values) if title == _TIME else values.mean()
            tables[title].add(column, name, float(value))


def _evidence(case: EvidenceCase, explained: Explained) -> tuple[float, float, float]:
    planted = sorted(case.planted)
    is_planted = [index in case.planted for index in explained.order]
    return is_planted[0], any(is_planted[:3]), float((explained.values[planted] > 0).mean())


def _faithfulness(
    served: TrainedModel, case: EvidenceCase, order: Sequence[int], known: dict[str, float]
) -> tuple[float, float]:
    """Return comprehensiveness and sufficiency (DeYoung et al. 2020, arXiv:1911.03429).

    Args:
        served: Served model.
        case: Explained case.
        order: Words, the most important first.
        known: Results of texts, to which those of further texts are added.
    """
    counts = removal_counts(len(order))
    whole = text_of(case, order)
    without = [text_of(case, order[count:]) for count in counts]
    alone = [text_of(case, order[:count]) for count in counts]
    new = [text for text in {whole, *without, *alone} if text not in known]
    if new:
        known.update(zip(new, served.results(case, new).tolist(), strict=True))
    removed, kept = (np.mean([known[text] for text in texts]) for texts in (without, alone))
    return float(known[whole] - removed), float(known[whole] - kept)


if __name__ == "__main__":
    main()
