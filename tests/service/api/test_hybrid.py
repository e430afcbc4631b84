"""Embeddings, sparse vectors and multi-vectors of one model, against BGE-M3's formulas."""

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.torch import load_file
from starlette.testclient import TestClient

import vitrine
from models.artifact import Artifact
from models.export.exporter import export
from models.export.sources import resolve
from service.bulk.job import encode_files
from service.bulk.options import BulkOptions
from tests.models.checkpoints import save_bge_m3
from tests.service.api.posting import ask, refused
from tests.serving import served

pytestmark = pytest.mark.slow

# Repeated tokens, unknown characters, a special token in the text, and more than 38 tokens.
TEXTS = ["the cat the cat a", "q5 7 ?? ß", "b </s> c", "the cat a b c d e f " * 6]
ALL = ["pooled", "sparse", "multi"]

Json = dict[str, Any]


class Vectors(NamedTuple):
    pooled: Any
    sparse: dict[int, float]
    multi: Any


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("hybrid")
    save_bge_m3(folder / "model")
    return export(resolve(str(folder / "model")), folder / "artifact")[0]


@pytest.fixture(scope="module")
def client(artifact: Artifact) -> Iterator[TestClient]:
    with served(artifact.path, limits={"max_token_vectors": 200}) as client:
        yield client


