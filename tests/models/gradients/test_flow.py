import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from models.artifact import Artifact
from models.export.checkpoint import load
from models.export.sentence_config import Overrides
from models.gradients.flow import EXPLODING, VANISHING, flow
from models.gradients.flow_tap import RecordingTap, objective_value
from models.gradients.inputs import EmulatedPrecision, InputRow, Objective, ObjectiveName
from models.gradients.reference_model import ReferenceModel
from models.gradients.results import Flow, FlowStep
from models.network.attention import NO_INPUTS, LayerInputs
from models.network.heads import DenseHead
from models.network.layer import Activation, EncoderLayer
from models.network.sentence_encoder import SentenceEncoder
from models.packing import NO_ADAPTER
from tests.models.checkpoints import save_checkpoint
from tests.models.gradients.toys import ADAPTED, DEBERTA, GATED, LLAMA, NARROW, A, B, toy_model

C = InputRow([0, 5, 2])
E = InputRow([0, 17, 30, 30, 12, 11, 2], prompt_tokens=2)
COSINE = Objective("cosine")

KINDS: list[dict[str, Any]] = [
    {},
    {"norm_first": True},
    {"relative_buckets": 8, "position_padding_id": 1, "type_vocab_size": 0},
    {"norm_first": True, "relative_buckets": 8, "pooling": "cls", "normalize": False},
    GATED,
    NARROW,
    LLAMA,
    DEBERTA,
    ADAPTED,
]


def with_heads(model: ReferenceModel) -> ReferenceModel:
    """Return the model with two concatenated poolings and two dense heads."""
    torch.manual_seed(1)
    heads = [DenseHead(32, 12, True, "Tanh"), DenseHead(12, 8, False, "GELU", residual=True)]
    network = SentenceEncoder(model.network.encoder, ["mean", "max"], heads).double().eval()
    return ReferenceModel(network.requires_grad_(False), model.normalize)


def adapted(rows: Sequence[InputRow], kind: dict[str, Any]) -> list[InputRow]:
    """Return the rows with the adapters of a model in turn."""
    count = len(kind["adapters"].names) if "adapters" in kind else 0
    return [replace(row, adapter=i % count if count else NO_ADAPTER) for i, row in enumerate(rows)]


def test_rows_without_an_adapter_miss_no_gradient() -> None:
    model = toy_model(**ADAPTED)
    result = flow(model, [A, B], COSINE)
    assert result.verdicts == ()
    assert at(result, "embeddings.words").parameters is not None


def layer(model: ReferenceModel, index: int) -> EncoderLayer:
    return cast(EncoderLayer, model.network.encoder.layers[index])


def layer_norm(module: torch.nn.Module | None) -> torch.nn.LayerNorm:
    assert isinstance(module, torch.nn.LayerNorm)
    return module


def at(result: Flow, name: str) -> FlowStep:
    return next(step for step in result.steps if step.name == name)


def names(result: Flow) -> list[str]:
    return [step.name for step in result.steps]


def gradient_l2(result: Flow, name: str) -> float:
    gradient = at(result, name).gradient
    assert gradient is not None
    return gradient.l2


def cosines(vectors: Tensor) -> Tensor:
    return F.cosine_similarity(vectors[::2], vectors[1::2]).sum()


def forward_all(model: ReferenceModel, rows: Sequence[InputRow]) -> Tensor:
    """Return the vectors of the rows from the model's own forward pass."""
    vectors = []
    for row in rows:
        ones = torch.ones(1, len(row.ids), dtype=torch.float64)
        pooled = ones.clone()
        pooled[:, : row.prompt_tokens] = 0
        own = None if row.adapter == NO_ADAPTER else torch.tensor([row.adapter])
        vectors.append(model.network(torch.tensor([row.ids]), ones, pooled, adapters=own))
    return torch.cat(vectors)


def layer_gradients(model: ReferenceModel, index: int, rows: Sequence[InputRow]) -> list[Tensor]:
    """Return the gradients `(L, D)` of the cosines by a layer's output, through autograd."""
    layer_name = model.layer_names[2 + index]
    inputs = [model.tokens(layer_name, row).requires_grad_() for row in rows]
    vectors = [
        model.continue_from(layer_name, x[None], row) for x, row in zip(inputs, rows, strict=True)
    ]
    return list(torch.autograd.grad(cosines(torch.cat(vectors)), inputs))


