"""Steps of the gradient flow, its values and gradients."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.artifact import Artifact
from models.gradients.flow import flow
from models.gradients.inputs import InputRow, Objective, ObjectiveName
from models.gradients.reference_model import ReferenceModel
from models.network.layer import Activation
from tests.models.gradients.flows import (
    COSINE,
    KINDS,
    C,
    E,
    adapted,
    at,
    cosines,
    forward_all,
    gradient,
    layer,
    layer_gradient,
    names,
    parameters,
    with_heads,
)
from tests.models.gradients.toys import ADAPTED, DEBERTA, GATED, NARROW, A, B, toy_model


def test_rows_without_an_adapter_miss_no_gradient() -> None:
    model = toy_model(**ADAPTED)
    result = flow(model, [A, B], COSINE)
    assert result.verdicts == ()
    assert at(result, "embeddings.words").parameters is not None


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [False, True])
def test_parameter_gradient_norms_add_up_to_the_global_norm(
    kind: dict[str, Any], heads: bool
) -> None:
    model = with_heads(toy_model(**kind)) if heads else toy_model(**kind)
    rows = adapted([A, B, C, E], kind)
    result = flow(model, rows, COSINE)
    weights = list(model.network.requires_grad_(True).parameters())
    gradients = torch.autograd.grad(cosines(forward_all(model, rows)), weights)
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
    ratio = parameters(result, "layers.1.linear2").ratio_to_weights
    assert ratio == pytest.approx(norms[0] / norms[1], rel=1e-10)


@pytest.mark.parametrize("norm_first", [False, True])
def test_layer_output_gradient_equals_autograd(norm_first: bool) -> None:
    model = toy_model(num_layers=3, norm_first=norm_first)
    result = flow(model, [A, B, C, E], COSINE)
    for index in range(2):  # the last layer name refers to the output of the final norm
        name = f"layers.{index}.{'sum2' if norm_first else 'norm2'}"
        expected = layer_gradient(model, index, [A, B, C, E])
        assert gradient(result, name).l2 == pytest.approx(expected, rel=1e-10)


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
    expected = torch.autograd.grad(value, raw)[0].norm().item()
    assert gradient(result, "pooling").l2 == pytest.approx(expected, rel=1e-9)


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
    assert gradient(exact, "layers.2.norm2").l2 == pytest.approx(
        layer_gradient(model, 2, rows), rel=1e-4
    )
    half = flow(model, rows, Objective("mnrl"), emulate="float16", loss_scale=1024.0)
    assert half.first_nonfinite is None
    assert half.verdicts == ()
