"""Results of attributions to tokens and to pairs of tokens."""

from dataclasses import dataclass
from typing import Literal

from models.gradients.results.json_form import Matrix, Vector


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
class UnitRemoval:
    """Effect of the removal of one unit, beside its score.

    Attributes:
        tokens: Indices of the unit's tokens in `tokens`. Those of a text that several inputs
            contain are in each of them.
        score: Sum of the scores of these tokens.
        effect: Value of the texts, less the value without this unit; null if an input has no tokens
            left.
    """

    tokens: tuple[int, ...]
    score: float
    effect: float


@dataclass(frozen=True)
class Faithfulness:
    """Faithfulness of an attribution: change of the value when units are removed from the inputs.

    Tokens of removed units are deleted. Special tokens and prompts stay. If scores are faithful to
    the model, comprehensiveness is large and sufficiency is small, compared with `random`.
    `rank_correlation` is close to 1, and `opposite_signs` close to 0.

    Attributes:
        units: Units that are removed, "words" or "tokens".
        points: Effects by number of units.
        comprehensiveness: Mean of `comprehensiveness` over the points.
        sufficiency: Mean of `sufficiency` over the points.
        random: Mean effects of as many units that are chosen at random.
        effects: Effect of the removal of each unit alone, in the order of the texts.
        rank_correlation: Spearman's correlation of the scores and effects of all units. Null if
            there are fewer than two units, all scores or all effects are equal, or one of these
            numbers is not finite.
        opposite_signs: Share of the units that matter whose score and effect have opposite signs. A
            unit matters if the absolute value of its effect is at least a tenth of the largest.
            Null if scores have no sign, as those of saliency, no unit has an effect, or one of
            these numbers is not finite.
    """

    units: Literal["words", "tokens"]
    points: tuple[FaithfulnessPoint, ...]
    comprehensiveness: float
    sufficiency: float
    random: RemovalEffect
    effects: tuple[UnitRemoval, ...]
    rank_correlation: float | None
    opposite_signs: float | None


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
    """Terms of the similarity of texts a and b that involve the vector of a baseline.

    Each term is a dot product; in a cosine, it is divided by the product of the norms of the
    vectors of a and b. The similarity is `sum(matrix) + a_baseline + baseline_b - baselines`.

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
    """Attribution of the similarity of texts a and b to pairs of their tokens.

    Attributes:
        matrix: Contribution of each pair of tokens to the similarity, `(L_a, L_b)`.
        similarity: Similarity of the two vectors: their cosine, or their dot product if the model
            compares them by it.
        reference_terms: Terms of the similarity that involve a baseline.
        delta: Numerical error, `sum + a_baseline + baseline_b - baselines - similarity`.
        completeness: Accuracy of the path integral of a, and of the path integral of b.
    """

    matrix: Matrix
    similarity: float
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