def layer_gradient(model: ReferenceModel, index: int, rows: Sequence[InputRow]) -> float:
    return torch.cat([g.flatten() for g in layer_gradients(model, index, rows)]).norm().item()


def with_nan_gradient(x: Tensor, index: tuple[int, ...]) -> Tensor:
    """Return a copy of the tensor whose backward pass sets one element to NaN."""

    def spoil(dy: Tensor) -> Tensor:
        dy = dy.clone()
        dy[index] = math.nan
        return dy

    y = x.clone()
    y.register_hook(spoil)
    return y


# Steps.


def test_steps_are_in_forward_pass_order() -> None:
    of_a_layer = ["attention", "sum1", "norm1", "linear1", "linear2", "sum2", "norm2"]
    assert names(flow(toy_model(), [A, B], COSINE)) == [
        *(f"embeddings.{step}" for step in ["words", "types", "positions", "sum", "norm"]),
        *(f"layers.{index}.{step}" for index in range(2) for step in of_a_layer),
        *("pooling", "normalize", "objective"),
    ]
    of_a_layer = ["norm1", "attention", "sum1", "norm2", "linear1", "linear2", "sum2"]
    model = with_heads(toy_model(norm_first=True, relative_buckets=8, normalize=False))
    assert names(flow(model, [A], Objective("dot", [[1.0] * 8]))) == [
        *(f"embeddings.{step}" for step in ["words", "types", "positions", "sum", "norm"]),
        "relative_bias",
        *(f"layers.{index}.{step}" for index in range(2) for step in of_a_layer),
        *("final_norm", "pooling", "heads.0", "heads.1", "objective"),
    ]
    of_a_layer = ["attention", "sum1", "norm2", "gate", "linear1", "product", "linear2", "sum2"]
    assert names(flow(toy_model(**GATED), [A, B], COSINE)) == [
        *("embeddings.words", "embeddings.norm"),
        *(f"layers.0.{step}" for step in of_a_layer),
        *(f"layers.1.{step}" for step in ["norm1", *of_a_layer]),
        *("final_norm", "pooling", "normalize", "objective"),
    ]
    assert names(flow(toy_model(**NARROW), [A, B], COSINE))[5] == "embeddings.projection"
    assert names(flow(toy_model(**DEBERTA), [A, B], COSINE))[3] == "distance_embeddings"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [False, True])
def test_flow_objective_uses_the_vectors_of_the_model(kind: dict[str, Any], heads: bool) -> None:
    model = toy_model(**{**kind, "normalize": False})
    model = with_heads(model) if heads else model
    weights = torch.linspace(-1, 2, model.network.width, dtype=torch.float64)
    for row in adapted([A, E], kind):
        result = flow(model, [row], Objective("dot", [weights.tolist()]))
        assert result.objective == pytest.approx((model.vector(row) @ weights).item(), rel=1e-12)


def test_forward_statistics_exclude_padding() -> None:
    model = toy_model(activation="relu", type_vocab_size=0)
    result = flow(model, [A, C], COSINE)
    tokens = torch.cat([model.tokens("embeddings", row) for row in (A, C)])  # (9, 16)
    forward = at(result, "embeddings.norm").forward
    assert forward.rms == pytest.approx(tokens.square().mean().sqrt().item())
    assert forward.absmax == pytest.approx(tokens.abs().max().item())
    assert (forward.nan, forward.inf, forward.zero_fraction) == (0, 0, 0.0)

    hidden: list[Tensor] = []
    handle = layer(model, 1).linear1.register_forward_hook(lambda *io: hidden.append(io[2]))
    forward_all(model, [A, C])
    handle.remove()
    zeros = torch.cat([(x <= 0).flatten() for x in hidden]).double().mean().item()
    assert 0.2 < zeros < 0.8
    assert at(result, "layers.1.linear1").forward.zero_fraction == pytest.approx(zeros)


