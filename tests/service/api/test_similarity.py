"""Every route that compares texts, against the similarity of sentence-transformers."""

import asyncio
import base64
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from starlette.testclient import TestClient

import vitrine
from models.artifact import Artifact
from models.export.exporter import export
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from models.manifest import MANIFEST, ArtifactError, SimilarityName
from service.bulk.job import encode_files
from service.bulk.options import BulkOptions
from tests.models.checkpoints import edit_json
from tests.service.api.posting import ask, refused
from tests.serving import served

pytestmark = pytest.mark.slow

QUERIES = ["where did the cat sit", "rain in the city", "what is a good document"]
DOCUMENTS = [
    "cat",
    "the house and the river 9",
    "a small dog ran to the park and slept there until the evening " * 2,
    "Rain fell in the city. The cats sat on their mats. " * 3,
    "a",
    "where did the cat sit",
]
Json = dict[str, Any]
# Models by name: the similarity, and whether the model normalises its vectors.
DENSE: Mapping[str, tuple[SimilarityName, bool]] = {
    "cosine": ("cosine", False),
    "dot": ("dot", False),
    "euclidean": ("euclidean", False),
    "manhattan": ("manhattan", False),
    "unit-dot": ("dot", True),
    "unit-euclidean": ("euclidean", True),
}
# Exported models, whose folders declare the similarity, by whether they normalise their vectors.
# The others are copies with another similarity in the manifest.
EXPORTED = {False: "dot", True: "unit-euclidean"}
SPARSE: tuple[SimilarityName, ...] = ("cosine", "dot", "euclidean", "manhattan")
NAMES = [*DENSE, *(f"sparse-{name}" for name in SPARSE)]


class ModelsAndOracles(NamedTuple):
    """A service of all models, and the oracle and the artifact of each."""

    client: TestClient
    oracles: Mapping[str, SentenceTransformer | SparseEncoder]
    artifacts: Mapping[str, Path]

    def post(self, path: str, **body: object) -> Json:
        result: Json = ask(self.client, path, **body)
        return result

    def expected(self, name: str, queries: list[str], documents: list[str]) -> NDArray[np.float64]:
        """Return the similarity of each query with each document."""
        oracle = self.oracles[name]
        dense = {"convert_to_sparse_tensor": False} if isinstance(oracle, SparseEncoder) else {}
        a, b = oracle.encode_query(queries, **dense), oracle.encode_document(documents, **dense)
        result: NDArray[np.float64] = np.asarray(oracle.similarity(a, b), np.float64)
        return result


def with_similarity(artifact: Path, folder: Path, similarity: str | None) -> Path:
    """Copy an artifact, with another similarity in its manifest."""
    shutil.copytree(artifact, folder, ignore=shutil.ignore_patterns("source"))
    edit_json(folder / MANIFEST, similarity=similarity)
    manifest = json.loads((folder / MANIFEST).read_text())
    files = {name: h for name, h in manifest["files"].items() if not name.startswith("source/")}
    edit_json(folder / MANIFEST, files=files)
    return folder


@pytest.fixture(scope="module")
def models(
    small_folder: Path,
    sparse_encoder: tuple[SparseEncoder, Artifact],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ModelsAndOracles]:
    folder = tmp_path_factory.mktemp("similarities")
    oracles: dict[str, SentenceTransformer | SparseEncoder] = {}
    artifacts: dict[str, Path] = {}
    for name in EXPORTED.values():
        similarity, normalizes = DENSE[name]
        modules = [Transformer(str(small_folder)), Pooling(32)]
        SentenceTransformer(
            modules=modules + [Normalize()] * normalizes,
            device="cpu",
            prompts={"query": "question: ", "document": ""},
            similarity_fn_name=similarity,
        ).save(str(folder / name))
        artifacts[name] = folder / f"{name}-artifact"
        export(resolve(str(folder / name)), artifacts[name])
    for name, (similarity, normalizes) in DENSE.items():
        own = EXPORTED[normalizes]
        declared = None if name == own else similarity
        saved = str(folder / own)
        oracles[name] = SentenceTransformer(saved, device="cpu", similarity_fn_name=declared)
        if name != own:
            copy = folder / f"{name}-artifact"
            artifacts[name] = with_similarity(artifacts[own], copy, similarity)
    for similarity in SPARSE:
        name = f"sparse-{similarity}"
        sparse = str(sparse_encoder[1].path.with_name("saved"))
        oracles[name] = SparseEncoder(sparse, device="cpu", similarity_fn_name=similarity)
        artifacts[name] = with_similarity(
            sparse_encoder[1].path, folder / f"{name}-artifact", similarity
        )
    all_models = [{"name": name, "path": artifacts[name]} for name in NAMES]
    with served(models={"served": all_models}) as client:
        yield ModelsAndOracles(client, oracles, artifacts)


