"""LoRA adapters in PEFT's files, against the models that transformers and PEFT make of them."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import hf_hub_download, snapshot_download
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import AutoModel

import vitrine
from models.export.checkpoint import load
from models.export.exporter import export
from models.export.model_folder import CheckpointError
from models.export.sources import resolve
from models.gradients.reference_model import ReferenceModel
from tests.hub import serving_hub
from tests.models.checkpoints import edit_json, save_checkpoint, save_tokenizer

ROW = [0, 7, 21, 4, 9, 2]


def save_adapter(folder: Path, family: str = "bert", **fields: Any) -> None:  # noqa: ANN401
    """Save a base model in `base`, and an adapter alone in `adapter`."""
    save_checkpoint(folder / "base", family)
    model = AutoModel.from_pretrained(folder / "base")
    model.add_adapter(LoraConfig(**{"r": 4, "lora_alpha": 6, **fields}))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder / "adapter")


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("bert", {"target_modules": ["query", "word_embeddings"], "layers_to_transform": [1]}),
        ("bert", {"target_modules": "all-linear", "use_rslora": True}),
        (
            "xlm-roberta",
            {
                "target_modules": ["query", "key", "dense"],
                "rank_pattern": {"layer.1.attention.self.key": 2, "query": 3},
                "alpha_pattern": {r"encoder\.layer\.0\..*query": 20, "dense": 1},
            },
        ),
        ("modernbert", {"target_modules": ["Wqkv", "Wi"]}),
        ("qwen3", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
        ("bert", {"target_modules": r".*\.(key|output\.dense)", "exclude_modules": ["self.key"]}),
        (
            "bert",
            {
                "target_modules": ["query", "dense"],
                "exclude_modules": r".*output\.dense",
                "layers_to_transform": 0,
                "layers_pattern": ["layer"],
            },
        ),
    ],
)
def test_weights_are_those_of_the_base_model_with_the_adapter(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    save_adapter(tmp_path, family, **fields)
    expected = AutoModel.from_pretrained(tmp_path / "adapter")(torch.tensor([ROW]))
    base = AutoModel.from_pretrained(tmp_path / "base")(torch.tensor([ROW]))
    actual = load(tmp_path / "adapter")[0].encoder(torch.tensor([ROW]))
    assert (base.last_hidden_state - expected.last_hidden_state).abs().max() > 0.1
    torch.testing.assert_close(actual, expected.last_hidden_state, rtol=1e-5, atol=1e-5)


def test_base_model_on_the_hub_needs_the_files_alone_that_transformers_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_adapter(tmp_path, target_modules=["query"])
    edit_json(tmp_path / "adapter/adapter_config.json", base_model_name_or_path="someone/base")
    with serving_hub() as hub:
        hub.add("someone/base", tmp_path / "base")
        place: Any = {"endpoint": hub.url, "cache_dir": tmp_path / "hub"}
        for name in ("config.json", "model.safetensors"):
            hf_hub_download("someone/base", name, **place)
    monkeypatch.setattr("huggingface_hub.snapshot_download", partial(snapshot_download, **place))
    assert load(tmp_path / "adapter")[0].encoder.config.d_model == 32


@pytest.mark.slow
def test_export_keeps_the_base_model_beside_the_adapter(tmp_path: Path) -> None:
    save_adapter(tmp_path, target_modules=["query", "value"])
    save_tokenizer(tmp_path / "adapter")
    transformer = Transformer(str(tmp_path / "adapter"))
    oracle = SentenceTransformer(modules=[transformer, Pooling(32, "cls"), Normalize()])
    oracle.save(str(tmp_path / "saved"))
    written, _ = export(resolve(str(tmp_path / "saved")), tmp_path / "artifact")
    assert set(written.manifest.weights_sha256) == {
        "adapter_model.safetensors",
        "base_model/model.safetensors",
    }
    texts = ["w7 w9", "w21 w5 w33"]
    with vitrine.SyncModel(written.path, vitrine.ModelOptions(threads=1)) as model:
        vectors = model.encode(texts).vectors
    np.testing.assert_allclose(vectors, oracle.encode(texts), rtol=1e-5, atol=1e-5)
    (tmp_path / "base").rename(tmp_path / "moved")
    assert ReferenceModel.open(written).network.encoder.config.d_model == 32


def test_adapter_beside_a_whole_model_changes_that_model(tmp_path: Path) -> None:
    save_adapter(tmp_path, target_modules=["query"])
    for file in (tmp_path / "adapter").iterdir():
        file.rename(tmp_path / "base" / file.name)
    edit_json(tmp_path / "base" / "adapter_config.json", base_model_name_or_path="nowhere")
    expected = AutoModel.from_pretrained(tmp_path / "base")(torch.tensor([ROW]))
    actual = load(tmp_path / "base")[0].encoder(torch.tensor([ROW]))
    torch.testing.assert_close(actual, expected.last_hidden_state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA' is supported. Merge other"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"bias": "all"}, "bias is 'all', which"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"modules_to_save": ["pooler"]}, r"modules_to_save is \['pooler'\]"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"field_of_the_future": 3}, "field_of_the_future is 3"),
        ({"r": 5}, r"lora_A.weight and .* have shapes \(4, 32\) and \(32, 4\); .* requires rank 5"),
        ({"r": 0}, "r has the invalid value 0"),
        ({"r": 10**400}, "r has the invalid value 10000"),
        ({"lora_alpha": "6"}, "lora_alpha has the invalid value '6'"),
        ({"alpha_pattern": {"query": 10**400}}, "lora_alpha has the invalid value 10000"),
        ({"rank_pattern": ["query"]}, r"rank_pattern has the invalid value \['query'\]"),
        ({"target_modules": None}, "target_modules has the invalid value None"),
        ({"target_modules": "("}, r"target_modules has the invalid value '\('"),
        ({"target_modules": "(a+)+"}, r"target_modules has the pattern '\(a\+\)\+', w"),
        ({"exclude_modules": [1]}, r"exclude_modules has the invalid value \[1\]"),
        ({"alpha_pattern": {"(": 1}}, r"alpha_pattern has the invalid value \{'\(': 1\}"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path must be a non-empty string"),
        ({"base_model_name_or_path": "/none"}, "adapter_config.json is not available: the folder"),
    ],
)
def test_other_adapters_are_refused_by_name(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_adapter(tmp_path, target_modules=["query"])
    edit_json(tmp_path / "adapter" / "adapter_config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "adapter")


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["key"]},
        {"target_modules": ["uery", "key"]},
        {"target_modules": r"encoder\.layer\.0.*(query|key)"},
        {"target_modules": "all-linear"},
        {"exclude_modules": ["self.key"]},
        {"exclude_modules": r".*word_.*"},
        {"layers_to_transform": [0]},
    ],
)
def test_tensors_that_peft_ignores_are_refused(changes: dict[str, object], tmp_path: Path) -> None:
    save_adapter(tmp_path, target_modules=["query", "key", "word_embeddings"])
    adapter = tmp_path / "adapter"
    before = AutoModel.from_pretrained(adapter).state_dict()
    edit_json(adapter / "adapter_config.json", **changes)
    lost = before.keys() - AutoModel.from_pretrained(adapter).state_dict().keys()
    ignored = min(name.partition(".lora_")[0] for name in lost if ".lora_" in name)
    with pytest.raises(CheckpointError, match=rf"PEFT ignores .*\.{ignored}\.lora_.*leave out"):
        load(adapter)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("encoder.layer.9.a.lora_A.weight", (4, 32), r"lora_A.weight and .* \(4, 32\) and \(0,\)"),
        ("encoder.layer.0.a.lora_magnitude_vector", (32,), "has .*lora_magnitude_vector; only"),
        ("encoder.layer.9.output.dense", (4, 32), "updates encoder.layer.9.output.dense.weight,"),
        ("encoder.layer.0.output.dense", (4, 32), r"shape \(32, 32\); .* shape \(32, 48\)"),
    ],
)
def test_invalid_tensors_of_an_adapter_are_refused_by_name(
    name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    save_adapter(tmp_path, target_modules=["query", "dense", "a"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    name = f"base_model.model.{name}"
    added = {name: torch.ones(shape)}
    if "lora" not in name:
        added = {f"{name}.lora_A.weight": torch.ones(shape)}
        added[f"{name}.lora_B.weight"] = torch.ones(shape[::-1])
    save_file({**load_file(path), **added}, path)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "adapter")
