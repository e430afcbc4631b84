"""Faithfulness beside attributions, by hand with transformers and sentence-transformers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SparseEncoder
from starlette.testclient import TestClient
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from models.artifact import Artifact
from tests.conftest import FamilyArtifact
from tests.service.debug.conftest import Json, ask, problem_of, service_of

pytestmark = pytest.mark.slow

QUERY, DOCUMENT, VERSUS = "w7 w9 (w11)", "w21 w5 w33 w7", "w8 w51"
# Maps the removed positions of each input to the value of the shorter inputs.
Value = Callable[[list[set[int]]], float]


def kept(ids: Sequence[int], removed: set[int]) -> list[int]:
    return [token for position, token in enumerate(ids) if position not in removed]


def by_hand(result: Json, value: Value) -> Json:
    """Return the faithfulness of the scores in a response, computed from its words or tokens."""
    tokens = result["tokens"]
    units: dict[tuple[Any, ...], list[int]] = {}
    if result["faithfulness"]["units"] == "words":
        for word in result["words"]:
            key = (word["text"], word["start"], word["end"])
            units.setdefault(key, []).extend(word["tokens"])
    else:
        for index, token in enumerate(tokens):
            if token["text"] is not None:
                key = (token["text"], token["start"], token["end"])
                units.setdefault(key, []).append(index)
    parts = list(units.values())
    everything = {index for part in parts for index in part}

    def value_without(removed: set[int]) -> float:
        inputs: list[set[int]] = []
        start = 0
        for number in range(tokens[-1]["input"] + 1):
            inputs.append({index - start for index in removed})
            start += sum(token["input"] == number for token in tokens)
        return value(inputs)

    def points(order: Sequence[int]) -> list[tuple[float, float]]:
        whole, measured = value_without(set()), []
        for count in sorted({int(np.ceil(share * len(parts))) for share in (0.05, 0.1, 0.2, 0.5)}):
            first = {index for part in order[:count] for index in parts[part]}
            effects = value_without(first), value_without(everything - first)
            measured.append((whole - effects[0], whole - effects[1]))
        return measured

    scores = [sum(result["scores"][index] for index in part) for part in parts]
    draw = np.random.default_rng(0)
    random = [points(draw.permutation(len(parts)).tolist()) for _ in range(5)]
    order = sorted(range(len(parts)), key=lambda part: -scores[part])
    effects = [value_without(set()) - value_without(set(part)) for part in parts]
    return {
        "units": parts,
        "scores": scores,
        "effects": effects,
        "points": points(order),
        "random": np.mean(random, axis=(0, 1)),
    }


def opposite_signs(scores: Sequence[float], effects: Sequence[float]) -> float:
    smallest = max(map(abs, effects)) / 10
    pairs = zip(scores, effects, strict=True)
    opposite = [score * effect < 0 for score, effect in pairs if abs(effect) >= smallest]
    return sum(opposite) / len(opposite)


def check(result: Json, value: Value, *, is_unsigned: bool = False) -> None:
    measured = result["faithfulness"]
    expected = by_hand(result, value)
    actual = [(point["comprehensiveness"], point["sufficiency"]) for point in measured["points"]]
    np.testing.assert_allclose(actual, expected["points"], rtol=1e-3, atol=1e-5)
    assert np.abs(expected["points"]).max() > 1e-3
    mean = measured["comprehensiveness"], measured["sufficiency"]
    np.testing.assert_allclose(mean, np.mean(expected["points"], axis=0), rtol=1e-3, atol=1e-5)
    random = measured["random"]["comprehensiveness"], measured["random"]["sufficiency"]
    np.testing.assert_allclose(random, expected["random"], rtol=1e-3, atol=1e-5)
    assert [unit["tokens"] for unit in measured["effects"]] == expected["units"]
    scores, effects = ([unit[name] for unit in measured["effects"]] for name in ("score", "effect"))
    np.testing.assert_allclose(scores, expected["scores"], rtol=1e-9)
    np.testing.assert_allclose(effects, expected["effects"], rtol=1e-3, atol=1e-5)
    rank_correlation = spearmanr(scores, effects).statistic
    assert measured["rank_correlation"] == pytest.approx(rank_correlation)
    assert measured["opposite_signs"] == (None if is_unsigned else opposite_signs(scores, effects))
    assert (result["parity"]["agrees"], result["nonfinite"]) == (True, [])


def score_of(reranker: Artifact) -> Callable[[Sequence[int], Sequence[int]], float]:
    oracle = AutoModelForSequenceClassification.from_pretrained(reranker.path / "source")

    def score(ids: Sequence[int], types: Sequence[int]) -> float:
        with torch.no_grad():
            logits = oracle(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
        return float(logits[0, 0])

    return score


@pytest.mark.parametrize("units", ["words", "tokens"])
def test_faithfulness_of_a_rerank_score_equals_transformers(
    ranker: TestClient, reranker: Artifact, cross_encoder: CrossEncoder, units: str
) -> None:
    score = score_of(reranker)
    ids, types = [0, 7, 9, 3, 11, 3, 2, 21, 5, 33, 7, 2], [0] * 7 + [1] * 5
    body = {"text": QUERY, "text_pair": DOCUMENT, "target": {"type": "score"}}
    result = ask(ranker, "attribute", **body, method="grad_x_input", faithfulness=units)
    check(result, lambda removed: score(kept(ids, removed[0]), kept(types, removed[0])))
    (whole,) = cross_encoder.predict([(QUERY, DOCUMENT)], activation_fn=torch.nn.Identity())
    assert score(ids, types) == pytest.approx(float(whole), rel=1e-4)


@pytest.mark.parametrize("units", ["words", "tokens"])
def test_words_of_a_query_are_removed_from_both_pairs(
    ranker: TestClient, reranker: Artifact, units: str
) -> None:
    score = score_of(reranker)
    first = [0, 7, 9, 3, 11, 3, 2, 21, 5, 33, 7, 2], [0] * 7 + [1] * 5
    second = [0, 7, 9, 3, 11, 3, 2, 8, 51, 2], [0] * 7 + [1] * 3
    target = {"type": "score", "versus": VERSUS}
    body = {"text": QUERY, "text_pair": DOCUMENT, "target": target, "faithfulness": units}
    result = ask(ranker, "attribute", **body, method="grad_x_input")

    def margin(removed: list[set[int]]) -> float:
        scores = [
            score(kept(ids, part), kept(types, part))
            for (ids, types), part in zip((first, second), removed, strict=True)
        ]
        return scores[0] - scores[1]

    check(result, margin)
    # Five of the query, four of the document, and two of the other one.
    assert [point["count"] for point in result["faithfulness"]["points"]] == [1, 2, 3, 6]


def test_effect_of_a_word_is_the_change_of_the_served_score_without_it(ranker: TestClient) -> None:
    query, document = "w7 w9 w11", "w21 w5 w33 w7"
    body = {"text": query, "text_pair": document, "target": {"type": "score"}}
    result = ask(ranker, "attribute", **body, method="saliency", faithfulness="words")

    def served(query: str, document: str) -> float:
        fields = {"queries": query, "documents": [document], "raw_scores": True}
        scores: list[float] = ranker.post("/score", json=fields).json()["scores"]
        return scores[0]

    def shorter(text: str) -> list[str]:
        words = text.split()
        return [" ".join(words[:index] + words[index + 1 :]) for index in range(len(words))]

    others = [served(other, document) for other in shorter(query)]
    others += [served(query, other) for other in shorter(document)]
    expected = [served(query, document) - other for other in others]
    effects = [unit["effect"] for unit in result["faithfulness"]["effects"]]
    np.testing.assert_allclose(effects, expected, atol=1e-4)
    assert np.abs(expected).max() > 1e-2
    words = [word["tokens"] for word in result["words"]]
    assert [unit["tokens"] for unit in result["faithfulness"]["effects"]] == words


@pytest.mark.parametrize(("of", "tokens"), [("text", range(1, 7)), ("text_pair", range(7, 11))])
@pytest.mark.parametrize("units", ["words", "tokens"])
def test_faithfulness_of_one_text_of_a_pair_removes_its_units(
    ranker: TestClient, of: str, tokens: range, units: str
) -> None:
    body = {"text": QUERY, "text_pair": DOCUMENT, "target": {"type": "score"}, "of": of}
    result = ask(ranker, "attribute", **body, method="occlusion", faithfulness=units)
    removed = [index for unit in result["faithfulness"]["effects"] for index in unit["tokens"]]
    has_text = [index for index in tokens if result["tokens"][index]["text"] is not None]
    assert removed == has_text


def test_faithfulness_of_the_margin_of_a_label_equals_transformers(
    labeler: TestClient, classifier: Artifact
) -> None:
    oracle = AutoModelForSequenceClassification.from_pretrained(classifier.path / "source")
    ids = [0, 5, 6, 7, 22, 38, 2]

    def margin(removed: list[set[int]]) -> float:
        with torch.no_grad():
            logits = oracle(torch.tensor([kept(ids, removed[0])])).logits[0]
        return float(logits[2] - logits[0])

    target = {"type": "label", "label": "happy", "versus": "sad"}
    result = ask(labeler, "attribute", text="w5 w6 w7 w22 w38", target=target, faithfulness="words")
    check(result, margin)


def test_faithfulness_of_a_sparse_weight_equals_transformers(
    splade: TestClient, sparse_encoder: tuple[SparseEncoder, Artifact]
) -> None:
    oracle = AutoModelForMaskedLM.from_pretrained(sparse_encoder[1].path / "source")
    ids = [0, 9, 10, 5, 6, 7, 22, 38, 2]  # the prompt stays

    def weights(removed: set[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = oracle(torch.tensor([kept(ids, removed)])).logits[0]
        return torch.log1p(torch.relu(logits)).amax(0)

    entry = int(weights(set()).argmax())
    result = ask(
        splade,
        "attribute",
        text={"text": "w5 w6 w7 w22 w38", "prompt_name": "query"},
        target={"type": "sparse", "token": f"w{entry}"},
        method="saliency",
        faithfulness="tokens",
    )
    check(result, lambda removed: float(weights(removed[0])[entry]), is_unsigned=True)


@pytest.mark.parametrize("versus", [None, "rain, rain!"])
def test_faithfulness_of_maxsim_equals_sentence_transformers(
    colbert: TestClient, multi_encoder: tuple[MultiVectorEncoder, Artifact], versus: str | None
) -> None:
    oracle = multi_encoder[0]
    texts = ["Where did the cat sit?", "The cat, it sat.", *([versus] if versus else [])]
    body = {"text": texts[0], "text_pair": texts[1], "faithfulness": "words"}
    target = {"type": "maxsim", "versus": versus}
    result = ask(colbert, "attribute", **body, target=target, method="grad_x_input")

    def vectors(number: int, removed: set[int]) -> torch.Tensor:
        task = "query" if number == 0 else "document"
        features = oracle.preprocess([texts[number]], prompt=oracle.prompts[task], task=task)
        keep = [i for i in range(features["input_ids"].shape[1]) if i not in removed]
        features = {
            name: value[:, keep] if torch.is_tensor(value) else value
            for name, value in features.items()
        }
        with torch.no_grad():
            embedded = oracle(features, task=task)
        mask = embedded["attention_mask"][0].bool()
        own: torch.Tensor = embedded["token_embeddings"][0][mask]
        return own

    def maxsim(removed: list[set[int]]) -> float:
        query, *documents = (vectors(i, part) for i, part in enumerate(removed))
        scores = [float((query @ document.T).amax(1).sum()) for document in documents]
        return scores[0] - sum(scores[1:])

    check(result, maxsim)


# Absolute, relative and rotary positions; tests of the reference models have all families.
@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert"])
def test_faithfulness_of_an_embedding_equals_transformers(
    family_artifact: FamilyArtifact, family: str
) -> None:
    artifact = family_artifact(family)
    oracle = AutoModel.from_pretrained(artifact.path / "source").eval()
    assert oracle.config.model_type == family
    ids = [0, 5, 6, 7, 22, 38, 41, 2]

    def vector(ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            hidden = oracle(input_ids=torch.tensor([ids])).last_hidden_state[0]
        return torch.nn.functional.normalize(hidden.mean(0), dim=0)

    positive, negative = vector([0, 9, 6, 2]), vector([0, 44, 2])
    targets: list[tuple[Json, torch.Tensor]] = [
        ({"type": "cosine", "text": "w9 w6"}, positive),
        ({"type": "margin", "positive": "w9 w6", "negative": "w44"}, positive - negative),
    ]
    with service_of(artifact) as client:
        for target, direction in targets:
            body = {"text": "w5 w6 w7 w22 w38 w41", "target": target, "faithfulness": "tokens"}
            result = ask(client, "attribute", **body, method="grad_x_input")

            def value(removed: list[set[int]], direction: torch.Tensor = direction) -> float:
                return float(vector(kept(ids, removed[0])) @ direction)

            check(result, value)


def test_cost_of_faithfulness_is_part_of_the_budget(ranker: TestClient, reranker: Artifact) -> None:
    body = {"text": QUERY, "text_pair": DOCUMENT, "target": {"type": "score"}, "dry_run": True}
    plain = ask(ranker, "attribute", **body, method="saliency")
    words = ask(ranker, "attribute", **body, method="saliency", faithfulness="words")
    # Twelve tokens for the value, and eleven without each of 9 units. Then six orders of them, with
    # 1, 2 and 5 units removed and kept: nine tokens are in one of both texts, three in both.
    steps = words["cost"]["token_steps"] - plain["cost"]["token_steps"]
    assert steps == 12 + 9 * 11 + 6 * 3 * (9 + 2 * 3)
    with service_of(reranker, max_token_steps=12 + steps - 1) as client:
        fields = {**body, "method": "saliency"}
        assert client.post("/debug/attribute", json=fields).status_code == 200
        problem = problem_of(client, "attribute", {**fields, "faithfulness": "words"})
        assert problem["code"] == "budget"


def test_faithfulness_is_null_without_the_field(labeler: TestClient) -> None:
    body = {"text": "w5", "target": {"type": "label"}, "method": "saliency"}
    assert ask(labeler, "attribute", **body)["faithfulness"] is None
    problem = problem_of(labeler, "attribute", {**body, "faithfulness": "sentences"})
    assert (problem["code"], problem["pointer"]) == ("invalid", "/faithfulness")
