"""Attribution of logits and sparse weights, against captum and autograd on transformers' models."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.export.checkpoint import load
from models.export.sentence_config import Overrides
from models.gradients import attribution
from models.gradients.attribution import METHODS, TargetFunction, attribute
from models.gradients.inputs import InputRow, Method, MethodOptions, Side
from models.gradients.reference_model import ReferenceModel
from tests.models.checkpoints import (
    edit_json,
    save_classifier,
    save_masked_lm,
    save_tokenizer,
)
from tests.models.gradients.toys import assert_complete, attribute_row

# A pair of texts between special tokens, and its baseline of padding.
PAIR = InputRow([0, 5, 6, 2, 7, 21, 33, 2], token_types=[0, 0, 0, 0, 1, 1, 1, 1])
# The same first text with a longer second one.
VERSUS = InputRow([0, 5, 6, 2, 12, 51, 7, 8, 2], token_types=[0, 0, 0, 0, 1, 1, 1, 1, 1])
TEXT = InputRow([0, 5, 6, 40, 7, 21, 33, 2])
PAD = [0, 1, 1, 2, 1, 1, 1, 2]
PAD_VERSUS = [0, 1, 1, 2, 1, 1, 1, 1, 2]
EXACT = MethodOptions(tolerance=1e-7, max_evaluations=4000)
LAYERS = ("words", "embeddings", "layers.0", "output")

Forward = Callable[[Tensor], Tensor]  # from word embeddings (S, L, D) to row vectors (S, W)


Classifier = Callable[[int], tuple[ReferenceModel, Any]]
Sparse = Callable[[str], tuple[ReferenceModel, Forward, Any]]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    """Return the reference model of a BERT of a number of labels, and transformers' model."""

    @cache
    def with_labels(labels: int) -> tuple[ReferenceModel, Any]:
        folder = tmp_path_factory.mktemp("classifier")
        oracle = save_classifier(folder, "bert", labels).double()
        save_tokenizer(folder)
        names = ["input_ids", "token_type_ids", "attention_mask"]
        edit_json(folder / "tokenizer_config.json", model_input_names=names)
        return ReferenceModel(load(folder)[0].double(), normalize=False), oracle

    return with_labels


def logits_of(oracle: Any, row: InputRow) -> Forward:  # noqa: ANN401 - a model of transformers
    types = torch.tensor([row.token_types or [0] * len(row.ids)])

    def forward(words: Tensor) -> Tensor:
        logits: Tensor = oracle(
            inputs_embeds=words, token_type_ids=types.expand(len(words), -1)
        ).logits
        return logits

    return forward


def words_of(oracle: Any, ids: list[int]) -> Tensor:  # noqa: ANN401 - a model of transformers
    words: Tensor = oracle.get_input_embeddings().weight[ids][None].detach()  # (1, L, D)
    return words


LOGITS = {
    "score": (1, attribution.label(0), lambda logits: logits[:, 0]),
    "label": (3, attribution.label(2), lambda logits: logits[:, 2]),
    "versus": (3, attribution.label(2, 0), lambda logits: logits[:, 2] - logits[:, 0]),
}


@pytest.mark.parametrize("name", list(LOGITS))
@pytest.mark.parametrize("row", [PAIR, TEXT], ids=["pair", "text"])
def test_attribution_of_logits_equals_captum_on_the_model_of_transformers(
    classifier: Classifier, row: InputRow, name: str
) -> None:
    from captum.attr import InputXGradient, IntegratedGradients, Saliency

    labels, target, chosen = LOGITS[name]
    model, oracle = classifier(labels)
    forward = logits_of(oracle, row)
    words = words_of(oracle, list(row.ids)).requires_grad_()
    pad = words_of(oracle, PAD)

    def f(x: Tensor) -> Tensor:
        return chosen(forward(x))

    def scores(method: Method) -> np.ndarray:
        return attribute_row(model, row, target, method=method, baseline=PAD, options=EXACT).scores

    gradient = Saliency(f).attribute(words, abs=False)[0]
    np.testing.assert_allclose(scores("saliency"), gradient.norm(dim=-1), rtol=1e-8)
    products = InputXGradient(f).attribute(words)[0].detach()
    np.testing.assert_allclose(scores("grad_x_input"), products.sum(-1), rtol=1e-7, atol=1e-10)
    integrated = IntegratedGradients(f).attribute(words, pad, n_steps=200, method="gausslegendre")
    np.testing.assert_allclose(
        scores("integrated_gradients"), integrated[0].detach().sum(-1), rtol=1e-5, atol=1e-7
    )
    value = attribute_row(model, row, target, method="saliency").value
    assert value == pytest.approx(f(words).item(), rel=1e-9)


