"""Files of Jina v3 with task adapters, and its models of each task, for tests."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.export.families.jina_v3 import CODE
from tests.models.checkpoints import edit_json, save_checkpoint, save_tokenizer, write_json

TASKS = ("retrieval.query", "retrieval.passage", "classification")
RANK, ALPHA = 2, 3


def save_jina_v3(folder: Path, **changes: object) -> dict[str, Any]:
    """Save a random model with task adapters; return transformers' model of each task.

    The model without a task has the name "".
    """
    plain = folder / "plain"
    models = {
        task: save_checkpoint(plain, "jina_embeddings_v3", **changes) for task in ("", *TASKS)
    }
    torch.manual_seed(2)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or "norm" in module or "_ln" in module:
            tensors[f"roberta.{name}"] = tensor
            continue
        down = torch.randn(len(TASKS), RANK, tensor.shape[1]) / 8
        up = torch.randn(len(TASKS), tensor.shape[0], RANK) / 8
        for task, update in zip(TASKS, up @ down, strict=True):
            _add(models[task], module, update * ALPHA / RANK)
        is_embedding = "embeddings" in module
        source = f"roberta.{module}.parametrizations.weight"
        tensors[f"{source}.original"] = tensor
        tensors[f"{source}.0.lora_A"] = up if is_embedding else down
        tensors[f"{source}.0.lora_B"] = down if is_embedding else up
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((plain / "config.json").read_text())
    edit_json(
        folder / "config.json",
        auto_map={
            "AutoConfig": f"{CODE}configuration_xlm_roberta.XLMRobertaFlashConfig",
            "AutoModel": f"{CODE}modeling_lora.XLMRobertaLoRA",
        },
        rotary_emb_base=20000.0,
        rope_parameters=None,
        position_embedding_type="rotary",
        load_trained_adapters=True,
        lora_adaptations=list(TASKS),
        task_instructions=dict.fromkeys(TASKS, ""),
        lora_rank=RANK,
        lora_alpha=ALPHA,
    )
    return models


def save_with_tokenizer(folder: Path) -> dict[str, Any]:
    """Save a model with a tokenizer and the modules of Jina v3."""
    models = save_jina_v3(folder)
    shutil.rmtree(folder / "plain")
    save_tokenizer(folder)
    package = "sentence_transformers.models"
    kinds = "custom_st.Transformer", f"{package}.Pooling", f"{package}.Normalize"
    paths = "", "1_Pooling", "2_Normalize"
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    return models


def _add(model: Any, module: str, update: Tensor) -> None:  # noqa: ANN401
    """Add an update to a weight, by its name in the first files, of a model of transformers."""
    layer = module.replace("encoder.layers", "layers")
    with torch.no_grad():
        if layer.endswith("Wqkv"):
            for name, part in zip("qkv", update.chunk(3), strict=True):
                target = layer.replace("mixer.Wqkv", f"self_attn.{name}_proj")
                model.get_submodule(target).weight.add_(part)
        else:
            target = layer.replace("mixer.out_proj", "self_attn.o_proj")
            model.get_submodule(target).weight.add_(update)