def test_flow_contains_only_plain_python_values() -> None:
    def leaves(value: object) -> list[object]:
        if isinstance(value, dict):
            return [leaf for child in value.values() for leaf in leaves(child)]
        if isinstance(value, list | tuple):
            return [leaf for child in value for leaf in leaves(child)]
        return [value]

    model = toy_model()
    layer(model, 0).linear1.weight[0, 0] = math.nan
    result = flow(model, [A, B], COSINE)
    assert {type(leaf) for leaf in leaves(asdict(result))} == {str, int, float, type(None)}


# Gradients.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [False, True])
def test_parameter_gradient_norms_add_up_to_the_global_norm(
    kind: dict[str, Any], heads: bool
) -> None:
    model = with_heads(toy_model(**kind)) if heads else toy_model(**kind)
    rows = adapted([A, B, C, E], kind)
    result = flow(model, rows, COSINE)
    parameters = list(model.network.requires_grad_(True).parameters())
    gradients = torch.autograd.grad(cosines(forward_all(model, rows)), parameters)
    expected = sum(g.square().sum().item() for g in gradients)
    parts = [step.parameters.l2**2 for step in result.steps if step.parameters]
    assert sum(parts) == pytest.approx(expected, rel=1e-10)

    owner = layer(model, 1).linear2
    norms = [
        torch.cat([x.flatten() for x in tensors]).norm().item()
        for tensors in (
            torch.autograd.grad(cosines(forward_all(model, rows)), list(owner.parameters())),
            list(owner.parameters()),
        )
    ]
    step = at(result, "layers.1.linear2").parameters
    assert step is not None
    assert step.ratio_to_weights == pytest.approx(norms[0] / norms[1], rel=1e-10)


@pytest.mark.parametrize("norm_first", [False, True])
def test_layer_output_gradient_equals_autograd(norm_first: bool) -> None:
    model = toy_model(num_layers=3, norm_first=norm_first)
    result = flow(model, [A, B, C, E], COSINE)
    for index in range(2):  # the last layer name refers to the output of the final norm
        name = f"layers.{index}.{'sum2' if norm_first else 'norm2'}"
        expected = layer_gradient(model, index, [A, B, C, E])
        assert gradient_l2(result, name) == pytest.approx(expected, rel=1e-10)


def ranking_loss(vectors: Tensor) -> Tensor:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(torch.nn.Identity())
    return loss.compute_loss_from_embeddings([vectors[::2], vectors[1::2]], torch.arange(2))


VECTORS = torch.linspace(-2, 3, 64, dtype=torch.float64).view(4, 16)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("kind", "vectors", "oracle"),
    [
        ("cosine", VECTORS[:0], lambda _served, raw: cosines(raw)),
        ("mnrl", VECTORS[:0], lambda _served, raw: ranking_loss(raw)),
        ("dot", VECTORS[:1], lambda served, _raw: (served @ VECTORS[0]).sum()),
        ("mse", VECTORS, lambda served, _raw: (served - VECTORS).square().mean()),
        ("cotangent", VECTORS, lambda served, _raw: torch.einsum("bw,bw->", served, VECTORS)),
    ],
)
def test_objective_and_its_gradient_equal_the_formula(
    kind: ObjectiveName,
    vectors: Tensor,
    oracle: Callable[[Tensor, Tensor], Tensor],
    normalize: bool,
) -> None:
    model, rows = toy_model(normalize=normalize), [A, B, C, E]
    result = flow(model, rows, Objective(kind, vectors.tolist()))
    raw = torch.stack([model.vector(row) for row in rows]).requires_grad_()
    value = oracle(raw / raw.norm(dim=1, keepdim=True) if normalize else raw, raw)
    assert result.objective == pytest.approx(value.item(), rel=1e-9)
    gradient = torch.autograd.grad(value, raw)[0]
    assert gradient_l2(result, "pooling") == pytest.approx(gradient.norm().item(), rel=1e-9)


@pytest.mark.parametrize("failing", ["nothing", "forward", "backward"])
def test_parameters_are_frozen_after_success_and_failure(failing: str) -> None:
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
    model = toy_model()
    layer(model, 1).activation = activations[failing]
    if failing == "nothing":
        with torch.no_grad():  # a caller may have disabled gradients
            flow(model, [A, B], COSINE)
    else:
        with pytest.raises(RuntimeError, match="failed on purpose"):
            flow(model, [A, B], COSINE)
    assert not any(p.requires_grad for p in model.network.parameters())
    assert all(p.grad is None for p in model.network.parameters())


