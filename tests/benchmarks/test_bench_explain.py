"""The benchmark of explanations, with models that are hardly trained."""

from pathlib import Path

import numpy as np
import pytest

from service.inference.explain.deletion import effects_of, unit_spans, variants_of
from tests.benchmarks.bench_explain import measure
from tests.benchmarks.comparison import BenchmarkError
from tests.benchmarks.explain.methods import METHODS, methods_of, text_of
from tests.benchmarks.explain.served import ServedModel
from tests.benchmarks.explain.tasks import (
    DISTRACTORS,
    MASK,
    held_out_cases,
    training_cases,
    variants_of_kind,
)
from tests.benchmarks.explain.training import KINDS

STEPS = 3


@pytest.mark.parametrize("kind", KINDS)
def test_cases_have_evidence_at_any_place(kind: str) -> None:
    for variant in variants_of_kind(kind):
        cases = held_out_cases(kind, variant, 300)
        assert {len(case.text) for case in cases} == set(range(8, 25))
        for case in cases:
            assert len(case.planted) == (2 if variant == "two words" else 1)
            assert not {case.text[index] for index in case.planted} & {*DISTRACTORS}
        places = [place / len(case.text) for case in cases for place in case.planted]
        assert np.quantile(places, [0.1, 0.9]) == pytest.approx([0.05, 0.85], abs=0.1)


def test_relevance_is_decided_by_the_concept_of_the_query() -> None:
    cases = training_cases("reranker", np.random.default_rng(0), 400)
    for case in cases:
        assert (case.concept in case.concepts) == case.label
        assert len(case.concepts) == 3
    # A relevant document is no longer than another, on average.
    lengths = [np.mean([len(case.text) for case in cases[start::2]]) for start in (0, 1)]
    assert lengths[0] == pytest.approx(lengths[1], abs=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_method_explains_every_kind(tmp_path: Path, kind: str) -> None:
    tables, notes = measure([kind], 2, tmp_path, hidden_size=32, steps=STEPS, with_check=False)
    columns = [f"{kind}, {variant}" for variant in variants_of_kind(kind)]
    assert notes == []
    for table in tables.values():
        assert list(table.figures) == columns
        for figures in table.figures.values():
            assert figures.keys() == methods_of(kind).keys()
            assert np.isfinite([value for values in figures.values() for value in values]).all()


@pytest.mark.slow
def test_methods_measure_the_served_model(tmp_path: Path) -> None:
    (case,) = held_out_cases("reranker", "one word", 1)
    text = " ".join(case.text)
    with ServedModel("reranker", tmp_path, hidden_size=32, steps=STEPS) as served:
        with pytest.raises(BenchmarkError, match="the model reranker did not learn its task"):
            served.check_accuracy(20)
        spans = unit_spans(text, "words")
        whole, *results = served.results(case, [text, *variants_of(text, spans)])
        effects = effects_of("document", (0, len(text)), spans, float(whole), results).units
        both = METHODS["both"](served, case).order
        assert [effects[index].rank for index in both] == list(range(1, len(both) + 1))
        greedy = METHODS["greedy removal"](served, case)
        empty = served.results(case, [""])[0]
        assert greedy.values.sum() == pytest.approx(whole - empty, abs=1e-6)
        assert METHODS["Shapley, 64"](served, case).values.sum() == pytest.approx(whole - empty)
        inputs = served.gradient_inputs(case, MASK)
        value = inputs.target(*(served.reference.vectors(side.row) for side in inputs.sides))
        assert value.item() == pytest.approx(whole, abs=1e-4)
        assert text_of(case, range(len(case.text))) == text


@pytest.mark.slow
def test_terms_of_a_mean_sum_to_the_similarity(tmp_path: Path) -> None:
    (case,) = held_out_cases("mean", "one word", 1)
    with ServedModel("mean", tmp_path, hidden_size=32, steps=STEPS) as served:
        terms = METHODS["all terms"](served, case).values
        (result,) = served.results(case, [" ".join(case.text)])
        vectors = served.model.encode_tokens(" ".join(case.text)).vectors[0].astype(np.float64)
        query = served.model.encode(" ".join(case.query)).vectors[0].astype(np.float64)
        special = (vectors[0] + vectors[-1]) @ query / np.linalg.norm(vectors.sum(0))
        scale = np.linalg.norm(query)
        assert terms.sum() + special / scale == pytest.approx(result, abs=1e-5)
