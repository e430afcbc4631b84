"""NaN and infinity in the gradient flow."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.gradients.flow import flow
from models.gradients.inputs import InputRow, Objective
from models.network.attention import NO_INPUTS, LayerInputs
from tests.models.gradients.flows import (
    COSINE,
    C,
    at,
    first_nonfinite,
    gradient,
    layer,
    layer_gradients,
    layer_norm,
    names,
    parameters,
    with_nan_gradient,
)
from tests.models.gradients.toys import DEBERTA, A, B, toy_model


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("index", [0, 2])
def test_nonfinite_weight_is_reported_at_its_layer(
    norm_first: bool, value: float, index: int
) -> None:
    model = toy_model(num_layers=3, norm_first=norm_first)
    layer(model, index).linear1.weight[3, 5] = value
    result = flow(model, [A, B], COSINE)
    first = first_nonfinite(result)
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
    first = first_nonfinite(flow(model, [A, B], COSINE))
    assert (first.step, first.row, first.token) == ("embeddings.words", 1, 3)
    assert at(flow(model, [A, B], COSINE), "embeddings.words").forward.nan == 1


def test_nan_of_a_table_without_tokens_has_the_index_of_a_row() -> None:
    model = toy_model(**DEBERTA)
    assert model.network.encoder.distance_embeddings is not None
    model.network.encoder.distance_embeddings.weight[5, 0] = math.nan
    first, *others = flow(model, [A, B], COSINE).nonfinite_steps
    assert (first.step, first.role) == ("distance_embeddings", "producer")
    assert (first.row, first.token) == (0, None)
    assert {bad.role for bad in others} == {"propagator"}


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
    first = first_nonfinite(result)
    assert (first.phase, first.step, first.role) == ("backward", "layers.1.linear1", "producer")
    own = gradient(result, first.step)
    assert (own.nan, own.inf) == (0, 0)
    assert math.isnan(parameters(result, first.step).l2)
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
    own = gradient(result, "layers.0.norm2")
    assert (own.nan, own.inf) == (1, 0)
    assert own.l2 == pytest.approx(expected, rel=1e-10)


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
    first = first_nonfinite(flow(model, [A], objective, emulate="float16"))
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
    first = first_nonfinite(result)
    assert (first.phase, first.step) == ("backward", "layers.0.norm1")
    overflows = [gradient(result, f"layers.0.{step}").inf for step in ("linear1", "norm1")]
    assert overflows == [0, 16]
