"""Embedding models made of decoders, as their publishers store them, against transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.export.checkpoint import load
from models.export.families.rotary import read_rotary
from models.export.families.rotary_scaling import DECODER_TYPES
from models.export.model_folder import CheckpointError
from models.export.parity import reference_outputs
from models.export.sentence_config import Overrides
from models.network.positions import rotation
from models.packing import pack
from tests.models.checkpoints import (
    edit_json,
    edit_tensors,
    save_checkpoint,
    save_classifier,
    save_sentence_model,
    write_json,
    write_modules,
)
from tests.models.export.test_families import LLAMA3, WINDOWS, YARN, rows

BOTH = {"is_causal": False}
ORIGINAL = "original_max_position_embeddings"
ROWS = rows([1, 2, 9, 20, 36])
PROJECTED = 12
MINISTRAL = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
}


def save_nemotron(folder: Path, **changes: object) -> Any:  # noqa: ANN401
    """Save a model like llama-nemotron-embed; return transformers' network."""
    reference = save_checkpoint(folder, "llama", **BOTH, **changes)
    rename(folder, "llama_bidirec", "llama_bidirectional_model.LlamaBidirectional")
    edit_json(folder / "config.json", pooling="avg")
    return reference


def save_pplx(folder: Path, **changes: object) -> Any:  # noqa: ANN401
    """Save a model like pplx-embed, without its quantiser; return transformers' network."""
    reference = save_checkpoint(folder, "qwen3", **BOTH, **changes)
    rename(folder, "bidirectional_pplx_qwen3", "modeling.PPLXQwen3")
    edit_json(folder / "config.json", use_bidirectional_attention=True)
    return reference


def save_voyage(folder: Path, **changes: object) -> Any:  # noqa: ANN401
    """Save a model like voyage-4-nano, whose projection is `linear.weight`; return the network."""
    reference = save_checkpoint(folder, "qwen3", **BOTH, **changes)
    rename(folder, "qwen3", "modeling_qwen3.VoyageQwen3BidirectionalEmbed")
    edit_json(folder / "config.json", num_labels=PROJECTED)
    file = folder / "model.safetensors"
    tensors = {f"model.{name}": tensor for name, tensor in load_file(file).items()}
    torch.manual_seed(3)
    projection = {"linear.weight": 0.15 * torch.randn(PROJECTED, 32)}
    save_file(tensors | projection, file, metadata={"format": "pt"})
    return reference


def rename(folder: Path, model_type: str, code: str) -> None:
    """Let config.json name code instead of the direction of attention."""
    edit_json(
        folder / "config.json",
        model_type=model_type,
        architectures=[f"{code.rpartition('.')[2]}Model"],
        auto_map={"AutoConfig": f"{code}Config", "AutoModel": f"{code}Model"},
    )
    remove(folder, "is_causal")