# NaN and infinity.


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("index", [0, 2])
def test_nonfinite_weight_is_reported_at_its_layer(
    norm_first: bool, value: float, index: int
) -> None:
    model = toy_model(num_layers=3, norm_first=norm_first)
    layer(model, index).linear1.weight[3, 5] = value
    result = flow(model, [A, B], COSINE)
    first = result.first_nonfinite
    assert first is not None
    assert (first.phase, first.step, first.role) == (
        "forward",
        f"layers.{index}.linear1",
        "producer",
    )
    assert (first.row, first.token) == (0, 0)
    later = names(result)[names(result).index(first.step) + 1 :]
    assert [(bad.step, bad.role) for bad in result.nonfinite_steps[1:]] == [
        (name, "propagator") for name in later
    ]
    forward = at(result, first.step).forward
    assert forward.nan + forward.inf > 0
    assert math.isfinite(forward.rms)
    assert math.isfinite(forward.absmax)
    assert math.isnan(at(result, "objective").forward.rms)


def test_nan_word_embedding_is_located_by_row_and_token() -> None:
    model = toy_model()
    model.network.encoder.embeddings.word.weight[15, 2] = math.nan
    first = flow(model, [A, B], COSINE).first_nonfinite
    assert first is not None
    assert (first.step, first.row, first.token) == ("embeddings.words", 1, 3)
    assert at(flow(model, [A, B], COSINE), "embeddings.words").forward.nan == 1


