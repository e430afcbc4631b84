"""Export of inference-free sparse models, whose queries have weights from a table."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer

from models.artifact import Artifact
from models.export.checkpoint import load
from models.export.exporter import export
from models.export.model_folder import CheckpointError, ModelFolder, source_folder
from models.export.query_table import QueryTable, read_query_table
from models.export.sentence_config import Overrides, overrides_of
from models.export.sources import resolve
from models.export.tokenizer_file import read_tokenizer
from models.manifest import QUERY_WEIGHTS, TokenRules
from tests.models.checkpoints import (
    DOCUMENT_MODULES,
    QUERY_MODULE,
    VOCABULARY,
    edit_json,
    save_checkpoint,
    save_inference_free,
    save_masked_lm,
    save_tokenizer,
    write_json,
    write_modules,
)

TEXTS = ["w5 w6 w7", "w21", "w8 w15 w33 w6 w40 w12"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inference-free")
    save_masked_lm(folder / "model", "distilbert")
    save_tokenizer(folder / "model")
    save_inference_free(folder / "saved", folder / "model")
    return folder / "saved"


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be changed."""
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def table_of(folder: Path, overrides: Overrides = Overrides()) -> QueryTable:  # noqa: B008
    files = ModelFolder(folder)
    model, config = load(files, overrides)
    size = model.encoder.config.vocab_size
    table = read_query_table(files, config, read_tokenizer(files, config, size), size)
    assert table is not None
    return table


def static_weights(encoder: SparseEncoder) -> torch.Tensor:
    weights: torch.Tensor = encoder[0].sub_modules["query"][0].weight.detach()
    return weights


def test_weights_are_those_of_sentence_transformers(saved: Path) -> None:
    encoder = SparseEncoder(str(saved), device="cpu")
    table = table_of(saved)
    torch.testing.assert_close(table.weights, static_weights(encoder), rtol=0, atol=0)
    assert {0.0} < set(table.weights.tolist())


@pytest.mark.slow
def test_artifact_has_the_weights_and_the_network_of_documents(saved: Path, tmp_path: Path) -> None:
    oracle = SparseEncoder(str(saved), device="cpu")
    artifact, parity = export(resolve(str(saved)), tmp_path / "artifact")
    assert parity
    manifest = Artifact.load(artifact.path).manifest
    assert manifest.outputs == ("sparse",)
    assert manifest.token_rules == {
        "query": TokenRules(max_tokens=24, looks_up=True),
        "document": TokenRules(max_tokens=24),
        "": TokenRules(max_tokens=24),
    }
    weights = np.load(artifact.path / QUERY_WEIGHTS, allow_pickle=False)
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights, static_weights(oracle).numpy())

    model, _ = load(source_folder(artifact), overrides_of(artifact))
    expected = oracle.encode_document(TEXTS, convert_to_sparse_tensor=False)
    for text, row in zip(TEXTS, expected, strict=True):
        ids = torch.tensor([oracle.tokenizer(text)["input_ids"]])
        actual = model(ids, torch.ones(ids.shape), torch.ones(ids.shape))[0]
        torch.testing.assert_close(actual, row, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("default_route", "is_lookup"), [("document", False), ("query", True), (None, True)]
)
def test_default_route_is_that_of_sentence_transformers(
    saved: Path, tmp_path: Path, default_route: str | None, is_lookup: bool
) -> None:
    encoder = save_inference_free(
        tmp_path / "saved", saved.parent / "model", default_route=default_route
    )
    rules = table_of(tmp_path / "saved").rules
    assert rules[""] == rules["query" if is_lookup else "document"]
    others = encoder.encode(TEXTS, convert_to_sparse_tensor=False)
    queries = encoder.encode_query(TEXTS, convert_to_sparse_tensor=False)
    assert torch.equal(others, queries) == is_lookup


def test_queries_have_the_maximum_length_of_their_tokenizer(folder: Path) -> None:
    file = folder / QUERY_MODULE / "tokenizer_config.json"
    edit_json(file, model_max_length=12)
    rules = table_of(folder, Overrides(max_tokens=10)).rules
    assert (rules["query"].max_tokens, rules["document"].max_tokens) == (12, 10)
    edit_json(file, model_max_length=int(1e30))
    assert table_of(folder).rules["query"].max_tokens == 2**20
    edit_json(file, model_max_length=None)
    assert table_of(folder).rules["query"].max_tokens == 2**20


@pytest.mark.slow
def test_queries_may_have_no_maximum_length(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / QUERY_MODULE / "tokenizer_config.json", model_max_length=None)
    artifact, _ = export(resolve(str(folder)), tmp_path / "artifact")
    assert Artifact.load(artifact.path).manifest.token_rules["query"].max_tokens == 2**20


