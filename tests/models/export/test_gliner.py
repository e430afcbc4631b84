"""GLiNER models against the package's formulas, from checkpoint to engine."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from models.artifact import Artifact
from models.engines import open_engine
from models.export.checkpoint import load
from models.export.exporter import export
from models.export.gliner_rows import check_row, least_tokens
from models.export.int8.quality import QualityBounds, check_outputs
from models.export.model_folder import CheckpointError, ModelFolder
from models.export.onnx_graph import graph_for, write_weights
from models.export.sentence_config import Overrides, SentenceConfig
from models.export.sources import SourceError, resolve
from models.export.tokenizer_file import read_tokenizer
from models.manifest import CHECK, ArtifactError, SpanRules
from models.network.sentence_encoder import SentenceEncoder
from models.packing import INPUT_NAMES, NO_TOKEN, WORD_NAMES, PackedBatch, pack
from service.inference.tokenizing.labelled_texts import LabelledTexts
from tests.hostile_artifacts import copy_of, edit
from tests.models.checkpoints import edit_json, edit_tensors, write_json
from tests.models.gliner import KINDS, Gliner, save_gliner
from tests.models.wrong_outputs import WRONG, assert_self_check_refuses
from tests.shared_traces import trace_once

LABELS = ["cat thing", "the", "A w5"]
TEXTS = [
    "the cat sat",
    "a",
    "Cat a5-b9_c sat. The cat sat on the mat!",
    "the cat sat on the mat and ran away " * 6,  # more than 40 words
    "🎉 é <<ENT>> the",
    # The normalizer of some of the tokenizers removes these words.
    "the \u200d cat \x01 sat",
]


def rows_of(folder: Path, config: SentenceConfig, vocab_size: int) -> list[Any]:
    tokenizer: Tokenizer = read_tokenizer(ModelFolder(folder), config, vocab_size)
    tokenizer.enable_truncation(config.max_tokens)
    assert config.spans is not None
    return LabelledTexts(tokenizer, config.spans.rules, config.max_tokens).rows(TEXTS, LABELS)


def packed(rows: list[Any]) -> PackedBatch:
    words, labels = [row.words for row in rows], [row.labels for row in rows]
    return pack([row.ids for row in rows], words=words, labels=labels)


def run_packed(model: SentenceEncoder, batch: PackedBatch) -> torch.Tensor:
    arrays = batch.inputs((*INPUT_NAMES, *WORD_NAMES))
    (spans,) = model.forward_packed(**{n: torch.from_numpy(own) for n, own in arrays.items()})
    return spans


def expected_spans(reference: Gliner) -> list[torch.Tensor]:
    """Return the logits of each text, `(words * labels, W)`; 0 beyond the last word."""
    results = []
    for text in TEXTS:
        scores, _ = reference.logits(text, LABELS)  # (words, W, labels)
        own = scores.transpose(1, 2).flatten(0, 1)
        results.append(torch.where(own.isinf(), 0, own))
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_package(kind: str, tmp_path: Path) -> None:
    reference = save_gliner(tmp_path, kind).double()
    model, config = load(tmp_path)
    model.double()
    assert (model.outputs, config.labels) == (("spans",), ())
    rows = rows_of(tmp_path, config, model.encoder.config.vocab_size)
    expected = expected_spans(reference)
    assert all(own.abs().max() > 0.1 for own in expected)
    for row, own in zip(rows, expected, strict=True):
        torch.testing.assert_close(
            run_packed(model, packed([row])).double(), own, atol=1e-6, rtol=1e-6
        )
    batch = run_packed(model, packed(rows))
    torch.testing.assert_close(batch.double(), torch.cat(expected), atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_engines_compute_the_logits_of_the_package(kind: str, tmp_path: Path) -> None:
    import onnxruntime
    import openvino

    expected = torch.cat(expected_spans(save_gliner(tmp_path, kind, layers=1).double())).numpy()
    model, config = load(tmp_path)
    batch = packed(rows_of(tmp_path, config, model.encoder.config.vocab_size))
    graph = trace_once(model, "cpu")
    write_weights(graph, tmp_path / "model.weights")
    for engine in ("onnxruntime", "openvino"):
        (tmp_path / f"{engine}.onnx").write_bytes(graph_for(engine, graph))
    session = onnxruntime.InferenceSession(str(tmp_path / "onnxruntime.onnx"))
    inputs = batch.inputs(port.name for port in session.get_inputs())
    precise = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(tmp_path / "openvino.onnx", "CPU", precise)
    for actual in (session.run(["spans"], inputs)[0], compiled(inputs)[0]):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_texts_are_truncated_to_words_and_then_to_tokens(tmp_path: Path) -> None:
    reference = save_gliner(tmp_path, "deberta-v2")
    model, config = load(tmp_path, Overrides(max_tokens=60))
    reference.tokenizer.model_max_length = 60
    rows = rows_of(tmp_path, config, model.encoder.config.vocab_size)
    assert [row.truncated for row in rows] == [False, False, False, True, False, False]
    assert (len(rows[3].ids), len(rows[3].words)) == (60, 40)
    # As in the package, the LSTM reads zeros in place of the words without tokens.
    assert rows[3].words.count(NO_TOKEN) > 20
    actual = run_packed(model, packed(rows))
    torch.testing.assert_close(actual, torch.cat(expected_spans(reference)), atol=1e-5, rtol=1e-5)


def test_rows_longer_than_the_position_table_of_deberta(tmp_path: Path) -> None:
    reference = save_gliner(tmp_path, "deberta-v2", max_len=300)
    model, config = load(tmp_path)
    assert config.max_tokens == 2048
    text = " ".join(f"a{i}" for i in range(300))
    tokenizer = read_tokenizer(ModelFolder(tmp_path), config, model.encoder.config.vocab_size)
    assert config.spans is not None
    (row,) = LabelledTexts(tokenizer, config.spans.rules, config.max_tokens).rows([text], LABELS)
    assert (len(row.ids) > 500, len(row.words)) == (True, 300)
    actual = run_packed(model, packed([row]))
    scores, _ = reference.logits(text, LABELS)
    inside = scores[:200].transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(actual[: len(inside)], inside, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("gliner")
    save_gliner(folder, "deberta-v2", layers=1)
    # export() raises if its parity check against PyTorch fails.
    return export(resolve(str(folder)), folder / "artifact")[0]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_engines_of_an_artifact_compute_the_logits_of_the_package(
    engine: str, exported: Artifact, tmp_path: Path
) -> None:
    reference = save_gliner(tmp_path, "deberta-v2", layers=1).double()
    expected = torch.cat(expected_spans(reference)).numpy()
    model, config = load(tmp_path)
    batch = packed(rows_of(tmp_path, config, model.encoder.config.vocab_size))
    actual = open_engine(exported, engine).run(batch, "spans")
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_manifest_has_the_rules_of_rows(exported: Artifact) -> None:
    manifest = exported.manifest
    rules = SpanRules(label_marker="<<ENT>>", text_marker="<<SEP>>", max_words=40, max_width=5)
    assert (manifest.outputs, manifest.spans, manifest.width) == (("spans",), rules, 5)
    check = exported.check()
    pairs = sum(len(a) * len(b) for a, b in zip(check.words, check.labels, strict=True))
    assert len(check.outputs["spans"]) == pairs
    assert max(map(len, check.words)) == 40


@pytest.mark.slow
def test_positions_of_the_self_check_are_inside_its_rows(
    exported: Artifact, tmp_path: Path
) -> None:
    check = exported.check()
    for name, positions in (("words", check.words), ("labels", check.labels)):
        folder = copy_of(exported.path, tmp_path / name)
        edit(folder, CHECK, **{name: [[len(check.rows[0])], *positions[1:]]})
        with pytest.raises(ArtifactError, match="must have positions in each row"):
            Artifact.load(folder).check()


@pytest.mark.slow
def test_self_check_refuses_wrong_logits(exported: Artifact) -> None:
    own = {"labels in another order": lambda x: x.reshape(-1, 2, 5)[:, ::-1].reshape(-1, 5)}
    engine = open_engine(exported, "onnxruntime")
    assert_self_check_refuses(engine, exported, "spans", {**WRONG, **own})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (Overrides(pooling=["mean"]), "token vectors cannot be chosen"),
        (Overrides(prompts={"query": "q: "}), "prompts are not supported: the model has labels"),
        (Overrides(sparse=True), "sparse vectors cannot be exported"),
    ],
)
def test_options_of_other_models_are_refused(
    overrides: Overrides, message: str, folder: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(folder, overrides)


@pytest.mark.slow
def test_int8_is_refused(exported: Artifact) -> None:
    with pytest.raises(CheckpointError, match="the quality of spans is not measured"):
        check_outputs(exported.manifest, QualityBounds())


def test_maximum_length_without_room_for_a_text_is_refused(folder: Path, tmp_path: Path) -> None:
    model, config = load(folder)
    assert config.spans is not None
    tokenizer = read_tokenizer(ModelFolder(folder), config, model.encoder.config.vocab_size)
    least = least_tokens(tokenizer, config.spans.rules)
    for limit in (5, least - 1):
        message = f"--max-tokens {limit} leaves no room for labels and a text; at least {least}"
        with pytest.raises(CheckpointError, match=message):
            export(resolve(str(folder)), tmp_path, overrides=Overrides(max_tokens=limit))
    tokenizer.enable_truncation(least)
    _, words, labels = check_row(tokenizer, config.spans.rules, "the cat sat")
    assert (len(words), len(labels)) == (1, 2)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"span_mode": "token_level"}, "span_mode is 'token_level'; only 'markerV0'"),
    ({"span_mode": "markerV1"}, "span_mode is 'markerV1'; only 'markerV0'"),
    ({"span_mode": "conv_max"}, "span_mode is 'conv_max'"),
    ({"subtoken_pooling": "mean"}, "subtoken_pooling is 'mean'; only 'first'"),
    ({"words_splitter_type": "spacy"}, "words_splitter_type is 'spacy'; only 'whitespace'"),
    ({"post_fusion_schema": "l2l-l2t"}, "post_fusion_schema is 'l2l-l2t'; only ''"),
    ({"fuse_layers": True}, "fuse_layers is True; only False"),
    ({"embed_ent_token": False}, "embed_ent_token is False; only True"),
    ({"embed_ent_token": None}, "embed_ent_token is None; only True"),
    ({"labels_encoder": "bge"}, "labels_encoder is 'bge'; only None"),
    ({"labels_decoder": "gpt2"}, "labels_decoder is 'gpt2'; only None"),
    ({"relations_layer": "dot"}, "relations_layer is 'dot'; only None"),
    ({"span_encoder_config": {"model_type": "rnn"}}, "span_encoder_config is"),
    ({"precomputed_prompts_mode": True}, "precomputed_prompts_mode is True"),
    ({"model_type": "gliner_streaming_span"}, "model_type is 'gliner_streaming_span'"),
    ({"model_type": "extractor"}, "model_type is 'extractor'"),
    ({"max_width": 0}, "max_width is 0; it must be an integer from 1 to 100"),
    ({"max_len": "384"}, "max_len is '384'"),
    ({"num_rnn_layers": True}, "num_rnn_layers is True"),
    ({"hidden_size": 33}, "hidden_size must be even"),
    ({"hidden_size": 64}, r"project_start\.0\.weight of shape|lacks the tensor|has shape"),
    ({"ent_token": ""}, "ent_token has the invalid value ''"),
    ({"class_token_index": -1}, "class_token_index is -1; it must be the token id of ent_token"),
    ({"vocab_size": -1}, "vocab_size is -1, but that of encoder_config is"),
    ({"encoder_config": None}, "has no encoder_config, the config of its encoder 'base'"),
    ({"encoder_config": {"model_type": "t5"}}, "model_type of encoder_config is 't5'; supported"),
    ({"num_rnn_layers": 3}, r"lacks the tensor rnn\.lstm\.weight_ih_l2"),
    ({"num_rnn_layers": 0}, r"unexpected tensors \(16\): rnn\.lstm"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings")
    save_gliner(path, "bert")
    return path


@pytest.mark.parametrize(("changes", "message"), SETTINGS)
def test_other_models_and_settings_are_refused_by_name(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    config = (folder / "gliner_config.json").read_text()
    try:
        edit_json(folder / "gliner_config.json", **changes)
        with pytest.raises(CheckpointError, match=message):
            load(folder)
    finally:
        (folder / "gliner_config.json").write_text(config)


def test_training_settings_are_ignored_and_missing_ones_are_the_defaults(tmp_path: Path) -> None:
    save_gliner(tmp_path, "deberta-v2", hidden_size=512, max_width=12, max_len=384)
    file = tmp_path / "gliner_config.json"
    config = json.loads(file.read_text())
    for name in ("hidden_size", "max_width", "max_len", "num_rnn_layers", "ent_token", "sep_token"):
        del config[name]
    del config["encoder_config"]["model_type"]
    write_json(file, {**config, "lr_encoder": 1e-5, "dropout": 0.4, "max_types": 25})
    model, sentence_config = load(tmp_path)
    assert sentence_config.spans is not None
    assert sentence_config.spans.rules.max_words == 384
    assert model.width == 12


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    save_gliner(tmp_path, "deberta-v2")
    edit_tensors(tmp_path, **{"scorer.proj_token.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=r"unexpected tensors \(1\): scorer\.proj_token"):
        load(tmp_path)
    name = "prompt_rep_layer.3.bias"
    edit_tensors(tmp_path, **{"scorer.proj_token.weight": None, name: None})
    with pytest.raises(CheckpointError, match=r"lacks the tensor prompt_rep_layer\.3\.bias"):
        load(tmp_path)


def test_pickled_weights_are_refused_with_the_command_that_converts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = save_gliner(tmp_path, "bert")
    (tmp_path / "model.safetensors").unlink()
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(SourceError, match="loading a pickle can run code") as raised:
        resolve(str(tmp_path))
    (code,) = re.findall("python -c '(.*)'", str(raised.value))
    monkeypatch.chdir(tmp_path)
    exec(code, {})  # noqa: S102 - the command of the message
    assert load(Path(resolve(str(tmp_path)).folder))[0].outputs == ("spans",)


@pytest.mark.parametrize("missing", ["encoder_config", "tokenizer.json"])
def test_pickled_weights_without_other_files_are_refused_with_the_command_that_writes_all(
    missing: str, tmp_path: Path
) -> None:
    save_gliner(tmp_path, "bert")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    if missing == "encoder_config":
        edit_json(tmp_path / "gliner_config.json", encoder_config=None)
    else:
        (tmp_path / missing).unlink()
    with pytest.raises(SourceError, match="where the package gliner is installed, write a compl"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("gliner_config.json", {"class_token_index": 3}, "class_token_index is 3, but the token"),
        ("tokenizer_config.json", {"truncation_side": "left"}, "truncates the left side"),
        ("tokenizer_config.json", {"bos_token": "the"}, "does not add its bos_token or eos_token"),
    ],
)
def test_tokenizers_that_differ_from_the_package_are_refused(
    file: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_gliner(tmp_path, "bert")
    edit_json(tmp_path / file, **changes)
    model, config = load(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_tokenizer(ModelFolder(tmp_path), config, model.encoder.config.vocab_size)
