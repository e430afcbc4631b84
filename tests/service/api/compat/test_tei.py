"""/tei, asked by huggingface_hub's client, and over HTTP where it has no call for a route."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient, TextClassificationOutputElement
from huggingface_hub.errors import HfHubHTTPError
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from transformers import pipeline

from models.artifact import Artifact
from service.api.compat.tei import render_error
from service.api.errors import headers_of
from service.inference.errors import (
    InferenceFailed,
    InvalidInput,
    NotReady,
    Overloaded,
    VitrineError,
)
from tests.service.api.posting import ask
from tests.serving import served

CAT = "The cat sat on the mat."
TEXTS = [CAT, "A feline rested on the rug.", "Größe, 猫 and 🐈!"]


@pytest.fixture(scope="module")
def peer(url: str, key: str) -> Iterator[InferenceClient]:
    with InferenceClient(model=f"{url}/tei", token=key) as client:
        yield client


@pytest.fixture(scope="module")
def expected(client: TestClient) -> list[list[float]]:
    vectors: list[list[float]] = client.post("/encode", json={"inputs": TEXTS}).json()["embeddings"]
    return vectors


def test_the_hub_client_gets_the_vectors_of_encode(
    peer: InferenceClient, expected: list[list[float]]
) -> None:
    np.testing.assert_allclose(peer.feature_extraction(TEXTS), expected, atol=1e-6)
    np.testing.assert_allclose(peer.feature_extraction(CAT), expected[:1], atol=1e-6)
    found = peer.feature_extraction(
        CAT, normalize=False, truncate=True, truncation_direction="left"
    )
    assert np.linalg.norm(found) > 1.1


def test_the_hub_client_compares_sentences(url: str, key: str, expected: list[list[float]]) -> None:
    with InferenceClient(model=f"{url}/tei/similarity", token=key) as client:
        found = client.sentence_similarity(CAT, TEXTS[1:])
    np.testing.assert_allclose(found, np.array(expected[1:]) @ expected[0], atol=1e-6)


def test_text_classification_of_the_hub_client_gives_the_best_label(
    classify_url: str, key: str, classifier: Artifact
) -> None:
    (best,) = pipeline("text-classification", str(classifier.path / "source"))("w5 w6 w7")
    with InferenceClient(model=f"{classify_url}/tei/predict", token=key) as client:
        label = client.text_classification("w5 w6 w7")
        with pytest.raises(HfHubHTTPError, match="the limit is 100000"):
            client.text_classification("w5 " * 40_000)
    assert isinstance(label, TextClassificationOutputElement)
    assert label.label == best["label"]
    assert label.score == pytest.approx(best["score"], rel=1e-4)


@pytest.mark.parametrize("multi_label", [False, True])
def test_zero_shot_classification_of_the_hub_client_equals_the_pipeline(
    entailment_url: str, entailment: Artifact, key: str, multi_label: bool
) -> None:
    labels = ["w5", "w6 w7", "w8"]
    named = {"hypothesis_template": "w9 {}", "multi_label": multi_label}
    oracle = pipeline("zero-shot-classification", str(entailment.path / "source"), device="cpu")
    expected = oracle("w21 w5", labels, **named)
    with InferenceClient(model=f"{entailment_url}/tei/predict", token=key) as client:
        found = client.zero_shot_classification("w21 w5", labels, **named)
        with pytest.raises(HfHubHTTPError, match="each once"):
            client.zero_shot_classification("w21 w5", ["w5", "w5"])
    assert [element.label for element in found] == expected["labels"]
    assert [element.score for element in found] == pytest.approx(expected["scores"], abs=1e-5)


def test_errors_reach_the_hub_client(url: str, peer: InferenceClient) -> None:
    with pytest.raises(HfHubHTTPError) as raised:
        peer.feature_extraction(["a", ""])
    assert raised.value.response.status_code == 400
    with (
        InferenceClient(model=f"{url}/tei", token="no-key-of-ours") as stranger,  # noqa: S106
        pytest.raises(HfHubHTTPError) as raised,
    ):
        stranger.feature_extraction("a")
    assert raised.value.response.status_code == 401
    assert raised.value.response.content == b""


@pytest.mark.parametrize("route", ["", "/", "/embed"])
def test_texts_ids_and_a_mixture_are_embedded(
    client: TestClient, expected: list[list[float]], route: str
) -> None:
    ids = client.post("/encode", json={"inputs": TEXTS, "output": "tokens"}).json()["ids"]
    for inputs, wanted in (
        (CAT, expected[:1]),
        (ids[0], expected[:1]),
        ([ids[0]], expected[:1]),
        ([ids[0], TEXTS[1], ids[2]], expected),
        ([TEXTS[0], ids[1], TEXTS[2]], expected),
    ):
        np.testing.assert_allclose(ask(client, f"/tei{route}", inputs=inputs), wanted, atol=1e-6)


def test_dimensions_are_cut_before_vectors_are_normalised(
    client: TestClient, expected: list[list[float]]
) -> None:
    cut = np.array(expected)[:, :8]
    found = ask(client, "/tei/embed", inputs=TEXTS, dimensions=8)
    np.testing.assert_allclose(found, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize(
    "text",
    [" ".join(f"w{i}" for i in range(400)), "!" * 150 + "?" * 150],
    ids=["of many characters", "of few"],
)
def test_an_input_that_is_too_long_is_cut_at_either_end_or_refused(
    client: TestClient, text: str
) -> None:
    [encoding] = ask(client, "/tei/tokenize", inputs=text, add_special_tokens=False)
    ids = [token["id"] for token in encoding]
    assert len(ids) > 254
    for direction, kept in (("Right", ids[:254]), ("left", ids[-254:])):
        found = ask(client, "/tei/embed", inputs=text, truncation_direction=direction)
        row = [101, *kept, 102]
        np.testing.assert_allclose(found, ask(client, "/tei/embed", inputs=row), atol=1e-6)
    row = ids[:300]
    left = ask(client, "/tei/embed", inputs=[row], truncation_direction="Left")
    np.testing.assert_allclose(left, ask(client, "/tei/embed", inputs=row[-256:]), atol=1e-6)
    response = client.post("/tei/embed", json={"inputs": ["a", text], "truncate": False})
    assert response.status_code == 422
    told = (
        "Input validation error: the input has more than 256 tokens, the model's maximum "
        "(at index 1)"
    )
    assert response.json() == {"error": told, "error_type": "Validation"}


def test_vectors_of_tokens_are_those_of_encode(client: TestClient) -> None:
    wanted = client.post("/encode", json={"inputs": TEXTS, "output": "tokens"}).json()
    found = ask(client, "/tei/embed_all", inputs=TEXTS)
    for mine, other in zip(found, wanted["embeddings"], strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


def test_tokens_are_those_of_the_tokenizer_with_places_in_bytes(
    client: TestClient, artifact: Artifact
) -> None:
    tokenizer = Tokenizer.from_file(str(artifact.path / "tokenizer.json"))
    for text, tokens in zip(TEXTS, ask(client, "/tei/tokenize", inputs=TEXTS), strict=True):
        encoding = tokenizer.encode(text)
        assert [token["id"] for token in tokens] == encoding.ids
        assert [token["special"] for token in tokens] == [
            bool(special) for special in encoding.special_tokens_mask
        ]
        for token in tokens:
            if token["special"]:
                assert token["text"] in ("[CLS]", "[SEP]")
                assert token["start"] is token["stop"] is None
            else:
                place = slice(token["start"], token["stop"])
                assert token["text"] == text.encode()[place].decode()


def test_long_texts_are_not_cut_when_they_are_tokenised(client: TestClient) -> None:
    [tokens] = ask(client, "/tei/tokenize", inputs="word " * 1000)
    assert len(tokens) == 1002


def test_ids_are_decoded(client: TestClient) -> None:
    ids = [token["id"] for token in ask(client, "/tei/tokenize", inputs=CAT)[0]]
    assert ask(client, "/tei/decode", ids=ids) == ["the cat sat on the mat."]
    assert ask(client, "/tei/decode", ids=[ids, ids[1:3]]) == ["the cat sat on the mat.", "the cat"]
    [with_special] = ask(client, "/tei/decode", ids=ids, skip_special_tokens=False)
    assert with_special.startswith("[CLS]")


def test_info_and_health(client: TestClient) -> None:
    info = client.get("/tei/info").json()
    assert info["served_model_name"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["max_input_length"], info["auto_truncate"]) == (256, True)
    assert info["max_client_batch_size"] == 2048
    for route in ("", "/", "/health", "/ping"):
        response = client.get(f"/tei{route}")
        assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(
    ("path", "field", "vectors_of"),
    [
        ("/v1/embeddings", "input", lambda body: [row["embedding"] for row in body["data"]]),
        ("/v2/embed", "texts", lambda body: body["embeddings"]["float"]),
        ("/tei/embed", "inputs", lambda body: body),
    ],
)
def test_texts_without_visible_characters_have_the_vectors_of_encode(
    client: TestClient, path: str, field: str, vectors_of: Callable[[Any], Any]
) -> None:
    texts = [CAT, " ", "\t\n", "\0", "a\0 cat", "\u200b"]
    expected = client.post("/encode", json={"inputs": texts}).json()["embeddings"]
    model = "sentence-transformers/all-MiniLM-L6-v2"  # other APIs than OpenAI's ignore it
    response = client.post(path, json={field: texts, "model": model})
    assert response.status_code == 200, response.text
    np.testing.assert_allclose(vectors_of(response.json()), expected, atol=1e-6)


def test_similarity_takes_empty_texts(client: TestClient) -> None:
    texts = [CAT, "", " ", "\0"]
    vectors = np.array(
        client.post("/encode", json={"inputs": [CAT, *[" "] * 3]}).json()["embeddings"]
    )
    for source, vector in ((CAT, vectors[0]), ("", vectors[1])):
        inputs = {"source_sentence": source, "sentences": texts}
        cosines = ask(client, "/tei/similarity", inputs=inputs)
        np.testing.assert_allclose(cosines, vectors @ vector, atol=1e-6)


def test_headers_tell_the_work_and_the_time(client: TestClient) -> None:
    headers = client.post("/tei/embed", json={"inputs": [CAT, [101, 102]]}).headers
    assert headers["x-compute-characters"] == str(len(CAT) + 2)  # in TEI an id is one too
    assert headers["x-compute-tokens"] == str(9 + 2)
    for name in ("total", "tokenization", "queue", "inference"):
        assert headers[f"x-{name}-time"].isdecimal()


@pytest.mark.parametrize(
    ("route", "fields", "status", "error"),
    [
        ("/embed", {"inputs": []}, 400, "`inputs` cannot be empty"),
        ("/embed", {"inputs": ""}, 400, "`inputs` cannot be empty (at index 0)"),
        ("/embed", {"inputs": ["a"] * 2049}, 422, "batch size 2049 > maximum allowed batch size"),
        ("/embed", {"inputs": "a", "dimensions": 385}, 422, "dimensions must be from 1 to 384"),
        ("/embed", {"inputs": "a", "dimensions": 0}, 422, "dimensions must be from 1 to 384"),
        (
            "/embed",
            {"inputs": [[1], "a", [30522]]},
            422,
            "0 to 30521 (at index 2)",
        ),
        ("/embed", {"inputs": "a", "prompt_name": "x"}, 422, "unknown prompt"),
        ("/embed", {"inputs": "a" * 100_001}, 422, "the limit is 100000 (at index 0)"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "empty"),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["b", "c" * 100_001]}},
            422,
            "the limit is 100000 (at index 1)",
        ),
        ("/decode", {"ids": []}, 400, "`ids` cannot be empty"),
        ("/tokenize", {"inputs": "! " * 20_000}, 422, "more tokens than one response"),
        ("/tokenize", {"inputs": [""]}, 400, "empty (at index 0)"),
        ("/decode", {"ids": [[1], [10**6]]}, 422, "(at index 1)"),
    ],
)
def test_what_is_wrong_is_told_in_its_words(
    client: TestClient, route: str, fields: dict[str, object], status: int, error: str
) -> None:
    response = client.post(f"/tei{route}", json=fields)
    assert response.status_code == status
    assert set(response.json()) == {"error", "error_type"}
    assert response.json()["error_type"] == {400: "Empty", 422: "Validation"}[status]
    assert error in response.json()["error"]


def test_what_its_framework_refuses_is_plain_text(client: TestClient) -> None:
    for content, media, status in (
        (b"{", "application/json", 400),
        (b"a", "text/plain", 415),
        (b'{"inputs": 3}', "application/json", 422),
        (b'"a"', "application/json", 422),
        (b"3", "application/json", 422),
        (b"null", "application/json", 422),
        (b'[{"inputs": "a"}]', "application/json", 422),
        (b" " * (5 * 2**20), "application/json", 413),
    ):
        response = client.post("/tei/embed", content=content, headers={"Content-Type": media})
        assert response.status_code == status
        assert response.headers["content-type"].startswith("text/plain")
    for fields, pointer in (
        ({"inputs": "a", "dimensions": -1}, "/dimensions: "),
        ({"inputs": "a", "dimensions": "8"}, "/dimensions: "),
        ({"inputs": ["a", 3]}, "/inputs/1: "),
        ({}, "/inputs: "),
    ):
        assert client.post("/tei/embed", json=fields).text.startswith(pointer)
    # It might be the name of a model, whose route takes POST.
    assert client.get("/tei/nothing").status_code == 405
    assert client.post("/tei/nothing", json={}).status_code == 404
    refused = client.post("/tei/health", json={})
    assert (refused.status_code, refused.headers["Allow"]) == (405, "HEAD, GET")


def test_fields_that_it_does_not_know_are_ignored(client: TestClient) -> None:
    assert ask(client, "/tei/embed", inputs=CAT, raw_scores=True)


def test_space_is_refused_because_vectors_would_be_of_the_models_own(client: TestClient) -> None:
    sentences = {"source_sentence": CAT, "sentences": [CAT]}
    for path, fields, pointer in (
        ("embed", {"inputs": CAT, "space": "v1"}, "/space"),
        ("embed_all", {"inputs": CAT, "space": "v1"}, "/space"),
        ("similarity", {"inputs": sentences, "parameters": {"space": "v1"}}, "/parameters/space"),
    ):
        response = client.post(f"/tei/{path}", json=fields)
        assert (response.status_code, response.text) == (422, f"{pointer}: Input should be None")


@pytest.mark.parametrize(
    ("given", "status", "kind", "message"),
    [
        (Overloaded("the queue is full"), 429, "Overloaded", "Model is overloaded"),
        (NotReady("the model is being loaded"), 503, "Unhealthy", "unhealthy"),
        (NotReady("it is not loaded", code="model_loading"), 503, "Unhealthy", "unhealthy"),
        (NotReady("it cannot be loaded", code="load_failed"), 503, "Unhealthy", "unhealthy"),
        (
            InvalidInput("model is required", code="model_required", pointer="/model"),
            422,
            "Validation",
            "Input validation error: model is required; use /tei/{name}",
        ),
        (InferenceFailed("a NaN", index=3), 424, "Backend", "Backend error: a NaN (at index 3)"),
        (VitrineError("a defect"), 500, "Backend", "Backend error: a defect"),
    ],
)
def test_what_is_wrong_with_the_service_is_told_in_its_words(
    given: VitrineError, status: int, kind: str, message: str
) -> None:
    response = render_error(given, "an id")
    assert response.status_code == status
    assert json.loads(bytes(response.body)) == {"error": message, "error_type": kind}
    assert response.headers.get("Retry-After") == headers_of(given).get("Retry-After")


@pytest.fixture(scope="module")
def root_client(artifact: Artifact) -> Iterator[TestClient]:
    """A client of a service that serves TEI's contract at / too."""
    with served(artifact.path, server={"tei_at_root": True}) as client:
        yield client


