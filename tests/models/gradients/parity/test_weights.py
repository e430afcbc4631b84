"""Weights of a graph and of the reference model are compared one by one."""

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from models.add_layer_norm import LayerNorm
from models.artifact import Artifact
from models.export.exporter import export
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from models.gradients.graph_weights import LoadedGraph, compare_weights
from models.gradients.inputs import InputRow
from models.gradients.parity import first_divergence
from models.gradients.reference_model import ReferenceModel
from models.network.disentangled import DistanceConfig
from models.network.heads import DenseHead, NormHead
from tests.models.checkpoints import save_bge_m3, save_checkpoint, save_tokenizer
from tests.models.gradients.parity.conftest import (
    LAYER,
    LAYERS,
    ROWS,
    differences,
    edited,
    edited_tensor,
    graph_of,
    loaded,
    parity_of,
    perturbed,
    projection,
    self_contained,
    token_type,
    with_graph,
)
from tests.models.gradients.toys import ADAPTED, GATED, LLAMA, toy_model


@pytest.mark.slow
def test_weights_of_several_outputs_are_compared(tmp_path: Path) -> None:
    save_bge_m3(tmp_path / "model")
    artifact, _ = export(resolve(str(tmp_path / "model")), tmp_path / "artifact")
    graph = LoadedGraph.load(artifact.path / "model.onnx")
    model = ReferenceModel.open(artifact)
    compared = compare_weights(graph, model)
    assert {weight.status for weight in compared} == {"equal"}
    assert any(weight.name.startswith("token_heads") for weight in compared)
    assert parity_of(artifact, model).passes


@pytest.mark.slow
def test_every_weight_of_the_reference_model_is_compared(
    graph: bytes, model: ReferenceModel
) -> None:
    names = [weight.name for weight in compare_weights(loaded(graph), model)]
    assert len(names) == len(set(names))
    assert {name.partition("[")[0] for name in names} == {
        name for name, _ in model.network.named_parameters()
    }
    # Each layer holds in_proj_weight and in_proj_bias as three parts.
    assert len(names) == len(list(model.network.parameters())) + 2 * 2 * LAYERS


WEIGHTS: dict[str, Callable[[bytes], str]] = {
    "encoder.embeddings.word.weight": lambda _: "model.encoder.embeddings.word.weight",
    "encoder.embeddings.position.weight": lambda _: "model.encoder.embeddings.position.weight",
    "encoder.embeddings.token_type.weight[0]": token_type,
    "encoder.embeddings.norm.bias": lambda _: "model.encoder.embeddings.norm.bias",
    f"{LAYER}.self_attn.in_proj_weight[query]": lambda graph: projection(graph, 3, 0, 1),
    f"{LAYER}.self_attn.in_proj_weight[key]": lambda graph: projection(graph, 3, 1, 1),
    f"{LAYER}.self_attn.in_proj_weight[value]": lambda graph: projection(graph, 3, 2, 1),
    f"{LAYER}.self_attn.in_proj_bias[value]": lambda graph: projection(graph, 3, 2, 2),
    f"{LAYER}.self_attn.out_proj.weight": lambda graph: projection(graph, 3, 3, 1),
    f"{LAYER}.linear1.weight": lambda _: f"model.{LAYER}.linear1.weight",
    f"{LAYER}.linear2.bias": lambda _: f"model.{LAYER}.linear2.bias",
    f"{LAYER}.norm1.weight": lambda _: f"model.{LAYER}.norm1.weight",
}


@pytest.mark.parametrize("weight", WEIGHTS)
def test_one_changed_element_is_reported_with_its_weight_name(
    weight: str, graph: bytes, model: ReferenceModel
) -> None:
    result = differences(perturbed(graph, WEIGHTS[weight](graph)), model)
    assert result == {weight: pytest.approx(1e-3, rel=1e-3)}


def test_weights_are_in_the_order_of_the_forward_pass(graph: bytes, model: ReferenceModel) -> None:
    names = [weight.name for weight in compare_weights(loaded(graph), model)]
    assert names[0] == "encoder.embeddings.word.weight"
    layers = [int(name.split(".")[2]) for name in names if name.startswith("encoder.layers.")]
    assert layers == sorted(layers)
    own = [name.removeprefix(f"{LAYER}.") for name in names if name.startswith(LAYER)]
    parts = [name.split(".")[0] for name in own]
    assert list(dict.fromkeys(parts)) == ["self_attn", "norm1", "linear1", "linear2", "norm2"]


