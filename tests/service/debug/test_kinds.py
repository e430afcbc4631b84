"""Gradient routes of rerankers, classifiers, sparse encoders and multi-vector models."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SparseEncoder
from starlette.testclient import TestClient
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from models.artifact import Artifact
from models.export.exporter import export
from models.export.sources import resolve
from models.manifest import MANIFEST
from service.debug.routes import ROUTES
from service.debug.target import TARGETS
from service.inference.errors import InvalidInput
from tests.models.checkpoints import (
    edit_json,
    save_checkpoint,
    save_multi_vector,
    save_tokenizer,
)
from tests.service.debug.conftest import Json, ask, problem_of, service_of
from tests.serving import ready_model

pytestmark = pytest.mark.slow

QUERY, DOCUMENT = "w7 w9", "w21 w5 w33"
PAIR = {"text": QUERY, "text_pair": DOCUMENT, "target": {"type": "score"}}
IDS, TYPES = [0, 7, 9, 2, 21, 5, 33, 2], [0, 0, 0, 0, 1, 1, 1, 1]
# Another document, and the same for a multi-vector model.
VERSUS = "w8 w51"
QUESTION, CAT_SAT, RAIN = "Where did the cat sit?", "The cat, it sat.", "rain, rain!"
MAXSIM = {"text": QUESTION, "text_pair": CAT_SAT, "target": {"type": "maxsim"}}
MAXSIM_VERSUS = {**MAXSIM, "target": {"type": "maxsim", "versus": RAIN}}


def integrated(
    forward: Callable[[Tensor], Tensor],
    oracle: Any,  # noqa: ANN401
    ids: list[int],
    padded: list[int],
) -> np.ndarray:
    """Return captum's integrated gradients by the word embeddings of transformers' model.

    Args:
        forward: From word embeddings to scalars.
        oracle: Model of transformers.
        ids: Token ids.
        padded: Token ids of the baseline.
    """
    from captum.attr import IntegratedGradients

    weight = oracle.get_input_embeddings().weight
    words, pad = (weight[rows][None].detach() for rows in (ids, padded))
    scores = IntegratedGradients(forward).attribute(words, pad, n_steps=200, method="gausslegendre")
    return np.asarray(scores[0].detach().sum(-1))


@pytest.mark.parametrize(
    ("of", "padded"),
    [
        ("both", [0, 1, 1, 2, 1, 1, 1, 2]),
        ("text", [0, 1, 1, 2, 21, 5, 33, 2]),
        ("text_pair", [0, 7, 9, 2, 1, 1, 1, 2]),
    ],
)
def test_attribution_of_a_rerank_score_equals_captum_on_the_model_of_transformers(
    ranker: TestClient, cross_encoder: CrossEncoder, of: str, padded: list[int]
) -> None:
    oracle = AutoModelForSequenceClassification.from_pretrained(cross_encoder.model.name_or_path)

    def forward(words: Tensor) -> Tensor:
        types = torch.tensor([TYPES]).expand(len(words), -1)
        logits: Tensor = oracle(inputs_embeds=words, token_type_ids=types).logits[:, 0]
        return logits

    def forward_ids(ids: list[int]) -> float:
        with torch.no_grad():
            logits = oracle(torch.tensor([ids]), token_type_ids=torch.tensor([TYPES])).logits
        return float(logits[0, 0])

    options = {"of": of, "tolerance": 1e-3, "max_evaluations": 2048}
    result = ask(ranker, "attribute", **PAIR, **options)
    expected = integrated(forward, oracle, IDS, padded)
    np.testing.assert_allclose(result["scores"], expected, atol=2e-3 * np.abs(expected).max())
    kept = [index for index, token in enumerate(padded) if token == IDS[index]]
    assert [result["scores"][index] for index in kept] == [0.0] * len(kept)
    assert result["baseline_value"] == pytest.approx(forward_ids(padded), rel=1e-4)
    (score,) = cross_encoder.predict([(QUERY, DOCUMENT)], activation_fn=torch.nn.Identity())
    assert result["value"] == pytest.approx(float(score), rel=1e-4)
    assert result["completeness"]["converged"]
    change = result["value"] - result["baseline_value"]
    assert result["sum"] == pytest.approx(change, rel=1e-2)
    assert (result["parity"]["agrees"], result["warnings"]) == (True, [])
    # Zero vectors replace the same tokens, and the special ones of a whole pair.
    kept = [] if of == "both" else kept
    result = ask(ranker, "attribute", **PAIR, **options, baseline="zero")
    zeros = oracle.get_input_embeddings().weight[IDS][None].detach()
    zeros[:, [index for index in range(len(IDS)) if index not in kept]] = 0
    assert result["baseline_value"] == pytest.approx(forward(zeros).item(), rel=1e-4)
    assert [result["scores"][index] for index in kept] == [0.0] * len(kept)


@pytest.mark.parametrize(("of", "scored"), [("text", {0}), ("text_pair", {1, 2})])
@pytest.mark.parametrize("name", ["ranker", "labeler", "colbert"])
def test_scores_of_texts_that_the_baseline_keeps_are_zero(
    name: str, of: str, scored: set[int], request: pytest.FixtureRequest
) -> None:
    client: TestClient = request.getfixturevalue(name)
    label = {"type": "label", "label": "happy"}
    body = {
        "ranker": {**PAIR, "target": {"type": "score", "versus": VERSUS}},
        "labeler": {**PAIR, "target": label},
        "colbert": MAXSIM_VERSUS,
    }[name]
    options: dict[str, Any] = {"of": of, "tolerance": 0.05, "max_evaluations": 2048}
    for method in ("integrated_gradients", "occlusion"):
        result = ask(client, "attribute", **body, **options, method=method)
        texts = {
            token["text"]
            for token, score in zip(result["tokens"], result["scores"], strict=True)
            if score != 0
        }
        assert texts == scored - ({2} if name == "labeler" else set())
        if method == "integrated_gradients":
            assert result["completeness"]["converged"]
            change = result["value"] - result["baseline_value"]
            assert result["sum"] == pytest.approx(change, rel=0.05)


def test_one_text_is_attributed_beside_an_empty_one(ranker: TestClient) -> None:
    result = ask(ranker, "attribute", **{**PAIR, "text_pair": ""}, of="text", method="occlusion")
    assert {word["text"] for word in result["words"]} == {0}
    # A second document without tokens does not move with the first.
    target = {"type": "score", "versus": ""}
    result = ask(ranker, "attribute", **{**PAIR, "target": target}, of="text_pair")
    assert result["value"] != result["baseline_value"]
    scores = zip(result["tokens"], result["scores"], strict=True)
    assert {token["input"] for token, score in scores if score != 0} == {0}


@pytest.mark.parametrize(
    ("query", "document", "words"),
    [
        (QUERY, "", ["w7", "w9"]),
        (" ", "w21 w5", ["w21", "w5"]),
        (QUERY, "w21 \0 w5", ["w7", "w9", "w21", "\0", "w5"]),
    ],
)
def test_pair_with_an_empty_text_is_attributed_to_the_other(
    ranker: TestClient, query: str, document: str, words: list[str]
) -> None:
    body = {**PAIR, "text": query, "text_pair": document}
    result = ask(ranker, "attribute", **body, tolerance=1e-3, max_evaluations=2048)
    assert [result["value"]] == pytest.approx(raw_scores(ranker, query, [document]), rel=1e-4)
    change = result["value"] - result["baseline_value"]
    assert result["sum"] == pytest.approx(change, rel=1e-2)
    texts = [query, document]
    assert [texts[w["text"]][w["start"] : w["end"]] for w in result["words"]] == words
    measured = ask(ranker, "attribute", **body, method="grad_x_input", faithfulness="words")
    assert measured["faithfulness"]["units"] == "words"


def test_document_is_compared_with_an_empty_one(ranker: TestClient) -> None:
    result = ask(ranker, "attribute", **{**PAIR, "target": {"type": "score", "versus": ""}})
    document, nothing = raw_scores(ranker, QUERY, [DOCUMENT, ""])
    assert result["value"] == pytest.approx(document - nothing, abs=1e-4)


def test_tokens_and_words_of_a_pair_name_their_text(ranker: TestClient) -> None:
    query, document = "w7 (w9)", "w21 w5"
    result = ask(ranker, "attribute", **{**PAIR, "text": query, "text_pair": document})
    tokens = [(token["token"], token["text"]) for token in result["tokens"]]
    first = [("w7", 0), ("[UNK]", 0), ("w9", 0), ("[UNK]", 0)]
    second = [("w21", 1), ("w5", 1)]
    assert tokens == [("[CLS]", None), *first, ("[SEP]", None), *second, ("[SEP]", None)]
    texts = [query, document]
    spelled = [texts[w["text"]][w["start"] : w["end"]] for w in result["words"]]
    assert spelled == ["w7", "(", "w9", ")", "w21", "w5"]
    assert [word["text"] for word in result["words"]] == [0, 0, 0, 0, 1, 1]
    for token in result["tokens"]:
        has_span = token["text"] is not None
        assert (token["start"] is not None) == (token["end"] is not None) == has_span


def raw_scores(client: TestClient, query: str, documents: list[str]) -> list[float]:
    body = {"queries": query, "documents": documents, "raw_scores": True}
    scores: list[float] = client.post("/score", json=body).json()["scores"]
    return scores


def test_margin_of_a_document_over_another_is_the_difference_of_their_scores(
    ranker: TestClient,
) -> None:
    body = {**PAIR, "target": {"type": "score", "versus": VERSUS}, "max_evaluations": 2048}
    result = ask(ranker, "attribute", **body, tolerance=1e-3)
    first, second = raw_scores(ranker, QUERY, [DOCUMENT, VERSUS])
    assert abs(first - second) > 1e-2
    assert result["value"] == pytest.approx(first - second, abs=1e-4)
    assert result["completeness"]["converged"]
    change = result["value"] - result["baseline_value"]
    assert result["sum"] == pytest.approx(change, rel=1e-3)
    assert (result["parity"]["agrees"], result["warnings"]) == (True, [])
    pairs = [(token["input"], token["text"]) for token in result["tokens"]]
    assert pairs[:8] == [(0, text) for text in (None, 0, 0, None, 1, 1, 1, None)]
    assert pairs[8:] == [(1, text) for text in (None, 0, 0, None, 2, 2, None)]
    texts = [QUERY, DOCUMENT, VERSUS]
    spelled = [texts[w["text"]][w["start"] : w["end"]] for w in result["words"]]
    assert spelled == ["w7", "w9", "w21", "w5", "w33", "w7", "w9", "w8", "w51"]
    for word, name in zip(result["words"], spelled, strict=True):
        assert [result["tokens"][index]["token"] for index in word["tokens"]] == [name]
        total = sum(result["scores"][index] for index in word["tokens"])
        assert word["score"] == pytest.approx(total, rel=1e-9)
    # The second pair alone has the same scores with the opposite sign.
    options = {"tolerance": 1e-3, "max_evaluations": 2048}
    single = ask(ranker, "attribute", **{**PAIR, "text_pair": VERSUS}, **options)
    atol = 5e-3 * max(map(abs, single["scores"]))
    np.testing.assert_allclose(result["scores"][8:], [-s for s in single["scores"]], atol=atol)


@pytest.mark.parametrize("prompted", [QUESTION, {"text": QUESTION, "prompt_name": "query"}])
def test_maxsim_is_the_served_score_and_the_sum_of_its_alignment(
    colbert: TestClient, multi_encoder: tuple[MultiVectorEncoder, Artifact], prompted: object
) -> None:
    oracle = multi_encoder[0]
    body = {**MAXSIM, "text": prompted}
    result = ask(colbert, "attribute", **body, method="grad_x_input")
    (score,) = raw_scores(colbert, QUESTION, [CAT_SAT])
    assert result["value"] == pytest.approx(score, rel=1e-5)
    aligned = result["alignment"]
    assert sum(pair["value"] for pair in aligned) == pytest.approx(score, rel=1e-5)
    tokens = [token["token"] for token in result["tokens"]]
    query, document = (
        [token for token, own in zip(tokens, result["tokens"], strict=True) if own["input"] == i]
        for i in (0, 1)
    )
    question = ["where", "did", "the", "cat", "sit", "?"]
    marked = ["[CLS]", "[", "q", "]", *question, "[SEP]"]
    assert query == [*marked, *["[MASK]"] * (16 - len(marked))]
    sentence = ["the", "cat", ",", "it", "sat", "."]
    assert document == ["[CLS]", "[", "d", "]", *sentence, "[SEP]"]
    # The document's vectors are those of its tokens without punctuation.
    kept = [16 + index for index, spelled in enumerate(document) if spelled not in "[],."]
    vectors = oracle.encode_query(QUESTION), oracle.encode_document(CAT_SAT)
    products = np.asarray(vectors[0]) @ np.asarray(vectors[1]).T
    assert products.shape == (16, len(kept))
    assert [pair["query"] for pair in aligned] == list(range(16))
    assert [pair["document"] for pair in aligned] == [kept[i] for i in products.argmax(1)]
    np.testing.assert_allclose([pair["value"] for pair in aligned], products.max(1), atol=1e-5)
    assert (result["parity"]["agrees"], result["warnings"]) == (True, [])


def test_margin_of_maxsim_is_the_difference_of_the_served_scores(colbert: TestClient) -> None:
    result = ask(colbert, "attribute", **MAXSIM_VERSUS, max_evaluations=1024)
    scores = raw_scores(colbert, QUESTION, [CAT_SAT, RAIN])
    assert abs(scores[0] - scores[1]) > 1e-2
    assert result["value"] == pytest.approx(scores[0] - scores[1], abs=1e-5)
    assert result["completeness"]["converged"]
    change = result["value"] - result["baseline_value"]
    assert result["sum"] == pytest.approx(change, rel=1e-2)
    inputs = [token["input"] for token in result["tokens"]]
    assert inputs == [0] * 16 + [1] * 11 + [2] * 9
    texts = {(token["input"], token["text"]) for token in result["tokens"]}
    assert texts == {(i, text) for i in range(3) for text in (None, i)}
    for index, score in enumerate(scores):
        own = [
            pair["value"] for pair in result["alignment"] if inputs[pair["document"]] == index + 1
        ]
        assert len(own) == 16
        assert sum(own) == pytest.approx(score, rel=1e-5)
    texts_of_words = [word["text"] for word in result["words"]]
    assert texts_of_words == [0] * 6 + [1] * 6 + [2] * 4
    result = ask(colbert, "attribute", **MAXSIM_VERSUS, tolerance=1e-3, max_evaluations=17)
    assert result["warnings"] == [
        "a path integral has not converged; increase max_evaluations or choose another baseline"
    ]


def test_margin_of_a_label_is_the_difference_of_the_logits(
    labeler: TestClient, classifier: Artifact
) -> None:
    oracle = AutoModelForSequenceClassification.from_pretrained(classifier.path / "source")
    ids = torch.tensor([[0, 5, 6, 7, 2]])
    logits = dict(zip(["sad", "neutral", "happy"], oracle(ids).logits[0].tolist(), strict=True))
    text = "w5 w6 w7"

    for label in logits:
        target: Json = {"type": "label", "label": label}
        result = ask(labeler, "attribute", text=text, target=target, method="saliency")
        assert result["value"] == pytest.approx(logits[label], rel=1e-3)
    target = {"type": "label", "label": "happy", "versus": "sad"}
    fields = {"target": target, "tolerance": 1e-3, "max_evaluations": 2048}
    result = ask(labeler, "attribute", text=text, **fields)
    assert result["value"] == pytest.approx(logits["happy"] - logits["sad"], rel=1e-3)
    pair = ask(labeler, "attribute", text="w5 w6", text_pair="w33 w8", **fields)
    assert [token["text"] for token in pair["tokens"]] == [None, 0, 0, None, 1, 1, None]
    assert pair["parity"]["agrees"]
    assert pair["value"] != result["value"]


def test_predicted_label_is_the_target_without_a_label(
    labeler: TestClient, classifier: Artifact
) -> None:
    oracle = AutoModelForSequenceClassification.from_pretrained(classifier.path / "source")
    predicted = set()
    for word in range(4, 40):
        logits = oracle(torch.tensor([[0, word, 2]])).logits[0]
        label = ["sad", "neutral", "happy"][int(logits.argmax())]
        if label in predicted:
            continue
        predicted.add(label)
        target: Json = {"type": "label"}
        result = ask(labeler, "attribute", text=f"w{word}", target=target, method="saliency")
        assert result["label"] == label
        assert result["value"] == pytest.approx(logits.max().item(), rel=1e-3)
        body = {"text": f"w{word}", "target": {**target, "versus": label}}
        problem = problem_of(labeler, "attribute", body)
        assert problem["pointer"] == "/target/versus"
    assert len(predicted) > 1
    target = {"type": "label", "label": "sad"}
    assert ask(labeler, "attribute", text="w5", target=target, method="saliency")["label"] == "sad"


def test_attribution_of_a_sparse_weight_equals_captum_on_the_model_of_transformers(
    splade: TestClient, sparse_encoder: tuple[SparseEncoder, Artifact]
) -> None:
    encoder, artifact = sparse_encoder
    oracle = AutoModelForMaskedLM.from_pretrained(artifact.path / "source")
    weights = encoder.encode(["w5 w6 w7"], convert_to_sparse_tensor=False)[0]
    entry = int(weights.argmax())
    target = {"type": "sparse", "token": f"w{entry}"}

    def forward(words: Tensor) -> Tensor:
        logits = oracle(inputs_embeds=words).logits
        weights: Tensor = torch.log1p(torch.relu(logits)).amax(1)[:, entry]
        return weights

    fields = {"target": target, "tolerance": 1e-3, "max_evaluations": 4096}
    result = ask(splade, "attribute", text="w5 w6 w7", **fields)
    assert result["value"] == pytest.approx(weights[entry].item(), rel=1e-4)
    assert result["completeness"]["converged"]
    expected = integrated(forward, oracle, [0, 5, 6, 7, 2], [0, 1, 1, 1, 2])
    np.testing.assert_allclose(result["scores"], expected, atol=1e-2 * np.abs(expected).max())
    assert (result["parity"]["agrees"], result["warnings"]) == (True, [])
    prompted = {"text": "w5 w6 w7", "prompt_name": "query"}
    result = ask(splade, "attribute", text=prompted, target=target, method="saliency")
    assert [token["text"] for token in result["tokens"]] == [None, None, None, 0, 0, 0, None]
    assert result["parity"]["agrees"]


@pytest.mark.parametrize("name", ["ranker", "splade", "colbert"])
def test_served_values_that_differ_from_the_reference_model_add_a_warning(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: TestClient = request.getfixturevalue(name)
    sparse = {"text": "w5", "target": {"type": "sparse", "token": "w5"}}
    body = {"ranker": PAIR, "splade": sparse, "colbert": MAXSIM_VERSUS}[name]
    engine = ready_model(client).engine
    run = engine.run_outputs
    changes: list[Callable[[np.ndarray], np.ndarray]] = [lambda z: z + 1, lambda z: 1.2 * z + 0.2]
    for change in changes:

        def changed(*args: Any, change: Callable[[np.ndarray], np.ndarray] = change) -> Any:  # noqa: ANN401
            return [change(output) for output in run(*args)]

        with monkeypatch.context() as patch:
            patch.setattr(engine, "run_outputs", changed)
            result = ask(client, "attribute", **body, method="saliency")
        assert result["parity"]["agrees"] is False
        assert result["warnings"] == [
            "the served vectors differ from the reference model's vectors; see parity"
        ]


def test_label_is_the_best_of_those_with_its_name(classifier: Artifact, tmp_path: Path) -> None:
    folder = tmp_path / "same-names"
    shutil.copytree(classifier.path, folder)
    edit_json(folder / MANIFEST, labels=["same", "same", "other"])
    oracle = AutoModelForSequenceClassification.from_pretrained(classifier.path / "source")
    best = set()
    with service_of(Artifact.load(folder)) as client:
        for word in (7, 8, 9):
            first, second, other = oracle(torch.tensor([[0, word, 2]])).logits[0].tolist()
            best.add(second > first)
            for names, value in (
                ({"label": "same"}, max(first, second)),
                ({"label": "other", "versus": "same"}, other - max(first, second)),
            ):
                target = {"type": "label", **names}
                result = ask(client, "attribute", text=f"w{word}", target=target, method="saliency")
                assert result["value"] == pytest.approx(value, rel=1e-3, abs=1e-5)
                assert result["label"] == names["label"]
    assert best == {False, True}


KINDS = {"ranker": "reranker", "labeler": "classifier", "splade": "sparse", "colbert": "multi"}


@pytest.mark.parametrize("name", list(KINDS))
def test_capabilities_list_what_the_kind_of_model_has(
    name: str, request: pytest.FixtureRequest
) -> None:
    client: TestClient = request.getfixturevalue(name)
    capabilities = client.get("/debug/capabilities").json()
    kind = KINDS[name]
    assert capabilities["kind"] == kind
    assert capabilities["targets"] == list(TARGETS[kind])  # type: ignore[index]
    routes = ["attribute", "layernorm", "activations", "patch", "capabilities"]
    assert capabilities["routes"] == routes
    labels = {"ranker": ["LABEL_0"], "labeler": ["sad", "neutral", "happy"]}
    assert capabilities["labels"] == labels.get(name, [])
    assert capabilities["text_pairs"] == (name != "splade")
    assert capabilities["of"] == (["both"] if name == "splade" else ["both", "text", "text_pair"])
    # A layer norm of the model, on the rows of a text.
    source = {"type": "text", "text": "w5 w6", "norm": capabilities["norms"][-1]}
    result = ask(client, "layernorm", source=source)
    assert (result["passes"], result["parity"]["agrees"]) == (True, True)


@pytest.mark.parametrize("name", list(KINDS))
def test_routes_of_embedding_models_name_the_kinds_they_are_for(
    name: str, request: pytest.FixtureRequest
) -> None:
    client: TestClient = request.getfixturevalue(name)
    bodies: dict[str, dict[str, Any]] = {
        "attribute/pair": {"a": "w1", "b": "w2"},
        "flow": {"texts": ["w1"], "objective": {"type": "dot", "vector": [1.0]}},
        "parity": {},
        "vjp": {"text": "w1", "cotangent": [1.0]},
    }
    routes = [route.name for route in ROUTES if route.kinds == ("embedding",)]
    assert set(routes) == bodies.keys()
    for route in routes:
        problem = problem_of(client, route, bodies[route])
        assert problem["code"] == "wrong_model"
        assert f"/debug/{route} is for embedding models; the model" in problem["detail"]


def test_models_with_other_outputs_are_refused_by_every_route(reranker: Artifact) -> None:
    outputs: Any = ("another",)
    manifest = replace(reranker.manifest, outputs=outputs)
    for route in ROUTES:
        message = f"/debug/{route.name} is for embedding models"
        with pytest.raises(InvalidInput, match=message) as error:
            route.kind_for(manifest)
        assert error.value.code == "wrong_model"


SCORE, HAPPY = {"type": "score"}, {"type": "label", "label": "happy"}
NORM = {"type": "norm"}
BETTER = {"type": "score", "versus": VERSUS}


@pytest.mark.parametrize(
    ("name", "body", "code", "pointer", "message"),
    [
        ("ranker", {"target": NORM}, "wrong_target", "/target/type", "their targets: score"),
        ("ranker", {"target": HAPPY}, "wrong_target", "/target/type", "their targets: score"),
        ("labeler", {"target": SCORE}, "wrong_target", "/target/type", "their targets: label"),
        ("splade", {"target": SCORE}, "wrong_target", "/target/type", "their targets: sparse"),
        ("ranker", {**PAIR, "text": "", "text_pair": " "}, "no_tokens", "/text", "no tokens"),
        ("ranker", {**PAIR, "text_pair": 3}, "invalid", "/text_pair", "string"),
        ("ranker", {**PAIR, "text_pair": "w5 " * 30}, "too_long", "/text", "more than 24 tokens"),
        ("ranker", {**PAIR, "text": {"text": "w5", "prompt_name": "secret"}}, "unknown_prompt",
         "/text/prompt_name", "the model's prompts"),
        ("labeler", {"target": {"type": "label", "label": "secret"}}, "unknown_label",
         "/target/label", "the model's labels: sad, neutral, happy"),
        ("labeler", {"target": {**HAPPY, "versus": "secret"}}, "unknown_label", "/target/versus",
         "the model's labels: sad, neutral, happy"),
        ("labeler", {"target": {**HAPPY, "versus": "happy"}}, "invalid", "/target/versus",
         "must be another label"),
        ("splade", {"target": {"type": "sparse", "token": "secret"}}, "unknown_token",
         "/target/token", "no entry with this spelling"),
        ("splade", {"target": {"type": "sparse", "token": "w5"}, "text_pair": "w6"}, "invalid",
         "/text_pair", "applies to rerankers, classifiers and multi-vector models"),
        ("ranker", {"target": BETTER}, "invalid", "/text_pair", "set text to the query"),
        ("ranker", {**PAIR, "of": "secret"}, "invalid", "/of", "'both', 'text' or 'text_pair'"),
        ("ranker", {**PAIR, "of": "text", "text": " "}, "no_tokens", "/of",
         "text has no tokens to replace"),
        ("ranker", {**PAIR, "of": "text_pair", "text_pair": "", "baseline": "zero"}, "no_tokens",
         "/of", "text_pair has no tokens to replace"),
        ("ranker", {"target": SCORE, "of": "text"}, "invalid", "/of", "with text_pair"),
        ("labeler", {**PAIR, "target": HAPPY, "of": "text", "method": "grad_x_input"}, "invalid",
         "/of", "grad_x_input has no baseline; omit of"),
        ("splade", {"target": {"type": "sparse", "token": "w5"}, "of": "text"}, "invalid", "/of",
         "rerankers, classifiers and multi-vector models"),
        ("ranker", {**PAIR, "target": {"type": "score", "versus": DOCUMENT}}, "invalid",
         "/target/versus", "must be another document"),
        ("ranker", {**PAIR, "target": {"type": "score", "versus": "w5 " * 30}}, "too_long",
         "/target/versus", "more than 24 tokens"),
        ("ranker", {"target": MAXSIM["target"]}, "wrong_target", "/target/type", "score"),
        ("labeler", {**PAIR, "target": BETTER}, "wrong_target", "/target/type", "label"),
        ("colbert", {"target": SCORE}, "wrong_target", "/target/type", "targets: maxsim"),
        ("colbert", {"target": MAXSIM["target"]}, "invalid", "/text_pair", "set text to the query"),
        ("colbert", {**MAXSIM, "text": " "}, "no_tokens", "/text", "no tokens"),
        ("colbert", {**MAXSIM, "text_pair": ""}, "empty", "/text_pair", "empty"),
        ("colbert", {**MAXSIM, "text": {"text": QUESTION, "prompt_name": "document"}}, "invalid",
         "/text/prompt_name", "omit prompt_name"),
        ("colbert", {**MAXSIM, "text": "a " * 30}, "too_long", "/text", "more than 16 tokens"),
        ("colbert", {**MAXSIM, "target": {"type": "maxsim", "versus": CAT_SAT}}, "invalid",
         "/target/versus", "must be another document"),
        ("colbert", {**MAXSIM, "target": {"type": "maxsim", "versus": "a " * 30}}, "too_long",
         "/target/versus", "more than 20 tokens"),
    ],
)  # fmt: skip
def test_invalid_attribution_request_has_code_and_pointer(
    name: str,
    body: Json,
    code: str,
    pointer: str,
    message: str,
    request: pytest.FixtureRequest,
) -> None:
    client: TestClient = request.getfixturevalue(name)
    problem = problem_of(client, "attribute", {"text": "w5 w6", **body})
    assert (problem["code"], problem["pointer"]) == (code, pointer)
    assert message in problem["detail"]


def test_pair_beyond_the_token_limit_of_gradients_is_refused(reranker: Artifact) -> None:
    with service_of(reranker, max_tokens=7) as client:
        problem = problem_of(client, "attribute", PAIR)
        assert (problem["code"], problem["pointer"]) == ("too_many_tokens", "/text")
        assert "the pair of texts has 8 tokens; the limit is 7" in problem["detail"]
        assert ask(client, "attribute", text="w5", target=SCORE, dry_run=True)


@pytest.fixture(scope="module")
def skipper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a multi-vector model that skips tokens, and adds tokens that none attends to."""
    folder = tmp_path_factory.mktemp("skipper")
    save_checkpoint(folder / "model", "bert")
    save_tokenizer(folder / "model")
    edit_json(folder / "model" / "tokenizer_config.json", padding_side="right")
    skipped = ["[CLS]", "[SEP]", "w7", "w9"]
    save_multi_vector(
        folder / "saved",
        folder / "model",
        mask={"skiplist_words": skipped, "skiplist_tasks": ["query", "document"]},
        query_expansion={"strategy": "fixed", "attend": False, "length": 8, "token": "w9"},
    )
    artifact, _ = export(resolve(str(folder / "saved")), folder / "artifact")
    with service_of(artifact) as client:
        yield client


