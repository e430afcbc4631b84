import base64
import random
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from starlette.testclient import TestClient

from models.artifact import Artifact
from models.engines import ENGINES, cosines
from models.export.exporter import export
from models.export.sources import resolve
from models.identity import identity_of
from tests.models.checkpoints import save_checkpoint, save_tokenizer, write_json, write_modules
from tests.sentences import mixed_texts
from tests.service.api.posting import ask, post, refused, stages
from tests.serving import served, values_of

Vectors = NDArray[np.float32]
TEXTS = mixed_texts()
CAT = "The cat sat on the mat."


def vectors(client: TestClient, inputs: object, **fields: object) -> Vectors:
    return np.asarray(ask(client, inputs=inputs, **fields)["embeddings"], np.float32)


@pytest.fixture(scope="module")
def oracle(minilm_folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(minilm_folder), device="cpu", local_files_only=True)


@pytest.fixture(scope="module")
def expected(oracle: SentenceTransformer) -> Vectors:
    return np.concatenate([oracle.encode([text]) for text in TEXTS])


@pytest.fixture(scope="module")
def response(minilm_client: TestClient) -> Any:  # noqa: ANN401 - JSON
    """The response to all texts in one request."""
    return ask(minilm_client, inputs=TEXTS)


def test_mixed_texts_match_sentence_transformers_in_one_request(
    response: dict[str, Any], expected: Vectors
) -> None:
    assert cosines(np.asarray(response["embeddings"]), expected).min() >= 0.999999


def test_mixed_texts_match_sentence_transformers_one_by_one(
    minilm_client: TestClient, response: dict[str, Any], expected: Vectors
) -> None:
    alone = np.concatenate([vectors(minilm_client, text) for text in TEXTS])
    assert cosines(alone, expected).min() >= 0.999999
    assert np.abs(np.asarray(response["embeddings"]) - alone).max() <= 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_mixed_texts_match_sentence_transformers_in_any_order(
    minilm_client: TestClient, expected: Vectors, seed: int
) -> None:
    order = list(range(len(TEXTS)))
    random.Random(seed).shuffle(order)  # noqa: S311
    actual = vectors(minilm_client, [TEXTS[i] for i in order])
    assert cosines(actual, expected[order]).min() >= 0.999999


def test_tokens_and_truncation_are_reported(
    response: dict[str, Any], oracle: SentenceTransformer
) -> None:
    full = [len(ids) for ids in oracle.tokenizer(TEXTS, truncation=False)["input_ids"]]
    assert response["tokens"] == [min(length, 256) for length in full]
    assert response["truncated"] == [length > 256 for length in full]
    assert any(response["truncated"])
    assert not all(response["truncated"])


def test_single_text_returns_a_list_of_one_vector(minilm_client: TestClient) -> None:
    body = ask(minilm_client, inputs=CAT)
    assert body["model"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert body["dimensions"] == 384
    assert (len(body["embeddings"]), body["tokens"], body["truncated"]) == (1, [9], [False])


def test_token_ids_and_their_text_have_equal_vectors(
    client: TestClient, oracle: SentenceTransformer
) -> None:
    ids = oracle.tokenizer(CAT)["input_ids"]
    assert np.abs(vectors(client, [ids]) - vectors(client, CAT)).max() <= 1e-6


def test_long_token_ids_are_truncated_or_refused(client: TestClient) -> None:
    assert ask(client, inputs=[[101] * 300])["truncated"] == [True]
    problem = refused(client, "/encode", inputs=[[101], [101] * 300], on_overflow="error")
    assert (problem["status"], problem["code"], problem["index"]) == (422, "too_long", 1)


def test_on_overflow_error_refuses_long_texts(client: TestClient) -> None:
    problem = refused(client, "/encode", inputs=[CAT, "word " * 600], on_overflow="error")
    assert (problem["status"], problem["code"], problem["index"]) == (422, "too_long", 1)
    assert ask(client, inputs=[CAT, "word " * 200], on_overflow="error")["truncated"] == [False] * 2


def test_vectors_have_unit_length_unless_normalize_is_false(client: TestClient) -> None:
    unit, own = vectors(client, CAT), vectors(client, CAT, normalize=False)
    assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-6)
    assert np.linalg.norm(own) != pytest.approx(1, abs=1e-2)
    np.testing.assert_allclose(own / np.linalg.norm(own), unit, rtol=0, atol=1e-6)


def test_vectors_are_truncated_before_they_are_normalized(minilm_client: TestClient) -> None:
    own = vectors(minilm_client, CAT, normalize=False)[:, :64]
    cut = vectors(minilm_client, CAT, dimensions=64)
    np.testing.assert_allclose(cut, own / np.linalg.norm(own), rtol=0, atol=1e-6)
    assert ask(minilm_client, inputs=CAT, dimensions=64)["dimensions"] == 64