def test_attribution_of_a_margin_equals_captum_on_the_model_of_transformers(
    classifier: Classifier,
) -> None:
    from captum.attr import InputXGradient, IntegratedGradients, Saliency

    model, oracle = classifier(1)
    sides = [Side(PAIR, PAD), Side(VERSUS, PAD_VERSUS)]
    forwards = [logits_of(oracle, side.row) for side in sides]
    words = tuple(words_of(oracle, list(side.row.ids)).requires_grad_() for side in sides)
    pads = tuple(words_of(oracle, list(side.baseline or ())) for side in sides)

    def f(first: Tensor, second: Tensor) -> Tensor:
        return (forwards[0](first) - forwards[1](second))[:, 0]

    def scores(method: Method) -> np.ndarray:
        target = attribution.score()
        return attribute(model, sides, target, method=method, options=EXACT).scores

    def joined(attributions: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([part[0].detach() for part in attributions])

    gradients = joined(Saliency(f).attribute(words, abs=False))
    np.testing.assert_allclose(scores("saliency"), gradients.norm(dim=-1), rtol=1e-8)
    products = joined(InputXGradient(f).attribute(words)).sum(-1)
    np.testing.assert_allclose(scores("grad_x_input"), products, rtol=1e-7, atol=1e-10)
    steps = {"n_steps": 200, "method": "gausslegendre"}
    integrated = joined(IntegratedGradients(f).attribute(words, pads, **steps)).sum(-1)
    np.testing.assert_allclose(scores("integrated_gradients"), integrated, rtol=1e-5, atol=1e-7)
    # Pairs are read apart, so the scores are those of each pair alone.
    own = [
        attribute_row(
            model, side.row, attribution.score(), baseline=side.baseline, options=EXACT
        ).scores
        for side in sides
    ]
    apart = np.concatenate([own[0], -own[1]])
    np.testing.assert_allclose(scores("integrated_gradients"), apart, atol=1e-7)


# Positions of the tokens of one text of `PAIR`.
TEXTS = {"text": [1, 2], "text_pair": [4, 5, 6]}


def kept_of(text: str) -> list[int]:
    """Return the positions of all tokens of `PAIR` but those of a text."""
    return [position for position in range(len(PAIR.ids)) if position not in TEXTS[text]]


@pytest.mark.parametrize("text", list(TEXTS))
@pytest.mark.parametrize("baseline", [PAD, None], ids=["pad", "zeros"])
def test_attribution_of_one_text_of_a_pair_equals_captum_on_the_model_of_transformers(
    classifier: Classifier, text: str, baseline: list[int] | None
) -> None:
    from captum.attr import FeatureAblation, IntegratedGradients

    model, oracle = classifier(1)
    forward, kept = logits_of(oracle, PAIR), kept_of(text)
    words = words_of(oracle, list(PAIR.ids))
    reference = torch.zeros_like(words) if baseline is None else words_of(oracle, baseline)
    reference[:, kept] = words[:, kept]

    def scores(method: Method) -> np.ndarray:
        side, target = Side(PAIR, baseline, kept), attribution.score()
        result = attribute(model, [side], target, method=method, options=EXACT)
        assert result.value == pytest.approx(forward(words).item(), rel=1e-9)
        assert result.baseline_value == pytest.approx(forward(reference).item(), rel=1e-9)
        assert result.scores[kept].tolist() == [0.0] * len(kept)
        assert np.abs(result.scores[TEXTS[text]]).min() > 1e-6
        return result.scores

    integrated = IntegratedGradients(forward).attribute(
        words, reference, n_steps=200, method="gausslegendre"
    )
    expected = integrated[0].detach().sum(-1)
    np.testing.assert_allclose(scores("integrated_gradients"), expected, rtol=1e-5, atol=1e-7)
    mask = torch.arange(len(PAIR.ids))[None, :, None]  # a token is occluded as a whole
    occluded = FeatureAblation(forward).attribute(words, reference, feature_mask=mask)
    np.testing.assert_allclose(scores("occlusion"), occluded[0, :, 0], atol=1e-9)


# At "output", the vector that is pooled is that of the first token, which the baseline keeps.
@pytest.mark.parametrize("layer_name", LAYERS[:-1])
@pytest.mark.parametrize("baseline", [PAD, None], ids=["pad", "zeros"])
def test_tokens_that_the_baseline_keeps_score_zero_at_every_layer(
    classifier: Classifier, layer_name: str, baseline: list[int] | None
) -> None:
    model, _ = classifier(1)
    kept = kept_of("text_pair")
    result = attribute(
        model,
        [Side(PAIR, baseline, kept)],
        attribution.score(),
        layer_name=layer_name,
        options=MethodOptions(tolerance=1e-5, max_evaluations=4000),
    )
    assert result.scores[kept].tolist() == [0.0] * len(kept)
    assert_complete(result, rel=1e-4, least=1e-3)


def test_token_types_change_the_vectors_at_every_layer(classifier: Classifier) -> None:
    model, oracle = classifier(3)
    untyped = InputRow(PAIR.ids)
    for row in (PAIR, untyped):
        expected = logits_of(oracle, row)(words_of(oracle, list(row.ids)))[0]
        torch.testing.assert_close(model.vector(row), expected)
        for layer_name in LAYERS:
            tokens = model.tokens(layer_name, row)[None]
            actual = model.continue_from(layer_name, tokens, row)[0]
            torch.testing.assert_close(actual, expected)
    typed, plain = (model.tokens("embeddings", row) for row in (PAIR, untyped))
    assert torch.equal(typed[:4], plain[:4])  # those of the first text
    assert torch.dist(typed[4:], plain[4:]) > 0.1
    assert torch.dist(model.vector(PAIR), model.vector(untyped)) > 0.01


def test_token_types_are_ignored_by_models_whose_graph_ignores_them(tmp_path: Path) -> None:
    save_classifier(tmp_path, "roberta", 3)
    save_tokenizer(tmp_path)
    model = ReferenceModel(load(tmp_path)[0], normalize=False)
    assert torch.equal(model.vector(PAIR), model.vector(InputRow(PAIR.ids)))
    tokens = model.tokens("words", PAIR)[None]
    torch.testing.assert_close(
        model.continue_from("words", tokens, PAIR)[0], model.vector(InputRow(PAIR.ids))
    )


SPLADE: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda logits: torch.log1p(torch.relu(logits)).amax(1),
    "sum": lambda logits: torch.log1p(torch.log1p(torch.relu(logits))).sum(1),
}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Sparse:
    """Return the reference model of a SPLADE of a pooling, its formula, and transformers' BERT."""

    @cache
    def with_pooling(pooling: str) -> tuple[ReferenceModel, Forward, Any]:
        folder = tmp_path_factory.mktemp("sparse")
        oracle = save_masked_lm(folder, "bert").double()
        save_tokenizer(folder)
        model = ReferenceModel(load(folder, Overrides(sparse=True))[0].double(), normalize=False)
        assert model.network.sparse is not None
        model.network.sparse.pooling, model.network.sparse.double_log = pooling, pooling == "sum"
        return model, lambda words: SPLADE[pooling](oracle(inputs_embeds=words).logits), oracle

    return with_pooling


