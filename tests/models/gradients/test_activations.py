"""Activations and patches, against transformers' hidden states and hooks on its modules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.export.checkpoint import load
from models.export.sentence_config import Overrides
from models.gradients import attribution
from models.gradients.activations import activations, patch, tap_points
from models.gradients.budget import activation_shape, patch_token_steps
from models.gradients.inputs import InputRow, TokenReduction
from models.gradients.reference_model import ReferenceModel
from models.network.taps import OutputTap
from tests.models.checkpoints import CONFIGS, save_checkpoint, save_tokenizer
from tests.models.gradients.toys import DEBERTA, LLAMA, toy_model

# Id 1 is the padding token of RoBERTa, from which its positions are computed.
IDS = [0, 7, 21, 4, 9, 33, 12, 51, 8, 44, 17, 2]
OTHER = [0, 8, 40, 5, 16, 30, 11, 50, 9, 45, 18, 2]
FAMILIES = list(CONFIGS)

# Modules of transformers by tap. A module's output is the output of the step, or its input is that
# of the step whose name ends with "sum" and a number.
_BERT = {
    "embeddings.words": "embeddings.word_embeddings",
    "embeddings.positions": "embeddings.position_embeddings",
    "embeddings.sum": "embeddings.LayerNorm",
    "embeddings.norm": "embeddings.LayerNorm",
    "layers.0.attention": "encoder.layer.0.attention.output.dense",
    "layers.0.sum1": "encoder.layer.0.attention.output.LayerNorm",
    "layers.0.norm1": "encoder.layer.0.attention.output.LayerNorm",
    "layers.0.linear1": "encoder.layer.0.intermediate",
    "layers.1.linear2": "encoder.layer.1.output.dense",
    "layers.1.sum2": "encoder.layer.1.output.LayerNorm",
    "layers.1.norm2": "encoder.layer.1.output.LayerNorm",
}
MODULES = {
    "bert": _BERT,
    "roberta": _BERT,
    "distilbert": {
        "embeddings.words": "embeddings.word_embeddings",
        "embeddings.sum": "embeddings.LayerNorm",
        "embeddings.norm": "embeddings.LayerNorm",
        "layers.0.attention": "transformer.layer.0.attention.out_lin",
        "layers.0.norm1": "transformer.layer.0.sa_layer_norm",
        "layers.1.linear2": "transformer.layer.1.ffn.lin2",
        "layers.1.sum2": "transformer.layer.1.output_layer_norm",
        "layers.1.norm2": "transformer.layer.1.output_layer_norm",
    },
    "mpnet": {
        "embeddings.norm": "embeddings.LayerNorm",
        "layers.0.attention": "encoder.layer.0.attention.attn.o",
        "layers.0.sum1": "encoder.layer.0.attention.LayerNorm",
        "layers.0.norm1": "encoder.layer.0.attention.LayerNorm",
        "layers.1.linear1": "encoder.layer.1.intermediate",
        "layers.1.norm2": "encoder.layer.1.output.LayerNorm",
    },
    "modernbert": {
        "embeddings.words": "embeddings.tok_embeddings",
        "embeddings.norm": "embeddings.norm",
        "layers.0.attention": "layers.0.attn.Wo",
        "layers.1.norm1": "layers.1.attn_norm",
        "layers.1.sum1": "layers.1.mlp_norm",
        "layers.1.norm2": "layers.1.mlp_norm",
        "layers.2.linear2": "layers.2.mlp.Wo",
        "layers.2.sum2": "layers.3.attn_norm",
        "final_norm": "final_norm",
    },
    "qwen3": {
        "embeddings.words": "embed_tokens",
        "layers.0.norm1": "layers.0.input_layernorm",
        "layers.0.attention": "layers.0.self_attn.o_proj",
        "layers.0.sum1": "layers.0.post_attention_layernorm",
        "layers.0.norm2": "layers.0.post_attention_layernorm",
        "layers.0.linear2": "layers.0.mlp.down_proj",
        "layers.0.sum2": "layers.1.input_layernorm",
        "layers.1.linear2": "layers.1.mlp.down_proj",
        "final_norm": "norm",
    },
}
TAPS = [(family, tap) for family, modules in MODULES.items() for tap in modules]


Loaded = Callable[[str], tuple[ReferenceModel, Any]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Return the reference model of a family's random checkpoint, and the model of transformers."""

    @cache
    def of_family(family: str) -> tuple[ReferenceModel, Any]:
        folder = tmp_path_factory.mktemp(family)
        oracle = save_checkpoint(folder, family).double()
        save_tokenizer(folder)
        network = load(folder, Overrides(pooling=["mean"]))[0].double()
        return ReferenceModel(network, normalize=True), oracle

    return of_family


