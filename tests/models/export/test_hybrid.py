"""Export of embeddings, token weights and multi-vectors of one model, against BGE-M3's formulas."""

import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.artifact import Artifact
from models.engines import Output, open_engine
from models.export.checkpoint import load
from models.export.exporter import export
from models.export.model_folder import CheckpointError
from models.export.sentence_config import Overrides, overrides_of
from models.export.sources import resolve
from models.packing import pack
from tests.eventually import HANG_S
from tests.models.checkpoints import (
    edit_json,
    save_bge_m3,
    save_checkpoint,
    save_token_classifier,
    save_tokenizer,
    write_json,
)
from tests.models.wrong_outputs import assert_self_check_refuses

ROWS = [[0, 5, 6, 7, 5, 2], [0, 9, 2], [0, *range(4, 30), 2], [0, 5, 3, 2]]
HEADS = ("sparse_linear", "colbert_linear")


def head(folder: Path, name: str, tokens: Tensor) -> Tensor:
    """Return the output of a head of BGE-M3, computed by torch."""
    own = load_file(folder / f"{name}.safetensors")
    return torch.nn.functional.linear(tokens, own["weight"], own["bias"])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Artifact]:
    folder = tmp_path_factory.mktemp("hybrid")
    save_bge_m3(folder)
    artifact, parity = export(resolve(str(folder)), folder / "artifact")
    assert {line.output for line in parity} == {"pooled", "weights", "multi"}
    return folder, artifact


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_one_pass_gives_the_outputs_of_bge_m3(
    exported: tuple[Path, Artifact], engine: str, tmp_path: Path
) -> None:
    folder, artifact = exported
    encoder = save_checkpoint(tmp_path, "xlm-roberta", pad_token_id=1)  # the same weights
    opened = open_engine(artifact, engine)
    outputs = artifact.manifest.outputs
    assert outputs == ("pooled", "weights", "multi")
    together = opened.run_outputs(pack(ROWS), outputs)
    ends = np.cumsum([len(row) for row in ROWS])[:-1]
    for index, row in enumerate(ROWS):
        with torch.no_grad():
            tokens = encoder(torch.tensor([row])).last_hidden_state[0]
            expected = {
                "pooled": tokens[:1],
                "weights": torch.relu(head(folder, "sparse_linear", tokens)),
                "multi": head(folder, "colbert_linear", tokens),
            }
        alone = opened.run_outputs(pack([row]), outputs)
        for output, one, all_rows in zip(outputs, alone, together, strict=True):
            is_pooled = output == "pooled"
            of_row = all_rows[index : index + 1] if is_pooled else np.split(all_rows, ends)[index]
            for actual in (one, of_row):
                np.testing.assert_allclose(actual, expected[output], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_reference_model_of_the_artifact_has_all_heads(exported: tuple[Path, Artifact]) -> None:
    _, artifact = exported
    model, _ = load(artifact.path / "source", overrides_of(artifact))
    row = torch.tensor([ROWS[0]])
    with torch.no_grad():
        results = model.forward_all(row, None, torch.ones_like(row).float())
    actual = open_engine(artifact, "onnxruntime").run_outputs(pack(ROWS[:1]), model.outputs)
    for own, expected in zip(actual, results, strict=True):
        np.testing.assert_allclose(own, expected.reshape(own.shape), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("output", ["pooled", "weights", "multi"])
def test_self_check_covers_each_output(exported: tuple[Path, Artifact], output: Output) -> None:
    _, artifact = exported
    assert_self_check_refuses(open_engine(artifact, "onnxruntime"), artifact, output)


def test_tokens_without_weights_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    save_bge_m3(tmp_path)
    assert set(load(tmp_path)[1].unweighted) == {"<s>", "</s>", "<pad>", "<unk>"}
    names = {f"{name}_token": f"<{name}>" for name in ("cls", "pad", "unk")}
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", **names})
    assert set(load(tmp_path)[1].unweighted) == {"<cls>", "<pad>", "<unk>"}


@pytest.mark.parametrize("missing", [HEADS[:1], HEADS[1:], HEADS])
def test_folder_without_some_heads_has_the_other_outputs(
    tmp_path: Path, missing: tuple[str, ...]
) -> None:
    save_bge_m3(tmp_path)
    for name in missing:
        (tmp_path / f"{name}.safetensors").unlink()
    outputs = ["pooled"]
    outputs += ["weights"] * (HEADS[0] not in missing) + ["multi"] * (HEADS[1] not in missing)
    reports: list[str] = []
    assert list(load(tmp_path, report=reports.append)[0].outputs) == outputs
    assert not any("left out" in report for report in reports)


@pytest.mark.slow
def test_pickled_heads_are_left_out_with_the_command_that_converts_them(tmp_path: Path) -> None:
    save_bge_m3(tmp_path)
    expected = [load_file(tmp_path / f"{name}.safetensors") for name in HEADS]
    for name, tensors in zip(HEADS, expected, strict=True):
        (tmp_path / f"{name}.safetensors").unlink()
        torch.save(tensors, tmp_path / f"{name}.pt")
    reports: list[str] = []
    assert load(tmp_path, report=reports.append)[0].outputs == ("pooled",)
    (report,) = (report for report in reports if "left out" in report)
    assert report.startswith("sparse_linear.pt and colbert_linear.pt")
    command = report[report.index("python -c") :].replace("python", sys.executable, 1)
    subprocess.run(shlex.split(command), cwd=tmp_path, check=True, timeout=HANG_S)
    for name, tensors in zip(HEADS, expected, strict=True):
        converted = load_file(tmp_path / f"{name}.safetensors")
        assert {key: value.tolist() for key, value in converted.items()} == {
            key: value.tolist() for key, value in tensors.items()
        }
    assert load(tmp_path)[0].outputs == ("pooled", "weights", "multi")


def test_head_of_no_vectors_is_refused(tmp_path: Path) -> None:
    save_bge_m3(tmp_path)
    tensors = {"weight": torch.ones(0, 32), "bias": torch.ones(0)}
    save_file(tensors, tmp_path / "colbert_linear.safetensors")
    with pytest.raises(CheckpointError, match=r"colbert_linear\.safetensors lacks a matrix"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({"weight": torch.ones(2, 32), "bias": torch.ones(2)}, "'weight' with one row"),
        ({"weight": torch.ones(1, 31), "bias": torch.ones(1)}, "width 31"),
        ({"weight": torch.ones(1, 32)}, "lacks the tensor bias"),
        ({"weight": torch.ones(1, 32), "bias": torch.ones(1), "a": torch.ones(1)}, "unexpected"),
    ],
)
def test_invalid_head_is_refused(tmp_path: Path, tensors: dict[str, Tensor], error: str) -> None:
    save_bge_m3(tmp_path)
    save_file(tensors, tmp_path / "sparse_linear.safetensors")
    with pytest.raises(CheckpointError, match=error):
        load(tmp_path)


def save_gte(folder: Path) -> None:
    """Save a model with token weights, as gte-multilingual-base."""
    save_token_classifier(folder, "gte", 1)
    save_tokenizer(folder)
    names = ["GteModel", "GteForTokenClassification"]
    edit_json(folder / "config.json", architectures=names)


def test_weights_of_gte_equal_the_relu_of_its_token_classifier(tmp_path: Path) -> None:
    oracle = save_token_classifier(tmp_path / "oracle", "gte", 1)
    save_gte(tmp_path)
    model, _ = load(tmp_path, Overrides(sparse=True))
    assert model.outputs == ("pooled", "tokens", "weights")
    row = torch.tensor([ROWS[2]])
    with torch.no_grad():
        _, _, weights = model.forward_all(row, None, torch.ones_like(row).float())
        expected = torch.relu(oracle(row).logits)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    assert 0 < (weights > 0).sum() < weights.numel()


def test_weights_of_gte_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    save_gte(tmp_path)
    reports: list[str] = []
    assert load(tmp_path, report=reports.append)[0].outputs == ("pooled", "tokens")
    assert any("--sparse exports sparse vectors" in report for report in reports)


def test_sparse_vectors_of_a_token_classifier_are_refused(tmp_path: Path) -> None:
    save_token_classifier(tmp_path, "gte", 3)
    save_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="sparse vectors cannot be exported"):
        load(tmp_path, Overrides(sparse=True))


def test_sparse_vectors_of_another_model_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "gte")
    save_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="or a head for the weights of tokens"):
        load(tmp_path, Overrides(sparse=True))
