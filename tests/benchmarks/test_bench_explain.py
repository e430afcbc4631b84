"""The benchmark of explanations, with models that are hardly trained."""

from collections.abc import Iterator

import numpy as np
import pytest

from service.inference.explain.deletion import effects_of, unit_spans, without
from tests.benchmarks.bench_explain import MEASURES, measure
from tests.benchmarks.comparison import BenchmarkError, Turns
from tests.benchmarks.explain.kinds import KINDS
from tests.benchmarks.explain.methods import METHODS, methods_of, text_of
from tests.benchmarks.explain.served import TrainedModel
from tests.benchmarks.explain.tasks import (
    DISTRACTORS,
    MASK,
    VOCABULARY,
    held_out_cases,
    training_cases,
    variants_of_kind,
)


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


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainedModel]:
    with TrainedModel(request.param, tmp_path_factory.mktemp("served"), 32, steps=3) as model:
        yield model


@pytest.mark.slow
def test_every_method_explains_every_kind(served: TrainedModel) -> None:
    tables = {title: Turns() for title in MEASURES}
    measure(tables, served, 2)
    variants = [f"{served.kind}, {variant}" for variant in variants_of_kind(served.kind)]
    for table in tables.values():
        assert list(table.figures) == variants
        for figures in table.figures.values():
            assert figures.keys() == methods_of(served.kind).keys()
            assert np.isfinite([value for values in figures.values() for value in values]).all()


@pytest.mark.slow
def test_methods_explain_the_served_result(served: TrainedModel) -> None:
    (case,) = held_out_cases(served.kind, "one word", 1)
    text = " ".join(case.text)
    assert text_of(case, range(len(case.text))) == text
    spans = unit_spans(text, "words")
    variants = [*(without(text, span) for span in spans), *(text[slice(*span)] for span in spans)]
    whole, empty, *results = served.results(case, [text, "", *variants])
    left_out, alone = results[: len(spans)], results[len(spans) :]
    effects = effects_of(0, spans, float(whole), float(empty), left_out, alone)
    both = METHODS["both"](served, case).order
    assert [effects[index].rank for index in both] == list(range(1, len(both) + 1))
    change = whole - served.results(case, [""])[0]
    for name in ("greedy removal", "Shapley, 64"):
        assert METHODS[name](served, case).values.sum() == pytest.approx(change, abs=1e-6)
    inputs = served.gradient_inputs(case, MASK)
    rows = [side.row for side in inputs.sides]
    vectors = [served.reference.vectors(row) for row in rows]
    assert inputs.target(*vectors).item() == pytest.approx(whole, abs=1e-4)
    ids = [token for row in rows for token in row.ids][inputs.first :][: len(case.text)]
    assert ids == [VOCABULARY[word] for word in case.text]
    if served.kind == "mean":
        own, query = (
            served.model.encode_tokens(" ".join(words)).vectors[0].astype(np.float64).sum(0)
            for words in (case.text, case.query)
        )
        tokens = served.model.encode_tokens(text).vectors[0].astype(np.float64)
        special = (tokens[0] + tokens[-1]) @ query
        special /= np.linalg.norm(own) * np.linalg.norm(query)
        terms = METHODS["all terms"](served, case).values
        assert terms.sum() + special == pytest.approx(whole, abs=1e-5)


@pytest.mark.slow
def test_model_that_did_not_learn_is_refused(served: TrainedModel) -> None:
    with pytest.raises(BenchmarkError, match=f"the model {served.kind} did not learn its task"):
        served.check_accuracy(50)
