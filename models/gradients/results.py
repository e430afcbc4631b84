"""Results of the gradient methods. This module does not import torch.

The methods return these dataclasses, and the gradient process sends them as JSON. The service
derives its response models from them, so a field or property added here appears in the API and in
its documentation. In JSON, non-finite numbers are null.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

# The metadata of `Annotated` is the number of array dimensions.
Vector = Annotated[NDArray[Any], 1]
Matrix = Annotated[NDArray[Any], 2]

Phase = Literal["forward", "backward"]
Role = Literal["producer", "propagator"]


def properties(result: type) -> dict[str, property]:
    """Return the properties of a result type, by name.

    In JSON, they appear in addition to the fields.
    """
    return {name: value for name, value in vars(result).items() if isinstance(value, property)}


def as_dict(result: object) -> Any:  # noqa: ANN401 - JSON, except for arrays
    """Return a result, with its properties, as nested dictionaries, lists and numpy arrays."""
    if is_dataclass(result) and not isinstance(result, type):
        names = [field.name for field in fields(result)] + list(properties(type(result)))
        return {name: as_dict(getattr(result, name)) for name in names}
    if isinstance(result, list | tuple):
        return [as_dict(value) for value in result]
    # orjson serialises C-contiguous arrays only.
    return np.ascontiguousarray(result) if isinstance(result, np.ndarray) else result


# Attribution.


@dataclass(frozen=True)
class Completeness:
    """Accuracy of a path integral.

    Attributes:
        delta: Sum of the scores minus the change of the value from baseline to text. For pairs of
            tokens, the Euclidean norm of this difference over all elements of the text's vector.
        error: Error of the sum of the scores: the sum of the absolute quadrature errors of all
            intervals of the path.
        allowed: Largest `error` that counts as converged.
        score_error: Largest estimated error of a token's score. For pairs of tokens, the Euclidean
            norm of the errors of a token's contributions to all elements of the text's vector.
        score_allowed: Largest `score_error` that counts as converged.
        evaluations: Number of positions on the path at which the value was computed.
    """

    delta: float
    error: float
    allowed: float
    score_error: float
    score_allowed: float
    evaluations: int

    @property
    def converged(self) -> bool:
        """Whether `error` is at most `allowed` and `score_error` at most `score_allowed`."""
        return self.error <= self.allowed and self.score_error <= self.score_allowed


@dataclass(frozen=True)
class AlignedTokens:
    """A token of a query, and the token of a document with the largest dot product of vectors.

    Attributes:
        query: Index of the query's token in `tokens`.
        document: Index of the document's token in `tokens`.
        value: Dot product of their vectors. MaxSim of the texts is the sum of these numbers.
    """

    query: int
    document: int
    value: float


@dataclass(frozen=True)
class RemovalEffect:
    """Mean effects of removals, over all points of a faithfulness and several random orders.

    Attributes:
        comprehensiveness: Mean decrease of the value by the removal of units.
        sufficiency: Mean decrease of the value by the removal of all other units.
    """

    comprehensiveness: float
    sufficiency: float


@dataclass(frozen=True)
class FaithfulnessPoint:
    """Effect of the removal of the units with the largest scores, and of all other units.

    An effect is null if an input has no tokens left.

    Attributes:
        share: Share of the units.
        count: Number of units, `share` of all units rounded up.
        comprehensiveness: Value of the texts, less the value without these units.
        sufficiency: Value of the texts, less the value with these units alone.
    """

    share: float
    count: int
    comprehensiveness: float
    sufficiency: float


@dataclass(frozen=True)
class Faithfulness:
    """Faithfulness of an attribution: change of the value when units are removed from the inputs.

    Tokens of removed units are deleted. Special tokens and prompts stay. If scores are faithful to
    the model, comprehensiveness is large and sufficiency is small, compared with `random`.

    Attributes:
        units: Units that are removed, "words" or "tokens".
        points: Effects by number of units.
        comprehensiveness: Mean of `comprehensiveness` over the points.
        sufficiency: Mean of `sufficiency` over the points.
        random: Mean effects of as many units that are chosen at random.
    """

    units: Literal["words", "tokens"]
    points: tuple[FaithfulnessPoint, ...]
    comprehensiveness: float
    sufficiency: float
    random: RemovalEffect


@dataclass(frozen=True)
class Attribution:
    """Attribution of a scalar to the tokens of a text, or of several model inputs.

    Attributes:
        scores: Score of each token, not normalised, `(L,)`. Signed, except for saliency.
        value: Attributed scalar, computed for the text.
        baseline_value: Attributed scalar, computed for the baseline; null for methods without a
            baseline.
        completeness: Accuracy of integrated gradients; null for other methods.
        path: Pairs of an evaluated position on the line from baseline (0) to text (1) and the
            scalar at this position; null except for integrated gradients.
        alignment: Aligned tokens of query and document, by token of the query; with `versus`, then
            those of query and second document. Null for targets other than "maxsim".
        faithfulness: Faithfulness of the scores; null if it was not requested, or the texts have no
            units.
    """

    scores: Vector
    value: float
    baseline_value: float | None = None
    completeness: Completeness | None = None
    path: tuple[tuple[float, float], ...] | None = None
    alignment: tuple[AlignedTokens, ...] | None = None
    faithfulness: Faithfulness | None = None

    @property
    def sum(self) -> float:
        """Sum of the scores."""
        return float(self.scores.sum())


@dataclass(frozen=True)
class ReferenceTerms:
    """Terms of the cosine similarity of texts a and b that involve the vector of a baseline.

    Each term is a dot product, divided by the product of the norms of the vectors of a and b. The
    cosine similarity is `sum(matrix) + a_baseline + baseline_b - baselines`.

    Attributes:
        a_baseline: Term of the vector of a and the vector of the baseline of b.
        baseline_b: Term of the vector of the baseline of a and the vector of b.
        baselines: Term of the vectors of both baselines.
    """

    a_baseline: float
    baseline_b: float
    baselines: float


@dataclass(frozen=True)
class PairAttribution:
    """Attribution of the cosine similarity of texts a and b to pairs of their tokens.

    Attributes:
        matrix: Contribution of each pair of tokens to the cosine similarity, `(L_a, L_b)`.
        cosine: Cosine similarity of the two vectors.
        reference_terms: Terms of the cosine similarity that involve a baseline.
        delta: Numerical error, `sum + a_baseline + baseline_b - baselines - cosine`.
        completeness: Accuracy of the path integral of a, and of the path integral of b.
    """

    matrix: Matrix
    cosine: float
    reference_terms: ReferenceTerms
    delta: float
    completeness: tuple[Completeness, Completeness]

    @property
    def sum(self) -> float:
        """Sum of all elements of `matrix`."""
        return float(self.matrix.sum())


@dataclass(frozen=True)
class TokenGradient:
    """Gradient with respect to the vector of each token at a layer.

    Attributes:
        gradient: Gradient reduced to one number per token, `(L,)`, or the full gradient, `(L, D)`.
    """

    gradient: Vector | Matrix


# Gradient flow.


@dataclass(frozen=True)
class ForwardSizes:
    """Statistics of a step's output, over all rows.

    Attributes:
        rms: Root mean square of the finite values; null if there are none.
        absmax: Largest magnitude of the finite values; null if there are none.
        nan: Number of NaN values.
        inf: Number of infinite values.
        zero_fraction: Fraction of values that are zero.
    """

    rms: float
    absmax: float
    nan: int
    inf: int
    zero_fraction: float


@dataclass(frozen=True)
class GradientSizes:
    """Statistics of the gradient with respect to a step's output, over all rows.

    Attributes:
        l2: Euclidean norm of the finite values, divided by the loss scale; null if there are none.
        absmax: Largest magnitude of the finite values, divided by the loss scale; null if there are
            none.
        nan: Number of NaN values.
        inf: Number of infinite values.
        underflow_fraction: Fraction of values that are nonzero before rounding to the emulated
            precision, and zero or subnormal after rounding. Without emulation, the fraction of
            subnormal values.
    """

    l2: float
    absmax: float
    nan: int
    inf: int
    underflow_fraction: float


@dataclass(frozen=True)
class ParameterGradient:
    """Size of the gradient with respect to all parameters of a step.

    If the model runs a layer several times, the gradient is the sum over all runs.

    Attributes:
        l2: Euclidean norm, divided by the loss scale; null if any value is not finite.
        ratio_to_weights: `l2` divided by the Euclidean norm of the parameters; null if `l2` is
            null.
    """

    l2: float
    ratio_to_weights: float


@dataclass(frozen=True)
class FlowStep:
    """A step of the forward pass, such as "layers.0.attention".

    Attributes:
        name: Name of the step.
        forward: Statistics of the output.
        gradient: Statistics of the gradient with respect to the output; null if the output of any
            row received no gradient.
        parameters: Size of the gradient with respect to the parameters; null if the step has no
            parameters, or if any of them received no gradient.
    """

    name: str
    forward: ForwardSizes
    gradient: GradientSizes | None
    parameters: ParameterGradient | None


@dataclass(frozen=True)
class NonFiniteStep:
    """A step with a NaN or infinite value in the forward or backward pass.

    Attributes:
        phase: Pass with the non-finite value, "forward" or "backward".
        step: Name of the step.
        role: "producer": the first step of the pass with a non-finite value, or the first one in
            some row. "propagator": every row with a non-finite value had one in an earlier step of
            the pass.
        row: Index of a row with a non-finite value; for a producer, of a row without such a value
            in earlier steps of the pass. Null if the value belongs to no single row.
        token: Index of the first non-finite token of `row`; null if the value belongs to no single
            token.
    """

    phase: Phase
    step: str
    role: Role
    row: int | None
    token: int | None


@dataclass(frozen=True)
class FlowVerdict:
    """A defect of a step's gradient.

    Attributes:
        step: Name of the step. For "vanishing" and "exploding", this is the last step of a layer.
        kind: Kind of defect. "missing_gradient": no gradient reached the output or a parameter.
        ratio: Norm of the gradient with respect to the step's output, divided by the norm at the
            output of the last layer; null for "missing_gradient".
        threshold: Threshold that `ratio` is below ("vanishing") or above ("exploding"); null for
            "missing_gradient".
    """

    step: str
    kind: Literal["vanishing", "exploding", "missing_gradient"]
    ratio: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Flow:
    """Gradient flow through the steps of the forward pass.

    Attributes:
        objective: Value of the objective, before multiplication by the loss scale.
        steps: Steps in the order of the forward pass.
        nonfinite_steps: Steps with a NaN or infinite value, in execution order. They are steps of
            the forward pass, or of the backward pass if all outputs are finite.
        verdicts: Vanishing, exploding and missing gradients; empty if there are none.
    """

    objective: float
    steps: tuple[FlowStep, ...]
    nonfinite_steps: tuple[NonFiniteStep, ...]
    verdicts: tuple[FlowVerdict, ...]

    @property
    def first_nonfinite(self) -> NonFiniteStep | None:
        """First step that computed a NaN or infinite value; null if there is none."""
        return self.nonfinite_steps[0] if self.nonfinite_steps else None


# The fused operator.


@dataclass(frozen=True)
class NormStep:
    """A step of add + norm, computed in float32.

    Attributes:
        name: Name of the step in `models/add_layer_norm/reference.py`. "x" is the sum of input and
            residual. For RMS norm, the steps "mean" and "dx2" are zero.
        phase: "forward" or "backward".
        shape: Shape of the step's value: `(N, D)`, `(N, 1)` or `(D,)`.
        minimum: Minimum of the finite values; null if there are none.
        maximum: Maximum of the finite values; null if there are none.
        mean: Mean of the finite values; null if there are none.
        rms: Root mean square of the finite values; null if there are none.
        nan: Number of NaN values.
        inf: Number of infinite values.
        first_nonfinite: Index of the first NaN or infinite value; null if there is none.
        values: Values of the requested row; null if no row was requested. dgamma and dbeta are sums
            over all rows.
        error_float64: Largest absolute difference from the step in float64, divided by the largest
            magnitude of the step in float64. For dx it is divided by the largest magnitude of
            dxmu1 instead, because the terms of dx can cancel. Infinite (null in JSON) if a value is
            finite in float64 but not in float32.
        error_autograd: Largest absolute difference between the step in float64 and PyTorch's
            autograd in float64, divided by the same magnitude as `error_float64`; null for forward
            steps.
        error_finite_difference: Largest difference between a directional derivative of the float64
            gradient and a central difference, divided by the root of the sum of the squares of the
            derivative's terms. Only for dx, dgamma and dbeta; null for other steps.
    """

    name: str
    phase: Phase
    shape: tuple[int, ...]
    minimum: float
    maximum: float
    mean: float
    rms: float
    nan: int
    inf: int
    first_nonfinite: tuple[int, ...] | None
    values: Vector | None
    error_float64: float
    error_autograd: float | None
    error_finite_difference: float | None


@dataclass(frozen=True)
class Invariant:
    """An identity of the norm that holds on every finite row.

    Attributes:
        name: Name of the identity.
        phase: "forward" or "backward".
        residual: Absolute deviation from the identity on row `row`.
        bound: Tolerance for rounding errors on row `row`.
        row: Index of the row whose deviation is largest relative to its bound.
        passes: Whether `residual` is at most `bound`.
    """

    name: str
    phase: Phase
    residual: float
    bound: float
    row: int
    passes: bool


@dataclass(frozen=True)
class Comparison:
    """Comparison of an output or gradient of an implementation with its reference.

    Attributes:
        value: Compared array: "out", "sum", "dx", "dresidual", "dgamma" or "dbeta".
        against: Reference. "float64": the same array in float64. "finite differences": directional
            derivatives by central differences.
        max_abs: Largest absolute error.
        ulp: Largest absolute error in units in the last place of the reference's largest value.
        share_of_bound: Largest ratio of an absolute error to its bound.
        worst_index: Index of the element with the largest ratio; for finite differences, index of
            the direction.
        passes: Whether `share_of_bound` is at most 1.
    """

    value: str
    against: str
    max_abs: float
    ulp: float
    share_of_bound: float
    worst_index: tuple[int, ...]
    passes: bool


@dataclass(frozen=True)
class ImplementationVerdict:
    """Verdict on one pass of an implementation.

    Attributes:
        implementation: Name of the implementation.
        phase: "forward" or "backward".
        passes: Whether no gradient is missing and all comparisons and invariants pass; null if
            there is no verdict.
        no_verdict: Reason why there is no verdict: the pass was not run, or the rows cannot decide
            whether its results are correct. Null if there is a verdict.
        missing: Gradients that the implementation should return but does not.
        comparisons: Comparisons with the reference.
        invariants: Invariants of the pass.
    """

    implementation: str
    phase: Phase
    passes: bool | None
    no_verdict: str | None
    missing: tuple[str, ...]
    comparisons: tuple[Comparison, ...]
    invariants: tuple[Invariant, ...]


@dataclass(frozen=True)
class LayerNormCheck:
    """Steps of add + norm and verdicts on its implementations.

    Attributes:
        steps: Steps of the reference implementation, forward and backward.
        invariants: Invariants of the operator, run with PyTorch on CPU.
        verdicts: Two verdicts per implementation: on its forward pass and on its backward pass. If
            the request has a candidate, only the verdicts on the candidate.
    """

    steps: tuple[NormStep, ...]
    invariants: tuple[Invariant, ...]
    verdicts: tuple[ImplementationVerdict, ...]

    @property
    def passes(self) -> bool | None:
        """Whether no verdict fails; null if none fails, but one of the passes has no verdict."""
        if any(verdict.passes is False for verdict in self.verdicts):
            return False
        right = {verdict.phase for verdict in self.verdicts if verdict.passes}
        return True if right == {verdict.phase for verdict in self.verdicts} else None


# Parity.


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
class Parity:
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