def test_weights_in_json_are_those_of_sentence_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(folder / "idf.json", {"w5": 2.5, "w7": 1, "[UNK]": 0.25})
    edit_json(folder / QUERY_MODULE / "config.json", path="idf.json")
    monkeypatch.chdir(folder)  # where sentence-transformers looks for the file
    expected = static_weights(SparseEncoder(str(folder), device="cpu"))
    torch.testing.assert_close(table_of(folder).weights, expected, rtol=0, atol=0)
    assert expected.count_nonzero() == 3
    for token, weight in (("w99", 1.0), ("w5", 10**400), ("w5", 1e308)):
        write_json(folder / "idf.json", {token: weight})
        with pytest.raises(
            CheckpointError, match=rf"idf\.json: '{token}' is not in the vocabulary"
        ):
            table_of(folder)


def test_modules_of_older_versions_are_known(folder: Path) -> None:
    models = "sentence_transformers.sparse_encoder.models"
    renamed = {
        QUERY_MODULE: (QUERY_MODULE, f"{models}.SparseStaticEmbedding"),
        DOCUMENT_MODULES[0]: ("document_0_MLMTransformer", f"{models}.MLMTransformer"),
        DOCUMENT_MODULES[1]: (DOCUMENT_MODULES[1], f"{models}.SpladePooling"),
    }
    for old, (new, _) in renamed.items():
        (folder / old).rename(folder / new)
    query, *document = (name for name, _ in renamed.values())
    config = {
        "types": {name: f"{kind}.{kind.rpartition('.')[2]}" for name, kind in renamed.values()},
        "structure": {"query": [query], "document": document},
        "parameters": {"default_route": "document", "allow_empty_key": True},
    }
    write_json(folder / "router_config.json", config)
    modules = json.loads((folder / "modules.json").read_text())
    write_json(
        folder / "modules.json", [{**modules[0], "type": "sentence_transformers.models.Router"}]
    )
    settings = {"max_seq_length": 20, "do_lower_case": False}
    write_json(folder / "document_0_MLMTransformer" / "sentence_bert_config.json", settings)
    oracle = SparseEncoder(str(folder), device="cpu")
    table = table_of(folder)
    assert (table.rules["query"].max_tokens, table.rules["document"].max_tokens) == (24, 20)
    torch.testing.assert_close(table.weights, static_weights(oracle), rtol=0, atol=0)
    model, _ = load(folder)
    expected = oracle.encode(TEXTS[0], convert_to_sparse_tensor=False)
    ids = torch.tensor([oracle.tokenizer(TEXTS[0])["input_ids"]])
    actual = model(ids, torch.ones(ids.shape), torch.ones(ids.shape))[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_half_precision_weights_become_float32(folder: Path) -> None:
    edit_weights(folder, lambda weight: weight.half())
    weights = static_weights(SparseEncoder(str(folder), device="cpu"))
    torch.testing.assert_close(table_of(folder).weights, weights, rtol=0, atol=0)


def edit_weights(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    file = folder / QUERY_MODULE / "model.safetensors"
    save_file({"weight": change(load_file(file)["weight"])}, file)


def edit_router(folder: Path, field: str, **changes: object) -> None:
    file = folder / "router_config.json"
    config = json.loads(file.read_text())
    edit_json(file, **{field: {**config[field], **changes}})


def with_another_word(folder: Path) -> None:
    file = folder / QUERY_MODULE / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["other"] = content["model"]["vocab"].pop("w50")
    file.write_text(json.dumps(content))


def with_a_lowercase_tokenizer(folder: Path) -> None:
    edit_json(folder / DOCUMENT_MODULES[0] / "sentence_bert_config.json", do_lower_case=True)


def with_left_truncation(folder: Path) -> None:
    edit_json(folder / QUERY_MODULE / "tokenizer_config.json", truncation_side="left")


def with_fewer_weights(folder: Path) -> None:
    edit_weights(folder, lambda weight: weight[:-1].clone())


def with_nan(folder: Path) -> None:
    edit_weights(folder, lambda weight: weight / 0)


def with_weights_beyond_float32(folder: Path) -> None:
    edit_weights(folder, lambda weight: weight.double() * 1e300)


def with_a_bias(folder: Path) -> None:
    file = folder / QUERY_MODULE / "model.safetensors"
    save_file({**load_file(file), "bias": torch.ones(VOCABULARY)}, file)


def without_weights(folder: Path) -> None:
    (folder / QUERY_MODULE / "model.safetensors").unlink()


def with_another_route(folder: Path) -> None:
    edit_router(folder, "structure", title=[QUERY_MODULE])


def with_route_mappings(folder: Path) -> None:
    edit_router(folder, "parameters", route_mappings={"('query', 'text')": "document"})


def without_a_default_route(folder: Path) -> None:
    edit_router(folder, "parameters", default_route=None, allow_empty_key=False)


def with_more_modules_for_queries(folder: Path) -> None:
    edit_router(folder, "structure", query=[QUERY_MODULE, DOCUMENT_MODULES[1]])


def with_a_table_for_documents(folder: Path) -> None:
    edit_router(folder, "structure", document=[QUERY_MODULE])


def with_foreign_code(folder: Path) -> None:
    edit_router(folder, "types", **{QUERY_MODULE: "custom.SparseStaticEmbedding"})


def with_a_path_outside(folder: Path) -> None:
    edit_router(folder, "structure", document=["../model", DOCUMENT_MODULES[1]])
    edit_router(folder, "types", **{"../model": "sentence_transformers.models.Transformer"})


def with_a_module_after_it(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    other = {**modules[0], "path": "1", "type": "sentence_transformers.models.Normalize"}
    (folder / "modules.json").write_text(json.dumps([*modules, other]))


def with_a_limit_of_entries(folder: Path) -> None:
    edit_json(folder / "config_sentence_transformers.json", max_active_dims=8)


def with_an_unknown_parameter(folder: Path) -> None:
    edit_router(folder, "parameters", fallback="query")


def with_an_unknown_field_of_weights(folder: Path) -> None:
    edit_json(folder / QUERY_MODULE / "config.json", scale=2.0)


REFUSED = [
    (with_an_unknown_parameter, r"router_config\.json: fallback is not supported"),
    (with_an_unknown_field_of_weights, rf"{QUERY_MODULE}/config\.json: scale is not supported"),
    (with_another_word, "the tokenizers in .* and .* differ; .* must have the same tokenizer"),
    (with_a_lowercase_tokenizer, "the tokenizers in .* differ"),
    (with_left_truncation, "the tokenizers in .* differ"),
    (with_fewer_weights, rf"have shape \({VOCABULARY - 1},\) .* requires shape \({VOCABULARY},\)"),
    (with_nan, "a weight of queries is not finite"),
    (with_weights_beyond_float32, "a weight of queries is not finite"),
    (with_a_bias, "has the tensors bias, weight; it must have one, weight"),
    (without_weights, rf"has no {QUERY_MODULE}/model.safetensors"),
    (with_another_route, "has the routes query, document, title; only query and document"),
    (with_route_mappings, "route_mappings is"),
    (without_a_default_route, "default_route is None; it must be query or document"),
    (with_more_modules_for_queries, "query is SparseStaticEmbedding -> SpladePooling; only Spa"),
    (with_a_table_for_documents, "route document is SparseStaticEmbedding; supported: Transf"),
    (with_foreign_code, r"the route query is custom\.SparseStaticEmbedding; only"),
    (with_a_path_outside, "points outside the model folder"),
    (with_a_module_after_it, "modules after the Router"),
    (with_a_limit_of_entries, "max_active_dims is 8; only None is supported"),
]


@pytest.mark.parametrize(
    ("change", "message"), REFUSED, ids=lambda part: getattr(part, "__name__", "")
)
def test_other_models_are_refused(
    folder: Path, change: Callable[[Path], None], message: str
) -> None:
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        table_of(folder)


def test_router_of_dense_models_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", "bert")
    save_tokenizer(tmp_path / "model")
    routes = [
        [network, Pooling(network.get_embedding_dimension())]
        for network in (Transformer(str(tmp_path / "model")) for _ in range(2))
    ]
    router = Router.for_query_document(*routes)
    SentenceTransformer(modules=[router, Normalize()], device="cpu").save(str(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match="modules after the Router"):
        load(tmp_path / "saved")
    SentenceTransformer(modules=[router], device="cpu").save(str(tmp_path / "other"))
    message = "the route query is Transformer -> Pooling; only SparseStaticEmbedding is supported"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "other")


def test_static_weights_alone_are_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    write_modules(tmp_path, ("SparseStaticEmbedding", ""))
    with pytest.raises(
        CheckpointError, match=r"modules\.json lists SparseStaticEmbedding; support"
    ):
        load(tmp_path)


def test_saved_tokenizers_may_differ_in_padding_and_truncation(folder: Path) -> None:
    file = folder / QUERY_MODULE / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_padding(length=9)
    tokenizer.enable_truncation(7)
    tokenizer.save(str(file))
    assert len(table_of(folder).weights) == VOCABULARY
