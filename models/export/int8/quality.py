"""Quality of an int8 graph: its results for texts that did not calibrate, against float32.

mean_cosine       of pooled vectors
worst_cosine      of pooled vectors
recall_at_10      share of the 10 nearest texts by float32 vectors that int8 vectors find, with
                  queries and documents both in int8
rank_correlation  Spearman's, of the scores of a query's documents, averaged over queries; for a
                  model with one label
label_agreement   share of texts with the same best label; for a model with several labels
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.artifact import Manifest
from models.engines import Engine, cosines
from models.export.calibration import TextRows, nearest, overlap, run_rows, text_rows, unit
from models.export.model_folder import CheckpointError

# Number of texts that are measured. With 2,000, the standard error of recall is about 0.002.
MAX_TEXTS = 2000
# Number of documents of each query of a reranker.
_DOCUMENTS = 20
# Outputs of models whose quality is measured. Token vectors are a by-product of pooled vectors.
# Weights of sparse vectors, tags and multi-vectors would need measures of their own.
_MEASURED = frozenset({"pooled", "tokens", "logits"})


@dataclass(frozen=True)
class QualityBounds:
    """Lowest acceptable quality of an int8 graph, by measure.

    Attributes:
        min_cosine: Of `mean_cosine`.
        min_recall: Of `recall_at_10`, for the user's own texts. Neighbours of generated texts are
            accidental: all-MiniLM-L6-v2 has a recall of 0.93 for them, and of 0.97 for real ones.
        min_rank_correlation: Of `rank_correlation` and `label_agreement`.
    """

    min_cosine: float = 0.995
    min_recall: float = 0.97
    min_rank_correlation: float = 0.97

    def broken(self, measures: Mapping[str, float], *, is_generated: bool) -> list[str]:
        """Return a phrase for each measure that is below its bound.

        Args:
            measures: Results by measure.
            is_generated: Whether the texts were generated from the vocabulary.
        """
        bounds = {
            "mean_cosine": self.min_cosine,
            "recall_at_10": self.min_recall,
            "rank_correlation": self.min_rank_correlation,
            "label_agreement": self.min_rank_correlation,
        }
        return [
            f"{name} is {measures[name]:.4f} ({bound:g} required)"
            for name, bound in bounds.items()
            # NaN is never at least the bound.
            if name in measures and not (is_generated and name == "recall_at_10")
            if not measures[name] >= bound
        ]


def check_outputs(manifest: Manifest) -> None:
    """Check that the quality of the model's outputs can be measured.

    Raises:
        CheckpointError: An output has no measure.
    """
    if missing := [output for output in manifest.outputs if output not in _MEASURED]:
        raise CheckpointError(
            f"--precision int8 is for models with the output pooled or logits; the quality of "
            f"{', '.join(missing)} is not measured"
        )


def quality_rows(manifest: Manifest, tokenizer: Tokenizer, texts: Sequence[str]) -> TextRows:
    """Return the rows of texts; of a reranker, each query with its documents."""
    if manifest.outputs != ("logits",) or len(manifest.labels) > 1:
        return text_rows(manifest, tokenizer, texts)
    tokenizer.enable_truncation(manifest.max_tokens, direction=manifest.truncation_side)
    groups = range(0, len(texts) - _DOCUMENTS, _DOCUMENTS + 1)
    pairs = [
        (texts[start], document)
        for start in groups
        for document in texts[start + 1 : start + 1 + _DOCUMENTS]
    ]
    encodings = tokenizer.encode_batch(pairs)
    return TextRows([e.ids for e in encodings], types=[e.type_ids for e in encodings])


def measure(exact: Engine, engine: Engine, manifest: Manifest, rows: TextRows) -> dict[str, float]:
    """Return the quality by measure; see the module docstring.

    Args:
        exact: Engine in float32.
        engine: Engine in int8.
        manifest: Manifest of the model.
        rows: Rows from `quality_rows`.
    """
    output = manifest.outputs[0]
    expected, actual = (run_rows(own, rows, output) for own in (exact, engine))
    if output == "logits":
        return _of_logits(expected, actual)
    both = cosines(actual, expected)
    indices = np.arange(len(expected))
    pairs = zip(
        *(nearest(own, own, indices) for own in (unit(expected), unit(actual))), strict=True
    )
    return {
        "mean_cosine": round(float(both.mean()), 6),
        "worst_cosine": round(float(both.min()), 6),
        "recall_at_10": round(float(np.mean([overlap(*pair) for pair in pairs])), 4),
    }


def _of_logits(expected: NDArray[np.float32], actual: NDArray[np.float32]) -> dict[str, float]:
    if expected.shape[1] > 1:
        same = expected.argmax(1) == actual.argmax(1)
        return {"label_agreement": round(float(same.mean()), 4)}
    queries = [own.reshape(-1, _DOCUMENTS) for own in (expected, actual)]
    ranks = (own.argsort(1).argsort(1).astype(np.float64) for own in queries)
    first, second = (own - own.mean(1, keepdims=True) for own in ranks)
    correlations = (first * second).sum(1) / np.sqrt((first**2).sum(1) * (second**2).sum(1))
    return {"rank_correlation": round(float(correlations.mean()), 4)}