def test_each_row_has_its_own_nonfinite_producer() -> None:
    model = toy_model()
    shorter, longer = len(C.ids), len(A.ids)

    def nan_at(length: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x * (math.nan if x.shape[1] == length else 1.0)

    layer(model, 0).activation = nan_at(longer)
    layer(model, 1).activation = nan_at(shorter)
    result = flow(model, [A, C], COSINE).nonfinite_steps
    producers = [(bad.step, bad.row) for bad in result if bad.role == "producer"]
    assert producers == [("layers.0.linear1", 0), ("layers.1.linear1", 1)]
    assert result[-1].step == "objective"
    assert result[-1].row is None


@pytest.mark.parametrize("norm_first", [False, True])
def test_nan_gradient_is_reported_at_the_step_that_produced_it(
    norm_first: bool,
) -> None:
    model = toy_model(num_layers=3, norm_first=norm_first)
    layer(model, 1).activation = lambda x: x + (0 * x).sqrt()  # 0 times infinity
    result = flow(model, [A, B], COSINE)
    first = result.first_nonfinite
    assert first is not None
    assert (first.phase, first.step, first.role) == ("backward", "layers.1.linear1", "producer")
    step = at(result, first.step)
    assert step.gradient is not None
    assert step.parameters is not None
    assert step.gradient.nan + step.gradient.inf == 0
    assert math.isnan(step.parameters.l2)
    order = [names(result).index(bad.step) for bad in result.nonfinite_steps]
    assert order == list(range(order[0], -1, -1))
    assert {bad.role for bad in result.nonfinite_steps[1:]} == {"propagator"}


def test_nan_gradient_of_attention_is_separated_from_the_residual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = toy_model()
    healthy = layer_gradients(model, 0, [A, B])
    attention = layer(model, 1).self_attn
    ordinary = attention.forward

    def forward(x: Tensor, inputs: LayerInputs = NO_INPUTS) -> Tensor:
        is_b = x.shape[1] == len(B.ids)
        return ordinary(with_nan_gradient(x, (0, 3, 1)) if is_b else x, inputs)

    monkeypatch.setattr(attention, "forward", forward)
    result = flow(model, [A, B], COSINE)
    first, last = result.nonfinite_steps[0], result.nonfinite_steps[-1]
    assert (first.phase, first.step) == ("backward", "layers.1.attention")
    assert (first.row, first.token) == (1, 3)
    assert (last.step, last.role, last.row) == ("embeddings.words", "propagator", 1)
    # The norm covers the finite values only.
    healthy[1][3, 1] = 0.0
    expected = torch.cat([g.flatten() for g in healthy]).norm().item()
    gradient = at(result, "layers.0.norm2").gradient
    assert gradient is not None
    assert (gradient.nan, gradient.inf) == (1, 0)
    assert gradient.l2 == pytest.approx(expected, rel=1e-10)


def test_nonfinite_parameter_gradient_alone_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy_model()
    linear = layer(model, 1).linear2

    def forward(x: Tensor, _chosen: None) -> Tensor:
        return F.linear(x, with_nan_gradient(linear.weight, (0, 0)), linear.bias)

    monkeypatch.setattr(linear, "forward", forward)
    result = flow(model, [A, B], COSINE).nonfinite_steps
    assert [(bad.phase, bad.step, bad.role, bad.row) for bad in result] == [
        ("backward", "layers.1.linear2", "producer", None)
    ]


def test_normalizing_a_zero_vector_overflows_in_float16() -> None:
    model = toy_model()
    norm = layer_norm(layer(model, 1).norm2)
    norm.weight.zero_()
    norm.bias.zero_()
    objective = Objective("dot", [[1.0] * 16])
    assert flow(model, [A], objective).first_nonfinite is None
    first = flow(model, [A], objective, emulate="float16").first_nonfinite
    assert first is not None
    assert (first.phase, first.step, first.row, first.token) == ("backward", "normalize", 0, None)


def test_overflow_of_summed_gradients_is_reported_at_the_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = toy_model(num_layers=1, dim_feedforward=16, normalize=False)
    only = layer(model, 0)
    monkeypatch.setattr(only.norm2, "forward", torch.add)
    only.activation = lambda x: x
    for linear in (only.linear1, only.linear2):
        linear.weight.copy_(torch.eye(16))
    one = InputRow([0])
    objective = Objective("dot", [[1.0] * 16])
    result = flow(model, [one], objective, emulate="float16", loss_scale=40000.0)
    first = result.first_nonfinite
    assert first is not None
    assert (first.phase, first.step) == ("backward", "layers.0.norm1")
    by_linear1 = at(result, "layers.0.linear1").gradient
    by_norm1 = at(result, "layers.0.norm1").gradient
    assert by_linear1 is not None
    assert by_norm1 is not None
    assert (by_linear1.inf, by_norm1.inf) == (0, 16)


# Half precision.


def test_float16_emulation_overflows_where_values_exceed_its_range() -> None:
    model = toy_model(activation="relu")
    layer(model, 1).linear1.weight.mul_(1e5)
    hidden: list[Tensor] = []
    handle = layer(model, 1).linear1.register_forward_hook(lambda *io: hidden.append(io[2]))
    model.vector(A)
    handle.remove()
    expected = int((hidden[0] >= 65520).sum())
    assert 0 < expected < hidden[0].numel() / 2
    result = flow(model, [A, A], COSINE, emulate="float16")
    assert at(result, "layers.1.linear1").forward.inf == 2 * expected
    first = result.first_nonfinite
    assert first is not None
    assert (first.phase, first.step, first.role) == ("forward", "layers.1.linear1", "producer")
    assert flow(model, [A, A], COSINE, emulate="bfloat16").first_nonfinite is None
    assert flow(model, [A, A], COSINE).first_nonfinite is None


@pytest.mark.parametrize("emulate", ["float16", "bfloat16"])
def test_emulation_rounds_activations_and_gradients_of_every_step(
    emulate: EmulatedPrecision,
) -> None:
    model = toy_model(norm_first=True, relative_buckets=8)
    exact = flow(model, [A, B], COSINE)
    result = flow(model, [A, B], COSINE, emulate=emulate)
    dtype: torch.dtype = getattr(torch, emulate)
    # The parts of attention are steps of their own only if they are rounded.
    references = {step.name: step for step in exact.steps[:-1]}
    shared = [step for step in result.steps if step.name in references]
    assert [step.name for step in shared] == list(references)
    for step in shared:
        reference = references[step.name]
        pairs = ((step.forward, reference.forward), (step.gradient, reference.gradient))
        for half, whole in pairs:
            assert half is not None
            assert whole is not None
            rounded = torch.tensor(half.absmax, dtype=torch.float64).to(dtype).double().item()
            assert half.absmax == rounded
            assert half.absmax == pytest.approx(whole.absmax, rel=0.1)
            assert half.absmax != whole.absmax


@pytest.mark.parametrize(
    ("scale", "broken_step"), [(20.0, None), (1000.0, "layers.1.attention.scores")]
)
def test_scores_overflow_in_float16_where_those_of_transformers_do(
    scale: float, broken_step: str | None, tmp_path: Path
) -> None:
    reference = save_checkpoint(tmp_path, "bert", num_hidden_layers=2)
    attention = reference.encoder.layer[1].attention.self
    with torch.no_grad():
        for projection in (attention.query, attention.key):
            projection.weight.mul_(scale)
    reference.save_pretrained(tmp_path)
    ids = [0, 7, 21, 4, 9, 2]
    half = transformers.AutoModel.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float16
    )
    with torch.no_grad():
        tokens = half(input_ids=torch.tensor([ids])).last_hidden_state
    assert bool(tokens.isfinite().all()) == (broken_step is None)

    network, _ = load(tmp_path, Overrides(pooling=["mean"]))
    model = ReferenceModel(network, normalize=True)
    assert flow(model, [InputRow(ids)] * 2, COSINE).first_nonfinite is None
    result = flow(model, [InputRow(ids)] * 2, COSINE, emulate="float16")
    first = result.first_nonfinite
    assert (first and (first.phase, first.step)) == (broken_step and ("forward", broken_step))


