"""Models for token classification against transformers, from checkpoint to engine."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers

from models.artifact import Artifact
from models.engines import EngineError, open_engine
from models.export import parity
from models.export.checkpoint import load
from models.export.exporter import export
from models.export.model_folder import CheckpointError
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from models.packing import pack
from tests.models.checkpoints import (
    CONFIGS,
    edit_json,
    edit_tensors,
    save_checkpoint,
    save_token_classifier,
    save_tokenizer,
    write_json,
)
from tests.models.jina_bert import CODE_OF
from tests.models.wrong_outputs import assert_self_check_refuses

UNSUPPORTED = ("gemma3_text", *CODE_OF)
FAMILIES = [family for family in CONFIGS if family not in UNSUPPORTED]
LABELS = ["O", "B-PER", "I-PER"]
ROWS = [[0, 7, 21, 2, 9, 4, 2], [0, 5, 2, 6, 2], [0, *range(4, 24), 2]]


def expected_logits(model: Any, row: list[int]) -> torch.Tensor:  # noqa: ANN401
    """Return transformers' logits `(L, C)` of a row."""
    with torch.no_grad():
        logits: torch.Tensor = model(
            input_ids=torch.tensor([row]), attention_mask=torch.ones(1, len(row), dtype=torch.int64)
        ).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("labels", [2, 5])
