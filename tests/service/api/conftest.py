"""Small rerankers and classifiers, and clients of services with them."""

import json
import shutil
import string
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

import pytest
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SparseEncoder
from starlette.testclient import TestClient

import vitrine
from models.artifact import Artifact
from models.export.exporter import export
from models.export.sources import resolve
from tests.conftest import Export
from tests.models.checkpoints import (
    QUERY_MODULE,
    edit_json,
    save_classifier,
    save_inference_free,
    save_masked_lm,
    save_multi_vector,
    save_token_classifier,
    save_tokenizer,
    write_json,
)
from tests.models.gliner import save_gliner
from tests.service.debug.held_worker import NO_FILE, held_workers
from tests.serving import process, served, url_of

LABELS = ["sad", "neutral", "happy"]
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


@pytest.fixture(scope="session")
def reranker(exported: Export) -> Artifact:
    """A BERT with one label; sentence-transformers loads it from the folder `saved` beside it."""

    def write(out: Path) -> None:
        model, saved = out.with_name("model"), out.with_name("saved")
        save_classifier(model, "bert", 1)
        save_tokenizer(model)
        names = ["input_ids", "token_type_ids", "attention_mask"]
        edit_json(model / "tokenizer_config.json", model_input_names=names)
        CrossEncoder(str(model), device="cpu").save(str(saved))
        export(resolve(str(saved)), out)

    return exported("reranker", write)


@pytest.fixture(scope="session")
def cross_encoder(reranker: Artifact) -> CrossEncoder:
    """The reranker as loaded by sentence-transformers."""
    return CrossEncoder(str(reranker.path.with_name("saved")), device="cpu")


def _write(save: Callable[[Path], object], out: Path) -> None:
    """Export a model that the function saves, with a small tokenizer."""
    model = out.with_name("model")
    save(model)
    save_tokenizer(model)
    export(resolve(str(model)), out)


@pytest.fixture(scope="session")
def classifier(exported: Export) -> Artifact:
    """A RoBERTa with three labels."""
    id2label = dict(enumerate(LABELS))
    save = partial(save_classifier, family="roberta", labels=3, id2label=id2label)
    return exported("classifier", partial(_write, save))


@pytest.fixture(scope="session")
def entailment(exported: Export) -> Artifact:
    """A BERT with the labels of natural language inference."""
    id2label = dict(enumerate(("entailment", "neutral", "contradiction")))
    label2id = {label: index for index, label in id2label.items()}
    save = partial(save_classifier, family="bert", labels=3, id2label=id2label, label2id=label2id)
    return exported("entailment", partial(_write, save))


@pytest.fixture(scope="session")
def sparse_encoder(exported: Export) -> tuple[SparseEncoder, Artifact]:
    """A SPLADE model of sentence-transformers with a prompt for queries, and its artifact."""

    def write(out: Path) -> None:
        model, saved = out.with_name("model"), out.with_name("saved")
        save_masked_lm(model, "bert")
        save_tokenizer(model)
        encoder = SparseEncoder(str(model), device="cpu", prompts={"query": "w9 w10 "})
        encoder.save(str(saved))
        export(resolve(str(saved)), out)

    artifact = exported("sparse-encoder", write)
    return SparseEncoder(str(artifact.path.with_name("saved")), device="cpu"), artifact


@pytest.fixture(scope="session")
def inference_free(exported: Export, minilm_folder: Path) -> tuple[SparseEncoder, Artifact]:
    """A sparse model that looks up the weights of queries, and its artifact.

    The tokenizer is the default model's, with the most frequent words alone.
    Queries have up to 16 tokens, and documents up to 24.
    """

    def write(out: Path) -> None:
        model, saved = out.with_name("model"), out.with_name("saved")
        save_masked_lm(model, "bert", vocab_size=5000)
        shutil.copy(minilm_folder / "tokenizer_config.json", model)
        edit_json(model / "tokenizer_config.json", model_max_length=24)
        content = json.loads((minilm_folder / "tokenizer.json").read_text())
        words = content["model"]["vocab"]
        content["model"]["vocab"] = {token: i for token, i in words.items() if i < 5000}
        write_json(model / "tokenizer.json", content)
        prompts = {"query": "what is ", "document": "text: ", "title": "title: "}
        save_inference_free(saved, model, prompts=prompts)
        edit_json(saved / QUERY_MODULE / "tokenizer_config.json", model_max_length=16)
        export(resolve(str(saved)), out)

    artifact = exported("inference-free", write)
    return SparseEncoder(str(artifact.path.with_name("saved")), device="cpu"), artifact