@pytest.mark.parametrize("kind", [{"relative_buckets": 8}, DEBERTA, ADAPTED])
def test_rounded_attention_equals_attention_but_for_the_rounding(kind: dict[str, Any]) -> None:
    model, rows = toy_model(**kind), adapted([A, B], kind)
    exact = flow(model, rows, COSINE)
    tap = RecordingTap(torch.float64)  # rounds nothing, but splits attention
    value = objective_value(tap, model, rows, COSINE)
    assert value.item() == pytest.approx(exact.objective, rel=1e-12)
    assert "layers.1.attention.softmax" in tap.steps


def test_loss_scale_recovers_gradients_that_underflow_in_float16() -> None:
    model = toy_model(normalize=False)
    objective = Objective("cotangent", [[1e-7] * 16])
    exact = flow(model, [A], objective)
    unscaled = flow(model, [A], objective, emulate="float16")
    scaled = flow(model, [A], objective, emulate="float16", loss_scale=2.0**24)
    for name in ("layers.0.norm2", "layers.1.linear1", "layers.1.norm2"):
        gradients = [at(result, name).gradient for result in (exact, unscaled, scaled)]
        assert gradients[0] is not None
        assert gradients[1] is not None
        assert gradients[2] is not None
        assert gradients[0].underflow_fraction == 0.0
        assert gradients[1].l2 < 0.5 * gradients[0].l2
        assert gradients[2].l2 == pytest.approx(gradients[0].l2, rel=2e-3)
        assert gradients[2].absmax == pytest.approx(gradients[0].absmax, rel=2e-3)
    expected, lost, recovered = (x.steps[0].parameters for x in (exact, unscaled, scaled))
    assert expected is not None
    assert lost is not None
    assert recovered is not None
    assert lost.l2 == 0.0  # the incoming gradient was rounded to zero
    assert recovered.l2 == pytest.approx(expected.l2, rel=2e-3)
    assert recovered.ratio_to_weights == pytest.approx(expected.ratio_to_weights, rel=2e-3)


def test_underflow_fraction_counts_nonzero_values_lost_in_float16() -> None:
    model = toy_model(normalize=False)
    # In float16 the second becomes zero and the third subnormal; the fourth is zero anyway.
    vector = [1.0, 1e-9, 1e-6, 0.0] * 4
    gradient = at(
        flow(model, [A], Objective("dot", [vector]), emulate="float16"), "pooling"
    ).gradient
    assert gradient is not None
    assert gradient.underflow_fraction == 0.5
    gradient = at(flow(model, [A], Objective("dot", [vector])), "pooling").gradient
    assert gradient is not None
    assert gradient.underflow_fraction == 0.0


# Verdicts.


