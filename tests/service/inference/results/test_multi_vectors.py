"""Queries, documents and scores of multi-vector models, against sentence-transformers."""

import json
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder

import vitrine
from models.artifact import Artifact
from models.export import exporter
from models.export.checkpoint import load
from models.export.onnx_graph import trace
from models.export.sources import resolve
from tests.models.checkpoints import edit_json, save_multi_vector, write_json

pytestmark = pytest.mark.slow

TEXTS = [
    "Where did the cat sit?",
    "cat",
    "The cat (a tabby, 7 years old) sat on the mat -- and it slept!",
    "... [MASK] [unused0] :-)",
    "one two three four five six seven eight nine ten eleven twelve " * 5,
]
QUERIES = ["Where did the cat sit?", "rain", "Who sleeps on a mat, and why? " * 4]

Reexport = Callable[[Path], Artifact]


@pytest.fixture(scope="module")
def encoder(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small model's encoder and tokenizer."""
    folder = tmp_path_factory.mktemp("encoder")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small_folder / name, folder)
    return folder


@pytest.fixture(scope="module")
def graph(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> ir.Model:
    """The graph of all models here: their weights are equal."""
    folder = tmp_path_factory.mktemp("graph")
    save_multi_vector(folder, encoder)
    return trace(load(folder)[0], "cpu")


@pytest.fixture
def reexport(graph: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reexport:
    """Export a model with the graph that is already traced."""
    monkeypatch.setattr(exporter, "trace", lambda *_: graph.clone())
    monkeypatch.setattr(exporter, "reference_cases", lambda *_: [])
    monkeypatch.setattr(exporter, "measure_parity", lambda *_: [])

    def export(folder: Path) -> Artifact:
        return exporter.export(resolve(str(folder)), tmp_path / "artifact")[0]

    return export


def assert_equal(
    oracle: MultiVectorEncoder,
    artifact: Artifact,
    engine: str = "onnxruntime",
    texts: list[str] = TEXTS,
) -> None:
    """Compare queries, documents, other texts, scores and rankings."""
    options = vitrine.ModelOptions(engine=engine, threads=2)
    with vitrine.SyncModel(artifact.path, options) as model:
        for name, encode in (
            ("query", oracle.encode_query),
            ("document", oracle.encode_document),
            (None, oracle.encode),
        ):
            expected = dict(zip(texts, encode(texts, convert_to_numpy=True), strict=True))
            for batch in (texts, texts[::-1], *([text] for text in texts)):
                actual = model.encode_multi(batch, prompt_name=name)
                for text, vectors in zip(batch, actual.vectors, strict=True):
                    assert vectors.shape == expected[text].shape, (name, text)
                    np.testing.assert_allclose(vectors, expected[text], rtol=1e-4, atol=1e-5)
                if actual.clusters is None:
                    assert list(map(len, actual.ids)) == list(map(len, actual.vectors))
        similarity = oracle.similarity(
            oracle.encode_query(QUERIES), oracle.encode_document(texts)
        ).numpy()
        for query, own in zip(QUERIES, similarity, strict=True):
            result = model.score(query, texts)
            assert result.kind == "maxsim"
            np.testing.assert_allclose(result.scores, own, rtol=1e-4)
            assert np.argsort(-result.scores).tolist() == np.argsort(-own).tolist()
        pairs = model.score(QUERIES, texts[: len(QUERIES)])
        np.testing.assert_allclose(pairs.scores, similarity[range(3), range(3)], rtol=1e-4)


PROMPTS = {"query": "[Q] ", "document": "[D] "}
PUNCTUATION = list(string.punctuation)


@pytest.mark.parametrize("attend", [False, True])
@pytest.mark.parametrize(
    ("engine", "strategy"),
    [("onnxruntime", "fixed"), ("onnxruntime", "min"), ("openvino", "fixed")],
)
def test_expanded_queries(
    encoder: Path, tmp_path: Path, reexport: Reexport, engine: str, strategy: str, attend: bool
) -> None:
    expansion = {"strategy": strategy, "attend": attend, "length": 16}
    oracle = save_multi_vector(
        tmp_path / "model",
        encoder,
        prompts=PROMPTS,
        query_expansion=expansion,
        document_length=20,
        mask={"skiplist_words": PUNCTUATION},
    )
    assert_equal(oracle, reexport(tmp_path / "model"), engine)


@pytest.mark.parametrize(
    "settings",
    [
        {"query_length": 7, "document_length": 9},
        {"query_length": 40, "query_expansion": {"strategy": "min", "length": 12}},
        {"query_expansion": {"strategy": "fixed", "length": 12, "token": "[PAD]"}},
        {"query_expansion": {"strategy": "fixed", "length": 12, "token": "!"}},
        {"mask": {"skiplist_words": ["!", ",", "no-such-word"]}},
        {"mask": {"skiplist_words": PUNCTUATION, "skiplist_tasks": ["query", "document"]}},
        {"mask": {"skiplist_words": PUNCTUATION, "skiplist_tasks": "query"}},
        {"mask": {"skiplist_words": ["[CLS]", "[SEP]", "[MASK]"]}},
        {"mask": {"keep_only_token_ids": [101, 1996, 4937, 2028]}},
        {"normalize": False},
        {"prompts": {"query": "query: ", "document": "", "other": "x"}},
    ],
    ids=str,
)
def test_lengths_and_masks(
    encoder: Path, tmp_path: Path, reexport: Reexport, settings: dict[str, Any]
) -> None:
    oracle = save_multi_vector(tmp_path / "model", encoder, **{"prompts": PROMPTS, **settings})
    assert_equal(oracle, reexport(tmp_path / "model"))


def test_default_prompt_has_the_rules_of_other_texts(
    encoder: Path, tmp_path: Path, reexport: Reexport
) -> None:
    expansion = {"strategy": "fixed", "length": 12}
    save_multi_vector(tmp_path / "model", encoder, prompts=PROMPTS, query_expansion=expansion)
    edit_json(tmp_path / "model/config_sentence_transformers.json", default_prompt_name="query")
    oracle = MultiVectorEncoder(str(tmp_path / "model"), device="cpu")
    assert_equal(oracle, reexport(tmp_path / "model"))


def test_left_truncation(encoder: Path, tmp_path: Path, reexport: Reexport) -> None:
    save_multi_vector(tmp_path / "model", encoder, query_length=7, document_length=9)
    edit_json(tmp_path / "model" / "tokenizer_config.json", truncation_side="left")
    oracle = MultiVectorEncoder(str(tmp_path / "model"), device="cpu")
    assert_equal(oracle, reexport(tmp_path / "model"))


def as_pylate(folder: Path, **config: object) -> None:
    """Rewrite a model of sentence-transformers as PyLate saves it."""
    modules = json.loads((folder / "modules.json").read_text())[:2]
    modules[1]["type"] = "pylate.models.Dense.Dense"
    write_json(folder / "modules.json", modules)
    dense = json.loads((folder / "1_Dense" / "config.json").read_text())
    del dense["module_input_name"], dense["module_output_name"]
    write_json(folder / "1_Dense" / "config.json", dense)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 23, "do_lower_case": False})
    write_json(folder / "config_sentence_transformers.json", config)


