"""Where the gradient of a training objective shrinks, grows or breaks on its way to the words.

One forward and one backward pass of the twin, place by place. A place is a step that can break: a
sublayer, a residual sum, a norm, the pooling, a head. Each row goes alone, so that no padding is in
a statistic, and no row spoils another before the objective, where they meet. Only norms and counts
are returned: raw gradients would tell the tokens and the weights.

Source: half precision and loss scaling, Micikevicius et al. 2018, arXiv:1710.03740.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from models.gradients.flow_passes import Passes, Step, objective_of
from models.gradients.objectives import Objective, check_objective
from models.gradients.twin import Row, Twin

# The bounds of a layer's gradient, relative to that of the last layer.
VANISHING = 1e-3
EXPLODING = 1e3

EMULATED = {"float16": torch.float16, "bfloat16": torch.bfloat16}

Phase = Literal["forward", "backward"]
Role = Literal["producer", "propagator"]


@dataclass(frozen=True)
class Forward:
    """A place's output, all rows together. Sizes are of its finite values, NaN if it has none."""

    rms: float
    absmax: float
    nan: int
    inf: int
    zero_fraction: float


@dataclass(frozen=True)
class Gradient:
    """The gradient by a place's output, counted as in `Forward`.

    Attributes:
        underflow_fraction: Part of the values that are not zero before they are rounded, and zero
            or subnormal after; where nothing is rounded, that are subnormal.
    """

    l2: float
    absmax: float
    nan: int
    inf: int
    underflow_fraction: float


@dataclass(frozen=True)
class ParameterGradient:
    """The gradient by all parameters of a place; not finite where one of its values is not."""

    l2: float
    ratio_to_weights: float


@dataclass(frozen=True)
class Place:
    """A step of the forward pass, such as "layers.0.attention".

    Attributes:
        gradient: None where no gradient came back to its output.
        parameters: None where it has none, or no gradient came to one of them.
    """

    name: str
    forward: Forward
    gradient: Gradient | None
    parameters: ParameterGradient | None


