"""Faithfulness, against transformers' models on ids without the removed tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from models.export.checkpoint import load
from models.export.sentence_config import Overrides
from models.gradients import attribution
from models.gradients.budget import RANDOM_ORDERS, faithfulness_token_steps, removal_counts
from models.gradients.faithfulness import faithfulness, opposite_signs, rank_correlation
from models.gradients.inputs import InputRow, Units, without
from models.gradients.maxsim import maxsim
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.attribution import FaithfulnessPoint, UnitRemoval
from tests.models.checkpoints import save_checkpoint, save_tokenizer
from tests.models.gradients.toys import toy_model

# Id 1 is the padding token of RoBERTa, from which its positions are computed.
IDS = [0, 7, 21, 4, 9, 33, 12, 51, 8, 44, 17, 2]
UNITS = Units("words", [[1], [2, 3], [4], [5], [6, 7, 8], [9], [10]])
SCORES = np.array([9.0, 0.3, -0.2, 0.9, 0.1, -1.0, 0.2, 0.3, 0.1, 0.0, 0.4, 9.0])
# Units by descending sum of their tokens' scores.
ORDER = [1, 4, 6, 0, 2, 5, 3]


@pytest.mark.slow
# Positions from a table, from the padding id, in buckets, rotary and causal, and disentangled.
@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet", "qwen3", "deberta-v2"])
def test_faithfulness_equals_transformers_on_ids_without_the_tokens(
    family: str, tmp_path: Path
) -> None:
    oracle = save_checkpoint(tmp_path, family).double()
    save_tokenizer(tmp_path)
    network = load(tmp_path, Overrides(pooling=["mean"]))[0].double()
    model = ReferenceModel(network, normalize=True)
    other = torch.linspace(-1, 1, 32, dtype=torch.float64)

    def cosine(removed: set[int]) -> float:
        ids = [token for position, token in enumerate(IDS) if position not in removed]
        with torch.no_grad():
            hidden = oracle(input_ids=torch.tensor([ids])).last_hidden_state
        return float(torch.cosine_similarity(hidden.mean(1)[0], other, dim=0))

    def effects(order: Sequence[int]) -> list[tuple[float, float]]:
        parts = [set(UNITS.tokens[unit]) for unit in order]
        kept = set.union(*parts)
        first = [set.union(*parts[:count]) for count in (1, 2, 4)]
        whole = cosine(set())
        return [(whole - cosine(part), whole - cosine(kept - part)) for part in first]

    result = faithfulness(model, [InputRow(IDS)], attribution.cosine(other), UNITS, SCORES, seed=5)
    assert result is not None
    assert [(point.share, point.count) for point in result.points] == [
        (0.05, 1),
        (0.2, 2),
        (0.5, 4),
    ]
    expected = np.array(effects(ORDER))
    actual = [(point.comprehensiveness, point.sufficiency) for point in result.points]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)
    assert np.abs(expected).min() > 1e-5
    means = result.comprehensiveness, result.sufficiency
    np.testing.assert_allclose(means, expected.mean(0), rtol=1e-4, atol=1e-6)
    draw = np.random.default_rng(5)
    random = np.array([effects(draw.permutation(7).tolist()) for _ in range(RANDOM_ORDERS)])
    means = result.random.comprehensiveness, result.random.sufficiency
    np.testing.assert_allclose(means, random.mean((0, 1)), rtol=1e-4, atol=1e-6)
    alone = [cosine(set()) - cosine(set(unit)) for unit in UNITS.tokens]
    scores = [SCORES[unit].sum() for unit in UNITS.tokens]
    assert [list(each.tokens) for each in result.effects] == UNITS.tokens
    assert [each.score for each in result.effects] == pytest.approx(scores)
    actual_effects = [each.effect for each in result.effects]
    np.testing.assert_allclose(actual_effects, alone, rtol=1e-4, atol=1e-6)
    assert result.rank_correlation == pytest.approx(spearmanr(scores, alone).statistic)
    pairs = zip(scores, alone, strict=True)
    opposite = [s * a < 0 for s, a in pairs if abs(a) >= max(map(abs, alone)) / 10]
    assert result.opposite_signs == pytest.approx(sum(opposite) / len(opposite))
    unsigned = faithfulness(
        model, [InputRow(IDS)], attribution.cosine(other), UNITS, SCORES, is_signed=False
    )
    assert unsigned is not None
    assert unsigned.opposite_signs is None
    assert unsigned.rank_correlation == result.rank_correlation


@pytest.mark.parametrize("values", [1000, 10, 3])  # equal values are rare, common, the rule
def test_rank_correlation_equals_scipy(values: int) -> None:
    draw = np.random.default_rng(values)
    for units in (2, 3, 40):
        scores = draw.permutation(np.arange(units) % values).astype(float)
        effects = draw.permutation(np.arange(units) % values) ** 3 - 20.0
        expected = spearmanr(scores, effects).statistic
        assert rank_correlation(scores, effects) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "effects"),
    [
        ([1.0], [1.0]),
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]),
        ([1.0, 2.0, 3.0], [0.5, 0.5, 0.5]),
        ([1.0, 2.0, 3.0], [1.0, np.nan, 3.0]),
        ([1.0, 2.0, np.inf], [1.0, 2.0, 3.0]),
    ],
    ids=["one unit", "equal scores", "equal effects", "no effect", "infinite score"],
)
def test_rank_correlation_of_too_little_is_undefined(
    scores: list[float], effects: list[float]
) -> None:
    assert rank_correlation(np.array(scores), np.array(effects)) is None


@pytest.mark.parametrize(
    ("scores", "effects", "expected"),
    [
        ([1.0, -2.0, 3.0], [0.5, -0.1, 0.2], 0),
        ([-1.0, -2.0, 3.0, 1.0], [0.5, -0.1, 0.2, 0.3], 1 / 4),
        ([1.0, 2.0, -3.0], [-0.5, -0.1, 0.2], 1),
        # An effect of a tenth of the largest counts, and a smaller one does not.
        ([1.0, 1.0, 1.0], [-10.0, -1.0, 0.99], 1),
        ([1.0, 1.0, -1.0], [10.0, -1.0, 0.99], 1 / 2),
        ([0.0, 1.0], [10.0, 10.0], 0),  # a score of 0 has no sign
        ([-1.0], [1.0], 1),
        ([1.0, 1.0], [0.0, 0.0], None),
        ([1.0, 1.0], [1.0, np.nan], None),
        ([np.nan, 1.0], [1.0, 1.0], None),
    ],
)
def test_opposite_signs_are_counted_among_the_units_that_matter(
    scores: list[float], effects: list[float], expected: float | None
) -> None:
    assert opposite_signs(np.array(scores), np.array(effects)) == expected


def test_removal_keeps_the_other_fields_of_the_tokens() -> None:
    row = InputRow(
        [0, 5, 6, 7, 8, 9],
        prompt_tokens=2,
        adapter=1,
        token_types=[0, 0, 0, 1, 1, 1],
        unattended=2,
        vector_positions=[0, 2, 3, 5],
    )
    assert without(row, {1, 3, 4}) == InputRow(
        [0, 6, 9],
        prompt_tokens=1,
        adapter=1,
        token_types=[0, 0, 1],
        unattended=1,
        vector_positions=[0, 1, 2],
    )
    assert without(row, {0, 2, 3, 5}).vector_positions == []
    assert without(InputRow([0, 5]), {1}) == InputRow([0])


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (0, []),
        (1, [1]),
        (2, [1]),
        (3, [1, 2]),
        (10, [1, 2, 5]),
        (20, [1, 2, 4, 10]),
        (21, [2, 3, 5, 11]),
        (60, [3, 6, 12, 30]),
    ],
)
def test_counts_are_the_shares_rounded_up_without_duplicates(
    units: int, expected: list[int]
) -> None:
    assert list(removal_counts(units)) == expected


def test_input_without_tokens_has_no_effect_of_removal() -> None:
    model, row = toy_model(), InputRow([5])
    target = attribution.dim(0, normalize=False)
    result = faithfulness(model, [row], target, Units("tokens", [[0]]), np.ones(1))
    assert result is not None
    (point,) = result.points
    assert np.isnan(point.comprehensiveness)
    assert replace(point, comprehensiveness=0.0) == FaithfulnessPoint(0.05, 1, 0.0, 0.0)
    (effect,) = result.effects
    assert np.isnan(effect.effect)
    assert effect == UnitRemoval((0,), 1.0, effect.effect)
    assert (result.rank_correlation, result.opposite_signs) == (None, None)
    assert faithfulness(model, [row], target, Units("tokens", []), np.ones(1)) is None


def test_maxsim_of_a_text_without_vectors_is_zero() -> None:
    draw = torch.Generator().manual_seed(0)
    query, document = (torch.randn(1, n, 4, generator=draw) for n in (3, 2))
    none: Tensor = torch.empty(1, 0, 4)
    for normalize in (True, False):
        target = maxsim(normalize)
        assert target(query, none).item() == target(none, document).item() == 0
        margin = target(query, document, none)
        torch.testing.assert_close(margin, target(query, document))


def test_cost_is_the_tokens_that_run_through_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ran = toy_model(), 0
    vectors = ReferenceModel.vectors

    def counted(self: ReferenceModel, row: InputRow, **options: Any) -> Tensor:  # noqa: ANN401
        nonlocal ran
        ran += len(row.ids)
        return vectors(self, row, **options)

    monkeypatch.setattr(ReferenceModel, "vectors", counted)
    row, target = InputRow([token % 40 for token in IDS]), attribution.dim(0, normalize=False)
    faithfulness(model, [row], target, UNITS, SCORES)
    assert ran == faithfulness_token_steps(len(IDS), UNITS)
