"""Training of a small BERT of each kind, and its artifact."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

from models.artifact import Artifact
from models.export.exporter import export
from models.export.sentence_config import Overrides
from models.export.sources import resolve
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
    Case,
    training_cases,
)
from tests.models.checkpoints import write_json

# Cases of a batch; those of relevance are half as many queries.
_BATCH = 64
_LEARNING_RATE = 1e-3
# Probability that a distractor is replaced by the mask token, which pretrained models know.
_MASKED = 0.1
_WIDTH = 32  # of the vectors of multi-vectors
# Weight of the sum of sparse vectors in the loss.
_SPARSITY = 1e-3


@dataclass(frozen=True)
class Texts:
    """Padded token ids `(B, L)`, mask and token types of texts, or of pairs of texts."""

    ids: Tensor
    mask: Tensor
    types: Tensor

    @property
    def arguments(self) -> Mapping[str, Tensor]:
        """Arguments of a model of transformers."""
        return {"input_ids": self.ids, "attention_mask": self.mask, "token_type_ids": self.types}


def token_ids(*texts: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return token ids and token types of a text or a pair of texts, special tokens included."""
    ids, types = [VOCABULARY[CLS]], [0]
    for index, words in enumerate(texts):
        ids += [*(VOCABULARY[word] for word in words), VOCABULARY[SEP]]
        types += [index] * (len(words) + 1)
    return ids, types


def _padded(texts: Sequence[Sequence[Sequence[str]]]) -> Texts:
    rows = [token_ids(*parts) for parts in texts]
    shape = len(rows), max(len(ids) for ids, _ in rows)
    ids, mask, types = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    for i, (own, own_types) in enumerate(rows):
        ids[i, : len(own)] = torch.tensor(own)
        types[i, : len(own)] = torch.tensor(own_types)
        mask[i, : len(own)] = 1
    return Texts(ids, mask, types)


class _Network(torch.nn.Module):
    """A model of transformers with the results of a kind.

    Args:
        kind: Key of `KINDS`.
    """

    def __init__(self, kind: str, config: Any) -> None:  # noqa: ANN401 - transformers is untyped
        super().__init__()
        self.bert: Any = KINDS[kind].model(config)
        width = config.hidden_size
        self.projection = torch.nn.Linear(width, _WIDTH, bias=False) if kind == "ColBERT" else None
        self.scale = torch.nn.Parameter(torch.tensor(10.0))

    def forward(self, texts: Texts) -> Tensor:
        return self.bert(**texts.arguments)[0]  # type: ignore[no-any-return]


def _mean(network: _Network, texts: Texts) -> Tensor:
    mask = texts.mask[:, :, None]
    return F.normalize((network(texts) * mask).sum(1), dim=-1)


def _first(network: _Network, texts: Texts) -> Tensor:
    return F.normalize(network(texts)[:, 0], dim=-1)


def _sparse(network: _Network, texts: Texts) -> Tensor:
    weights = torch.log1p(torch.relu(network(texts))) * texts.mask[:, :, None]
    return weights.amax(1)


def _multi(network: _Network, texts: Texts) -> Tensor:
    assert network.projection is not None
    return F.normalize(network.projection(network(texts)), dim=-1) * texts.mask[:, :, None]


def _similarity_loss(
    vectors: Callable[[_Network, Texts], Tensor], *, multi: bool = False, sparse: bool = False
) -> Callable[[_Network, Sequence[Case]], Tensor]:
    """Return the contrastive loss of each query's document among all documents of the batch."""

    def loss(network: _Network, cases: Sequence[Case]) -> Tensor:
        queries, documents = cases[::2], [*cases[::2], *cases[1::2]]
        q = vectors(network, _padded([(case.query,) for case in queries]))
        d = vectors(network, _padded([(case.text,) for case in documents]))
        scores = torch.einsum("qiw,djw->qdij", q, d).amax(-1).sum(-1) if multi else q @ d.T
        scores = scores if sparse else scores * network.scale.abs()
        # Documents of other queries can be relevant too.
        relevant = torch.tensor([[a.concept in b.concepts for b in documents] for a in queries])
        own = torch.eye(*relevant.shape, dtype=torch.bool)
        scores = scores.masked_fill(relevant & ~own, -torch.inf)
        value = F.cross_entropy(scores, torch.arange(len(q)))
        return value + _SPARSITY * (q.sum(1).mean() + d.sum(1).mean()) if sparse else value

    return loss


def _pair_loss(network: _Network, cases: Sequence[Case]) -> Tensor:
    logits = network(_padded([(case.query, case.text) for case in cases]))[:, 0]
    return F.binary_cross_entropy_with_logits(logits, _labels(cases).float())


def _label_loss(network: _Network, cases: Sequence[Case]) -> Tensor:
    return F.cross_entropy(network(_padded([(case.text,) for case in cases])), _labels(cases))


def _labels(cases: Sequence[Case]) -> Tensor:
    return torch.tensor([case.label for case in cases])


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        model: Class of transformers.
        loss: Training loss of a batch of cases.
        steps: Number of training steps.
        overrides: Settings of the export.
        base: Kind whose trained encoder it starts from; empty: random weights. A reranker with
            random weights learned nothing in 2,000 steps.
    """

    model: Callable[[Any], Any]
    loss: Callable[[_Network, Sequence[Case]], Tensor]
    steps: int
    overrides: Overrides = Overrides()  # noqa: RUF009 - frozen
    base: str = ""


KINDS = {
    "mean": Kind(transformers.BertModel, _similarity_loss(_mean), 800, Overrides(pooling=["mean"])),
    "CLS": Kind(transformers.BertModel, _similarity_loss(_first), 1200, Overrides(pooling=["cls"])),
    "reranker": Kind(transformers.BertForSequenceClassification, _pair_loss, 1500, base="mean"),
    "classifier": Kind(transformers.BertForSequenceClassification, _label_loss, 600),
    "SPLADE": Kind(
        transformers.BertForMaskedLM,
        _similarity_loss(_sparse, sparse=True),
        1500,
        Overrides(sparse=True),
        base="mean",
    ),
    "ColBERT": Kind(transformers.BertModel, _similarity_loss(_multi, multi=True), 1000),
}


def train(kind: str, hidden_size: int, steps: int) -> _Network:
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
    network = _Network(kind, config)
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


def _masked(generator: np.random.Generator, case: Case) -> Case:
    masked = generator.random(len(case.text)) < _MASKED
    words = zip(case.text, masked, strict=True)
    text = [MASK if is_masked and word in _DISTRACTORS else word for word, is_masked in words]
    return Case(case.query, text, case.planted, case.label, case.concept, case.concepts)


_DISTRACTORS = frozenset(DISTRACTORS)


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
    if network.projection is not None:
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
