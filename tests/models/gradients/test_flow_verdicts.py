"""Verdicts of the gradient flow."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.gradients.flow import EXPLODING, VANISHING, flow
from models.gradients.inputs import EmulatedPrecision
from models.gradients.reference_model import ReferenceModel
from tests.models.gradients.flows import (
    COSINE,
    at,
    gradient,
    layer,
    layer_gradient,
    layer_norm,
    names,
)
from tests.models.gradients.toys import A, B, toy_model


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
    ratio = gradient(result, "layers.0.sum2").l2 / gradient(result, "layers.1.sum2").l2
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