def close(actual: object, expected: NDArray[np.float64]) -> None:
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(np.array(actual), expected, rtol=0, atol=2e-5 * scale)


def texts_of(name: str) -> tuple[list[str], list[str]]:
    """Return queries and documents in the vocabulary of the model."""
    if not name.startswith("sparse"):
        return QUERIES, DOCUMENTS
    documents = ["w7", "w21 w5", "w8 w15 w33 w6", "w7 w9 " * 6, "w40 w41 w42", "w7 w9"]
    return ["w7 w9", "w21", "w5 w6 w7"], documents


@pytest.mark.parametrize("name", NAMES)
def test_scores_equal_the_similarity_of_sentence_transformers(
    models: ModelsAndOracles, name: str
) -> None:
    queries, documents = texts_of(name)
    expected = models.expected(name, queries, documents)
    kind = name.rpartition("-")[2]
    one = models.post("/score", model=name, queries=queries[0], documents=documents)
    assert one["kind"] == kind
    close(one["scores"], expected[0])
    pairs = models.post("/score", model=name, queries=queries, documents=documents[1:4])
    close(pairs["scores"], expected[:, 1:4].diagonal())
    raw = models.post(
        "/score", model=name, queries=queries, documents=documents[1:4], raw_scores=True
    )
    assert raw["scores"] == pairs["scores"]
    for path in ("/vllm/score", "/vllm/v1/score"):
        data = models.post(path, model=name, queries=queries[0], documents=documents)["data"]
        close([item["score"] for item in data], expected[0])


@pytest.mark.parametrize("name", NAMES)
def test_rankings_have_the_order_and_scores_of_the_similarity(
    models: ModelsAndOracles, name: str
) -> None:
    queries, documents = texts_of(name)
    for query, expected in zip(queries, models.expected(name, queries, documents), strict=True):
        order = np.argsort(-expected, kind="stable").tolist()
        gaps = np.abs(np.diff(expected[order]))
        assert gaps.min() > 1e-4, "the texts have no order that rounding could not change"
        body = {"model": name, "query": query, "documents": documents}
        native = models.post("/rerank", **body)
        assert native["kind"] == name.rpartition("-")[2]
        assert [item["index"] for item in native["results"]] == order
        close([item["score"] for item in native["results"]], expected[order])
        for path in ("/v1/rerank", "/v2/rerank", "/vllm/rerank"):
            results = models.post(path, **body)["results"]
            assert [item["index"] for item in results] == order
            close([item["relevance_score"] for item in results], expected[order])
        first = models.post("/rerank", top_n=1, **body)["results"]
        assert [item["index"] for item in first] == order[:1]


@pytest.mark.parametrize("name", NAMES)
def test_python_api_and_bulk_scores_equal_the_similarity(
    models: ModelsAndOracles, name: str, tmp_path: Path
) -> None:
    queries, documents = texts_of(name)
    expected = models.expected(name, queries, documents)
    with vitrine.SyncModel(models.artifacts[name], vitrine.ModelOptions(threads=1)) as model:
        scores = model.score(queries[0], documents)
        ranking = model.rerank(queries[0], documents)
    assert scores.kind == ranking.kind == name.rpartition("-")[2]
    close(scores.scores, expected[0])
    assert ranking.ranking() == np.argsort(-expected[0], kind="stable").tolist()
    rows = [{"query": query, "text": text} for query in queries for text in documents]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = BulkOptions(
        inputs=(str(path),),
        output=tmp_path / "out",
        model=models.artifacts[name],
        kind="scores",
        threads=1,
        verify=len(rows),
    )
    asyncio.run(encode_files(options))
    (part,) = (tmp_path / "out").glob("*.parquet")
    close(pq.read_table(part)["score"].to_pylist(), expected.ravel())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_document_has_the_similarity_of_its_best_chunk(
    models: ModelsAndOracles, name: str, late: bool
) -> None:
    chunking = {"size": 6, "late": late}
    body = models.post(
        "/encode", model=name, inputs=DOCUMENTS, prompt_name="document", chunking=chunking
    )
    oracle = models.oracles[name]
    queries = oracle.encode_query(QUERIES[:1])
    best, spans = [], []
    for vectors, chunks in zip(body["embeddings"], body["chunks"], strict=True):
        scores = np.asarray(oracle.similarity(queries, np.array(vectors, np.float32)))[0]
        best.append(scores.max())
        spans.append(chunks[int(scores.argmax())])
    assert max(map(len, body["chunks"])) > 2
    result = models.post(
        "/score", model=name, queries=QUERIES[0], documents=DOCUMENTS, chunking=chunking
    )
    close(result["scores"], np.array(best))
    assert result["best_chunks"] == spans
    ranked = models.post(
        "/rerank", model=name, query=QUERIES[0], documents=DOCUMENTS, chunking=chunking
    )["results"]
    assert [item["index"] for item in ranked] == np.argsort(-np.array(best), kind="stable").tolist()


