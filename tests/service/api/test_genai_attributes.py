"""Attributes of the GenAI conventions on the spans of embedding requests."""

from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.common.v1.common_pb2 import ArrayValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as conventions
from starlette.testclient import TestClient

from models.artifact import Artifact
from service.api.embedding_attributes import embedding_attributes
from service.api.schemas import EncodeRequest
from service.inference.results.vectors import (
    MultiEmbeddings,
    SparseEmbeddings,
    SparseVector,
    Stages,
)
from service.inference.tokenizing.rows import Row
from service.request_trace import RequestTrace
from tests.receiver import Receiver, attributes, receiving
from tests.serving import served

WIDTH = 32


@pytest.fixture(scope="module")
def opted_in(small_artifact: Artifact) -> Iterator[tuple[TestClient, Receiver]]:
    """A client of an application whose spans have the attributes of the GenAI conventions."""
    cats = {"name": "cats", "path": small_artifact.path, "aliases": ["text-embedding-3-small"]}
    with receiving() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
        patch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "http, gen_ai_latest_experimental")
        with served(models={"served": [cats], "default": "cats"}) as client:
            patch.undo()  # for applications of other tests
            yield client, receiver


def genai_attributes(span: Span) -> dict[str, object]:
    """Return the attributes that are not those of HTTP; arrays as lists."""
    found = {name: value for name, value in attributes(span).items() if name.startswith("gen_ai.")}
    formats = found.get(conventions.GEN_AI_REQUEST_ENCODING_FORMATS)
    if formats is not None:
        assert isinstance(formats, ArrayValue)
        found[conventions.GEN_AI_REQUEST_ENCODING_FORMATS] = [
            value.string_value for value in formats.values
        ]
    return found


TEXTS = ["a cat", "a dog and a cat", "a"]


@pytest.mark.parametrize(
    ("path", "body", "model", "formats", "width", "tokens"),
    [
        ("/encode", {"inputs": TEXTS}, None, None, WIDTH, "tokens"),
        (
            "/encode",
            {"inputs": TEXTS, "model": "cats", "dimensions": 8, "output_dtype": "ubinary"},
            *("cats", ["ubinary"], 8, "tokens"),
        ),
        (
            "/encode",
            {"inputs": TEXTS, "output": "tokens", "encoding": "base64"},
            *(None, ["base64"], WIDTH, "tokens"),
        ),
        ("/encode", {"inputs": TEXTS, "output": ["tokens", "pooled"]}, None, None, WIDTH, "tokens"),
        (
            "/encode",
            {"inputs": TEXTS, "output": ["tokens", "pooled"], "dimensions": 8},
            *(None, None, None, "tokens"),
        ),
        ("/encode", {"inputs": TEXTS, "chunking": {"size": 5}}, None, None, WIDTH, "tokens"),
        (
            "/v1/embeddings",
            {"input": TEXTS, "model": "text-embedding-3-small", "encoding_format": "base64"},
            *("text-embedding-3-small", ["base64"], WIDTH, "usage/total_tokens"),
        ),
        (
            "/v2/embed",
            {"texts": TEXTS, "model": "cats", "embedding_types": ["float", "ubinary"]},
            *("cats", ["float", "ubinary"], WIDTH, "meta/billed_units/input_tokens"),
        ),
        ("/tei/embed", {"inputs": TEXTS}, None, None, WIDTH, "x-compute-tokens"),
        ("/tei/cats/embed_all", {"inputs": TEXTS}, "cats", None, WIDTH, "x-compute-tokens"),
    ],
)
def test_embedding_request_has_the_attributes_of_the_genai_conventions(
    opted_in: tuple[TestClient, Receiver],
    path: str,
    body: dict[str, object],
    model: str | None,
    formats: list[str] | None,
    width: int | None,
    tokens: str,
) -> None:
    client, receiver = opted_in
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    count: Any = response.headers.get(tokens)
    if count is None:  # a field of the body
        count = reduce(lambda value, name: value[name], tokens.split("/"), response.json())
    span = receiver.span_of(response)
    assert attributes(span)["http.response.status_code"] == 200
    expected = {
        conventions.GEN_AI_OPERATION_NAME: "embeddings",
        conventions.GEN_AI_PROVIDER_NAME: "vitrine",
        conventions.GEN_AI_REQUEST_MODEL: model,
        conventions.GEN_AI_REQUEST_ENCODING_FORMATS: formats,
        conventions.GEN_AI_RESPONSE_MODEL: "cats",
        conventions.GEN_AI_USAGE_INPUT_TOKENS: sum(count)
        if isinstance(count, list)
        else int(count),
        conventions.GEN_AI_EMBEDDINGS_DIMENSION_COUNT: width,
    }
    present = {name: value for name, value in expected.items() if value is not None}
    assert genai_attributes(span) == present


ROWS = [Row([1, 2, 3], False, 0)]
SPARSE = SparseEmbeddings(
    [SparseVector(np.array([7]), np.ones(1, np.float32))], 512, ROWS, Stages({})
)
MULTI = MultiEmbeddings([np.zeros((2, 16), np.float32)], [np.arange(2)], None, ROWS, Stages({}))


@pytest.mark.parametrize(("result", "width"), [(SPARSE, 512), (MULTI, 16)])
def test_genai_attributes_have_the_width_of_sparse_and_multi_vectors(
    result: object, width: int
) -> None:
    trace = RequestTrace({}, body=EncodeRequest(inputs="a"), model=(None, "cats"), result=result)
    actual = embedding_attributes(trace)
    assert actual[conventions.GEN_AI_EMBEDDINGS_DIMENSION_COUNT] == width
    assert actual[conventions.GEN_AI_USAGE_INPUT_TOKENS] == 3


def test_failed_embedding_request_has_the_attributes_known_before_the_failure(
    opted_in: tuple[TestClient, Receiver],
) -> None:
    client, receiver = opted_in

    def attributes_of(**body: object) -> dict[str, object]:
        response = client.post("/encode", json={"model": "cats", **body})
        assert response.is_client_error
        return genai_attributes(receiver.span_of(response))

    known = {"gen_ai.operation.name": "embeddings", "gen_ai.provider.name": "vitrine"}
    assert attributes_of(inputs="") == {**known, "gen_ai.request.model": "cats"}
    assert attributes_of(inputs="a", model="canary") == known  # clients choose unknown names
    assert attributes_of(inputs={}) == {}


def test_other_requests_have_no_attributes_of_the_genai_conventions(
    opted_in: tuple[TestClient, Receiver],
) -> None:
    client, receiver = opted_in
    score = client.post("/score", json={"queries": "a cat", "documents": ["a dog"]})
    assert score.status_code == 200
    for response in (score, client.get("/info")):
        assert genai_attributes(receiver.span_of(response)) == {}
