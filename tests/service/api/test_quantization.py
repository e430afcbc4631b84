"""`output_dtype` of POST /encode, and the calibration in /info."""

import base64
import json
from typing import Any

import numpy as np
import pytest
from sentence_transformers.util.quantization import quantize_embeddings
from starlette.testclient import TestClient

from models.artifact import Artifact
from models.quantization import DTYPES, OutputDtype, read_calibration
from tests.service.api.posting import ask, refused, wrong_model
from tests.serving import ready_model

TEXTS = ["The cat sat on the mat.", "A feline rested on the rug.", "It rained."]
QUANTIZED = [dtype for dtype in DTYPES if dtype != "float32"]
OCTETS = {"Accept": "application/octet-stream"}


def encode(client: TestClient, **fields: Any) -> Any:  # noqa: ANN401 - JSON
    return ask(client, inputs=TEXTS, **fields)


def expected_codes(client: TestClient, dtype: OutputDtype, **fields: int) -> np.ndarray[Any, Any]:
    vectors = np.array(encode(client, **fields)["embeddings"], np.float32)
    calibration = ready_model(client).calibration
    assert calibration is not None
    ranges = calibration.ranges[vectors.shape[1]]
    return np.asarray(quantize_embeddings(vectors, dtype, ranges=ranges))


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("fields", [{}, {"dimensions": 8}], ids=str)
def test_json_has_the_integers_of_sentence_transformers(
    calibrated_client: TestClient, dtype: OutputDtype, fields: dict[str, int]
) -> None:
    expected = expected_codes(calibrated_client, dtype, **fields)
    body = encode(calibrated_client, output_dtype=dtype, **fields)
    assert body["embeddings"] == expected.tolist()
    assert body["dimensions"] == fields.get("dimensions", 32)
    assert "." not in json.dumps(body["embeddings"])  # integers


@pytest.mark.parametrize("dtype", DTYPES)
def test_base64_has_the_bytes_of_the_dtype(
    calibrated_client: TestClient, dtype: OutputDtype
) -> None:
    expected = expected_codes(calibrated_client, dtype)
    rows = encode(calibrated_client, output_dtype=dtype, encoding="base64")["embeddings"]
    actual = [np.frombuffer(base64.b64decode(row), expected.dtype) for row in rows]
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_octet_stream_has_the_bytes_with_their_shape_and_dtype(
    calibrated_client: TestClient, dtype: OutputDtype
) -> None:
    expected = expected_codes(calibrated_client, dtype)
    body = {"inputs": TEXTS, "output_dtype": dtype}
    response = calibrated_client.post("/encode", json=body, headers=OCTETS)
    shape = tuple(map(int, response.headers["X-Shape"].split(",")))
    actual = np.frombuffer(response.content, response.headers["X-Dtype"]).reshape(shape)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


def test_list_of_outputs_quantizes_pooled_vectors_alone(calibrated_client: TestClient) -> None:
    body = encode(calibrated_client, output=["tokens", "pooled"], output_dtype="ubinary")
    expected = expected_codes(calibrated_client, "ubinary")
    assert body["outputs"]["pooled"]["embeddings"] == expected.tolist()
    tokens = encode(calibrated_client, output="tokens")["embeddings"]
    assert body["outputs"]["tokens"]["embeddings"] == tokens


@pytest.mark.parametrize(
    ("fields", "code", "detail"),
    [
        ({"output": "tokens"}, "invalid", 'output_dtype does not apply to the output "tokens"'),
        ({"dimensions": 16}, "not_calibrated", "calibrated: 8, 12, 32"),
        ({"normalize": False}, "not_calibrated", "vectors that are of unit length"),
        ({"output_dtype": "ubinary", "dimensions": 12}, "dimensions", "multiple of 8, and is 12"),
        ({"output_dtype": "float16"}, "invalid", "Input should be 'float32', 'int8'"),
    ],
)
def test_vectors_that_cannot_be_quantized_are_refused(
    calibrated_client: TestClient, fields: dict[str, Any], code: str, detail: str
) -> None:
    body = {"inputs": TEXTS, "output_dtype": "int8", **fields}
    problem = refused(calibrated_client, "/encode", **body)
    assert (problem["status"], problem["code"]) == (422, code)
    assert problem["pointer"] == "/output_dtype"
    assert detail in problem["detail"]


def test_uncalibrated_model_refuses_int8_with_the_remedy(client: TestClient) -> None:
    problem = refused(client, "/encode", inputs=TEXTS, output_dtype="int8")
    assert (problem["status"], problem["code"]) == (422, "not_calibrated")
    assert "vitrine-export --calibrate" in problem["detail"]
    assert len(encode(client, output_dtype="binary")["embeddings"][0]) == 4


def test_model_with_other_outputs_refuses_a_dtype(rerank_client: TestClient) -> None:
    wrong_model(rerank_client, "/encode", inputs=TEXTS, output_dtype="binary")


def test_info_has_the_calibration_or_none(
    calibrated_client: TestClient, calibrated_artifact: Artifact, client: TestClient
) -> None:
    calibration = read_calibration(calibrated_artifact)
    assert calibration is not None
    assert calibrated_client.get("/info").json()["calibration"] == {
        "widths": [8, 12, 32],
        "texts": 600,
        "evaluated_texts": 600,
        "recall_at_10": calibration.recall,
    }
    assert client.get("/info").json()["calibration"] is None


def test_ranges_dequantize_the_codes(calibrated_client: TestClient) -> None:
    name = calibrated_client.get("/info").json()["model"]
    body = calibrated_client.get(f"/models/{name}/calibration").json()
    assert (body["model"], list(body["ranges"])) == (name, ["8", "12", "32"])
    low, high = np.array(body["ranges"]["32"])
    codes = np.array(encode(calibrated_client, output_dtype="int8")["embeddings"])
    vectors = np.array(encode(calibrated_client)["embeddings"])
    restored = low + (codes + 128) * (high - low) / 255
    is_inside = (low <= vectors) & (vectors <= high)
    assert is_inside.mean() > 0.9
    assert (np.abs(restored - vectors) <= (high - low) / 254)[is_inside].all()


def test_ranges_of_an_uncalibrated_model_are_an_error(client: TestClient) -> None:
    name = client.get("/info").json()["model"]
    problem = client.get(f"/models/{name}/calibration")
    assert (problem.status_code, problem.json()["code"]) == (422, "not_calibrated")
    assert client.get("/models/another/calibration").status_code == 404


def test_vectors_of_chunks_have_the_requested_dtype(calibrated_client: TestClient) -> None:
    body = {"inputs": ["One cat. Two cats. Three cats."], "chunking": {"size": 4}}
    floats = ask(calibrated_client, **body)["embeddings"]
    codes = ask(calibrated_client, **body, output_dtype="ubinary")
    expected = [np.packbits(np.array(own) > 0, axis=1).tolist() for own in floats]
    assert codes["embeddings"] == expected
