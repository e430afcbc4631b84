"""Cohere's embed routes; test_clients.py has Cohere's own client."""

import base64
from typing import Any

import numpy as np
import pytest
from sentence_transformers.util.quantization import quantize_embeddings
from starlette.testclient import TestClient

from tests.service.api.posting import ask
from tests.serving import ready_model

PATHS = ["/v1/embed", "/v2/embed"]
TEXTS = ["The cat sat on the mat.", "A feline rested on the rug."]
DTYPES = ["int8", "uint8", "binary", "ubinary"]


def embed(client: TestClient, path: str, **fields: Any) -> Any:  # noqa: ANN401 - JSON
    return ask(client, path, **{"texts": TEXTS, **fields})


def vectors_of(client: TestClient, **fields: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401 - JSON
    return np.array(ask(client, inputs=TEXTS, **fields)["embeddings"], np.float32)


@pytest.mark.parametrize("path", PATHS)
def test_one_request_returns_vectors_of_all_types(calibrated_client: TestClient, path: str) -> None:
    types = ["float", *DTYPES, "base64"]
    body = embed(calibrated_client, path, embedding_types=types, output_dimension=8)
    vectors = vectors_of(calibrated_client, dimensions=8)
    calibration = ready_model(calibrated_client).calibration
    assert calibration is not None
    assert body["response_type"] == "embeddings_by_type"
    assert list(body["embeddings"]) == types
    np.testing.assert_allclose(body["embeddings"]["float"], vectors, atol=1e-6)
    for dtype in DTYPES:
        expected = quantize_embeddings(vectors, dtype, ranges=calibration.ranges[8])
        assert body["embeddings"][dtype] == expected.tolist()
    rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in body["embeddings"]["base64"]]
    np.testing.assert_allclose(rows, vectors, atol=1e-6)
    assert body["texts"] == TEXTS
    assert body["meta"] == {
        "api_version": {"version": path[2]},
        "billed_units": {"input_tokens": 19},
    }


def test_without_types_version_1_has_a_list_and_version_2_floats_by_type(
    calibrated_client: TestClient,
) -> None:
    vectors = vectors_of(calibrated_client)
    first, second = (embed(calibrated_client, path) for path in PATHS)
    assert (first["response_type"], second["response_type"]) == (
        "embeddings_floats",
        "embeddings_by_type",
    )
    np.testing.assert_allclose(first["embeddings"], vectors, atol=1e-6)
    np.testing.assert_allclose(second["embeddings"]["float"], vectors, atol=1e-6)


@pytest.mark.parametrize(
    ("input_type", "prompt"),
    [
        ("search_query", "query"),
        ("search_document", "document"),
        ("clustering", None),  # the model has no such prompt
        (None, None),
    ],
)
def test_input_type_selects_the_prompt(
    calibrated_client: TestClient, input_type: str | None, prompt: str | None
) -> None:
    body = embed(calibrated_client, "/v2/embed", input_type=input_type)
    expected = vectors_of(calibrated_client, prompt_name=prompt)
    np.testing.assert_allclose(body["embeddings"]["float"], expected, atol=1e-6)


@pytest.mark.parametrize(("truncate", "kept"), [("START", -254), ("END", 254), (None, 254)])
def test_truncate_selects_the_side_that_loses_tokens(
    calibrated_client: TestClient, truncate: str | None, kept: int
) -> None:
    words = ["cat"] * 250 + ["dog"] * 250
    part = words[kept:] if kept < 0 else words[:kept]
    long = {"texts": [" ".join(words)], "truncate": truncate}
    body = embed(calibrated_client, "/v2/embed", **long)
    expected = embed(calibrated_client, "/v2/embed", texts=[" ".join(part)])
    actual = body["embeddings"]["float"]
    np.testing.assert_allclose(actual, expected["embeddings"]["float"], atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"texts": ["a", ""]}, 422, "/texts/1: the text is empty"),
        ({"texts": ["cat " * 300], "truncate": "NONE"}, 422, "/texts/0: "),
        ({"output_dimension": 33}, 422, "/output_dimension: dimensions must be from 1 to 32"),
        (
            {"embedding_types": ["float", "int8"], "output_dimension": 16},
            422,
            "/embedding_types: int8 has no ranges for 16 normalised dimensions",
        ),
        ({"images": ["data:"]}, 422, "/images: "),
        ({"space": "v1"}, 422, "/space: "),
        ({"inputs": [{"content": []}], "texts": None}, 422, "/inputs: "),
        ({"model": "embed-v4.0"}, 404, "/model: unknown model"),
    ],
)
def test_errors_have_coheres_format_and_names(
    calibrated_client: TestClient, path: str, fields: dict[str, Any], status: int, message: str
) -> None:
    response = calibrated_client.post(path, json={"texts": TEXTS, **fields})
    assert response.status_code == status
    assert response.json()["message"].startswith(message)
