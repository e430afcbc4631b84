"""How to explain scores: by deletion of units, by the sentences that matter most, or by terms."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from service.inference.call_options import CallOptions, Priority
from service.inference.errors import InvalidInput
from service.inference.explain.shapley import min_samples
from service.inference.tokenizing.chunking import is_integer

# Units that are found without a tokenizer.
TextUnit = Literal["words", "sentences"]
UnitKind = Literal[TextUnit, "chunks"]
By = Literal[UnitKind, "auto"]
Method = Literal["deletion", "shapley"]

# Largest `Deletion.max_tokens`.
MAX_TOKENS = 20_000
# Number of best documents that `Model.rerank` explains by default.
TOP_N = 3
# Largest `Deletion.pairs`.
MAX_PAIRS = 10
# Maximum number of tokens of a chunk, with `by="chunks"`.
CHUNK_TOKENS = 64
# Maximum number of highlights per document.
MAX_HIGHLIGHTS = 10
# Default and maximum number of texts from which Shapley values are estimated.
_SAMPLES, _SAMPLES_PER_UNIT, MAX_SAMPLES = 64, 4, 2048


@dataclass(frozen=True, kw_only=True)
class Deletion:
    """Options of an explanation by deletion.

    Attributes:
        by: Units: "words", "sentences", "chunks" or "auto", see `deletion.py`; None: "auto", or
            "words" with `method="shapley"`.
        of: Texts whose units are left out: "document", "query" or "both". `Model.classify` leaves
            out the units of all texts.
        top_n: Number of best documents whose scores are explained; None: all in `Model.score`, and
            `TOP_N` in `Model.rerank`. Not for `Model.classify`.
        method: "deletion": each unit left out, and alone; "shapley": Shapley values.
        samples: Maximum number of texts for the Shapley values of a text; None: 64, or 4 per unit
            if that is more. The standard errors of fewer can be several times too small.
        seed: Random seed of the subsets of units in these texts.
        pairs: Number of best units of each text of which each pair is left out, one of the query
            and one of the document, with `of="both"`; 0: none.
        priority: Priority of the variants, and of few short texts, beside which they run. In a call
            of the priority "bulk" it is always "bulk".
        label: Label whose score is explained by `Model.classify`; None: the best of each input.
        max_tokens: Maximum number of tokens of all variants that are scored for the explanations of
            a call; None: `MAX_TOKENS`, or with `by="auto"` 16 times those of the explained texts,
            but at least 4,000 and at most `MAX_TOKENS`.

    Raises:
        InvalidInput: An attribute is invalid; `pointer` names it.
    """

    by: By | None = None
    of: Literal["document", "query", "both"] = "document"
    top_n: int | None = None
    method: Method = "deletion"
    samples: int | None = None
    seed: int = 0
    pairs: int = 0
    priority: Priority = "bulk"
    label: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_name("method", self.method, get_args(Method))
        _check_name("priority", self.priority, get_args(Priority))
        if self.method == "shapley" and self.by == "auto":
            raise InvalidInput(
                "Shapley values are by words, sentences or chunks, not by auto",
                pointer="/explain/by",
            )
        if self.samples is not None:
            _check_integer("samples", self.samples, 1, MAX_SAMPLES)
        _check_integer("seed", self.seed, 0, 2**32 - 1)
        if self.method != "shapley":
            for name, is_set in (("samples", self.samples is not None), ("seed", self.seed != 0)):
                if is_set:
                    raise InvalidInput(
                        f'{name} is for the method "shapley"', pointer=f"/explain/{name}"
                    )
        if self.by is not None:
            _check_name("by", self.by, get_args(By))
        _check_name("of", self.of, ("document", "query", "both"))
        _check_top_n(self.top_n)
        _check_integer("pairs", self.pairs, 0, MAX_PAIRS)
        if self.pairs and (self.of != "both" or self.method != "deletion"):
            raise InvalidInput(
                'pairs are left out with of "both" and the method "deletion"',
                pointer="/explain/pairs",
            )
        if not isinstance(self.label, str | None):
            raise InvalidInput("label must be a text or None", pointer="/explain/label")
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)

    @property
    def is_auto(self) -> bool:
        """Whether units are the sentences of a text and then words of the best of them."""
        return self.by == "auto" or (self.by is None and self.method == "deletion")

    @property
    def units(self) -> UnitKind:
        """Kind of the units; with `is_auto`, of texts of several sentences."""
        if self.by is None or self.by == "auto":
            return "sentences" if self.is_auto else "words"
        return self.by

    @property
    def texts(self) -> Sequence[int]:
        """Indices, in a pair of query and document, of the texts whose units are left out."""
        return {"query": (0,), "document": (1,), "both": (0, 1)}[self.of]

    def options_of_variants(self, options: CallOptions) -> CallOptions:
        """Return the options with which the variants of a call's texts run."""
        # A variant of a text that just fits can have more tokens, and "error" would refuse it.
        overflow = "truncate" if options.on_overflow == "error" else options.on_overflow
        priority = "bulk" if self.priority == "bulk" else options.priority
        return replace(options, on_overflow=overflow, priority=priority)

    def samples_of(self, units: int) -> int:
        """Return the maximum number of texts for the Shapley values of a text with these units.

        Raises:
            InvalidInput: `samples` is too small.
        """
        least = min_samples(units)
        if self.samples is not None and self.samples < least:
            raise InvalidInput(
                f"samples is {self.samples}; a text of {units} units needs at least {least}",
                pointer="/explain/samples",
            )
        return self.samples or max(_SAMPLES, _SAMPLES_PER_UNIT * units)


@dataclass(frozen=True)
class Highlights:
    """The best sentences of each document: those with the first places, by deletion.

    They cost about 8 times the tokens of the documents, and at most `MAX_TOKENS`: the documents
    with the best scores come first, and those for which the tokens do not suffice have none. Of
    many sentences, those that score best alone are measured by leaving them out, usually three or
    more of each document.

    Attributes:
        count: Maximum number of sentences per document.

    Raises:
        InvalidInput: `count` is invalid.
    """

    count: int = 2

    def __post_init__(self) -> None:
        if not (is_integer(self.count) and 1 <= self.count <= MAX_HIGHLIGHTS):
            raise InvalidInput(
                f"highlight must be an integer from 1 to {MAX_HIGHLIGHTS}", pointer="/highlight"
            )


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The largest terms of the sum over tokens that a score is.

    It needs sparse vectors, multi-vectors, or embeddings that are weighted sums of token vectors,
    and not a distance as similarity.

    Attributes:
        top_n: Number of best documents whose scores are explained; None: all.

    Raises:
        InvalidInput: `top_n` is invalid.
    """

    top_n: int | None = None

    def __post_init__(self) -> None:
        _check_top_n(self.top_n)


# How to explain scores; True: by `Deletion()`, False: not.
Explain = bool | Deletion | Highlights | Terms


def _check_top_n(value: int | None) -> None:
    if value is not None and not (is_integer(value) and value >= 1):
        raise InvalidInput("top_n must be an integer, at least 1", pointer="/explain/top_n")


def _check_name(name: str, value: object, names: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in names:
        raise InvalidInput(f"{name} must be one of {', '.join(names)}", pointer=f"/explain/{name}")


def _check_integer(name: str, value: int, least: int, most: int) -> None:
    if not (is_integer(value) and least <= value <= most):
        raise InvalidInput(
            f"{name} must be an integer from {least} to {most}", pointer=f"/explain/{name}"
        )
