"""Every model family against transformers, with random weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.export.checkpoint import load
from models.export.families import FAMILIES
from models.export.model_folder import CheckpointError
from models.network.encoder import Encoder
from models.network.positions import Rotary
from models.packing import pack
from tests.models.checkpoints import (
    CONFIGS,
    VOCABULARY,
    edit_json,
    edit_tensors,
    save_checkpoint,
    write_json,
)

# All families have 40 positions here; up to four of them are reserved in RoBERTa's numbering.
LONGEST = 36
# Lengths from a single token to the maximum, beyond ModernBERT's window.
LENGTHS = [1, 2, 3, 9, 10, 20, LONGEST]

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS: dict[str, object] = {"use_sliding_window": True, "sliding_window": 7}
# Of the pairs of a head of width 16, three are kept, one is interpolated and four are slowed down.
LLAMA3: dict[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 300.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 64,
}
# As for LLAMA3, some pairs are kept, some are interpolated, and some are slowed down.
YARN: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
ALL_BIASES: dict[str, object] = {"attention_bias": True, "mlp_bias": True, "norm_bias": True}
CASES: list[tuple[str, dict[str, object]]] = [
    *((family, {}) for family in CONFIGS),
    # RoBERTa counts positions from pad_token_id + 1; BERT and MPNet ignore pad_token_id.
    ("bert", {"pad_token_id": 3}),
    ("roberta", {"pad_token_id": 3}),
    ("mpnet", {"pad_token_id": 3}),
    *(
        ("bert", dict[str, object](hidden_act=name))
        for name in ("relu", "leaky_relu", "gelu_new", "quick_gelu", "silu")
    ),
    ("bert", {"type_vocab_size": 1}),
    ("electra", {"embedding_size": 32}),
    ("albert", {"num_hidden_groups": 1}),
    ("albert", {"num_hidden_groups": 5, "embedding_size": 32}),
    ("roformer", {"embedding_size": 16}),
    ("roformer", {"embedding_size": None}),
    ("deberta-v2", {"share_att_key": False, "norm_rel_ebd": "none"}),
    ("deberta-v2", {"share_att_key": False, "pos_att_type": ["p2c"]}),
    ("deberta-v2", {"pos_att_type": "c2p", "type_vocab_size": 2}),
    ("deberta-v2", {"position_buckets": -1, "position_biased_input": True}),
    ("deberta-v2", {"position_buckets": -1, "max_relative_positions": 5}),
    ("deberta-v2", {"position_buckets": 6, "max_relative_positions": 24}),
    ("deberta-v2", {"relative_attention": False, "pos_att_type": None}),
    ("modernbert", ALL_BIASES),
    ("modernbert", {"local_attention": 2}),
    ("modernbert", {"local_attention": 7}),  # an odd window is rounded down
    ("modernbert", {"layer_types": [SLIDING, SLIDING, FULL, SLIDING]}),
    ("modernbert", {"rope_parameters": {FULL: {"rope_theta": 50.0}, SLIDING: {"rope_theta": 3.0}}}),
    (
        "modernbert",
        {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}},
    ),
    ("gte", {"type_vocab_size": 0}),
    ("gte", {"rope_parameters": {"rope_type": "default", "rope_theta": 30.0}}),
    ("gte", {"rope_parameters": {"rope_type": "linear", "rope_theta": 90.0, "factor": 1.7}}),
    ("nomic_bert", {"type_vocab_size": 1, "hidden_act": "gelu"}),
    ("nomic_bert", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}),
    ("nomic_moe", {}),
    ("nomic_moe", {"num_experts": 5, "moe_top_k": 3, "moe_every_n_layers": 3, "n_inner": 20}),
    (
        "nomic_moe",
        {"num_experts": 4, "moe_top_k": 1, "qkv_proj_bias": False, "mlp_fc2_bias": False},
    ),
    ("nomic_moe", {"num_experts": 2, "n_head": 2, "type_vocab_size": 2, "mlp_fc1_bias": False}),
    ("nomic_moe", {"num_experts": 0, "moe_every_n_layers": 0}),
    ("jina_embeddings_v3", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}),
    ("jina_bert", {}),
    ("jina_bert", {"num_attention_heads": 6, "hidden_size": 36, "feed_forward_type": "reglu"}),
    ("jina_bert_code", {}),
    ("jina_bert_code", {"num_attention_heads": 3, "hidden_size": 36}),
    ("eurobert", {"num_key_value_heads": None, "attention_bias": True, "mlp_bias": True}),
    ("eurobert", {"num_key_value_heads": 1, "head_dim": 10, "hidden_act": "gelu"}),
    ("eurobert", {"rope_parameters": {"rope_type": "linear", "rope_theta": 90.0, "factor": 1.7}}),
    ("llama", {"num_key_value_heads": 1, "attention_bias": True, "head_dim": 10}),
    ("llama", {"num_key_value_heads": None, "mlp_bias": True, "hidden_act": "gelu"}),
    ("llama", {"is_causal": False}),
    ("llama", {"head_dim": 16, "rope_parameters": LLAMA3}),
    ("llama", {"head_dim": 16, "rope_parameters": LLAMA3, "is_causal": False}),
    ("llama", {"head_dim": 16, "rope_parameters": YARN}),
    ("llama", {"head_dim": 16, "rope_parameters": {**YARN, "attention_factor": 1.7}}),
    ("llama", {"head_dim": 16, "rope_parameters": {**YARN, "truncate": False}}),
    ("qwen3", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}}),
    ("ministral3", {"is_causal": False, "sliding_window": 7}),
    ("ministral3", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    ("mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    ("mistral", {"sliding_window": 3, "head_dim": 10}),
    ("mistral", {"is_causal": False}),
    ("mistral", {"is_causal": False, "sliding_window": None, "rope_parameters": LLAMA3}),
    ("qwen2", {"num_key_value_heads": 4, "hidden_act": "gelu"}),
    ("qwen2", {"num_key_value_heads": 1, "head_dim": 16}),
    ("qwen2", {**WINDOWS, "max_window_layers": 1, "layer_types": None}),
    ("qwen2", {**WINDOWS, "layer_types": [SLIDING, FULL], "is_causal": False}),
    ("qwen2", {"is_causal": False, "use_bidirectional_attention": True}),
    ("qwen3", {"num_key_value_heads": 4, "attention_bias": True}),
    ("qwen3", {"num_key_value_heads": 1, "head_dim": 16}),
    ("qwen3", {**WINDOWS, "max_window_layers": 1, "layer_types": None}),
    ("qwen3", {**WINDOWS, "layer_types": [SLIDING, FULL]}),
    ("qwen3", {**WINDOWS, "max_window_layers": 0, "layer_types": None}),
    ("qwen3", {"is_causal": True, "use_bidirectional_attention": False}),
    ("qwen3", {"is_causal": False, "attention_bias": True}),
    ("qwen3", {**WINDOWS, "layer_types": [FULL, SLIDING], "is_causal": False}),
    ("t5", {"dense_act_fn": "gelu_new", "is_gated_act": True}),
    ("t5", {"is_gated_act": True, "d_kv": 8, "relative_attention_num_buckets": 6}),
    ("t5", {"dense_act_fn": "gelu", "num_heads": 3, "relative_attention_num_buckets": 32}),
    ("gemma3_text", {"use_bidirectional_attention": False}),
    ("gemma3_text", {"sliding_window": 7}),
    ("gemma3_text", {"layer_types": None}),  # every sixth layer has no window
    ("gemma3_text", {"num_key_value_heads": 1, "attention_bias": True}),
    ("gemma3_text", {"query_pre_attn_scalar": 2}),  # not the width of a head
    ("gemma3_text", {"query_pre_attn_scalar": 41, "use_bidirectional_attention": False}),
]
NAMES = [f"{family}-{'-'.join(changes) or 'default'}" for family, changes in CASES]


def rows(lengths: list[int]) -> list[list[int]]:
    """Return rows of random ids. Id 1 is RoBERTa's padding token, here in the middle of a row."""
    torch.manual_seed(1)
    ids = [torch.randint(4, VOCABULARY, (length,)).tolist() for length in lengths]
    ids[-1][5] = 1
    return ids


