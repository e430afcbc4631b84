"""Attribution of MaxSim, against captum and autograd on the modules of sentence-transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from torch import Tensor

from models.export.checkpoint import load
from models.gradients.attribution import METHODS, attribute
from models.gradients.inputs import InputRow, Method, MethodOptions, Side
from models.gradients.maxsim import alignment, maxsim
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.attribution import Attribution
from tests.models.checkpoints import (
    edit_json,
    save_checkpoint,
    save_multi_vector,
    save_tokenizer,
)
from tests.models.gradients.toys import assert_complete

QUERY, DOCUMENT, VERSUS = "w5 w40 w6", "w21 w7 w33 w6 w12", "w8 w7 w51"
SKIPPED = 7
EXACT = MethodOptions(tolerance=1e-4, max_evaluations=4000)
LAYERS = ("words", "embeddings", "layers.0", "output")

# From word embeddings (S, L, D) to the vectors that take part in MaxSim, (S, L', W).
Forward = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module", params=[False, True], ids=["unattended", "attended"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A multi-vector model that expands queries, and skips a token of documents."""
    folder = tmp_path_factory.mktemp("multi")
    save_checkpoint(folder / "model", "bert")
    save_tokenizer(folder / "model")
    edit_json(folder / "model" / "tokenizer_config.json", padding_side="right")
    save_multi_vector(
        folder / "saved",
        folder / "model",
        mask={"skiplist_words": [f"w{SKIPPED}"]},
        prompts={"query": "w30 ", "document": "w31 "},
        query_expansion={
            "strategy": "fixed",
            "attend": request.param,
            "length": 8,
            "token": "w9",
        },
    )
    return folder / "saved"


@pytest.fixture(scope="module")
def oracle(folder: Path) -> MultiVectorEncoder:
    return MultiVectorEncoder(str(folder), device="cpu").double()


@pytest.fixture(scope="module")
def model(folder: Path) -> ReferenceModel:
    return ReferenceModel(load(folder)[0].double(), normalize=True)


def encoded(oracle: Any, text: str, task: str) -> tuple[InputRow, Forward]:  # noqa: ANN401
    """Return the row of a text, and the function that the modules of the oracle compute."""
    features = oracle.preprocess([text], prompt=oracle.prompts[task], task=task)
    features = {name: value for name, value in features.items() if torch.is_tensor(value)}
    transformer, *modules = oracle

    def compute(words: Tensor) -> dict[str, Tensor]:
        own = {name: value.expand(len(words), -1) for name, value in features.items()}
        hidden = transformer.auto_model(inputs_embeds=words, attention_mask=own["attention_mask"])
        own["token_embeddings"] = hidden.last_hidden_state
        for module in modules:
            own = module(own, **({"task": task} if isinstance(module, MultiVectorMask) else {}))
        return own

    ids = features["input_ids"][0].tolist()
    with torch.no_grad():
        kept = compute(words_of(oracle, ids))["attention_mask"][0].bool()
    unattended = int((features["attention_mask"] == 0).sum())
    positions = torch.nonzero(kept)[:, 0].tolist()
    row = InputRow(ids, unattended=unattended, vector_positions=positions)
    return row, lambda words: compute(words)["token_embeddings"][:, kept]


def words_of(oracle: Any, ids: list[int]) -> Tensor:  # noqa: ANN401
    words: Tensor = oracle[0].auto_model.get_input_embeddings().weight[ids][None].detach()
    return words


def padded(row: InputRow) -> list[int]:
    """Return the row with padding in place of the text, after the marker of the prompt."""
    end = row.ids.index(2)
    return [token if i < 2 or i >= end else 1 for i, token in enumerate(row.ids)]


def summed(query: Tensor, document: Tensor) -> Tensor:
    return (query @ document.mT).max(-1).values.sum(-1)


def attributed(model: ReferenceModel, rows: list[InputRow], **options: Any) -> Attribution:  # noqa: ANN401
    sides = [Side(row, padded(row)) for row in rows]
    return attribute(model, sides, maxsim(normalize=True), **options)