def test_failures_name_the_weight_and_its_difference(
    tiny: Artifact, graph: bytes, model: ReferenceModel, tmp_path: Path
) -> None:
    name = f"{LAYER}.linear1.weight"
    changed = with_graph(tiny, perturbed(graph, f"model.{name}"), tmp_path)
    result = parity_of(changed, model)
    assert not result.passes
    assert result.failures[:2] == (
        "model.onnx was changed or replaced since the service started",
        f"{name} differs by 1.0e-03",
    )
    assert all(line.startswith("tokens diverge from layers.3 on") for line in result.failures[2:])


@pytest.mark.slow
def test_relative_positions_heads_and_zero_biases_are_compared() -> None:
    heads = [
        DenseHead(16, 6, bias=False, activation="Tanh", residual=True),
        DenseHead(6, 4, True, "Identity"),
    ]
    model = toy_model(
        normalize=False,
        pooling="cls",
        heads=heads,
        num_layers=1,
        type_vocab_size=0,
        relative_buckets=8,
    )
    network = model.network
    zero = "encoder.layers.0.linear1.bias"  # the exporter omits a bias of zero
    network.get_parameter(zero).zero_()
    graph = graph_of(model)
    assert differences(graph, model) == {}
    assert first_divergence(loaded(graph), model, [InputRow([3, 9, 4]), InputRow([5])])[1] is None
    of_heads = [
        f"heads.{name}" for name in ("0.linear.weight", "0.residual.weight", "1.linear.bias")
    ]
    names = ["encoder.relative_bias.weight", *of_heads]
    for name in (zero, *names):
        network.get_parameter(name)[0] += 1
    assert differences(graph, model) == {zero: None} | dict.fromkeys(
        names, pytest.approx(1, rel=1e-5)
    )


@pytest.mark.slow
@pytest.mark.parametrize("changes", [GATED, LLAMA], ids=["layer norm", "RMS norm"])
def test_bias_of_a_norm_after_norms_without_bias_is_compared(changes: dict[str, Any]) -> None:
    model = toy_model(normalize=False, heads=[NormHead(LayerNorm(16), 16)], **changes)
    graph, network = graph_of(model), model.network
    assert differences(graph, model) == {}
    network.get_parameter("heads.0.norm.bias")[0] += 1
    assert differences(graph, model) == {"heads.0.norm.bias": pytest.approx(1, rel=1e-5)}


@pytest.mark.slow
def test_adapters_are_compared() -> None:
    model = toy_model(**ADAPTED)
    graph, network = graph_of(model), model.network
    assert differences(graph, model) == {}
    rows = [InputRow([3, 9, 4]), InputRow([5], adapter=0), InputRow([6, 7, 8], adapter=1)]
    assert first_divergence(loaded(graph), model, rows)[1] is None
    names = [
        *("encoder.embeddings.word.adapters.down", "encoder.embeddings.token_type.adapters.up"),
        *("encoder.layers.1.self_attn.in_proj_adapters.up", "encoder.layers.0.linear2.adapters.up"),
    ]
    for name in names:
        network.get_parameter(name)[1, 0, 1] += 1e-3
    assert differences(graph, model) == dict.fromkeys(names, pytest.approx(1e-3, rel=1e-3))
    assert first_divergence(loaded(graph), model, rows)[1] == "embeddings"


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_tables_of_distances_are_compared(shared: bool) -> None:
    distances = DistanceConfig(span=4, max_distance=9, shared=shared, norm=True)
    model = toy_model(distances=distances, position_embeddings=False, type_vocab_size=0)
    graph, network = graph_of(model), model.network
    assert differences(graph, model) == {}
    assert first_divergence(loaded(graph), model, [InputRow([3, 9, 4]), InputRow([5])])[1] is None
    network.get_parameter("encoder.distance_embeddings.norm.weight")[3] += 1e-3
    tables = {
        f"encoder.layers.{i}.self_attn.distance_{kind}"
        for i, kind in product((0, 1), ("keys", "queries"))
    }
    assert differences(graph, model).keys() == tables


def test_swapped_query_and_key_are_both_reported(graph: bytes, model: ReferenceModel) -> None:
    def swap(model: onnx.ModelProto) -> None:
        gemms = [node for node in model.graph.node if node.op_type == "Gemm"]
        query, key = gemms[18], gemms[19]
        query.input[1], key.input[1] = key.input[1], query.input[1]

    assert set(differences(edited(graph, swap), model)) == {
        f"{LAYER}.self_attn.in_proj_weight[query]",
        f"{LAYER}.self_attn.in_proj_weight[key]",
    }