def test_logits_of_tokens_equal_transformers(family: str, labels: int, tmp_path: Path) -> None:
    named = {"id2label": {i: f"L{i}" for i in range(labels)}}
    reference = save_token_classifier(tmp_path, family, labels, **named).double()
    names = ["input_ids", "token_type_ids", "attention_mask"]
    write_json(tmp_path / "tokenizer_config.json", {"model_input_names": names})
    model, config = load(tmp_path)
    model.double()
    assert (config.labels, config.activation) == (tuple(f"L{i}" for i in range(labels)), "softmax")
    assert (model.outputs, model.width, model.has_token_types) == (("tags",), labels, False)
    expected = [expected_logits(reference, row) for row in ROWS]
    for row, own in zip(ROWS, expected, strict=True):
        (logits,) = model(torch.tensor([row]), None, torch.ones(1, len(row)))
        torch.testing.assert_close(logits, own, rtol=1e-6, atol=1e-6)
    batch = {name: torch.from_numpy(array) for name, array in pack(ROWS).inputs().items()}
    (packed,) = model.forward_packed(**batch)
    torch.testing.assert_close(packed, torch.cat(expected), rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A ModernBERT, whose head has a dense layer and a norm, with three labels."""
    folder = tmp_path_factory.mktemp("tags")
    names = {"id2label": dict(enumerate(LABELS))}
    save_token_classifier(folder, "modernbert", 3, **names)
    save_tokenizer(folder)
    # export() raises if its parity check against PyTorch fails.
    return export(resolve(str(folder)), folder / "artifact", target="cuda", dtype="float16")[0]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_engines_compute_the_logits_of_all_tokens(engine: str, exported: Artifact) -> None:
    manifest = exported.manifest
    assert (manifest.outputs, manifest.labels, manifest.width) == (("tags",), tuple(LABELS), 3)
    reference = transformers.AutoModelForTokenClassification.from_pretrained(
        exported.path / "source"
    )
    expected = torch.cat([expected_logits(reference, row) for row in ROWS])
    actual = open_engine(exported, engine).run(pack(ROWS), "tags")
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_check_has_the_logits_of_every_token_of_every_input(exported: Artifact) -> None:
    check = exported.check()
    assert len(check.outputs["tags"]) == sum(map(len, check.rows))
    assert len(check.texts) == len(check.rows)  # no pairs of texts
    assert max(map(len, check.rows)) == exported.manifest.max_tokens
    # Each label is the best one of some token, so that a lost label cannot go unnoticed.
    assert {*np.argmax(check.outputs["tags"], axis=1)} == {0, 1, 2}


@pytest.mark.slow
def test_head_stays_in_float32_in_a_float16_graph(exported: Artifact) -> None:
    graph = onnx.load(exported.path / "model.cuda.onnx", load_external_data=False).graph
    types = {value.name: value.data_type for value in graph.initializer}
    heads = {name: kind for name, kind in types.items() if "heads." in name}
    assert set(heads.values()) == {onnx.TensorProto.FLOAT}
    assert onnx.TensorProto.FLOAT16 in types.values()
    assert graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


@pytest.mark.slow
def test_self_check_refuses_wrong_logits(exported: Artifact) -> None:
    assert_self_check_refuses(open_engine(exported, "onnxruntime"), exported, "tags")


@pytest.mark.slow
def test_export_refuses_a_graph_with_wrong_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_token_classifier(tmp_path, "bert", 3, num_hidden_layers=1)
    save_tokenizer(tmp_path)
    own = parity.reference_outputs

    def mistaken(*args: Any, **kwargs: Any) -> list[parity.Results]:  # noqa: ANN401
        return [{"tags": result["tags"] + 0.01} for result in own(*args, **kwargs)]

    monkeypatch.setattr("models.export.exporter.reference_outputs", mistaken)
    with pytest.raises(EngineError, match="the output 'tags'"):
        export(resolve(str(tmp_path)), tmp_path / "artifact")


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_families_without_token_classification_are_refused(family: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, family)
    edit_json(tmp_path / "config.json", architectures=["MyForTokenClassification"])
    message = "architectures names MyForTokenClassification, but token classification is not"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("modernbert", {"classifier_bias": True}, "classifier_bias is True; only False"),
        ("modernbert", {"classifier_activation": "relu"}, "classifier_activation is 'relu'; only"),
        ("qwen3", {"token_classification_bias": False}, "token_classification_bias is False; only"),
        ("bert", {"id2label": {"1": "a"}}, "keys of id2label must be consecutive integers from 0"),
        ("bert", {"id2label": {"0": "a"}}, r"weight has shape \(3, 32\) .* shape \(1, 32\)"),
    ],
)
def test_unsupported_heads_are_refused_by_name(
    family: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_token_classifier(tmp_path, family, 3)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_missing_and_unexpected_tensors_of_the_head_are_named(tmp_path: Path) -> None:
    save_token_classifier(tmp_path, "roberta", 2)
    edit_tensors(tmp_path, **{"crf.transitions": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=r"unexpected tensors \(1\): crf\.transitions"):
        load(tmp_path)
    edit_tensors(tmp_path, **{"crf.transitions": None, "classifier.bias": None})
    with pytest.raises(CheckpointError, match=r"lacks the tensor classifier\.bias"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (Overrides(pooling=["mean"]), "token vectors cannot be chosen"),
        (Overrides(normalize=True), "token vectors cannot be chosen"),
        (Overrides(prompts={"query": "q: "}), "prompts of models for token classification"),
        (Overrides(sparse=True), "sparse vectors need a masked language model"),
    ],
)
def test_options_of_other_models_are_refused(
    overrides: Overrides, message: str, tmp_path: Path
) -> None:
    save_token_classifier(tmp_path, "bert", 2)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, overrides)


def test_softmax_is_independent_of_the_problem_type(tmp_path: Path) -> None:
    save_token_classifier(tmp_path, "bert", 2)
    edit_json(tmp_path / "config.json", problem_type="multi_label_classification")
    assert load(tmp_path)[1].activation == "softmax"


def test_gte_tags_only_with_names_of_labels(tmp_path: Path) -> None:
    """gte-multilingual-base, an embedding model, has the class without names of labels."""
    save_token_classifier(tmp_path, "gte", 3)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["GteForTokenClassification"]
    assert load(tmp_path)[0].outputs == ("tags",)
    edit_json(tmp_path / "config.json", id2label=None)
    assert load(tmp_path)[0].outputs == ("pooled", "tokens")
