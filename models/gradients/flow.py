"""Where the gradient of a training objective shrinks, grows or breaks on its way to the words.

One forward and one backward pass of the twin, place by place. A place is a step that can break: a
sublayer, a residual sum, a norm, the pooling, a head. Each row goes alone, so that no padding is in
a statistic, and no row spoils another before the objective, where they meet. Only norms and counts
are returned: raw gradients would tell the tokens and the weights.

Sources: half precision and loss scaling, Micikevicius et al. 2018, arXiv:1710.03740; multiple
negatives ranking, Henderson et al. 2017, arXiv:1705.00652.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.encoder import EncoderLayer, Rows
from models.gradients.twin import Row, Twin
from models.pooling import pool

# The bounds of a layer's gradient, relative to that of the last layer.
VANISHING = 1e-3
EXPLODING = 1e3

EMULATED = {"float16": torch.float16, "bfloat16": torch.bfloat16}

Phase = Literal["forward", "backward"]
Role = Literal["producer", "propagator"]


@dataclass(frozen=True)
class Objective:
    """What is differentiated.

    Attributes:
        kind: A name in `OBJECTIVES`.
        vectors: As wide as the twin's: one for "dot", one for each row for "mse" and "cotangent".
    """

    kind: str
    vectors: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class _Kind:
    """How rows' vectors `(B, W)` and given ones `(G, W)` become a number.

    Pairs are rows 2i and 2i + 1, compared by their cosine, whatever is served.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    given: Callable[[int], int] = lambda _rows: 0  # of B rows, G
    least_pairs: int = 0  # 0: rows are single


def _mnrl(vectors: Tensor, _given: Tensor) -> Tensor:
    scores = 20.0 * vectors[::2] @ vectors[1::2].T  # (B / 2, B / 2)
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