def test_rows_have_added_and_skipped_tokens(oracle: MultiVectorEncoder) -> None:
    query, _ = encoded(oracle, QUERY, "query")
    document, _ = encoded(oracle, DOCUMENT, "document")
    assert query.ids == [0, 30, 5, 40, 6, 2, 9, 9]
    assert document.ids == [0, 31, 21, SKIPPED, 33, 6, 12, 2]
    assert query.vector_positions == [0, 1, 2, 3, 4, 5, 6, 7]
    assert document.vector_positions == [0, 1, 2, 4, 5, 6, 7]


@pytest.mark.parametrize("has_versus", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attribution_of_maxsim_equals_captum_on_the_modules_of_sentence_transformers(
    oracle: MultiVectorEncoder, model: ReferenceModel, has_versus: bool
) -> None:
    from captum.attr import InputXGradient, IntegratedGradients, Saliency

    texts = [(QUERY, "query"), (DOCUMENT, "document"), (VERSUS, "document")][: 2 + has_versus]
    rows, forwards = zip(*(encoded(oracle, *text) for text in texts), strict=True)
    words = tuple(words_of(oracle, row.ids).requires_grad_() for row in rows)
    pads = tuple(words_of(oracle, padded(row)) for row in rows)

    def f(*inputs: Tensor) -> Tensor:
        query, document, *versus = (forward(x) for forward, x in zip(forwards, inputs, strict=True))
        score = summed(query, document)
        return score - summed(query, versus[0]) if has_versus else score

    def scores(method: Method) -> np.ndarray:
        return attributed(model, list(rows), method=method, options=EXACT).scores

    def joined(attributions: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([part[0].detach() for part in attributions])

    gradients = joined(Saliency(f).attribute(words, abs=False))
    np.testing.assert_allclose(scores("saliency"), gradients.norm(dim=-1), rtol=1e-8)
    products = joined(InputXGradient(f).attribute(words)).sum(-1)
    np.testing.assert_allclose(scores("grad_x_input"), products, rtol=1e-7, atol=1e-10)
    # The gradient jumps where the alignment changes: a fixed rule needs many steps.
    steps = {"n_steps": 3000, "method": "riemann_middle", "internal_batch_size": 500}
    integrated = joined(IntegratedGradients(f).attribute(words, pads, **steps)).sum(-1)
    np.testing.assert_allclose(
        scores("integrated_gradients"), integrated, atol=1e-3 * float(integrated.abs().max())
    )
    result = attributed(model, list(rows), method="saliency")
    assert result.value == pytest.approx(f(*words).item(), rel=1e-9)


def test_gradients_equal_finite_differences_away_from_changes_of_the_alignment(
    oracle: MultiVectorEncoder, model: ReferenceModel
) -> None:
    rows = [encoded(oracle, QUERY, "query")[0], encoded(oracle, DOCUMENT, "document")[0]]
    tokens = [model.tokens("layers.0", row) for row in rows]
    moved = [x + 1e-6 * x.cos() for x in tokens]
    back = [x - 1e-6 * x.cos() for x in tokens]

    def f(parts: list[Tensor]) -> Tensor:
        vectors = (
            model.continue_from("layers.0", x[None], row)
            for x, row in zip(parts, rows, strict=True)
        )
        return maxsim(normalize=True)(*vectors)[0]

    leaves = [x.clone().requires_grad_() for x in tokens]
    gradients = torch.autograd.grad(f(leaves), leaves)
    slope = sum((g * x.cos()).sum() for g, x in zip(gradients, tokens, strict=True))
    difference = (f(moved) - f(back)) / 2e-6
    assert difference.item() == pytest.approx(float(slope), rel=1e-5)


def test_alignment_is_that_of_the_vectors_of_sentence_transformers(
    oracle: MultiVectorEncoder, model: ReferenceModel
) -> None:
    query, forward = encoded(oracle, QUERY, "query")
    vectors = forward(words_of(oracle, list(query.ids)))[0]
    texts = [DOCUMENT, VERSUS]
    documents = [encoded(oracle, text, "document") for text in texts]
    aligned = alignment(model, query, [row for row, _ in documents])
    assert len(aligned) == 2 * 8
    start = len(query.ids)
    for index, (row, forward) in enumerate(documents):
        own = aligned[8 * index : 8 * index + 8]
        kept = row.vector_positions or []
        products = vectors @ forward(words_of(oracle, list(row.ids)))[0].T
        positions = [start + kept[i] for i in products.argmax(1).tolist()]
        assert [token.query for token in own] == query.vector_positions
        assert [token.document for token in own] == positions
        values = [token.value for token in own]
        np.testing.assert_allclose(values, products.max(1).values.detach(), rtol=1e-9)
        embeddings = oracle.encode_query([QUERY]), oracle.encode_document([texts[index]])
        score = oracle.similarity(*embeddings).item()
        assert sum(values) == pytest.approx(score, rel=1e-6)
        start += len(row.ids)


def test_vectors_continue_from_any_layer(oracle: MultiVectorEncoder, model: ReferenceModel) -> None:
    for text, task in ((QUERY, "query"), (DOCUMENT, "document")):
        row, forward = encoded(oracle, text, task)
        expected = forward(words_of(oracle, list(row.ids)))[0].detach()
        units = torch.nn.functional.normalize(model.vector(row), dim=-1)
        torch.testing.assert_close(units, expected)
        for layer_name in LAYERS:
            tokens = model.tokens(layer_name, row)
            versions = torch.stack([tokens, tokens.flip(0)])
            actual = model.continue_from(layer_name, versions, row)
            torch.testing.assert_close(actual[0], model.vector(row))


@pytest.mark.parametrize("layer_name", LAYERS)
def test_integrated_gradients_of_maxsim_are_complete(
    oracle: MultiVectorEncoder, model: ReferenceModel, layer_name: str
) -> None:
    texts = [(QUERY, "query"), (DOCUMENT, "document"), (VERSUS, "document")]
    rows = [encoded(oracle, *text)[0] for text in texts]
    for count in (2, 3):
        options = MethodOptions(tolerance=1e-3, max_evaluations=4000)
        result = attributed(model, rows[:count], layer_name=layer_name, options=options)
        assert_complete(result, rel=1e-3, least=1e-2)
        baselines = [
            model.continue_from(layer_name, model.tokens(layer_name, row, padded(row))[None], row)
            for row in rows[:count]
        ]
        assert result.baseline_value == pytest.approx(maxsim(True)(*baselines).item(), rel=1e-9)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_scores_the_tokens_of_both_texts(
    oracle: MultiVectorEncoder, model: ReferenceModel, method: Method
) -> None:
    rows = [encoded(oracle, QUERY, "query")[0], encoded(oracle, DOCUMENT, "document")[0]]
    result = attributed(model, rows, method=method)
    assert result.scores.shape == (16,)
    # Skipped tokens have no vector, but the other tokens attend to them.
    assert np.abs(result.scores[[2, 3, 4, 10, 11, 12, 13, 14]]).min() > 1e-6


def test_maxsim_without_normalisation_has_the_lengths_of_the_vectors() -> None:
    draw = torch.Generator().manual_seed(0)
    query, document, versus = (
        torch.randn(3, n, 4, generator=draw, dtype=torch.float64) for n in (5, 7, 2)
    )
    torch.testing.assert_close(maxsim(normalize=False)(query, document), summed(query, document))
    margin = summed(query, document) - summed(query, versus)
    torch.testing.assert_close(maxsim(normalize=False)(query, document, versus), margin)
    torch.testing.assert_close(
        maxsim(normalize=True)(3 * query, document),
        maxsim(normalize=True)(query, document / 2),
    )
