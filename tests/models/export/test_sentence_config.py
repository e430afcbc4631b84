"""Modules and settings of sentence-transformers in a model folder, against that library."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense

from models.export.checkpoint import load
from models.export.exporter import export
from models.export.model_folder import CheckpointError
from models.export.parity import reference_outputs
from models.export.sentence_config import Overrides, SentenceConfig
from models.export.sources import resolve
from models.network.sentence_encoder import SentenceEncoder
from tests.models.checkpoints import (
    edit_json,
    save_byte_level,
    save_chatml,
    save_checkpoint,
    save_classifier,
    save_dense,
    save_sentence_model,
    save_tokenizer,
    write_json,
    write_modules,
)


def library_model(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def compared_with_library(folder: Path) -> tuple[SentenceEncoder, SentenceConfig]:
    """Compare the vector of a text with that of sentence-transformers; return what was loaded."""
    expected = library_model(folder).encode(["w5 w6 w7"], convert_to_tensor=True)
    model, config = load(folder)
    ones = torch.ones(1, 5)
    actual = model(torch.tensor([[0, 5, 6, 7, 2]]), ones, ones)
    actual = torch.nn.functional.normalize(actual) if config.normalize else actual
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    return model, config


@pytest.mark.parametrize(
    ("architecture", "changes", "pooling"),
    [
        ("Qwen3ForCausalLM", {}, "last"),
        ("Qwen3ForCausalLM", {"is_causal": False}, "mean"),
        ("Qwen3Model", {}, "mean"),
    ],
)
def test_default_pooling_equals_sentence_transformers(
    architecture: str, changes: dict[str, object], pooling: str, tmp_path: Path
) -> None:
    save_byte_level(tmp_path, "Qwen2Tokenizer")
    save_checkpoint(tmp_path, "qwen3", vocab_size=300, **changes)
    edit_json(tmp_path / "config.json", architectures=[architecture])
    reference = library_model(tmp_path)
    assert load(tmp_path)[1].pooling == (pooling,)
    assert {"last": "lasttoken"}.get(pooling, pooling) == reference[1].pooling_mode


def test_chat_template_of_embeddings_without_modules_is_refused_unless_pooling_is_chosen(
    tmp_path: Path,
) -> None:
    template = "{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}"
    size = save_chatml(tmp_path, template)
    save_checkpoint(tmp_path, "qwen3", vocab_size=size)
    reference = library_model(tmp_path)
    start = reference.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert reference.preprocess(["cat"])["input_ids"][0, 0] == start
    with pytest.raises(CheckpointError, match=r"chat template, in which .*: --pooling mean"):
        load(tmp_path)
    assert load(tmp_path, Overrides(pooling=["mean"]))[1].pooling == ("mean",)


def test_folder_without_modules_json_defaults_to_mean_pooling(
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path, "bert")
    save_tokenizer(tmp_path)
    _, sentence_config = load(tmp_path)
    assert (sentence_config.pooling, sentence_config.normalize, sentence_config.max_tokens) == (
        ("mean",),
        False,
        24,
    )


POOLING_FIELDS: dict[str, dict[str, object]] = {
    "cls": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    "max": {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False},
    "mean": {"pooling_mode_mean_tokens": True},
    "mean_sqrt_len": {"pooling_mode_mean_sqrt_len_tokens": True},
    "weighted_mean": {"pooling_mode_weightedmean_tokens": True},
    "last": {"pooling_mode_lasttoken": True},
    "two": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
    "new": {"pooling_mode": "lasttoken"},
    "new two": {"pooling_mode": ["max", "mean_sqrt_len_tokens"]},
}


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("fields", POOLING_FIELDS)
def test_pooled_vectors_equal_sentence_transformers(
    fields: str, include_prompt: bool, tmp_path: Path
) -> None:
    pooling = {"include_prompt": include_prompt, **POOLING_FIELDS[fields]}
    save_sentence_model(tmp_path, "mpnet", pooling=pooling)
    reference = library_model(tmp_path)
    expected = reference.encode(["w5 w6 w7"], prompt="w8 w9 ", convert_to_tensor=True)
    model, sentence_config = load(tmp_path)
    assert sentence_config.include_prompt == include_prompt
    ids = torch.tensor([[0, 8, 9, 5, 6, 7, 2]])
    pooled = torch.ones(1, 7)
    if not include_prompt:
        pooled[:, :3] = 0
    actual = model(ids, torch.ones(1, 7), pooled)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "activation", ["modules.activation.Tanh", "modules.activation.LeakyReLU", "SiLU"]
)
def test_dense_head_vectors_equal_sentence_transformers(activation: str, tmp_path: Path) -> None:
    save_dense(tmp_path, activation_function=f"torch.nn.{activation}")
    write_modules(
        tmp_path,
        ("Transformer", ""),
        ("Pooling", "1_Pooling"),
        ("Dropout", "4_Dropout"),  # has no effect outside of training
        ("Dense", "2_Dense"),
        ("Normalize", "3_Normalize"),
    )
    write_json(tmp_path / "4_Dropout" / "config.json", {"dropout": 0.5})
    model, sentence_config = compared_with_library(tmp_path)
    assert (model.width, sentence_config.normalize) == (12, True)


@pytest.mark.parametrize("out_features", [12, 32])
def test_residual_dense_head_vectors_equal_sentence_transformers(
    out_features: int, tmp_path: Path
) -> None:
    save_dense(tmp_path)
    dense = Dense(32, out_features, use_residual=True)
    dense.save(str(tmp_path / "2_Dense"))
    assert library_model(tmp_path)[2].use_residual
    compared_with_library(tmp_path)


HEADS = {
    "Dense": ("Dense", "2_Dense"),
    "LayerNorm": ("LayerNorm", "4_LayerNorm"),
    "Normalize": ("Normalize", "3_Normalize"),
}


@pytest.mark.parametrize(
    "kinds",
    [
        ["Normalize", "Dense"],
        ["LayerNorm", "Normalize", "Dense", "Normalize"],
        ["Dense", "Normalize", "Normalize"],
        ["LayerNorm"],
    ],
)
def test_heads_in_any_order_equal_sentence_transformers(kinds: list[str], tmp_path: Path) -> None:
    save_dense(tmp_path)
    write_modules(
        tmp_path, ("Transformer", ""), ("Pooling", "1_Pooling"), *(HEADS[kind] for kind in kinds)
    )
    write_json(tmp_path / "4_LayerNorm" / "config.json", {"dimension": 32})
    parameters = {"norm.weight": torch.randn(32), "norm.bias": torch.randn(32)}
    save_file(parameters, tmp_path / "4_LayerNorm" / "model.safetensors")
    _, sentence_config = compared_with_library(tmp_path)
    assert sentence_config.normalize == (kinds[-1] == "Normalize")


@pytest.mark.parametrize("dimension", [None, 0, "32"])
def test_layer_norm_without_a_width_raises_checkpoint_error(
    dimension: object, tmp_path: Path
) -> None:
    save_dense(tmp_path)
    modules = ("Transformer", ""), ("Pooling", "1_Pooling"), HEADS["LayerNorm"]
    write_modules(tmp_path, *modules)
    write_json(tmp_path / "4_LayerNorm" / "config.json", {"dimension": dimension})
    with pytest.raises(CheckpointError, match="dimension must be a positive integer"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"activation_function": "torch.nn.modules.activation.Softmax"}, "Softmax' is not one of"),
        ({"activation_function": "mine.Tanh"}, "'mine.Tanh' is not one of"),
        ({"use_residual": True}, r"lacks the tensor residual.weight of shape \(12, 32\)"),
        ({"in_features": 31}, r"linear.weight has shape \(12, 32\)"),
        ({"out_features": 13}, r"linear.weight has shape \(12, 32\)"),
        ({"in_features": None}, "in_features and out_features must be positive integers"),
        ({"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings'"),
    ],
)
def test_unsupported_dense_head_raises_checkpoint_error(
    config: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_dense(tmp_path, **config)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_dense_head_for_other_vectors_raises_checkpoint_error(tmp_path: Path) -> None:
    save_dense(tmp_path, in_features=31)
    head = {"linear.weight": torch.randn(12, 31), "linear.bias": torch.randn(12)}
    save_file(head, tmp_path / "2_Dense" / "model.safetensors")
    with pytest.raises(
        CheckpointError, match="a head needs vectors of width 31; its input has the width 32"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([("Transformer", ""), ("CNN", "1")], "Transformer -> CNN; supported: "),
        ([("Transformer", ""), ("Pooling", "1_Pooling"), ("LSTM", "2")], "-> LSTM"),
        ([("Pooling", "1_Pooling")], "lists Pooling"),
        ([("Transformer", "")], "lists only a Transformer module, which is supported for"),
        (
            [("Transformer", "../up"), ("Pooling", "1_Pooling")],
            "'../up/adapter_config.json' points outside",
        ),
        ([("Transformer", ""), ("Pooling", "/etc")], "'/etc/config.json' points outside"),
    ],
)
def test_unsupported_module_list_raises_checkpoint_error(
    modules: list[tuple[str, str]], message: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, "bert")
    write_json(tmp_path / "1_Pooling" / "config.json", {})
    write_modules(tmp_path, *modules)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_modules_of_one_name_are_refused(tmp_path: Path) -> None:
    """sentence-transformers has the last of them alone."""
    save_dense(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[2]["name"] = modules[3]["name"]
    write_json(tmp_path / "modules.json", modules)
    assert len(library_model(tmp_path)) == 3
    with pytest.raises(CheckpointError, match="two modules have the name '3'"):
        load(tmp_path)


def test_empty_list_of_modules_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    save_tokenizer(tmp_path)
    write_json(tmp_path / "modules.json", [])
    with pytest.raises(ValueError, match="An empty modules list"):
        library_model(tmp_path)
    with pytest.raises(CheckpointError, match=r"modules\.json lists no modules; list"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["Pooling", "LayerNorm"])
def test_field_that_a_module_of_sentence_transformers_refuses_is_refused(
    kind: str, tmp_path: Path
) -> None:
    save_dense(tmp_path)
    write_modules(tmp_path, ("Transformer", ""), ("Pooling", "1_Pooling"), HEADS["LayerNorm"])
    write_json(tmp_path / "4_LayerNorm" / "config.json", {"dimension": 32})
    path = next(tmp_path.glob(f"*_{kind}")) / "config.json"
    edit_json(path, eps=1e-12)
    with pytest.raises(TypeError, match="unexpected keyword argument 'eps'"):
        library_model(tmp_path)
    with pytest.raises(CheckpointError, match=f"{kind}/config.json: eps is not supported"):
        load(tmp_path)


@pytest.mark.parametrize("mode", [None, "", []])
def test_pooling_without_a_mode_is_refused(mode: object, tmp_path: Path) -> None:
    save_dense(tmp_path)
    edit_json(tmp_path / "1_Pooling" / "config.json", pooling_mode=mode)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        library_model(tmp_path).encode("w5")
    with pytest.raises(CheckpointError, match=r"the pooling '.*' is not one of"):
        load(tmp_path)


def test_module_class_outside_sentence_transformers_is_rejected(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    write_json(tmp_path / "modules.json", [{"idx": 0, "path": "", "type": "custom_code.Thing"}])
    with pytest.raises(CheckpointError, match=r"custom_code.Thing; code from outside"):
        load(tmp_path)
    lookalike = {"idx": 0, "path": "", "type": "sentence_transformers_too.Transformer"}
    write_json(tmp_path / "modules.json", [lookalike])
    with pytest.raises(CheckpointError, match=r"sentence_transformers_too.Transformer; code from"):
        load(tmp_path)


def test_unknown_pooling_raises_with_its_name(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    write_modules(tmp_path, ("Transformer", ""), ("Pooling", "1_Pooling"))
    write_json(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_median_tokens": True})
    with pytest.raises(CheckpointError, match="pooling_mode_median_tokens is not supported"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="pooling 'median' is not one of mean, cls"):
        load(tmp_path, Overrides(pooling=["median"]))
    assert load(tmp_path, Overrides(pooling=["max"]))[1].pooling == ("max",)


def test_sentence_config_is_read_and_can_be_overridden(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "roberta")
    write_json(
        tmp_path / "sentence_bert_config.json", {"max_seq_length": 30, "do_lower_case": True}
    )
    write_json(
        tmp_path / "config_sentence_transformers.json",
        {"prompts": {"query": "q: "}, "default_prompt_name": "query"},
    )
    _, sentence_config = load(tmp_path)
    assert (sentence_config.max_tokens, sentence_config.lowercase) == (30, True)
    assert sentence_config.prompts == {"query": "q: ", "document": ""}
    assert sentence_config.default_prompt == "query"
    _, changed = load(tmp_path, Overrides(pooling=["cls"], normalize=True, max_tokens=38))
    assert (changed.pooling, changed.normalize, changed.max_tokens) == (("cls",), True, 38)
    # The position table has 40 rows, two of which RoBERTa reserves.
    for length in (0, 39):
        with pytest.raises(CheckpointError, match=f"length is {length} tokens; .* 3 and .* 38 "):
            load(tmp_path, Overrides(max_tokens=length))


def test_truncation_to_more_than_all_dimensions_has_no_effect(tmp_path: Path) -> None:
    save_sentence_model(tmp_path, "bert", ("Normalize", "2"))
    (tmp_path / "2").mkdir()
    write_json(tmp_path / "config_sentence_transformers.json", {"truncate_dim": 33})
    model, _ = compared_with_library(tmp_path)
    assert model.width == 32
    artifact, _ = export(resolve(str(tmp_path)), tmp_path / "artifact")
    assert artifact.manifest.width == 32


@pytest.mark.parametrize(
    ("file", "content", "limit"),
    [
        ("sentence_bert_config.json", {"max_seq_length": 7}, 7),
        ("sentence_roberta_config.json", {"max_seq_length": 5}, 5),
        ("sentence_bert_config.json", {"max_seq_length": None}, 24),
        ("tokenizer_config.json", {"max_len": 6}, 6),
        ("tokenizer_config.json", {"model_max_length": 10**30}, 40),
        ("tokenizer_config.json", {"model_max_length": 1e30}, 40),
    ],
)
def test_max_tokens_equals_sentence_transformers(
    file: str, content: dict[str, object], limit: int, tmp_path: Path
) -> None:
    save_sentence_model(tmp_path)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    write_json(tmp_path / "sentence_bert_config.json", {})  # has no effect
    write_json(tmp_path / file, {**content, **(tokenizer if "tokenizer" in file else {})})
    reference = library_model(tmp_path)
    assert load(tmp_path)[1].max_tokens == limit == reference.max_seq_length


@pytest.mark.parametrize("family", ["deberta-v2", "gte", "llama", "modernbert", "nomic_bert"])
def test_rows_without_a_table_of_positions_can_exceed_max_position_embeddings(
    family: str, tmp_path: Path
) -> None:
    save_sentence_model(tmp_path, family)
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 60})
    reference = library_model(tmp_path)
    text = "w7 w9 w21 w40 " * 20
    ids = reference.preprocess([text])["input_ids"].tolist()
    model, config = load(tmp_path)
    assert config.max_tokens == len(ids[0]) == 60
    actual = reference_outputs(model, ids)[0]["pooled"]
    np.testing.assert_allclose(actual, reference.encode([text]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("sentence_bert_config.json", {"max_seq_length": -1}, "length is -1 tokens; it must be"),
        ("sentence_bert_config.json", {"max_seq_length": "9"}, "length is 9 tokens; it must be"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {}}}, "processing_kwargs is"),
        ("sentence_bert_config.json", {"tokenizer_args": {"a": 1}}, "tokenizer_args is"),
        ("sentence_bert_config.json", {"novelty": 1}, "novelty is not supported"),
        ("sentence_bert_config.json", [], "is not a JSON object"),
        ("modules.json", {}, "is not a JSON array"),
        ("modules.json", [1], "every module must have a type and a path"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "'SparseEncoder'"),
        ("config_sentence_transformers.json", {"prompts": {"x": 5}}, "prompt 'x' is not a string"),
        ("config_sentence_transformers.json", {"prompts": [1]}, "prompts must be a JSON object"),
        ("config_sentence_transformers.json", {"default_prompt_name": []}, r"default prompt \[\]"),
        (
            "config_sentence_transformers.json",
            {"default_prompt_name": "nope"},
            "'nope' is not among the prompts: query, document",
        ),
        ("config_sentence_transformers.json", {"truncate_dim": 0}, "truncate_dim has the invalid"),
        ("config.json", {"matryoshka_dimensions": [8, "16"]}, r"invalid value \[8, '16'\]"),
        ("tokenizer_config.json", {"truncation_side": "both"}, "Truncation side should be"),
    ],
)
def test_unsupported_sentence_config_raises_with_the_field_name(
    file: str, content: object, message: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, "bert")
    save_tokenizer(tmp_path)
    if (tmp_path / file).exists() and isinstance(content, dict):
        edit_json(tmp_path / file, **content)
    else:
        write_json(tmp_path / file, content)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_null_model_type_with_which_modules_have_no_effect_is_refused(tmp_path: Path) -> None:
    save_sentence_model(tmp_path, pooling={"pooling_mode": "cls"})
    write_json(tmp_path / "config_sentence_transformers.json", {"model_type": None})
    reference = library_model(tmp_path)
    assert reference[1].pooling_mode == "mean"
    with pytest.raises(CheckpointError, match="model_type is null or missing; set it to 'Sentence"):
        load(tmp_path)


def test_cross_encoder_whose_settings_have_no_effect_without_model_type_is_refused(
    tmp_path: Path,
) -> None:
    save_classifier(tmp_path, "bert", 1)
    save_tokenizer(tmp_path)
    write_modules(tmp_path, ("Transformer", ""))
    write_json(
        tmp_path / "sentence_bert_config.json",
        {"transformer_task": "sequence-classification", "max_seq_length": 9},
    )
    reference = CrossEncoder(str(tmp_path), device="cpu", local_files_only=True)
    assert reference.max_seq_length == 24  # that of the tokenizer
    with pytest.raises(CheckpointError, match="model_type is null or missing; set it to 'CrossE"):
        load(tmp_path)
    write_json(tmp_path / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    reference = CrossEncoder(str(tmp_path), device="cpu", local_files_only=True)
    assert load(tmp_path)[1].max_tokens == reference.max_seq_length == 9


def test_normalize_module_of_another_input_is_rejected(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    write_modules(tmp_path, ("Transformer", ""), ("Pooling", "1"), ("Normalize", "2"))
    write_json(tmp_path / "1" / "config.json", {})
    assert load(tmp_path)[1].normalize
    write_json(tmp_path / "2" / "config.json", {"module_input_name": "token_embeddings"})
    with pytest.raises(CheckpointError, match="module_input_name is 'token_embeddings'"):
        load(tmp_path)


def test_prompts_can_be_overridden(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    _, sentence_config = load(
        tmp_path,
        Overrides(prompts={"query": "query: "}, default_prompt="query", include_prompt=False),
    )
    assert sentence_config.prompts == {"query": "query: ", "document": ""}
    assert (sentence_config.default_prompt, sentence_config.include_prompt) == ("query", False)