@cache
def token_terms(oracle: SentenceTransformer, text: str, prompt: str) -> NDArray[np.float64]:
    """Return the terms of the mean of the token vectors, `(L, W)`."""
    tokens = oracle.encode(text, prompt_name=prompt, output_value="token_embeddings")
    terms: NDArray[np.float64] = np.asarray(tokens, np.float64) / len(tokens)
    return terms


@pytest.mark.parametrize("name", ["cosine", "dot", "unit-dot"])
def test_terms_of_a_score_are_products_of_the_compared_vectors_tokens(
    models: ModelsAndOracles, name: str
) -> None:
    oracle = models.oracles[name]
    assert isinstance(oracle, SentenceTransformer)
    body = {"model": name, "queries": QUERIES[0], "documents": DOCUMENTS[:3]}
    result = models.post("/score", explain={"method": "terms"}, **body)
    expected = models.expected(name, QUERIES[:1], DOCUMENTS[:3])[0]
    close(result["scores"], expected)
    x = token_terms(oracle, QUERIES[0], "query")
    for score, document, explanation in zip(
        result["scores"], DOCUMENTS, result["explanations"], strict=False
    ):
        y = token_terms(oracle, document, "document")
        matrix = x @ y.T
        if name != "dot":
            matrix /= np.linalg.norm(x.sum(0)) * np.linalg.norm(y.sum(0))
        largest = matrix.ravel()[np.argsort(-np.abs(matrix.ravel()))][:10]
        values = [term["value"] for term in explanation["terms"]]
        np.testing.assert_allclose(np.abs(values), np.abs(largest), rtol=1e-3, atol=1e-5)
        assert sum(values) + explanation["other"] == pytest.approx(score, rel=1e-5, abs=1e-5)
    ranked = models.post(
        "/rerank",
        explain={"method": "terms"},
        model=name,
        query=QUERIES[0],
        documents=DOCUMENTS,
        top_n=2,
    )["results"]
    for item in ranked:
        terms = item["explanation"]
        whole = sum(term["value"] for term in terms["terms"]) + terms["other"]
        assert whole == pytest.approx(item["score"], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", ["sparse-cosine", "sparse-dot"])
def test_terms_of_sparse_vectors_are_products_of_weights(
    models: ModelsAndOracles, name: str
) -> None:
    queries, documents = texts_of(name)
    oracle = models.oracles[name]
    result = models.post(
        "/score", model=name, queries=queries[0], documents=documents, explain={"method": "terms"}
    )
    a = np.asarray(oracle.encode_query(queries[:1], convert_to_sparse_tensor=False), np.float64)[0]
    b = np.asarray(oracle.encode_document(documents, convert_to_sparse_tensor=False), np.float64)
    if name == "sparse-cosine":
        a, b = a / np.linalg.norm(a), b / np.linalg.norm(b, axis=1, keepdims=True)
    for score, row, explanation in zip(result["scores"], b, result["explanations"], strict=True):
        products, values = a * row, [term["value"] for term in explanation["terms"]]
        for term in explanation["terms"]:
            assert term["query"] == term["document"]
            product = products[term["query"]["id"]]
            assert term["value"] == pytest.approx(product, rel=1e-3, abs=1e-5)
        np.testing.assert_allclose(values, np.sort(products)[::-1][: len(values)], atol=1e-4)
        assert sum(values) + explanation["other"] == pytest.approx(score, rel=1e-6)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith(("dot", "cosine"))])
def test_distances_have_no_terms(models: ModelsAndOracles, name: str) -> None:
    queries, documents = texts_of(name)
    body: Json = {"model": name, "documents": documents, "explain": {"method": "terms"}}
    for path, fields in (
        ("/score", {"queries": queries[0]}),
        ("/rerank", {"query": queries[0]}),
        ("/rerank", {"query": queries[0], "top_n": 1}),
    ):
        problem = refused(models.client, path, **body, **fields)
        assert (problem["code"], problem["pointer"]) == ("wrong_model", "/explain")
        similarity = name.rpartition("-")[2]
        assert f"because {similarity} is a distance; deletion explains it" in problem["detail"]


