"""Quality of an int8 graph: its results for texts that did not calibrate, against float32.

It is measured for each class of lengths apart, because short texts hide what long ones lose.

mean_cosine       of pooled vectors
worst_cosine      of pooled vectors
recall_at_10      share of the 10 nearest texts of the class by float32 vectors that int8 vectors
                  find, with queries and documents both in int8
rank_correlation  Spearman's, of the scores of a query's documents, averaged over queries; for a
                  model with one label
label_agreement   share of texts with the same best label; for a model with several labels
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.engines import OUTPUTS, Agreement, cosines
from models.export.calibration import nearest, overlap, unit
from models.export.int8.rows import DOCUMENTS
from models.export.model_folder import CheckpointError
from models.manifest import LengthQuality, Manifest, Output

# Outputs of models whose quality is measured. Token vectors are a by-product of pooled vectors.
# Weights of sparse vectors, tags and multi-vectors would need measures of their own.
_MEASURED = frozenset({"pooled", "tokens", "logits"})
# Measures that compare texts or labels with each other. Those of joined and generated texts are
# accidental: with joined descriptions, all-MiniLM-L6-v2 has a recall of 0.95 where descriptions of
# that length have 0.97.
_ACCIDENTAL = frozenset({"recall_at_10", "rank_correlation", "label_agreement"})


@dataclass(frozen=True)
class QualityBounds:
    """Lowest acceptable quality of an int8 graph, for each class of lengths.

    Attributes:
        min_cosine: Lowest `mean_cosine`.
        min_recall: Lowest `recall_at_10` of the user's own texts.
        min_rank_correlation: Lowest `rank_correlation` and `label_agreement`; of the user's own
            texts, if there are any.
    """

    min_cosine: float = 0.995
    min_recall: float = 0.97
    min_rank_correlation: float = 0.97

    def find_broken(self, by_length: Sequence[LengthQuality]) -> list[str]:
        """Return a phrase for each measure of a class that is below its bound."""
        bounds = {
            "mean_cosine": self.min_cosine,
            "recall_at_10": self.min_recall,
            "rank_correlation": self.min_rank_correlation,
            "label_agreement": self.min_rank_correlation,
        }
        return [
            f"{name} of {own.min_tokens} to {own.max_tokens} tokens"
            f"{'' if own.source == 'own' else f' of {own.source} texts'} is {value:.4f} "
            f"({bounds[name]:g} required)"
            for own in by_length
            for name, value in _meaningful(own, by_length).items()
            if name in bounds and not (own.source != "own" and name == "recall_at_10")
            # NaN is never at least the bound.
            if not value >= bounds[name]
        ]


def lowest(by_length: Sequence[LengthQuality]) -> dict[str, float]:
    """Return the lowest result of all classes by measure; NaN, if one is NaN."""
    results = [_meaningful(own, by_length) for own in by_length]
    names = dict.fromkeys(name for own in results for name in own)
    return {name: float(np.min([own[name] for own in results if name in own])) for name in names}


def _meaningful(own: LengthQuality, by_length: Sequence[LengthQuality]) -> Mapping[str, float]:
    """Return the measures of a class, without those that the user's own texts measure better."""
    if own.source == "own" or all(other.source != "own" for other in by_length):
        return own.measures
    return {name: value for name, value in own.measures.items() if name not in _ACCIDENTAL}


def broken_check(check: Mapping[Output, Agreement]) -> list[str]:
    """Return a phrase for each output whose check inputs are outside the bounds in `OUTPUTS`."""
    return [
        f"the worst cosine of the check's {output} is {worst.cosine:.4f} ({bounds.cosine:g} "
        f"required), and their worst norm difference {worst.norm:.3f} ({bounds.norm:g} allowed)"
        for output, worst in check.items()
        if not worst.is_within(bounds := OUTPUTS[output].bounds["int8"])
    ]


def check_outputs(manifest: Manifest, bounds: QualityBounds) -> None:
    """Check that the quality of the model's outputs can be measured, and has these bounds.

    Raises:
        CheckpointError: An output has no measure, or a bound that was set is of other outputs.
    """
    if missing := [output for output in manifest.outputs if output not in _MEASURED]:
        raise CheckpointError(
            f"--precision int8 is for models with the output pooled or logits; the quality of "
            f"{', '.join(missing)} is not measured"
        )
    if manifest.pair_template is not None:
        raise CheckpointError(
            "--precision int8 is not for rerankers with a template of pairs: its texts for "
            "calibration and measurement have no template"
        )

    for name in vars(bounds):
        is_of_logits = name == "min_rank_correlation"
        is_measured = is_of_logits == (manifest.outputs[0] == "logits")
        if not is_measured and getattr(bounds, name) != getattr(QualityBounds, name):
            raise CheckpointError(
                f"--{name.replace('_', '-')} does not apply to models with the output "
                f"{manifest.outputs[0]}"
            )


def measure(
    manifest: Manifest, expected: NDArray[np.float32], actual: NDArray[np.float32]
) -> dict[str, float]:
    """Return the quality by measure; see the module docstring.

    Args:
        manifest: Manifest of the model.
        expected: Vectors or logits of rows from `models.export.int8.rows` in float32, `(N, W)`.
        actual: Those in int8, `(N, W)`.
    """
    if manifest.outputs[0] == "logits":
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
    queries = [own.reshape(-1, DOCUMENTS) for own in (expected, actual)]
    ranks = (own.argsort(1).argsort(1).astype(np.float64) for own in queries)
    first, second = (own - own.mean(1, keepdims=True) for own in ranks)
    correlations = (first * second).sum(1) / np.sqrt((first**2).sum(1) * (second**2).sum(1))
    return {"rank_correlation": round(float(correlations.mean()), 4)}
