"""Explanations of similarities, against token vectors and weights of sentence-transformers."""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Transformer,
)
from starlette.testclient import TestClient
from torch import nn

import vitrine
from models.artifact import Artifact
from models.export.exporter import export
from models.export.sources import resolve
from service.inference.results.batch_run import BatchItem
from service.inference.results.vectors import RowResults
from tests.models.checkpoints import edit_json, save_checkpoint, save_tokenizer
from tests.service.api.posting import ask, post, refused

pytestmark = pytest.mark.slow

THREADS = vitrine.ModelOptions(threads=1)
QUERY = "w7 w9 w21"
DOCUMENTS = ["w9 w40 w5 w6", "w21", "w7 w9 w21", "w33 " * 30]


def exported(
    folder: Path, pooling: str, *, heads: tuple[nn.Module, ...], **config: object
) -> Artifact:
    """Export a random BERT with a prompt for queries that pooling excludes."""
    save_checkpoint(folder, "bert", num_hidden_layers=1)
    save_tokenizer(folder)
    modules = [
        Transformer(str(folder), max_seq_length=16),
        Pooling(32, pooling_mode=pooling, include_prompt=False),
        *heads,
    ]
    prompts = {"query": "w50 w51 ", "document": ""}
    SentenceTransformer(modules=modules, prompts=prompts, device="cpu").save(str(folder))
    edit_json(folder / "config_sentence_transformers.json", **config)
    return export(resolve(str(folder)), folder / "artifact")[0]


def pooled_tokens(oracle: SentenceTransformer, text: str, prompt: str, pooling: str) -> Any:  # noqa: ANN401
    """Return the token vectors of a text, times their pooling weights; zero at the prompt."""
    tokens = oracle.encode(text, prompt_name=prompt, output_value="token_embeddings")
    tokens = torch.as_tensor(tokens).double().numpy()
    weights = np.ones(len(tokens))
    if pooling == "weightedmean":
        weights = np.arange(1.0, len(tokens) + 1)
    if prompt == "query":
        weights[:3] = 0  # [CLS] and the prompt's two tokens
    return tokens * weights[:, None]


@pytest.mark.parametrize(
    ("pooling", "heads", "config"),
    [
        ("mean", (Normalize(),), {"truncate_dim": 8}),
        ("mean_sqrt_len_tokens", (Normalize(),), {}),
        ("weightedmean", (), {}),
    ],
)
def test_terms_of_a_cosine_are_products_of_token_vectors(
    pooling: str, heads: tuple[nn.Module, ...], config: dict[str, Any], tmp_path: Path
) -> None:
    artifact = exported(tmp_path, pooling, heads=heads, **config)
    oracle = SentenceTransformer(str(tmp_path), device="cpu")
    width = config.get("truncate_dim", 32)
    with vitrine.SyncModel(artifact.path, THREADS) as model:
        result = model.score(QUERY, DOCUMENTS, explain=vitrine.Terms())
        plain = model.score(QUERY, DOCUMENTS)
    np.testing.assert_allclose(result.scores, plain.scores, atol=1e-6)
    assert (plain.explanations, sorted(result.explanations)) == ({}, [0, 1, 2, 3])
    x = pooled_tokens(oracle, QUERY, "query", pooling)[:, :width]
    for index, document in enumerate(DOCUMENTS):
        y = pooled_tokens(oracle, document, "document", pooling)[:, :width]
        matrix = x @ y.T / (np.linalg.norm(x.sum(0)) * np.linalg.norm(y.sum(0)))
        explanation = result.explanations[index]
        expected = matrix.ravel()[np.argsort(-np.abs(matrix.ravel()))][:10]
        actual = [term.value for term in explanation.terms]
        np.testing.assert_allclose(np.abs(actual), np.abs(expected), atol=1e-5)
        assert sum(actual) + explanation.other == pytest.approx(result.scores[index], abs=1e-5)
        assert explanation.other == pytest.approx(matrix.sum() - expected.sum(), abs=1e-4)
        for term in explanation.terms:
            for side, text in ((term.query, QUERY), (term.document, document)):
                is_special = side.id in (0, 2)  # [CLS], [SEP]
                assert (side.span is None) == is_special
                if side.span:
                    assert text[slice(*side.span)] == f"w{side.id}"


def test_each_term_names_the_tokens_that_it_multiplies(
    small_artifact: Artifact, small_folder: Path
) -> None:
    query, document = "A cat sat.", "The kitten\tslept — 眠い."
    oracle = SentenceTransformer(str(small_folder), device="cpu")
    x, y = (pooled_tokens(oracle, text, "document", "mean") for text in (query, document))
    matrix = x @ y.T / (np.linalg.norm(x.sum(0)) * np.linalg.norm(y.sum(0)))
    ids, spans = zip(
        *(
            (encoding["input_ids"], encoding["offset_mapping"])
            for encoding in (
                oracle.tokenizer(text, return_offsets_mapping=True) for text in (query, document)
            )
        ),
        strict=True,
    )
    with vitrine.SyncModel(small_artifact.path, THREADS) as model:
        explanation = model.score(query, document, explain=vitrine.Terms()).explanations[0]
    flat = sorted(
        itertools.product(range(len(x)), range(len(y))), key=lambda pair: -abs(matrix[pair])
    )
    for term, (i, j) in zip(explanation.terms, flat, strict=False):
        assert term.value == pytest.approx(matrix[i, j], abs=1e-6)
        assert (term.query.id, term.document.id) == (ids[0][i], ids[1][j])
        for side, span, is_special in (
            (term.query, spans[0][i], i in (0, len(x) - 1)),
            (term.document, spans[1][j], j in (0, len(y) - 1)),
        ):
            assert side.span == (None if is_special else span)


