"""Zero-shot classification, against the pipeline of transformers."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import pipeline

import vitrine
from models.artifact import Artifact
from models.export.exporter import export
from models.export.sources import resolve
from service.inference.explain.deletion import without
from tests.conftest import Export
from tests.models.checkpoints import save_classifier, save_tokenizer

pytestmark = pytest.mark.slow

ORDERS = {
    "mnli": ("bert", ("contradiction", "neutral", "entailment")),
    "xnli": ("roberta", ("ENTAILMENT", "neutral", "contradiction")),
    "snli": ("bert", ("contradiction", "entailment", "neutral")),
    "two": ("bert", ("entailment", "not_entailment")),
}
TEMPLATE = "w9 {} w10"
LABELS = ["w11", "w12 w13", "w14", "w15 w5"]
TEXTS = ["w5 w6 w7", "w21", "w8 w33 w6 w15 w40 w22", "w7 " * 200, ""]
words = st.lists(st.integers(5, 60).map("w{}".format), min_size=1, max_size=40).map(" ".join)


def saved(exported: Export, name: str, family: str, labels: Sequence[str]) -> Artifact:
    def write(out: Any) -> None:  # noqa: ANN401
        model = out.with_name("model")
        label2id = {label: index for index, label in enumerate(labels)}
        id2label = dict(enumerate(labels))
        save_classifier(model, family, len(labels), id2label=id2label, label2id=label2id)
        save_tokenizer(model)
        export(resolve(str(model)), out)

    return exported(f"zero-shot-{name}", write)


@pytest.fixture(scope="module", params=list(ORDERS))
def models(
    request: pytest.FixtureRequest, exported: Export
) -> Iterator[tuple[vitrine.SyncModel, Any]]:
    """A served model and the pipeline."""
    artifact = saved(exported, request.param, *ORDERS[request.param])
    oracle = pipeline("zero-shot-classification", str(artifact.path / "source"), device="cpu")
    with vitrine.SyncModel(artifact.path, vitrine.ModelOptions(threads=1)) as model:
        yield model, oracle


@pytest.fixture(scope="module")
def odd(exported: Export) -> Iterator[vitrine.SyncModel]:
    """A model whose first label is neither entailment nor contradiction."""
    artifact = saved(exported, "odd", "bert", ("neutral", "entailment", "contradiction"))
    with vitrine.SyncModel(artifact.path, vitrine.ModelOptions(threads=1)) as model:
        yield model


@settings(max_examples=20)
@given(
    texts=st.lists(words, min_size=1, max_size=4),
    labels=st.lists(words.filter(lambda own: len(own) < 30), min_size=1, max_size=5, unique=True),
    multi_label=st.booleans(),
)
def test_scores_are_those_of_the_pipeline(
    models: tuple[vitrine.SyncModel, Any], texts: list[str], labels: list[str], multi_label: bool
) -> None:
    check(models, texts, labels, multi_label=multi_label)


@pytest.mark.parametrize("multi_label", [False, True])
def test_long_and_empty_texts_are_scored_as_by_the_pipeline(
    models: tuple[vitrine.SyncModel, Any], multi_label: bool
) -> None:
    # Beside a long hypothesis, a text can be the shorter one, and loses tokens nevertheless.
    long = ["w8 w33 w6 w15 w40 w22 w5 w6 w7 w8 w9", " ".join(["w14"] * 11)]
    check(models, [long[0], *TEXTS[2:4]], [*LABELS, long[1]], multi_label=multi_label)
    result = check(models, TEXTS[:-1], LABELS, multi_label=multi_label)
    assert [row.truncated for row in result.rows] == [False, False, False, True]


def check(
    models: tuple[vitrine.SyncModel, Any],
    texts: Sequence[str],
    labels: Sequence[str],
    *,
    multi_label: bool,
) -> vitrine.Classification:
    model, oracle = models
    candidates = vitrine.CandidateLabels(
        labels=labels, hypothesis_template=TEMPLATE, multi_label=multi_label
    )
    result = model.classify(texts, candidates=candidates)
    named = {"hypothesis_template": TEMPLATE, "multi_label": multi_label}
    expected = oracle(list(texts), list(labels), **named)
    for index, own in enumerate(expected):
        by_label = dict(zip(own["labels"], own["scores"], strict=True))
        assert result.scores[index] == pytest.approx(
            [by_label[label] for label in labels], abs=1e-5
        )
        best = [labels[column] for column in result.best_labels()[index]]
        assert [by_label[label] for label in best] == pytest.approx(own["scores"], abs=1e-5)
    return result


def test_contradiction_is_found_by_its_name(odd: vitrine.SyncModel) -> None:
    candidates = vitrine.CandidateLabels(labels=LABELS, hypothesis_template=TEMPLATE)
    single = [
        vitrine.CandidateLabels(labels=[label], hypothesis_template=TEMPLATE) for label in LABELS
    ]
    independent = vitrine.CandidateLabels(
        labels=LABELS, hypothesis_template=TEMPLATE, multi_label=True
    )
    pairs = [(TEXTS[0], TEMPLATE.format(label)) for label in LABELS]
    logits = odd.classify(pairs).logits
    expected = [math.exp(e) / (math.exp(e) + math.exp(c)) for _, e, c in logits.tolist()]
    found = odd.classify(TEXTS[0], candidates=independent).scores
    assert found[0] == pytest.approx(expected, abs=1e-6)
    alone = [odd.classify(TEXTS[0], candidates=own).scores[0, 0] for own in single]
    assert alone == pytest.approx(expected, abs=1e-6)
    shares = np.exp(logits[:, 1]) / np.exp(logits[:, 1]).sum()
    assert odd.classify(TEXTS[0], candidates=candidates).scores[0] == pytest.approx(
        shares, abs=1e-6
    )


@pytest.mark.parametrize("by", ["words", "sentences"])
@pytest.mark.parametrize("text", ["It w5 w6. A w7 w8.", "It w5 w6 w7. " * 12])
def test_explanations_are_differences_of_scores_of_a_label(
    odd: vitrine.SyncModel,
    by: Literal["words", "sentences"],
    text: str,
) -> None:
    candidates = vitrine.CandidateLabels(labels=LABELS, hypothesis_template=TEMPLATE)
    deletion = vitrine.Deletion(by=by, label="w14")
    result = odd.classify(text, candidates=candidates, explain=deletion)
    (effects,) = result.deletions[0].texts
    assert result.deletions[0].label == "w14"
    part = text[slice(*effects.read)]
    assert not odd.classify(part, candidates=candidates).rows[0].truncated

    def score(variant: str) -> float:
        return float(odd.classify(variant, candidates=candidates).scores[0, 2])

    assert effects.whole == pytest.approx(score(part), abs=1e-6)
    assert len(effects.units) > 1
    for unit in effects.units:
        content = text[unit.start : unit.end]
        assert unit.alone == pytest.approx(score(content) - score(""), abs=1e-5)
        if unit.left_out is not None:
            variant = without(part, (unit.start - effects.read[0], unit.end - effects.read[0]))
            assert unit.left_out == pytest.approx(effects.whole - score(variant), abs=1e-5)
    assert any(unit.left_out is not None for unit in effects.units)


def test_best_label_is_explained_by_default(odd: vitrine.SyncModel) -> None:
    candidates = vitrine.CandidateLabels(labels=LABELS, hypothesis_template=TEMPLATE)
    result = odd.classify(TEXTS[:2], candidates=candidates, explain=True)
    assert [result.deletions[index].label for index in (0, 1)] == [
        LABELS[best[0]] for best in result.best_labels(1)
    ]


@pytest.mark.parametrize(
    ("fields", "pointer", "problem"),
    [
        ({"labels": []}, "/candidate_labels", "at least one"),
        ({"labels": ["a", "a"]}, "/candidate_labels", "each once"),
        ({"labels": "a, b"}, "/candidate_labels", "must be a list"),
        ({"labels": {"a", "b"}}, "/candidate_labels", "must be a list, not"),
        ({"labels": None}, "/candidate_labels", "must be a list, not"),
        ({"labels": ["a", 5]}, "/candidate_labels/1", "expected a text"),
        ({"labels": ["a", " "]}, "/candidate_labels/1", "empty"),
        ({"labels": ["a"], "multi_label": "no"}, "/multi_label", "must be a bool"),
        ({"labels": ["a"], "multi_label": None}, "/multi_label", "must be a bool"),
        *(
            ({"labels": ["a"], "hypothesis_template": template}, "/hypothesis_template", "{}")
            for template in ("a", "{", "{{}}", "{x}", "{:>9}", "{!r}", "{0.x}", "{1}", "{0}{0}", 5)
        ),
    ],
)
def test_wrong_labels_and_templates_are_refused(
    fields: dict[str, Any], pointer: str, problem: str
) -> None:
    with pytest.raises(vitrine.InvalidInput, match=problem) as raised:
        vitrine.CandidateLabels(**fields)
    assert raised.value.pointer == pointer


def test_braces_are_those_of_format() -> None:
    candidates = vitrine.CandidateLabels(labels=["a{}"], hypothesis_template="{{{0}}} b")
    assert candidates.hypotheses == ["{a{}} b"]


def test_wrong_models_and_inputs_are_refused(
    odd: vitrine.SyncModel, small_artifact: Artifact, exported: Export
) -> None:
    candidates = vitrine.CandidateLabels(labels=["w5", "w6"])
    with pytest.raises(vitrine.InvalidInput, match="not for pairs") as raised:
        odd.classify(["w5", ("w5", "w6")], candidates=candidates)
    assert raised.value.index == 1
    for label in ("\ud800", "w5 " * 40_000):
        wrong = vitrine.CandidateLabels(labels=["w5", label])
        with pytest.raises(vitrine.VitrineError) as failed:
            odd.classify("w5", candidates=wrong, explain=True)
        assert failed.value.pointer == "/candidate_labels/1"
    long = vitrine.CandidateLabels(labels=["w5", "w6 " * 100])
    with pytest.raises(vitrine.InvalidInput, match="leave no room") as raised:
        odd.classify("w5", candidates=long)
    assert raised.value.pointer == "/candidate_labels/1"
    with pytest.raises(vitrine.InvalidInput, match="more than") as raised:
        odd.classify(["w5", "w5 " * 300], candidates=candidates, on_overflow="error")
    assert raised.value.index == 1
    with pytest.raises(vitrine.InvalidInput, match="6000 texts and 2 labels make 12000 pairs"):
        odd.classify(["w5"] * 6000, candidates=candidates)
    with (
        vitrine.SyncModel(small_artifact.path) as model,
        pytest.raises(vitrine.InvalidInput, match="cannot classify"),
    ):
        model.classify("w5", candidates=candidates)
    artifact = saved(exported, "none", "bert", ("happy", "sad"))
    with (
        vitrine.SyncModel(artifact.path) as model,
        pytest.raises(vitrine.InvalidInput, match="has the labels happy, sad"),
    ):
        model.classify("w5", candidates=candidates)
