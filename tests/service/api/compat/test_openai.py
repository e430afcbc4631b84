"""/v1, asked by OpenAI's own client and by langchain's, which import for seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from pydantic import SecretStr
from starlette.testclient import TestClient

if TYPE_CHECKING:
    import openai

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = ["The cat sat on the mat.", "A feline rested on the rug.", "Stocks fell sharply."]


@pytest.fixture(scope="module")
def peer(url: str, key: str) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(client: TestClient) -> list[list[float]]:
    vectors: list[list[float]] = client.post("/encode", json={"inputs": TEXTS}).json()["embeddings"]
    return vectors


def test_the_openai_client_gets_the_vectors_of_encode(
    peer: openai.OpenAI, expected: list[list[float]]
) -> None:
    answer = peer.embeddings.create(model=MODEL, input=TEXTS)  # as base64, which it decodes
    assert [item.index for item in answer.data] == [0, 1, 2]
    np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=1e-6)
    assert answer.model == MODEL
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 9 + 10 + 6


def test_one_text_and_floats(peer: openai.OpenAI, expected: list[list[float]]) -> None:
    answer = peer.embeddings.create(model=MODEL, input=TEXTS[1], encoding_format="float")
    np.testing.assert_allclose(answer.data[0].embedding, expected[1], atol=1e-6)


def test_fewer_dimensions_have_unit_length_again(
    peer: openai.OpenAI, expected: list[list[float]]
) -> None:
    [item] = peer.embeddings.create(model=MODEL, input=TEXTS[:1], dimensions=8).data
    cut = np.array(expected[0][:8])
    np.testing.assert_allclose(item.embedding, cut / np.linalg.norm(cut), atol=1e-6)


def test_token_ids_alone_and_in_lists(
    peer: openai.OpenAI, client: TestClient, expected: list[list[float]]
) -> None:
    ids = client.post("/encode", json={"inputs": TEXTS, "output": "tokens"}).json()["ids"]
    many = peer.embeddings.create(model=MODEL, input=ids)
    np.testing.assert_allclose([item.embedding for item in many.data], expected, atol=1e-6)
    [alone] = peer.embeddings.create(model=MODEL, input=ids[0]).data
    np.testing.assert_allclose(alone.embedding, expected[0], atol=1e-6)


def test_langchain_gets_them_too(url: str, key: str, expected: list[list[float]]) -> None:
    from langchain_openai import OpenAIEmbeddings

    with httpx.Client() as connections:
        embedder = OpenAIEmbeddings(
            model=MODEL,
            openai_api_base=f"{url}/v1",
            openai_api_key=SecretStr(key),
            check_embedding_ctx_length=False,  # which would send the ids of another tokenizer
            max_retries=0,
            http_client=connections,
        )
        np.testing.assert_allclose(embedder.embed_documents(TEXTS), expected, atol=1e-6)
        np.testing.assert_allclose(embedder.embed_query(TEXTS[2]), expected[2], atol=1e-6)


def test_the_model_is_listed_and_found_by_its_name(peer: openai.OpenAI) -> None:
    import openai

    [listed] = peer.models.list().data
    assert listed.id == MODEL
    assert peer.models.retrieve(MODEL) == listed
    with pytest.raises(openai.NotFoundError, match="unknown model; served model"):
        peer.models.retrieve("text-embedding-3-small")


@pytest.mark.parametrize(
    ("fields", "code", "param", "message"),
    [
        ({"model": "gpt"}, "model_not_found", "model", "unknown model"),
        ({"input": ["a", ""]}, "empty", "input", "input 1: the text is empty"),
        ({"input": []}, "invalid", "input", "input: List should have at least 1 item"),
        ({"input": [[1, 2], "a"]}, "invalid", "input", "input 1: "),
        ({"input": [["a"]]}, "invalid", "input", "input 0: "),
        # A row of ids is one input.
        ({"input": [1, -5]}, "invalid", "input", "input/1: "),
        ({"input": [1e2]}, "invalid", "input", "input 0: Input should be a valid integer"),
        ({"input": [10**6]}, "id_out_of_range", "input", "input 0: "),
        ({"input": ["a"] * 2049}, "too_many_inputs", "input", "2049 inputs"),
        ({"dimensions": 385}, "dimensions", "dimensions", "dimensions must be from 1 to 384"),
        ({"dimensions": 0}, "invalid", "dimensions", "dimensions: Input should be greater than"),
        ({"dimensions": True}, "invalid", "dimensions", "dimensions: Input should be a valid int"),
        ({"encoding_format": "x"}, "invalid", "encoding_format", "encoding_format: Input should"),
        ({"extra_body": {"truncate": 3}}, "unknown_field", None, "unknown field"),
    ],
)
def test_errors_are_those_that_its_client_understands(
    peer: openai.OpenAI,
    fields: dict[str, Any],
    code: str,
    param: str | None,
    message: str,
) -> None:
    import openai

    error = openai.NotFoundError if code == "model_not_found" else openai.BadRequestError
    with pytest.raises(error) as raised:
        peer.embeddings.create(**{"model": MODEL, "input": "a", **fields})
    body = raised.value.body
    assert isinstance(body, dict)
    assert (body["type"], body["code"], body["param"]) == ("invalid_request_error", code, param)
    assert body["message"].startswith(message)
    assert len(json.dumps(body)) < 400


def test_a_wrong_key_is_its_authentication_error(url: str) -> None:
    import openai

    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="not-a-key-of-ours", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as raised,
    ):
        stranger.models.list()
    assert raised.value.code == "invalid_api_key"


def test_what_is_no_route_or_no_json_is_told_in_the_same_shape(client: TestClient) -> None:
    for response in (
        client.get("/v1/nothing"),
        client.get("/v1/embeddings"),
        client.post("/v1/embeddings", content=b"{", headers={"Content-Type": "application/json"}),
        client.post("/v1/embeddings", content=b"a"),
    ):
        assert response.status_code in (404, 405, 400, 415)
        assert set(response.json()) == {"error"}
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_defect_is_told_in_the_same_shape(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a secret of the inside")

    monkeypatch.setattr("service.api.compat.openai._embeddings_json", broken)
    response = client.post("/v1/embeddings", json={"model": MODEL, "input": "a"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text


def test_fields_that_openai_does_not_have(peer: openai.OpenAI, expected: list[list[float]]) -> None:
    import openai

    long = "word " * 600
    cut = peer.embeddings.with_raw_response.create(model=MODEL, input=[long, "a", "b"])
    assert cut.headers["X-Truncated-Inputs"] == "1"
    assert "serialize;dur=" in cut.headers["Server-Timing"]
    with pytest.raises(openai.BadRequestError) as raised:
        peer.embeddings.create(model=MODEL, input=long, extra_body={"on_overflow": "error"})
    assert raised.value.code == "too_long"
    with pytest.raises(openai.BadRequestError) as raised:
        peer.embeddings.create(model=MODEL, input=TEXTS, extra_body={"prompt_name": "none"})
    assert raised.value.code == "unknown_prompt"
    body = {"encoding_format": None}
    answer = peer.embeddings.create(model=MODEL, input=TEXTS, extra_body=body)
    np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=1e-6)
