"""`chunking` of `POST /encode`, `/score` and `/rerank`, against sentence-transformers."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from starlette.testclient import TestClient

import vitrine
from models.artifact import Artifact
from service.inference.batching.batcher import Outcome
from service.inference.results.loaded_model import LoadedModel
from service.inference.results.vectors import RowResults
from service.inference.tokenizing.rows import Row
from tests.sentences import SENTENCES
from tests.service.api.posting import ask, refused

LONG = "\n\n".join(SENTENCES)
QUERY = "Where did the cat sleep?"
WORDS = " ".join(f"w{4 + 7 * i % 56}" for i in range(60))
DOCUMENTS = [WORDS, "w21 w5", "w9 " * 30]

PLAIN = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}

Json = dict[str, Any]


def parts_of(text: str, chunks: Sequence[Json]) -> list[str]:
    return [text[chunk["start"] : chunk["end"]] for chunk in chunks]


@pytest.fixture(scope="module")
def oracle(small_folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(small_folder), device="cpu")


@pytest.mark.parametrize("strategy", ["tokens", "sentences", "paragraphs"])
def test_vectors_are_those_of_the_chunks_texts(
    client: TestClient, oracle: SentenceTransformer, strategy: str
) -> None:
    chunking = {"strategy": strategy, "size": 30, "overlap": 5}
    result = ask(client, "/encode", inputs=[LONG, "a cat"], chunking=chunking)
    assert list(map(len, result["chunks"])) == list(map(len, result["embeddings"]))
    assert result["chunks"][1] == [{"start": 0, "end": 5, "tokens": 2}]
    assert (result["dimensions"], result["truncated"]) == (32, [False, False])
    for text, chunks, vectors in zip(
        [LONG, "a cat"], result["chunks"], result["embeddings"], strict=True
    ):
        parts = parts_of(text, chunks)
        np.testing.assert_allclose(vectors, oracle.encode(parts), rtol=0, atol=1e-5)
        tokens = [len(ids) for ids in oracle.tokenizer(parts, add_special_tokens=False).input_ids]
        assert [chunk["tokens"] for chunk in chunks] == tokens
    lengths = [[chunk["tokens"] + 2 for chunk in chunks] for chunks in result["chunks"]]
    assert result["tokens"] == list(map(sum, lengths))


def test_chunks_of_the_default_size_fill_the_model(
    client: TestClient, oracle: SentenceTransformer
) -> None:
    result = ask(client, "/encode", inputs=LONG, chunking={})
    longest = max(chunk["tokens"] for chunk in result["chunks"][0])
    assert longest == oracle.max_seq_length - 2


@pytest.mark.parametrize("late", [False, True])
def test_truncation_and_normalisation_apply_to_each_chunk(client: TestClient, late: bool) -> None:
    body = {"inputs": LONG, "chunking": {"size": 30, "late": late}}
    (whole,) = ask(client, "/encode", **body, normalize=False)["embeddings"]
    assert np.abs(np.linalg.norm(whole, axis=1) - 1).min() > 0.01
    expected = np.array(whole)[:, :5]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    result = ask(client, "/encode", **body, dimensions=5)
    np.testing.assert_allclose(result["embeddings"][0], expected, rtol=0, atol=1e-6)
    assert result["dimensions"] == 5
    (units,) = ask(client, "/encode", **body)["embeddings"]
    (leading,) = ask(client, "/encode", **body, truncate_dim=5)["embeddings"]
    np.testing.assert_allclose(leading, np.array(units)[:, :5], rtol=0, atol=1e-6)


def test_base64_has_a_string_per_chunk(client: TestClient) -> None:
    body = {"inputs": [LONG, "a cat"], "chunking": {"size": 30}}
    expected = ask(client, "/encode", **body)
    coded = ask(client, "/encode", **body, encoding="base64")
    assert coded["chunks"] == expected["chunks"]
    for texts, vectors in zip(coded["embeddings"], expected["embeddings"], strict=True):
        actual = [np.frombuffer(base64.b64decode(text), "<f4") for text in texts]
        np.testing.assert_array_equal(actual, np.array(vectors, np.float32))


def test_octet_stream_is_refused(client: TestClient) -> None:
    headers = {"Accept": "application/octet-stream"}
    body = {"inputs": "a cat", "chunking": {}}
    response = client.post("/encode", json=body, headers=headers)
    assert (response.status_code, response.json()["pointer"]) == (422, "/chunking")
    assert "JSON" in response.json()["detail"]


@pytest.mark.parametrize(
    ("fields", "pointer", "message"),
    [
        ({"inputs": [[101, 102]]}, "/chunking", "not to token ids"),
        ({"output": "tokens"}, "/chunking", "the output pooled alone"),
        ({"output": ["pooled"]}, "/chunking", "the output pooled alone"),
        ({"chunking": {"size": 255}}, "/chunking/size", "at most 254 tokens"),
        ({"chunking": {"size": 0}}, "/chunking/size", "greater than or equal to 1"),
        ({"chunking": {"size": 9, "overlap": 9}}, "/chunking/overlap", "chunks, 9 tokens"),
        ({"chunking": {"overlap": -1}}, "/chunking/overlap", "greater than or equal to 0"),
        ({"chunking": {"strategy": "words"}}, "/chunking/strategy", "'tokens'"),
        ({"chunking": {"words": 3}}, "/chunking", "unknown field in this object"),
        ({"chunking": "sentences"}, "/chunking", "Input should be an object"),
        ({"inputs": ["a cat", ""]}, "/inputs/1", "the text is empty"),
        ({"inputs": ""}, "/inputs", "the text is empty"),
        ({"prompt_name": "none"}, "/prompt_name", "unknown prompt"),
        ({"chunking": {"late": True}, "inputs": ""}, "/inputs", "the text is empty"),
    ],
)
def test_invalid_requests_name_the_field_or_input(
    client: TestClient, fields: Json, pointer: str, message: str
) -> None:
    body = {"inputs": "a cat", "chunking": {}, **fields}
    problem = refused(client, "/encode", **body)
    assert (problem["status"], problem["pointer"]) == (422, pointer)
    assert message in problem["detail"]


@pytest.mark.parametrize("late", [False, True])
def test_text_without_tokens_is_one_chunk_with_the_vector_of_the_text(
    client: TestClient, late: bool
) -> None:
    texts = [" \n", "\0", "\u200b", " \0 a\0cat"]
    result = ask(client, "/encode", inputs=texts, chunking={"late": late})
    expected = ask(client, "/encode", inputs=texts)
    chunks = [[(chunk["start"], chunk["end"]) for chunk in own] for own in result["chunks"]]
    assert chunks == [[(0, 2)], [(0, 1)], [(0, 1)], [(1, 8)]]
    np.testing.assert_allclose(
        np.concatenate(result["embeddings"]), expected["embeddings"], rtol=0, atol=1e-6
    )


def test_text_with_too_many_characters_is_an_error(client: TestClient) -> None:
    problem = refused(client, "/encode", inputs="a" * 100_001, chunking={})
    assert (problem["status"], problem["code"]) == (413, "text_too_large")


def test_number_of_chunks_is_limited_as_inputs_are(rerank_client: TestClient) -> None:
    for fields in ({"documents": ["w5 " * 9]}, {"documents": ["w5"] * 7 + ["w5 w6"]}):
        problem = refused(rerank_client, "/score", queries="w7", chunking={"size": 1}, **fields)
        assert (problem["code"], problem["pointer"]) == ("too_many_inputs", "/documents")
        assert "more than 8 chunks" in problem["detail"]


def test_failure_names_the_text_of_the_chunk(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(
        _: LoadedModel, rows: Sequence[Row], *__: object, **___: object
    ) -> Outcome[RowResults]:
        raise vitrine.InferenceFailed("the engine failed on this input", index=len(rows) - 1)

    monkeypatch.setattr(LoadedModel, "encode_rows", failing)
    with vitrine.SyncModel(small_artifact.path, vitrine.ModelOptions(threads=1)) as model:
        for late in (False, True):
            chunking = vitrine.Chunking(size=2, late=late)
            with pytest.raises(vitrine.InferenceFailed) as raised:
                model.encode_chunks(["a cat sat here", "a dog ran away"], chunking)
            assert raised.value.pointer == "/inputs/1"
            with pytest.raises(vitrine.InferenceFailed) as raised:
                model.score(["a", "b"], ["a cat sat here", "a dog ran away"], chunking=chunking)
            assert raised.value.pointer == "/documents/1"


@pytest.mark.parametrize("late", [False, True])
def test_document_has_the_cosine_of_its_best_chunk(
    client: TestClient, oracle: SentenceTransformer, late: bool
) -> None:
    documents = [LONG, "A cat sleeps.", LONG[::-1]]
    chunking = {"strategy": "sentences", "size": 25, "late": late}
    encoded = ask(client, "/encode", inputs=documents, chunking=chunking)
    for queries in (QUERY, [QUERY, "rain", "code"]):
        result = ask(client, "/score", queries=queries, documents=documents, chunking=chunking)
        each = [queries] * 3 if isinstance(queries, str) else queries
        for index, (query, vectors) in enumerate(zip(each, encoded["embeddings"], strict=True)):
            similarities = np.array(vectors) @ oracle.encode(query, normalize_embeddings=True)
            assert result["scores"][index] == pytest.approx(similarities.max(), abs=1e-5)
            best = encoded["chunks"][index][int(similarities.argmax())]
            assert result["best_chunks"][index] == best
        lengths = [len(ids) for ids in oracle.tokenizer(each).input_ids]
        tokens = [a + b for a, b in zip(lengths, encoded["tokens"], strict=True)]
        assert (result["kind"], result["tokens"]) == ("cosine", tokens)
        assert result["truncated"] == [False] * 3


def test_query_is_encoded_once_for_all_chunks(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode_rows = LoadedModel.encode_rows

    async def recording(
        model: LoadedModel,
        rows: Sequence[Row],
        *arguments: Any,  # noqa: ANN401 - encode_rows' own
        **options: Any,  # noqa: ANN401
    ) -> Outcome[RowResults]:
        lengths.append(len(rows))
        return await encode_rows(model, rows, *arguments, **options)

    monkeypatch.setattr(LoadedModel, "encode_rows", recording)
    with vitrine.SyncModel(small_artifact.path, vitrine.ModelOptions(threads=1)) as model:
        chunking = vitrine.Chunking(size=2)
        model.score([QUERY, "rain"], ["a cat sat here", "a dog ran"], chunking=chunking)
    assert lengths == [2 + 2 + 2]


def test_document_that_fits_has_its_ordinary_score(client: TestClient) -> None:
    body = {"queries": QUERY, "documents": ["A cat sleeps.", "It rained."]}
    expected = ask(client, "/score", **body)
    for chunking in ({}, {"late": True}):
        result = ask(client, "/score", **body, chunking=chunking)
        np.testing.assert_allclose(result["scores"], expected["scores"], rtol=0, atol=1e-6)
        assert result["tokens"] == expected["tokens"]


@pytest.mark.slow
def test_reranker_reads_the_query_with_each_chunk(
    rerank_client: TestClient, cross_encoder: CrossEncoder
) -> None:
    queries = ["w7 w9", "w21 w22 w23", "w5"]
    chunking = {"strategy": "tokens", "overlap": 3}
    encoded = ask(rerank_client, "/score", queries=queries, documents=DOCUMENTS, chunking=chunking)
    raw = ask(
        rerank_client,
        "/score",
        queries=queries,
        documents=DOCUMENTS,
        chunking=chunking,
        raw_scores=True,
    )
    for index, (query, document) in enumerate(zip(queries, DOCUMENTS, strict=True)):
        room = 24 - 3 - len(query.split())
        words = document.split()
        starts = range(0, max(len(words) - room, 0) + room - 3, room - 3)
        parts = [" ".join(words[start : start + room]) for start in starts]
        scores = cross_encoder.predict([(query, part) for part in parts])
        assert encoded["scores"][index] == pytest.approx(scores.max(), rel=1e-4)
        assert 1 / (1 + np.exp(-raw["scores"][index])) == pytest.approx(scores.max(), rel=1e-4)
        best = encoded["best_chunks"][index]
        assert document[best["start"] : best["end"]] == parts[int(scores.argmax())]
        tokens = sum(3 + len(query.split()) + len(part.split()) for part in parts)
        assert encoded["tokens"][index] == tokens
    assert encoded["truncated"] == [False] * 3


@pytest.mark.slow
def test_rerank_returns_the_best_chunk_of_each_document(rerank_client: TestClient) -> None:
    chunking = {"size": 10}
    scored = ask(rerank_client, "/score", queries="w7", documents=DOCUMENTS[:2], chunking=chunking)
    body = {"query": "w7", "documents": DOCUMENTS[:2], "chunking": chunking}
    ranked = ask(rerank_client, "/rerank", **body)["results"]
    assert [item["score"] for item in ranked] == sorted(scored["scores"], reverse=True)
    for item in ranked:
        assert item["score"] == scored["scores"][item["index"]]
        assert item["best_chunk"] == scored["best_chunks"][item["index"]]
    short = ask(rerank_client, "/rerank", **{**body, "query": "w7 " * 9, "max_tokens_per_query": 1})
    assert [item["index"] for item in short["results"]] == [item["index"] for item in ranked]


@pytest.mark.slow
def test_sparse_vectors_and_multi_vectors_of_chunks_are_compared(
    sparse_client: TestClient,
    sparse_encoder: tuple[SparseEncoder, Artifact],
    multi_client: TestClient,
    multi_encoder: tuple[MultiVectorEncoder, Artifact],
) -> None:
    for client, encoder, query, document in (
        (sparse_client, sparse_encoder[0], "w7 w9", WORDS),
        (multi_client, multi_encoder[0], QUERY, LONG[:300]),
    ):
        size = 8
        result = ask(client, "/score", queries=query, documents=document, chunking={"size": size})
        words = encoder.tokenizer(document, **PLAIN).offset_mapping
        parts = [
            document[words[start][0] : words[min(start + size, len(words)) - 1][1]]
            for start in range(0, len(words), size)
        ]
        documents = encoder.encode_document(parts)
        scores = encoder.similarity(encoder.encode_query([query]), documents).numpy()[0]
        assert result["scores"] == pytest.approx([scores.max()], rel=1e-4)
        assert parts_of(document, result["best_chunks"]) == [parts[int(scores.argmax())]]


@pytest.mark.parametrize(
    ("fields", "pointer", "message"),
    [
        ({"explain": True}, "/explain", "does not apply to chunks"),
        ({"chunking": {"size": 255}}, "/chunking/size", "at most 254"),
        ({"max_tokens_per_doc": 300}, "/max_tokens_per_doc", "excludes chunking"),
    ],
)
def test_invalid_rankings_name_the_field_or_text(
    client: TestClient, fields: Json, pointer: str, message: str
) -> None:
    body = {"query": "cat", "documents": ["a cat", "a dog"], "chunking": {}, **fields}
    problem = refused(client, "/rerank", **body)
    assert (problem["status"], problem["pointer"]) == (422, pointer)
    assert message in problem["detail"]


@pytest.mark.slow
def test_query_that_leaves_no_room_for_a_chunk_is_refused(rerank_client: TestClient) -> None:
    body = {"documents": ["w5 w6"], "chunking": {}}
    problem = refused(rerank_client, "/score", queries="w7 " * 21, **body)
    assert (problem["code"], problem["pointer"]) == ("too_long", "/chunking")
    assert "the query leave no room" in problem["detail"]
    assert ask(rerank_client, "/score", queries="w7 " * 20, **body)["best_chunks"]
    body["chunking"] = {"size": 2}
    problem = refused(rerank_client, "/score", queries="w7 " * 20, **body)
    assert "at most 1 tokens" in problem["detail"]
