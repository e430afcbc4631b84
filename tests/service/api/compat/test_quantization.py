"""Quantised vectors on /v1/embeddings, in the spellings of Voyage, Mixedbread and Jina."""

import base64
import re
from typing import Any

import numpy as np
import pytest
from sentence_transformers.util.quantization import quantize_embeddings
from starlette.testclient import TestClient

from models.quantization import OutputDtype
from tests.service.api.posting import ask
from tests.serving import ready_model

TEXTS = ["The cat sat on the mat.", "A feline rested on the rug."]


def embed(client: TestClient, **fields: Any) -> list[Any]:  # noqa: ANN401 - JSON
    name = ready_model(client).name
    data = ask(client, "/v1/embeddings", model=name, input=TEXTS, **fields)["data"]
    return [item["embedding"] for item in data]


def expected_codes(client: TestClient, dtype: OutputDtype, **fields: int) -> np.ndarray[Any, Any]:
    vectors = np.array(embed(client, **fields), np.float32)
    calibration = ready_model(client).calibration
    assert calibration is not None
    ranges = calibration.ranges[vectors.shape[1]]
    return np.asarray(quantize_embeddings(vectors, dtype, ranges=ranges))


@pytest.mark.parametrize("field", ["output_dtype", "encoding_format", "embedding_type"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "binary", "ubinary"])
def test_each_spelling_selects_the_dtype(
    calibrated_client: TestClient, field: str, dtype: OutputDtype
) -> None:
    expected = expected_codes(calibrated_client, dtype, dimensions=8)
    assert embed(calibrated_client, dimensions=8, **{field: dtype}) == expected.tolist()


@pytest.mark.parametrize("field", ["encoding_format", "embedding_type"])
@pytest.mark.parametrize("dtype", ["int8", "ubinary"])
def test_base64_has_the_bytes_of_the_dtype(
    calibrated_client: TestClient, field: str, dtype: OutputDtype
) -> None:
    expected = expected_codes(calibrated_client, dtype)
    rows = embed(calibrated_client, output_dtype=dtype, **{field: "base64"})
    actual = [np.frombuffer(base64.b64decode(row), expected.dtype) for row in rows]
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("field", ["output_dtype", "encoding_format", "embedding_type"])
def test_float_is_the_default(calibrated_client: TestClient, field: str) -> None:
    assert embed(calibrated_client, **{field: "float"}) == embed(calibrated_client)


def test_different_dtypes_are_refused(calibrated_client: TestClient) -> None:
    body = {"model": ready_model(calibrated_client).name, "input": TEXTS}
    fields = {"output_dtype": "int8", "encoding_format": "ubinary"}
    error = calibrated_client.post("/v1/embeddings", json={**body, **fields})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "output_dtype")
    fields = {"encoding_format": "ubinary", "embedding_type": "int8"}
    error = calibrated_client.post("/v1/embeddings", json={**body, **fields})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "encoding_format")
    assert embed(calibrated_client, output_dtype="binary", encoding_format="binary")


@pytest.mark.parametrize("field", ["output_dtype", "encoding_format", "embedding_type"])
def test_missing_ranges_are_an_error_in_openais_format(
    calibrated_client: TestClient, field: str
) -> None:
    body = {"model": ready_model(calibrated_client).name, "input": TEXTS, "dimensions": 16}
    response = calibrated_client.post("/v1/embeddings", json={**body, field: "int8"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "not_calibrated", field)
    assert not re.search("truncate_dim|normalize", error["message"])  # fields of /encode alone