def assert_equals(encoder: Encoder, reference: Any) -> None:  # noqa: ANN401
    """Compare token vectors: each row alone, in a padded batch, and in packed batches."""
    ids = rows(LENGTHS)
    with torch.no_grad():
        expected = [
            reference(torch.tensor([r]), attention_mask=torch.ones(1, len(r))).last_hidden_state[0]
            for r in ids
        ]
        alone = [encoder(torch.tensor([row]))[0] for row in ids]
        padded = torch.tensor([row + [0] * (LONGEST - len(row)) for row in ids])
        mask = torch.tensor([[1] * len(row) + [0] * (LONGEST - len(row)) for row in ids])
        dense = encoder(padded, mask)[mask.bool()]
        packed_alone = [packed(encoder, [row]) for row in ids]
        together = packed(encoder, ids)
    for actual in (torch.cat(alone), dense, torch.cat(packed_alone), together):
        # Of vectors that are about 5 long.
        torch.testing.assert_close(actual, torch.cat(expected), rtol=1e-5, atol=1e-5)


def packed(encoder: Encoder, ids: list[list[int]]) -> Tensor:
    arrays = [torch.from_numpy(array) for array in pack(ids).inputs().values()]
    return encoder.forward_packed(*arrays[:4])


@pytest.mark.parametrize(
    "family",
    [
        *("albert", "bert", "camembert", "distilbert", "electra", "gte", "jina_embeddings_v3"),
        *("modernbert", "nomic_bert", "roberta", "xlm-roberta"),
    ],
)
def test_encoders_that_is_causal_changes_in_transformers_are_refused(
    family: str, tmp_path: Path
) -> None:
    reference = save_checkpoint(tmp_path, family)
    edit_json(tmp_path / "config.json", is_causal=True)
    changed = type(reference).from_pretrained(tmp_path).eval()
    ids = torch.tensor(rows([9]))
    with torch.no_grad():
        difference = changed(ids).last_hidden_state - reference(ids).last_hidden_state
    assert difference.abs().max() > 0.1
    with pytest.raises(CheckpointError, match="is_causal is True; only False is supported"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["distilbert", "t5"])
