import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.artifact import Artifact
from models.encoder import Activation, EncoderLayer, Rows
from models.gradients.flow import EXPLODING, VANISHING, Flow, Place, flow
from models.gradients.objectives import Objective
from models.gradients.twin import Row, Twin
from models.sentence_encoder import DenseHead, SentenceEncoder
from tests.models.gradients.toys import A, B, toy_twin

C = Row([0, 5, 2])
E = Row([0, 17, 30, 30, 12, 11, 2], unpooled=2)
COSINE = Objective("cosine")

KINDS: list[dict[str, Any]] = [
    {},
    {"norm_first": True},
    {"relative_buckets": 8, "position_padding_id": 1, "type_vocab_size": 0},
    {"norm_first": True, "relative_buckets": 8, "pooling": "cls", "normalize": False},
]


def with_heads(twin: Twin) -> Twin:
    """Two poolings side by side, and two dense heads."""
    torch.manual_seed(1)
    heads = [DenseHead(32, 12, True, "Tanh"), DenseHead(12, 8, False, "Identity")]
    model = SentenceEncoder(twin.model.encoder, ["mean", "max"], heads).double().eval()
    return Twin(model.requires_grad_(False), twin.normalize)


def layer(twin: Twin, index: int) -> EncoderLayer:
    return cast(EncoderLayer, twin.model.encoder.layers[index])


def at(found: Flow, name: str) -> Place:
    return next(place for place in found.places if place.name == name)


def names(found: Flow) -> list[str]:
    return [place.name for place in found.places]


def gradient_l2(found: Flow, name: str) -> float:
    gradient = at(found, name).gradient
    assert gradient is not None
    return gradient.l2


def cosines(vectors: Tensor) -> Tensor:
    return F.cosine_similarity(vectors[::2], vectors[1::2]).sum()


def vectors_of(twin: Twin, rows: Sequence[Row]) -> Tensor:
    """What the whole model makes of each row."""
    vectors = []
    for row in rows:
        ones = torch.ones(1, len(row.ids), dtype=torch.float64)
        pooled = ones.clone()
        pooled[:, : row.unpooled] = 0
        vectors.append(twin.model(torch.tensor([row.ids]), ones, pooled))
    return torch.cat(vectors)


def layer_gradients(twin: Twin, index: int, rows: Sequence[Row]) -> list[Tensor]:
    """The cosines' gradients `(L, D)` by a layer's output, each by an input of a function."""
    point = twin.points[2 + index]
    inputs = [twin.tokens(point, row).requires_grad_() for row in rows]
    vectors = [twin.onwards(point, x[None], row) for x, row in zip(inputs, rows, strict=True)]
    return list(torch.autograd.grad(cosines(torch.cat(vectors)), inputs))


def layer_gradient(twin: Twin, index: int, rows: Sequence[Row]) -> float:
    return torch.cat([g.flatten() for g in layer_gradients(twin, index, rows)]).norm().item()


def sick(x: Tensor, place: tuple[int, ...]) -> Tensor:
    """The same tensor, with a backward pass that makes one value NaN."""

    def spoil(dy: Tensor) -> Tensor:
        dy = dy.clone()
        dy[place] = math.nan
        return dy

    y = x.clone()
    y.register_hook(spoil)
    return y


# What a place is.


def test_places_are_in_the_order_of_the_forward_pass() -> None:
    of_a_layer = ["attention", "sum1", "norm1", "linear1", "linear2", "sum2", "norm2"]
    assert names(flow(toy_twin(), [A, B], COSINE)) == [
        "embeddings.sum",
        "embeddings.norm",
        *(f"layers.{index}.{step}" for index in range(2) for step in of_a_layer),
        *("pooling", "normalize", "objective"),
    ]
    of_a_layer = ["norm1", "attention", "sum1", "norm2", "linear1", "linear2", "sum2"]
    twin = with_heads(toy_twin(norm_first=True, relative_buckets=8, normalize=False))
    assert names(flow(twin, [A], Objective("dot", [[1.0] * 8]))) == [
        "embeddings.sum",
        "embeddings.norm",
        "relative_bias",
        *(f"layers.{index}.{step}" for index in range(2) for step in of_a_layer),
        *("final_norm", "pooling", "heads.0", "heads.1", "objective"),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [False, True])