def test_tokens_without_vectors_and_attention_are_those_of_the_served_model(
    skipper: TestClient,
) -> None:
    target = {"type": "maxsim"}
    query, document = "w5 w7 w6", "w8 w7 w12 w33"
    body = {"text": query, "text_pair": document, "target": target, "method": "saliency"}
    result = ask(skipper, "attribute", **body)
    (score,) = raw_scores(skipper, query, [document])
    assert result["value"] == pytest.approx(score, rel=1e-5)
    assert (result["parity"]["agrees"], result["parity"]["cosine"]) == (
        True,
        pytest.approx(1, abs=1e-6),
    )
    assert [token["token"] for token in result["tokens"]][:8][-3:] == ["w9"] * 3
    assert [pair["query"] for pair in result["alignment"]] == [1, 3]
    assert {pair["document"] for pair in result["alignment"]} <= {9, 11, 12}
    # No token of the query attends to those that expand it, and they have no vectors.
    assert np.abs(result["scores"][5:8]).max() == 0
    assert result["scores"][2] > 1e-4  # a skipped token that the others attend to


def test_text_without_vectors_is_refused_by_name(skipper: TestClient) -> None:
    target = {"type": "maxsim", "versus": "w8"}
    for body, pointer, name in (
        ({"text": "w7", "text_pair": "w5", "target": target}, "/text", "query"),
        ({"text": "w5", "text_pair": "w7", "target": target}, "/text_pair", "document"),
        (
            {"text": "w5", "text_pair": "w6", "target": {**target, "versus": "w7 w7"}},
            "/target/versus",
            "document",
        ),
    ):
        problem = problem_of(skipper, "attribute", body)
        assert (problem["code"], problem["pointer"]) == ("no_vectors", pointer)
        assert problem["detail"].startswith(f"the {name} has no vectors")
