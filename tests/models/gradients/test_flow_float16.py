"""The gradient flow with emulated half precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from models.export.checkpoint import load
from models.export.sentence_config import Overrides
from models.gradients.flow import flow
from models.gradients.flow_tap import RecordingTap, objective_value
from models.gradients.inputs import EmulatedPrecision, InputRow, Objective
from models.gradients.reference_model import ReferenceModel
from tests.models.checkpoints import save_checkpoint
from tests.models.gradients.flows import (
    COSINE,
    adapted,
    at,
    first_nonfinite,
    gradient,
    layer,
    parameters,
)
from tests.models.gradients.toys import ADAPTED, DEBERTA, A, B, toy_model


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
    first = first_nonfinite(result)
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
        gradients = gradient(result, step.name), gradient(exact, step.name)
        for half, whole in ((step.forward, reference.forward), gradients):
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
        gradients = [gradient(result, name) for result in (exact, unscaled, scaled)]
        assert gradients[0].underflow_fraction == 0.0
        assert gradients[1].l2 < 0.5 * gradients[0].l2
        assert gradients[2].l2 == pytest.approx(gradients[0].l2, rel=2e-3)
        assert gradients[2].absmax == pytest.approx(gradients[0].absmax, rel=2e-3)
    first = exact.steps[0].name
    expected, lost, recovered = (parameters(x, first) for x in (exact, unscaled, scaled))
    assert lost.l2 == 0.0  # the incoming gradient was rounded to zero
    assert recovered.l2 == pytest.approx(expected.l2, rel=2e-3)
    assert recovered.ratio_to_weights == pytest.approx(expected.ratio_to_weights, rel=2e-3)


def test_underflow_fraction_counts_nonzero_values_lost_in_float16() -> None:
    model = toy_model(normalize=False)
    # In float16 the second becomes zero and the third subnormal; the fourth is zero anyway.
    vector = [1.0, 1e-9, 1e-6, 0.0] * 4
    objective = Objective("dot", [vector])
    for emulate, lost in (("float16", 0.5), (None, 0.0)):
        result = flow(model, [A], objective, emulate=emulate)  # type: ignore[arg-type]
        assert gradient(result, "pooling").underflow_fraction == lost
