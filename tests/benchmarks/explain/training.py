"""Training of a small model of each kind, and its export."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

from models.artifact import Artifact
from models.export.exporter import export
from models.export.sources import resolve
from tests.benchmarks.explain.kinds import KINDS, Network
from tests.benchmarks.explain.tasks import (
    CLS,
    DISTRACTORS,
    LABELS,
    MASK,
    PAD,
    SEP,
    SPECIAL,
    UNKNOWN,
    VOCABULARY,
    EvidenceCase,
    training_cases,
)
from tests.models.checkpoints import write_json

# Cases of a batch; those of relevance are half as many queries.
_BATCH = 64
_LEARNING_RATE = 1e-3
# Probability that a distractor is replaced by the mask token, which pretrained models know.
_MASKED = 0.1
_DISTRACTORS = frozenset(DISTRACTORS)


def train(kind: str, hidden_size: int, steps: int) -> Network:
    """Return a trained model; texts and weights depend on the seed alone."""
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    labels = LABELS if kind == "classifier" else ("relevance",)
    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * hidden_size,
        max_position_embeddings=40,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        id2label=dict(enumerate(labels)),
    )
    network = Network(KINDS[kind].model(config))
    if KINDS[kind].base:
        base = KINDS[kind].base
        encoder = train(base, hidden_size, min(steps, KINDS[base].steps)).bert.state_dict()
        own = {name: value for name, value in encoder.items() if not name.startswith("pooler")}
        network.bert.bert.load_state_dict(own, strict=False)
    optimizer = torch.optim.AdamW(network.parameters(), _LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=steps)
    for step in range(steps):
        cases = [_masked(generator, case) for case in training_cases(kind, generator, _BATCH)]
        loss = KINDS[kind].loss(network, cases)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            print(f"{kind}: step {step} of {steps}, loss {loss.item():.3f}", flush=True)
    return network.eval()


def _masked(generator: np.random.Generator, case: EvidenceCase) -> EvidenceCase:
    """Replace some distractors by the mask token."""

    def masked(words: Sequence[str]) -> list[str]:
        replaced = generator.random(len(words)) < _MASKED
        pairs = zip(words, replaced, strict=True)
        return [MASK if is_masked and word in _DISTRACTORS else word for word, is_masked in pairs]

    return replace(case, query=masked(case.query), text=masked(case.text))


def train_and_export(kind: str, folder: Path, hidden_size: int, steps: int) -> Artifact:
    """Train a model of a kind, save its checkpoint and export it; return the artifact.

    Args:
        kind: Key of `KINDS`.
        folder: Folder to write.
        hidden_size: Width of the model.
        steps: Number of training steps.
    """
    checkpoint = folder / kind
    network = train(kind, hidden_size, steps)
    _save_tokenizer(checkpoint)
    network.bert.save_pretrained(checkpoint)
    if kind == "ColBERT":
        checkpoint = _save_multi_vector(folder, checkpoint, network.projection.weight)
    source = resolve(str(checkpoint))
    artifact, _ = export(source, folder / f"{kind}-artifact", overrides=KINDS[kind].overrides)
    return artifact


def _save_tokenizer(folder: Path) -> None:
    """Save a tokenizer whose tokens are words."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(token, VOCABULARY[token]) for token in (CLS, SEP)],
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"cls_token": CLS, "sep_token": SEP, "pad_token": PAD, "mask_token": MASK}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 40,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    write_json(folder / "tokenizer_config.json", {**settings, **names})


def _save_multi_vector(folder: Path, encoder: Path, projection: Tensor) -> Path:
    # Imported here, because it takes 4 s.
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    names = {"module_input_name": "token_embeddings"}
    width, hidden_size = projection.shape
    dense = Dense(hidden_size, width, bias=False, activation_function=torch.nn.Identity(), **names)
    dense.linear.weight = torch.nn.Parameter(projection.detach())
    modules = [Transformer(str(encoder)), dense, MultiVectorMask(), Normalize(**names)]
    saved = folder / f"{encoder.name}-saved"
    MultiVectorEncoder(modules=modules, device="cpu").save(str(saved))
    return saved