@pytest.mark.parametrize("name", ["linear1", "self_attn.out_proj"])
def test_transposed_weight_is_matched_only_with_its_trans_flag(
    name: str, graph: bytes, model: ReferenceModel
) -> None:
    tensor = f"model.{LAYER}.{name}.weight"

    def clear_flag(model: onnx.ModelProto) -> None:
        (gemm,) = (node for node in model.graph.node if tensor in node.input)
        (flag,) = (a for a in gemm.attribute if a.name == "transB")
        flag.i = 0

    transposed = edited_tensor(graph, tensor, lambda weight: weight.T.copy())
    assert differences(edited(transposed, clear_flag), model) == {}
    changed = perturbed(edited(transposed, clear_flag), tensor)
    assert set(differences(changed, model)) == {f"{LAYER}.{name}.weight"}
    # Transposed without the flag it is a different weight, even where it is square.
    assert set(differences(transposed, model)) == {f"{LAYER}.{name}.weight"}


def test_equal_weights_may_share_one_tensor(graph: bytes, model: ReferenceModel) -> None:
    first, second = (f"encoder.layers.{layer}.norm1.weight" for layer in (1, 4))
    network = copy.deepcopy(model.network)
    with torch.no_grad():
        network.get_parameter(second).copy_(network.get_parameter(first))

    def share(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for index, name in enumerate(node.input):
                if name == f"model.{second}":
                    node.input[index] = f"model.{first}"

    shared = edited(graph, share)
    assert differences(shared, ReferenceModel(network, normalize=True)) == {}
    changed = perturbed(shared, f"model.{first}")
    assert set(differences(changed, ReferenceModel(network, normalize=True))) == {first, second}


def test_weight_missing_from_the_graph_is_reported_absent(
    tiny: Artifact, graph: bytes, model: ReferenceModel, tmp_path: Path
) -> None:
    def drop(model: onnx.ModelProto) -> None:
        (norm,) = (n for n in model.graph.node if "model.encoder.layers.4.norm2.bias" in n.input)
        del norm.input[2]

    result = parity_of(with_graph(tiny, edited(graph, drop), tmp_path), model)
    assert "encoder.layers.4.norm2.bias is absent from the graph" in result.failures
    assert [w.name for w in result.weights if w.status == "absent"] == [
        "encoder.layers.4.norm2.bias"
    ]


def test_weight_off_by_a_millionth_is_named(
    tiny: Artifact, graph: bytes, model: ReferenceModel, tmp_path: Path
) -> None:
    name = f"{LAYER}.linear1.weight"
    changed = with_graph(tiny, perturbed(graph, f"model.{name}", by=1e-6), tmp_path)
    assert parity_of(changed, model).failures[1:] == (f"{name} differs by 1.0e-06",)


def test_graph_of_another_seed_is_told_in_one_sentence(
    tiny: Artifact, graph: bytes, model: ReferenceModel, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)

    def draw_weights(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT and tensor.dims:
                weights = rng.normal(scale=0.1, size=tensor.dims).astype(np.float32)
                tensor.CopyFrom(numpy_helper.from_array(weights, tensor.name))

    changed = with_graph(tiny, edited(graph, draw_weights), tmp_path)
    failures = parity_of(changed, model).failures
    assert failures[0].startswith("model.onnx was changed or replaced")
    assert failures[1].endswith("the graph belongs to another model or to other weights")
    assert not any("weight differs" in failure for failure in failures)


@pytest.mark.slow
def test_graph_that_computes_first_tokens_alone_is_compared(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", "bert", num_hidden_layers=2)
    save_tokenizer(tmp_path / "model")
    overrides = Overrides(pooling=["cls"])
    artifact, _ = export(resolve(str(tmp_path / "model")), tmp_path / "out", overrides=overrides)
    model = ReferenceModel.open(artifact)
    assert model.network.reads_first_tokens
    result = parity_of(artifact, model)
    assert (result.passes, result.first_divergence) == (True, None)
    assert [line.layer for line in result.curve] == ["embeddings", "layers.0", "output"]
    graph = perturbed(self_contained(artifact), "model.encoder.layers.1.linear2.bias", by=0.1)
    assert first_divergence(loaded(graph), model, ROWS)[1] == "output"
