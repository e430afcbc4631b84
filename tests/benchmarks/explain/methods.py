"""Methods that explain a result by the words of a text."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from models.gradients.attribution import attribute
from models.gradients.inputs import Method as GradientMethod
from service.inference.explain.deletion import unit_spans, without
from service.inference.explain.options import Terms
from service.inference.explain.shapley import shapley_values, subsets_of
from tests.benchmarks.explain.served import TrainedModel, Values
from tests.benchmarks.explain.tasks import MASK, PAD, VOCABULARY, EvidenceCase


@dataclass(frozen=True)
class Explained:
    """Scores of the words of a text.

    Attributes:
        values: Score of each word; positive: it speaks for the result.
        order: Indices of the words, the most important first.
    """

    values: Values
    order: Sequence[int]


# Words of a paragraph of the text that is explained by the default.
_PARAGRAPH = 6

Method = Callable[[TrainedModel, EvidenceCase], Explained]


def text_of(case: EvidenceCase, kept: Collection[int]) -> str:
    """Return the text of a case with some of its words, as deletion of the others leaves it."""
    return " ".join(word for index, word in enumerate(case.text) if index in kept)


def _ordered(values: Values) -> Explained:
    return Explained(values, np.argsort(-values, kind="stable").tolist())


def _left_out(served: TrainedModel, case: EvidenceCase) -> Explained:
    text, spans = _units(case)
    whole, *others = served.results(case, [text, *(without(text, span) for span in spans)])
    return _ordered(whole - np.array(others))


def _alone(served: TrainedModel, case: EvidenceCase) -> Explained:
    text, spans = _units(case)
    empty, *others = served.results(case, ["", *(text[slice(*span)] for span in spans)])
    return _ordered(np.array(others) - empty)


def _both(served: TrainedModel, case: EvidenceCase) -> Explained:
    """Rank as `service.inference.explain.deletion` does."""
    return _ordered(np.sum(_left_out_and_alone(served, case), 0))


def _normalised(served: TrainedModel, case: EvidenceCase) -> Explained:
    """Add both numbers, each divided by its norm over the words."""
    parts = _left_out_and_alone(served, case)
    return _ordered(np.sum([part / (np.linalg.norm(part) or 1) for part in parts], 0))


def _left_out_and_alone(served: TrainedModel, case: EvidenceCase) -> tuple[Values, Values]:
    text, spans = _units(case)
    variants = [*(without(text, span) for span in spans), *(text[slice(*span)] for span in spans)]
    whole, empty, *others = served.results(case, [text, "", *variants])
    return whole - np.array(others[: len(spans)]), np.array(others[len(spans) :]) - empty


def _units(case: EvidenceCase) -> tuple[str, list[tuple[int, int]]]:
    text = " ".join(case.text)
    spans = unit_spans(text, "words")
    assert len(spans) == len(case.text)
    return text, spans


def _automatic(served: TrainedModel, case: EvidenceCase) -> Explained:
    """Explain a text of short paragraphs as a request does that names no units.

    The paragraphs are its sentences. Words outside the best two have no number, and are last.
    """
    parts = [
        case.text[start : start + _PARAGRAPH] for start in range(0, len(case.text), _PARAGRAPH)
    ]
    text = "\n\n".join(" ".join(part) for part in parts)
    (effects,) = served.explanation(case, text).raw_texts
    spans = unit_spans(text, "words")
    values = np.full(len(spans), -np.inf)
    for unit in effects.words or effects.units:
        values[spans.index((unit.start, unit.end))] = (unit.left_out or 0) + (unit.alone or 0)
    return _ordered(values)


def _greedy(served: TrainedModel, case: EvidenceCase) -> Explained:
    """Remove the word whose removal leaves the lowest result, until none is left.

    The score of a word is the decrease by its removal from the words that were left.
    """
    kept = list(range(len(case.text)))
    values, order = np.zeros(len(kept)), []
    (whole,) = served.results(case, [text_of(case, kept)])
    while kept:
        without = [text_of(case, {*kept} - {index}) for index in kept]
        results = served.results(case, without)
        lowest = int(results.argmin())
        index = kept.pop(lowest)
        values[index], whole = whole - results[lowest], results[lowest]
        order.append(index)
    return Explained(values, order)


def _shapley(served: TrainedModel, case: EvidenceCase, samples: int) -> Explained:
    subsets = subsets_of(len(case.text), samples)
    texts = [text_of(case, {*np.flatnonzero(kept).tolist()}) for kept in subsets]
    full, empty, *results = served.results(case, [" ".join(case.text), "", *texts])
    values, _ = shapley_values(subsets, np.array(results), full, empty)
    return _ordered(values)


def _gradients(
    served: TrainedModel,
    case: EvidenceCase,
    method: GradientMethod,
    baseline: str = PAD,
    *,
    with_query: bool = False,
) -> Explained:
    inputs = served.gradient_inputs(case, baseline, with_query=with_query)
    result = attribute(served.reference, inputs.sides, inputs.target, method=method)
    return _ordered(result.scores[inputs.first : inputs.first + len(case.text)])


def _terms(served: TrainedModel, case: EvidenceCase) -> Explained:
    """Sum the terms of each word that `explain` returns: the ten largest."""
    text, spans = _units(case)
    result = served.model.score(" ".join(case.query), text, explain=Terms())
    values = np.zeros(len(spans))
    for term in result.explanations[0].terms:
        span, token = term.document.span, term.document.id
        for index, word in enumerate(case.text):
            # A term of sparse vectors is a vocabulary entry without a span.
            if span == spans[index] or (span is None and token == VOCABULARY[word]):
                values[index] += term.value
    return _ordered(values)


def _all_terms(served: TrainedModel, case: EvidenceCase) -> Explained:
    """Sum all terms of each word of a mean of token vectors."""
    query, text = (
        served.model.encode_tokens(" ".join(words)).vectors[0].astype(np.float64)
        for words in (case.query, case.text)
    )
    lengths = np.linalg.norm(query.sum(0)) * np.linalg.norm(text.sum(0))
    return _ordered(text[1:-1] @ query.sum(0) / lengths)


def _random(_served: TrainedModel, case: EvidenceCase) -> Explained:
    seed = [VOCABULARY[word] for word in case.text]
    return _ordered(np.random.default_rng(seed).normal(size=len(case.text)))


METHODS: Mapping[str, Method] = {
    "random": _random,
    "ten largest terms": _terms,
    "all terms": _all_terms,
    "left out": _left_out,
    "alone": _alone,
    "both": _both,
    "both, normalised": _normalised,
    "default, text in paragraphs": _automatic,
    "greedy removal": _greedy,
    "Shapley, 64": partial(_shapley, samples=64),
    "Shapley, 256": partial(_shapley, samples=256),
    "integrated gradients": partial(_gradients, method="integrated_gradients"),
    "integrated gradients, mask": partial(_gradients, method="integrated_gradients", baseline=MASK),
    # The default of `/debug/attribute`, whose baseline has no words of the query either.
    "integrated gradients, query too": partial(
        _gradients, method="integrated_gradients", with_query=True
    ),
    "gradient x input": partial(_gradients, method="grad_x_input"),
    "occlusion, mask": partial(_gradients, method="occlusion", baseline=MASK),
}
_KINDS = {
    "integrated gradients, query too": ("reranker", "ColBERT"),
    "ten largest terms": ("mean", "SPLADE", "ColBERT"),
    "all terms": ("mean",),
}


def methods_of(kind: str) -> Mapping[str, Method]:
    """Return the methods that apply to a kind of model."""
    return {name: method for name, method in METHODS.items() if kind in _KINDS.get(name, (kind,))}