def test_json_base64_and_octet_stream_have_equal_vectors(client: TestClient) -> None:
    texts = TEXTS[:5]
    expected = vectors(client, texts)
    encoded = ask(client, inputs=texts, encoding="base64")["embeddings"]
    decoded = [np.frombuffer(base64.b64decode(row), "<f4") for row in encoded]
    response = client.post(
        "/encode", json={"inputs": texts}, headers={"Accept": "application/octet-stream"}
    )
    shape = tuple(map(int, response.headers["X-Shape"].split(",")))
    octets = np.frombuffer(response.content, "<f4").reshape(shape)
    assert response.headers["content-type"] == "application/octet-stream"
    assert np.array_equal(np.stack(decoded), expected)
    assert np.array_equal(octets, expected)


@pytest.mark.parametrize(
    ("accept", "octets"),
    [
        ("application/octet-stream", True),
        ("application/octet-stream;q=0.1, */*", False),
        ("application/json;q=0, */*", True),
        ("text/html", False),
    ],
)
def test_accept_header_selects_octet_stream_or_json(
    client: TestClient, accept: str, octets: bool
) -> None:
    response = client.post("/encode", json={"inputs": CAT}, headers={"Accept": accept})
    kind = "application/octet-stream" if octets else "application/json"
    assert response.headers["content-type"] == kind
    assert response.headers["Vary"] == "Accept"


def test_response_headers_have_stage_timings_and_the_engine(client: TestClient) -> None:
    response = post(client, inputs=CAT)
    durations = stages(response)
    assert list(durations) == ["tokenize", "queue", "infer", "serialize"]
    assert durations["infer"] > 0
    assert response.headers["X-Engine"] == "onnxruntime; precision=float32"


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [
        ("abc-123.X_y", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("a\tb", False),
        (None, False),
    ],
)
def test_valid_request_id_is_kept_and_any_other_replaced(
    client: TestClient, value: str | None, is_valid: bool
) -> None:
    headers = {} if value is None else {"X-Request-Id": value}
    actual = client.get("/healthz", headers=headers).headers["X-Request-Id"]
    assert (actual == value) == is_valid
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", actual)


