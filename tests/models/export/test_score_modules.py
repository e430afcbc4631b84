"""Cross-encoders in modules, against sentence-transformers: pooling, layers and a last one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import CrossEncoder

from models.export.checkpoint import load
from models.export.model_folder import CheckpointError, ModelFolder
from models.export.sentence_config import Overrides
from models.export.tokenizer_file import read_tokenizer
from models.packing import pack
from tests.models.checkpoints import (
    edit_json,
    save_chatml,
    save_checkpoint,
    save_tokenizer,
    write_json,
    write_modules,
)

PAIRS = [("w7 w9", "w21 w5 w33"), ("w5", "w8 w9 " * 30), ("w40 w41 w42", "w5"), ("w6", "")]
ACTIVATION = "torch.nn.modules.{}"


def save_dense(
    folder: Path,
    sizes: tuple[int, int],
    activation: str = "linear.Identity",
    *,
    bias: bool = True,
    **names: str,
) -> None:
    fields = {"in_features": sizes[0], "out_features": sizes[1], "bias": bias}
    own = {"activation_function": ACTIVATION.format(activation)}
    write_json(folder / "config.json", {**fields, **own, **names})
    tensors = {"linear.weight": torch.randn(sizes[::-1]) / 4}
    save_file(
        {**tensors, **({"linear.bias": torch.randn(sizes[1])} if bias else {})}, folder / FILE
    )


FILE = "model.safetensors"
SCORES = {"module_input_name": "sentence_embedding", "module_output_name": "scores"}


def save_cross_encoder(folder: Path, family: str, pooling: str, labels: int = 1) -> None:
    """Save a random cross-encoder with the modules of the rerankers of ettin."""
    torch.manual_seed(0)
    if family == "qwen3":
        size = save_chatml(folder)
        save_checkpoint(folder, family, vocab_size=size, max_position_embeddings=64)
        edit_json(folder / "tokenizer_config.json", model_max_length=40)
    else:
        save_checkpoint(folder, family)
        save_tokenizer(folder)
        names = ["input_ids", "token_type_ids", "attention_mask"]
        edit_json(
            folder / "tokenizer_config.json", model_input_names=names[:: 1 + (family != "bert")]
        )
    kinds = ("Pooling", "Dense", "LayerNorm", "Dense")
    paths = [f"{index}_{kind}" for index, kind in enumerate(kinds, 1)]
    write_modules(folder, ("Transformer", ""), *zip(kinds, paths, strict=True))
    width = 32 * (2 if pooling == "both" else 1)
    modes = ["cls", "mean"] if pooling == "both" else pooling
    write_json(
        folder / paths[0] / "config.json", {"embedding_dimension": 32, "pooling_mode": modes}
    )
    save_dense(folder / paths[1], (width, 24), "activation.GELU")
    write_json(folder / paths[2] / "config.json", {"dimension": 24})
    norm = {"norm.weight": torch.randn(24), "norm.bias": torch.randn(24)}
    save_file(norm, folder / paths[2] / FILE)
    save_dense(folder / paths[3], (24, labels), bias=labels > 1, **SCORES)
    write_json(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})


def logits_of(folder: Path) -> torch.Tensor:
    """Return the logits of each pair, `(N, C)`, of all rows in one batch."""
    files = ModelFolder(folder)
    model, config = load(files)
    tokenizer = read_tokenizer(files, config, model.encoder.config.vocab_size)
    tokenizer.enable_truncation(config.max_tokens)
    encodings = tokenizer.encode_batch(PAIRS)
    inputs = pack([e.ids for e in encodings]).inputs()
    batch = {name: torch.from_numpy(array) for name, array in inputs.items()}
    if model.has_token_types:
        batch["token_types"] = torch.tensor([kind for e in encodings for kind in e.type_ids])
    (logits,) = model.forward_packed(**batch)
    return logits


@pytest.mark.parametrize(
    ("family", "pooling", "labels"),
    [("bert", "both", 1), ("modernbert", "cls", 1), ("qwen3", "lasttoken", 1), ("bert", "mean", 3)],
)
def test_logits_equal_sentence_transformers(
    family: str, pooling: str, labels: int, tmp_path: Path
) -> None:
    save_cross_encoder(tmp_path, family, pooling, labels)
    reference = CrossEncoder(str(tmp_path), device="cpu")
    config = load(tmp_path)[1]
    assert config.labels == tuple(f"LABEL_{i}" for i in range(labels))
    # Without a saved activation: sigmoid for one score, and none for several.
    assert config.activation == ("sigmoid" if labels == 1 else "identity")
    logits = logits_of(tmp_path)
    for row, pair in zip(logits, PAIRS, strict=True):
        expected = torch.from_numpy(reference.predict([pair], activation_fn=torch.nn.Identity()))
        torch.testing.assert_close(row, expected.reshape(-1), rtol=1e-5, atol=1e-5)
    scores = logits.sigmoid() if labels == 1 else logits
    expected = torch.from_numpy(reference.predict(PAIRS)).reshape(scores.shape)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    assert logits.std() > 0.1


@pytest.mark.parametrize(
    ("name", "activation"),
    [("activation.Sigmoid", "sigmoid"), ("linear.Identity", "identity")],
)
def test_saved_activation_is_used(name: str, activation: str, tmp_path: Path) -> None:
    save_cross_encoder(tmp_path, "bert", "mean")
    own = {"activation_fn": ACTIVATION.format(name)}
    edit_json(tmp_path / "config_sentence_transformers.json", **own)
    assert load(tmp_path)[1].activation == activation


MODEL = "config_sentence_transformers.json"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation of scores": (MODEL, {"activation_fn": "torch.nn.ReLU"}, "'torch.nn.ReLU' of the"),
    "activation of a layer": (
        "2_Dense/config.json",
        {"activation_function": "torch.nn.modules.activation.Hardswish"},
        "Hardswish' is not one of",
    ),
    "class of the model": (MODEL, {"model_type": "SentenceTransformer"}, "model_type is"),
    "pooling without prompts": (
        "1_Pooling/config.json",
        {"include_prompt": False},
        "include_prompt",
    ),
    "unknown pooling": ("1_Pooling/config.json", {"pooling_mode": "sum"}, "the pooling 'sum'"),
    "input of the last layer": (
        "4_Dense/config.json",
        {"module_input_name": "token_embeddings"},
        "module_input_name is 'token_embeddings'",
    ),
    "output of a layer": (
        "2_Dense/config.json",
        {"module_output_name": "scores"},
        "module_output_name is 'scores'",
    ),
    "width of a layer": ("4_Dense/config.json", {"in_features": 32}, "the config requires shape"),
    "not for scores": ("4_Dense/config.json", {"module_output_name": None}, "model_type is 'Cross"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_modules_are_refused(name: str, tmp_path: Path) -> None:
    file, changes, message = REFUSED[name]
    save_cross_encoder(tmp_path, "bert", "mean")
    edit_json(tmp_path / file, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_pooling_cannot_be_changed(tmp_path: Path) -> None:
    save_cross_encoder(tmp_path, "bert", "mean")
    with pytest.raises(CheckpointError, match="the model computes no pooled embeddings"):
        load(tmp_path, Overrides(pooling=["cls"]))