def add_token(folder: Path, token: str) -> None:
    """Turn an unused entry of the vocabulary into an added token, as PyLate does."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    index = vocabulary.pop(next(name for name in vocabulary if name.startswith("[unused")))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    content["added_tokens"].append({"id": index, "content": token, "normalized": True, **flags})
    content["added_tokens"].sort(key=lambda added: added["id"])
    write_json(folder / "tokenizer.json", content)


PREFIXES = {"query_prefix": "[Q] ", "document_prefix": "[D] "}


@pytest.mark.parametrize(
    ("config", "has_markers"),
    [
        ({"model_type": "ColBERT", **PREFIXES}, False),
        ({"model_type": "ColBERT", **PREFIXES}, True),
        ({**PREFIXES, "query_length": 12}, True),
        (
            {
                "model_type": "ColBERT",
                "query_prefix": "[unused5] ",
                "document_prefix": "[unused6]",
                "query_length": 12,
                "document_length": 14,
                "attend_to_expansion_tokens": True,
                "skiplist_words": ["!", "?"],
                "similarity_fn_name": "MaxSim",
                "prompts": {"query": "find ", "document": None},
            },
            False,
        ),
        ({"model_type": "ColBERT", "do_query_expansion": False, "query_length": 9}, False),
        ({"model_type": "ColBERT"}, False),
        ({"model_type": "ColBERT"}, True),
        ({"model_type": "ColBERT", "query_expansion": None, "query_prefix": None}, True),
    ],
    ids=str,
)
def test_folders_of_pylate(
    encoder: Path,
    tmp_path: Path,
    reexport: Reexport,
    config: dict[str, Any],
    has_markers: bool,
) -> None:
    save_multi_vector(tmp_path / "model", encoder)
    as_pylate(tmp_path / "model", **config)
    if has_markers:
        add_token(tmp_path / "model", "[Q] ")
        add_token(tmp_path / "model", "[D] ")
    oracle = MultiVectorEncoder(str(tmp_path / "model"), device="cpu")
    assert_equal(oracle, reexport(tmp_path / "model"))


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"query_maxlen": 12, "doc_maxlen": 14, "mask_punctuation": False},
        {
            "query_token_id": "[unused7]",
            "doc_token_id": "[unused8]",
            "attend_to_mask_tokens": True,
            "similarity": "cosine",
            "dim": 12,
        },
    ],
)
def test_folders_of_stanford(
    encoder: Path, tmp_path: Path, reexport: Reexport, metadata: dict[str, Any] | None
) -> None:
    folder = tmp_path / "model"
    save_multi_vector(tmp_path / "saved", encoder)
    shutil.copytree(encoder, folder)
    tensors = load_file(encoder / "model.safetensors")
    tensors = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    tensors |= load_file(tmp_path / "saved" / "1_Dense" / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    if metadata is not None:
        write_json(folder / "artifact.metadata", metadata)
    oracle = MultiVectorEncoder(str(folder), device="cpu")
    assert_equal(oracle, reexport(folder))


def test_rows_of_token_ids_have_the_rules_but_not_the_prompt(
    encoder: Path, tmp_path: Path, reexport: Reexport
) -> None:
    oracle = save_multi_vector(
        tmp_path / "model",
        encoder,
        prompts=PROMPTS,
        query_expansion={"strategy": "fixed", "length": 8},
        mask={"skiplist_words": PUNCTUATION},
    )
    texts = ["a cat!", "the cat sat on the mat, and it rained"]
    with vitrine.SyncModel(reexport(tmp_path / "model").path) as model:
        for name, encode in (("query", oracle.encode_query), ("document", oracle.encode_document)):
            rows = [oracle.tokenizer(PROMPTS[name] + text)["input_ids"] for text in texts]
            if name == "query":
                rows[1] = [*rows[1][:7], rows[1][-1]]
            actual = model.encode_multi(rows, prompt_name=name)
            for text, vectors in zip(texts, actual.vectors, strict=True):
                expected = encode(text, convert_to_numpy=True)
                np.testing.assert_allclose(vectors, expected, rtol=1e-4, atol=1e-5)
            assert actual.offsets == [None, None]
        (query,) = model.encode_multi(rows[1:], prompt_name="query").rows
        assert (query.truncated, len(query.ids)) == (True, 8)
        with pytest.raises(vitrine.InvalidInput, match="more than 8 tokens"):
            model.encode_multi(rows[1:], prompt_name="query", on_overflow="error")
        with pytest.raises(vitrine.InvalidInput, match="more than 8 tokens"):
            model.encode_multi(texts[1], prompt_name="query", on_overflow="error")


def test_tokens_of_vectors_are_named(encoder: Path, tmp_path: Path, reexport: Reexport) -> None:
    save_multi_vector(
        tmp_path / "model",
        encoder,
        query_expansion={"strategy": "fixed", "length": 8},
        mask={"skiplist_words": PUNCTUATION},
    )
    with vitrine.SyncModel(reexport(tmp_path / "model").path) as model:
        document = model.encode_multi("a cat, asleep", prompt_name="document")
        query = model.encode_multi("a cat", prompt_name="query")
    assert document.offsets == [[None, (0, 1), (2, 5), (7, 13), None]]
    assert document.positions[0].tolist() == [0, 1, 2, 4, 5]
    assert len(document.rows[0].ids) == 6
    assert query.offsets == [[None, (0, 1), (2, 5), *[None] * 5]]
    assert query.ids == [[101, 1037, 4937, 102, *[103] * 4]]
    assert query.rows[0].unattended == 4


@pytest.mark.parametrize(
    "pooling",
    [
        {"pool_factor": 2.0},
        {"pool_factor": 1.5, "num_protected_tokens": 0, "normalize_embeddings": False},
        {"pool_factor": 4.0, "num_protected_tokens": 3, "tasks": ["query", "document"]},
        {"pool_factor": 3.0, "tasks": ["query"]},
        {"pool_factor": 1.0},
    ],
    ids=str,
)
def test_pooled_documents(
    encoder: Path, tmp_path: Path, reexport: Reexport, pooling: dict[str, Any]
) -> None:
    oracle = save_multi_vector(
        tmp_path / "model",
        encoder,
        prompts=PROMPTS,
        pooling=pooling,
        normalize=pooling["pool_factor"] > 1,
        mask={"skiplist_words": PUNCTUATION},
    )
    assert_equal(oracle, reexport(tmp_path / "model"))


def test_pooling_without_a_setting_of_normalisation_does_not_normalise(
    encoder: Path, tmp_path: Path, reexport: Reexport
) -> None:
    folder = tmp_path / "model"
    save_multi_vector(folder, encoder, pooling={"pool_factor": 2.0})
    write_json(folder / "4_HierarchicalTokenPooling" / "config.json", {"pool_factor": 2})
    artifact = reexport(folder)
    assert_equal(MultiVectorEncoder(str(folder), device="cpu"), artifact)
    with vitrine.SyncModel(artifact.path) as model:
        own, unit = (
            model.encode_multi(TEXTS[2], prompt_name="document", normalize=normalize)
            for normalize in (None, True)
        )
    assert np.linalg.norm(own.vectors[0], axis=1).min() < 0.99
    np.testing.assert_allclose(np.linalg.norm(unit.vectors[0], axis=1), 1, atol=1e-6)


def test_pooled_tokens_are_those_of_each_vector(
    encoder: Path, tmp_path: Path, reexport: Reexport
) -> None:
    pooling = {"pool_factor": 2.0, "normalize_embeddings": False}
    save_multi_vector(tmp_path / "pooled", encoder, pooling=pooling)
    artifact = reexport(tmp_path / "pooled")
    with vitrine.SyncModel(artifact.path) as model:
        pooled = model.encode_multi(TEXTS[2], prompt_name="document")
        whole = model.encode_multi(TEXTS[2], prompt_name="query")  # queries are not pooled
        assert pooled.clusters is not None
        assert whole.clusters is None
        assert pooled.ids == whole.ids
        means = [
            whole.vectors[0][pooled.clusters[0] == index].mean(0)
            for index in range(len(pooled.vectors[0]))
        ]
        np.testing.assert_allclose(pooled.vectors[0], means, atol=1e-6)
        assert pooled.clusters[0][0] == 0  # protected
        with pytest.raises(vitrine.InvalidInput, match="vectors of several tokens are pooled"):
            model.score("a cat", TEXTS[:2], explain=vitrine.Terms())
        result = model.score("a cat", TEXTS[:2], explain=vitrine.Deletion(by="words"))
        assert set(result.deletions) == {0, 1}
