"""Models for sequence classification against transformers, from checkpoint to engine."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder

from models.artifact import Artifact
from models.engines import open_engine
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
    save_classifier,
    save_tokenizer,
    write_json,
)
from tests.models.wrong_outputs import assert_self_check_refuses

IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
UNSUPPORTED = ("gemma3_text", "t5")
FAMILIES = [family for family in CONFIGS if family not in UNSUPPORTED]
ROWS = [[0, 7, 21, 2, 9, 4, 2], [0, 5, 2, 6, 2]]
# Types of a pair's tokens.
TYPES = [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
# Setting of a tokenizer that gives types.
INPUT_NAMES = ["input_ids", "token_type_ids"]


def expected_logits(model: Any, row: list[int], types: list[int]) -> torch.Tensor:  # noqa: ANN401
    """Return transformers' logits `(C,)` of a row."""
    inputs = {"input_ids": torch.tensor([row])}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = torch.tensor([types])
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("labels", [1, 3])
def test_logits_equal_transformers(family: str, labels: int, tmp_path: Path) -> None:
    reference = save_classifier(tmp_path, family, labels)
    save_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", model_input_names=INPUT_NAMES)
    model, config = load(tmp_path)
    assert config.labels == tuple(f"LABEL_{i}" for i in range(labels))
    assert model.outputs == ("logits",)
    for row, types in zip(ROWS, TYPES, strict=True):
        ones = torch.ones(1, len(row))
        own = torch.tensor([types]) if model.has_token_types else None
        logits = model(torch.tensor([row]), None, ones, token_types=own)[0]
        expected = expected_logits(reference, row, types)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_last_layer_of_packed_rows_computes_first_tokens_alone(family: str, tmp_path: Path) -> None:
    reference = save_classifier(tmp_path, family, 2).double()
    save_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", model_input_names=INPUT_NAMES)
    model = load(tmp_path)[0].double()
    rows = [[0, *range(4, 4 + length), 2] for length in (3, 20, 1, 9)]
    types = [[0] * (len(row) - 2) + [1, 1] for row in rows]
    inputs = pack(rows, token_types=types).inputs()
    sizes: list[int] = []
    last = model.encoder.layers[-1]
    last.linear2.register_forward_hook(lambda *call: sizes.append(len(call[2])))  # type: ignore[union-attr]
    batch = {name: torch.from_numpy(array) for name, array in inputs.items()}
    if model.has_token_types:
        batch["token_types"] = torch.tensor([*chain(*types)])
    (logits,) = model.forward_packed(**batch)
    expected = [expected_logits(reference, row, own) for row, own in zip(rows, types, strict=True)]
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-6, atol=1e-6)
    # Disentangled attention; the mean of all tokens' logits; the last token.
    others = ("deberta-v2", "eurobert", "llama", "ministral3", "mistral", "qwen2", "qwen3")
    is_partial = family not in others
    assert model.reads_first_tokens == is_partial
    assert sizes[-1] == (len(rows) if is_partial else sum(map(len, rows)))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A BERT with three labels."""
    folder = tmp_path_factory.mktemp("classifier")
    save_classifier(folder, "bert", 3, num_hidden_layers=1)
    save_tokenizer(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    # export() raises if its parity check against PyTorch fails.
    return export(resolve(str(folder)), folder / "artifact")[0]


@pytest.mark.slow
def test_engines_compute_the_logits_of_pairs(exported: Artifact) -> None:
    manifest = exported.manifest
    assert (manifest.outputs, manifest.activation) == (("logits",), "softmax")
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(
        exported.path / "source"
    )
    expected = [
        expected_logits(reference, row, types) for row, types in zip(ROWS, TYPES, strict=True)
    ]
    for engine in ("onnxruntime", "openvino"):
        actual = open_engine(exported, engine).run(pack(ROWS, token_types=TYPES), "logits")
        np.testing.assert_allclose(actual, torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_self_check_refuses_wrong_logits(exported: Artifact) -> None:
    assert_self_check_refuses(open_engine(exported, "onnxruntime"), exported, "logits")


@pytest.mark.parametrize(
    ("labels", "changes", "activation"),
    [
        (1, {}, "sigmoid"),
        (3, {}, "softmax"),
        (3, {"problem_type": "multi_label_classification"}, "sigmoid"),
        (1, {"problem_type": "regression"}, "identity"),
        (
            1,
            {"sbert_ce_default_activation_function": IDENTITY},
            "identity",
        ),
        (
            1,
            {"sentence_transformers": {"activation_fn": IDENTITY}},
            "identity",
        ),
    ],
)
def test_activation_is_that_of_the_files(
    labels: int, changes: dict[str, object], activation: str, tmp_path: Path
) -> None:
    save_classifier(tmp_path, "bert", labels, num_hidden_layers=1)
    edit_json(tmp_path / "config.json", **changes)
    assert load(tmp_path)[1].activation == activation


@pytest.mark.parametrize(
    "nested",
    [{}, *({"activation_fn": path} for path in (None, SIGMOID, "torch.nn.Identity"))],
)
@pytest.mark.parametrize("old", [None, IDENTITY])
def test_activation_of_scores_is_that_of_sentence_transformers(
    nested: dict[str, object], old: str | None, tmp_path: Path
) -> None:
    save_classifier(tmp_path, "bert", 1, num_hidden_layers=1)
    changes = {"sentence_transformers": nested, "sbert_ce_default_activation_function": old}
    edit_json(tmp_path / "config.json", **changes)
    save_tokenizer(tmp_path)
    expected = CrossEncoder(str(tmp_path), device="cpu").activation_fn
    assert load(tmp_path)[1].activation == type(expected).__name__.lower()


@pytest.mark.parametrize("classes", [None, []])
def test_classifier_that_config_json_does_not_name_is_refused(
    classes: list[str] | None, tmp_path: Path
) -> None:
    """transformers' pipeline reads it as a classifier, and sentence-transformers as an encoder."""
    save_classifier(tmp_path, "bert", 3)
    edit_json(tmp_path / "config.json", architectures=classes)
    message = "config.json names no class in architectures, has unexpected tensors .* classifier.w"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        *((family, {}, "ForSequenceClassification is not supported") for family in UNSUPPORTED),
        ("modernbert", {"classifier_bias": True}, "classifier_bias is True; only False"),
        ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling has the invalid value"),
        ("eurobert", {"classifier_pooling": "max"}, "classifier_pooling has the invalid value"),
        ("eurobert", {"classifier_pooling": ["bos"]}, "classifier_pooling has the invalid value"),
        ("qwen3", {"pad_token_id": "2"}, "pad_token_id has the invalid value '2'"),
        ("bert", {"id2label": {"1": "a"}}, "keys of id2label must be consecutive integers from 0"),
        ("bert", {"id2label": {"0": "a"}}, r"weight has shape \(2, 32\) .* shape \(1, 32\)"),
        (
            "bert",
            {"sbert_ce_default_activation_function": "my.Activation"},
            "the activation 'my.Activation' of the scores is not one of",
        ),
    ],
)
def test_unsupported_classifiers_are_refused_by_name(
    family: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_classifier(tmp_path, family, 2)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bert", {"classifier_pooling": "mean"}),  # which BERT's classifier does not read
        ("modernbert", {"classifier_pooling": "mean"}),
        ("bert", {"id2label": None, "num_labels": 1}),
        ("eurobert", {"classifier_pooling": "mean"}),
        ("eurobert", {"classifier_pooling": "bos"}),
        ("qwen3", {"pad_token_id": 2}),  # the id of the row's last token
        ("qwen3", {"pad_token_id": None}),
    ],
)
def test_fields_have_the_meaning_that_they_have_in_transformers(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    save_classifier(tmp_path, family, 1)
    edit_json(tmp_path / "config.json", **changes)
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    model, config = load(tmp_path)
    assert config.labels == ("LABEL_0",)
    row = ROWS[0]
    logits = model(torch.tensor([row]), None, torch.ones(1, len(row)))[0]
    expected = expected_logits(reference, row, [0] * len(row))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["eurobert", "qwen3"])
