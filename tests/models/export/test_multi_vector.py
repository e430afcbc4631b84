"""Export of multi-vector models, against sentence-transformers' MultiVectorEncoder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from tokenizers import Tokenizer

from models.artifact import Artifact
from models.engines import open_engine
from models.export.checkpoint import load
from models.export.exporter import export
from models.export.model_folder import CheckpointError
from models.export.sentence_config import Overrides, overrides_of
from models.export.sources import resolve
from models.export.token_rules import token_rules
from models.packing import pack
from tests.models.checkpoints import (
    CONFIGS,
    SHALLOW,
    edit_json,
    edit_tensors,
    save_checkpoint,
    save_multi_vector,
    save_tokenizer,
    write_json,
    write_modules,
)

pytestmark = pytest.mark.slow

EXPANSION = {"strategy": "fixed", "attend": False, "length": 16, "token": "w9"}
# Queries and their tokens before expansion.
QUERIES = {"w5 w6 w7": [0, 5, 6, 7, 2], "w21": [0, 21, 2], "w8 w15 w33": [0, 8, 15, 33, 2]}


def save_model(
    folder: Path,
    family: str = "bert",
    *,
    is_shallow: bool = False,
    **settings: Any,  # noqa: ANN401
) -> MultiVectorEncoder:
    """Save a model to `folder/saved` and return it."""
    # Windows reach across an expanded query.
    windows = dict.fromkeys(("gemma3_text", "mistral"), "sliding_window")
    windows["modernbert"] = "local_attention"
    changes: dict[str, object] = {windows[family]: 40} if family in windows else {}
    changes |= SHALLOW[family] if is_shallow else {}
    save_checkpoint(folder / "model", family, **changes)
    save_tokenizer(folder / "model")
    edit_json(folder / "model" / "tokenizer_config.json", padding_side="right")
    return save_multi_vector(folder / "saved", folder / "model", **settings)


def units(vectors: Any) -> Any:  # noqa: ANN401
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("attend", [False, True])
# For qwen2, transformers replaces the class of this tokenizer by one that splits bytes.
@pytest.mark.parametrize("family", sorted(CONFIGS.keys() - {"deberta-v2", "qwen2"}))
def test_expanded_queries_of_every_family_equal_those_of_sentence_transformers(
    tmp_path: Path, family: str, attend: bool
) -> None:
    oracle = save_model(tmp_path, family, query_expansion={**EXPANSION, "attend": attend})
    model, config = load(tmp_path / "saved")
    assert (model.outputs, model.width, config.normalize) == (("multi",), 12, True)
    for text, ids in QUERIES.items():
        added = 16 - len(ids)
        row = torch.tensor([ids + [9] * added])
        mask = torch.tensor([[1.0] * len(ids) + [float(attend)] * added])
        with torch.no_grad():
            actual = units(model(row, mask, mask)[0].numpy())
        expected = oracle.encode_query(text, convert_to_numpy=True)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_attention_to_added_tokens_changes_vectors(tmp_path: Path) -> None:
    vectors = [
        save_model(
            tmp_path / str(attend), query_expansion={**EXPANSION, "attend": attend}
        ).encode_query("w5 w6 w7", convert_to_numpy=True)
        for attend in (False, True)
    ]
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01  # otherwise the tests above show nothing


@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "mpnet"])
def test_graphs_equal_the_encoder_of_sentence_transformers(tmp_path: Path, family: str) -> None:
    options = {"bias": family == "mpnet", "use_residual": family == "modernbert"}
    oracle = save_model(tmp_path, family, is_shallow=True, query_expansion=EXPANSION, **options)
    artifact, parity = export(resolve(str(tmp_path / "saved")), tmp_path / "artifact")
    assert artifact.manifest.outputs == ("multi",)
    assert {line.case for line in parity} >= {"each row alone", "in batches"}
    queries = oracle.encode_query(list(QUERIES), convert_to_numpy=True)
    document = " ".join(f"w{i}" for i in range(4, 24))
    expected = [*queries, oracle.encode_document(document, convert_to_numpy=True)]
    rows = [ids + [9] * (16 - len(ids)) for ids in QUERIES.values()]
    unattended = [16 - len(ids) for ids in QUERIES.values()]
    rows.append(oracle.tokenizer(document)["input_ids"])
    unattended.append(0)
    for engine in ("onnxruntime", "openvino"):
        opened = open_engine(artifact, engine, "float32")
        together = opened.run(pack(rows, unattended=unattended), "multi")
        alone = [
            opened.run(pack([row], unattended=[count]), "multi")
            for row, count in zip(rows, unattended, strict=True)
        ]
        for actual in (together, np.concatenate(alone)):
            np.testing.assert_allclose(
                units(actual), np.concatenate(expected), rtol=1e-4, atol=1e-5
            )


def test_source_of_an_artifact_is_the_model_of_its_graphs(tmp_path: Path) -> None:
    save_model(tmp_path, is_shallow=True, query_expansion=EXPANSION)
    artifact, _ = export(resolve(str(tmp_path / "saved")), tmp_path / "artifact")
    model, config = load(artifact.path / "source", overrides_of(artifact))
    assert config.multi is not None
    tokenizer = Tokenizer.from_file(str(artifact.path / "tokenizer.json"))
    manifest = Artifact.load(artifact.path).manifest
    rules = token_rules(config.multi, tokenizer, manifest.max_tokens, model.encoder.config)
    assert manifest.token_rules == rules
    row = torch.tensor([[0, 5, 6, 2]])
    actual = open_engine(artifact, "onnxruntime", "float32").run(pack(row.tolist()), "multi")
    expected = model(row, torch.ones(1, 4), torch.ones(1, 4))[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def save_stanford(folder: Path, **metadata: object) -> None:
    """Save a checkpoint of Stanford's ColBERT."""
    save_checkpoint(folder, "bert")
    save_tokenizer(folder)
    edit_json(folder / "tokenizer_config.json", mask_token="w9", unk_token="[UNK]")  # noqa: S106
    edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    torch.manual_seed(1)
    tensors["linear.weight"] = torch.randn(12, 32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "artifact.metadata", {"query_maxlen": 10, "doc_maxlen": 20, **metadata})


