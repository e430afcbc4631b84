"""Export of masked language models to sparse vectors, against sentence-transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import AutoModelForMaskedLM

from models.artifact import Artifact
from models.engines import open_engine
from models.export.checkpoint import load
from models.export.exporter import export
from models.export.model_folder import CheckpointError
from models.export.sentence_config import Overrides, overrides_of
from models.export.sources import resolve
from models.packing import pack
from tests.models.checkpoints import edit_json, save_checkpoint, save_masked_lm, save_tokenizer

FAMILIES = [
    "albert",
    "bert",
    "camembert",
    "deberta-v2",
    "distilbert",
    "electra",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "roberta",
    "roformer",
    "xlm-roberta",
]
TEXTS = ["w5 w6 w7", "w21", "w8 w15 w33 w6 w40 w12", "w5 " * 40]
ROWS = [[0, 5, 6, 7, 2], [0, 21, 2], [0, 8, 15, 33, 6, 12, 2]]


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_every_family_equal_the_logits_of_transformers(
    tmp_path: Path, family: str
) -> None:
    oracle = save_masked_lm(tmp_path, family)
    save_tokenizer(tmp_path)
    model, _ = load(tmp_path, Overrides(sparse=True))
    weights = []
    for row in ROWS:
        ids, ones = torch.tensor([row]), torch.ones(1, len(row))
        with torch.no_grad():
            logits = oracle(ids).logits[0]
            actual = model(ids, ones, ones)[0]
        expected = torch.log1p(torch.relu(logits)).amax(0)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        weights.append(actual)
    assert 0.1 < (torch.stack(weights) > 0).float().mean() < 1


def save_encoder(folder: Path, **pooling: Any) -> SparseEncoder:  # noqa: ANN401
    save_masked_lm(folder / "model", "bert", num_hidden_layers=1)
    save_tokenizer(folder / "model")
    encoder = SparseEncoder(str(folder / "model"), device="cpu")
    encoder[1] = SpladePooling(**pooling)
    encoder.save(str(folder / "saved"))
    return encoder


def weights_of(artifact: Artifact, engine: str, rows: list[list[int]]) -> Any:  # noqa: ANN401
    return open_engine(artifact, engine, "float32").run(pack(rows), "sparse")


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "pooling"), [("relu", "sum"), ("log1p_relu", "max")])
def test_graphs_equal_the_sparse_encoder_of_sentence_transformers(
    tmp_path: Path, pooling: str, activation: str
) -> None:
    oracle = save_encoder(tmp_path, pooling_strategy=pooling, activation_function=activation)
    artifact, parity = export(resolve(str(tmp_path / "saved")), tmp_path / "artifact")
    assert artifact.manifest.outputs == ("sparse",)
    assert parity
    expected = oracle.encode(TEXTS[:3], convert_to_sparse_tensor=False).numpy()
    rows = oracle.tokenizer(TEXTS[:3])["input_ids"]
    for engine in ("onnxruntime", "openvino"):
        actual = weights_of(artifact, engine, rows)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
        assert ((actual > 1e-4) == (expected > 1e-4)).all()
        alone = np.concatenate([weights_of(artifact, engine, [row]) for row in rows])
        np.testing.assert_allclose(alone, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["albert", "bert", "modernbert", "roberta"])
def test_untied_decoder_has_weights_and_biases_of_its_own(tmp_path: Path, family: str) -> None:
    oracle = save_masked_lm(tmp_path, family, tie_word_embeddings=False)
    save_tokenizer(tmp_path)
    model, _ = load(tmp_path, Overrides(sparse=True))
    assert not torch.equal(
        oracle.get_output_embeddings().weight, oracle.get_input_embeddings().weight
    )
    ids, ones = torch.tensor([ROWS[0]]), torch.ones(1, len(ROWS[0]))
    with torch.no_grad():
        expected = torch.log1p(torch.relu(oracle(ids).logits[0])).amax(0)
        actual = model(ids, ones, ones)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_untied_decoder_without_a_weight_is_refused(tmp_path: Path) -> None:
    """transformers gives it random weights, and tied ones are those of the embeddings."""
    save_masked_lm(tmp_path, "bert")
    save_tokenizer(tmp_path)
    load(tmp_path, Overrides(sparse=True))
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lacks the tensor cls.predictions.decoder.weight"):
        load(tmp_path, Overrides(sparse=True))


def test_older_modules_of_sentence_transformers_are_known(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    saved = tmp_path / "saved"
    modules = json.loads((saved / "modules.json").read_text())
    modules[0]["type"] = "sentence_transformers.sparse_encoder.models.MLMTransformer"
    (saved / "modules.json").write_text(json.dumps(modules))
    (saved / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    model, config = load(saved)
    assert (model.outputs, config.max_tokens) == (("sparse",), 16)


def test_blocks_of_the_vocabulary_give_the_weights_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_masked_lm(tmp_path, "bert")
    save_tokenizer(tmp_path)
    model, _ = load(tmp_path, Overrides(sparse=True))
    ids, ones = torch.tensor([ROWS[0]]), torch.ones(1, len(ROWS[0]))
    with torch.no_grad():
        expected = model(ids, ones, ones)
        monkeypatch.setattr("models.network.sparse._BLOCK", 7)
        torch.testing.assert_close(model(ids, ones, ones), expected)


@pytest.mark.slow
def test_source_of_an_artifact_is_the_model_of_its_graphs(tmp_path: Path) -> None:
    save_masked_lm(tmp_path / "model", "bert", num_hidden_layers=1)
    save_tokenizer(tmp_path / "model")
    source = resolve(str(tmp_path / "model"))
    artifact, _ = export(source, tmp_path / "artifact", overrides=Overrides(sparse=True))
    model, _ = load(artifact.path / "source", overrides_of(artifact))
    ids, ones = torch.tensor([ROWS[0]]), torch.ones(1, len(ROWS[0]))
    actual = weights_of(artifact, "onnxruntime", ROWS[:1])
    np.testing.assert_allclose(actual, model(ids, ones, ones), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "overrides", [{"pooling": ["cls"]}, {"normalize": True}, {"include_prompt": False}]
)
def test_settings_of_embeddings_are_refused(tmp_path: Path, overrides: dict[str, Any]) -> None:
    save_masked_lm(tmp_path, "bert")
    save_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="the model computes no pooled embeddings"):
        load(tmp_path, Overrides(sparse=True, **overrides))


def test_export_of_embeddings_names_the_head_that_it_leaves_out(tmp_path: Path) -> None:
    save_masked_lm(tmp_path, "bert")
    save_tokenizer(tmp_path)
    lines: list[str] = []
    model, _ = load(tmp_path, report=lines.append)
    assert model.outputs == ("pooled", "tokens")
    assert "cls.predictions.transform.dense.weight" in lines[0]
    assert "config.json names BertForMaskedLM" in lines[1]
    assert "--sparse exports sparse vectors with it" in lines[1]
    lines.clear()
    load(tmp_path, Overrides(sparse=True), report=lines.append)
    assert not lines


def test_export_of_a_model_without_the_head_does_not_offer_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    save_tokenizer(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["BertForMaskedLM"])
    lines: list[str] = []
    load(tmp_path, report=lines.append)
    assert not any("--sparse" in line for line in lines)


def without_modules(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["BertModel"])


def of_eurobert(folder: Path) -> None:
    save_masked_lm(folder, "eurobert")


def with_swish(folder: Path) -> None:
    save_masked_lm(folder, "modernbert", classifier_activation="silu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_modules, "sparse vectors need a masked language model"),
        (of_eurobert, "sparse vectors of model_type 'eurobert' are not supported"),
        (with_swish, "classifier_activation is 'silu'; only 'gelu' is supported"),
    ],
)
def test_models_without_a_known_head_are_refused(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    save_masked_lm(tmp_path, "bert")
    save_tokenizer(tmp_path)
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, Overrides(sparse=True))


def test_unknown_pooling_is_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    edit_json(tmp_path / "saved" / "1_SpladePooling" / "config.json", pooling_strategy="mean")
    with pytest.raises(CheckpointError, match="pooling_strategy max and sum"):
        load(tmp_path / "saved")


def test_unknown_field_of_the_pooling_is_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    edit_json(tmp_path / "saved" / "1_SpladePooling" / "config.json", top_k=8)
    with pytest.raises(TypeError, match="unexpected keyword argument 'top_k'"):
        SparseEncoder(str(tmp_path / "saved"), device="cpu")
    with pytest.raises(CheckpointError, match=r"1_SpladePooling/config\.json: top_k is not supp"):
        load(tmp_path / "saved")


def test_modules_of_a_model_that_is_no_sparse_encoder_are_refused(tmp_path: Path) -> None:
    """sentence-transformers would append a module with random weights."""
    save_encoder(tmp_path)
    (tmp_path / "saved" / "config_sentence_transformers.json").unlink()
    with pytest.raises(ValueError, match="embedding dimension"):
        SparseEncoder(str(tmp_path / "saved"), device="cpu")
    with pytest.raises(CheckpointError, match="model_type is null or missing; set it to 'Spa"):
        load(tmp_path / "saved")


def test_missing_tensor_of_the_head_is_named(tmp_path: Path) -> None:
    model = save_masked_lm(tmp_path, "bert")
    save_tokenizer(tmp_path)
    state = model.state_dict()
    del state["cls.predictions.transform.LayerNorm.weight"]
    AutoModelForMaskedLM.from_config(model.config).save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(
        CheckpointError, match=r"lacks the tensor cls\.predictions\.transform\.Layer"
    ):
        load(tmp_path, Overrides(sparse=True))