def remove(folder: Path, field: str) -> None:
    """Remove a field of config.json."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config[field]
    file.write_text(json.dumps(config))


def token_vectors(reference: Any, row: list[int]) -> Tensor:  # noqa: ANN401
    """Return the token vectors `(L, D)` of transformers' network."""
    inputs = {"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row))}
    with torch.no_grad():
        vectors: Tensor = reference(**inputs).last_hidden_state[0]
    return vectors


Save = Callable[..., Any]
PUBLISHED: list[tuple[Save, dict[str, object]]] = [
    (save_nemotron, {}),
    (save_nemotron, {"head_dim": 16, "rope_parameters": LLAMA3}),
    (save_nemotron, {"attention_bias": True, "num_key_value_heads": 1}),
    (save_pplx, {}),
    (save_pplx, {"num_key_value_heads": 1, "head_dim": 10}),
    (save_pplx, {"attention_bias": True, **WINDOWS, "layer_types": None, "max_window_layers": 1}),
    (save_voyage, {}),
    (save_voyage, {"num_key_value_heads": 4, "attention_bias": True}),
    (save_voyage, {"num_key_value_heads": 1, "head_dim": 10}),
]
NAMES = [f"{save.__name__[5:]}-{'-'.join(changes) or 'default'}" for save, changes in PUBLISHED]


@pytest.mark.parametrize(("save", "changes"), PUBLISHED, ids=NAMES)
def test_vectors_of_published_files_equal_the_formula_on_transformers(
    save: Save, changes: dict[str, object], tmp_path: Path
) -> None:
    reference = save(tmp_path, **changes).double()
    model, config = load(tmp_path)
    model.double()
    assert config.pooling == ("mean",)
    weight = load_file(tmp_path / "model.safetensors").get("linear.weight")
    project = torch.eye(32).double() if weight is None else weight.double()
    assert model.width == len(project)
    # As in the publishers' code, each token vector is projected before pooling.
    expected = torch.stack([(token_vectors(reference, row) @ project.T).mean(0) for row in ROWS])
    with torch.no_grad():
        alone = [model(torch.tensor([row]), None, torch.ones(1, len(row)))[0] for row in ROWS]
        batch = {name: torch.from_numpy(array) for name, array in pack(ROWS).inputs().items()}
        together = model.forward_packed(**batch)[0]
    for actual in (torch.stack(alone), together):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_quantiser_of_pplx_is_refused_by_name(tmp_path: Path) -> None:
    save_pplx(tmp_path)
    write_modules(tmp_path, ("Transformer", ""), ("Pooling", "1_Pooling"))
    write_json(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    load(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    quantizer = {"idx": 2, "name": "2", "path": "", "type": "st_quantize.FlexibleQuantizer"}
    write_json(tmp_path / "modules.json", [*modules, {**quantizer, "kwargs": ["quantization"]}])
    with pytest.raises(CheckpointError, match=r"names st_quantize\.FlexibleQuantizer, which round"):
        load(tmp_path)


@pytest.mark.parametrize("pooling", ["avg", "cls", "last"])
def test_nemotron_pools_as_its_config_says(pooling: str, tmp_path: Path) -> None:
    save_nemotron(tmp_path)
    edit_json(tmp_path / "config.json", pooling=pooling)
    assert load(tmp_path)[1].pooling == ({"avg": "mean"}.get(pooling, pooling),)


def test_rows_of_ministral3_end_where_transformers_scales_queries(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, "ministral3", rope_parameters=MINISTRAL, pooling="avg")
    model, config = load(tmp_path)
    assert (config.max_tokens, config.pooling) == (16, ("mean",))
    row = ROWS[-1][:20]
    expected = token_vectors(reference, row)
    actual = model.encoder(torch.tensor([row]))[0]
    torch.testing.assert_close(actual[:16], expected[:16], rtol=1e-5, atol=1e-5)
    assert (actual[16:] - expected[16:]).abs().max() > 1e-3


@pytest.mark.parametrize("limit", [50, 60, 70])
def test_rows_of_ministral3_can_exceed_max_position_embeddings(limit: int, tmp_path: Path) -> None:
    rotary = {**MINISTRAL, "original_max_position_embeddings": 60}
    changes: dict[str, Any] = {"rope_parameters": rotary, "max_position_embeddings": 40}
    save_sentence_model(tmp_path, "ministral3", **changes)
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": limit})
    oracle = SentenceTransformer(str(tmp_path), device="cpu", local_files_only=True)
    model, config = load(tmp_path)
    assert config.max_tokens == min(limit, 60)
    text = "w7 w9 w21 w40 " * 12
    ids = oracle.preprocess([text])["input_ids"].tolist()
    assert len(ids[0]) == 50
    actual = reference_outputs(model, ids)[0]["pooled"]
    np.testing.assert_allclose(actual, oracle.encode([text]), rtol=1e-5, atol=1e-5)


# Llama 3.1 and 3.2, and the default of Ministral 3 in transformers.
@pytest.mark.parametrize(
    "published",
    [
        {**LLAMA3, "rope_theta": 5e5, "high_freq_factor": 4.0, "factor": factor, ORIGINAL: 8192}
        for factor in (8.0, 32.0)
    ]
    + [
        {**YARN, "rope_theta": 1e6, "factor": 16.0, ORIGINAL: 16384, **betas}
        for betas in ({"beta_fast": 32.0, "beta_slow": 1.0}, {"beta_fast": None})
    ],
)
def test_angles_of_published_models_equal_transformers(published: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(head_dim=128, rope_parameters=dict(published))
    angles, amplitude = ROPE_INIT_FUNCTIONS[published["rope_type"]](config)
    positions = torch.tensor([0.0, 1.0, 7.0, 100.0])
    expected = positions[:, None, None] * angles
    rotary = read_rotary({"rope_parameters": published}, 128, 1e4, types=DECODER_TYPES)
    actual = rotation(positions, rotary, 128, torch.float32)
    torch.testing.assert_close(actual.cos, expected.cos() * amplitude, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.sin, expected.sin() * amplitude, rtol=1e-5, atol=1e-5)
    scaling = {name: value for name, value in published.items() if name != "rope_theta"}
    older = {"rope_scaling": scaling, "rope_theta": published["rope_theta"]}
    assert read_rotary(older, 128, 1e4, types=DECODER_TYPES) == rotary


@pytest.mark.parametrize("pooling", ["avg", "last"])
@pytest.mark.parametrize("labels", [1, 3])
def test_nemotron_reranker_scores_the_pooled_vector(
    pooling: str, labels: int, tmp_path: Path
) -> None:
    reference = save_classifier(tmp_path, "llama", labels, **BOTH)
    rename(tmp_path, "llama_bidirec", "modeling.LlamaBidirectional")
    names = ["LlamaBidirectionalForSequenceClassification"]
    edit_json(tmp_path / "config.json", architectures=names, pooling=pooling, temperature=1.0)
    model, _ = load(tmp_path)
    for row in ROWS:
        vectors = token_vectors(reference.model, row)
        pooled = vectors.mean(0) if pooling == "avg" else vectors[-1]
        expected = (reference.score.weight @ pooled).detach()
        actual = model(torch.tensor([row]), None, torch.ones(1, len(row)))[0]
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "last", "weighted_mean", "mean_sqrt_len"])
def test_projection_follows_every_pooling_that_is_a_weighted_sum(
    pooling: str, tmp_path: Path
) -> None:
    reference = save_voyage(tmp_path)
    model, _ = load(tmp_path, Overrides(pooling=[pooling]))
    weight = load_file(tmp_path / "model.safetensors")["linear.weight"]
    row = ROWS[-1]
    vectors = token_vectors(reference, row) @ weight.T
    positions = torch.arange(1.0, len(row) + 1)[:, None]
    expected = {
        "cls": vectors[0],
        "last": vectors[-1],
        "weighted_mean": (vectors * positions).sum(0) / positions.sum(),
        "mean_sqrt_len": vectors.sum(0) / len(row) ** 0.5,
    }
    actual = model(torch.tensor([row]), None, torch.ones(1, len(row)))[0]
    torch.testing.assert_close(actual, expected[pooling], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_direction_of_attention_changes_vectors(family: str, tmp_path: Path) -> None:
    causal = save_checkpoint(tmp_path / "causal", family)
    both = save_checkpoint(tmp_path / "both", family, **BOTH)
    first = [token_vectors(model, ROWS[-1])[0] for model in (causal, both)]
    assert (first[0] - first[1]).abs().max() > 0.1  # otherwise the comparisons show nothing


# Task repositories of Jina v5 have the weights of a task, and name all tasks.
@pytest.mark.parametrize("family", ["eurobert", "qwen3"])
def test_merged_model_of_jina_v5_has_the_vector_of_the_last_token(
    family: str, tmp_path: Path
) -> None:
    reference = save_checkpoint(tmp_path, family).double()
    tasks = ["retrieval", "text-matching", "clustering", "classification"]
    edit_json(tmp_path / "config.json", task_names=tasks, is_decoder=False)
    write_modules(tmp_path, ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2"))
    write_json(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True})
    prompts = {"query": "Query: ", "document": "Document: "}
    settings = {"prompts": prompts, "default_prompt_name": "document"}
    write_json(tmp_path / "config_sentence_transformers.json", settings)
    model, config = load(tmp_path)
    assert (config.pooling, config.normalize) == (("last",), True)
    assert (config.prompts, config.default_prompt) == (prompts, "document")
    expected = torch.stack([token_vectors(reference, row)[-1] for row in ROWS])
    batch = {name: torch.from_numpy(array) for name, array in pack(ROWS).inputs().items()}
    actual = model.double().forward_packed(**batch)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


# harrier-oss-v1-270m is a causal Gemma 3 text model, and harrier-oss-v1-0.6b a Qwen3.
@pytest.mark.parametrize("bidirectional", [{}, {"use_bidirectional_attention": False}])
def test_gemma_without_bidirectional_attention_has_a_causal_last_token(
    bidirectional: dict[str, object], tmp_path: Path
) -> None:
    changes = {"use_bidirectional_attention": False, "sliding_window": 7}
    reference = save_checkpoint(tmp_path, "gemma3_text", **changes).double()
    remove(tmp_path, "use_bidirectional_attention")
    edit_json(tmp_path / "config.json", **bidirectional)
    model, _ = load(tmp_path, Overrides(pooling=["last"]))
    expected = torch.stack([token_vectors(reference, row)[-1] for row in ROWS])
    batch = {name: torch.from_numpy(array) for name, array in pack(ROWS).inputs().items()}
    actual = model.double().forward_packed(**batch)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_rotary_frequencies_in_older_files_are_ignored(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    edit_tensors(tmp_path, **{"layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    messages: list[str] = []
    load(tmp_path, report=messages.append)
    assert "layers.1.self_attn.rotary_emb.inv_freq" in messages[0]


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 9.0, "factor": 2.0}
LOOK_ALIKES: list[tuple[Save, dict[str, object], str]] = [
    # Another mask.
    (save_nemotron, {"is_causal": True}, "is_causal is True; only False is supported"),
    (save_pplx, {"is_causal": True}, "is_causal is True; only False is supported"),
    (save_pplx, {"use_bidirectional_attention": False}, "is False, but is_causal is False, which"),
    (save_voyage, {"use_bidirectional_attention": False}, "is False, but is_causal is False, wh"),
    (save_voyage, {"is_causal": True}, "is_causal is True; only False is supported"),
    (
        lambda folder: save_checkpoint(folder, "llama"),
        {"architectures": ["LlamaBidirectionalModel"]},
        "architectures names LlamaBidirectionalModel, whose attention can have another",
    ),
    (
        lambda folder: save_checkpoint(folder, "llama"),
        {"architectures": ["LlamaForTextEncoding"]},
        "architectures names LlamaForTextEncoding, whose attention can have another",
    ),
    (
        lambda folder: save_checkpoint(folder, "mistral"),
        {"architectures": ["MistralForBidirectionalLM"]},
        "architectures names MistralForBidirectionalLM, whose attention can have another",
    ),
    (
        lambda folder: save_checkpoint(folder, "qwen3"),
        {"architectures": ["Qwen3ForBidirectionalEmbedding"]},
        "architectures names Qwen3ForBidirectionalEmbedding, whose attention can have another",
    ),
    # Other code, or that of another family.
    (save_nemotron, {"auto_map": {"AutoModel": "a.LlamaModel"}}, "auto_map names a.LlamaModel"),
    (save_pplx, {"auto_map": {"AutoModel": "a.Qwen3Model"}}, "auto_map names a.Qwen3Model, but"),
    (save_voyage, {"auto_map": {"AutoModel": "a.VoyageQwen3Model"}}, "auto_map names a.Voyage"),
    (save_voyage, {"auto_map": None}, "architectures names VoyageQwen3BidirectionalEmbedModel, wh"),
    # Other pooling, projection and scores.
    (save_nemotron, {"pooling": "weighted_avg"}, "pooling is 'weighted_avg'; supported: avg, cls"),
    (save_nemotron, {"pooling": ["avg"]}, r"pooling is \"\['avg'\]\"; supported: avg, cls, last"),
    (save_voyage, {"num_labels": None}, "num_labels is None; it must be the width of the model"),
    (save_voyage, {"num_labels": 16}, r"linear.weight has shape \(12, 32\) .* shape \(16, 32\)"),
    # Other experts, layers and caps.
    (save_nemotron, {"sliding_window": 8}, "sliding_window is 8; only None is supported"),
    (save_nemotron, {"layer_types": ["sliding_attention"] * 2}, "layer type 'sliding_attention'"),
    (save_nemotron, {"attn_logit_softcapping": 9.0}, "attn_logit_softcapping is 9.0; only None"),
    (save_pplx, {"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is not supported"),
    (save_pplx, {"per_layer_config": [{}]}, "per_layer_config is .*; only None is supported"),
    # Other rotary positions.
    (save_nemotron, {"rope_parameters": DYNAMIC}, "of the type 'dynamic' are not supported"),
    (save_pplx, {"rope_parameters": {**DYNAMIC, "type": "dynamic"}}, "supported: default, linear"),
    (
        save_pplx,
        {"rope_parameters": MINISTRAL},
        "of the type 'yarn' have the unsupported field 'llama_4_scaling_beta'",
    ),
    (
        save_pplx,
        {"rope_parameters": {**YARN, "rope_theta": 1.0}},
        "rope_theta is 1.0; it must be",
    ),
    (save_pplx, {"rope_parameters": {**YARN, "truncate": 1}}, "truncate has the invalid value 1"),
    (save_pplx, {"rope_parameters": {**YARN, "beta_fast": -1}}, "beta_fast has the invalid value"),
    (
        lambda folder: save_checkpoint(folder, "ministral3"),
        {"rope_parameters": YARN},
        "rope_parameters must be an object with llama_4_scaling_beta",
    ),
    (save_nemotron, {"rope_parameters": {**LLAMA3, "factor": None}}, "'llama3' need a factor"),
    (
        save_nemotron,
        {"rope_parameters": {**LLAMA3, "attention_factor": 2.0}},
        "of the type 'llama3' have the unsupported field 'attention_factor'",
    ),
    (
        save_nemotron,
        {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}},
        "high_freq_factor 1.0 must be greater than low_freq_factor 1.0",
    ),
    (
        save_nemotron,
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        "of the type 'default' have the unsupported field 'mrope_section'",
    ),
    # Other biases.
    (save_nemotron, {"attention_bias": True}, r"lacks the tensor layers\.0\.self_attn.*bias"),
    (save_nemotron, {"mlp_bias": "true"}, "mlp_bias has the invalid value 'true'"),
    # Layers of another type than those that transformers runs.
    (
        lambda folder: save_checkpoint(folder, "mistral"),
        {"layer_types": ["full_attention"] * 2},
        "layer_types has the unsupported layer type 'full_attention'; supported: sliding_attention",
    ),
    # gte-Qwen2 attends in both directions by code.
    (
        lambda folder: save_checkpoint(folder, "qwen2"),
        {"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}},
        "auto_map names modeling_qwen.Qwen2Model, but code of models is never run",
    ),
]


@pytest.mark.parametrize(("save", "changes", "message"), LOOK_ALIKES)
def test_look_alikes_are_refused_by_name(
    save: Save, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save(tmp_path)
    load(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("mistral", "layers.0.self_attn.q_proj.bias", (32,)),
        ("llama", "layers.0.self_attn.q_norm.weight", (8,)),  # as in Qwen3
        ("qwen2", "layers.0.self_attn.o_proj.bias", (32,)),
        ("qwen3", "layers.0.self_attn.k_proj.bias", (12,)),
        ("qwen3", "linear.weight", (12, 32)),
    ],
)
def test_tensor_of_another_family_is_refused_by_name(
    family: str, name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, family)
    edit_tensors(tmp_path, **{name: torch.ones(shape)})
    with pytest.raises(CheckpointError, match=rf"unexpected tensors \(1\): {name}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (Overrides(tokens=True), "token vectors cannot be exported, because the model projects"),
        (Overrides(pooling=["max"]), "pooling max of vectors that 'linear' projects is not sup"),
        (Overrides(pooling=["cls", "mean"]), "pooling cls and mean of vectors that 'linear' proj"),
    ],
)
def test_options_that_a_projection_excludes_are_refused(
    overrides: Overrides, message: str, tmp_path: Path
) -> None:
    save_voyage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, overrides)


def test_missing_projection_is_named(tmp_path: Path) -> None:
    save_voyage(tmp_path)
    edit_tensors(tmp_path, **{"linear.weight": None})
    with pytest.raises(CheckpointError, match=r"lacks the tensor linear\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("save", [save_nemotron, save_pplx, save_voyage])
def test_bidirectional_code_has_no_scores_of_next_tokens(save: Save, tmp_path: Path) -> None:
    save(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["MyForCausalLM"])
    write_modules(tmp_path, ("Transformer", ""), ("LogitScore", "1_LogitScore"))
    write_json(tmp_path / "1_LogitScore" / "config.json", {"true_token_id": 4, "false_token_id": 5})
    with pytest.raises(CheckpointError, match="needs a causal language model of a supported famil"):
        load(tmp_path)


def test_temperature_of_a_reranker_is_refused(tmp_path: Path) -> None:
    save_classifier(tmp_path, "llama", 1, **BOTH)
    rename(tmp_path, "llama_bidirec", "modeling.LlamaBidirectional")
    names = ["LlamaBidirectionalForSequenceClassification"]
    edit_json(tmp_path / "config.json", architectures=names, temperature=0.02)
    with pytest.raises(CheckpointError, match=r"temperature is 0\.02; only 1\.0 is supported"):
        load(tmp_path)
