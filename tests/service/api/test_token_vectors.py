"""`"output": "tokens"`: token vectors, ids and offsets."""

import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from models.artifact import Artifact
from models.engines import cosines
from tests.sentences import mixed_texts
from tests.service.api.posting import ask, refused
from tests.serving import ready_model, served

TEXTS = mixed_texts()[:40]


def tokens_of(client: TestClient, inputs: object, **fields: object) -> Any:  # noqa: ANN401 - JSON
    return ask(client, inputs=inputs, output="tokens", **fields)


def test_token_vectors_match_sentence_transformers(
    minilm_client: TestClient, minilm_folder: Path
) -> None:
    oracle = SentenceTransformer(str(minilm_folder), device="cpu", local_files_only=True)
    body = tokens_of(minilm_client, TEXTS)
    assert body["dimensions"] == 384
    for text, rows, length in zip(TEXTS, body["embeddings"], body["tokens"], strict=True):
        expected = oracle.encode([text], output_value="token_embeddings")[0].numpy()
        actual = np.asarray(rows)
        assert actual.shape == expected.shape == (length, 384)
        assert cosines(actual, expected).min() >= 0.999999
        assert np.abs(actual - expected).max() < 1e-4


def test_ids_and_offsets_match_transformers(client: TestClient, minilm_folder: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(str(minilm_folder))
    expected = oracle(TEXTS, truncation=True, max_length=256, return_offsets_mapping=True)
    body = tokens_of(client, TEXTS)
    assert body["ids"] == expected["input_ids"]
    assert body["truncated"] == [len(ids) > 256 for ids in oracle(TEXTS)["input_ids"]]
    for offsets, mapping in zip(body["offsets"], expected["offset_mapping"], strict=True):
        # transformers writes (0, 0) for special tokens.
        assert [tuple(span or (0, 0)) for span in offsets] == mapping
        assert offsets[0] is offsets[-1] is None


def test_token_ids_have_token_vectors_and_no_offsets(client: TestClient) -> None:
    of_text = tokens_of(client, "The cat sat on the mat.")
    of_ids = tokens_of(client, of_text["ids"])
    assert of_ids["offsets"] == [None]
    np.testing.assert_allclose(of_ids["embeddings"], of_text["embeddings"], atol=1e-6)


def test_token_vectors_can_be_normalized_and_encoded_as_base64(client: TestClient) -> None:
    texts = ["a cat", "the dog and the bird"]
    plain, unit = tokens_of(client, texts), tokens_of(client, texts, normalize=True)
    packed = tokens_of(client, texts, encoding="base64")
    for numbers, normed, encoded, length in zip(
        plain["embeddings"], unit["embeddings"], packed["embeddings"], plain["tokens"], strict=True
    ):
        norms = np.linalg.norm(numbers, axis=1, keepdims=True)
        assert np.abs(norms - 1).min() > 0.1
        np.testing.assert_allclose(normed, numbers / norms, atol=1e-6)
        raw = np.frombuffer(base64.b64decode(encoded), "<f4").reshape(length, -1)
        np.testing.assert_allclose(raw, numbers, atol=1e-6)


def test_concurrent_requests_for_pooled_and_token_vectors_match_single_ones(
    client: TestClient,
) -> None:
    pooled = client.post("/encode", json={"inputs": TEXTS}).json()["embeddings"]
    tokens = tokens_of(client, TEXTS)["embeddings"]
    with ThreadPoolExecutor(8) as clients:
        requests = [
            clients.submit(
                client.post,
                "/encode",
                json={"inputs": TEXTS, "output": ("pooled", "tokens")[i % 2]},
            )
            for i in range(8)
        ]
        for i, request in enumerate(requests):
            embeddings = request.result().json()["embeddings"]
            for actual, expected in zip(embeddings, (pooled, tokens)[i % 2], strict=True):
                np.testing.assert_allclose(actual, expected, atol=2e-6 if i % 2 == 0 else 1e-4)


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"dimensions": 4}, "/dimensions"),
        ({"inputs": ["a", ""]}, "/inputs/1"),
        ({"output": "words"}, "/output"),
    ],
)
def test_fields_incompatible_with_token_vectors_return_422(
    client: TestClient, fields: dict[str, object], pointer: str
) -> None:
    problem = refused(client, "/encode", **{"inputs": "a", "output": "tokens", **fields})
    assert (problem["status"], problem["pointer"]) == (422, pointer)


def test_token_outputs_are_tokenized_once(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    encodings = ready_model(client).tokenizer.encodings
    calls: list[bool] = []
    encode = encodings.encode_truncated

    def counted(*arguments: Any, with_offsets: bool, **options: Any) -> object:  # noqa: ANN401 - passed on
        calls.append(with_offsets)
        return encode(*arguments, with_offsets=with_offsets, **options)

    monkeypatch.setattr(encodings, "encode_truncated", counted)
    assert tokens_of(client, ["a text", "another"])["offsets"][0] is not None
    assert calls == [True]
    calls.clear()
    assert client.post("/tei/embed_all", json={"inputs": ["naïve"]}).status_code == 200
    assert calls == [False]  # without offsets


def test_token_vectors_over_the_limit_return_422(small_artifact: Artifact) -> None:
    with served(small_artifact.path, limits={"max_token_vectors": 10}) as client:
        assert len(tokens_of(client, ["a b c", "d e f"])["embeddings"]) == 2
        problem = refused(client, "/encode", inputs=["a b c", "d e f g"], output="tokens")
        assert (problem["status"], problem["code"]) == (422, "too_many_tokens")
        assert "have 11 tokens; the limit for results per token is 10" in problem["detail"]
        assert client.post("/encode", json={"inputs": ["a b c", "d e f g"]}).status_code == 200
