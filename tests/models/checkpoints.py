"""Small random checkpoints of every family, saved in the Hugging Face layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from tests.models.jina_bert import CODE_OF, save_jina_bert
from tests.models.nomic_moe import save_nomic_moe
from tests.sentences import SENTENCES

VOCABULARY = 60

_BERT_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "layer_norm_eps": 1e-3,
}

_LLAMA_LIKE = {
    **{name: value for name, value in _BERT_LIKE.items() if name != "layer_norm_eps"},
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-3,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}

CONFIGS = {
    "bert": lambda: transformers.BertConfig(**_BERT_LIKE),
    "roberta": lambda: transformers.RobertaConfig(**_BERT_LIKE, type_vocab_size=1),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**_BERT_LIKE, type_vocab_size=1),
    "camembert": lambda: transformers.CamembertConfig(**_BERT_LIKE, type_vocab_size=1),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
        max_position_embeddings=40,
    ),
    "mpnet": lambda: transformers.MPNetConfig(**_BERT_LIKE),
    "electra": lambda: transformers.ElectraConfig(**_BERT_LIKE, embedding_size=16),
    "albert": lambda: transformers.AlbertConfig(
        **{**_BERT_LIKE, "num_hidden_layers": 5},
        embedding_size=16,
        num_hidden_groups=2,
        bos_token_id=0,
        eos_token_id=2,
    ),
    "deberta-v2": lambda: transformers.DebertaV2Config(
        **_BERT_LIKE,
        relative_attention=True,
        pos_att_type="p2c|c2p",
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
    ),
    "roformer": lambda: transformers.RoFormerConfig(**_BERT_LIKE),
    "modernbert": lambda: transformers.ModernBertConfig(
        **{**_BERT_LIKE, "num_hidden_layers": 4, "layer_norm_eps": None},
        norm_eps=1e-3,
        local_attention=8,
        pad_token_id=1,
        **{f"{name}_token_id": 0 for name in ("bos", "cls")},
        **{f"{name}_token_id": 2 for name in ("eos", "sep")},
    ),
    "gte": lambda: transformers.GteConfig(**_BERT_LIKE),
    "nomic_bert": lambda: transformers.NomicBertConfig(**_BERT_LIKE),
    "jina_embeddings_v3": lambda: transformers.JinaEmbeddingsV3Config(**_BERT_LIKE),
    "eurobert": lambda: transformers.EuroBertConfig(**_LLAMA_LIKE),
    "llama": lambda: transformers.LlamaConfig(**_LLAMA_LIKE),
    "ministral3": lambda: transformers.Ministral3Config(
        **_LLAMA_LIKE,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 300.0,
            "factor": 4.0,
            "original_max_position_embeddings": 40,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "mistral": lambda: transformers.MistralConfig(**_LLAMA_LIKE, sliding_window=7),
    "qwen2": lambda: transformers.Qwen2Config(**_LLAMA_LIKE),
    "qwen3": lambda: transformers.Qwen3Config(**_LLAMA_LIKE, head_dim=6),
    "t5": lambda: transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=6,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        layer_norm_epsilon=1e-3,
        relative_attention_num_buckets=8,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(
        **_LLAMA_LIKE,
        head_dim=6,
        query_pre_attn_scalar=6,
        sliding_window=10,
        layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention=True,
    ),
}


# Changes that make a model small enough to export it in a second, with each kind of its layers.
SHALLOW: dict[str, dict[str, Any]] = {
    "bert": {"num_hidden_layers": 1},
    "distilbert": {"n_layers": 1},
    "mpnet": {"num_hidden_layers": 1},
    "modernbert": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}


def save_checkpoint(folder: Path, family: str, **changes: object) -> Any:  # noqa: ANN401
    """Save a random model of the family, with every tensor away from its initial value.

    The models are those of transformers, of `tests.models.jina_bert`, or of
    `tests.models.nomic_moe`.
    """
    if family == "nomic_moe":
        return save_nomic_moe(folder, **changes)
    if family in CODE_OF:
        return save_jina_bert(folder, family, **changes)
    create = transformers.AutoModel.from_config
    if family == "t5":
        create = transformers.T5EncoderModel
    return _save_random(folder, family, create, _config_of(family, changes))


def save_classifier(folder: Path, family: str, labels: int, **changes: object) -> Any:  # noqa: ANN401
    """Save a random model for sequence classification, as `save_checkpoint` does."""
    named = {"id2label": {i: f"LABEL_{i}" for i in range(labels)}, **changes}
    return _save_head(folder, family, transformers.AutoModelForSequenceClassification, named)


def save_token_classifier(folder: Path, family: str, labels: int, **changes: object) -> Any:  # noqa: ANN401
    """Save a random model for token classification, as `save_checkpoint` does."""
    named = {"id2label": {i: f"LABEL_{i}" for i in range(labels)}, **changes}
    return _save_head(folder, family, transformers.AutoModelForTokenClassification, named)


def save_masked_lm(folder: Path, family: str, **changes: object) -> Any:  # noqa: ANN401
    """Save a random masked language model, as `save_checkpoint` does."""
    return _save_head(folder, family, transformers.AutoModelForMaskedLM, changes)


def save_causal_lm(folder: Path, family: str, **changes: object) -> Any:  # noqa: ANN401
    """Save a random causal language model, as `save_checkpoint` does."""
    return _save_head(folder, family, transformers.AutoModelForCausalLM, changes)


def _save_head(folder: Path, family: str, kind: Any, changes: dict[str, Any]) -> Any:  # noqa: ANN401
    return _save_random(folder, family, kind.from_config, _config_of(family, changes))


def _config_of(family: str, changes: dict[str, Any]) -> Any:  # noqa: ANN401
    config = CONFIGS[family]()
    return type(config).from_dict({**config.to_dict(), **changes})


def _save_random(folder: Path, family: str, create: Any, config: Any) -> Any:  # noqa: ANN401
    torch.manual_seed(0)
    model = create(config).eval()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # RoFormer's positions
            continue
        is_scale = "norm" in name.lower() and name.endswith("weight")
        # Gemma's scales are stored less 1.
        mean = 1.0 if is_scale and family != "gemma3_text" else 0.0
        torch.nn.init.normal_(parameter, mean=mean, std=0.15)
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of words w0, w1, ... between [CLS] (0) and [SEP] (2); [PAD] is 1."""
    words = {"[CLS]": 0, "[PAD]": 1, "[SEP]": 2, "[UNK]": 3}
    words |= {f"w{i}": i for i in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 2)],
    )
    tokenizer.add_special_tokens(["[CLS]", "[PAD]", "[SEP]", "[UNK]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 24, **special},
    )


def save_wordpiece(folder: Path, kind: str) -> None:
    """Save a tokenizer of transformers with a few characters and words."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if kind == "MPNetTokenizer":
        special = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
    characters = "abcdefghijklmnopqrstuvwxyzW567\u00e9.!'\u65e5"
    pieces = [*characters, *(f"##{character}" for character in characters), "cat", "Cat", "##at"]
    vocabulary = {token: i for i, token in enumerate([*special, *pieces, "the", "[unused5]"])}
    getattr(transformers, kind)(vocab=vocabulary).save_pretrained(folder)


def save_chatml(folder: Path, chat_template: str | None = None, max_length: int = 400) -> int:
    """Save a byte-level tokenizer with the words and special tokens of Qwen3; return its size."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*SENTENCES, *["yes", "no"] * 400], trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=chat_template,
        model_max_length=max_length,
        padding_side="left",
        **names,
    ).save_pretrained(folder)
    return int(tokenizer.get_vocab_size())