def test_the_steps_make_the_vector_that_the_model_makes(kind: dict[str, Any], heads: bool) -> None:
    twin = toy_twin(**{**kind, "normalize": False})
    twin = with_heads(twin) if heads else twin
    weights = torch.linspace(-1, 2, twin.model.width, dtype=torch.float64)
    for row in (A, E):
        found = flow(twin, [row], Objective("dot", [weights.tolist()]))
        assert found.objective == pytest.approx((twin.vector(row) @ weights).item(), rel=1e-12)


def test_no_padding_is_in_the_statistics() -> None:
    twin = toy_twin(activation="relu", type_vocab_size=0)
    found = flow(twin, [A, C], COSINE)
    tokens = torch.cat([twin.tokens("embeddings", row) for row in (A, C)])  # (9, 16)
    forward = at(found, "embeddings.norm").forward
    assert forward.rms == pytest.approx(tokens.square().mean().sqrt().item())
    assert forward.absmax == pytest.approx(tokens.abs().max().item())
    assert (forward.nan, forward.inf, forward.zero_fraction) == (0, 0, 0.0)

    hidden: list[Tensor] = []
    handle = layer(twin, 1).linear1.register_forward_hook(lambda *io: hidden.append(io[2]))
    vectors_of(twin, [A, C])
    handle.remove()
    zeros = torch.cat([(x <= 0).flatten() for x in hidden]).double().mean().item()
    assert 0.2 < zeros < 0.8
    assert at(found, "layers.1.linear1").forward.zero_fraction == pytest.approx(zeros)


def test_only_plain_numbers_and_names_are_returned() -> None:
    def leaves(value: object) -> list[object]:
        if isinstance(value, dict):
            return [leaf for child in value.values() for leaf in leaves(child)]
        if isinstance(value, list | tuple):
            return [leaf for child in value for leaf in leaves(child)]
        return [value]

    twin = toy_twin()
    layer(twin, 0).linear1.weight[0, 0] = math.nan
    found = flow(twin, [A, B], COSINE)
    assert {type(leaf) for leaf in leaves(asdict(found))} == {str, int, float, type(None)}


# Gradients.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [False, True])
def test_parameter_gradients_add_up_to_the_global_norm(kind: dict[str, Any], heads: bool) -> None:
    twin = with_heads(toy_twin(**kind)) if heads else toy_twin(**kind)
    rows = [A, B, C, E]
    found = flow(twin, rows, COSINE)
    parameters = list(twin.model.requires_grad_(True).parameters())
    gradients = torch.autograd.grad(cosines(vectors_of(twin, rows)), parameters)
    wanted = sum(g.square().sum().item() for g in gradients)
    parts = [place.parameters.l2**2 for place in found.places if place.parameters]
    assert sum(parts) == pytest.approx(wanted, rel=1e-10)

    owner = layer(twin, 1).linear2
    norms = [
        torch.cat([x.flatten() for x in tensors]).norm().item()
        for tensors in (
            torch.autograd.grad(cosines(vectors_of(twin, rows)), list(owner.parameters())),
            list(owner.parameters()),
        )
    ]
    place = at(found, "layers.1.linear2").parameters
    assert place is not None
    assert place.ratio_to_weights == pytest.approx(norms[0] / norms[1], rel=1e-10)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_gradient_by_a_layers_output_is_autograds(norm_first: bool) -> None:
    twin = toy_twin(num_layers=3, norm_first=norm_first)
    found = flow(twin, [A, B, C, E], COSINE)
    for index in range(2):  # the last point is behind the final norm
        name = f"layers.{index}.{'sum2' if norm_first else 'norm2'}"
        wanted = layer_gradient(twin, index, [A, B, C, E])
        assert gradient_l2(found, name) == pytest.approx(wanted, rel=1e-10)


def ranking_loss(vectors: Tensor) -> Tensor:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(torch.nn.Identity())
    return loss.compute_loss_from_embeddings([vectors[::2], vectors[1::2]], torch.arange(2))


