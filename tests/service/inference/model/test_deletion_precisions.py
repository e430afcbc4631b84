"""Explanations by deletion in bfloat16 and int8: exact up to what a result depends on its batch."""

import pytest

import vitrine
from models.artifact import Artifact
from models.engines import ENGINES, Precision
from service.inference.explain.deletion import unit_spans, without

pytestmark = pytest.mark.slow

QUERY, DOCUMENT = "w5 cat", "w9 w40. w5 w6 cat sat not w7 w8."


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_numbers_are_differences_of_scores_within_the_dependence_on_the_batch(
    int8_artifact: Artifact, precision: Precision
) -> None:
    if reason := ENGINES["openvino"].unusable(precision):
        pytest.skip(reason)
    spans = unit_spans(DOCUMENT, "words")
    variants = [
        *(DOCUMENT, ""),
        *(without(DOCUMENT, span) for span in spans),
        *(DOCUMENT[slice(*span)] for span in spans),
    ]
    options = vitrine.ModelOptions(engine="openvino", precision=precision, threads=1)
    with vitrine.SyncModel(int8_artifact.path, options) as model:
        alone = [float(model.score(QUERY, variant).scores[0]) for variant in variants]
        dependence = 0.0
        for count in (2, 5, len(variants)):
            for first in range(0, len(variants), count):
                own = variants[first : first + count]
                scores = model.score(QUERY, own).scores.tolist()
                pairs = zip(scores, alone[first:], strict=False)
                dependence = max(dependence, *(abs(score - other) for score, other in pairs))
        result = model.score(QUERY, DOCUMENT, explain=vitrine.Deletion())
    # The composition of the batch is another one, and a difference has two results.
    bound = 4 * dependence + 1e-6
    (text,) = result.deletions[0].texts
    assert text.whole == pytest.approx(alone[0], abs=bound)
    numbers = [number for unit in text.units for number in (unit.left_out, unit.alone)]
    left_out, by_itself = alone[2 : 2 + len(spans)], alone[2 + len(spans) :]
    for unit, rest, own_score in zip(text.units, left_out, by_itself, strict=True):
        assert unit.left_out == pytest.approx(alone[0] - rest, abs=bound)
        assert unit.alone == pytest.approx(own_score - alone[1], abs=bound)
    assert max(abs(number) for number in numbers if number is not None) > 5 * bound