def save_pylate(folder: Path, **config: object) -> None:
    """Save a model as PyLate 3 does."""
    save_model(folder)
    saved = folder / "saved"
    modules = json.loads((saved / "modules.json").read_text())[:2]
    modules[1]["type"] = "pylate.models.Dense.Dense"
    write_json(saved / "modules.json", modules)
    dense = json.loads((saved / modules[1]["path"] / "config.json").read_text())
    del dense["module_input_name"], dense["module_output_name"]
    write_json(saved / modules[1]["path"] / "config.json", dense)
    edit_json(saved / "tokenizer_config.json", mask_token="w9", unk_token="[UNK]")  # noqa: S106
    own = {"model_type": "ColBERT", "query_prefix": "w30 ", "document_prefix": "w31 "}
    write_json(saved / "config_sentence_transformers.json", {**own, **config})


@pytest.mark.parametrize("save", [save_stanford, save_pylate])
def test_hub_model_of_an_older_layout_has_all_its_settings(
    tmp_path: Path, save: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    save(folder)
    folder = folder / "saved" if save is save_pylate else folder
    downloads = tmp_path / "downloads"

    def download(*_: object, allow_patterns: list[str], **__: object) -> str:
        for pattern in allow_patterns:
            for file in folder.rglob(pattern):
                target = downloads / file.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        return str(downloads)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.get_cached_repo_tree", lambda *_, **__: [])
    assert load(resolve("someone/colbert").folder)[1].multi == load(folder)[1].multi


@pytest.mark.parametrize("save", [save_stanford, save_pylate])
def test_older_layouts_have_the_vectors_of_sentence_transformers(
    tmp_path: Path, save: Callable[[Path], None]
) -> None:
    save(tmp_path)
    folder = tmp_path / "saved" if save is save_pylate else tmp_path
    oracle = MultiVectorEncoder(str(folder), device="cpu")
    expected = oracle.encode_query("w5 w6", convert_to_numpy=True)
    features = oracle.preprocess(["w5 w6"], prompt=oracle.prompts["query"], task="query")
    model, config = load(folder)
    assert config.normalize
    mask = features["attention_mask"].float()
    with torch.no_grad():
        actual = units(model(features["input_ids"], mask, mask)[0].numpy())
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def with_module(kind: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        modules = json.loads((folder / "modules.json").read_text())
        modules.append(
            {"idx": 4, "name": "4", "path": "4", "type": f"sentence_transformers.{kind}"}
        )
        write_json(folder / "modules.json", modules)

    return change


def with_pooling(**config: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with_module("multi_vector_encoder.modules.HierarchicalTokenPooling")(folder)
        if config:
            write_json(folder / "4" / "config.json", config)

    return change


def with_setting(**values: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "sentence_bert_config.json", **values)


def with_expansion(**values: object) -> Callable[[Path], None]:
    return with_setting(query_expansion={**EXPANSION, **values})


def with_json(name: str, **values: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / name, **values)


def from_the_left(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", padding_side="left")
    with_expansion()(folder)


def dense_only(folder: Path) -> None:
    write_modules(folder, ("Transformer", ""), ("Dense", "1_Dense"))
    edit_json(folder / "config_sentence_transformers.json", model_type="SentenceTransformer")


def of_another_package(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "pylate.models.Other.Dense"
    write_json(folder / "modules.json", modules)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_module("multi_vector_encoder.modules.LambdaTokenPooling"), "LambdaTokenPooling"),
        (with_pooling(), "has no 4/config.json"),
        (with_pooling(pool_factor=0.5), "pool_factor has the invalid value 0.5"),
        (with_pooling(pool_factor="2"), "pool_factor has the invalid value '2'"),
        (with_pooling(num_protected_tokens=-1), "num_protected_tokens has the invalid value -1"),
        (with_pooling(normalize_embeddings=None), "normalize_embeddings has the invalid value"),
        (with_pooling(tasks="document"), "tasks has the invalid value 'document'"),
        (with_pooling(tasks=["passage"]), "tasks has the unknown task 'passage'"),
        (with_pooling(linkage="average"), "linkage is not supported"),
        (with_module("base.modules.Dense"), "MultiVectorMask -> Normalize -> Dense; supported"),
        (dense_only, "lists Transformer -> Dense; supported"),
        (of_another_package, r"pylate\.models\.Other\.Dense; code from outside"),
        (with_json("1_Dense/config.json", use_residual=True), r"lacks the tensor residual\.weight"),
        (
            with_json("1_Dense/config.json", module_input_name="sentence_embedding"),
            "module_input_name is 'sentence_embedding'; only 'token_embeddings'",
        ),
        (with_json("1_Dense/config.json", in_features=31), r"the config requires shape \(12, 31\)"),
        (with_json("2_MultiVectorMask/config.json", other=1), "other is not supported"),
        (
            with_json("2_MultiVectorMask/config.json", skiplist_tasks=["passage"]),
            "skiplist_tasks has the unknown task 'passage'",
        ),
        (
            with_json("2_MultiVectorMask/config.json", keep_only_token_ids=["w5"]),
            "keep_only_token_ids has the invalid value",
        ),
        (
            with_json("3_Normalize/config.json", module_input_name="sentence_embedding"),
            "module_input_name is 'sentence_embedding'",
        ),
        (
            with_json("config_sentence_transformers.json", similarity_fn_name="meanmaxsim"),
            "similarity_fn_name is 'meanmaxsim'",
        ),
        (
            with_json("config_sentence_transformers.json", model_type="ColBERT"),
            "model_type is 'ColBERT'; only 'MultiVectorEncoder'",
        ),
        (with_setting(query_length=0), "query_length has the invalid value 0"),
        (with_setting(document_length="all"), "document_length has the invalid value 'all'"),
        (with_setting(document_length=41), "a document is 41 tokens; it must be between 3 and"),
        (with_setting(query_length=8, query_expansion=EXPANSION), "needs at least 16"),
        (with_expansion(length=41), "a query is 41 tokens; it must be between 3 and"),
        (with_expansion(length=None), "query_expansion has no length"),
        (with_expansion(strategy="all"), "strategy is 'all'"),
        (with_expansion(attend="no"), "attend has the invalid value 'no'"),
        (with_expansion(times=2), "with the fields attend, length, strategy, token"),
        (with_expansion(token=None), "neither a mask_token nor an eos_token"),
        (with_expansion(token="w99"), "the vocabulary lacks the token 'w99'"),  # noqa: S106
        (from_the_left, "padding_side is 'left'"),
    ],
)
def test_unsupported_settings_are_named(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    save_model(tmp_path)
    change(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=message):
        rules_of(tmp_path / "saved")


def test_model_that_sentence_transformers_would_normalize_without_model_type_is_refused(
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path / "model", "bert")
    save_tokenizer(tmp_path / "model")
    oracle = save_multi_vector(tmp_path / "saved", tmp_path / "model", normalize=False)
    (tmp_path / "saved" / "config_sentence_transformers.json").unlink()
    other = MultiVectorEncoder(str(tmp_path / "saved"), device="cpu")
    assert not np.allclose(other.encode("w5"), oracle.encode("w5"))
    with pytest.raises(CheckpointError, match="model_type is null or missing; set it to 'Multi"):
        load(tmp_path / "saved")


def rules_of(folder: Path, overrides: Overrides | None = None) -> Any:  # noqa: ANN401
    model, config = load(folder, overrides or Overrides())
    assert config.multi is not None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return token_rules(config.multi, tokenizer, config.max_tokens, model.encoder.config)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("deberta-v2", "without attend is not supported for DeBERTa"),
        ("modernbert", "has the length 16; the model's attention window supports up to 5"),
    ],
)
def test_attention_that_needs_attended_tokens_is_refused(
    tmp_path: Path, family: str, message: str
) -> None:
    save_checkpoint(tmp_path / "model", family)
    save_tokenizer(tmp_path / "model")
    save_multi_vector(tmp_path / "saved", tmp_path / "model", query_expansion=EXPANSION)
    with pytest.raises(CheckpointError, match=message):
        rules_of(tmp_path / "saved")
    attending = {**EXPANSION, "attend": True}
    edit_json(tmp_path / "saved" / "sentence_bert_config.json", query_expansion=attending)
    assert rules_of(tmp_path / "saved")["query"].min_tokens == 16


def test_lengths_are_limited_by_the_override(tmp_path: Path) -> None:
    expansion = {**EXPANSION, "strategy": "min"}
    save_model(tmp_path, query_expansion=expansion, query_length=20)
    lengths = {name: rules.max_tokens for name, rules in rules_of(tmp_path / "saved").items()}
    assert lengths == {"query": 20, "document": 24, "": 24}
    limited = rules_of(tmp_path / "saved", Overrides(max_tokens=18))
    assert {rules.max_tokens for rules in limited.values()} == {18}
    with pytest.raises(CheckpointError, match="is 15 tokens; query_expansion needs at least 16"):
        rules_of(tmp_path / "saved", Overrides(max_tokens=15))


def test_prompt_that_leaves_no_room_for_a_query_is_refused(tmp_path: Path) -> None:
    oracle = save_model(tmp_path, query_expansion=EXPANSION, prompts={"query": "w5 " * 14})
    first, second = oracle.encode_query(["w7", "w9 w40"])
    assert np.array_equal(first, second)
    message = "the prompt 'query' leaves no room for a text within 16 tokens"
    with pytest.raises(CheckpointError, match=message):
        export(resolve(str(tmp_path / "saved")), tmp_path / "artifact")


@pytest.mark.parametrize("overrides", [{"pooling": ["cls"]}, {"normalize": False}])
def test_settings_of_embeddings_are_refused(tmp_path: Path, overrides: dict[str, Any]) -> None:
    save_model(tmp_path)
    with pytest.raises(CheckpointError, match="the model computes no pooled embeddings"):
        load(tmp_path / "saved", Overrides(**overrides))


def test_unknown_similarity_of_stanford_is_refused(tmp_path: Path) -> None:
    save_stanford(tmp_path, similarity="l2")
    with pytest.raises(CheckpointError, match="similarity is 'l2'; only 'cosine' is supported"):
        load(tmp_path)


def test_missing_projection_is_named(tmp_path: Path) -> None:
    save_stanford(tmp_path)
    for weight in (None, torch.ones(0, 32)):
        edit_tensors(tmp_path, **{"linear.weight": weight})
        with pytest.raises(CheckpointError, match=r"lacks the matrix linear\.weight"):
            load(tmp_path)