def test_engines_pool_logits_as_transformers(family: str, tmp_path: Path) -> None:
    changes = {"pad_token_id": 9, "num_hidden_layers": 1, "layer_types": None}
    reference = save_classifier(tmp_path / "model", family, 2, **changes)
    save_tokenizer(tmp_path / "model")
    artifact, _ = export(resolve(str(tmp_path / "model")), tmp_path / "artifact")
    rows = [[0, 7, 21, 2], [0, 5, 9, 6, 9, 9], [9, 9], [0, 30, 12]]  # 9 is in texts, too
    expected = torch.stack([expected_logits(reference, row, []) for row in rows])
    for engine in ("onnxruntime", "openvino"):
        actual = open_engine(artifact, engine).run(pack(rows), "logits")
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overrides", [Overrides(pooling=["mean"]), Overrides(normalize=True)])
def test_pooling_of_a_classifier_cannot_be_changed(overrides: Overrides, tmp_path: Path) -> None:
    save_classifier(tmp_path, "bert", 1)
    with pytest.raises(CheckpointError, match="token vectors cannot be chosen"):
        load(tmp_path, overrides)


def test_missing_tensor_of_the_classifier_is_named(tmp_path: Path) -> None:
    save_classifier(tmp_path, "roberta", 2)
    edit_tensors(tmp_path, **{"classifier.dense.bias": None})
    with pytest.raises(CheckpointError, match=r"lacks the tensor classifier\.dense\.bias"):
        load(tmp_path)


def test_prompts_of_classifiers_are_read(tmp_path: Path) -> None:
    save_classifier(tmp_path, "bert", 1)
    config = {"model_type": "CrossEncoder", "prompts": {"web": "q: "}, "default_prompt_name": "web"}
    write_json(tmp_path / "config_sentence_transformers.json", config)
    _, read = load(tmp_path)
    assert read.prompts == {"query": "", "document": "", "web": "q: "}
    assert read.default_prompt == "web"
