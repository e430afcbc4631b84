"""Parity: comparison of the vectors of an exported graph, run by an engine, with PyTorch's."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from models.artifact import Artifact
from models.engines import EngineError, Precision, open_engine, self_check
from models.engines.outputs import OUTPUTS, compare
from models.network.sentence_encoder import SentenceEncoder
from models.packing import pack

# The attention scores of a batch take memory in proportion to rows x heads x squared length.
_MAX_BATCH_TOKENS = 512
_MAX_TOKENS = 2048


@dataclass(frozen=True)
class Parity:
    """Worst agreement of a graph's vectors with PyTorch's in one test case.

    Attributes:
        engine: Name of the engine, in `models.engines.ENGINES`.
        case: Name of the test case, for example "each row alone" or "one batch".
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


def measure_parity(
    model: SentenceEncoder, artifact: Artifact, name: str, precision: Precision
) -> list[Parity]:
    """Compare an engine's vectors with PyTorch's; return the parity of each test case.

    PyTorch computes one row at a time; the engine also computes batches. Rows have up to
    `_MAX_TOKENS` tokens, and up to `_MAX_BATCH_TOKENS` in a batch.

    Args:
        model: Exported model, in float32.
        artifact: Artifact of the model.
        name: Name of the engine.
        precision: Precision of the engine.

    Raises:
        EngineError: The engine is unusable, or its vectors differ from PyTorch's beyond the bounds
            in `OUTPUTS` for the engine's precision.
    """
    engine = open_engine(artifact, name, precision)
    self_check(engine, artifact)
    rng = np.random.default_rng(0)
    longest = min(artifact.manifest.max_tokens, _MAX_BATCH_TOKENS)
    lengths = [2, 3, 5, 8, 13, 21, 34, 64, longest // 2, longest - 1, longest]
    rows = [
        rng.integers(0, artifact.manifest.vocab_size, min(length, longest)).tolist()
        for length in lengths
    ]
    length = min(artifact.manifest.max_tokens, _MAX_TOKENS)
    long = rng.integers(0, artifact.manifest.vocab_size, length).tolist()
    check = artifact.check()
    reference = np.asarray(check.outputs["pooled"], np.float32)  # (B, W)
    expected = reference_vectors(model, rows)  # (B, W)
    # The first quarter of each row stands for a prompt that is excluded from pooling.
    prompt_tokens = [len(row) // 4 for row in rows]
    order = rng.permutation(len(rows))
    cases = {
        "check inputs": (engine.run(pack(check.rows)), reference),
        "each row alone": (np.concatenate([engine.run(pack([row])) for row in rows]), expected),
        "one batch": (engine.run(pack(rows)), expected),
        "one batch, shuffled": (engine.run(pack([rows[i] for i in order])), expected[order]),
        "prompts not pooled": (
            engine.run(pack(rows, prompt_tokens)),
            reference_vectors(model, rows, prompt_tokens),
        ),
    }
    if len(long) > longest:
        vectors = engine.run(pack([long]))
        cases["a long row alone"] = vectors, reference_vectors(model, [long])
    bounds = OUTPUTS["pooled"].bounds[engine.precision]
    parity: list[Parity] = []
    for case, (vectors, references) in cases.items():
        agreement = compare(vectors, references)
        if not agreement.is_within(bounds):
            raise EngineError(
                f"the graph differs from PyTorch ({case}): worst cosine {agreement.cosine:.7f} "
                f"(minimum {bounds.cosine}), worst norm difference {agreement.norm:.1e} "
                f"(maximum {bounds.norm:g})"
            )
        max_abs = float(np.abs(vectors - references).max())
        parity.append(Parity(name, case, len(vectors), agreement.cosine, agreement.norm, max_abs))
    return parity


def reference_vectors(
    model: SentenceEncoder, rows: list[list[int]], prompt_tokens: list[int] | None = None
) -> NDArray[np.float32]:
    """Return PyTorch's row vectors `(B, W)`, computed one row at a time without padding.

    Args:
        model: Exported model, in float32.
        rows: Token ids of each row.
        prompt_tokens: Number of leading tokens of each row to exclude from pooling; None: pool all
            tokens.
    """
    vectors: list[torch.Tensor] = []
    for row, skipped in zip(rows, prompt_tokens or [0] * len(rows), strict=True):
        ones = torch.ones(1, len(row))
        pooled = (torch.arange(len(row)) >= skipped).float()[None]
        with torch.no_grad():
            vectors.append(model(torch.tensor([row]), ones, pooled)[0])
    return torch.stack(vectors).numpy()


def reference_tokens(model: SentenceEncoder, row: list[int]) -> NDArray[np.float32]:
    """Return PyTorch's token vectors `(L, D)` for one row of L token ids."""
    with torch.no_grad():
        tokens: NDArray[np.float32] = model.encoder(torch.tensor([row]))[0].numpy()
    return tokens
