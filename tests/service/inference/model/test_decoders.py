"""Decoders and T5 encoders, from text to vector, against sentence-transformers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Transformer,
)
from tokenizers import Tokenizer, processors
from torch import nn

import vitrine
from models.export.exporter import export
from models.export.sources import resolve
from tests.models.checkpoints import (
    edit_json,
    edit_tensors,
    save_byte_fallback,
    save_byte_level,
    save_checkpoint,
    save_sentencepiece,
    write_modules,
)
from tests.models.export.test_decoders import rename

TEXTS = ["the cat sat.", "a", "  don't  2026 ", "ca " * 60, "naïve 日本 🙂"]
PROMPTS = {"query": "Instruct: find the cat\nQuery:", "document": ""}


def save_qwen3(folder: Path) -> None:
    """Save a model like Qwen3-Embedding: the last token, <|endoftext|>, is the vector."""
    save_byte_level(folder, "Qwen2Tokenizer")
    end_every_text(folder, "$A <|endoftext|>", "<|endoftext|>")
    save_checkpoint(folder, "qwen3", vocab_size=300, max_position_embeddings=64)
    transformer = Transformer(str(folder), max_seq_length=32)
    pooling = Pooling(32, pooling_mode="lasttoken")
    modules: list[nn.Module] = [transformer, pooling, Normalize()]
    SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu").save(str(folder))


def save_gemma(folder: Path) -> None:
    """Save a model like EmbeddingGemma: mean pooling and two dense heads."""
    save_byte_fallback(folder, "GemmaTokenizer")
    end_every_text(folder, "<bos> $A <eos>", "<bos>", "<eos>")
    save_checkpoint(folder, "gemma3_text", vocab_size=300, max_position_embeddings=64)
    heads = (
        Dense(n, m, bias=False, activation_function=nn.Identity()) for n, m in ((32, 48), (48, 32))
    )
    transformer = Transformer(str(folder), max_seq_length=32)
    modules: list[nn.Module] = [transformer, Pooling(32), *heads, Normalize()]
    SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu").save(str(folder))


def save_harrier(folder: Path) -> None:
    """Save a model like harrier-oss-v1-270m: a causal Gemma 3, and its last token, <eos>."""
    save_byte_fallback(folder, "GemmaTokenizer")
    end_every_text(folder, "<bos> $A <eos>", "<bos>", "<eos>")
    changes = {"use_bidirectional_attention": False, "vocab_size": 300}
    save_checkpoint(folder, "gemma3_text", max_position_embeddings=64, **changes)
    transformer = Transformer(str(folder), max_seq_length=32)
    pooling = Pooling(32, pooling_mode="lasttoken")
    modules: list[nn.Module] = [transformer, pooling, Normalize()]
    SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu").save(str(folder))


def save_t5(folder: Path) -> None:
    """Save a model like sentence-t5: mean pooling and a dense head without a bias."""
    save_sentencepiece(folder, "T5Tokenizer")
    save_checkpoint(folder, "t5", vocab_size=300)
    dense = Dense(32, 12, bias=False, activation_function=nn.Identity())
    transformer = Transformer(str(folder), max_seq_length=32)
    modules: list[nn.Module] = [transformer, Pooling(32), dense, Normalize()]
    SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu").save(str(folder))


def save_nemotron(folder: Path) -> None:
    """Save a model like llama-nemotron-embed: a bidirectional Llama with mean pooling."""
    _save_bidirectional(folder, "llama", [Pooling(32), Normalize()])
    rename(folder, "llama_bidirec", "llama_bidirectional_model.LlamaBidirectional")


def save_voyage(folder: Path) -> None:
    """Save a model like voyage-4-nano: a bidirectional Qwen3 that projects each token's vector."""
    names = dict.fromkeys(("module_input_name", "module_output_name"), "token_embeddings")
    dense = Dense(32, 12, bias=False, activation_function=nn.Identity(), **names)
    _save_bidirectional(folder, "qwen3", [dense, Pooling(12), Normalize()])
    write_modules(
        folder, ("Transformer", ""), ("Pooling", "2_Pooling"), ("Normalize", "3_Normalize")
    )
    rename(folder, "qwen3", "modeling_qwen3.VoyageQwen3BidirectionalEmbed")
    edit_json(folder / "config.json", num_labels=12)
    edit_tensors(folder, **{"linear.weight": dense.linear.weight.detach()})


def _save_bidirectional(folder: Path, family: str, modules: list[nn.Module]) -> None:
    """Save a decoder with bidirectional attention, in `folder` and for sentence-transformers."""
    save_byte_level(folder, "Qwen2Tokenizer")
    changes = {"is_causal": False, "vocab_size": 300}
    save_checkpoint(folder, family, max_position_embeddings=64, **changes)
    transformer = Transformer(str(folder), max_seq_length=32)
    model = SentenceTransformer(modules=[transformer, *modules], prompts=PROMPTS, device="cpu")
    for path in (folder, folder / "reference"):
        model.save(str(path))


def end_every_text(folder: Path, template: str, *tokens: str) -> None:
    """Let the tokenizer add special tokens to every text."""
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    ids = [(token, tokenizer.token_to_id(token)) for token in tokens]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    tokenizer.save(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    "save", [save_qwen3, save_gemma, save_harrier, save_t5, save_nemotron, save_voyage]
)
def test_vectors_equal_sentence_transformers(save: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save(folder)
    export(resolve(str(folder)), tmp_path / "artifact")
    own = folder / "reference"
    path = str(own if own.exists() else folder)
    reference = SentenceTransformer(path, device="cpu", local_files_only=True)
    with vitrine.SyncModel(tmp_path / "artifact", vitrine.ModelOptions(threads=2)) as model:
        for prompt in PROMPTS:
            expected = reference.encode(TEXTS, prompt_name=prompt)
            actual = model.encode(TEXTS, prompt_name=prompt).vectors
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