def test_the_contract_is_served_at_the_root_where_that_is_switched_on(
    root_client: TestClient, expected: list[list[float]]
) -> None:
    for path in ("/", "/embed"):
        found = root_client.post(path, json={"inputs": TEXTS})
        np.testing.assert_allclose(found.json(), expected, atol=1e-6)
    compared = {"inputs": {"source_sentence": CAT, "sentences": TEXTS[1:]}}
    cosines = root_client.post("/similarity", json=compared).json()
    np.testing.assert_allclose(cosines, np.array(expected[1:]) @ expected[0], atol=1e-6)
    assert len(root_client.post("/embed_all", json={"inputs": CAT}).json()[0]) == 9
    assert len(root_client.post("/tokenize", json={"inputs": CAT}).json()[0]) == 9
    assert root_client.post("/decode", json={"ids": [7592]}).json() == ["hello"]
    for path in ("/health", "/ping"):
        assert root_client.get(path).status_code == 200
    refused = root_client.post("/embed", json={"inputs": []})
    assert refused.status_code == 400
    assert refused.json()["error_type"] == "Empty"


def test_the_services_own_routes_stay_at_the_root(root_client: TestClient) -> None:
    assert root_client.get("/", follow_redirects=False).headers["Location"] == "/docs"
    assert "limits" in root_client.get("/info").json()
    assert root_client.post("/encode", json={"inputs": ""}).json()["code"] == "empty"
    assert root_client.delete("/").headers["Allow"] == "HEAD, GET, POST"


def test_the_contract_is_not_served_at_the_root_by_default(client: TestClient) -> None:
    assert client.post("/embed", json={"inputs": CAT}).status_code == 404
    assert client.post("/", json={"inputs": CAT}).status_code == 405
