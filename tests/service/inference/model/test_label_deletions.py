"""Explanations of labels by deletion, against results of `classify` for the variants."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vitrine
from models.artifact import Artifact
from models.manifest import MANIFEST
from service.inference.results.loaded_model import LoadedModel
from tests.models.checkpoints import edit_json
from tests.service.inference.model.conftest import TEXT, THREAD, left

pytestmark = pytest.mark.slow

BOUND = 2e-5


@settings(max_examples=8)
@given(
    first=TEXT,
    second=st.none() | TEXT,
    by=st.sampled_from(["words", "sentences", "chunks"]),
    column=st.sampled_from([None, 0, 2]),
)
def test_each_number_is_the_difference_of_two_results(
    labeler: vitrine.SyncModel, first: str, second: str | None, by: str, column: int | None
) -> None:
    own = first if second is None else (first, second)
    plain = labeler.classify([own])
    label = None if column is None else plain.labels[column]
    deletion = vitrine.Deletion(by=by, label=label)  # type: ignore[arg-type]
    result = labeler.classify([own], explain=deletion)
    np.testing.assert_allclose(result.logits, plain.logits, atol=BOUND)
    assert result.labels == plain.labels
    assert len(result.rows) == 1
    explanation = result.deletions[0]
    if column is None:
        column = int(result.logits[0].argmax())
    assert explanation.label == plain.labels[column]
    texts = [first] if second is None else [first, second]
    parts = [
        text[slice(*effects.read)] for text, effects in zip(texts, explanation.texts, strict=True)
    ]
    assert result.rows[0].truncated or parts == texts

    def values(*texts: str) -> tuple[float, float]:
        scored = labeler.classify([texts[0] if len(texts) == 1 else (texts[0], texts[1])])
        return float(scored.scores[0, column]), float(scored.logits[0, column])

    whole = values(*parts)
    for raw, own_texts in enumerate((explanation.texts, explanation.raw_texts)):
        for at, effects in enumerate(own_texts):
            assert (effects.text, effects.by) == (at, by)

            def varied(variant: str, at: int = at) -> tuple[float, float]:
                return values(
                    *(variant if at == other else parts[other] for other in range(len(parts)))
                )

            empty = varied("")
            assert effects.whole == pytest.approx(whole[raw], abs=BOUND)
            assert effects.empty == pytest.approx(empty[raw], abs=BOUND)
            for unit in effects.units:
                span = unit.start - effects.read[0], unit.end - effects.read[0]
                without = varied(left(parts[at], *span))[raw]
                assert unit.left_out == pytest.approx(whole[raw] - without, abs=BOUND)
                alone = varied(parts[at][slice(*span)])[raw] - empty[raw]
                assert unit.alone == pytest.approx(alone, abs=BOUND)


def test_words_are_those_of_the_sentences_that_rank_first(labeler: vitrine.SyncModel) -> None:
    text = "w5 w6. w7 w9! w40 w8? w21. w33 w5."
    inputs = [text, " ".join(reversed(text.split())), f"w50! {text}", f"{text} w12 w13!"]
    for label in (None, *labeler.classify([text]).labels):
        result = labeler.classify(inputs, explain=vitrine.Deletion(label=label, max_tokens=20_000))
        for explanation in result.deletions.values():
            (own,) = explanation.texts
            best = [(unit.start, unit.end) for unit in own.units if unit.rank <= 2]
            words = {span for span in best for word in own.words if span[0] <= word.start < span[1]}
            assert (words, bool(own.words)) == ({*best}, True)
            assert all(any(a <= word.start < b for a, b in best) for word in own.words)


def test_the_best_label_of_each_input_is_explained(labeler: vitrine.SyncModel) -> None:
    inputs: list[str | tuple[str, str]] = ["w5 w9", ("w40 cat", "w7"), "not w6", "w21"]
    result = labeler.classify(inputs, explain=vitrine.Deletion())
    best = [result.labels[row[0]] for row in result.best_labels(1)]
    assert [explanation.label for explanation in result.deletions.values()] == best
    assert [len(explanation.texts) for explanation in result.deletions.values()] == [1, 2, 1, 1]
    assert result.explanation_tokens > sum(len(row.ids) for row in result.rows)


def test_the_best_of_labels_with_the_same_name_is_explained(
    classifier: Artifact,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "same-names"
    shutil.copytree(classifier.path, folder)
    edit_json(folder / MANIFEST, labels=["same", "same", "other"])
    inputs = ["w5 w9", "w40 cat", "w8", "w21"]
    with vitrine.SyncModel(folder, THREAD) as model:
        best = model.classify(inputs, explain=vitrine.Deletion())
        named = model.classify(inputs, explain=vitrine.Deletion(label="same"))
    for result, columns in ((best, [0, 1, 2]), (named, [0, 1])):
        wholes = [result.deletions[index].texts[0].whole for index in range(len(inputs))]
        assert wholes == result.scores[:, columns].max(axis=1).tolist()
    assert {*best.scores[:, :2].argmax(axis=1)} == {0, 1}


@pytest.mark.parametrize(
    ("deletion", "pointer"),
    [
        (vitrine.Deletion(label="w"), "/explain/label"),
        (vitrine.Deletion(top_n=1), "/explain/top_n"),
        (vitrine.Deletion(of="both"), "/explain/of"),
        (vitrine.Deletion(max_tokens=3), "/explain"),
    ],
)
def test_options_that_do_not_apply_are_named(
    labeler: vitrine.SyncModel, deletion: vitrine.Deletion, pointer: str
) -> None:
    with pytest.raises(vitrine.InvalidInput) as raised:
        labeler.classify("w5", explain=deletion)
    assert raised.value.pointer == pointer


def test_errors_name_the_input(labeler: vitrine.SyncModel) -> None:
    with pytest.raises(vitrine.InvalidInput) as raised:
        labeler.classify(["w5", "\ud800"], explain=vitrine.Deletion())
    assert raised.value.pointer == "/inputs/1"
    with pytest.raises(vitrine.InvalidInput, match="by a Deletion"):
        labeler.classify("w5", explain=vitrine.Terms())  # type: ignore[arg-type]


def test_of_many_inputs_to_classify_those_that_fit_are_explained(
    labeler: vitrine.SyncModel,
) -> None:
    inputs = [f"w{index} w5 cat" for index in range(5, 45)]
    deletion = vitrine.Deletion(by="words", max_tokens=200)
    result = labeler.classify(inputs, explain=deletion)
    assert len(result.rows) == len(inputs)
    assert 0 < len(result.deletions) < len(inputs)
    assert [*result.deletions] == [*range(len(result.deletions))]
    assert result.explanation_tokens <= 200


@pytest.mark.parametrize("count", [1, 40])
def test_the_explained_label_is_that_of_the_result_even_if_later_results_differ(
    labeler: vitrine.SyncModel, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    variants: list[vitrine.Row] = []
    run = LoadedModel.run

    async def negated(model: LoadedModel, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        rows, (logits,), seconds = await run(model, *arguments, **named)
        if not named.get("count_tokens"):
            return rows, (logits,), seconds
        variants.extend(rows)
        return rows, ([-own for own in logits],), seconds

    monkeypatch.setattr(LoadedModel, "run", negated)
    inputs = [f"w{index} w5 cat" for index in range(6, 6 + count)]
    result = labeler.classify(inputs, explain=vitrine.Deletion(by="words", max_tokens=2000))
    assert result.deletions
    for index, explanation in result.deletions.items():
        column = result.best_labels(1)[index][0]
        assert explanation.label == result.labels[column]
        assert explanation.texts[0].whole == result.scores[index, column]
        assert explanation.raw_texts[0].whole == result.logits[index, column]
    # No input runs again.
    own = {tuple(row.ids) for row in result.rows}
    assert own.isdisjoint(tuple(row.ids) for row in variants)
