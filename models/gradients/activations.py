"""Activations: outputs of the steps of the forward pass, and their replacement by others.

A step can be named by its own name, such as "layers.0.norm2", or by the name of a layer, such as
"layers.0", whose output is that of its last step.

Source of patching: Vig et al. 2020, arXiv:2004.12265; Meng et al. 2022, arXiv:2202.05262.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.gradients.attribution import TOKENS_AT_ONCE, TargetFunction
from models.gradients.inputs import InputRow, TapPoint, TokenReduction, starts_of
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.patching import Patching, TapPatch
from models.network.taps import OutputTap, PatchTap

# Reductions of the vectors of a row's tokens, `(L, D)`.
REDUCTIONS: dict[TokenReduction, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "mean": lambda x: x.mean(0),
    "norm": lambda x: x.norm(dim=-1),
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
}

# Pairs of a replaced token and the token whose vector replaces it; see `patch`.
Patch = Sequence[tuple[int, int]]


def tap_points(model: ReferenceModel) -> tuple[TapPoint, ...]:
    """Return the steps whose outputs belong to a row, in order.

    Others, such as the bias of relative positions, depend on the number of tokens alone.
    """
    tap = OutputTap()
    model.vectors(InputRow([0, 0]), tap)
    return tuple(
        TapPoint(name, output.shape[-1], per_token=output.dim() == 3)
        for name, output in tap.outputs.items()
        if output.shape[:-1] in ((1, 2), (1,))
    )


def activations(
    model: ReferenceModel, row: InputRow, names: Mapping[str, str], reduction: TokenReduction
) -> dict[str, NDArray[np.float32]]:
    """Return outputs of steps of the forward pass.

    The shapes are those of `budget.activation_shape`. A reduction over tokens does not change an
    output with a single vector, except for its norm.

    Args:
        model: Reference model of the served graph.
        row: Input of the model.
        names: Name of each tensor in the result, and of the step that it is the output of.
        reduction: Reduction over the tokens of the row.
    """

    def reduce(output: Tensor) -> Tensor:
        """Reduce an output `(1, L, D)`, or a single vector `(1, D)`."""
        is_vector = output.dim() == 2 and reduction != "norm"
        x = output[0] if is_vector else REDUCTIONS[reduction](output[0])
        return x.cpu().clone()  # a view, such as the first vector, would keep the whole output

    tap = OutputTap(set(names.values()), reduce)
    model.vectors(row, tap)
    # Copied once more, after the forward pass: arrays that were allocated between its large buffers
    # keep those from being reused. That took 9 MB per text of 256 tokens with all-MiniLM-L6-v2.
    return {name: tap.outputs[step].numpy().copy() for name, step in names.items()}


def patch(
    model: ReferenceModel,
    rows: Sequence[InputRow],
    source_rows: Sequence[InputRow],
    target: TargetFunction,
    taps: Mapping[str, str],
    patches: Sequence[Patch],
    *,
    is_each: bool = False,
) -> Patching:
    """Replace token vectors of rows by those of other rows, and compute a scalar.

    Args:
        model: Reference model of the served graph.
        rows: Inputs of the model.
        source_rows: As many inputs, from which the token vectors are.
        target: Scalar, as a function of the vectors of each row.
        taps: Name of each tap, and of the step whose output is changed.
        patches: Patches at each tap, each in a forward pass of its own. The indices of a pair
            count the tokens of all rows, and of all source rows.
        is_each: Whether the result has a value for each patch, and not the value of the only one.
    """
    recorded = [OutputTap(set(taps.values())) for _ in source_rows]
    clean = [model.vectors(row) for row in rows]
    sources = [model.vectors(row, tap) for row, tap in zip(source_rows, recorded, strict=True)]
    value, source_value = target(*clean).item(), target(*sources).item()
    at_once = max(1, TOKENS_AT_ONCE // sum(len(row.ids) for row in rows))

    def run_patched(step: str) -> NDArray[np.float64]:
        """Return the scalar of each patch."""
        source = torch.cat([tap.outputs[step] for tap in recorded], 1)[0]  # (L', D)
        values = []
        for first in range(0, len(patches), at_once):
            part = patches[first : first + at_once]
            vectors = [
                _patch(model, row, start, step, source, part, unchanged)
                for row, start, unchanged in zip(rows, starts_of(rows), clean, strict=True)
            ]
            values.append(target(*vectors).expand(len(part)).double().cpu().numpy())
        return np.concatenate(values)

    def effect(change: NDArray[np.float64]) -> NDArray[np.float64]:
        whole = source_value - value
        return change / whole if whole else np.full_like(change, math.nan)

    results = []
    for name, step in taps.items():
        values = run_patched(step)
        effects = effect(values - value)
        results.append(
            TapPatch(name, None, values, effects)
            if is_each
            else TapPatch(name, float(values[0]), None, float(effects[0]))
        )
    return Patching(value, source_value, tuple(results))


def _patch(
    model: ReferenceModel,
    row: InputRow,
    start: int,
    step: str,
    source: Tensor,
    patches: Sequence[Patch],
    unchanged: Tensor,
) -> Tensor:
    """Return the vectors of a row for each patch, `(S, W)`, or unchanged ones, `(1, W)`.

    Args:
        model: See `patch`.
        row: Input of the model.
        start: Index of its first token, among the tokens of all rows.
        step: Name of the step whose output is changed.
        source: Token vectors of all source rows at the step, `(L', D)`.
        patches: Patches, of which those of other rows are left out.
        unchanged: Vectors of the row, `(1, W)`.
    """
    changes = [
        (version, to - start, origin)
        for version, pairs in enumerate(patches)
        for to, origin in pairs
        if 0 <= to - start < len(row.ids)
    ]
    if not changes:
        return unchanged
    versions, positions, origins = (list(column) for column in zip(*changes, strict=True))

    def change(output: Tensor) -> Tensor:
        output = output.expand(len(patches), *output.shape[1:]).clone()
        output[versions, positions] = source[origins]
        return output

    return model.vectors(row, PatchTap(step, change), versions=len(patches))