UNIGRAMS = [(piece, -5.0) for piece in "▁abcdefghijklmnopqrstuvwxyzABCW5679é."]
UNIGRAMS += [(f"▁{word}", -7.0) for word in ("the", "cat", "w5", "W5")]


def save_sentencepiece(folder: Path, kind: str) -> None:
    """Save a tokenizer of transformers with a few characters and words."""
    names = {
        "AlbertTokenizer": ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"),
        "DebertaV2Tokenizer": ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"),
    }
    special = names.get(kind, ("<s>", "<pad>", "</s>", "<unk>", "<mask>"))
    vocabulary = [*((name, 0.0) for name in special), *UNIGRAMS]
    getattr(transformers, kind)(vocab=vocabulary).save_pretrained(folder)


def save_byte_level(folder: Path, kind: str) -> None:
    """Save a tokenizer of transformers with bytes as characters and two more tokens."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet, "ca", "Ġca"])}
    merges = [("c", "a"), ("Ġ", "ca")]
    tokenizer = getattr(transformers, kind)(vocab=vocabulary, merges=merges)
    tokenizer.save_pretrained(folder)


def save_byte_fallback(folder: Path, kind: str) -> None:
    """Save a tokenizer of transformers with a few characters, and bytes for all others."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    characters = [*"▁abcdefghijklmnopqrstuvwxyz.", "ca", "▁ca"]
    tokens = [*special, *characters, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = getattr(transformers, kind)(vocab=vocabulary, merges=[("c", "a"), ("▁", "ca")])
    tokenizer.save_pretrained(folder)


def save_small(folder: Path, source: Path, family: str = "bert") -> None:
    """Save a small random model with the tokenizer and sentence settings of another one."""
    shutil.copytree(
        source, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True
    )
    config = json.loads((source / "config.json").read_text())
    taken = ("vocab_size", "max_position_embeddings", "layer_norm_eps")
    save_checkpoint(folder, family, **{name: config[name] for name in taken})
    edit_json(folder / "1_Pooling" / "config.json", word_embedding_dimension=32)


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Set tensors of model.safetensors, and remove those that are None."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(file: Path, **changes: object) -> None:
    """Set fields of a JSON file."""
    write_json(file, {**json.loads(file.read_text()), **changes})


def write_json(file: Path, content: object) -> None:
    """Write a JSON file and create its parent folders."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def write_modules(folder: Path, *modules: tuple[str, str]) -> None:
    """Write modules.json from pairs of class name and path."""
    write_json(
        folder / "modules.json",
        [
            {
                "idx": i,
                "name": str(i),
                "path": path,
                "type": f"sentence_transformers.models.{kind}",
            }
            for i, (kind, path) in enumerate(modules)
        ],
    )


def save_sentence_model(
    folder: Path,
    family: str = "bert",
    *modules: tuple[str, str],
    pooling: dict[str, Any] | None = None,
    **changes: object,
) -> Any:  # noqa: ANN401
    """Save a random model of sentence-transformers; return its encoder.

    Args:
        folder: Folder to write.
        family: Family of the encoder.
        modules: Class name and path of the modules after pooling.
        pooling: Config of the pooling; None: the mean, by default.
        changes: Changes of the encoder's config.
    """
    model = save_checkpoint(folder, family, **changes)
    save_tokenizer(folder)
    write_modules(folder, ("Transformer", ""), ("Pooling", "1_Pooling"), *modules)
    width = {"word_embedding_dimension": 32}
    write_json(folder / "1_Pooling" / "config.json", {**width, **(pooling or {})})
    return model


def save_dense(folder: Path, **config: object) -> None:
    """Save a BERT with mean pooling, a dense head and Normalize."""
    save_sentence_model(folder, "bert", ("Dense", "2_Dense"), ("Normalize", "3_Normalize"))
    fields = {"in_features": 32, "out_features": 12, "bias": True}
    activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
    write_json(folder / "2_Dense" / "config.json", {**fields, **activation, **config})
    save_file(
        {"linear.weight": torch.randn(12, 32), "linear.bias": torch.randn(12)},
        folder / "2_Dense" / "model.safetensors",
    )
    (folder / "3_Normalize").mkdir()


def save_multi_vector(
    folder: Path,
    encoder: Path,
    *,
    mask: dict[str, Any] | None = None,
    prompts: dict[str, str] | None = None,
    normalize: bool = True,
    bias: bool = False,
    use_residual: bool = False,
    pooling: dict[str, Any] | None = None,
    **settings: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Save a multi-vector model of sentence-transformers with a random projection; return it.

    Args:
        folder: Folder to write.
        encoder: Folder of the encoder and its tokenizer.
        mask: Settings of the module `MultiVectorMask`.
        prompts: Prompts of the model.
        normalize: Whether the model has the module `Normalize`.
        bias: Whether the projection has a bias.
        use_residual: Whether there are two layers that add their input to their output.
        pooling: Settings of the module `HierarchicalTokenPooling`; None: without the module.
        settings: Settings of the module `Transformer`, such as `query_expansion`.
    """
    # Imported here, because it takes 4 s.
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import (
        HierarchicalTokenPooling,
        MultiVectorMask,
    )

    transformer = Transformer(str(encoder), **settings)
    torch.manual_seed(1)
    names = {"module_input_name": "token_embeddings"}
    width = transformer.get_embedding_dimension()
    projections = [Dense(width, 12, bias=bias, activation_function=torch.nn.Identity(), **names)]
    if use_residual:
        layers = {"activation_function": torch.nn.GELU(), "use_residual": True, **names}
        projections = [Dense(width, 12, **layers), Dense(12, 12, **layers)]
    modules = [transformer, *projections, MultiVectorMask(**(mask or {}))]
    modules += [Normalize(**names)] if normalize else []
    modules += [] if pooling is None else [HierarchicalTokenPooling(**pooling)]
    model = MultiVectorEncoder(modules=modules, device="cpu", prompts=prompts)
    model.save(str(folder))
    return MultiVectorEncoder(str(folder), device="cpu")


def save_bge_m3(folder: Path, tokenizer: str = "XLMRobertaTokenizer") -> Any:  # noqa: ANN401
    """Save a random model with the heads of BGE-M3, with CLS pooling; return the encoder."""
    encoder = save_checkpoint(folder, "xlm-roberta", pad_token_id=1)
    save_sentencepiece(folder, tokenizer)
    write_modules(folder, ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2"))
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    torch.manual_seed(2)
    for name, width in (("sparse", 1), ("colbert", 12)):
        linear = torch.nn.Linear(32, width)
        save_file(linear.state_dict(), folder / f"{name}_linear.safetensors")
    return encoder


# Folders of the modules of `save_inference_free`.
QUERY_MODULE = "query_0_SparseStaticEmbedding"
DOCUMENT_MODULES = ("document_0_Transformer", "document_1_SpladePooling")


def save_inference_free(
    folder: Path,
    encoder: Path,
    *,
    default_route: str | None = "document",
    prompts: dict[str, str] | None = None,
) -> Any:  # noqa: ANN401
    """Save a sparse model that looks up random weights of queries; return it.

    A seventh of the weights is zero, and others are negative.

    Args:
        folder: Folder to write.
        encoder: Folder of a masked language model and its tokenizer.
        default_route: Route of texts that are neither queries nor documents.
        prompts: Prompts of the model.
    """
    # Imported here, because it takes 4 s.
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router, Transformer
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

    network = Transformer(str(encoder), transformer_task="fill-mask")
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(len(network.tokenizer), generator=generator) * 3 - 0.5
    weights[::7] = 0
    pooling = SpladePooling("max", activation_function="log1p_relu")
    query = SparseStaticEmbedding(network.tokenizer, weights)
    router = Router.for_query_document([query], [network, pooling], default_route)
    model = SparseEncoder(modules=[router], device="cpu", prompts=prompts)
    model.save(str(folder))
    return SparseEncoder(str(folder), device="cpu")