def test_other_names_of_sizes_have_priority_as_in_transformers(family: str, tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    for other, name in type(reference.config).attribute_map.items():
        config = {**config, other: config[name], name: config[name] * 2}
    write_json(tmp_path / "config.json", config)
    assert_equals(load(tmp_path)[0].encoder, type(reference).from_pretrained(tmp_path).eval())


def test_every_family_has_a_test_config() -> None:
    # These have tests of their own.
    others = {"bidirectional_pplx_qwen3", "llama_bidirec", "new"}
    assert {*CONFIGS, *others} == FAMILIES.keys()


@pytest.mark.parametrize(("family", "changes"), CASES, ids=NAMES)
def test_token_vectors_equal_transformers(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    reference = save_checkpoint(tmp_path, family, **changes)
    assert_equals(load(tmp_path)[0].encoder, reference)


@pytest.mark.parametrize("family", ["gte", "nomic_bert", "jina_embeddings_v3"])
def test_tensor_names_of_transformers_load_the_same_model(family: str, tmp_path: Path) -> None:
    original, native = tmp_path / "original", tmp_path / "native"
    save_checkpoint(original, family)
    reference = save_checkpoint(native, family)
    reference.save_pretrained(native, save_original_format=False)
    names = [set(load_file(folder / "model.safetensors")) for folder in (original, native)]
    assert names[0] != names[1]
    assert_equals(load(native)[0].encoder, reference)


@pytest.mark.parametrize(
    "old",
    [
        {"global_rope_theta": 60.0, "local_rope_theta": 5.0, "global_attn_every_n_layers": 2},
        {"global_rope_theta": 60.0},
        {"sliding_window": 2},
    ],
)
def test_modernbert_config_of_earlier_transformers_is_read_as_transformers_reads_it(
    old: dict[str, object], tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, "modernbert")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for name in ("rope_parameters", "layer_types"):
        del config[name]
    config |= old
    path.write_text(json.dumps(config))
    reference = transformers.ModernBertModel(transformers.ModernBertConfig.from_dict(config)).eval()
    reference.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_equals(load(tmp_path)[0].encoder, reference)


def test_modernbert_window_without_its_own_base_has_that_of_the_other_layers(
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path, "modernbert")
    edit_json(
        tmp_path / "config.json",
        rope_parameters=None,
        global_rope_theta=60.0,
        local_rope_theta=None,
    )
    attention = load(tmp_path)[0].encoder.config.attention
    assert {layer.rotary for layer in attention} == {Rotary(60.0)}


def test_gte_files_of_alibaba_equal_transformers(tmp_path: Path) -> None:
    """Their "ntk" scaling is transformers' "linear" with another base and factor."""
    factor, width = 8.0, 8
    linear = {
        "rope_type": "linear",
        "rope_theta": 20.0 * factor,
        "factor": factor ** (2 / width),
    }
    reference = save_checkpoint(tmp_path, "gte", rope_parameters=linear)
    tensors = load_file(tmp_path / "model.safetensors")
    head = {"classifier.weight": torch.ones(1, 32), "classifier.bias": torch.ones(1)}
    save_file(
        {f"new.{name}": tensor for name, tensor in tensors.items()} | head,
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    edit_json(
        tmp_path / "config.json",
        model_type="new",
        architectures=["NewForTokenClassification"],
        auto_map={"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
        position_embedding_type="rope",
        rope_parameters=None,
        rope_theta=20.0,
        rope_scaling={"type": "ntk", "factor": factor},
    )
    assert_equals(load(tmp_path)[0].encoder, reference)


def test_nomic_files_of_its_hub_equal_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 12.0}
    reference = save_checkpoint(tmp_path, "nomic_bert", rope_parameters=rope)
    config = {
        "model_type": "nomic_bert",
        "auto_map": {
            "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"
        },
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 48,
        "n_positions": 40,
        "type_vocab_size": 2,
        "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-3,
        "prenorm": False,
        "rotary_emb_base": 12,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_scaling_factor": None,
        "qkv_proj_bias": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_equals(load(tmp_path)[0].encoder, reference)
    edit_json(tmp_path / "config.json", n_head=None, num_attention_heads=4)
    assert_equals(load(tmp_path)[0].encoder, reference)


def test_snowflake_class_names_and_other_automatic_classes_load(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, "gte")
    auto_map = {
        "AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel",
        "AutoTokenizer": ["tokenizer.MyTokenizer", None],
    }
    edit_json(tmp_path / "config.json", auto_map=auto_map)
    assert_equals(load(tmp_path)[0].encoder, reference)


@pytest.mark.parametrize("kind", [None, "relu", "gelu", "gated-gelu", "gated-silu"])
def test_t5_feed_forward_of_older_files_is_that_of_transformers(
    kind: str | None, tmp_path: Path
) -> None:
    fields = {} if kind is None else {"feed_forward_proj": kind}
    own = transformers.T5Config(**fields)
    computed = {"dense_act_fn": own.dense_act_fn, "is_gated_act": own.is_gated_act}
    reference = save_checkpoint(tmp_path, "t5", **computed)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for name in (*computed, "feed_forward_proj"):
        del config[name]
    path.write_text(json.dumps({**config, **fields}))
    assert_equals(load(tmp_path)[0].encoder, reference)


@pytest.mark.parametrize("name", ["encoder.embed_tokens.weight", "shared.weight"])
def test_t5_embeddings_have_either_name_beside_a_decoder(name: str, tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, "t5")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = tensors.pop("shared.weight")
    tensors |= {"decoder.final_layer_norm.weight": torch.ones(32), "lm_head.weight": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_equals(load(tmp_path)[0].encoder, reference)


def test_t5_encoder_with_embeddings_of_its_own_has_those(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, "t5")
    edit_tensors(tmp_path, **{"encoder.embed_tokens.weight": torch.randn(VOCABULARY, 32)})
    reference = type(reference).from_pretrained(tmp_path).eval()
    assert_equals(load(tmp_path)[0].encoder, reference)


JINA_BERT = "modeling_bert.JinaBertModel"  # of which of the two variants, the path does not say


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bert", {"auto_map": {"AutoModel": JINA_BERT}}, f"auto_map names {JINA_BERT}, but code"),
        ("bert", {"quantization_config": {"bits": 4}}, "has a quantization_config"),
        ("albert", {"inner_group_num": 2}, "inner_group_num is 2; only 1 is supported"),
        (
            "modernbert",
            {"layer_types": ["full_attention"]},
            "layer_types has length 1; the model has 4 layers",
        ),
        (
            "modernbert",
            {"local_attention": "8"},
            "local_attention has the invalid value '8'",
        ),
        (
            "gte",
            {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rotary positions of the type 'dynamic' are not supported; supported: default, ",
        ),
        (
            "gte",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 9.0}},
            "rotary positions of the type 'linear' need a factor",
        ),
        (
            "gte",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5; only 1.0 is supported",
        ),
        ("gte", {"rope_parameters": [1]}, r"rope_parameters is \[1\]; it must be an object"),
        (
            "gte",
            {"rope_parameters": {"rope_type": "ntk", "factor": 2.0}},
            "of the type 'ntk' are not supported; supported: default, linear",
        ),
        (
            "gte",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "must not be combined with rope_parameters",
        ),
        (
            "gte",
            {"rope_parameters": None, "rope_scaling": {"rope_theta": 9.0}},
            "rope_scaling must not contain rope_theta",
        ),
        ("gte", {"rope_parameters": {"rope_theta": "x"}}, "rope_theta has the invalid value 'x'"),
        ("gte", {"num_attention_heads": 32}, "need heads of even width, not 1"),
        ("gte", {"num_hidden_layers": 0}, "num_hidden_layers has the invalid value 0"),
        ("electra", {"embedding_size": "16"}, "embedding_size has the invalid value '16'"),
        ("albert", {"num_hidden_groups": 0}, "num_hidden_groups has the invalid value 0"),
        ("roformer", {"hidden_size": 20}, "need heads of even width, not 5"),
        ("roformer", {"rotary_value": True}, "rotary_value is True; only False is supported"),
        ("deberta-v2", {"conv_kernel_size": 3}, "conv_kernel_size is 3; only 0 is supported"),
        ("deberta-v2", {"embedding_size": 16}, "embedding_size must be equal to hidden_size"),
        ("deberta-v2", {"pos_att_type": "p2p|c2p"}, "pos_att_type is 'p2p|c2p'; supported: c2p"),
        ("deberta-v2", {"pos_att_type": 3}, "pos_att_type is 3; supported: c2p, p2c"),
        ("deberta-v2", {"pos_att_type": None}, "relative_attention must be true with"),
        ("deberta-v2", {"relative_attention": False}, "relative_attention must be true with"),
        ("deberta-v2", {"position_buckets": 1}, "position_buckets has the invalid value 1"),
        ("deberta-v2", {"position_buckets": 80}, "position_buckets has the invalid value 80"),
        ("deberta-v2", {"max_relative_positions": "9"}, "max_relative_positions has the invalid"),
        (
            "modernbert",
            {"layer_types": [["x"]]},
            r"unsupported layer type \['x'\]; supported: full_att",
        ),
        (
            "modernbert",
            {"rope_parameters": {"rope_theta": 5.0}},
            "rope_parameters has the unsupported layer type 'rope_theta'",
        ),
        ("modernbert", {"rope_scaling": {"factor": 2.0}}, "rope_scaling is .* only None"),
        ("modernbert", {"attention_bias": "false"}, "attention_bias has the invalid value 'false'"),
        ("bert", {"auto_map": JINA_BERT}, f"auto_map names {JINA_BERT}, but code"),
        *(
            ("qwen3", fields, "use_bidirectional_attention is .*, but is_causal is .*, which tran")
            for fields in (
                {"use_bidirectional_attention": True},
                {"use_bidirectional_attention": True, "is_causal": True},
                {"use_bidirectional_attention": False, "is_causal": False},
            )
        ),
        ("qwen2", {"is_causal": None}, "is_causal has the invalid value None; it must be true"),
        ("qwen2", {"use_bidirectional_attention": 1}, "use_bidirectional_attention has the inv"),
        ("qwen2", {"use_mrope": True}, "use_mrope is True; only False is supported"),
        ("qwen2", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; only None"),
        ("gemma3_text", {"is_causal": False}, "is_causal is False; only True is supported"),
        ("eurobert", {"is_causal": True}, "is_causal is True; only False is supported"),
        ("qwen3", {"per_layer_config": [{}]}, "per_layer_config is .*; only None is supported"),
        ("qwen3", {"use_sliding_window": "false"}, "use_sliding_window has the invalid value"),
        ("qwen3", {"layer_types": 5}, "layer_types is 5; it must be a list"),
        ("qwen3", {"rope_parameters": {FULL: {"rope_theta": 5.0}}}, "only parameters shared by"),
        ("qwen3", {"head_dim": 7.5}, "head_dim has the invalid value 7.5"),
        ("qwen3", {"num_key_value_heads": 3}, "3 key/value heads do not evenly divide 4"),
        ("qwen3", {"rope_parameters": {"rope_theta": float("inf")}}, "Infinity is not a JSON num"),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e31}}, "invalid value 1e.31; .* to 1e30"),
        ("qwen3", {"rope_parameters": {"rope_theta": 10**400}}, "rope_theta has the invalid value"),
        ("electra", {"embedding_size": 16.5}, "embedding_size has the invalid value 16.5"),
        ("electra", {"embedding_size": 2**70}, "embedding_size has the invalid value 1180591"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window has the invalid value None"),
        ("gemma3_text", {"use_bidirectional_attention": "no"}, "has the invalid value 'no'"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar has the invalid"),
        ("t5", {"feed_forward_proj": "glu-relu"}, "feed_forward_proj is 'glu-relu'; supported"),
        ("t5", {"dense_act_fn": "laplace"}, "activation 'laplace' is not one of"),
        ("t5", {"relative_attention_num_buckets": 2}, "num_buckets is 2; it must be from 4 to 511"),
        ("t5", {"relative_attention_max_distance": 64}, "max_distance is 64; only 128"),
        ("t5", {"is_decoder": True}, "is_decoder is True; only False is supported"),
        ("t5", {"model_type": "umt5"}, "model_type 'umt5' is not supported"),
        ("t5", {"d_kv": "6"}, "d_kv has the invalid value '6'"),
        ("jina_bert", {"feed_forward_type": ["geglu"]}, "feed_forward_type is .*; supported: geg"),
        ("jina_bert", {"position_embedding_type": "absolute"}, "only 'alibi' is supported"),
        ("jina_bert", {"feed_forward_type": "original"}, "feed_forward_type is 'original'; supp"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale is True; only False"),
        ("nomic_bert", {"head_dim": 4}, "head_dim is 4; only 8"),
        ("nomic_bert", {"num_experts": 8}, "experts are supported with 'gelu' only"),
        ("nomic_bert", {"rotary_scaling_factor": 2}, "rotary_scaling_factor is 2; only None"),
        ("nomic_bert", {"activation_function": "geglu"}, "is 'geglu'; supported: swiglu, gelu"),
        (
            "nomic_bert",
            {"activation_function": "swiglu", "hidden_act": "gelu"},
            "hidden_act is 'gelu', which Nomic's code ignores and transformers follows",
        ),
        (
            "nomic_bert",
            {"activation_function": ["gelu"]},
            r"is \['gelu'\]; supported: swiglu, gelu",
        ),
        ("nomic_moe", {"activation_function": "swiglu"}, "num_experts is 8 with .* 'swiglu'; exp"),
        (
            "nomic_moe",
            {"activation_function": "gelu_new"},
            "is 'gelu_new'; supported: swiglu, gelu",
        ),
        ("nomic_moe", {"num_experts": 0}, "num_experts has the invalid value 0; .* from 1 to 256"),
        ("nomic_moe", {"num_experts": 257}, "num_experts has the invalid value 257"),
        ("nomic_moe", {"moe_top_k": 9}, "moe_top_k has the invalid value 9; .* from 1 to 8"),
        ("nomic_moe", {"moe_top_k": None}, "config.json lacks moe_top_k"),
        ("nomic_moe", {"moe_every_n_layers": 0}, "moe_every_n_layers has the invalid value 0"),
        ("nomic_moe", {"moe_every_n_layers": 1}, "moe_every_n_layers is 1; it must be at least 2"),
        ("nomic_moe", {"moe_every_n_layers": 5}, "lacks the tensor .*layers.3.mlp.fc1.weight"),
        ("nomic_moe", {"moe_normalize_expert_weights": True}, "weights is True; only False is"),
        ("nomic_moe", {"moe_normalize_expert_weights": 1.0}, "weights is 1.0; only False is"),
        ("nomic_moe", {"expert_choice_router": True}, "expert_choice_router is True; only False"),
        ("nomic_moe", {"num_shared_experts": 1}, "num_shared_experts is 1; only 0 is supported"),
        ("nomic_moe", {"ffn_div": 2}, "ffn_div is 2; only 1 is supported"),
        ("nomic_moe", {"scale_attn_weights": False}, "scale_attn_weights is False; only True"),
        ("nomic_moe", {"scale_attn_by_inverse_layer_idx": True}, "idx is True; only False is"),
        ("nomic_moe", {"qkv_proj_bias": "yes"}, "qkv_proj_bias has the invalid value 'yes'"),
        ("nomic_moe", {"mlp_fc1_bias": False}, "unexpected tensors .*mlp.fc1.bias"),
    ],
)
def test_model_of_another_kind_is_refused_with_the_field_name(
    family: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, family)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_integers_beyond_64_bits_are_numbers(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 2.0**70, "factor": 2.0**64}
    reference = save_checkpoint(tmp_path, "qwen3", rope_parameters=rope)
    integers = {**rope, "rope_theta": 2**70, "factor": 2**64}
    edit_json(tmp_path / "config.json", rope_parameters=integers)
    assert_equals(load(tmp_path)[0].encoder, reference)


def test_roformer_with_other_positions_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "roformer")
    path = tmp_path / "model.safetensors"
    name = "encoder.embed_positions.weight"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].half()}, path, metadata={"format": "pt"})
    load(tmp_path)
    for other in (2 * tensors[name], tensors[name].bfloat16()):
        save_file({**tensors, name: other}, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=f"{name} must equal .* rounded to bfloat16, are"):
            load(tmp_path)


def test_jina_bert_without_a_model_type_loads(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, "jina_bert")
    edit_json(tmp_path / "config.json", model_type=None)
    assert_equals(load(tmp_path)[0].encoder, reference)


def test_jina_v3_files_with_adapters_of_some_weights_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "jina_embeddings_v3")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    weight = "encoder.layers.0.mixer.Wqkv.weight"
    tensors["encoder.layers.0.mixer.Wqkv.parametrizations.weight.original"] = tensors.pop(weight)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"lacks the tensor {weight}"):
        load(tmp_path)
