"""Parity: comparison of the vectors of an exported graph, run by an engine, with PyTorch's."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from models.artifact import Artifact, Check
from models.engines import EngineError, Precision, open_engine, self_check
from models.engines.outputs import OUTPUTS, compare
from models.network.sentence_encoder import SentenceEncoder
from models.packing import NO_ADAPTER, PackedBatch, pack

# Attention scores take memory in proportion to the squared length, so rows of similar length share
# a batch, and the longest row runs alone.
_SHORT_ROWS = (2, 3, 5, 8, 13, 21, 34, 64, 128)
_LONG_ROWS = (256, 511, 512)
_LONGEST_ROW = 2048


@dataclass(frozen=True)
class Parity:
    """Worst agreement of a graph's vectors with PyTorch's in one test case.

    Attributes:
        engine: Name of the engine, in `models.engines.ENGINES`.
        case: Name of the test case, for example "each row alone" or "in batches".
        rows: Number of vectors compared.
        worst_cosine: Lowest cosine similarity between a vector and PyTorch's.
        worst_norm: Largest difference between the L2 norms of a vector and PyTorch's, relative to
            the norm of PyTorch's.
        max_abs: Largest absolute element-wise difference.
    """

    engine: str
    case: str
    rows: int
    worst_cosine: float
    worst_norm: float
    max_abs: float


@dataclass(frozen=True)
class Case:
    """A test case: batches of rows, and PyTorch's vectors for them.

    Attributes:
        name: Name of the test case.
        batches: Batches to run, in order.
        expected: PyTorch's vectors of all rows, `(B, W)`.
    """

    name: str
    batches: tuple[PackedBatch, ...]
    expected: NDArray[np.float32]


def reference_cases(model: SentenceEncoder, max_tokens: int, check: Check) -> list[Case]:
    """Return the test cases of a model's graphs, with vectors computed by PyTorch.

    PyTorch computes the expected vectors one row at a time.

    Args:
        model: Exported model, in float32.
        max_tokens: Maximum number of tokens in a row.
        check: Inputs of the self-check, and their reference vectors.
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
    of_short, of_long = adapters[: len(short)], adapters[len(short) :]
    # The first quarter of each row stands for a prompt that is excluded from pooling.
    prompts = [[len(row) // 4 for row in part] for part in (short, long)]
    order = rng.permutation(len(short))
    expected = reference_vectors(model, rows, adapters=adapters)  # (B, W)
    return [
        Case(
            "check inputs",
            tuple(
                pack([row], adapters=[adapter])
                for row, adapter in zip(check.rows, check.adapters, strict=True)
            ),
            np.asarray(check.outputs["pooled"], np.float32),
        ),
        Case(
            "each row alone",
            (
                *(pack([rows[i]], adapters=[adapters[i]]) for i in range(len(rows))),
                pack(longest),
            ),
            np.concatenate([expected, reference_vectors(model, longest)]),
        ),
        Case(
            "in batches",
            (pack(short, adapters=of_short), pack(long, adapters=of_long)),
            expected,
        ),
        Case(
            "batch, shuffled",
            (pack([short[i] for i in order], adapters=[of_short[i] for i in order]),),
            expected[order],
        ),
        Case(
            "prompts not pooled",
            (pack(short, prompts[0], of_short), pack(long, prompts[1], of_long)),
            reference_vectors(model, rows, prompts[0] + prompts[1], adapters),
        ),
    ]


def measure_parity(
    cases: Sequence[Case], artifact: Artifact, name: str, precision: Precision
) -> list[Parity]:
    """Compare an engine's vectors with PyTorch's; return the parity of each test case.

    Args:
        cases: Test cases from `reference_cases`.
        artifact: Artifact of the model.
        name: Name of the engine.
        precision: Precision of the engine.

    Raises:
        EngineError: The engine is unusable, or its vectors differ from PyTorch's beyond the bounds
            in `OUTPUTS` for the engine's precision.
    """
    engine = open_engine(artifact, name, precision)
    self_check(engine, artifact)
    bounds = OUTPUTS["pooled"].bounds[engine.precision]
    parity: list[Parity] = []
    for case in cases:
        vectors = np.concatenate([engine.run(batch) for batch in case.batches])
        agreement = compare(vectors, case.expected)
        if not agreement.is_within(bounds):
            raise EngineError(
                f"the graph differs from PyTorch ({case.name}): worst cosine "
                f"{agreement.cosine:.7f} (minimum {bounds.cosine}), worst norm difference "
                f"{agreement.norm:.1e} (maximum {bounds.norm:g})"
            )
        max_abs = float(np.abs(vectors - case.expected).max())
        worst = agreement.cosine, agreement.norm
        parity.append(Parity(name, case.name, len(vectors), *worst, max_abs))
    return parity


def adapters_in_turn(model: SentenceEncoder, rows: int) -> list[int]:
    """Return an adapter for each row: none, then each adapter of the model in turn."""
    config = model.encoder.config.adapters
    count = len(config.names) if config else 0
    return [index % (count + 1) - 1 for index in range(rows)]


def reference_vectors(
    model: SentenceEncoder,
    rows: list[list[int]],
    prompt_tokens: list[int] | None = None,
    adapters: list[int] | None = None,
) -> NDArray[np.float32]:
    """Return PyTorch's row vectors `(B, W)`, computed one row at a time without padding.

    Args:
        model: Exported model, in float32.
        rows: Token ids of each row.
        prompt_tokens: Number of leading tokens of each row to exclude from pooling; None: pool all
            tokens.
        adapters: Index of each row's adapter, or `NO_ADAPTER`; None: no adapters.
    """
    prompt_tokens = prompt_tokens or [0] * len(rows)
    adapters = adapters or [NO_ADAPTER] * len(rows)
    vectors: list[torch.Tensor] = []
    for row, skipped, adapter in zip(rows, prompt_tokens, adapters, strict=True):
        ones = torch.ones(1, len(row))
        pooled = (torch.arange(len(row)) >= skipped).float()[None]
        with torch.no_grad():
            ids, own = torch.tensor([row]), _adapter_index(adapter)
            vectors.append(model(ids, ones, pooled, adapters=own)[0])
    return torch.stack(vectors).numpy()


def reference_tokens(model: SentenceEncoder, row: list[int], adapter: int) -> NDArray[np.float32]:
    """Return PyTorch's token vectors `(L, D)` for one row of L token ids."""
    with torch.no_grad():
        own = _adapter_index(adapter)
        tokens: NDArray[np.float32] = model.encoder(torch.tensor([row]), adapters=own)[0].numpy()
    return tokens


def _adapter_index(adapter: int) -> torch.Tensor | None:
    """Return the argument `adapters` of a network for one row, `(1,)`; None: no adapter."""
    return None if adapter == NO_ADAPTER else torch.tensor([adapter])
