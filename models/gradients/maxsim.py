"""MaxSim of multi-vectors, as a target of attributions, and its alignment of tokens.

MaxSim of a query and a document is the sum, over the query's vectors, of the largest dot product
with a vector of the document. The alignment is the list of these dot products with their tokens.
Gradients pass through the largest products only. So along a path of integrated gradients, the
alignment is that of each point. MaxSim is continuous there, with kinks where the alignment changes.

Which tokens have vectors depends on the token ids of the texts alone, and is the same on the path
and for the baseline.

Source: Khattab and Zaharia 2020, arXiv:2004.12832.
"""

from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor

from models.gradients.attribution import TargetFunction
from models.gradients.inputs import InputRow, starts_of
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.attribution import AlignedTokens


def maxsim(normalize: bool) -> TargetFunction:
    """Return a target function: MaxSim of a query and a document.

    The function takes the multi-vectors of a query and of a document, `(S, L', W)` each. If it also
    gets those of a second document, it returns the margin of the first document over the second.

    Args:
        normalize: Whether vectors are scaled to unit length.
    """

    def target(query: Tensor, *documents: Tensor) -> Tensor:
        score, *versus = (_score(_products(query, document, normalize)) for document in documents)
        return score - versus[0] if versus else score

    return target


def _score(products: Tensor) -> Tensor:
    """Return the MaxSim `(S,)` of dot products `(S, L', L'')`; 0 if a text has no vectors."""
    has_vectors = products.shape[-1] > 0  # the maximum of no numbers is an error
    return products.amax(-1).sum(-1) if has_vectors else products.sum((-2, -1))


def alignment(
    model: ReferenceModel, query: InputRow, documents: Sequence[InputRow]
) -> tuple[AlignedTokens, ...]:
    """Return the alignment of a query with each document, in the order of the documents.

    Indices of tokens count the tokens of the query, then those of each document.

    Args:
        model: Reference model of the served graph.
        query: Query, with at least one vector.
        documents: Documents, each with at least one vector.
    """
    starts = starts_of((query, *documents))[1:]
    return tuple(
        AlignedTokens(i, start + j, value)
        for start, document in zip(starts, documents, strict=True)
        for i, j, value in _align(model, query, document)
    )


def _align(
    model: ReferenceModel, query: InputRow, document: InputRow
) -> Iterator[tuple[int, int, float]]:
    """Yield the position of each query token, that of its document token, and the dot product."""
    products = _products(model.vector(query), model.vector(document), model.normalize)
    values, nearest = products.max(-1)  # (L',)
    rows, columns = (
        range(len(row.ids)) if row.vector_positions is None else row.vector_positions
        for row in (query, document)
    )
    for i, j, value in zip(rows, nearest.tolist(), values.tolist(), strict=True):
        yield i, columns[j], value


def _products(query: Tensor, document: Tensor, normalize: bool) -> Tensor:
    """Return the dot products of all vectors of a query and a document, `(..., L', L'')`."""
    if normalize:
        query, document = F.normalize(query, dim=-1), F.normalize(document, dim=-1)
    return query @ document.mT
