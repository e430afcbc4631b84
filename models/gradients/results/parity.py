"""Results of a comparison of the served model with the reference model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class FileHash:
    """SHA-256 of a file of the artifact.

    Attributes:
        name: Name of the file.
        expected: SHA-256 at startup.
        actual: SHA-256 of the file's content now; null if the file does not exist.
    """

    name: str
    expected: str
    actual: str | None


@dataclass(frozen=True)
class TokenIds:
    """Comparison of a text's token ids from the served tokenizer with the expected ids.

    The expected ids of check texts were recorded at export; for other texts, the tokenizer of the
    source model computes them.

    Attributes:
        text: The text, with its prompt.
        position: Index of the first token that differs; null if all are equal.
        served: Id of this token from the served tokenizer; null if there is no such token.
        expected: Expected id of this token; null if no such token is expected.
    """

    text: str
    position: int | None
    served: int | None
    expected: int | None


@dataclass(frozen=True)
class VectorDifference:
    """Difference between a served vector and the reference model's vector.

    Attributes:
        cosine: Cosine similarity of the two vectors.
        max_abs: Largest absolute element-wise difference.
        relative: `max_abs` divided by the largest magnitude in the reference model's vector.
    """

    cosine: float
    max_abs: float
    relative: float


@dataclass(frozen=True)
class WeightDifference:
    """Difference between a weight of the reference model and the corresponding weight in the graph.

    Attributes:
        name: Name of the parameter. If the graph stores the parameter in parts, or only one part of
            it, the part follows in brackets.
        max_abs: Largest absolute element-wise difference; null if the graph has no weight of this
            shape at this position.
    """

    name: str
    max_abs: float | None

    @property
    def status(self) -> Literal["equal", "differs", "absent"]:
        """Result: "absent" if `max_abs` is null, "equal" if it is 0, otherwise "differs"."""
        if self.max_abs is None:
            return "absent"
        return "equal" if self.max_abs == 0 else "differs"


@dataclass(frozen=True)
class LayerDifference:
    """Difference between the graph's tokens and the reference model's tokens after a layer.

    Attributes:
        layer: Name of the layer.
        max_abs: Largest absolute element-wise difference; null if the graph has no such layer.
        relative: `max_abs` divided by the largest magnitude in the reference model's tokens.
    """

    layer: str
    max_abs: float
    relative: float


@dataclass(frozen=True)
class StressRow:
    """Error of onnxruntime's norm on a numerically difficult row.

    Attributes:
        row: Name of the row.
        finite: Whether all elements of the output are finite.
        error: Largest absolute element-wise error against float64.
        bound: Largest acceptable `error`.
    """

    row: str
    finite: bool
    error: float
    bound: float


def _id(token: int | None) -> str:
    return "missing" if token is None else f"id {token}"


@dataclass(frozen=True)
class ParityCheck:
    """Comparison of the served model with the reference model.

    Attributes:
        files: Hashes of all files of the artifact: at startup, and on disk now.
        unreadable: Reason why the CPU graph could not be compared, if its files have changed since
            startup; null if it was compared.
        tokenizer: Comparison of the token ids of the check texts and of the texts in the request.
        engine: Engine that computed the vectors.
        precision: Precision of the engine.
        min_cosine: Smallest accepted cosine similarity of a row's two vectors, for this precision.
        max_relative: Largest accepted relative difference of a row's two vectors, for this
            precision.
        vectors: Differences of the vectors, by row.
        weights: Differences of the weights, for every weight of the reference model.
        curve: Differences of the token vectors after each layer, from "embeddings" on.
        first_divergence: Name of the first layer whose difference exceeds the tolerance; null if
            there is none.
        layer_norm: Errors of onnxruntime's norm on numerically difficult rows.
    """

    files: tuple[FileHash, ...]
    unreadable: str | None
    tokenizer: tuple[TokenIds, ...]
    engine: str
    precision: str
    min_cosine: float
    max_relative: float
    vectors: tuple[VectorDifference, ...]
    weights: tuple[WeightDifference, ...]
    curve: tuple[LayerDifference, ...]
    first_divergence: str | None
    layer_norm: tuple[StressRow, ...]

    @property
    def passes(self) -> bool:
        """Whether `failures` is empty."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """One sentence per failed comparison."""
        return (
            *(
                f"{f.name} was changed or replaced since the service started"
                if f.actual
                else f"{f.name} was removed since the service started"
                for f in self.files
                if f.actual != f.expected
            ),
            *([self.unreadable] if self.unreadable else []),
            *(
                f"token {t.position} of {t.text[:40]!r} is {_id(t.served)}; "
                f"it should be {_id(t.expected)}"
                for t in self.tokenizer
                if t.position is not None
            ),
            *self._weight_failures(),
            *(
                f"the vector of row {row} differs by {v.max_abs:.1e} (cosine {v.cosine:.7f}) "
                f"between the reference model and {self.engine} in {self.precision}"
                for row, v in enumerate(self.vectors)
                if not (v.cosine >= self.min_cosine and v.relative <= self.max_relative)
            ),
            *(
                f"tokens diverge from {d.layer} on, with a difference of {d.max_abs:.1e} there"
                for d in self.curve
                if d.layer == self.first_divergence
            ),
            *(
                f"onnxruntime's norm has an error of {s.error:.1e} on the row {s.row!r}"
                for s in self.layer_norm
                if not s.error <= s.bound
            ),
        )

    def _weight_failures(self) -> Iterator[str]:
        wrong = [weight for weight in self.weights if weight.status != "equal"]
        if len(wrong) > len(self.weights) / 2:
            yield (
                f"{len(wrong)} of {len(self.weights)} weights differ: the graph belongs to another "
                "model or to other weights"
            )
            return
        for weight in wrong:
            if weight.max_abs is None:
                yield f"{weight.name} is absent from the graph"
            else:
                yield f"{weight.name} differs by {weight.max_abs:.1e}"