def test_healthy_encoder_has_no_verdict() -> None:
    for norm_first in (False, True):
        assert flow(toy_model(num_layers=3, norm_first=norm_first), [A, B], COSINE).verdicts == ()


def check_verdicts(model: ReferenceModel, kind: str, threshold: float) -> None:
    result = flow(model, [A, B], COSINE)
    assert [(verdict.step, verdict.kind) for verdict in result.verdicts] == [
        ("layers.0.norm2", kind),
        ("layers.1.norm2", kind),
    ]
    last = layer_gradient(model, 2, [A, B])
    for index, verdict in enumerate(result.verdicts):
        expected = layer_gradient(model, index, [A, B]) / last
        assert verdict.ratio == pytest.approx(expected, rel=1e-8)
        assert verdict.threshold == threshold


def test_huge_bias_before_a_norm_gives_vanishing_verdicts() -> None:
    model = toy_model(num_layers=3)
    layer(model, 2).self_attn.out_proj.bias.mul_(1e6)
    check_verdicts(model, "vanishing", VANISHING)


def test_tiny_activations_before_a_norm_give_an_exploding_verdict() -> None:
    model = toy_model(num_layers=3)
    norm, attention = layer_norm(layer(model, 1).norm2), layer(model, 2).self_attn
    norm.weight.mul_(1e-6)
    norm.bias.zero_()
    assert attention.in_proj_bias is not None
    attention.in_proj_bias.zero_()
    attention.out_proj.bias.zero_()
    result = flow(model, [A, B], COSINE)
    assert [(verdict.step, verdict.kind) for verdict in result.verdicts] == [
        ("layers.1.norm2", "exploding")
    ]
    verdict = result.verdicts[0]
    expected = layer_gradient(model, 1, [A, B]) / layer_gradient(model, 2, [A, B])
    assert verdict.ratio == pytest.approx(expected, rel=1e-8)
    assert verdict.threshold == EXPLODING


def test_pre_norm_layer_verdict_is_at_its_second_sum() -> None:
    model = toy_model(norm_first=True)
    norm, first = layer_norm(model.network.encoder.embeddings.norm), layer(model, 0)
    norm.weight.mul_(1e-6)
    for parameters in (norm.bias, *first.self_attn.out_proj.parameters(), first.linear2.weight):
        parameters.zero_()
    first.linear2.bias.mul_(1e-6)
    result = flow(model, [A, B], COSINE)
    assert [(verdict.step, verdict.kind) for verdict in result.verdicts] == [
        ("layers.0.sum2", "exploding")
    ]
    ratio = gradient_l2(result, "layers.0.sum2") / gradient_l2(result, "layers.1.sum2")
    assert result.verdicts[0].ratio == pytest.approx(ratio)


@pytest.mark.parametrize("emulate", [None, "float16"])
def test_detached_activation_gives_a_missing_gradient_verdict(
    emulate: EmulatedPrecision | None,
) -> None:
    model = toy_model()
    layer(model, 1).activation = lambda x: F.gelu(x).detach()
    result = flow(model, [A, B], COSINE, emulate=emulate)
    assert [(verdict.step, verdict.kind) for verdict in result.verdicts] == [
        ("layers.1.linear1", "missing_gradient")
    ]
    assert at(result, "layers.1.linear1").gradient is not None
    assert at(result, "layers.1.linear1").parameters is None


def test_one_detached_parameter_gives_a_missing_gradient_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = toy_model()
    linear = layer(model, 1).linear2
    monkeypatch.setattr(
        linear, "forward", lambda x, _: F.linear(x, linear.weight, linear.bias.detach())
    )
    result = flow(model, [A, B], COSINE)
    assert [(verdict.step, verdict.kind) for verdict in result.verdicts] == [
        ("layers.1.linear2", "missing_gradient")
    ]
    assert at(result, "layers.1.linear2").gradient is not None


