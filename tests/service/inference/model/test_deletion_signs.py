"""Explanations by deletion of the default model: signs are those of the deletions themselves."""

from collections.abc import Iterator

import pytest

import vitrine
from models.artifact import Artifact
from tests.service.inference.model.conftest import left, score

pytestmark = pytest.mark.slow

PASSAGE = (
    "The river town has an old mill. It was built in 1820 and ground wheat for a hundred years. "
    "The mill closed in 1921, when the railway came. Today a museum shows its wheels."
)
# Query, document, and some words with the document without them and the sign of their effect.
CASES = {
    "example": (
        "A feline rested on the rug.",
        "The cat sat on the mat.",
        {
            "cat": ("The sat on the mat.", 1),
            "sat": ("The cat on the mat.", -1),
            "mat": ("The cat sat on the .", 1),
        },
    ),
    "negation": (
        "The food was bad.",
        "The food was not good, and no waiter came.",
        {
            "not": ("The food was good, and no waiter came.", 1),
            "no": ("The food was not good, and waiter came.", -1),
            "waiter": ("The food was not good, and no came.", -1),
        },
    ),
    "passage": (
        "When did the mill close?",
        PASSAGE,
        {
            "closed": (PASSAGE.replace("closed ", ""), 1),
            "river": (PASSAGE.replace("river ", ""), -1),
        },
    ),
}


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[vitrine.SyncModel]:
    with vitrine.SyncModel(artifact.path, vitrine.ModelOptions(threads=1)) as model:
        yield model


@pytest.mark.parametrize("name", CASES)
def test_signs_of_words_are_those_of_their_deletion(model: vitrine.SyncModel, name: str) -> None:
    query, document, words = CASES[name]
    result = model.score(query, document, explain=vitrine.Deletion(by="words"))
    whole = float(result.scores[0])
    units = {document[unit.start : unit.end]: unit for unit in result.deletions[0].texts[0].units}
    for word, (without, sign) in words.items():
        change = whole - score(model, query, without)
        assert change * sign > 0.02, word
        assert units[word].left_out == pytest.approx(change, abs=1e-5)
    matter = 0
    for unit in result.deletions[0].texts[0].units:
        assert unit.left_out is not None
        change = whole - score(model, query, left(document, unit.start, unit.end))
        if abs(change) > 0.005:
            matter += 1
            assert change * unit.left_out > 0
    assert matter > 4
