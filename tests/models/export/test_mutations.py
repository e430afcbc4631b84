"""Checkpoints from elsewhere: a fault of a file is an error with one sentence."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.export.__main__ import main
from models.export.checkpoint import load
from models.export.model_folder import CheckpointError, ModelFolder
from models.export.query_table import read_query_table
from models.export.sentence_config import Overrides
from models.export.sources import SourceError
from models.export.static import is_static, read_static
from models.export.tokenizer_file import read_tokenizer
from tests.models.checkpoints import (
    edit_json,
    save_checkpoint,
    save_classifier,
    save_tokenizer,
    write_json,
)
from tests.models.export.mutations import SAVE, mutate

# Mutations of each checkpoint. `python -m tests.models.export.mutations` exports any number.
SEEDS = 25


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAVE)
def test_checkpoint_with_one_fault_is_read_or_refused_with_a_sentence(
    kind: str, tmp_path: Path
) -> None:
    SAVE[kind](tmp_path / "good")
    overrides = Overrides(sparse=kind == "masked model")
    refused = 0
    for seed in range(SEEDS):
        folder = tmp_path / "mutated"
        shutil.copytree(tmp_path / "good", folder)
        change = mutate(folder, seed)
        try:
            files = ModelFolder(folder)
            if is_static(files):
                read_static(files, overrides)
            else:
                model, config = load(files, overrides)
                size = model.encoder.config.vocab_size
                tokenizer = read_tokenizer(files, config, size)
                read_query_table(files, config, tokenizer, size)
        except (CheckpointError, SourceError):
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{kind}, seed {seed}, {change}") from error
        shutil.rmtree(folder)
    assert 0 < refused < SEEDS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small embedding model."""
    save_checkpoint(tmp_path / "tiny", "bert")
    save_tokenizer(tmp_path / "tiny")
    return tmp_path / "tiny"


def refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the sentence with which the command refuses a folder."""
    capsys.readouterr()  # of libraries that saved the folder
    assert main([str(folder), "--out", str(folder.parent / "out")]) == 1
    assert not (folder.parent / "out").exists()
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("vitrine-export: ")
    return sentence.removeprefix("vitrine-export: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 513}, "num_hidden_layers has the invalid value 513"),
        ({"num_hidden_layers": 512}, "lacks the tensor encoder.layer.2."),
        ({"hidden_size": 10**9}, "hidden_size has the invalid value 1000000000"),
        ({"intermediate_size": 2**24}, "requires shape (16777216, 32)"),
        ({"layer_norm_eps": 1.5}, "layer_norm_eps has the invalid value 1.5"),
    ],
)
def test_sizes_are_compared_with_the_weights(
    changes: dict[str, object],
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    edit_json(folder / "config.json", **changes)
    assert message in refusal(folder, capsys)


def test_terabytes_that_a_config_claims_are_not_allocated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_json(folder / "config.json", vocab_size=2**24, hidden_size=2**20)
    assert "requires shape (16777216, 1048576)" in refusal(folder, capsys)


def test_number_of_labels_is_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_classifier(tmp_path / "tiny", "bert", 3)
    save_tokenizer(tmp_path / "tiny")
    config = tmp_path / "tiny" / "config.json"
    edit_json(config, id2label=None, num_labels=10**5)
    assert "num_labels has the invalid value 100000" in refusal(tmp_path / "tiny", capsys)
    edit_json(config, id2label={"0": "no", "1": "yes"}, num_labels=10**9)
    assert "num_labels is 1000000000, but id2label has 2" in refusal(tmp_path / "tiny", capsys)
    edit_json(config, id2label={str(i): "" for i in range(70_000)})
    assert "id2label has 70000 labels; the limit is 65536" in refusal(tmp_path / "tiny", capsys)


def test_label_without_a_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_classifier(tmp_path / "tiny", "bert", 3)
    save_tokenizer(tmp_path / "tiny")
    edit_json(tmp_path / "tiny" / "config.json", id2label={"0": "no", "1": None, "2": "yes"})
    assert "id2label has None for 1, which is no text" in refusal(tmp_path / "tiny", capsys)


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def large(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(2**40)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fifo, "not a regular file|has no "),
        (device, "not a regular file|has no "),
        (loop, "has no |cannot be read"),
        (large, "the limit is|cannot be read|is not a tokenizer"),
    ],
)
def test_only_regular_files_of_limited_size_are_read(
    name: str,
    change: Callable[[Path], None],
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(folder / name)
    assert any(part in refusal(folder, capsys) for part in message.split("|"))


def test_folder_in_place_of_a_file_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert refusal(folder, capsys) == "config.json is not a regular file"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "config.json is not valid JSON: it is nested too deeply"),
        (b'{"model_type": "\\ud83d"}', "config.json is not valid JSON: it has half of a surrogate"),
        (b"[]", "config.json is not a JSON object"),
    ],
)
def test_json_of_other_kinds_is_refused(
    content: bytes, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").write_bytes(content)
    assert message in refusal(folder, capsys)


def test_names_from_files_are_printed_on_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(folder / "modules.json", [{"path": "", "type": "a\n\x1b[31m\u202eb"}])
    assert r"modules.json names a\n\x1b[31m\u202eb; code from outside" in refusal(folder, capsys)
    renamed = Path(os.fsdecode(os.fsencode(folder) + b"\xff"))
    folder.rename(renamed)
    (renamed / "modules.json").unlink()
    assert "is not valid UTF-8" in refusal(renamed, capsys)


def test_number_beyond_float64_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        text.replace('"layer_norm_eps": 0.001', '"layer_norm_eps": 1e999')
    )
    assert "layer_norm_eps has the invalid value inf" in refusal(folder, capsys)


def rewrite_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    change(header)
    changed = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + size :])


WORDS = "embeddings.word_embeddings.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header[WORDS].update(shape=[2**40, 2**40]), "cannot be read"),
        (lambda header: header[WORDS].update(data_offsets=[0, 2**60]), "cannot be read"),
        (lambda header: header[WORDS].update(dtype="I128"), "cannot be read"),
        (
            lambda header: header.update({"x" * 501: header.pop(WORDS)}),
            "a tensor's name has 501 characters",
        ),
    ],
)
def test_headers_of_weights_are_checked(
    change: Callable[[dict[str, Any]], object],
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rewrite_header(folder / "model.safetensors", change)
    assert message in refusal(folder, capsys)


def test_tensor_of_two_shards_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "a.safetensors")
    save_file({WORDS: tensors[WORDS] + 1}, folder / "b.safetensors")
    shards = {**dict.fromkeys(tensors, "a.safetensors"), WORDS: "b.safetensors"}
    write_json(folder / "model.safetensors.index.json", {"weight_map": shards})
    assert f"another shard has the tensor {WORDS!r} too" in refusal(folder, capsys)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(x|x)*", ".*.*.*.*"])
def test_slow_patterns_of_an_adapter_are_refused(
    pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SAVE["lora"](tmp_path / "lora")
    edit_json(tmp_path / "lora" / "adapter_config.json", rank_pattern={pattern: 2})
    assert f"rank_pattern has the pattern {pattern!r}" in refusal(tmp_path / "lora", capsys)


def test_complex_matrices_of_an_adapter_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SAVE["lora"](tmp_path / "lora")
    file = tmp_path / "lora" / "adapter_model.safetensors"
    save_file({name: tensor.to(torch.complex64) for name, tensor in load_file(file).items()}, file)
    assert "floating-point dtypes are required" in refusal(tmp_path / "lora", capsys)


def test_panic_of_the_tokenizers_library_is_a_sentence(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    edit_json(folder / "tokenizer.json", normalizer=normalizer)
    assert main([str(folder), "--out", str(folder.parent / "out")]) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("vitrine-export: tokenizer.json is not a tokenizer: ")