GIVEN = torch.linspace(-2, 3, 64, dtype=torch.float64).view(4, 16)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("kind", "given", "oracle"),
    [
        ("cosine", GIVEN[:0], lambda _served, raw: cosines(raw)),
        ("mnrl", GIVEN[:0], lambda _served, raw: ranking_loss(raw)),
        ("dot", GIVEN[:1], lambda served, _raw: (served @ GIVEN[0]).sum()),
        ("mse", GIVEN, lambda served, _raw: (served - GIVEN).square().mean()),
        ("cotangent", GIVEN, lambda served, _raw: torch.einsum("bw,bw->", served, GIVEN)),
    ],
)
def test_an_objective_and_its_gradient_are_those_of_plain_formulas(
    kind: str, given: Tensor, oracle: Callable[[Tensor, Tensor], Tensor], normalize: bool
) -> None:
    twin, rows = toy_twin(normalize=normalize), [A, B, C, E]
    found = flow(twin, rows, Objective(kind, given.tolist()))
    raw = torch.stack([twin.vector(row) for row in rows]).requires_grad_()
    value = oracle(raw / raw.norm(dim=1, keepdim=True) if normalize else raw, raw)
    assert found.objective == pytest.approx(value.item(), rel=1e-9)
    gradient = torch.autograd.grad(value, raw)[0]
    assert gradient_l2(found, "pooling") == pytest.approx(gradient.norm().item(), rel=1e-9)


@pytest.mark.parametrize("failing", ["nothing", "forward", "backward"])
def test_parameters_are_frozen_again(failing: str) -> None:
    def fail(_: Tensor) -> Tensor:
        raise RuntimeError("failed on purpose")

    def fail_backward(x: Tensor) -> Tensor:
        y = x.clone()
        y.register_hook(fail)
        return y

    activations: dict[str, Activation] = {
        "nothing": F.gelu,
        "forward": fail,
        "backward": fail_backward,
    }
    twin = toy_twin()
    layer(twin, 1).activation = activations[failing]
    if failing == "nothing":
        with torch.no_grad():  # as a caller may have set it
            flow(twin, [A, B], COSINE)
    else:
        with pytest.raises(RuntimeError, match="failed on purpose"):
            flow(twin, [A, B], COSINE)
    assert not any(p.requires_grad for p in twin.model.parameters())
    assert all(p.grad is None for p in twin.model.parameters())


# NaN and infinity.


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("index", [0, 2])
def test_a_bad_weight_is_reported_at_its_layer(norm_first: bool, value: float, index: int) -> None:
    twin = toy_twin(num_layers=3, norm_first=norm_first)
    layer(twin, index).linear1.weight[3, 5] = value
    found = flow(twin, [A, B], COSINE)
    first = found.first_nonfinite
    assert first is not None
    assert (first.phase, first.place, first.role) == (
        "forward",
        f"layers.{index}.linear1",
        "producer",
    )
    assert (first.row, first.token) == (0, 0)
    behind = names(found)[names(found).index(first.place) + 1 :]
    assert [(bad.place, bad.role) for bad in found.nonfinite[1:]] == [
        (name, "propagator") for name in behind
    ]
    forward = at(found, first.place).forward
    assert forward.nan + forward.inf > 0
    assert math.isfinite(forward.rms)
    assert math.isfinite(forward.absmax)
    assert math.isnan(at(found, "objective").forward.rms)


def test_a_bad_word_is_found_in_its_row_at_its_token() -> None:
    twin = toy_twin()
    twin.model.encoder.embeddings.word.weight[15, 2] = math.nan
    first = flow(twin, [A, B], COSINE).first_nonfinite
    assert first is not None
    assert (first.place, first.row, first.token) == ("embeddings.sum", 1, 3)
    assert at(flow(twin, [A, B], COSINE), "embeddings.sum").forward.nan == 1


