"""Patches over HTTP, by hand with transformers and sentence-transformers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from starlette.testclient import TestClient
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from models.artifact import Artifact
from tests.service.debug.conftest import Json, ask, problem_of
from tests.serving import state_of

pytestmark = pytest.mark.slow


TAP = "layers.0.attention"


@contextmanager
def attention_of(
    oracle: nn.Module, pairs: Sequence[tuple[int, int]] = (), source: Tensor | None = None
) -> Iterator[list[Tensor]]:
    """Record the attention output of the first layer of a BERT, or replace some of its vectors."""
    seen: list[Tensor] = []

    def visit(_: object, __: object, output: Tensor) -> None:
        seen.append(output[0].clone())
        for position, origin in pairs:
            assert source is not None
            output[:, position] = source[origin]

    module = oracle.get_submodule("encoder.layer.0.attention.output.dense")
    handle = module.register_forward_hook(visit)
    try:
        yield seen
    finally:
        handle.remove()


def check_patches(
    client: TestClient,
    body: Json,
    encoder: nn.Module,
    value: Callable[[str, str | None], Mapping[str, float]],
    name: str = "value",
) -> None:
    """Compare patches of one input with those by hooks.

    Args:
        client: Client of the service.
        body: Request without taps and positions.
        encoder: Encoder of the oracle, a BERT.
        value: Returns the scalar of a text and its pair, by name.
        name: Name of the scalar.
    """
    text, source = body["text"], body["source"]
    pair, source_pair = body.get("text_pair"), body.get("source_pair", body.get("text_pair"))
    with attention_of(encoder) as seen:
        source_value = value(source, source_pair)[name]
    clean = value(text, pair)[name]

    def patched(pairs: Sequence[tuple[int, int]]) -> float:
        with attention_of(encoder, pairs, seen[0]):
            return value(text, pair)[name]

    length = len(seen[0])
    everything = [(position, position) for position in range(length)]
    given = [(1, 2), (3, 0)]
    result = ask(client, "patch", **body, taps=[TAP])
    assert result["value"] == pytest.approx(clean, rel=1e-4)
    assert result["source_value"] == pytest.approx(source_value, rel=1e-4)
    assert result["parity"]["agrees"]
    whole = source_value - clean
    for positions, pairs in ((None, everything), (given, given)):
        (at_tap,) = ask(client, "patch", **body, taps=[TAP], positions=positions)["taps"]
        expected = patched(pairs)
        assert at_tap["value"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert at_tap["effect"] == pytest.approx((expected - clean) / whole, rel=1e-2, abs=1e-3)
        assert (at_tap["tap"], at_tap["values"]) == (TAP, None)
        assert abs(expected - clean) > 1e-4
    result = ask(client, "patch", **body, taps=[TAP, "embeddings"], positions="each")
    assert len(result["tokens"]) == len(result["source_tokens"]) == length
    at_tap, at_embeddings = result["taps"]
    alone = [patched([pair]) for pair in everything]
    np.testing.assert_allclose(at_tap["values"], alone, rtol=1e-4, atol=1e-5)
    effects = [(each - clean) / whole for each in alone]
    np.testing.assert_allclose(at_tap["effect"], effects, rtol=1e-2, atol=1e-3)
    assert at_tap["value"] is None
    assert at_embeddings["effect"][0] == pytest.approx(0, abs=1e-4)  # both start with [CLS]


def test_patch_of_a_cosine_equals_hooks_on_transformers(
    embedder: TestClient,
    roberta: Any,  # noqa: ANN401
) -> None:
    def vector(text: str) -> Tensor:
        ids = torch.tensor([[0, *(int(word[1:]) for word in text.split()), 2]])
        with torch.no_grad():
            return torch.nn.functional.normalize(roberta(ids).last_hidden_state[0].mean(0), dim=0)

    positive, negative = vector("w9 w6"), vector("w44")

    def value(text: str, _: str | None) -> Mapping[str, float]:
        own = vector(text)
        cosine = float(own @ positive)
        return {"cosine": cosine, "margin": cosine - float(own @ negative)}

    body = {"text": "w5 w6 w7 w22", "source": "w8 w40 w3 w21"}
    target: Json = {"type": "cosine", "text": "w9 w6"}
    check_patches(embedder, {**body, "target": target}, roberta, value, "cosine")
    target = {"type": "margin", "positive": "w9 w6", "negative": "w44"}
    check_patches(embedder, {**body, "target": target}, roberta, value, "margin")


def test_patch_of_a_rerank_score_equals_hooks_on_transformers(
    ranker: TestClient, reranker: Artifact
) -> None:
    oracle = AutoModelForSequenceClassification.from_pretrained(reranker.path / "source")

    def score(text: str, pair: str | None) -> Mapping[str, float]:
        first, second = ([int(word[1:]) for word in each.split()] for each in (text, pair or ""))
        ids = torch.tensor([[0, *first, 2, *second, 2]])
        types = torch.tensor([[0] * (len(first) + 2) + [1] * (len(second) + 1)])
        with torch.no_grad():
            return {"value": float(oracle(ids, token_type_ids=types).logits[0, 0])}

    body = {"text": "w7 w9", "text_pair": "w21 w5 w33", "target": {"type": "score"}}
    check_patches(ranker, {**body, "source": "w8 w50"}, oracle.bert, score)
    source = {"source": "w8 w50", "source_pair": "w30 w5 w12"}
    check_patches(ranker, {**body, **source}, oracle.bert, score)


def test_patch_of_a_margin_of_two_pairs_is_the_difference_of_their_patches(
    ranker: TestClient,
) -> None:
    query, document, versus = "w7 w9", "w21 w5 w33", "w8 w51"
    target = {"type": "score", "versus": versus}
    body = {"text": query, "source": "w8 w50", "taps": [TAP]}
    result = ask(ranker, "patch", **body, text_pair=document, target=target)
    singles = [
        ask(ranker, "patch", **body, text_pair=each, target={"type": "score"})
        for each in (document, versus)
    ]
    for name in ("value", "source_value"):
        assert result[name] == pytest.approx(singles[0][name] - singles[1][name], abs=1e-5)
    first, second = (single["taps"][0]["value"] for single in singles)
    assert result["taps"][0]["value"] == pytest.approx(first - second, abs=1e-5)
    each = ask(ranker, "patch", **body, text_pair=document, target=target, positions="each")
    assert [token["input"] for token in each["tokens"]] == [0] * 8 + [1] * 7
    own = [
        ask(ranker, "patch", **body, text_pair=text, target={"type": "score"}, positions="each")
        for text in (document, versus)
    ]
    values = [value - singles[1]["value"] for value in own[0]["taps"][0]["values"]]
    values += [singles[0]["value"] - value for value in own[1]["taps"][0]["values"]]
    np.testing.assert_allclose(each["taps"][0]["values"], values, atol=1e-5)


def test_patch_of_a_label_equals_hooks_on_transformers(
    labeler: TestClient, classifier: Artifact
) -> None:
    oracle = AutoModelForSequenceClassification.from_pretrained(classifier.path / "source")

    def logits(text: str, _: str | None) -> Mapping[str, float]:
        ids = torch.tensor([[0, *(int(word[1:]) for word in text.split()), 2]])
        with torch.no_grad():
            sad, _, happy = oracle(ids).logits[0].tolist()
        return {"happy": happy, "margin": happy - sad}

    body = {"text": "w5 w6 w7", "source": "w8 w40 w33"}
    target = {"type": "label", "label": "happy"}
    check_patches(labeler, {**body, "target": target}, oracle.roberta, logits, "happy")
    target["versus"] = "sad"
    check_patches(labeler, {**body, "target": target}, oracle.roberta, logits, "margin")
    result = ask(labeler, "patch", **body, target={"type": "label"}, taps=["output"])
    predicted = ask(labeler, "attribute", text=body["text"], target={"type": "label"})
    assert result["label"] == predicted["label"]


def test_patch_of_a_sparse_weight_equals_hooks_on_transformers(
    splade: TestClient, sparse_encoder: tuple[SparseEncoder, Artifact]
) -> None:
    oracle = AutoModelForMaskedLM.from_pretrained(sparse_encoder[1].path / "source")

    def weights(text: str, _: str | None) -> Mapping[str, float]:
        ids = torch.tensor([[0, *(int(word[1:]) for word in text.split()), 2]])
        with torch.no_grad():
            row = torch.log1p(torch.relu(oracle(ids).logits[0])).amax(0)
        return {f"w{index}": float(weight) for index, weight in enumerate(row)}

    body = {"text": "w5 w6 w7", "source": "w8 w40 w33"}
    both = weights(body["text"], None), weights(body["source"], None)
    token = max(both[0], key=lambda name: min(own[name] for own in both))
    target = {"type": "sparse", "token": token}
    check_patches(splade, {**body, "target": target}, oracle.bert, weights, token)


def test_patch_of_maxsim_equals_hooks_on_sentence_transformers(
    colbert: TestClient, multi_encoder: tuple[MultiVectorEncoder, Artifact]
) -> None:
    oracle = multi_encoder[0]
    encoder = oracle[0].auto_model
    query, document, other = "Where did the cat sit?", "The cat, it sat.", "A dog, it ran."

    def maxsim(documents: str) -> float:
        vectors = oracle.encode_query(query), oracle.encode_document(documents)
        return float((np.asarray(vectors[0]) @ np.asarray(vectors[1]).T).max(1).sum())

    with attention_of(encoder) as seen:
        source_value = maxsim(other)
    length = len(seen[-1])  # that of the document
    clean = maxsim(document)
    body = {"text": query, "text_pair": document, "source": query, "source_pair": other}
    result = ask(colbert, "patch", **body, target={"type": "maxsim"}, taps=[TAP])
    assert result["value"] == pytest.approx(clean, rel=1e-4)
    assert result["source_value"] == pytest.approx(source_value, rel=1e-4)
    vectors = np.asarray(oracle.encode_query(query))

    def patched(pairs: Sequence[tuple[int, int]]) -> float:
        with attention_of(encoder, pairs, seen[-1]):
            own = np.asarray(oracle.encode_document(document))
        return float((vectors @ own.T).max(1).sum())

    everything = [(position, position) for position in range(length)]
    assert result["taps"][0]["value"] == pytest.approx(patched(everything), rel=1e-4)
    start = len(result["tokens"]) - length
    given = [(start + 5, start + 6)]
    fields = {"target": {"type": "maxsim"}, "taps": [TAP]}
    result = ask(colbert, "patch", **body, **fields, positions=given)
    assert result["taps"][0]["value"] == pytest.approx(patched([(5, 6)]), rel=1e-4)
    each = ask(colbert, "patch", **body, **fields, positions="each")["taps"][0]["values"]
    np.testing.assert_allclose(each[:start], [clean] * start, rtol=1e-4)  # the same query
    np.testing.assert_allclose(each[start:], [patched([pair]) for pair in everything], rtol=1e-4)


@pytest.mark.parametrize(
    ("query", "source", "document", "source_pair", "names"),
    [
        # Both queries are expanded to as many tokens, but more of the source's are attended to.
        ("the cat", "where did it sit?", "A cat.", "A cat.", ("text", "source")),
        # Commas have no vectors.
        ("the cat", "the cat", "The cat, it sat", "A dog ran, it", ("text_pair", "source_pair")),
    ],
)
def test_patch_of_all_tokens_is_refused_if_it_would_not_give_the_source(
    colbert: TestClient,
    query: str,
    source: str,
    document: str,
    source_pair: str,
    names: tuple[str, str],
) -> None:
    texts = {"text": query, "source": source, "text_pair": document, "source_pair": source_pair}
    body: Json = {**texts, "target": {"type": "maxsim"}, "taps": ["embeddings"]}
    for positions in (None, "each"):
        problem = problem_of(colbert, "patch", {**body, "positions": positions})
        assert (problem["code"], problem["pointer"]) == ("token_counts", "/positions")
        assert f"other tokens of {names[0]} than of {names[1]};" in problem["detail"]
    result = ask(colbert, "patch", **body, positions=[[1, 1]])
    everything = [[index, index] for index in range(len(result["tokens"]))]
    (at_tap,) = ask(colbert, "patch", **body, positions=everything)["taps"]
    assert abs(at_tap["value"] - result["source_value"]) > 1e-3


PATCH: Json = {
    "text": "w5 w6 w7",
    "source": "w8 w9 w10",
    "target": {"type": "dim", "index": 3},
    "taps": ["layers.0"],
}


@pytest.mark.parametrize(
    ("body", "code", "pointer", "message"),
    [
        ({"source": "w8"}, "token_counts", "/positions",
         "text has 5 tokens and source has 3; without a list of positions"),
        ({"source": "w8", "positions": "each"}, "token_counts", "/positions", "5 tokens"),
        ({"taps": ["pooling"]}, "unknown_tap", "/taps/0", "one vector for all tokens"),
        ({"taps": ["secret"]}, "unknown_tap", "/taps/0", "unknown tap; the model's layers: words"),
        ({"positions": [[1, 1], [5, 1]]}, "position", "/positions/1", "the texts have 5 tokens"),
        ({"positions": [[1, 5]]}, "position", "/positions/0", "the sources 5"),
        ({"positions": [[1, 1], [1, 2]]}, "position", "/positions/1", "1 occurs twice"),
        ({"source": " "}, "no_tokens", "/source", "no tokens"),
        ({"source_pair": "w5"}, "invalid", "/source_pair", "source_pair applies to rerankers"),
        ({"target": {"type": "score"}}, "wrong_target", "/target/type", "cosine"),
    ],
)  # fmt: skip
def test_invalid_patch_request_has_code_and_pointer(
    embedder: TestClient, body: Json, code: str, pointer: str, message: str
) -> None:
    problem = problem_of(embedder, "patch", {**PATCH, **body})
    assert (problem["code"], problem["pointer"]) == (code, pointer)
    assert message in problem["detail"]


@pytest.mark.parametrize(
    ("positions", "pointer", "message"),
    [
        ("all", "", "Input should be 'each'"),
        (1, "", "Input should be 'each', a list of pairs of positions, or null"),
        ({}, "", "Input should be 'each', a list of pairs of positions, or null"),
        ([], "", "List should have at least 1 item, not 0"),
        ([[1]], "/0", "List should have at least 2 items, not 1"),
        ([[1, 2, 3]], "/0", "List should have at most 2 items, not 3"),
        ([[1, 2], [1, -1]], "/1/1", "greater than or equal to 0"),
    ],
)
def test_malformed_positions_are_refused(
    embedder: TestClient, positions: object, pointer: str, message: str
) -> None:
    problem = problem_of(embedder, "patch", {**PATCH, "positions": positions})
    assert (problem["code"], problem["pointer"]) == ("invalid", f"/positions{pointer}")
    assert message in problem["detail"]


def test_pair_of_positions_in_different_inputs_is_refused(ranker: TestClient) -> None:
    body = {
        "text": "w7",
        "text_pair": "w5",
        "source": "w8",
        "target": {"type": "score", "versus": "w6"},
        "taps": ["output"],
    }
    problem = problem_of(ranker, "patch", {**body, "positions": [[1, 6]]})
    assert (problem["code"], problem["pointer"]) == ("position", "/positions/0")
    assert "different inputs" in problem["detail"]
    # Document and source need as many tokens, too.
    problem = problem_of(ranker, "patch", {**body, "source_pair": "w5 w6"})
    assert problem["code"] == "token_counts"
    names = ("the pair of text and text_pair has 5", "the pair of source and source_pair has 6")
    assert all(name in problem["detail"] for name in names)
    # The first pairs have as many tokens, and the second ones, with `versus`, have not.
    other = {"source": "w8 w9", "text_pair": "w5 w6", "source_pair": "w5"}
    problem = problem_of(ranker, "patch", {**body, **other})
    assert problem["code"] == "token_counts"
    assert "the pair of text and target/versus has 5 tokens and" in problem["detail"]
    assert "the pair of source and target/versus has 6;" in problem["detail"]
    problem = problem_of(ranker, "patch", {**body, "source": "w8 w9"})
    assert "the pair of source and text_pair has 6;" in problem["detail"]


def test_patch_is_null_where_the_source_changes_nothing(embedder: TestClient) -> None:
    result = ask(embedder, "patch", **{**PATCH, "source": PATCH["text"]})
    assert result["taps"][0]["effect"] is None
    assert result["nonfinite"] == [{"pointer": "/taps/0/effect", "kind": "nan"}]


def test_cost_of_a_patch_counts_every_forward_pass(embedder: TestClient) -> None:
    body = {**PATCH, "taps": ["layers.0", "output"], "dry_run": True}
    assert ask(embedder, "patch", **body)["cost"]["token_steps"] == 5 + 5 + 2 * 5
    each = ask(embedder, "patch", **body, positions="each")
    assert each["cost"]["token_steps"] == 5 + 5 + 2 * 5 * 5
    assert each.keys() == {"model", "cost"}
    limit = state_of(embedder).settings.debug.max_token_steps
    assert each["cost"]["limit"] == limit
    long = {"text": "w5 " * 20, "source": "w6 " * 20, "positions": "each"}
    problem = embedder.post("/debug/patch", json={**body, **long, "taps": ["layers.0"] * 400})
    assert problem.status_code == 200  # the same tap counts once
