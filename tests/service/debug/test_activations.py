"""Activations over HTTP, by hand with transformers and sentence-transformers."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.numpy import load as load_safetensors
from sentence_transformers import MultiVectorEncoder
from starlette.testclient import TestClient
from transformers import AutoModelForSequenceClassification

from models.artifact import Artifact
from service.settings import DebugSettings
from tests.service.debug.conftest import Json, problem_of, service_of
from tests.serving import ready_model

pytestmark = pytest.mark.slow


def post_activations(client: TestClient, **body: object) -> Any:  # noqa: ANN401 - httpx's response
    response = client.post("/debug/activations", json=body)
    assert response.status_code == 200, response.text
    return response


def arrays_of(response: Any) -> tuple[dict[str, np.ndarray], Json]:  # noqa: ANN401
    """Return the arrays and the metadata of either format."""
    if response.headers["content-type"] == "application/x-npz":
        with np.load(io.BytesIO(response.content), allow_pickle=False) as file:
            arrays = dict(file)
        return arrays, json.loads(str(arrays.pop("metadata")))
    arrays = load_safetensors(response.content)
    length = int.from_bytes(response.content[:8], "little")
    header = json.loads(response.content[8 : 8 + length])
    return arrays, json.loads(header["__metadata__"]["metadata"])


@pytest.mark.parametrize("file_format", ["safetensors", "npz"])
def test_activations_equal_the_hidden_states_of_transformers(
    embedder: TestClient,
    roberta: Any,  # noqa: ANN401
    file_format: str,
    tmp_path: Path,
) -> None:
    names = ["embeddings", "layers.0", "output", "layers.1.linear1"]
    texts = ["w5 w6 w7", {"text": "w9  w33"}]
    response = post_activations(embedder, texts=texts, taps=names, format=file_format)
    arrays, metadata = arrays_of(response)
    assert list(arrays) == [f"{index}/{name}" for index in (0, 1) for name in names] or (
        file_format == "safetensors"  # which sorts its tensors
    )
    for index, ids in enumerate(([0, 5, 6, 7, 2], [0, 9, 33, 2])):
        with torch.no_grad():
            states = roberta(torch.tensor([ids]), output_hidden_states=True).hidden_states
        for name, state in zip(names[:3], states, strict=True):
            array = arrays[f"{index}/{name}"]
            assert array.dtype == np.float32
            np.testing.assert_allclose(array, state[0], rtol=1e-4, atol=1e-5)
        assert arrays[f"{index}/layers.1.linear1"].shape == (len(ids), 48)
    spelled = [[token["token"] for token in text] for text in metadata["tokens"]]
    assert spelled == [["[CLS]", "w5", "w6", "w7", "[SEP]"], ["[CLS]", "w9", "w33", "[SEP]"]]
    spans = [(token["start"], token["end"]) for token in metadata["tokens"][1]]
    assert spans == [(None, None), (0, 2), (4, 7), (None, None)]
    assert metadata["taps"]["layers.0"] == "layers.0.norm2"
    model = ready_model(embedder)
    assert metadata["model"]["version"] == response.headers["X-Model-Version"] == model.version
    assert metadata["model"]["graph_sha256"] == model.graph_sha256
    assert metadata["vitrine"]
    assert f'activations.{file_format}"' in response.headers["Content-Disposition"]
    report = json.loads(response.headers["X-Debug-Report"])
    assert (report["parity"]["agrees"], report["warnings"]) == (True, [])
    assert report["cost"]["token_steps"] == 9
    if file_format == "safetensors":  # a file on disk, as a researcher opens it
        file = tmp_path / "activations.safetensors"
        file.write_bytes(response.content)
        with safe_open(file, "np") as opened:
            assert json.loads(opened.metadata()["metadata"]) == metadata


@pytest.mark.parametrize("file_format", ["safetensors", "npz"])
def test_reduction_is_over_all_tokens_of_each_text(embedder: TestClient, file_format: str) -> None:
    body = {"texts": ["w5 w6 w7", "w9"], "taps": ["layers.0", "pooling"], "format": file_format}
    whole, _ = arrays_of(post_activations(embedder, **body))
    reduce: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "mean": lambda x: x.mean(0),
        "norm": lambda x: np.linalg.norm(x, axis=-1),
        "first": lambda x: x[0],
        "last": lambda x: x[-1],
    }
    for reduction, by_numpy in reduce.items():
        response = post_activations(embedder, **body, reduction=reduction)
        reduced, metadata = arrays_of(response)
        assert metadata["reduction"] == reduction
        for index in (0, 1):
            expected = by_numpy(whole[f"{index}/layers.0"])
            np.testing.assert_allclose(reduced[f"{index}/layers.0"], expected, rtol=1e-5)
            vector = whole[f"{index}/pooling"]
            expected = np.array(np.linalg.norm(vector)) if reduction == "norm" else vector
            np.testing.assert_allclose(
                reduced[f"{index}/pooling"], expected, rtol=1e-5, strict=True
            )
        size = sum(array.nbytes for array in reduced.values())
        dry = post_activations(embedder, **body, reduction=reduction, dry_run=True).json()
        assert dry["bytes"] == size
        assert dry.keys() == {"model", "cost", "bytes", "max_bytes"}


def test_activations_of_a_pair_have_the_tokens_of_both_texts(
    ranker: TestClient, reranker: Artifact
) -> None:
    oracle = AutoModelForSequenceClassification.from_pretrained(reranker.path / "source")
    pair = {"text": "w7 w9", "text_pair": "w21 w5"}
    arrays, metadata = arrays_of(post_activations(ranker, texts=[pair], taps=["output", "heads.0"]))
    ids, types = torch.tensor([[0, 7, 9, 2, 21, 5, 2]]), torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    with torch.no_grad():
        expected = oracle.base_model(ids, token_type_ids=types)
    np.testing.assert_allclose(arrays["0/output"], expected.last_hidden_state[0], atol=1e-5)
    np.testing.assert_allclose(arrays["0/heads.0"], expected.pooler_output[0], atol=1e-5)
    assert [token["text"] for token in metadata["tokens"][0]] == [None, 0, 0, None, 1, 1, None]


def test_activations_of_other_kinds(
    splade: TestClient,
    colbert: TestClient,
    labeler: TestClient,
    multi_encoder: tuple[MultiVectorEncoder, Artifact],
) -> None:
    prompted = {"text": "w5", "prompt_name": "query"}
    arrays, _ = arrays_of(post_activations(splade, texts=[prompted], taps=["output"]))
    assert arrays["0/output"].shape == (5, 32)
    arrays, _ = arrays_of(post_activations(labeler, texts=["w5"], taps=["embeddings.sum"]))
    assert arrays["0/embeddings.sum"].shape == (3, 32)
    document = {"text": "The cat sat.", "prompt_name": "document"}
    arrays, metadata = arrays_of(post_activations(colbert, texts=[document], taps=["heads.0"]))
    tokens = [token["token"] for token in metadata["tokens"][0]]
    kept = [index for index, spelled in enumerate(tokens) if spelled not in "[],."]
    vectors = torch.nn.functional.normalize(torch.tensor(arrays["0/heads.0"][kept]), dim=-1)
    np.testing.assert_allclose(vectors, multi_encoder[0].encode_document("The cat sat."), atol=1e-5)


def test_activations_beyond_the_byte_limit_are_refused(reranker: Artifact) -> None:
    with service_of(reranker, max_activation_bytes=4 * 3 * 32, max_token_steps=8) as client:
        limit = client.get("/debug/capabilities").json()["limits"]["max_activation_bytes"]
        assert limit == 384
        post_activations(client, texts=["w5"], taps=["output"])
        for dry_run in (False, True):
            body = {"texts": ["w5 w6"], "taps": ["output"], "dry_run": dry_run}
            problem = problem_of(client, "activations", body)
            assert (problem["code"], problem["pointer"]) == ("activation_bytes", "/taps")
            assert "the tensors have 512 bytes; the limit is 384" in problem["detail"]
        body = {"texts": ["w5 w6 w7", "w5 w6"], "taps": ["output"]}
        assert client.post("/debug/activations", json=body).json()["code"] == "budget"


def test_byte_limit_is_less_than_the_size_of_a_frame() -> None:
    DebugSettings(max_activation_bytes=2**30)
    with pytest.raises(ValidationError, match="less than or equal to 1073741824"):
        DebugSettings(max_activation_bytes=2**30 + 1)


def test_capabilities_list_the_taps_in_the_order_of_the_pass(embedder: TestClient) -> None:
    capabilities = embedder.get("/debug/capabilities").json()
    taps = capabilities["taps"]
    assert taps[0] == "embeddings.words"
    assert taps[-1] == "pooling"
    first = taps.index("layers.0.attention")
    assert taps[first : first + 7] == [
        f"layers.0.{step}"
        for step in ("attention", "sum1", "norm1", "linear1", "linear2", "sum2", "norm2")
    ]
    assert {"activations", "patch"} <= set(capabilities["routes"])
    post_activations(embedder, texts=["w5"], taps=[*taps, *capabilities["layers"]])


@pytest.mark.parametrize(
    ("body", "code", "pointer"),
    [
        ({"taps": ["output", "layers.9"]}, "unknown_tap", "/taps/1"),
        ({"taps": []}, "invalid", "/taps"),
        ({"texts": []}, "invalid", "/texts"),
        ({"texts": ["w5", " "]}, "no_tokens", "/texts/1"),
        ({"texts": ["w5", 3]}, "invalid", "/texts/1"),
        ({"texts": [{"text": "w5", "text_pair": "w6"}]}, "invalid", "/texts/0/text_pair"),
        ({"texts": [{"text": "w5", "secret": "w6"}]}, "invalid", "/texts/0"),
        ({"texts": [{"text": "w5", "prompt_name": "secret"}]}, "unknown_prompt",
         "/texts/0/prompt_name"),
        ({"reduction": "max"}, "invalid", "/reduction"),
        ({"format": "pickle"}, "invalid", "/format"),
    ],
)  # fmt: skip
def test_invalid_activations_request_has_code_and_pointer(
    embedder: TestClient, body: Json, code: str, pointer: str
) -> None:
    problem = problem_of(embedder, "activations", {"texts": ["w5"], "taps": ["output"], **body})
    assert (problem["code"], problem["pointer"]) == (code, pointer)