def test_each_row_has_a_producer_of_its_own() -> None:
    twin = toy_twin()
    shorter, longer = len(C.ids), len(A.ids)

    def nan_at(length: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x * (math.nan if x.shape[1] == length else 1.0)

    layer(twin, 0).activation = nan_at(longer)
    layer(twin, 1).activation = nan_at(shorter)
    found = flow(twin, [A, C], COSINE).nonfinite
    producers = [(bad.place, bad.row) for bad in found if bad.role == "producer"]
    assert producers == [("layers.0.linear1", 0), ("layers.1.linear1", 1)]
    assert found[-1].place == "objective"
    assert found[-1].row is None


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_gradient_that_turns_nan_is_reported_at_the_place_that_it_leaves(
    norm_first: bool,
) -> None:
    twin = toy_twin(num_layers=3, norm_first=norm_first)
    layer(twin, 1).activation = lambda x: x + (0 * x).sqrt()  # 0 times infinity
    found = flow(twin, [A, B], COSINE)
    first = found.first_nonfinite
    assert first is not None
    assert (first.phase, first.place, first.role) == ("backward", "layers.1.linear1", "producer")
    place = at(found, first.place)
    assert place.gradient is not None
    assert place.parameters is not None
    assert place.gradient.nan + place.gradient.inf == 0
    assert math.isnan(place.parameters.l2)
    order = [names(found).index(bad.place) for bad in found.nonfinite]
    assert order == list(range(order[0], -1, -1))
    assert {bad.role for bad in found.nonfinite[1:]} == {"propagator"}


def test_a_sublayer_is_told_from_the_residual_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = toy_twin()
    healthy = layer_gradients(twin, 0, [A, B])
    attention = layer(twin, 1).self_attn
    ordinary = attention.forward

    def forward(x: Tensor, rows: Rows) -> Tensor:
        return ordinary(sick(x, (0, 3, 1)) if x.shape[1] == len(B.ids) else x, rows)

    monkeypatch.setattr(attention, "forward", forward)
    found = flow(twin, [A, B], COSINE)
    first, last = found.nonfinite[0], found.nonfinite[-1]
    assert (first.phase, first.place) == ("backward", "layers.1.attention")
    assert (first.row, first.token) == (1, 3)
    assert (last.place, last.role, last.row) == ("embeddings.sum", "propagator", 1)
    # The sizes beside the count are those of the other values.
    healthy[1][3, 1] = 0.0
    wanted = torch.cat([g.flatten() for g in healthy]).norm().item()
    gradient = at(found, "layers.0.norm2").gradient
    assert gradient is not None
    assert (gradient.nan, gradient.inf) == (1, 0)
    assert gradient.l2 == pytest.approx(wanted, rel=1e-10)


def test_a_parameters_gradient_alone_is_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = toy_twin()
    linear = layer(twin, 1).linear2

    def forward(x: Tensor) -> Tensor:
        return F.linear(x, sick(linear.weight, (0, 0)), linear.bias)

    monkeypatch.setattr(linear, "forward", forward)
    found = flow(twin, [A, B], COSINE).nonfinite
    assert [(bad.phase, bad.place, bad.role, bad.row) for bad in found] == [
        ("backward", "layers.1.linear2", "producer", None)
    ]


def test_normalising_a_vector_of_zeros_overflows_in_float16() -> None:
    twin = toy_twin()
    norm = layer(twin, 1).norm2
    norm.weight.zero_()
    norm.bias.zero_()
    objective = Objective("dot", [[1.0] * 16])
    assert flow(twin, [A], objective).first_nonfinite is None
    first = flow(twin, [A], objective, emulate="float16").first_nonfinite
    assert first is not None
    assert (first.phase, first.place, first.row, first.token) == ("backward", "normalize", 0, None)


def test_gradients_that_overflow_when_added_are_blamed_on_the_place_they_meet_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twin = toy_twin(num_layers=1, dim_feedforward=16, normalize=False)
    only = layer(twin, 0)
    monkeypatch.setattr(only.norm2, "forward", torch.add)
    only.activation = lambda x: x
    for linear in (only.linear1, only.linear2):
        linear.weight.copy_(torch.eye(16))
    one = Row([0])
    objective = Objective("dot", [[1.0] * 16])
    found = flow(twin, [one], objective, emulate="float16", loss_scale=40000.0)
    first = found.first_nonfinite
    assert first is not None
    assert (first.phase, first.place) == ("backward", "layers.0.norm1")
    by_linear1 = at(found, "layers.0.linear1").gradient
    by_norm1 = at(found, "layers.0.norm1").gradient
    assert by_linear1 is not None
    assert by_norm1 is not None
    assert (by_linear1.inf, by_norm1.inf) == (0, 16)


# Half precision.


def test_float16_overflows_where_the_exact_values_are_too_large() -> None:
    twin = toy_twin(activation="relu")
    layer(twin, 1).linear1.weight.mul_(1e5)
    hidden: list[Tensor] = []
    handle = layer(twin, 1).linear1.register_forward_hook(lambda *io: hidden.append(io[2]))
    twin.vector(A)
    handle.remove()
    wanted = int((hidden[0] >= 65520).sum())
    assert 0 < wanted < hidden[0].numel() / 2
    found = flow(twin, [A, A], COSINE, emulate="float16")
    assert at(found, "layers.1.linear1").forward.inf == 2 * wanted
    first = found.first_nonfinite
    assert first is not None
    assert (first.phase, first.place, first.role) == ("forward", "layers.1.linear1", "producer")
    assert flow(twin, [A, A], COSINE, emulate="bfloat16").first_nonfinite is None
    assert flow(twin, [A, A], COSINE).first_nonfinite is None


@pytest.mark.parametrize("emulate", ["float16", "bfloat16"])
def test_what_leaves_a_place_and_what_comes_back_is_rounded(emulate: str) -> None:
    twin = toy_twin(norm_first=True, relative_buckets=8)
    exact, found = (flow(twin, [A, B], COSINE, emulate=name) for name in (None, emulate))
    dtype: torch.dtype = getattr(torch, emulate)
    for ours, theirs in zip(found.places[:-1], exact.places[:-1], strict=True):
        for half, whole in ((ours.forward, theirs.forward), (ours.gradient, theirs.gradient)):
            assert half is not None
            assert whole is not None
            rounded = torch.tensor(half.absmax, dtype=torch.float64).to(dtype).double().item()
            assert half.absmax == rounded
            assert half.absmax == pytest.approx(whole.absmax, rel=0.1)
            assert half.absmax != whole.absmax


def test_loss_scale_rescues_what_underflows_in_float16() -> None:
    twin = toy_twin(normalize=False)
    objective = Objective("cotangent", [[1e-7] * 16])
    exact = flow(twin, [A], objective)
    lost = flow(twin, [A], objective, emulate="float16")
    saved = flow(twin, [A], objective, emulate="float16", loss_scale=2.0**24)
    for name in ("layers.0.norm2", "layers.1.linear1", "layers.1.norm2"):
        gradients = [at(found, name).gradient for found in (exact, lost, saved)]
        assert gradients[0] is not None
        assert gradients[1] is not None
        assert gradients[2] is not None
        assert gradients[0].underflow_fraction == 0.0
        assert gradients[1].l2 < 0.5 * gradients[0].l2
        assert gradients[2].l2 == pytest.approx(gradients[0].l2, rel=2e-3)
        assert gradients[2].absmax == pytest.approx(gradients[0].absmax, rel=2e-3)
    wanted, nothing, found = (x.places[0].parameters for x in (exact, lost, saved))
    assert wanted is not None
    assert nothing is not None
    assert found is not None
    assert nothing.l2 == 0.0  # not rounded itself: what came was
    assert found.l2 == pytest.approx(wanted.l2, rel=2e-3)
    assert found.ratio_to_weights == pytest.approx(wanted.ratio_to_weights, rel=2e-3)


def test_underflow_is_the_part_that_is_not_zero_and_becomes_zero_or_subnormal() -> None:
    twin = toy_twin(normalize=False)
    # In float16 the second becomes zero, the third is subnormal; the fourth was zero before.
    given = [1.0, 1e-9, 1e-6, 0.0] * 4
    gradient = at(flow(twin, [A], Objective("dot", [given]), emulate="float16"), "pooling").gradient
    assert gradient is not None
    assert gradient.underflow_fraction == 0.5
    gradient = at(flow(twin, [A], Objective("dot", [given])), "pooling").gradient
    assert gradient is not None
    assert gradient.underflow_fraction == 0.0


# Verdicts.


def test_a_healthy_encoder_has_no_verdict() -> None:
    for norm_first in (False, True):
        assert flow(toy_twin(num_layers=3, norm_first=norm_first), [A, B], COSINE).verdicts == ()


def check_verdicts(twin: Twin, kind: str, threshold: float) -> None:
    found = flow(twin, [A, B], COSINE)
    assert [(verdict.place, verdict.kind) for verdict in found.verdicts] == [
        ("layers.0.norm2", kind),
        ("layers.1.norm2", kind),
    ]
    last = layer_gradient(twin, 2, [A, B])
    for index, verdict in enumerate(found.verdicts):
        wanted = layer_gradient(twin, index, [A, B]) / last
        assert verdict.ratio == pytest.approx(wanted, rel=1e-8)
        assert verdict.threshold == threshold


def test_a_huge_bias_before_a_norm_makes_gradients_vanish() -> None:
    twin = toy_twin(num_layers=3)
    layer(twin, 2).self_attn.out_proj.bias.mul_(1e6)
    check_verdicts(twin, "vanishing", VANISHING)


def test_tiny_tokens_before_a_norm_make_gradients_explode() -> None:
    twin = toy_twin(num_layers=3)
    norm, attention = layer(twin, 1).norm2, layer(twin, 2).self_attn
    norm.weight.mul_(1e-6)
    norm.bias.zero_()
    assert attention.in_proj_bias is not None
    attention.in_proj_bias.zero_()
    attention.out_proj.bias.zero_()
    found = flow(twin, [A, B], COSINE)
    assert [(verdict.place, verdict.kind) for verdict in found.verdicts] == [
        ("layers.1.norm2", "exploding")
    ]
    verdict = found.verdicts[0]
    wanted = layer_gradient(twin, 1, [A, B]) / layer_gradient(twin, 2, [A, B])
    assert verdict.ratio == pytest.approx(wanted, rel=1e-8)
    assert verdict.threshold == EXPLODING


def test_a_pre_norm_layer_is_judged_at_its_second_sum() -> None:
    twin = toy_twin(norm_first=True)
    norm, first = twin.model.encoder.embeddings.norm, layer(twin, 0)
    norm.weight.mul_(1e-6)
    for parameters in (norm.bias, *first.self_attn.out_proj.parameters(), first.linear2.weight):
        parameters.zero_()
    first.linear2.bias.mul_(1e-6)
    found = flow(twin, [A, B], COSINE)
    assert [(verdict.place, verdict.kind) for verdict in found.verdicts] == [
        ("layers.0.sum2", "exploding")
    ]
    ratio = gradient_l2(found, "layers.0.sum2") / gradient_l2(found, "layers.1.sum2")
    assert found.verdicts[0].ratio == pytest.approx(ratio)


@pytest.mark.parametrize("emulate", [None, "float16"])
def test_a_place_that_lets_no_gradient_through_is_named(emulate: str | None) -> None:
    twin = toy_twin()
    layer(twin, 1).activation = lambda x: F.gelu(x).detach()
    found = flow(twin, [A, B], COSINE, emulate=emulate)
    assert [(verdict.place, verdict.kind) for verdict in found.verdicts] == [
        ("layers.1.linear1", "missing_gradient")
    ]
    assert at(found, "layers.1.linear1").gradient is not None
    assert at(found, "layers.1.linear1").parameters is None


def test_one_parameter_without_a_gradient_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = toy_twin()
    linear = layer(twin, 1).linear2
    monkeypatch.setattr(
        linear, "forward", lambda x: F.linear(x, linear.weight, linear.bias.detach())
    )
    found = flow(twin, [A, B], COSINE)
    assert [(verdict.place, verdict.kind) for verdict in found.verdicts] == [
        ("layers.1.linear2", "missing_gradient")
    ]
    assert at(found, "layers.1.linear2").gradient is not None


class Silent(torch.autograd.Function):
    """A fused norm whose backward pass was forgotten."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, residual: Tensor) -> Tensor:  # noqa: ANN401
        return x + residual

    @staticmethod
    def backward(_ctx: Any, _dy: Tensor) -> tuple[None, None]:  # noqa: ANN401
        return None, None


@pytest.mark.parametrize("emulate", [None, "float16"])
@pytest.mark.parametrize(
    "norm",
    [
        Silent.apply,
        lambda x, residual: (x + residual).detach(),
        # In one row of two.
        lambda x, residual: (x + residual).detach() if x.shape[1] == len(B.ids) else x + residual,
    ],
)
def test_a_norm_without_a_gradient_leaves_all_before_it_without_one(
    norm: Callable[[Tensor, Tensor], Tensor], emulate: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = toy_twin()
    monkeypatch.setattr(layer(twin, 0).norm2, "forward", norm)
    found = flow(twin, [A, B], COSINE, emulate=emulate)
    wanted = names(found)[: names(found).index("layers.0.norm2") + 1]
    assert [verdict.place for verdict in found.verdicts] == wanted
    assert {verdict.kind for verdict in found.verdicts} == {"missing_gradient"}
    assert at(found, "layers.0.sum2").gradient is None
    assert at(found, "layers.0.norm2").gradient is not None


# Bad input.


@pytest.mark.parametrize(
    ("rows", "objective", "options", "message"),
    [
        ([A], COSINE, {}, "cosine needs 1 or more pairs of rows; 1 rows came"),
        ([], COSINE, {}, "cosine needs 1 or more pairs of rows; 0 rows came"),
        ([A, B, C], COSINE, {}, "cosine needs 1 or more pairs of rows; 3 rows came"),
        ([A, B], Objective("mnrl"), {}, "mnrl needs 2 or more pairs of rows; 2 rows came"),
        ([], Objective("mse"), {}, "mse needs a row; 0 rows came"),
        ([A], Objective("hinge"), {}, r"objective 'hinge' is not one of \['cosine', 'cotangent'"),
        ([A, B], Objective("mse", [[0.0] * 16]), {}, "mse of 2 rows needs 2 vectors; 1 came"),
        ([A, B], Objective("cosine", [[0.0] * 16]), {}, "needs 0 vectors; 1 came"),
        ([A], Objective("dot", [[0.0] * 15]), {}, "vector 0 of the objective is not 16 finite"),
        ([A], Objective("dot", [[math.nan] * 16]), {}, "vector 0 of the objective is not 16"),
        ([A, Row([])], COSINE, {}, "row 1 has 0 tokens; 1 to 12 are possible"),
        ([A, Row([0] * 13)], COSINE, {}, "row 1 has 13 tokens; 1 to 12 are possible"),
        ([Row([0, 40]), A], COSINE, {}, "row 0 has a token id outside of 0 to 39"),
        ([Row([0, -1]), A], COSINE, {}, "row 0 has a token id outside of 0 to 39"),
        ([Row([0, 1], 2), A], COSINE, {}, "row 0 leaves 2 of its 2 tokens unpooled"),
        ([A, B], COSINE, {"emulate": "int8"}, r"emulate 'int8' is not one of \['bfloat16', 'fl"),
        ([A, B], COSINE, {"loss_scale": 0.0}, "loss_scale is 0.0; it must be positive and finite"),
        ([A, B], COSINE, {"loss_scale": math.inf}, "loss_scale is inf; it must be positive"),
        ([A, B], COSINE, {"loss_scale": math.nan}, "loss_scale is nan; it must be positive"),
    ],
)
def test_bad_input_is_named(
    rows: list[Row], objective: Objective, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        flow(toy_twin(), rows, objective, **options)


def test_the_served_model_is_healthy_in_half_precision(artifact: Artifact) -> None:
    twin = Twin.open(artifact)
    rows = [Row(ids) for ids in sorted(artifact.check().rows, key=len)[:4]]
    exact = flow(twin, rows, COSINE)
    vectors = torch.stack([twin.vector(row) for row in rows])
    assert exact.objective == pytest.approx(cosines(vectors).item(), abs=1e-5)
    assert exact.first_nonfinite is None
    assert exact.verdicts == ()
    assert len(exact.places) == 2 + 6 * 7 + 3
    assert gradient_l2(exact, "layers.2.norm2") == pytest.approx(
        layer_gradient(twin, 2, rows), rel=1e-4
    )
    half = flow(twin, rows, Objective("mnrl"), emulate="float16", loss_scale=1024.0)
    assert half.first_nonfinite is None
    assert half.verdicts == ()