# Sums over rows or pairs, but "mse" is a mean over rows and width, and "mnrl" over pairs: how well
# each pair's first row picks its second one among all second ones, by 20 times their cosine.
OBJECTIVES = {
    "cosine": _Kind(lambda vectors, _given: (vectors[::2] * vectors[1::2]).sum(), least_pairs=1),
    "dot": _Kind(lambda vectors, given: (vectors * given).sum(), lambda _rows: 1),
    "mnrl": _Kind(_mnrl, least_pairs=2),  # with one pair there is no negative and no gradient
    "mse": _Kind(F.mse_loss, lambda rows: rows),
    "cotangent": _Kind(lambda vectors, given: (vectors * given).sum(), lambda rows: rows),
}


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
    _check_objective(objective, len(rows), twin.model.width)
    if emulate is not None and emulate not in EMULATED:
        raise ValueError(f"emulate {emulate!r} is not one of {sorted(EMULATED)}")
    if not 0 < loss_scale < math.inf:
        raise ValueError(f"loss_scale is {loss_scale}; it must be positive and finite")

    trace = _Trace(None if emulate is None else EMULATED[emulate])
    twin.model.requires_grad_(True)
    try:
        with torch.enable_grad():
            value = _objective(trace, twin, rows, objective)
            trace.go_back(value * loss_scale)
    finally:
        twin.model.requires_grad_(False)

    places = [_place(trace, name, loss_scale) for name in trace.steps]
    missing = [
        Verdict(place.name, "missing_gradient")
        for place in places
        if place.gradient is None
        or (trace.steps[place.name].parameters and place.parameters is None)
    ]
    config = twin.model.encoder.config
    last_step = "sum2" if config.norm_first else "norm2"
    ends = [f"layers.{index}.{last_step}" for index in range(config.num_layers)]
    layers = [place for place in places if place.name in ends]
    return Flow(
        value.item(), tuple(places), _nonfinite(trace), (*missing, *_vanishing_or_exploding(layers))
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


def _check_objective(objective: Objective, rows: int, width: int) -> None:
    if objective.kind not in OBJECTIVES:
        raise ValueError(f"objective {objective.kind!r} is not one of {sorted(OBJECTIVES)}")
    kind = OBJECTIVES[objective.kind]
    if rows < max(1, 2 * kind.least_pairs) or (kind.least_pairs and rows % 2):
        wanted = f"{kind.least_pairs} or more pairs of rows" if kind.least_pairs else "a row"
        raise ValueError(f"{objective.kind} needs {wanted}; {rows} rows came")
    if len(objective.vectors) != kind.given(rows):
        raise ValueError(
            f"{objective.kind} of {rows} rows needs {kind.given(rows)} vectors; "
            f"{len(objective.vectors)} came"
        )
    for index, vector in enumerate(objective.vectors):
        if len(vector) != width or not all(map(math.isfinite, vector)):
            raise ValueError(f"vector {index} of the objective is not {width} finite numbers")


# Both passes.


class _Rounded(torch.autograd.Function):
    """Rounds forward and backward, as between two operators in half precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ANN401
        ctx.dtype = dtype
        ctx.set_materialize_grads(False)  # a missing gradient must not become one of zeros
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None]:  # noqa: ANN401
        return None if dy is None else dy.to(ctx.dtype).to(dy.dtype), None


@dataclass
class _Step:
    """What went through a place: one entry for each row, but only one for the objective."""

    parameters: tuple[nn.Parameter, ...]
    inputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


class _Trace:
    """Runs steps, and keeps what gradients are taken by."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.steps: dict[str, _Step] = {}
        # Not rounded yet; None where nothing came back.
        self.gradients: Mapping[Tensor, Tensor | None] = {}

    def __call__(
        self, name: str, owner: nn.Module | None, function: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        """Return the function's output at a place that owns the parameters of a module."""
        # Two places may read one tensor: a view for each keeps apart what they send back.
        inputs = tuple(x.view_as(x) for x in inputs)
        y = self.rounded(function(*inputs))
        if not y.requires_grad:  # the place cuts the graph, and a gradient still comes so far
            y.requires_grad_()
        step = self.steps.setdefault(
            name, _Step(() if owner is None else tuple(owner.parameters()))
        )
        step.inputs.append(inputs)
        step.outputs.append(y)
        return y

    def rounded(self, x: Tensor) -> Tensor:
        # The objective is one number, which autocast too leaves wide: the usual first loss scale,
        # 65536, is infinite in float16.
        if self.dtype is None or x.dim() == 0:
            return x
        return cast(Tensor, _Rounded.apply(x, self.dtype))

    def go_back(self, y: Tensor) -> None:
        tensors = [
            x
            for step in self.steps.values()
            for x in (*step.parameters, *step.outputs, *chain(*step.inputs))
        ]
        found = torch.autograd.grad(y, tensors, allow_unused=True)
        self.gradients = dict(zip(tensors, found, strict=True))

    def came_back(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the gradients by those of the tensors that have one."""
        return [g for x in tensors if (g := self.gradients[x]) is not None]


def _objective(at: _Trace, twin: Twin, rows: Sequence[Row], objective: Objective) -> Tensor:
    kind = OBJECTIVES[objective.kind]
    vectors = [_vector(at, twin, row) for row in rows]
    if twin.normalize or kind.least_pairs:
        vectors = [at("normalize", None, F.normalize, vector) for vector in vectors]
    x = torch.cat(vectors)  # (B, W)
    given = torch.tensor(objective.vectors, dtype=x.dtype, device=x.device)  # (G, W)
    return at("objective", None, lambda x: kind.value(x, given), x)


def _vector(at: _Trace, twin: Twin, row: Row) -> Tensor:
    """`SentenceEncoder.forward` of one row, step by step: `(1, W)`."""
    model, encoder, embeddings = twin.model, twin.model.encoder, twin.model.encoder.embeddings
    ids = torch.tensor([row.ids], device=embeddings.word.weight.device)  # (1, L)
    L = len(row.ids)

    def look_up() -> Tensor:
        x = embeddings.word(ids)  # (1, L, D)
        if embeddings.token_type is not None:
            x = x + embeddings.token_type.weight[0]
        return x + embeddings.position(encoder.positions(ids))

    tables = (embeddings.word, embeddings.position, embeddings.token_type)
    x = at("embeddings.sum", nn.ModuleList(table for table in tables if table is not None), look_up)
    x = at("embeddings.norm", embeddings.norm, _after_sum(embeddings.norm), x)
    bias: tuple[Tensor, ...] = ()
    if (relative := encoder.relative_bias) is not None:
        bias = (at("relative_bias", relative, lambda: relative(L)),)  # (1, H, L, L)
    for index, layer in enumerate(encoder.layers):
        x = _layer(at, f"layers.{index}", cast(EncoderLayer, layer), x, bias)
    if encoder.final_norm is not None:
        x = at("final_norm", encoder.final_norm, encoder.final_norm, x)
    pooled = (torch.arange(L, device=x.device) >= row.unpooled).to(x)[None]  # (1, L)
    x = at("pooling", None, lambda x: pool(model.pooling, x, pooled), x)  # (1, W)
    for index, head in enumerate(model.heads):
        x = at(f"heads.{index}", head, head, x)
    return x


def _layer(
    at: _Trace, name: str, layer: EncoderLayer, x: Tensor, bias: tuple[Tensor, ...]
) -> Tensor:
    """`EncoderLayer.encode`, step by step."""

    def attend(x: Tensor, *bias: Tensor) -> Tensor:
        return layer.self_attn(x, Rows(*bias))

    def feed_forward(x: Tensor) -> Tensor:
        x = at(f"{name}.linear1", layer.linear1, lambda x: layer.activation(layer.linear1(x)), x)
        return at(f"{name}.linear2", layer.linear2, layer.linear2, x)

    if layer.norm_first:
        normed = at(f"{name}.norm1", layer.norm1, layer.norm1, x)
        attended = at(f"{name}.attention", layer.self_attn, attend, normed, *bias)
        x = at(f"{name}.sum1", None, torch.add, attended, x)
        normed = at(f"{name}.norm2", layer.norm2, _after_sum(layer.norm2), x)
        return at(f"{name}.sum2", None, torch.add, feed_forward(normed), x)
    attended = at(f"{name}.attention", layer.self_attn, attend, x, *bias)
    x = at(f"{name}.sum1", None, torch.add, attended, x)
    x = at(f"{name}.norm1", layer.norm1, _after_sum(layer.norm1), x)
    x = at(f"{name}.sum2", None, torch.add, feed_forward(x), x)
    return at(f"{name}.norm2", layer.norm2, _after_sum(layer.norm2), x)


def _after_sum(norm: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
    """The twin's own op, with its sum taken before: a place, for it can overflow by itself."""
    return lambda total: norm(total, torch.zeros_like(total))


# What they say.


def _place(trace: _Trace, name: str, loss_scale: float) -> Place:
    step = trace.steps[name]
    y = _flat(step.outputs)
    rms, absmax, nan, inf = _sizes(y)
    forward = Forward(rms, absmax, nan, inf, _fraction(y == 0))

    gradient, exact = None, trace.came_back(step.outputs)
    if len(exact) == len(step.outputs):
        before, after = _flat(exact), _flat(map(trace.rounded, exact))
        rms, absmax, nan, inf = _sizes(after)
        l2 = rms * math.sqrt(len(after) - nan - inf)
        tiny = torch.finfo(trace.dtype or after.dtype).tiny
        underflow = _fraction((before != 0) & (after.abs() < tiny))
        gradient = Gradient(l2 / loss_scale, absmax / loss_scale, nan, inf, underflow)

    parameters, exact = None, trace.came_back(step.parameters)
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


def _nonfinite(trace: _Trace) -> tuple[NonFinite, ...]:
    forward = {name: _bad_rows(step.outputs) for name, step in trace.steps.items()}
    if any(forward.values()):
        return _blamed("forward", forward)
    back_to_front = reversed(trace.steps.items())
    return _blamed("backward", {name: _bad_gradients(trace, step) for name, step in back_to_front})


def _bad_gradients(trace: _Trace, step: _Step) -> _Bad:
    """What is not finite in all that a place sends back, or in the sum of what is sent to it.

    The places behind it, which sent that, are blamed before it.
    """
    bad: _Bad = {}
    for tensors in (step.outputs, *zip(*step.inputs, strict=True)):
        if len(came := trace.came_back(tensors)) == len(tensors):
            bad = _bad_rows([trace.rounded(g) for g in came]) | bad
    if bad or all(g.isfinite().all() for g in trace.came_back(step.parameters)):
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
