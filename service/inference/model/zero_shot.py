"""Zero-shot classification: labels that a call chooses, scored by a model of language inference.

Each label becomes a hypothesis, such as "This example is politics.", and the model says whether a
text entails it. The scores are those of transformers' pipeline "zero-shot-classification", except
that contradiction is found by its name: the pipeline takes the first label, or the last if the
first is entailment, which is wrong for labels such as neutral, entailment, contradiction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import cast

import numpy as np

from service.inference.call_options import CallOptions
from service.inference.errors import InvalidInput, convert_index, point_to
from service.inference.model.arguments import check_options, text_list
from service.inference.model.classification import Classification
from service.inference.results.loaded_model import LoadedModel
from service.inference.results.scores import ACTIVATIONS
from service.inference.tokenizing.rows import Row

_TEMPLATE = "This example is {}."
_ENTAILMENT, _CONTRADICTION = "entail", "contradict"


@dataclass(frozen=True, kw_only=True)
class CandidateLabels:
    """Labels that a call chooses.

    Attributes:
        labels: The labels, each once.
        hypothesis_template: Text with `{}` or `{0}` in place of the label, once; braces of the text
            are doubled.
        multi_label: Whether each label has a score of its own, from 0 to 1, which a single label
            always has. False: the scores of all labels add up to 1.

    Raises:
        InvalidInput: An attribute is invalid; `pointer` names it.
    """

    labels: Sequence[str]
    hypothesis_template: str = _TEMPLATE
    multi_label: bool = False

    def __post_init__(self) -> None:
        check_options(multi_label=self.multi_label)
        labels = text_list(self.labels, "candidate_labels", has_index=False, allows_one=False)
        object.__setattr__(self, "labels", tuple(labels))
        if not labels or len({*labels}) < len(labels):
            raise InvalidInput(
                "candidate_labels must have at least one label, and each once",
                pointer="/candidate_labels",
            )
        for index, label in enumerate(labels):
            if not label.strip():
                raise InvalidInput("the label is empty", pointer=f"/candidate_labels/{index}")
        if not _is_template(self.hypothesis_template):
            raise InvalidInput(
                "hypothesis_template must have {} where the label goes, once, and no other field; "
                "double the braces of the text itself",
                pointer="/hypothesis_template",
            )

    @property
    def hypotheses(self) -> list[str]:
        """The hypothesis of each label."""
        return [self.hypothesis_template.format(label) for label in self.labels]

    @property
    def are_independent(self) -> bool:
        """Whether the score of a label does not depend on the other labels."""
        return self.multi_label or len(self.labels) == 1


def _is_template(template: object) -> bool:
    if not isinstance(template, str):
        return False
    try:
        fields = [field for _, *field in Formatter().parse(template) if field[0] is not None]
    except ValueError:  # a brace alone
        return False
    # Others, such as {:>999999999} or {0.__class__}, could take memory or read attributes.
    return fields in ([["", "", None]], [["0", "", None]])


def texts_for(candidates: object, items: Sequence[str | tuple[str, str]]) -> Sequence[str]:
    """Return the items, which must be texts, that candidate labels are for.

    Raises:
        InvalidInput: `candidates` is something else, or an item is a pair; `index` is its index.
    """
    if not isinstance(candidates, CandidateLabels):
        raise InvalidInput("candidates must be a CandidateLabels", pointer="/candidates")
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise InvalidInput("candidate_labels are for texts, not for pairs", index=index)
    return cast(Sequence[str], items)


async def classify_by_candidates(
    model: LoadedModel,
    texts: Sequence[str],
    candidates: CandidateLabels,
    options: CallOptions,
    count_tokens: Callable[[int], None] | None = None,
) -> Classification:
    """Return the score of each candidate label for each text.

    Logits are those of entailment, or if labels are independent, less those of contradiction. The
    row of a text has the token ids of its pairs with all hypotheses.

    Raises:
        InvalidInput: The labels of the model do not say which is entailment, or contradiction,
            where it counts; or a hypothesis leaves no room for a text.
        VitrineError: Any error of `scoring.classify`, under the same conditions.
    """
    if count_tokens is None:  # variants are limited by their tokens
        check_candidates(model, len(texts), candidates)
    entailment, contradiction = _columns(model, candidates)
    count = len(candidates.labels)

    def tokenize() -> list[Row]:
        return rows_of_pairs(model, texts, candidates, options)

    with convert_index(lambda pair: pair // count):
        pairs, (results,), seconds = await model.run(
            *([*{*texts}, *candidates.hypotheses], len(texts) * count, tokenize, ("logits",)),
            options,
            count_tokens=count_tokens,
        )
    by_pair = np.array(results, np.float64).reshape(len(texts), count, -1)
    logits = by_pair[:, :, entailment]
    if candidates.are_independent:
        logits = logits - by_pair[:, :, contradiction]
    scores = ACTIVATIONS["sigmoid" if candidates.are_independent else "softmax"](logits)
    rows = join_rows(pairs, candidates)
    return Classification(logits, scores, tuple(candidates.labels), rows, seconds)


def check_candidates(model: LoadedModel, texts: int, candidates: CandidateLabels) -> None:
    """Check the labels for a model and a number of texts.

    Raises:
        InvalidInput: The labels of the model do not tell, or there are too many pairs.
    """
    _columns(model, candidates)
    pairs = texts * len(candidates.labels)
    if pairs > model.max_chunks:
        raise InvalidInput(
            f"{texts} texts and {len(candidates.labels)} labels make {pairs} pairs; the limit is "
            f"{model.max_chunks}",
            code="too_many_inputs",
            pointer="/candidate_labels",
        )


def rows_of_pairs(
    model: LoadedModel,
    texts: Sequence[str],
    candidates: CandidateLabels,
    options: CallOptions,
) -> list[Row]:
    """Return the rows of each text with each hypothesis; a text that is too long is truncated."""
    hypotheses = candidates.hypotheses
    tokenizer, pair_rows = model.tokenizer, model.pair_rows
    room = pair_rows.room("", options.prompt_name, None)
    for index, hypothesis in enumerate(hypotheses):
        with point_to(f"/candidate_labels/{index}"):
            tokenizer.check_text(hypothesis, index)
            if tokenizer.count(hypothesis) >= room:
                raise InvalidInput(
                    "the hypothesis of the label and the prompt leave no room for a text within "
                    "the model's maximum length",
                    code="too_long",
                )
    pairs = [(text, hypothesis) for text in texts for hypothesis in hypotheses]
    rest = options.prompt_name, options.on_overflow
    return pair_rows.rows(pairs, *rest, keeps_second=True)


def join_rows(pairs: Sequence[Row], candidates: CandidateLabels) -> list[Row]:
    """Return one row per text, with the token ids of all its pairs."""
    count = len(candidates.labels)
    rows = []
    for start in range(0, len(pairs), count):
        own = pairs[start : start + count]
        ids = [token for row in own for token in row.ids]
        rows.append(Row(ids, any(row.truncated for row in own), 0))
    return rows


def _columns(model: LoadedModel, candidates: CandidateLabels) -> tuple[int, int]:
    """Return the columns of entailment and contradiction among the model's logits."""
    model.check_outputs(("logits",))
    own = model.artifact.manifest.labels
    entailing, contradicting = (
        [index for index, label in enumerate(own) if label.lower().startswith(start)]
        for start in (_ENTAILMENT, _CONTRADICTION)
    )
    if len(own) == 2 and len(entailing) == 1:  # such as entailment and not_entailment
        contradicting = [1 - entailing[0]]
    for name, columns in (("entailment", entailing), ("contradiction", contradicting)):
        is_needed = name == "entailment" or candidates.are_independent
        if len(columns) != 1 and is_needed:
            raise InvalidInput(
                f"candidate_labels need a model of language inference with one label for {name}; "
                f"the model {model.name} has the labels {', '.join(own)}",
                code="wrong_model",
                pointer="/candidate_labels",
            )
    return entailing[0], (contradicting or [-1])[0]