@dataclass(frozen=True)
class NonFinite:
    """A place with NaN or infinity in a pass.

    Attributes:
        role: A producer made it in some row out of what was finite; a propagator handed it on.
        row: The first row that it was made in, or else is in; None where rows cannot be told apart.
        token: The first such token of that row; None where tokens cannot be told apart.
    """

    phase: Phase
    place: str
    role: Role
    row: int | None
    token: int | None


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a place's gradient.

    Attributes:
        place: For "vanishing" and "exploding" the one that a layer ends in. "missing_gradient":
            nothing came to its output or to one of its parameters.
        ratio: l2 of the gradient there over that at the end of the last layer.
        threshold: The bound that the ratio is beyond.
    """

    place: str
    kind: Literal["vanishing", "exploding", "missing_gradient"]
    ratio: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Flow:
    """What `flow` found.

    Attributes:
        objective: Its value, not scaled.
        places: In the order of the forward pass.
        nonfinite: In the order of their pass, which is the backward one only if the forward one is
            finite.
        verdicts: Empty where all is well.
    """

    objective: float
    places: tuple[Place, ...]
    nonfinite: tuple[NonFinite, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def first_nonfinite(self) -> NonFinite | None:
        """Where the first NaN or infinity was made."""
        return self.nonfinite[0] if self.nonfinite else None


def flow(
    twin: Twin,
    rows: Sequence[Row],
    objective: Objective,
    *,
    emulate: str | None = None,
    loss_scale: float = 1.0,
) -> Flow:
    """Follow rows forward through the twin, and the gradient of their objective back.

    A layer is judged where its gradient and that of the last layer are finite and the latter is
    not zero.

    Args:
        twin: Its parameters are frozen, and are so again afterwards.
        rows: B of them, for one objective.
        objective: Of vectors that have unit length where `twin.normalize` is set or rows are pairs.
        emulate: A name in `EMULATED`: what comes out of a place is rounded to that dtype, and so is
            the gradient that comes back to it. Inside a place, and for weights, their gradients and
            the objective's value, the twin's own dtype stays.
        loss_scale: Multiplies the objective before the backward pass, and is divided out of sizes
            and ratios after it; NaN, infinity and underflow are counted before.

    Raises:
        ValueError: A row, the objective, `emulate` or `loss_scale` is not what it may be.
    """
    _check_rows(twin, rows)
    check_objective(objective, len(rows), twin.model.width)
    if emulate is not None and emulate not in EMULATED:
        raise ValueError(f"emulate {emulate!r} is not one of {sorted(EMULATED)}")
    if not 0 < loss_scale < math.inf:
        raise ValueError(f"loss_scale is {loss_scale}; it must be positive and finite")

    passes = Passes(None if emulate is None else EMULATED[emulate])
    twin.model.requires_grad_(True)
    try:
        with torch.enable_grad():
            value = objective_of(passes, twin, rows, objective)
            passes.go_back(value * loss_scale)
    finally:
        twin.model.requires_grad_(False)

    places = [_place(passes, name, loss_scale) for name in passes.steps]
    missing = [
        Verdict(place.name, "missing_gradient")
        for place in places
        if place.gradient is None
        or (passes.steps[place.name].parameters and place.parameters is None)
    ]
    config = twin.model.encoder.config
    last_step = "sum2" if config.norm_first else "norm2"
    ends = [f"layers.{index}.{last_step}" for index in range(config.num_layers)]
    layers = [place for place in places if place.name in ends]
    return Flow(
        value.item(),
        tuple(places),
        _nonfinite(passes),
        (*missing, *_vanishing_or_exploding(layers)),
    )


def _check_rows(twin: Twin, rows: Sequence[Row]) -> None:
    longest, ids = twin.model.encoder.config.max_tokens, twin.model.encoder.config.vocab_size
    for index, row in enumerate(rows):
        if not 1 <= len(row.ids) <= longest:
            raise ValueError(f"row {index} has {len(row.ids)} tokens; 1 to {longest} are possible")
        if not 0 <= min(row.ids) <= max(row.ids) < ids:
            raise ValueError(f"row {index} has a token id outside of 0 to {ids - 1}")
        if not 0 <= row.unpooled < len(row.ids):
            raise ValueError(
                f"row {index} leaves {row.unpooled} of its {len(row.ids)} tokens unpooled"
            )


def _place(passes: Passes, name: str, loss_scale: float) -> Place:
    step = passes.steps[name]
    y = _flat(step.outputs)
    rms, absmax, nan, inf = _sizes(y)
    forward = Forward(rms, absmax, nan, inf, _fraction(y == 0))

    gradient, exact = None, passes.came_back(step.outputs)
    if len(exact) == len(step.outputs):
        before, after = _flat(exact), _flat(map(passes.rounded, exact))
        rms, absmax, nan, inf = _sizes(after)
        l2 = rms * math.sqrt(len(after) - nan - inf)
        tiny = torch.finfo(passes.dtype or after.dtype).tiny
        underflow = _fraction((before != 0) & (after.abs() < tiny))
        gradient = Gradient(l2 / loss_scale, absmax / loss_scale, nan, inf, underflow)

    parameters, exact = None, passes.came_back(step.parameters)
    if exact and len(exact) == len(step.parameters):
        norm = _norm(exact) / loss_scale
        parameters = ParameterGradient(norm.item(), (norm / _norm(step.parameters)).item())
    return Place(name, forward, gradient, parameters)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.detach().flatten() for x in tensors])


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    # Tensor by tensor: a table of words is too large to be copied.
    norms = [torch.linalg.vector_norm(x.detach(), dtype=torch.float64) for x in tensors]
    return torch.stack(norms).norm()


def _sizes(x: Tensor) -> tuple[float, float, int, int]:
    """Rms and absmax of what is finite, and the counts of NaN and infinity."""
    finite = x[x.isfinite()].double()
    absmax = finite.abs().max().item() if len(finite) else math.nan
    nan, inf = int(x.isnan().sum()), int(x.isinf().sum())
    return finite.square().mean().sqrt().item(), absmax, nan, inf


def _fraction(mask: Tensor) -> float:
    return mask.double().mean().item()


# Each row with something that is not finite -> its first such token; None where not told apart.
_Bad = dict[int | None, int | None]


def _nonfinite(passes: Passes) -> tuple[NonFinite, ...]:
    forward = {name: _bad_rows(step.outputs) for name, step in passes.steps.items()}
    if any(forward.values()):
        return _blamed("forward", forward)
    back_to_front = reversed(passes.steps.items())
    return _blamed("backward", {name: _bad_gradients(passes, step) for name, step in back_to_front})


def _bad_gradients(passes: Passes, step: Step) -> _Bad:
    """What is not finite in all that a place sends back, or in the sum of what is sent to it.

    The places behind it, which sent that, are blamed before it.
    """
    bad: _Bad = {}
    for tensors in (step.outputs, *zip(*step.inputs, strict=True)):
        if len(came := passes.came_back(tensors)) == len(tensors):
            bad = _bad_rows([passes.rounded(g) for g in came]) | bad
    if bad or all(g.isfinite().all() for g in passes.came_back(step.parameters)):
        return bad
    return {None: None}  # rows are summed in it


def _bad_rows(tensors: Sequence[Tensor]) -> _Bad:
    bad: _Bad = {}
    rows = [row for x in tensors for row in (x.split(1) if x.dim() else [x])]
    for index, row in enumerate(rows):
        places = (~row.isfinite()).nonzero()  # in order
        if len(places):
            bad[index if row.dim() else None] = int(places[0, 1]) if row.dim() == 3 else None
    return bad


def _blamed(phase: Phase, bad_places: Mapping[str, _Bad]) -> tuple[NonFinite, ...]:
    """Blame the place that comes first in the pass, for each row by itself."""
    found: list[NonFinite] = []
    seen: set[int | None] = {None}
    for place, bad in bad_places.items():
        if bad:
            new = [row for row in bad if row not in seen]
            row = next(iter(new or bad))
            role: Role = "producer" if new or not found else "propagator"
            found.append(NonFinite(phase, place, role, row, bad[row]))
            seen.update(new)
    return tuple(found)


def _vanishing_or_exploding(layers: Sequence[Place]) -> Iterator[Verdict]:
    sizes = {
        place.name: place.gradient.l2
        for place in layers
        if place.gradient is not None and not place.gradient.nan + place.gradient.inf
    }
    last = sizes.get(layers[-1].name, 0.0)
    for name, l2 in sizes.items() if last else ():
        if l2 < VANISHING * last:
            yield Verdict(name, "vanishing", l2 / last, VANISHING)
        if l2 > EXPLODING * last:
            yield Verdict(name, "exploding", l2 / last, EXPLODING)
