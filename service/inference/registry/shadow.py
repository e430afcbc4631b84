"""Comparison of the results of two versions of a model on the same texts."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.engines import Agreement
from models.engines.outputs import compare
from service.inference.errors import InvalidInput
from service.inference.model.model import Model
from service.inference.results.vectors import RowResult, SparseVector


async def compare_versions(served: Model, new: Model, texts: Sequence[str]) -> Agreement:
    """Return the worst agreement of the results of a new version with those of the served one.

    The results are those of the first output, before any activation: vectors, sparse vectors or
    logits. Texts are tokenised by each version's own tokenizer.

    Args:
        served: The version that is served.
        new: The new version.
        texts: Texts to encode.

    Raises:
        InvalidInput: The versions have other outputs or widths, or results per token. A text is
            invalid.
        VitrineError: Any error of `Model.encode_rows`.
    """
    outputs = {model.artifact.manifest.outputs[0] for model in (served, new)}
    if len(outputs) > 1 or not outputs <= {"pooled", "sparse", "logits"}:
        raise InvalidInput(
            "the results of the versions cannot be compared: both must give vectors, sparse "
            "vectors or logits of texts",
            code="shadow",
            pointer="/texts",
        )
    expected, actual = [await _results(model, texts) for model in (served, new)]
    if expected.shape != actual.shape:
        raise InvalidInput(
            f"the results of the versions cannot be compared: their widths are {served.width} and "
            f"{new.width}",
            code="shadow",
            pointer="/texts",
        )
    return compare(outputs.pop(), actual, expected)


async def _results(model: Model, texts: Sequence[str]) -> NDArray[np.float32]:
    """Return the results of the first output, `(N, W)`."""
    rows = await model.run_tokenizer(
        lambda: model.tokenizer.rows(texts, None, "truncate"), texts, len(texts)
    )
    output = model.artifact.manifest.outputs[:1]
    outcome = await model.encode_rows(rows, output, uses_cache=False)
    return np.stack(
        [_dense(result, model.artifact.manifest.vocab_size) for (result,) in outcome.results]
    )


def _dense(result: RowResult, width: int) -> NDArray[np.float32]:
    if not isinstance(result, SparseVector):
        return result
    vector = np.zeros(width, np.float32)
    vector[result.ids] = result.weights
    return vector