class NoBackward(torch.autograd.Function):
    """A fused norm without a backward pass."""

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
        NoBackward.apply,
        lambda x, residual: (x + residual).detach(),
        lambda x, residual: (x + residual).detach() if x.shape[1] == len(B.ids) else x + residual,
    ],
    ids=["no-backward", "detached", "detached-in-one-row"],
)
def test_norm_without_backward_marks_every_earlier_step_missing_gradient(
    norm: Callable[[Tensor, Tensor], Tensor],
    emulate: EmulatedPrecision | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = toy_model()
    monkeypatch.setattr(layer(model, 0).norm2, "forward", norm)
    result = flow(model, [A, B], COSINE, emulate=emulate)
    expected = names(result)[: names(result).index("layers.0.norm2") + 1]
    assert [verdict.step for verdict in result.verdicts] == expected
    assert {verdict.kind for verdict in result.verdicts} == {"missing_gradient"}
    assert at(result, "layers.0.sum2").gradient is None
    assert at(result, "layers.0.norm2").gradient is not None


# Invalid input.


@pytest.mark.parametrize(
    ("rows", "objective", "options", "message"),
    [
        ([A], COSINE, {}, "cosine needs an even number of texts, at least 2; the request has 1"),
        ([], COSINE, {}, "cosine needs an even number of texts, at least 2; the request has 0"),
        (
            [A, B, C],
            COSINE,
            {},
            "cosine needs an even number of texts, at least 2; the request has 3",
        ),
        (
            [A, B],
            Objective("mnrl"),
            {},
            "mnrl needs an even number of texts, at least 4; the request has 2",
        ),
        ([], Objective("mse"), {}, "mse needs at least 1 text; the request has 0"),
        ([A], Objective("hinge"), {}, "unknown objective 'hinge'; allowed: cosine, cotangent"),  # type: ignore[arg-type]
        (
            [A, B],
            Objective("mse", [[0.0] * 16]),
            {},
            "mse with 2 texts needs 2 vectors; the request has 1",
        ),
        ([A, B], Objective("cosine", [[0.0] * 16]), {}, "needs 0 vectors; the request has 1"),
        (
            [A],
            Objective("dot", [[0.0] * 15]),
            {},
            "vector 0 of the objective must consist of 16 finite",
        ),
        (
            [A],
            Objective("dot", [[math.nan] * 16]),
            {},
            "vector 0 of the objective must consist of 16",
        ),
        ([A, InputRow([])], COSINE, {}, "row 1 has 0 tokens; allowed: 1 to 12"),
        ([A, InputRow([0] * 13)], COSINE, {}, "row 1 has 13 tokens; allowed: 1 to 12"),
        ([InputRow([0, 40]), A], COSINE, {}, "row 0 has a token id outside 0 to 39"),
        ([InputRow([0, -1]), A], COSINE, {}, "row 0 has a token id outside 0 to 39"),
        ([InputRow([0, 1], 2), A], COSINE, {}, "row 0 has 2 prompt tokens; allowed: 0 to 1"),
        (
            [A, B],
            COSINE,
            {"emulate": "int8"},
            "unknown precision emulate='int8'; allowed: bfloat16, fl",
        ),
        ([A, B], COSINE, {"loss_scale": 0.0}, "loss_scale is 0.0; it must be positive and finite"),
        ([A, B], COSINE, {"loss_scale": math.inf}, "loss_scale is inf; it must be positive"),
        ([A, B], COSINE, {"loss_scale": math.nan}, "loss_scale is nan; it must be positive"),
    ],
)
def test_invalid_rows_objective_or_options_raise_value_error(
    rows: list[InputRow], objective: Objective, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        flow(toy_model(), rows, objective, **options)


def test_default_model_is_healthy_in_float32_and_float16(artifact: Artifact) -> None:
    model = ReferenceModel.open(artifact)
    rows = [InputRow(ids) for ids in sorted(artifact.check().rows, key=len)[:4]]
    exact = flow(model, rows, COSINE)
    vectors = torch.stack([model.vector(row) for row in rows])
    assert exact.objective == pytest.approx(cosines(vectors).item(), abs=1e-5)
    assert exact.first_nonfinite is None
    assert exact.verdicts == ()
    assert len(exact.steps) == 5 + 6 * 7 + 3
    assert gradient_l2(exact, "layers.2.norm2") == pytest.approx(
        layer_gradient(model, 2, rows), rel=1e-4
    )
    half = flow(model, rows, Objective("mnrl"), emulate="float16", loss_scale=1024.0)
    assert half.first_nonfinite is None
    assert half.verdicts == ()