FIRST = attribution.dim(0, normalize=False)


@pytest.mark.parametrize("pooling", list(SPLADE))
def test_attribution_of_a_sparse_weight_equals_autograd_on_the_model_of_transformers(
    sparse: Sparse, pooling: str
) -> None:
    model, forward, oracle = sparse(pooling)
    words = words_of(oracle, list(TEXT.ids)).requires_grad_()
    weights = forward(words)[0]
    torch.testing.assert_close(model.vector(TEXT), weights.detach())
    active = torch.nonzero(weights > 0.1)[:, 0].tolist()
    assert 4 <= len(active) < len(weights)
    for entry in active[:4]:
        (gradient,) = torch.autograd.grad(weights[entry], words, retain_graph=True)
        expected = {"saliency": gradient[0].norm(dim=-1), "grad_x_input": (gradient * words)[0]}
        expected["grad_x_input"] = expected["grad_x_input"].sum(-1)
        methods: tuple[Method, ...] = ("saliency", "grad_x_input")
        for method in methods:
            result = attribute_row(model, replace(TEXT, entries=[entry]), FIRST, method=method)
            scores = expected[method].detach().numpy()
            np.testing.assert_allclose(result.scores, scores, rtol=1e-8, atol=1e-12)
            assert result.value == pytest.approx(weights[entry].item(), rel=1e-9)


