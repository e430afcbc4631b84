"""Gradient flow: detection of vanishing, exploding and non-finite gradients in a training step.

One forward and one backward pass of the reference model are measured step by step. A step is one
operation, such as attention, a linear layer, a residual sum, a norm or pooling. Each row has its
own forward pass: statistics include no padding, and rows interact only in the objective. Only
statistics are returned, because raw gradients would reveal tokens and weights.

Source: half-precision training and loss scaling, Micikevicius et al. 2018, arXiv:1710.03740.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from models.gradients.flow_tap import RecordingTap, Step, objective_value
from models.gradients.inputs import EmulatedPrecision, InputRow, Objective
from models.gradients.objectives import check_objective
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.flow import (
    Flow,
    FlowStep,
    FlowVerdict,
    ForwardSizes,
    GradientSizes,
    NonFiniteStep,
    ParameterGradient,
    Role,
)
from models.gradients.results.json_form import Phase

# Thresholds of the gradient norm at a layer's output, relative to the norm at the output of the
# last layer.
VANISHING = 1e-3
EXPLODING = 1e3

EMULATED: dict[EmulatedPrecision, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def flow(
    model: ReferenceModel,
    rows: Sequence[InputRow],
    objective: Objective,
    *,
    emulate: EmulatedPrecision | None = None,
    loss_scale: float = 1.0,
) -> Flow:
    """Measure activations and gradients at every step of a forward and a backward pass.

    Only layers with a finite gradient are judged as "vanishing" or "exploding", and only if the
    gradient of the last layer is finite and nonzero.

    Args:
        model: Reference model. Its parameters require gradients only during the call.
        rows: Batch of B inputs.
        objective: Objective of the rows' vectors. The vectors are normalised if `model.normalize`
            is set or the objective compares pairs.
        emulate: Precision to which the output of each step and the gradient with respect to it are
            rounded; None: no rounding. Attention is then split into several steps, so that its
            scores are rounded too. Computations inside a step, weights, gradients of weights and
            the objective's value keep the model's precision.
        loss_scale: Factor on the objective in the backward pass. Returned norms and magnitudes are
            divided by it. NaN, infinity and underflow are counted before the division.

    Raises:
        ValueError: A row has too few or too many tokens, a token id outside the vocabulary or an
            invalid number of prompt tokens; the objective does not match the rows; `emulate` is
            unknown; or `loss_scale` is not positive and finite.
    """
    _check_rows(model, rows)
    check_objective(objective, len(rows), model.network.width)
    if emulate is not None and emulate not in EMULATED:
        raise ValueError(
            f"unknown precision emulate={emulate!r}; allowed: {', '.join(sorted(EMULATED))}"
        )
    if not 0 < loss_scale < math.inf:
        raise ValueError(f"loss_scale is {loss_scale}; it must be positive and finite")

    tap = RecordingTap(None if emulate is None else EMULATED[emulate])
    model.network.requires_grad_(True)
    try:
        with torch.enable_grad():
            value = objective_value(tap, model, rows, objective)
            tap.backward(value * loss_scale)
    finally:
        model.network.requires_grad_(False)

    steps = [_measure(tap, name, loss_scale) for name in tap.steps]
    missing = [
        FlowVerdict(step.name, "missing_gradient")
        for step in steps
        if step.gradient is None or (tap.steps[step.name].parameters and step.parameters is None)
    ]
    layers = [step for step in steps if step.name in model.network.encoder.layer_steps]
    return Flow(
        value.item(),
        tuple(steps),
        _nonfinite_steps(tap, len(rows)),
        (*missing, *_vanishing_or_exploding(layers)),
    )


def _check_rows(model: ReferenceModel, rows: Sequence[InputRow]) -> None:
    config = model.network.encoder.config
    for index, row in enumerate(rows):
        length = len(row.ids)
        if not 1 <= length <= config.max_tokens:
            raise ValueError(f"row {index} has {length} tokens; allowed: 1 to {config.max_tokens}")
        if not 0 <= min(row.ids) <= max(row.ids) < config.vocab_size:
            raise ValueError(f"row {index} has a token id outside 0 to {config.vocab_size - 1}")
        if not 0 <= row.prompt_tokens < length:
            raise ValueError(
                f"row {index} has {row.prompt_tokens} prompt tokens; allowed: 0 to {length - 1}"
            )


def _measure(tap: RecordingTap, name: str, loss_scale: float) -> FlowStep:
    step = tap.steps[name]
    y = _flat(step.outputs)
    rms, absmax, nan, inf = _sizes(y)
    forward = ForwardSizes(rms, absmax, nan, inf, _fraction(y == 0))

    gradient, exact = None, tap.existing_gradients(step.outputs)
    if len(exact) == len(step.outputs):
        before, after = _flat(exact), _flat(map(tap.round, exact))
        rms, absmax, nan, inf = _sizes(after)
        l2 = rms * math.sqrt(len(after) - nan - inf)
        tiny = torch.finfo(tap.dtype or after.dtype).tiny
        underflow = _fraction((before != 0) & (after.abs() < tiny))
        gradient = GradientSizes(l2 / loss_scale, absmax / loss_scale, nan, inf, underflow)

    parameters, exact = None, tap.existing_gradients(step.parameters)
    if exact and len(exact) == len(step.parameters):
        norm = _norm(exact) / loss_scale
        parameters = ParameterGradient(norm.item(), (norm / _norm(step.parameters)).item())
    return FlowStep(name, forward, gradient, parameters)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.detach().flatten() for x in tensors])


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    # One tensor at a time avoids a copy of the embedding table.
    norms = [torch.linalg.vector_norm(x.detach(), dtype=torch.float64) for x in tensors]
    return torch.stack(norms).norm()


def _sizes(x: Tensor) -> tuple[float, float, int, int]:
    """Return RMS and largest magnitude of the finite values, and the counts of NaN and infinity.

    Without finite values, RMS and largest magnitude are NaN.
    """
    finite = x[x.isfinite()].double()
    absmax = finite.abs().max().item() if len(finite) else math.nan
    nan, inf = int(x.isnan().sum()), int(x.isinf().sum())
    return finite.square().mean().sqrt().item(), absmax, nan, inf


def _fraction(mask: Tensor) -> float:
    return mask.double().mean().item()


# Maps the index of each row with a non-finite number to the index of the row's first non-finite
# token. The key is None if the number belongs to no single row. The value is None if the number
# belongs to no single token.
_Bad = dict[int | None, int | None]


def _nonfinite_steps(tap: RecordingTap, count: int) -> tuple[NonFiniteStep, ...]:
    forward = {name: _bad_rows(step.outputs, count) for name, step in tap.steps.items()}
    if any(forward.values()):
        return _blame("forward", forward)
    back_to_front = reversed(tap.steps.items())
    backward = {name: _bad_gradients(tap, step, count) for name, step in back_to_front}
    return _blame("backward", backward)


def _bad_gradients(tap: RecordingTap, step: Step, count: int) -> _Bad:
    """Return the rows with non-finite gradients with respect to a step's outputs or inputs.

    The gradient with respect to an output is computed by the backward pass of a later step, as the
    gradient with respect to an input. `_blame` visits the later step first, so it reports that step
    as the producer.
    """
    bad: _Bad = {}
    for tensors in (step.outputs, *zip(*step.inputs, strict=True)):
        if len(gradients := tap.existing_gradients(tensors)) == len(tensors):
            bad = _bad_rows([tap.round(gradient) for gradient in gradients], count) | bad
    if bad or all(g.isfinite().all() for g in tap.existing_gradients(step.parameters)):
        return bad
    return {None: None}  # the gradient of a parameter is a sum over rows


def _bad_rows(tensors: Sequence[Tensor], count: int) -> _Bad:
    """Return the rows with non-finite numbers in a tensor for each row, or in one for all."""
    bad: _Bad = {}
    of_all = len(tensors) < count and tensors[0].dim()
    rows = tensors[0].split(1) if of_all else tensors
    for index, row in enumerate(rows):
        indices = (~row.isfinite()).nonzero()  # in order
        if len(indices):
            bad[index if row.dim() else None] = int(indices[0, 1]) if row.dim() == 3 else None
    return bad


def _blame(phase: Phase, bad_steps: Mapping[str, _Bad]) -> tuple[NonFiniteStep, ...]:
    """Return the steps of a pass with non-finite values, each as a producer or a propagator.

    A producer is the first step of the pass with a non-finite value, or the first one in some row.

    Args:
        phase: The pass.
        bad_steps: Rows with non-finite values by step name, in the order of execution.
    """
    blamed: list[NonFiniteStep] = []
    seen: set[int | None] = {None}
    for step, bad in bad_steps.items():
        if bad:
            new = [row for row in bad if row not in seen]
            row = next(iter(new or bad))
            role: Role = "producer" if new or not blamed else "propagator"
            blamed.append(NonFiniteStep(phase, step, role, row, bad[row]))
            seen.update(new)
    return tuple(blamed)


def _vanishing_or_exploding(layers: Sequence[FlowStep]) -> Iterator[FlowVerdict]:
    sizes = {
        step.name: step.gradient.l2
        for step in layers
        if step.gradient is not None and not step.gradient.nan + step.gradient.inf
    }
    last = sizes.get(layers[-1].name, 0.0)
    for name, l2 in sizes.items() if last else ():
        if l2 < VANISHING * last:
            yield FlowVerdict(name, "vanishing", l2 / last, VANISHING)
        if l2 > EXPLODING * last:
            yield FlowVerdict(name, "exploding", l2 / last, EXPLODING)