@pytest.fixture(scope="session")
def tagger(exported: Export) -> Artifact:
    """A BERT with five labels for tokens."""
    save = partial(save_token_classifier, family="bert", labels=5, id2label=dict(enumerate(TAGS)))
    return exported("tagger", partial(_write, save))


@pytest.fixture(scope="session")
def entity_finder(exported: Export) -> Artifact:
    """A GLiNER model, which `save_gliner` of `tests.models.gliner` gives again."""

    def write(out: Path) -> None:
        model = out.with_name("model")
        save_gliner(model, "distilbert")
        export(resolve(str(model)), out)

    return exported("entity_finder", write)


@pytest.fixture(scope="session")
def multi_encoder(exported: Export, small_folder: Path) -> tuple[MultiVectorEncoder, Artifact]:
    """A multi-vector model of sentence-transformers that expands queries, and its artifact."""

    def write(out: Path) -> None:
        model, saved = out.with_name("model"), out.with_name("saved")
        model.mkdir(parents=True)
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(small_folder / name, model)
        save_multi_vector(
            saved,
            model,
            mask={"skiplist_words": list(string.punctuation)},
            prompts={"query": "[Q] ", "document": "[D] "},
            document_length=20,
            query_expansion={"strategy": "fixed", "length": 16},
        )
        export(resolve(str(saved)), out)

    artifact = exported("multi-encoder", write)
    return MultiVectorEncoder(str(artifact.path.with_name("saved")), device="cpu"), artifact


@pytest.fixture(scope="package")
def tag_client(tagger: Artifact) -> Iterator[TestClient]:
    yield from client_of(tagger)


@pytest.fixture(scope="package")
def entity_client(entity_finder: Artifact) -> Iterator[TestClient]:
    yield from client_of(entity_finder)


@pytest.fixture(scope="package")
def sparse_client(sparse_encoder: tuple[SparseEncoder, Artifact]) -> Iterator[TestClient]:
    yield from client_of(sparse_encoder[1])


@pytest.fixture(scope="package")
def inference_free_client(inference_free: tuple[SparseEncoder, Artifact]) -> Iterator[TestClient]:
    yield from client_of(inference_free[1])


@pytest.fixture(scope="package")
def multi_client(multi_encoder: tuple[MultiVectorEncoder, Artifact]) -> Iterator[TestClient]:
    yield from client_of(multi_encoder[1])


@pytest.fixture(scope="package")
def rerank_client(reranker: Artifact) -> Iterator[TestClient]:
    yield from client_of(reranker)


@pytest.fixture(scope="package")
def classify_client(classifier: Artifact) -> Iterator[TestClient]:
    yield from client_of(classifier)


# Starts the service with time for clients that are slow to send the rest of a refused body.
PATIENT = """
import sys
from service.serve_command import main
from service.api import http_protocol
http_protocol._LINGER_S = 3600
sys.exit(main())
"""


# Arguments of `process`: in place of `-m service`, and environment variables.
Start = Callable[..., AbstractContextManager[subprocess.Popen[str]]]


@pytest.fixture
def start(small_artifact: Artifact) -> Start:
    """Run a service of the small model in a process of its own, until the block ends."""
    return partial(process, VITRINE_MODEL__PATH=str(small_artifact.path))


@pytest.fixture(scope="package")
def url(small_artifact: Artifact) -> Iterator[str]:
    """The URL of a service in a process of its own, as the host x too."""
    settings = {
        "VITRINE_MODEL__PATH": str(small_artifact.path),
        "VITRINE_SERVER__HOSTS": "x,127.0.0.1,[::1]",
    }
    with process("-c", PATIENT, **settings) as started:
        yield url_of(started)


def client_of(artifact: Artifact) -> Iterator[TestClient]:
    """Yield a client of a service with the model and all gradient routes."""
    debug = {"enabled": True, "hosts": ["testserver"], "device": "cpu"}
    limits = {"max_inputs": 8}
    with held_workers(Path(NO_FILE)), served(artifact.path, limits=limits, debug=debug) as client:
        yield client


@pytest.fixture(scope="module")
def models(
    small_artifact: Artifact,
    classifier: Artifact,
    reranker: Artifact,
    tagger: Artifact,
    sparse_encoder: tuple[SparseEncoder, Artifact],
    multi_encoder: tuple[MultiVectorEncoder, Artifact],
) -> Iterator[dict[str, vitrine.SyncModel]]:
    """A model of each kind, by kind."""
    artifacts = {
        "dense": small_artifact,
        "classifier": classifier,
        "reranker": reranker,
        "tagger": tagger,
        "sparse": sparse_encoder[1],
        "multi": multi_encoder[1],
    }
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                vitrine.SyncModel(artifact.path, vitrine.ModelOptions(threads=1))
            )
            for name, artifact in artifacts.items()
        }
