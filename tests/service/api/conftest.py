"""Small rerankers and classifiers, and clients of services with them."""

import shutil
import string
from collections.abc import Iterator
from pathlib import Path

import pytest
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SparseEncoder
from starlette.testclient import TestClient

from models.artifact import Artifact
from models.export.exporter import export
from models.export.sources import resolve
from service.app import create_app
from service.settings import DebugSettings, EngineSettings, LimitSettings, ModelSettings, Settings
from tests.models.checkpoints import (
    edit_json,
    save_classifier,
    save_masked_lm,
    save_multi_vector,
    save_token_classifier,
    save_tokenizer,
)
from tests.serving import serving

LABELS = ["sad", "neutral", "happy"]
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


@pytest.fixture(scope="package")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A BERT with one label; sentence-transformers loads it from the folder `saved` beside it."""
    folder = tmp_path_factory.mktemp("reranker")
    save_classifier(folder / "model", "bert", 1)
    save_tokenizer(folder / "model")
    names = ["input_ids", "token_type_ids", "attention_mask"]
    edit_json(folder / "model" / "tokenizer_config.json", model_input_names=names)
    CrossEncoder(str(folder / "model"), device="cpu").save(str(folder / "saved"))
    return export(resolve(str(folder / "saved")), folder / "artifact")[0]


@pytest.fixture(scope="package")
def cross_encoder(reranker: Artifact) -> CrossEncoder:
    """The reranker as loaded by sentence-transformers."""
    return CrossEncoder(str(reranker.path.parent / "saved"), device="cpu")


@pytest.fixture(scope="package")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A RoBERTa with three labels."""
    folder = tmp_path_factory.mktemp("classifier")
    save_classifier(folder / "model", "roberta", 3, id2label=dict(enumerate(LABELS)))
    save_tokenizer(folder / "model")
    return export(resolve(str(folder / "model")), folder / "artifact")[0]


@pytest.fixture(scope="package")
def sparse_encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[SparseEncoder, Artifact]:
    """A SPLADE model of sentence-transformers with a prompt for queries, and its artifact."""
    folder = tmp_path_factory.mktemp("sparse")
    save_masked_lm(folder / "model", "bert")
    save_tokenizer(folder / "model")
    encoder = SparseEncoder(str(folder / "model"), device="cpu", prompts={"query": "w9 w10 "})
    encoder.save(str(folder / "saved"))
    return encoder, export(resolve(str(folder / "saved")), folder / "artifact")[0]


@pytest.fixture(scope="package")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A BERT with five labels for tokens."""
    folder = tmp_path_factory.mktemp("tagger")
    save_token_classifier(folder / "model", "bert", 5, id2label=dict(enumerate(TAGS)))
    save_tokenizer(folder / "model")
    return export(resolve(str(folder / "model")), folder / "artifact")[0]


@pytest.fixture(scope="package")
def tag_client(tagger: Artifact) -> Iterator[TestClient]:
    yield from _client_of(tagger)


@pytest.fixture(scope="package")
def sparse_client(sparse_encoder: tuple[SparseEncoder, Artifact]) -> Iterator[TestClient]:
    yield from _client_of(sparse_encoder[1])


@pytest.fixture(scope="package")
def multi_encoder(
    small_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[MultiVectorEncoder, Artifact]:
    """A multi-vector model of sentence-transformers that expands queries, and its artifact."""
    folder = tmp_path_factory.mktemp("multi")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / "model").mkdir(exist_ok=True)
        shutil.copy(small_folder / name, folder / "model")
    encoder = save_multi_vector(
        folder / "saved",
        folder / "model",
        mask={"skiplist_words": list(string.punctuation)},
        prompts={"query": "[Q] ", "document": "[D] "},
        document_length=20,
        query_expansion={"strategy": "fixed", "length": 16},
    )
    return encoder, export(resolve(str(folder / "saved")), folder / "artifact")[0]


@pytest.fixture(scope="package")
def multi_client(multi_encoder: tuple[MultiVectorEncoder, Artifact]) -> Iterator[TestClient]:
    yield from _client_of(multi_encoder[1])


@pytest.fixture(scope="package")
def rerank_client(reranker: Artifact) -> Iterator[TestClient]:
    yield from _client_of(reranker)


@pytest.fixture(scope="package")
def classify_client(classifier: Artifact) -> Iterator[TestClient]:
    yield from _client_of(classifier)


def _client_of(artifact: Artifact) -> Iterator[TestClient]:
    settings = Settings(
        model=ModelSettings(path=artifact.path),
        engine=EngineSettings(threads=1),
        limits=LimitSettings(max_inputs=8),
        debug=DebugSettings(enabled=True, hosts=("testserver",), device="cpu"),
    )
    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
        yield client