def prompted(folder: Path, *, include_prompt: bool) -> SentenceTransformer:
    """A small model with prompts, saved as sentence-transformers does, and its artifact `out`."""
    save_checkpoint(folder / "source", "xlm-roberta")
    save_tokenizer(folder / "source")
    write_modules(folder / "source", ("Transformer", ""), ("Pooling", "1_Pooling"))
    write_json(
        folder / "source" / "1_Pooling" / "config.json",
        {"word_embedding_dimension": 32, "include_prompt": include_prompt},
    )
    write_json(
        folder / "source" / "config_sentence_transformers.json",
        {"prompts": {"query": "w8 w9 ", "passage": "w10 "}, "default_prompt_name": "passage"},
    )
    export(resolve(str(folder / "source")), folder / "out", copy_source=False)
    return SentenceTransformer(str(folder / "source"), device="cpu", local_files_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_match_sentence_transformers(tmp_path: Path, include_prompt: bool) -> None:
    oracle = prompted(tmp_path, include_prompt=include_prompt)
    texts = ["w5 w6 w7", "w11", "w5 " * 40, " ", "\t\n"]
    close = partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    with served(tmp_path / "out") as client:
        close(vectors(client, texts), oracle.encode(texts))  # the default prompt
        query = vectors(client, texts, prompt_name="query")
        close(query, oracle.encode(texts, prompt_name="query"))
        assert ask(client, inputs="w5", prompt_name="query")["tokens"] == [5]
        empty = vectors(client, texts, prompt_name="document")  # an empty prompt
        close(empty, oracle.encode(texts, prompt_name="document"))

        problem = refused(client, "/encode", inputs="w5", prompt_name="nope")
        assert problem["detail"].endswith("the model's prompts: document, passage, query")
        problem = refused(client, "/encode", inputs=[[0, 5, 2]], prompt_name="query")
        assert (problem["status"], problem["pointer"]) == (422, "/prompt_name")


def test_info_describes_the_served_model(minilm_client: TestClient, artifact: Artifact) -> None:
    info = minilm_client.get("/info").json()
    assert info["model"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert info["weights_sha256"]["model.safetensors"].startswith("53aa5117")
    assert (info["engine"], info["precision"], info["threads"]) == ("onnxruntime", "float32", 2)
    assert info["identity"] == identity_of(artifact, "onnxruntime", "float32")
    assert info["self_check"]["pooled"]["cosine"] > 1 - 1e-6
    assert info["limits"]["max_tokens"] == 256


@pytest.mark.slow  # exports a model and calibrates it
@pytest.mark.skipif(
    ENGINES["openvino"].unusable("int8") is not None, reason="int8 is not usable on this CPU"
)
def test_quality_of_int8_is_in_info_header_and_metrics(int8_artifact: Artifact) -> None:
    quality = int8_artifact.graph("openvino", "int8").quality
    assert quality is not None
    with served(int8_artifact.path, engine={"precision": "int8"}) as client:
        info = client.get("/info").json()
        header = client.post("/encode", json={"inputs": "w5"}).headers["X-Engine"]
        metrics = client.get("/metrics").text
    assert (info["engine"], info["precision"]) == ("openvino", "int8")
    assert info["graph_sha256"] == int8_artifact.graph_sha256("openvino", "int8")
    assert info["quality"]["measures"] == quality.measures
    assert info["quality"]["by_length"] == [asdict(own) for own in quality.by_length]
    assert info["quality"]["float_layers"] == list(quality.float_layers)
    assert header.startswith("openvino; precision=int8; mean_cosine=")
    assert f"; recall_at_10={quality.measures['recall_at_10']:.4f}" in header
    line = f'vitrine_model_quality{{measure="recall_at_10",model="{info["model"]}"}} '
    assert line + str(quality.measures["recall_at_10"]) in metrics


def test_metrics_count_requests_by_route_and_status(client: TestClient) -> None:
    def counted(line: str) -> float:
        return values_of(client.get("/metrics").text).get(line, 0.0)

    succeeded = 'vitrine_requests_total{route="/encode",status="200"}'
    before, tokens = counted(succeeded), counted("vitrine_batch_tokens_sum")
    ask(client, inputs=CAT)
    client.post("/encode", json={"inputs": ""})
    client.get("/no/such/route")
    assert counted(succeeded) == before + 1
    assert counted("vitrine_batch_tokens_sum") == tokens + 9
    assert counted('vitrine_requests_total{route="/encode",status="422"}') >= 1
    assert counted('vitrine_requests_total{route="none",status="404"}') >= 1
    assert "no/such" not in client.get("/metrics").text


def test_examples_of_the_openapi_document_work(minilm_client: TestClient) -> None:
    document = minilm_client.get("/openapi.json").json()
    operation = document["paths"]["/encode"]["post"]
    body = operation["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/EncodeRequest"}
    for example in body["examples"].values():
        assert minilm_client.post("/encode", json=example["value"]).status_code == 200
    (expected,) = document["components"]["schemas"]["EncodeResponse"]["examples"]
    actual = ask(minilm_client, **body["examples"]["texts"]["value"])
    np.testing.assert_allclose(actual.pop("embeddings"), expected.pop("embeddings"), atol=1e-5)
    assert actual == expected


def test_texts_tokenized_in_slices_stay_in_order(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"text number {i} " * (1 + i % 7) for i in range(50)]
    whole = ask(client, inputs=texts)
    monkeypatch.setattr("service.inference.tokenizing.encodings._SLICE_CHARS", 100)
    sliced = ask(client, inputs=texts)
    assert sliced["tokens"] == whole["tokens"]
    assert np.abs(np.subtract(sliced["embeddings"], whole["embeddings"])).max() <= 1e-6


def test_responses_are_compressed_if_enabled_and_accepted(small_artifact: Artifact) -> None:
    with served(small_artifact.path, server={"gzip": True}) as client:
        body = {"inputs": [f"text {number}" for number in range(20)]}

        def post(accept: str, **fields: object) -> Any:  # noqa: ANN401 - httpx2's response
            headers = {"Accept-Encoding": accept}
            return client.post("/encode", json={**body, **fields}, headers=headers)

        plain = post("identity")
        assert "Content-Encoding" not in plain.headers
        assert plain.headers["Vary"] == "Accept, Accept-Encoding"
        for accept in ("gzip", "br;q=1.0, gzip;q=0.5", "*"):
            packed = post(accept)
            assert packed.headers["Content-Encoding"] == "gzip"
            assert int(packed.headers["Content-Length"]) < 0.6 * len(plain.content)
            assert packed.json()["embeddings"] == plain.json()["embeddings"]
        for accept in ("gzip;q=0", "*;q=0", "deflate"):
            assert "Content-Encoding" not in post(accept).headers
        assert "Content-Encoding" not in post("gzip", dimensions=1).headers  # too small to gain


def test_responses_are_not_compressed_by_default(client: TestClient) -> None:
    headers = {"Accept-Encoding": "gzip"}
    response = client.post("/encode", json={"inputs": [CAT] * 8}, headers=headers)
    assert "Content-Encoding" not in response.headers


def test_configured_model_name_is_used_by_all_apis(small_artifact: Artifact) -> None:
    name = "text-embedding-3-small"
    with served(small_artifact.path, model={"name": name}) as client:
        assert client.post("/encode", json={"inputs": CAT}).json()["model"] == name
        tokens = client.post("/encode", json={"inputs": CAT, "output": "tokens"})
        assert tokens.json()["model"] == name
        info = client.get("/info").json()
        assert (info["model"], info["source"]) == (name, small_artifact.manifest.source)
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [name]
        assert client.get("/tei/info").json()["served_model_name"] == name
        body = {"input": CAT, "model": name}
        assert client.post("/v1/embeddings", json=body).json()["model"] == name
        body["model"] = small_artifact.manifest.name
        refused = client.post("/v1/embeddings", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert f'model="{name}"' in client.get("/metrics").text