@pytest.mark.parametrize("name", NAMES)
def test_descriptions_name_the_similarity(models: ModelsAndOracles, name: str) -> None:
    similarity = name.rpartition("-")[2]
    info = models.client.get(f"/models/{name}/info").json()
    assert info["similarity"] == similarity
    served = {m["name"]: m for m in models.client.get("/models").json()["models"]}
    for field in ("similarity", "outputs", "labels"):
        assert served[name][field] == info[field]


@pytest.mark.parametrize("dimensions", [None, 8])
@pytest.mark.parametrize("name", DENSE)
def test_compatible_embeddings_have_the_similarities_of_the_model(
    models: ModelsAndOracles, name: str, dimensions: int | None
) -> None:
    similarity, normalizes = DENSE[name]
    oracle = models.oracles[name]
    vectors = np.asarray(oracle.encode(DOCUMENTS), np.float64)[:, :dimensions]
    if normalizes or similarity == "cosine":
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    size = {} if dimensions is None else {"dimensions": dimensions}
    openai = models.post("/v1/embeddings", model=name, input=DOCUMENTS, **size)["data"]
    actual = np.array([item["embedding"] for item in openai])
    np.testing.assert_allclose(actual, vectors, atol=1e-5)
    if dimensions is None:
        expected = np.asarray(oracle.similarity(oracle.encode(DOCUMENTS), oracle.encode(DOCUMENTS)))
        own = np.asarray(oracle.similarity(actual.astype(np.float32), actual.astype(np.float32)))
        np.testing.assert_allclose(own, expected, atol=2e-3)  # `torch.cdist` of equal vectors
    packed = models.post(
        "/v1/embeddings", model=name, input=DOCUMENTS[0], encoding_format="base64", **size
    )["data"][0]["embedding"]
    first = np.frombuffer(base64.b64decode(packed), "<f4")
    np.testing.assert_allclose(first, vectors[0], atol=1e-5)
    cohere = {} if dimensions is None else {"output_dimension": dimensions}
    for path in ("/v1/embed", "/v2/embed"):
        body = {"model": name, "texts": DOCUMENTS, "embedding_types": ["float", "ubinary"]}
        embeddings = models.post(path, **body, **cohere)["embeddings"]
        np.testing.assert_allclose(embeddings["float"], vectors, atol=1e-5)
        assert embeddings["ubinary"] == np.packbits(vectors > 0, axis=1).tolist()


def test_tei_compares_by_cosine_and_normalises_as_its_requests_say(
    models: ModelsAndOracles,
) -> None:
    vectors = np.asarray(models.oracles["dot"].encode(DOCUMENTS), np.float64)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for normalize, expected in ((True, units), (False, vectors)):
        actual = models.client.post(
            "/tei/dot/embed", json={"inputs": DOCUMENTS, "normalize": normalize}
        ).json()
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    inputs = {"source_sentence": DOCUMENTS[0], "sentences": DOCUMENTS[1:]}
    actual = models.client.post("/tei/dot/similarity", json={"inputs": inputs}).json()
    np.testing.assert_allclose(actual, units[1:] @ units[0], atol=1e-5)


@pytest.mark.parametrize("similarity", ["maxsim", "hamming", None])
def test_manifest_with_a_similarity_of_other_vectors_is_refused(
    small_artifact: Artifact, tmp_path: Path, similarity: str | None
) -> None:
    folder = with_similarity(small_artifact.path, tmp_path / "artifact", similarity)
    with pytest.raises(ArtifactError, match=f"is invalid: similarity .*{similarity}"):
        Artifact.load(folder)


def test_models_without_vectors_have_no_similarity(
    reranker: Artifact, classifier: Artifact, tagger: Artifact, rerank_client: TestClient
) -> None:
    for artifact in (reranker, classifier, tagger):
        assert artifact.manifest.similarity is None
    assert rerank_client.get("/info").json()["similarity"] is None


def test_similarity_of_vectors_survives_an_override_of_the_normalisation(
    models: ModelsAndOracles, tmp_path: Path
) -> None:
    """The similarity applies to the served vectors, here scaled by the export."""
    saved = models.artifacts["dot"].with_name("dot")
    artifact, _ = export(
        resolve(str(saved)), tmp_path / "unit", overrides=Overrides(normalize=True)
    )
    assert artifact.manifest == replace(
        Artifact.load(models.artifacts["dot"]).manifest,
        normalize=True,
        files=artifact.manifest.files,
        graphs=artifact.manifest.graphs,
    )
    with vitrine.SyncModel(artifact.path, vitrine.ModelOptions(threads=1)) as model:
        scores = model.score(QUERIES[0], DOCUMENTS).scores
    close(scores, models.expected("unit-dot", QUERIES[:1], DOCUMENTS)[0])
