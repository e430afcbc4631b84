"""A trained model, exported and served, with its reference model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.artifact import Artifact
from models.gradients import attribution
from models.gradients.attribution import TargetFunction
from models.gradients.inputs import InputRow, Side
from models.gradients.maxsim import maxsim
from models.gradients.reference_model import ReferenceModel
from service.inference.explain.deletion import Deletions
from service.inference.model.classification import Classification
from service.inference.model.opening import ModelOptions
from service.inference.model.pair_scores import PairScores
from service.inference.model.sync_model import SyncModel
from tests.benchmarks.comparison import BenchmarkError
from tests.benchmarks.explain.kinds import token_ids
from tests.benchmarks.explain.tasks import EvidenceCase, training_cases
from tests.benchmarks.explain.training import train_and_export

Values = NDArray[np.float64]

_MIN_ACCURACY = 0.95


@dataclass(frozen=True)
class GradientInputs:
    """Arguments of `attribution.attribute` for a case, and the indices of its words' tokens.

    Attributes:
        sides: Rows whose tokens get scores, with baselines.
        target: Scalar to attribute.
        first: Index of the token of the first word, among the tokens of all rows.
    """

    sides: Sequence[Side]
    target: TargetFunction
    first: int


class TrainedModel:
    """A trained model of a kind.

    Args:
        kind: Key of `KINDS`.
        folder: Folder for the checkpoint and the artifact.
        hidden_size: Width of the model.
        steps: Number of training steps.
    """

    def __init__(self, kind: str, folder: Path, hidden_size: int, steps: int) -> None:
        self.kind = kind
        artifact = train_and_export(kind, folder, hidden_size, steps)
        self.reference = ReferenceModel.open(Artifact.load(artifact.path))
        self.model = SyncModel(artifact.path, ModelOptions(threads=1, max_queue_tokens=10**9))

    def __enter__(self) -> "TrainedModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.model.close()

    def results(self, case: EvidenceCase, texts: Sequence[str]) -> Values:
        """Return the served result of a case with each of other texts, `(N,)`.

        It is the logit of the label or of relevance, or the similarity of query and text.
        """
        distinct = list(dict.fromkeys(texts))
        if self.kind == "classifier":
            values = self.model.classify(distinct).logits[:, case.label]
        else:
            values = self.model.score(" ".join(case.query), distinct).raw_scores
        results = dict(zip(distinct, values.tolist(), strict=True))
        return np.array([results[text] for text in texts])

    def explanation(self, case: EvidenceCase, text: str) -> Deletions:
        """Return the explanation of a case with another text, with the default options."""
        explained: Classification | PairScores
        if self.kind == "classifier":
            explained = self.model.classify(text, explain=True)
        else:
            explained = self.model.score(" ".join(case.query), text, explain=True)
        return explained.deletions[0]

    def check_accuracy(self, number: int) -> float:
        """Return the accuracy for held-out cases.

        An embedding model is right about a query if its relevant document has a higher score than
        another query's irrelevant one.

        Raises:
            BenchmarkError: The accuracy is too low for evidence to be known.
        """
        cases = training_cases(self.kind, np.random.default_rng(2), 2 * number)
        texts = [" ".join(case.text) for case in cases]
        labels = np.array([case.label for case in cases])
        if self.kind == "classifier":
            is_right = self.model.classify(texts).logits.argmax(1) == labels
        elif self.kind == "reranker":
            queries = [" ".join(case.query) for case in cases]
            is_right = (self.model.score(queries, texts).raw_scores > 0) == labels
        else:
            queries = [" ".join(case.query) for case in cases[::2] for _ in range(2)]
            scores = self.model.score(queries, texts).raw_scores
            pairs = zip(cases[::2], cases[1::2], strict=True)
            is_other = np.array([own.concept not in other.concepts for own, other in pairs])
            is_right = (scores[::2] > scores[1::2])[is_other]
        accuracy = float(np.mean(is_right))
        if accuracy < _MIN_ACCURACY:
            raise BenchmarkError(
                f"the model {self.kind} did not learn its task: its held-out accuracy is "
                f"{accuracy:.3f}, and {_MIN_ACCURACY} is required"
            )
        return accuracy

    def gradient_inputs(
        self, case: EvidenceCase, baseline: str, *, with_query: bool = False
    ) -> GradientInputs:
        """Return the inputs of a gradient method.

        Args:
            case: Case to explain.
            baseline: Token that replaces each word in the baseline.
            with_query: Whether it replaces the words of the query too, if the query is an input.
        """
        model = self.reference
        query = _side([case.query], [baseline if with_query else None])
        document = _side([case.text], [baseline])
        match self.kind:
            case "classifier":
                return GradientInputs([document], attribution.label(case.label), 1)
            case "reranker":
                replacements = [baseline if with_query else None, baseline]
                pair = _side([case.query, case.text], replacements)
                return GradientInputs([pair], attribution.score(), len(query.row.ids))
            case "SPLADE":
                weights = model.vector(query.row)
                entries = weights.nonzero()[:, 0].tolist()
                target = attribution.dot(weights[entries], model.normalize)
                side = replace(document, row=replace(document.row, entries=entries))
                return GradientInputs([side], target, 1)
            case "ColBERT":
                first = len(query.row.ids) + 1
                return GradientInputs([query, document], maxsim(model.normalize), first)
        target = attribution.similarity("cosine", model.vector(query.row), model.normalize)
        return GradientInputs([document], target, 1)


def _side(texts: Sequence[Sequence[str]], baselines: Sequence[str | None]) -> Side:
    """Return the row of a text or pair of texts; a text without a baseline token stays."""
    ids, types = token_ids(*texts)
    pairs = zip(texts, baselines, strict=True)
    replaced = [words if token is None else [token] * len(words) for words, token in pairs]
    return Side(InputRow(ids, token_types=types), token_ids(*replaced)[0])
