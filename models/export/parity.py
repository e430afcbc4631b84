"""Parity: comparison of an exported graph's vectors, computed by an engine, with PyTorch's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from models.artifact import Artifact
from models.engines import EngineError, Precision, open_engine, self_check
from models.engines.outputs import OUTPUTS, compare
from models.manifest import Check, Output
from models.network.sentence_encoder import SentenceEncoder
from models.packing import NO_ADAPTER, WORD_NAMES, PackedBatch, pack, pack_check, pack_some

# Vectors by output.
Results = Mapping[Output, NDArray[np.float32]]

# Lengths of random rows, in tokens. Attention scores take memory in proportion to the squared
# length, so rows of similar length share a batch, and the longest row runs alone.
_SHORT_ROWS = (2, 3, 5, 8, 13, 21, 34, 64, 128)
_LONG_ROWS = (256, 511, 512)
_LONGEST_ROW = 2048


@dataclass(frozen=True)
class Parity:
    """Worst agreement between a graph's vectors and PyTorch's in one test case.

    Attributes:
        engine: Name of the engine, in `models.engines.ENGINES`.
        case: Name of the test case, for example "each row alone" or "in batches".
        output: Name of the compared output.
        rows: Number of vectors compared.
        worst_cosine: Lowest cosine similarity between a vector and PyTorch's.
        worst_norm: Largest difference between the L2 norms of a vector and PyTorch's, relative to
            the norm of PyTorch's.
        max_abs: Largest absolute element-wise difference.
    """

    engine: str
    case: str
    output: Output
    rows: int
    worst_cosine: float
    worst_norm: float
    max_abs: float


@dataclass(frozen=True)
class ParityCase:
    """A test case: batches of rows, and the rows' vectors computed by PyTorch.

    Attributes:
        name: Name of the test case.
        batches: Batches to run, in order.
        expected: PyTorch's vectors of the rows by output, `(B, W)`, or of an output per token,
            `(T, W)`; those of the last rows may be missing.
    """

    name: str
    batches: tuple[PackedBatch, ...]
    expected: Results


def reference_cases(model: SentenceEncoder, max_tokens: int, check: Check) -> list[ParityCase]:
    """Return the test cases for a model's graphs.

    The expected vectors are computed by PyTorch, one row at a time.

    Args:
        model: Exported model, in float32.
        max_tokens: Maximum number of tokens in a row.
        check: Inputs and reference vectors of the self-check, which are one of the test cases.
    """
    rng = np.random.default_rng(0)

    def random_rows(*lengths: int) -> list[list[int]]:
        size = model.encoder.config.vocab_size
        return [rng.integers(0, size, min(length, max_tokens)).tolist() for length in lengths]

    short, long, longest = (
        random_rows(*lengths) for lengths in (_SHORT_ROWS, _LONG_ROWS, (_LONGEST_ROW,))
    )
    rows = short + long
    adapters = adapters_in_turn(model, len(rows))
    # The first quarter of each row stands for a prompt that is excluded from pooling.
    prompts = [len(row) // 4 for row in rows]
    types = None
    if model.has_token_types:
        types = [[index * 2 // len(row) for index in range(len(row))] for row in rows]
    unattended = unattended_in_turn(model, rows)
    words, labels = words_in_turn(model, rows)

    def pack_cases(indices: Sequence[int], *, skips_prompts: bool = False) -> PackedBatch:
        others = adapters, types, unattended, words, labels
        return pack_some(indices, rows, prompts if skips_prompts else None, *others)

    shorter, longer = range(len(short)), range(len(short), len(rows))
    order = rng.permutation(len(short)).tolist()
    # The self-check compares enough token vectors.
    outputs = [output for output in model.outputs if output != "tokens"]

    def join(results: Sequence[Results]) -> Results:
        return {o: np.concatenate([result[o] for result in results]) for o in outputs}

    expected = reference_outputs(model, rows, None, adapters, types, unattended, words, labels)
    own_words, own_labels = words_in_turn(model, longest)
    of_longest = reference_outputs(model, longest, words=own_words, labels=own_labels)
    cases = [
        ParityCase(
            "check inputs",
            tuple(pack_check(check, [i]) for i in range(len(check.rows))),
            {output: np.asarray(check.outputs[output], np.float32) for output in outputs},
        ),
        ParityCase(
            "each row alone",
            (
                *(pack_cases([i]) for i in range(len(rows))),
                pack(longest, words=own_words, labels=own_labels),
            ),
            join([*expected, *of_longest]),
        ),
        ParityCase("in batches", (pack_cases(shorter), pack_cases(longer)), join(expected)),
        ParityCase("batch, shuffled", (pack_cases(order),), join([expected[i] for i in order])),
    ]
    first = OUTPUTS[model.outputs[0]]
    is_pooled = not (first.per_token or first.per_pair or model.reads_first_tokens)
    if is_pooled:  # otherwise prompts are not supported
        batches = pack_cases(shorter, skips_prompts=True), pack_cases(longer, skips_prompts=True)
        pooled = reference_outputs(model, rows, prompts, adapters, types, unattended)
        cases.append(ParityCase("prompts not pooled", batches, join(pooled)))
    return cases


def measure_parity(
    cases: Sequence[ParityCase], artifact: Artifact, name: str, precision: Precision
) -> list[Parity]:
    """Compare an engine's vectors with PyTorch's; return the parity of each test case.

    Args:
        cases: Test cases from `reference_cases`.
        artifact: Artifact of the model.
        name: Name of the engine.
        precision: Precision of the engine.

    Raises:
        EngineError: The engine is unusable, or its vectors differ from PyTorch's by more than the
            bounds in `models.engines.OUTPUTS` for the engine's precision.
    """
    engine = open_engine(artifact, name, precision)
    self_check(engine, artifact)
    parity: list[Parity] = []
    for case in cases:
        outputs = list(case.expected)
        batches = [engine.run_outputs(batch, outputs) for batch in case.batches]
        for output, results in zip(outputs, zip(*batches, strict=True), strict=True):
            expected = case.expected[output]
            vectors = np.concatenate(results)[: len(expected)]
            agreement = compare(output, vectors, expected)
            bounds = OUTPUTS[output].bounds[engine.precision]
            if not agreement.is_within(bounds):
                raise EngineError(
                    f"the graph differs from PyTorch ({case.name}, {output}): worst cosine "
                    f"{agreement.cosine:.7f} (minimum {bounds.cosine}), worst norm difference "
                    f"{agreement.norm:.1e} (maximum {bounds.norm:g})"
                )
            max_abs = float(np.abs(vectors - expected).max())
            worst = agreement.cosine, agreement.norm
            parity.append(Parity(name, case.name, output, len(vectors), *worst, max_abs))
    return parity


def adapters_in_turn(model: SentenceEncoder, rows: int) -> list[int]:
    """Return an adapter index for each row, cycling through `NO_ADAPTER` and all adapters."""
    config = model.encoder.config.adapters
    count = len(config.names) if config else 0
    return [index % (count + 1) - 1 for index in range(rows)]


def unattended_in_turn(model: SentenceEncoder, rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of last tokens of each row that no token attends to.

    In every second row of a multi-vector model, a quarter of the tokens stands for those that
    expand a query, but no more than the attention windows reach across; in other rows none.
    """
    if "multi" not in model.outputs:
        return [0] * len(rows)
    windows = [window for window in model.encoder.config.windows if window is not None]
    return [min([len(row) // 4, *windows]) * (i % 2) for i, row in enumerate(rows)]


def words_in_turn(
    model: SentenceEncoder, rows: Sequence[Sequence[int]]
) -> tuple[list[list[int]] | None, list[list[int]] | None]:
    """Return the positions of words and of labels in rows of a model with spans; else None.

    Rows have one to three labels, and words of one or two tokens after them.
    """
    if model.spans is None:
        return None, None
    words: list[list[int]] = []
    labels: list[list[int]] = []
    for i, row in enumerate(rows):
        count = min(1 + i % 3, len(row) - 1)
        labels.append([*range(count)])
        words.append([*range(count, len(row), 1 + i % 2)])
    return words, labels


def reference_outputs(
    model: SentenceEncoder,
    rows: list[list[int]],
    prompt_tokens: list[int] | None = None,
    adapters: list[int] | None = None,
    token_types: list[list[int]] | None = None,
    unattended: list[int] | None = None,
    words: Sequence[Sequence[int]] | None = None,
    labels: Sequence[Sequence[int]] | None = None,
) -> list[Results]:
    """Return PyTorch's outputs for each row, computed one row at a time without padding.

    There is one vector per row, `(1, W)`, per token, `(L, W)`, or per pair, `(P, W)`.

    Args:
        model: Exported model, in float32.
        rows: Token ids of each row.
        prompt_tokens: Number of leading tokens of each row to exclude from pooling; None: pool all
            tokens.
        adapters: Index of each row's adapter, or `NO_ADAPTER`; None: no adapters.
        token_types: Type of each token of each row; None: type 0.
        unattended: Number of last tokens of each row that no token attends to; None: none.
        words: Positions of each row's words; see `pack`.
        labels: Positions of each row's labels.
    """
    prompt_tokens = prompt_tokens or [0] * len(rows)
    adapters = adapters or [NO_ADAPTER] * len(rows)
    unattended = unattended or [0] * len(rows)
    types = [torch.tensor([own]) for own in token_types] if token_types else [None] * len(rows)
    outputs: list[Results] = []
    for i, row in enumerate(rows):
        positions = torch.arange(len(row))
        attended = (positions < len(row) - unattended[i]).float()[None]
        pooled = (positions >= prompt_tokens[i]).float()[None]
        own = None if adapters[i] == NO_ADAPTER else torch.tensor([adapters[i]])
        of_words = None
        if words is not None and labels is not None:
            arrays = pack([row], words=[words[i]], labels=[labels[i]]).inputs(WORD_NAMES)
            of_words = {name: torch.from_numpy(array) for name, array in arrays.items()}
        with torch.no_grad():
            results = model.forward_all(
                torch.tensor([row]), attended, pooled, own, types[i], of_words
            )
        vectors = (result.reshape(-1, result.shape[-1]).numpy() for result in results)
        outputs.append(dict(zip(model.outputs, vectors, strict=True)))
    return outputs