@contextmanager
def hooked(
    oracle: nn.Module, family: str, tap: str, source: Tensor | None
) -> Iterator[list[Tensor]]:
    """Record the tensor of a tap in the forward passes of the block, or replace part of it.

    Args:
        oracle: Model of transformers.
        family: Its family.
        tap: Key of `MODULES[family]`.
        source: Tensor `(L, D)` whose vectors at positions 4 to 6 replace those at 2 to 4; None:
            nothing is replaced.
    """
    seen: list[Tensor] = []

    def visit(tensor: Tensor) -> None:
        seen.append(tensor.clone())
        if source is not None:
            tensor[:, 2:5] = source[4:7]  # in place, so that the residual has it too

    module = oracle.get_submodule(MODULES[family][tap])
    if tap.rstrip("12").endswith("sum"):
        handle = module.register_forward_pre_hook(lambda _, inputs: visit(inputs[0]))
    else:
        handle = module.register_forward_hook(lambda _, __, output: visit(output))
    try:
        yield seen
    finally:
        handle.remove()


def hidden_states(oracle: Any, ids: list[int], **options: Any) -> Any:  # noqa: ANN401
    with torch.no_grad():
        return oracle(input_ids=torch.tensor([ids]), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_equal_the_hidden_states_of_transformers(family: str, loaded: Loaded) -> None:
    model, oracle = loaded(family)
    names = list(model.layer_names[1:])
    actual = activations(model, InputRow(IDS), {name: model.steps[name] for name in names}, "none")
    expected = hidden_states(oracle, IDS, output_hidden_states=True)
    assert len(names) == len(expected.hidden_states)
    for name, state in zip(names, expected.hidden_states, strict=True):
        np.testing.assert_allclose(actual[name], state[0], rtol=1e-5, atol=1e-6, err_msg=name)
    last = expected.last_hidden_state[0]
    np.testing.assert_allclose(actual["output"], last, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("family", "tap"), TAPS)
def test_steps_equal_the_outputs_of_the_modules_of_transformers(
    family: str, tap: str, loaded: Loaded
) -> None:
    model, oracle = loaded(family)
    assert tap in {point.name for point in tap_points(model)}
    with hooked(oracle, family, tap, None) as seen:
        hidden_states(oracle, IDS)
    actual = activations(model, InputRow(IDS), {"x": tap}, "none")["x"]
    np.testing.assert_allclose(actual, seen[0].view(actual.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("family", "tap"), TAPS)
def test_patch_equals_a_hook_that_replaces_the_vectors(
    family: str, tap: str, loaded: Loaded
) -> None:
    model, oracle = loaded(family)
    direction = torch.linspace(-1, 1, 32, dtype=torch.float64)

    def cosine(source: Tensor | None, ids: list[int] = IDS) -> tuple[float, Tensor]:
        with hooked(oracle, family, tap, source) as seen:
            hidden = hidden_states(oracle, ids).last_hidden_state[0]
        return float(torch.cosine_similarity(hidden.mean(0), direction, dim=0)), seen[0]

    target = attribution.cosine(direction)
    source_value, source = cosine(None, OTHER)
    value, _ = cosine(None)
    source = source.view(-1, source.shape[-1])
    patched, _ = cosine(source)
    pairs = [(2, 4), (3, 5), (4, 6)]
    result = patch(model, [InputRow(IDS)], [InputRow(OTHER)], target, {"x": tap}, [pairs])
    assert result.value == pytest.approx(value, rel=1e-5)
    assert result.source_value == pytest.approx(source_value, rel=1e-5)
    (at_tap,) = result.taps
    assert (at_tap.tap, at_tap.values) == ("x", None)
    assert at_tap.value == pytest.approx(patched, rel=1e-5)
    assert at_tap.effect == pytest.approx((patched - value) / (source_value - value), rel=1e-3)
    assert abs(patched - value) > 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_patch_of_all_tokens_of_any_layer_gives_the_value_of_the_source(
    family: str, loaded: Loaded
) -> None:
    model, _ = loaded(family)
    target = attribution.dim(3, normalize=True)
    everything = [(position, position) for position in range(len(IDS))]
    layers = {name: model.steps[name] for name in model.layer_names[1:]}
    result = patch(model, [InputRow(IDS)], [InputRow(OTHER)], target, layers, [everything])
    assert result.value != pytest.approx(result.source_value, rel=1e-2)
    for at_tap in result.taps:
        assert at_tap.value == pytest.approx(result.source_value, rel=1e-9), at_tap.tap
        assert at_tap.effect == pytest.approx(1, rel=1e-9)


OTHER_LAYERS = [
    pytest.param(changes, marks=pytest.mark.slow)
    for changes in ({"norm_first": True}, LLAMA, DEBERTA)
]


@pytest.mark.parametrize("changes", [{}, *OTHER_LAYERS])
def test_patches_of_each_position_equal_patches_of_one(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chunks of two versions, so that five patches take three.
    monkeypatch.setattr("models.gradients.activations.TOKENS_AT_ONCE", 20)
    model = toy_model(**changes)
    rows, sources = (
        [InputRow([0, 7, 21, 4, 2]), InputRow([0, 9, 2])],
        [InputRow([0, 8, 3, 6, 2]), InputRow([0, 5, 2])],
    )
    target = attribution.score()  # the margin over the second row
    taps = {point.name: point.name for point in tap_points(model) if point.per_token}
    assert {"embeddings.words", "layers.0.sum1", "layers.1.linear2"} <= taps.keys()
    each = [[(position, position)] for position in range(8)]
    result = patch(model, rows, sources, target, taps, each, is_each=True)
    for at_tap in result.taps:
        assert at_tap.values is not None
        assert at_tap.value is None
        for pairs, value in zip(each, at_tap.values, strict=True):
            alone = patch(model, rows, sources, target, {"x": at_tap.tap}, [pairs])
            assert alone.taps[0].value == pytest.approx(value, rel=1e-9)
        effects = (at_tap.values - result.value) / (result.source_value - result.value)
        np.testing.assert_allclose(at_tap.effect, effects)


def test_effect_is_nan_if_the_source_has_the_same_value() -> None:
    model, row = toy_model(), InputRow([0, 7, 2])
    target = attribution.dim(0, normalize=True)
    result = patch(model, [row], [row], target, {"x": "layers.0.norm1"}, [[(1, 1)]])
    assert result.value == result.source_value == result.taps[0].value
    assert np.isnan(result.taps[0].effect)


def test_reductions_are_those_of_numpy_and_shapes_are_known_before() -> None:
    model, row = toy_model(**DEBERTA), InputRow([0, 7, 21, 4, 2])
    points = tap_points(model)
    assert "distance_embeddings" not in {point.name for point in points}  # depends on no row
    names = {point.name: point.name for point in points}
    whole = activations(model, row, names, "none")
    by_numpy = {
        "none": lambda x: x,
        "mean": lambda x: x.mean(0),
        "norm": lambda x: np.linalg.norm(x, axis=-1),
        "first": lambda x: x[0],
        "last": lambda x: x[-1],
    }
    assert by_numpy.keys() == set(get_args(TokenReduction))
    for reduction in get_args(TokenReduction):
        reduced = activations(model, row, names, reduction)
        for point in points:
            x, expected = reduced[point.name], whole[point.name]
            if point.per_token or reduction == "norm":
                expected = by_numpy[reduction](expected)
            np.testing.assert_allclose(x, expected, rtol=1e-9, err_msg=point.name)
            assert x.shape == activation_shape(point, 5, reduction)
    assert whole["pooling"].shape == (16,)
    np.testing.assert_allclose(whole["pooling"], whole["layers.1.norm2"].mean(0), rtol=1e-9)


@pytest.mark.parametrize("reduction", ["first", "last"])
def test_reduced_activations_do_not_keep_the_whole_outputs(
    reduction: TokenReduction, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, row = toy_model(), InputRow([0, 7, 21, 4, 2])
    names = {point.name: point.name for point in tap_points(model)}
    recorded: dict[str, Tensor] = {}

    class Recorded(OutputTap):
        def __init__(self, *options: Any) -> None:  # noqa: ANN401
            super().__init__(*options)
            self.outputs = recorded

    monkeypatch.setattr("models.gradients.activations.OutputTap", Recorded)
    arrays = activations(model, row, names, reduction)
    for name, array in arrays.items():
        assert recorded[name].untyped_storage().nbytes() == array.nbytes, name
        assert array.base is None, name  # nothing else is kept


def test_cost_of_a_patch_bounds_the_tokens_that_run_through_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ran = toy_model(), 0
    vectors = ReferenceModel.vectors

    def counted(self: ReferenceModel, row: InputRow, *options: Any, **named: Any) -> Tensor:  # noqa: ANN401
        nonlocal ran
        ran += len(row.ids) * named.get("versions", 1)
        return vectors(self, row, *options, **named)

    monkeypatch.setattr(ReferenceModel, "vectors", counted)
    taps = {name: name for name in ("layers.0.norm1", "layers.0.norm2")}
    each = [[(position, position)] for position in range(5)]
    rows = [InputRow([0, 7, 21, 4, 2])], [InputRow([0, 7, 22, 4, 2])]
    patch(model, *rows, attribution.dim(0, normalize=True), taps, each, is_each=True)
    assert ran == patch_token_steps(5, 5, 2, 5)