@pytest.fixture(scope="module")
def expected(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> list[Vectors]:
    folder = artifact.path.with_name("model")
    encoder = save_bge_m3(tmp_path_factory.mktemp("oracle"))  # the same weights
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [of_bge_m3(folder, encoder, tokenizer, text) for text in TEXTS]


def of_bge_m3(folder: Path, encoder: Any, tokenizer: Any, text: str) -> Vectors:  # noqa: ANN401
    """Return the vectors of a text, as the authors of BGE-M3 define them."""
    sparse, colbert = (
        load_file(folder / f"{name}_linear.safetensors") for name in ("sparse", "colbert")
    )
    ids = tokenizer(text, truncation=True, max_length=38)["input_ids"]
    linear = torch.nn.functional.linear
    with torch.no_grad():
        tokens = encoder(torch.tensor([ids])).last_hidden_state[0]
        weights = torch.relu(linear(tokens, sparse["weight"], sparse["bias"]))[:, 0].tolist()
        vectors = linear(tokens[1:], colbert["weight"], colbert["bias"])
    without = [getattr(tokenizer, f"{name}_token_id") for name in ("cls", "eos", "pad", "unk")]
    largest: dict[int, float] = {}
    for token, weight in zip(ids, weights, strict=True):
        if token not in without and weight > largest.get(token, 0):
            largest[token] = weight
    normalize = torch.nn.functional.normalize
    return Vectors(normalize(tokens[:1])[0].numpy(), largest, normalize(vectors).numpy())


def check_sparse(vector: Json, expected: dict[int, float]) -> None:
    assert vector["ids"] == sorted(expected)
    weights = [expected[token] for token in vector["ids"]]
    np.testing.assert_allclose(vector["weights"], weights, rtol=1e-4, atol=1e-6)


def test_texts_have_tokens_of_every_kind(expected: list[Vectors]) -> None:
    # Otherwise the tests below show little.
    counts = [(len(vectors.sparse), len(vectors.multi)) for vectors in expected]
    assert all(0 < entries < tokens for entries, tokens in counts), counts


def test_one_request_gives_all_outputs(client: TestClient, expected: list[Vectors]) -> None:
    result = ask(client, inputs=TEXTS, output=ALL)
    assert list(result["outputs"]) == ALL
    pooled, sparse, multi = (result["outputs"][name] for name in ALL)
    assert (pooled["dimensions"], sparse["dimensions"], multi["dimensions"]) == (32, 60, 12)
    for index, own in enumerate(expected):
        np.testing.assert_allclose(pooled["embeddings"][index], own.pooled, rtol=1e-4, atol=1e-5)
        check_sparse(sparse["embeddings"][index], own.sparse)
        np.testing.assert_allclose(multi["embeddings"][index], own.multi, rtol=1e-4, atol=1e-5)
        assert len(multi["ids"][index]) == len(multi["offsets"][index]) == len(own.multi)
        assert result["tokens"][index] == len(own.multi) + 1
    assert result["truncated"] == [False, False, False, True]


@pytest.mark.parametrize("output", ALL)
def test_each_output_alone_has_the_same_vectors(client: TestClient, output: str) -> None:
    together = ask(client, inputs=TEXTS, output=ALL)
    alone = ask(client, inputs=TEXTS, output=output)
    fields = together["outputs"][output]
    assert alone == {name: together[name] for name in ("model", "tokens", "truncated")} | fields
    assert ask(client, inputs=TEXTS, output=[output])["outputs"] == {output: fields}


def test_default_is_the_embedding(client: TestClient) -> None:
    assert ask(client, inputs=TEXTS) == ask(client, inputs=TEXTS, output="pooled")
    info = client.get("/info").json()
    assert info["outputs"] == ALL == list(info["self_check"])
    repeated = ask(client, inputs=TEXTS, output=["sparse", "sparse", "pooled"])["outputs"]
    assert list(repeated) == ["sparse", "pooled"]


def test_fields_apply_to_the_outputs_that_have_them(client: TestClient) -> None:
    body = {"inputs": TEXTS, "dimensions": 4, "normalize": False, "encoding": "base64"}
    result = ask(client, **body, output=ALL)["outputs"]
    for name in ("pooled", "multi"):
        alone = {**body, "dimensions": 4 if name == "pooled" else None}
        assert result[name]["embeddings"] == ask(client, **alone, output=name)["embeddings"]
    assert result["sparse"] == {
        name: ask(client, inputs=TEXTS, output="sparse")[name]
        for name in ("dimensions", "embeddings")
    }
    assert len(base64.b64decode(result["pooled"]["embeddings"][0])) == 4 * 4


@pytest.mark.parametrize(
    ("body", "pointer", "detail"),
    [
        ({"output": []}, "/output", "at least 1"),
        ({"output": ["pooled"] * 5}, "/output", "at most 4"),
        ({"output": ["pooled", "dense"]}, "/output/1", "should be 'pooled', "),
        ({"output": "dense"}, "/output", "should be 'pooled', "),
        ({"output": ["pooled", "tokens"]}, None, "--tokens exports"),
        ({"output": ["sparse", "multi"], "dimensions": 4}, "/dimensions", '"sparse" or "multi"'),
        ({"output": ["sparse"], "normalize": True}, "/normalize", "does not apply"),
        ({"output": ["sparse"], "encoding": "base64"}, "/encoding", "does not apply"),
        ({"output": ["multi"], "inputs": ["the cat"] * 60}, "/inputs", "the limit"),
    ],
)
def test_invalid_request_is_refused(
    client: TestClient, body: Json, pointer: str | None, detail: str
) -> None:
    problem = refused(client, "/encode", **{"inputs": TEXTS, **body})
    assert (problem["status"], problem.get("pointer")) == (422, pointer)
    assert detail in problem["detail"]


def test_limit_of_results_per_token_does_not_apply_to_sparse_vectors(client: TestClient) -> None:
    texts = ["the cat"] * 60
    result = ask(client, inputs=texts, output=["pooled", "sparse"])
    assert sum(result["tokens"]) > 200


def test_tei_gives_sparse_vectors_and_embeddings(
    client: TestClient, expected: list[Vectors]
) -> None:
    sparse = client.post("/tei/embed_sparse", json={"inputs": TEXTS, "truncate": True}).json()
    for row, own in zip(sparse, expected, strict=True):
        named = {"ids": [v["index"] for v in row], "weights": [v["value"] for v in row]}
        check_sparse(named, own.sparse)
    dense = client.post("/tei", json={"inputs": TEXTS, "truncate": True}).json()
    np.testing.assert_allclose(dense, [own.pooled for own in expected], atol=1e-5)


def test_scores_are_cosines_of_embeddings(client: TestClient, expected: list[Vectors]) -> None:
    result = ask(client, "/score", queries=TEXTS[0], documents=TEXTS)
    cosines = [expected[0].pooled @ own.pooled for own in expected]
    assert result["kind"] == "cosine"
    np.testing.assert_allclose(result["scores"], cosines, atol=1e-5)


def test_token_ids_and_python(artifact: Artifact, expected: list[Vectors]) -> None:
    rows = transformers.AutoTokenizer.from_pretrained(artifact.path.with_name("model"))(TEXTS[:3])
    with vitrine.SyncModel(artifact.path) as model:
        encoded = model.encode_outputs(rows["input_ids"], ("pooled", "sparse", "multi"))
        alone = model.encode_multi(TEXTS[:3]), model.encode_sparse(TEXTS[:3])
    for index, own in enumerate(expected[:3]):
        np.testing.assert_allclose(encoded["pooled"].vectors[index], own.pooled, atol=1e-5)
        np.testing.assert_allclose(encoded["multi"].vectors[index], own.multi, atol=1e-5)
        np.testing.assert_allclose(alone[0].vectors[index], own.multi, atol=1e-5)
        for vector in (encoded["sparse"].vectors[index], alone[1].vectors[index]):
            check_sparse({name: own.tolist() for name, own in vector._asdict().items()}, own.sparse)
    assert encoded["sparse"].width == 60


def test_bulk_multi_vectors_have_a_width_of_their_own(
    artifact: Artifact, expected: list[Vectors], tmp_path: Path
) -> None:
    texts, output = tmp_path / "texts.jsonl", tmp_path / "output"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = BulkOptions(inputs=(str(texts),), output=output, model=artifact.path, kind="multi")
    asyncio.run(encode_files(options))
    rows = pq.read_table(output / "part-00000.parquet")["embedding"].to_pylist()
    for actual, own in zip(rows, expected, strict=True):
        np.testing.assert_allclose(actual, own.multi, atol=1e-5)