def test_blocks_of_a_long_query_give_the_same_terms(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = "the cat sat on the mat and saw a dog " * 3, "dogs and cats"
    with vitrine.SyncModel(small_artifact.path, THREADS) as model:
        expected = model.score(*texts, explain=vitrine.Terms()).explanations[0]
        monkeypatch.setattr("service.inference.explain.terms._BLOCK", 4)
        actual = model.score(*texts, explain=vitrine.Terms()).explanations[0]
    for ours, theirs in zip(actual.terms, expected.terms, strict=True):
        assert ours.value == pytest.approx(theirs.value, abs=1e-6)
        assert ours.query == theirs.query
    assert actual.other == pytest.approx(expected.other, abs=1e-5)


def test_terms_of_maxsim_are_each_query_token_with_its_most_similar_document_token(
    multi_encoder: tuple[MultiVectorEncoder, Artifact],
) -> None:
    oracle, artifact = multi_encoder
    query, documents = "Where did the cat sit?", ["The cat sat.", "rain, rain!", "!"]
    x = np.asarray(oracle.encode_query(query, convert_to_numpy=True), np.float64)
    with vitrine.SyncModel(artifact.path, THREADS) as model:
        result = model.score(query, documents, explain=vitrine.Terms())
        rows = [model.encode_multi([text], prompt_name="document") for text in documents]
        own = model.encode_multi([query], prompt_name="query")
    assert result.kind == "maxsim"
    for index, document in enumerate(documents):
        y = np.asarray(oracle.encode_document(document, convert_to_numpy=True), np.float64)
        products, explanation = x @ y.T, result.explanations[index]
        order = np.argsort(-np.abs(products.max(1)))[:10]
        values = [term.value for term in explanation.terms]
        np.testing.assert_allclose(values, products.max(1)[order], atol=1e-5)
        assert sum(values) + explanation.other == pytest.approx(result.scores[index], abs=1e-5)
        for term, i in zip(explanation.terms, order, strict=True):
            j = products[i].argmax()
            assert term.query.id == own.ids[0][i]
            assert term.document.id == rows[index].ids[0][j]
            offsets = rows[index].offsets[0]
            assert term.document.span == (None if offsets is None else offsets[j])


def test_rerank_explains_the_best_documents_alone(small_artifact: Artifact) -> None:
    texts = ["Stocks fell.", "A feline rested.", "It rained.", "The cat sat on the mat."]
    with vitrine.SyncModel(small_artifact.path, THREADS) as model:
        everything = model.rerank("a cat", texts, explain=vitrine.Terms())
        best = model.rerank("a cat", texts, top_n=2, explain=vitrine.Terms())
        scores = model.score("a cat", texts).scores
    np.testing.assert_allclose(best.scores, scores, atol=1e-6)
    order = best.ranking()
    assert order == np.argsort(-scores, kind="stable").tolist()
    assert (sorted(everything.explanations), set(best.explanations)) == ([0, 1, 2, 3], {*order[:2]})
    for index in order[:2]:
        terms, expected = best.explanations[index].terms, everything.explanations[index].terms
        for ours, theirs in zip(terms, expected, strict=True):
            assert ours.value == pytest.approx(theirs.value, abs=1e-6)


async def test_requests_for_different_outputs_share_batches(small_artifact: Artifact) -> None:
    texts = [f"text {index}" for index in range(20)]
    async with await vitrine.open_model(small_artifact.path, THREADS) as model:
        encoded, scored = await asyncio.gather(
            model.encode(texts), model.score(texts, texts[::-1], explain=vitrine.Terms())
        )
    expected = (encoded.vectors * encoded.vectors[::-1]).sum(1)
    np.testing.assert_allclose(scored.scores, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("pooling", "heads", "message"),
    [
        ("cls", (), "its pooling is cls"),
        ("mean", (Dense(32, 32),), "its vectors pass through DenseHead"),
    ],
)
def test_scores_that_are_not_sums_over_tokens_are_refused_with_the_reason(
    pooling: str, heads: tuple[nn.Module, ...], message: str, tmp_path: Path
) -> None:
    artifact = exported(tmp_path, pooling, heads=heads)
    with vitrine.SyncModel(artifact.path, THREADS) as model:
        for call in (model.score, model.rerank):
            remedy = f"{message}; deletion explains it"
            with pytest.raises(vitrine.InvalidInput, match=remedy) as raised:
                call(QUERY, DOCUMENTS, explain=vitrine.Terms())
            assert (raised.value.code, raised.value.pointer) == ("wrong_model", "/explain")
        assert len(model.score(QUERY, DOCUMENTS).scores) == 4


def test_error_in_the_second_pass_names_the_document_of_the_request(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["Stocks fell.", "A feline rested.", "It rained.", "The cat sat on the mat."]
    with vitrine.SyncModel(small_artifact.path, THREADS) as model:
        first, second = model.rerank("a cat", texts).ranking()[:2]
        (failing,) = model.model.tokenizer.rows_of_texts([texts[second]], None, "truncate")
        run = model.model.batcher._runner._run

        def faulty(items: Sequence[BatchItem]) -> Sequence[RowResults]:
            if any(i.row.ids == failing.ids and "tokens" in i.outputs for i in items):
                raise RuntimeError("engine fault")
            return run(items)

        monkeypatch.setattr(model.model.batcher._runner, "_run", faulty)
        with pytest.raises(vitrine.InferenceFailed) as raised:
            model.rerank("a cat", texts, top_n=2, explain=vitrine.Terms())
        assert (raised.value.index, raised.value.pointer) == (second, f"/documents/{second}")
        assert first != second


def test_explanations_end_at_the_deadline(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 10_000, 40))  # seconds, by a clock that moves 40 s between two readings
    clock = SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr("service.inference.call_options.time", clock)
    with vitrine.SyncModel(small_artifact.path, THREADS) as model:
        with pytest.raises(vitrine.DeadlineExceeded, match="deadline of 60 s exceeded"):
            model.score("a", ["b", "c", "d"], explain=vitrine.Terms(), timeout_s=60)
        assert len(model.score("a", ["b", "c"], explain=vitrine.Terms()).explanations) == 2


def test_limits_of_query_and_document_are_refused_for_vectors(small_artifact: Artifact) -> None:
    with vitrine.SyncModel(small_artifact.path, THREADS) as model:
        with pytest.raises(vitrine.InvalidInput, match="applies to rerankers") as raised:
            model.rerank("a", ["b"], max_tokens_per_doc=3)
        assert raised.value.pointer == "/max_tokens_per_doc"
        assert model.rerank("a", ["b"], max_tokens_per_doc=4096).kind == "cosine"


def test_responses_have_the_tokens_and_sums_of_each_score(client: TestClient) -> None:
    body = {
        "queries": "A cat sat.",
        "documents": ["A dog ran.", "It rained."],
        "explain": {"method": "terms"},
    }
    result = ask(client, "/score", **body)
    for score, explanation in zip(result["scores"], result["explanations"], strict=True):
        values = [term["value"] for term in explanation["terms"]]
        assert (len(values), sum(values) + explanation["other"]) == (10, pytest.approx(score))
    tokens = [term["query"] for term in result["explanations"][0]["terms"]]
    assert {"id": 4937, "token": "cat", "start": 2, "end": 5} in tokens
    special = [token for token in tokens if token["token"] in ("[CLS]", "[SEP]")]
    assert special
    assert {(token["start"], token["end"]) for token in special} == {(None, None)}
    assert "explanations" not in ask(client, "/score", **{**body, "explain": False})


def test_embedding_model_reranks_by_cosine_with_explanations_of_the_best(
    client: TestClient,
) -> None:
    documents = ["A dog ran.", "It rained.", "A cat sat on the mat."]
    scores = ask(client, "/score", queries="A cat", documents=documents)
    body = {"query": "A cat", "documents": documents, "top_n": 2, "explain": {"method": "terms"}}
    response = post(client, "/rerank", **body)
    result = response.json()
    assert (result["kind"], len(result["results"]), len(result["tokens"])) == ("cosine", 2, 3)
    assert "explain;dur=" in response.headers["Server-Timing"]
    order = np.argsort(-np.array(scores["scores"]))
    assert [ranked["index"] for ranked in result["results"]] == order[:2].tolist()
    for ranked in result["results"]:
        explanation = ranked["explanation"]
        values = [term["value"] for term in explanation["terms"]]
        assert sum(values) + explanation["other"] == pytest.approx(ranked["score"], abs=1e-5)


def test_reranker_refers_to_deletion(rerank_client: TestClient) -> None:
    body = {"query": "w5", "documents": ["w6", "w7"], "explain": {"method": "terms"}}
    problem = refused(rerank_client, "/rerank", **body)
    assert (problem["code"], problem["pointer"]) == ("wrong_model", "/explain")
    assert "it reads query and document at once; deletion explains it" in problem["detail"]


def test_explanations_of_too_many_tokens_are_refused(client: TestClient) -> None:
    body = {
        "queries": "a",
        "documents": [f"{i} " + "cat " * 300 for i in range(80)],
        "explain": {"method": "terms"},
    }
    problem = refused(client, "/score", **body)
    assert (problem["code"], problem["pointer"]) == ("too_many_tokens", "/documents")
    assert ask(client, "/score", **{**body, "explain": False})
    ranked = {"query": "a", "documents": body["documents"], "explain": body["explain"], "top_n": 3}
    assert len(ask(client, "/rerank", **ranked)["results"]) == 3
