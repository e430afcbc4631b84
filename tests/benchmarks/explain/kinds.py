"""Kinds of small models: networks of transformers, and their training losses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from models.export.sentence_config import Overrides
from tests.benchmarks.explain.tasks import CLS, SEP, VOCABULARY, EvidenceCase

# Width of the vectors of multi-vectors.
_WIDTH = 32
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


class Network(torch.nn.Module):
    """A model of transformers.

    Attributes:
        bert: The model.
        projection: Projection of token vectors to multi-vectors.
        scale: Factor of similarities in the loss.
    """

    def __init__(self, bert: Any) -> None:  # noqa: ANN401 - transformers is untyped
        super().__init__()
        self.bert = bert
        self.projection = torch.nn.Linear(bert.config.hidden_size, _WIDTH, bias=False)
        self.scale = torch.nn.Parameter(torch.tensor(10.0))

    def forward(self, texts: Texts) -> Tensor:
        """Return the first output of the model."""
        return self.bert(**texts.arguments)[0]  # type: ignore[no-any-return]


def _mean(network: Network, texts: Texts) -> Tensor:
    mask = texts.mask[:, :, None]
    return F.normalize((network(texts) * mask).sum(1), dim=-1)


def _first(network: Network, texts: Texts) -> Tensor:
    return F.normalize(network(texts)[:, 0], dim=-1)


def _sparse(network: Network, texts: Texts) -> Tensor:
    weights = torch.log1p(torch.relu(network(texts))) * texts.mask[:, :, None]
    return weights.amax(1)


def _multi(network: Network, texts: Texts) -> Tensor:
    return F.normalize(network.projection(network(texts)), dim=-1) * texts.mask[:, :, None]


def _similarity_loss(
    vectors: Callable[[Network, Texts], Tensor], *, multi: bool = False, sparse: bool = False
) -> Callable[[Network, Sequence[EvidenceCase]], Tensor]:
    """Return the contrastive loss of each query's document among all documents of the batch."""

    def loss(network: Network, cases: Sequence[EvidenceCase]) -> Tensor:
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


def _pair_loss(network: Network, cases: Sequence[EvidenceCase]) -> Tensor:
    logits = network(_padded([(case.query, case.text) for case in cases]))[:, 0]
    return F.binary_cross_entropy_with_logits(logits, _labels(cases).float())


def _label_loss(network: Network, cases: Sequence[EvidenceCase]) -> Tensor:
    return F.cross_entropy(network(_padded([(case.text,) for case in cases])), _labels(cases))


def _labels(cases: Sequence[EvidenceCase]) -> Tensor:
    return torch.tensor([case.label for case in cases])


@dataclass(frozen=True)
class ModelKind:
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
    loss: Callable[[Network, Sequence[EvidenceCase]], Tensor]
    steps: int
    overrides: Overrides = Overrides()  # noqa: RUF009 - frozen
    base: str = ""


KINDS = {
    "mean": ModelKind(
        transformers.BertModel, _similarity_loss(_mean), 800, Overrides(pooling=["mean"])
    ),
    "CLS": ModelKind(
        transformers.BertModel, _similarity_loss(_first), 1200, Overrides(pooling=["cls"])
    ),
    "reranker": ModelKind(
        transformers.BertForSequenceClassification, _pair_loss, 1500, base="mean"
    ),
    "classifier": ModelKind(transformers.BertForSequenceClassification, _label_loss, 600),
    "SPLADE": ModelKind(
        transformers.BertForMaskedLM,
        _similarity_loss(_sparse, sparse=True),
        1500,
        Overrides(sparse=True),
        base="mean",
    ),
    "ColBERT": ModelKind(transformers.BertModel, _similarity_loss(_multi, multi=True), 1000),
}
