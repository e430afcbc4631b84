"""Tensors and configs of checkpoints, against transformers."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.export.checkpoint import load
from models.export.model_folder import CheckpointError
from tests.models.checkpoints import (
    edit_json,
    edit_tensors,
    save_checkpoint,
    write_json,
    write_modules,
)

# Id 1 is RoBERTa's padding token; the second row has it in the middle.
IDS = [[0, 7, 9, 11, 2], [0, 8, 1, 13, 2], [0, 5, 2]]

Q = "encoder.layer.0.attention.self.query.weight"


def assert_loads(folder: Path, reference: Any) -> None:  # noqa: ANN401 - a model of transformers
    """Compare token vectors of the loaded encoder with those of the saved one."""
    ids = torch.tensor(IDS[:1])
    expected = reference(ids).last_hidden_state
    torch.testing.assert_close(load(folder)[0].encoder(ids), expected, rtol=1e-5, atol=1e-5)


def test_token_type_vectors_equal_transformers(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, "bert")
    encoder = load(tmp_path)[0].encoder
    ids, types = torch.tensor(IDS[:2]), torch.tensor([[0, 0, 1, 1, 1], [0, 1, 0, 1, 1]])
    expected = reference(ids, token_type_ids=types).last_hidden_state
    torch.testing.assert_close(encoder(ids, token_type_ids=types), expected, rtol=1e-5, atol=1e-5)


def test_prefixed_and_gamma_beta_tensor_names_load(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, "bert")
    tensors = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    tensors["cls.predictions.bias"] = torch.zeros(60)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_loads(tmp_path, reference)


@pytest.mark.parametrize("wrapper", ["module.", "0.auto_model.", "0_auto_model.", "module.bert."])
def test_tensor_names_with_the_prefix_of_a_wrapper_load(wrapper: str, tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, "bert")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {f"{wrapper}{name}": tensor for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    assert_loads(tmp_path, reference)


def test_unused_heads_are_left_out_and_named(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, "bert")
    tensors = load_file(tmp_path / "model.safetensors")
    head = {"qa_outputs.weight": torch.ones(2, 32), "qa_outputs.bias": torch.ones(2)}
    prefixed = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    save_file({**prefixed, **head}, tmp_path / "model.safetensors")
    messages: list[str] = []
    load(tmp_path, report=messages.append)
    assert_loads(tmp_path, reference)
    assert messages == [
        "Ignored tensors that do not affect vectors: pooler.dense.bias, pooler.dense.weight, "
        "qa_outputs.bias, qa_outputs.weight"
    ]


def test_sharded_checkpoint_loads_the_same_model(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, "bert")
    (tmp_path / "model.safetensors").unlink()
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_loads(tmp_path, reference)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q: None}, f"lacks the tensor {Q}"),
        (
            {Q: torch.zeros(32, 31)},
            rf"{Q} has shape \(32, 31\) and .*32; the config requires shape \(32, 32\)",
        ),
        (
            {Q: torch.zeros(32, 32).int()},
            rf"{Q} has shape .*int32; the config requires shape .* and a floating-point dtype",
        ),
        ({"encoder.layer.7.x": torch.zeros(1)}, r"unexpected tensors \(1\): encoder\.layer\.7\.x"),
        ({Q: torch.zeros(32, 32) / 0}, f"{Q} has a NaN or an infinity"),
        ({Q: -torch.ones(32, 32) / 0}, f"{Q} has a NaN or an infinity"),
    ],
)
def test_missing_invalid_or_unknown_tensor_raises_with_its_name(
    changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, "bert")
    edit_tensors(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2' is not supported; supported: albert, bert, bidirectional_pplx",
        ),
        ({"hidden_act": "laplace"}, "activation 'laplace' is not one of gelu"),
        ({"hidden_act": ["gelu"]}, r"hidden_act has the invalid value \['gelu'\]"),
        ({"hidden_size": "32"}, "hidden_size has the invalid value '32'"),
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"num_attention_heads": 5}, "hidden_size 32 is not divisible by num_attention_heads 5"),
        ({"layer_norm_eps": "x"}, "layer_norm_eps has the invalid value 'x'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True; only False is supported"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is"),
    ],
)
def test_unsupported_config_value_raises_with_the_field_name(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, "bert")
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_missing_config_fields_are_named_in_the_error(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "bert", "vocab_size": 9})
    with pytest.raises(CheckpointError, match=r"config.json lacks hidden_size, intermediate_size"):
        load(tmp_path)


def test_pickle_only_folder_error_suggests_save_pretrained(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled weights only \(pytorch_model.bin\)"):
        load(tmp_path)


def test_truncated_weights_raise_checkpoint_error(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        load(tmp_path)


def test_weights_that_may_not_be_read_are_not_called_missing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    (tmp_path / "model.safetensors").chmod(0)
    code = (
        "import sys; from pathlib import Path\n"
        "from models.export.model_folder import CheckpointError, ModelFolder\n"
        "try: ModelFolder(Path(sys.argv[1])).tensors()\n"
        "except CheckpointError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    if os.geteuid() == 0:  # root may read any file, until it loses this capability
        capabilities = "-dac_override,-dac_read_search"
        command = ["setpriv", f"--bounding-set={capabilities}", *command]
    message = subprocess.check_output(command, text=True)
    assert message == "model.safetensors cannot be read: Permission denied\n"


def test_missing_or_invalid_config_json_raises_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        load(tmp_path)


def test_tensor_under_two_names_raises_checkpoint_error(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    edit_tensors(tmp_path, **{f"bert.{Q}": torch.zeros(32, 32)})
    with pytest.raises(CheckpointError, match=f"are both {Q}"):
        load(tmp_path)


def test_shards_outside_the_folder_are_rejected(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", "bert")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = tmp_path / "model" / "model.safetensors.index.json"
    write_json(index, {"weight_map": {"x": "../outside.safetensors"}})
    with pytest.raises(CheckpointError, match=r"'../outside.safetensors' points outside"):
        load(tmp_path / "model")
    write_json(index, {})
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load(tmp_path / "model")


def test_encoder_in_a_subfolder_loads_the_same_model(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path / "0_Transformer", "bert")
    write_modules(tmp_path, ("Transformer", "0_Transformer"), ("Pooling", "1_Pooling"))
    write_json(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "cls"})
    write_json(tmp_path / "0_Transformer" / "sentence_bert_config.json", {"max_seq_length": 9})
    _, sentence_config = load(tmp_path)
    assert (sentence_config.transformer, sentence_config.max_tokens) == ("0_Transformer", 9)
    assert_loads(tmp_path, reference)
