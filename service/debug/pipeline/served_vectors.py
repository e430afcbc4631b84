"""Results of the served model, and their agreement with those of the reference model."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.engines.outputs import Agreement, compare, int8_bounds
from models.gradients.inputs import InputRow
from service.debug.pipeline.response import VectorParity
from service.inference.model.model import Model
from service.inference.results.vectors import RowResult, SparseVector
from service.inference.tokenizing.rows import Row

# Bounds of the agreement of a served vector with the reference model's vector. Every engine keeps
# them in every precision but int8, so a vector beyond them means that another model is served.
_BOUNDS = Agreement(cosine=0.999, norm=0.05)


async def encode(model: Model, rows: Sequence[InputRow]) -> NDArray[np.float32]:
    """Return the served model's vectors of the rows, before normalisation, `(B, W)`.

    Multi-vectors of all rows are concatenated, `(N, W)`.
    """
    outcome = await model.encode_rows(
        [
            Row(
                row.ids,
                False,
                row.prompt_tokens,
                row.adapter,
                token_types=row.token_types,
                unattended=row.unattended,
            )
            for row in rows
        ],
        model.artifact.manifest.outputs[:1],
        uses_cache=False,
    )
    results = zip(rows, outcome.results, strict=True)
    return np.concatenate([_dense(row, result, model.width) for row, (result,) in results])


def _dense(row: InputRow, result: RowResult, width: int) -> NDArray[np.float32]:
    """Return the result of a row as vectors `(1, W)`, or those of its multi-vector, `(L', W)`."""
    if isinstance(result, SparseVector):
        vector = np.zeros((1, width), np.float32)
        vector[0, result.ids] = result.weights
        return vector
    vectors = np.atleast_2d(result)
    return vectors if row.vector_positions is None else vectors[list(row.vector_positions)]


def _bounds(model: Model) -> Agreement:
    """Return the bounds for a model; those of an int8 graph follow from its measured quality."""
    if model.quality is None:
        return _BOUNDS
    output = model.artifact.manifest.outputs[0]
    own = int8_bounds(output, model.quality.check[output])
    return Agreement(min(own.cosine, _BOUNDS.cosine), max(own.norm, _BOUNDS.norm))


def parity_of(
    model: Model, served: NDArray[np.float32], reference: NDArray[np.float32]
) -> VectorParity:
    """Compare served vectors with the reference model's vectors, both `(B, W)`."""
    agreement = compare(model.artifact.manifest.outputs[0], served, reference)
    return VectorParity(
        cosine=agreement.cosine,
        norm=agreement.norm,
        agrees=agreement.is_within(_bounds(model)),
        max_abs=float(np.abs(served - reference).max()),
        engine=model.engine_label,
    )