@pytest.mark.parametrize("pooling", list(SPLADE))
def test_entries_of_sparse_vectors_are_those_of_the_whole_vectors(
    sparse: Sparse, pooling: str
) -> None:
    model, _, _ = sparse(pooling)
    for layer_name in LAYERS:
        tokens = model.tokens(layer_name, TEXT)[None]
        some = model.continue_from(layer_name, tokens, replace(TEXT, entries=[40, 7]))
        whole = model.continue_from(layer_name, tokens, TEXT)
        torch.testing.assert_close(whole[0], model.vector(TEXT))
        torch.testing.assert_close(some, whole[:, [40, 7]])


@pytest.mark.parametrize("layer_name", LAYERS)
@pytest.mark.parametrize("baseline", [PAD, None], ids=["pad", "zeros"])
def test_integrated_gradients_of_logits_and_weights_are_complete(
    classifier: Classifier, sparse: Sparse, layer_name: str, baseline: list[int] | None
) -> None:
    ranker, _ = classifier(1)
    splade, _, _ = sparse("sum")
    entry = int(splade.vector(TEXT).argmax())
    cases: list[tuple[ReferenceModel, InputRow, TargetFunction]] = [
        (ranker, PAIR, attribution.label(0)),
        (splade, replace(TEXT, entries=[entry]), FIRST),
    ]
    for model, row, target in cases:
        result = attribute_row(
            model,
            row,
            target,
            layer_name=layer_name,
            baseline=baseline,
            options=MethodOptions(tolerance=1e-5, max_evaluations=4000),
        )
        assert_complete(result, rel=1e-4, least=1e-3)


@pytest.mark.parametrize("layer_name", LAYERS)
@pytest.mark.parametrize("pads", [(PAD, PAD_VERSUS), (None, None)], ids=["pad", "zeros"])
def test_integrated_gradients_of_a_margin_are_complete(
    classifier: Classifier, layer_name: str, pads: tuple[list[int] | None, list[int] | None]
) -> None:
    model, _ = classifier(1)
    result = attribute(
        model,
        [Side(PAIR, pads[0]), Side(VERSUS, pads[1])],
        attribution.score(),
        layer_name=layer_name,
        options=MethodOptions(tolerance=1e-5, max_evaluations=4000),
    )
    assert result.value == pytest.approx((model.vector(PAIR) - model.vector(VERSUS)).item())
    assert_complete(result, rel=1e-4, least=1e-3)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_scores_both_texts_of_a_pair(classifier: Classifier, method: Method) -> None:
    model, _ = classifier(1)
    result = attribute_row(model, PAIR, attribution.label(0), method=method, baseline=PAD)
    assert result.scores.shape == (len(PAIR.ids),)
    assert np.abs(result.scores[[1, 2, 4, 5, 6]]).min() > 1e-6
