import copy
import os
import shutil
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from onnxruntime.quantization import quantize_dynamic

from models.add_layer_norm import LayerNorm
from models.artifact import Artifact, sha256
from models.engines.with_onnxruntime import onnxruntime_session
from models.export.exporter import export
from models.export.onnx_graph import graph_for
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from models.gradients.graph_weights import LoadedGraph, compare_weights
from models.gradients.inputs import InputRow
from models.gradients.parity import (
    MAX_RELATIVE,
    STRESS_ROWS,
    Served,
    Tokenized,
    compare_vectors,
    first_divergence,
    norm_stress,
    parity,
)
from models.gradients.reference_model import ReferenceModel
from models.gradients.results import FileHash, ParityCheck, VectorDifference
from models.network.disentangled import DistanceConfig
from models.network.heads import DenseHead, NormHead
from models.network.norms import KINDS
from models.packing import pack
from tests.conftest import FamilyArtifact
from tests.models.checkpoints import save_bge_m3, save_checkpoint, save_tokenizer
from tests.models.gradients.toys import ADAPTED, GATED, LLAMA, toy_model
from tests.shared_traces import trace_once

LAYER = "encoder.layers.3"
LAYERS = 5
# Every row starts with [CLS], id 0.
ROWS = [InputRow([0, 7, 31, 44, 2]), InputRow([0, 5, 2])]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Export a random BERT with a few hundred kilobytes of weights."""
    folder = tmp_path_factory.mktemp("parity")
    save_checkpoint(folder / "tiny", "bert", num_hidden_layers=LAYERS)
    save_tokenizer(folder / "tiny")
    overrides = Overrides(pooling=["mean"])
    return export(resolve(str(folder / "tiny")), folder / "artifact", overrides=overrides)[0]


@pytest.fixture(scope="module")
def graph(tiny: Artifact) -> bytes:
    return self_contained(tiny)


@pytest.fixture(scope="module")
def model(tiny: Artifact) -> ReferenceModel:
    return ReferenceModel.open(tiny)


def self_contained(artifact: Artifact) -> bytes:
    """Return the graph for onnxruntime, with its weights."""
    return onnx.load(artifact.path / "model.onnx").SerializeToString()


def loaded(graph: bytes) -> LoadedGraph:
    return LoadedGraph(onnx.load_from_string(graph), Path())


def edited(graph: bytes, edit: Callable[[onnx.ModelProto], None]) -> bytes:
    model = onnx.load_from_string(graph)
    edit(model)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def edited_tensor(
    graph: bytes, name: str, edit: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> bytes:
    def apply(model: onnx.ModelProto) -> None:
        (tensor,) = (t for t in model.graph.initializer if t.name == name)
        tensor.CopyFrom(numpy_helper.from_array(edit(numpy_helper.to_array(tensor).copy()), name))

    return edited(graph, apply)


def perturbed(graph: bytes, name: str, by: float = 1e-3) -> bytes:
    """Return the graph with one element of a tensor changed, in the row of [CLS] for a table."""

    def perturb(tensor: NDArray[np.float32]) -> NDArray[np.float32]:
        tensor[(0, 5)[-tensor.ndim :]] += by
        return tensor

    return edited_tensor(graph, name, perturb)


def served_by(graph: bytes, rows: Sequence[InputRow]) -> Served:
    batch = pack([row.ids for row in rows], [row.prompt_tokens for row in rows])
    (vectors,) = onnxruntime_session(graph, 1).run(["pooled"], batch.inputs())
    return Served("onnxruntime", "float32", vectors)


def files_of(artifact: Artifact) -> list[FileHash]:
    paths = {name: artifact.path / name for name in artifact.manifest.files}
    return [
        FileHash(name, expected, sha256(paths[name]) if paths[name].is_file() else None)
        for name, expected in artifact.manifest.files.items()
    ]


def parity_of(
    artifact: Artifact,
    model: ReferenceModel,
    rows: Sequence[InputRow] = ROWS,
    served: Served | None = None,
    tokenized: Sequence[Tokenized] = (),
) -> ParityCheck:
    served = served or served_by(self_contained(artifact), rows)
    return parity(artifact, model, rows, served, files_of(artifact), tokenized)


def with_graph(artifact: Artifact, graph: bytes, folder: Path) -> Artifact:
    """Return a copy of the artifact whose graph was replaced after the artifact was loaded."""
    shutil.copytree(artifact.path, folder / "copy")
    copied = Artifact.load(folder / "copy")
    (copied.path / "model.onnx").write_bytes(graph)
    return copied


def projection(graph: bytes, layer: int, index: int, operand: int) -> str:
    """Return the name of a layer's query, key or value weight (operand 1) or bias (operand 2)."""
    gemms = [n for n in onnx.load_from_string(graph).graph.node if n.op_type == "Gemm"]
    return gemms[6 * layer + index].input[operand]


def token_type(graph: bytes) -> str:
    (add,) = (
        node
        for node in onnx.load_from_string(graph).graph.node
        if node.op_type == "Add" and "embedding" in node.input
    )
    return add.input[1]


def differences(graph: bytes, model: ReferenceModel) -> dict[str, float | None]:
    return {w.name: w.max_abs for w in compare_weights(loaded(graph), model) if w.status != "equal"}


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
@pytest.mark.parametrize("family", ["bert", "modernbert"])  # post-norm and pre-norm
def test_layers_are_compared_without_the_output_tokens(family: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", family)
    save_tokenizer(tmp_path / "model")
    overrides = Overrides(pooling=["mean"], tokens=False)
    source = resolve(str(tmp_path / "model"))
    artifact, _ = export(source, tmp_path / "artifact", overrides=overrides)
    assert artifact.manifest.outputs == ("pooled",)
    model = ReferenceModel.open(artifact)
    result = parity_of(artifact, model)
    assert (result.passes, result.first_divergence) == (True, None)
    assert [difference.layer for difference in result.curve] == list(model.layer_names[1:])
    last = [*model.network.encoder.parameters()][-1]  # a norm's
    with torch.no_grad():
        last[0] += 1
    graph = LoadedGraph.load(artifact.path / "model.onnx")
    assert first_divergence(graph, model, ROWS)[1] == "output"


def test_exported_artifact_passes_with_all_weights_equal(artifact: Artifact) -> None:
    model = ReferenceModel.open(artifact)
    rows = [InputRow(ids) for ids in artifact.check().rows]
    result = parity_of(artifact, model, rows)
    assert result.failures == ()
    assert result.passes
    assert {weight.status for weight in result.weights} == {"equal"}
    assert len(result.vectors) == len(rows)
    assert [difference.layer for difference in result.curve] == list(model.layer_names[1:])
    assert {file.name for file in result.files} == set(artifact.manifest.files)


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
    network = model.network.float()
    zero = "encoder.layers.0.linear1.bias"  # the exporter omits a bias of zero
    network.get_parameter(zero).zero_()
    graph = graph_for("onnxruntime", trace_once(network, "cpu"))
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
    network = model.network.float()
    graph = graph_for("onnxruntime", trace_once(network, "cpu"))
    assert differences(graph, model) == {}
    network.get_parameter("heads.0.norm.bias")[0] += 1
    assert differences(graph, model) == {"heads.0.norm.bias": pytest.approx(1, rel=1e-5)}


@pytest.mark.slow
def test_adapters_are_compared() -> None:
    model = toy_model(**ADAPTED)
    network = model.network.float()
    graph = graph_for("onnxruntime", trace_once(network, "cpu"))
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
    network = model.network.float()
    graph = graph_for("onnxruntime", trace_once(network, "cpu"))
    assert differences(graph, model) == {}
    assert first_divergence(loaded(graph), model, [InputRow([3, 9, 4]), InputRow([5])])[1] is None
    network.get_parameter("encoder.distance_embeddings.norm.weight")[3] += 1e-3
    tables = {
        f"encoder.layers.{i}.self_attn.distance_{kind}"
        for i, kind in product((0, 1), ("keys", "queries"))
    }
    assert differences(graph, model).keys() == tables


@pytest.mark.parametrize(
    "family",
    [
        *("modernbert", "gte", "albert", "eurobert", "qwen3"),
        *("gemma3_text", "jina_bert_code", "deberta-v2", "nomic_moe"),
    ],
)
def test_families_with_gates_windows_shared_layers_and_experts_pass(
    family: str, family_artifact: FamilyArtifact
) -> None:
    exported = family_artifact(family)
    model = ReferenceModel.open(exported)
    result = parity_of(exported, model)
    assert result.failures == ()
    layers = model.network.encoder.layer_order
    per_layer = len(list(model.network.encoder.layers[1].parameters())) - 1
    assert len(result.weights) > per_layer * len(layers)
    # Weights of the last layer, which in ALBERT runs more than once.
    index = layers[-1]
    names = ["linear2.weight"]
    if family == "nomic_moe":
        names = ["experts.bias", "experts.3.w2.weight"]
        model.network.get_parameter(f"encoder.layers.{index}.experts.bias")[5] += 1e-3
        # A row of the fourth of 8 experts, each 48 wide.
        model.network.get_parameter(f"encoder.layers.{index}.experts.w2")[3 * 48 + 5, 0] += 1e-3
    else:
        model.network.get_parameter(f"encoder.layers.{index}.linear2.weight")[0, 0] += 1e-3
    graph = LoadedGraph.load(exported.path / "model.onnx")
    differing = [w.name for w in compare_weights(graph, model) if w.max_abs]
    runs = [run for run, layer in enumerate(layers) if layer == index]
    assert differing == [f"encoder.layers.{run}.{name}" for run in runs for name in names]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:onnxruntime")
@pytest.mark.parametrize("per_channel", [False, True])
def test_drift_of_a_quantized_graph_is_told_for_each_weight_and_layer(
    per_channel: bool, tiny: Artifact, model: ReferenceModel, tmp_path: Path
) -> None:
    # The graph without subgraphs, which the quantizer leaves out.
    file = tiny.path / "model.openvino.onnx"
    quantize_dynamic(file, tmp_path / "int8.onnx", per_channel=per_channel)
    quantized = (tmp_path / "int8.onnx").read_bytes()
    weights = dict(model.network.named_parameters())
    differences = compare_weights(loaded(quantized), model)
    for name, max_abs in {w.name: w.max_abs for w in differences}.items():
        weight = weights[name.partition("[")[0]]
        if weight.ndim == 1 or "token_type" in name:
            assert max_abs == 0, name
        else:  # at most one of 127 steps
            assert max_abs is not None
            assert 0 < max_abs <= weight.abs().max().item() / 127, name
    curve, first = first_divergence(loaded(quantized), model, ROWS)
    assert first == "embeddings"
    assert all(difference.relative > MAX_RELATIVE for difference in curve)
    result = parity_of(with_graph(tiny, quantized, tmp_path), model)
    matrices = [line for line in result.failures if "weight" in line and " differs by " in line]
    assert len(matrices) == 2 + 6 * LAYERS


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


@pytest.mark.parametrize(
    ("name", "layer_name"),
    [
        ("model.encoder.embeddings.word.weight", "embeddings"),
        ("model.encoder.layers.0.linear2.bias", "layers.0"),
        ("model.encoder.layers.3.norm1.weight", "layers.3"),
        ("model.encoder.layers.4.self_attn.out_proj.weight", "output"),
    ],
)
def test_first_divergence_is_the_layer_of_the_changed_weight(
    name: str, layer_name: str, graph: bytes, model: ReferenceModel
) -> None:
    curve, first = first_divergence(loaded(perturbed(graph, name, by=0.5)), model, ROWS)
    assert first == layer_name
    beyond = [p.layer for p in curve if p.relative > MAX_RELATIVE]
    assert beyond == list(model.layer_names[model.layer_names.index(layer_name) :])


def test_exported_graph_stays_below_a_quarter_of_the_divergence_bound(artifact: Artifact) -> None:
    rng = np.random.default_rng(0)
    rows = [InputRow(rng.integers(0, 30522, length).tolist()) for length in (1, 2, 17, 256)]
    graph = LoadedGraph.load(artifact.path / "model.onnx")
    curve, first = first_divergence(graph, ReferenceModel.open(artifact), rows)
    assert first is None
    assert max(difference.relative for difference in curve) < MAX_RELATIVE / 4
    # A difference of exactly zero would mean that the values were compared with themselves.
    assert min(difference.max_abs for difference in curve) > 0


def test_changed_epsilon_is_detected_with_equal_weights(
    tiny: Artifact, graph: bytes, model: ReferenceModel, tmp_path: Path
) -> None:
    def change(model: onnx.ModelProto) -> None:
        norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
        (epsilon,) = (a for a in norms[6].attribute if a.name == "epsilon")
        epsilon.f = 1e-2

    result = parity_of(with_graph(tiny, edited(graph, change), tmp_path), model)
    assert {weight.status for weight in result.weights} == {"equal"}
    assert result.first_divergence == "layers.2"
    assert any(line.startswith("tokens diverge from layers.2 on") for line in result.failures)
    assert any(line.startswith("the vector of row 0 differs by") for line in result.failures)


def test_changed_pooling_is_detected_in_the_vectors_only(
    tiny: Artifact, graph: bytes, model: ReferenceModel, tmp_path: Path
) -> None:
    def pool_first_token(model: onnx.ModelProto) -> None:
        nodes = model.graph.node
        *_, mean = (node for node in nodes if node.op_type == "MatMul")
        (pooled,) = (node for node in nodes if "pooled" in node.output)
        nodes.remove(pooled)
        model.graph.initializer.append(numpy_helper.from_array(np.array(0), "first"))
        nodes.append(onnx.helper.make_node("Gather", [mean.input[1], "first"], ["pooled"], axis=1))

    result = parity_of(with_graph(tiny, edited(graph, pool_first_token), tmp_path), model)
    assert {weight.status for weight in result.weights} == {"equal"}
    assert result.first_divergence is None
    assert all(vector.cosine < 0.99 for vector in result.vectors)
    assert len(result.failures) == 1 + len(ROWS)


def test_prompt_tokens_are_excluded_from_pooling_in_graph_and_model(
    tiny: Artifact, model: ReferenceModel
) -> None:
    rows = [InputRow(ROWS[0].ids, prompt_tokens=2), ROWS[1]]
    assert parity_of(tiny, model, rows).passes


def test_compare_vectors_measures_differences_and_checks_the_shape(model: ReferenceModel) -> None:
    exact = np.stack([model.vector(row).numpy() for row in ROWS])
    served = exact.copy()
    served[1, 7] += 0.5
    good, bad = compare_vectors(served, model, ROWS)
    assert (good.max_abs, good.relative) == (0, 0)
    assert good.cosine == pytest.approx(1)
    assert bad.max_abs == pytest.approx(0.5)
    assert bad.relative == pytest.approx(0.5 / np.abs(exact[1]).max())
    assert bad.cosine < 0.999
    with pytest.raises(
        ValueError,
        match=r"served vectors have shape \(2, 3\), the reference model's have shape \(2, 32\)",
    ):
        compare_vectors(served[:, :3], model, ROWS)


@pytest.mark.parametrize(
    ("field", "value"), [("cosine", 0.9999), ("relative", 2e-4), ("cosine", np.nan)]
)
def test_vector_fails_on_cosine_or_on_relative_difference(
    field: str, value: float, tiny: Artifact, model: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"cosine": 1.0, "max_abs": 0.0, "relative": 0.0, field: value}
    vectors = (VectorDifference(**numbers),)
    monkeypatch.setattr("models.gradients.parity.compare_vectors", lambda *_: vectors)
    (failure,) = parity_of(tiny, model, ROWS[:1]).failures
    assert failure.startswith("the vector of row 0 differs by")


def test_nan_weight_diverges_and_is_reported(graph: bytes, model: ReferenceModel) -> None:
    broken = perturbed(graph, "model.encoder.layers.1.norm2.bias", by=np.nan)
    curve, first = first_divergence(loaded(broken), model, ROWS)
    assert first == "layers.1"
    assert np.isnan(curve[-1].relative)
    ((name, max_abs),) = differences(broken, model).items()
    assert name == "encoder.layers.1.norm2.bias"
    assert max_abs is not None
    assert np.isnan(max_abs)


def test_changed_or_missing_source_weights_are_reported(
    tiny: Artifact, model: ReferenceModel, tmp_path: Path
) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(tiny.path, copied)
    moved = Artifact.load(copied)
    weights = copied / "source" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    served = served_by(self_contained(tiny), ROWS)
    result = parity_of(moved, model, served=served)
    assert result.failures == (
        "source/model.safetensors was changed or replaced since the service started",
    )
    weights.unlink()
    result = parity_of(moved, model, served=served)
    assert result.failures == ("source/model.safetensors was removed since the service started",)


@pytest.mark.parametrize("content", [b"", b"not a graph", None])
def test_graph_file_that_became_unreadable_is_reported(
    content: bytes | None, tiny: Artifact, model: ReferenceModel, tmp_path: Path
) -> None:
    changed = with_graph(tiny, content or b"", tmp_path)
    if content is None:
        (changed.path / "model.onnx").unlink()
    result = parity_of(changed, model, served=served_by(self_contained(tiny), ROWS))
    gone, unreadable = result.failures
    assert gone.startswith("model.onnx ")
    assert unreadable.startswith("model.onnx cannot be compared: ")
    assert (result.weights, result.curve) == ((), ())
    assert all(vector.relative < 1e-5 for vector in result.vectors)


def test_artifact_with_hard_linked_weights_is_compared(
    tiny: Artifact, model: ReferenceModel, tmp_path: Path
) -> None:
    served = served_by(self_contained(tiny), ROWS)
    shutil.copytree(tiny.path, tmp_path / "copy")
    shutil.copytree(tmp_path / "copy", tmp_path / "linked", copy_function=os.link)
    linked = Artifact.load(tmp_path / "linked")
    assert parity_of(linked, model, served=served).failures == ()


def test_weights_that_became_unreadable_are_reported(
    tiny: Artifact, model: ReferenceModel, tmp_path: Path
) -> None:
    served = served_by(self_contained(tiny), ROWS)
    changed = with_graph(tiny, tiny.read("model.onnx"), tmp_path)
    with (changed.path / "model.weights").open("r+b") as file:
        file.truncate(1000)
    failures = parity_of(changed, model, served=served).failures
    assert failures[0].startswith("model.weights was changed or replaced")
    assert failures[1].startswith("model.onnx cannot be compared: ")


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


def test_defect_of_the_comparison_itself_is_not_reported_as_a_changed_file(
    tiny: Artifact, model: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("models.gradients.parity.compare_weights", broken)
    with pytest.raises(ZeroDivisionError):
        parity_of(tiny, model)


def test_served_vectors_are_judged_by_the_precision_of_their_engine(
    tiny: Artifact, model: ReferenceModel
) -> None:
    exact = served_by(self_contained(tiny), ROWS)
    noise = np.random.default_rng(0).normal(size=exact.vectors.shape).astype(np.float32)
    vectors = exact.vectors * (1 + np.float32(0.005) * noise)
    half = exact._replace(engine="openvino", precision="bfloat16", vectors=vectors)
    assert parity_of(tiny, model, served=half).passes
    full = half._replace(precision="float32")
    failures = parity_of(tiny, model, served=full).failures
    assert len(failures) == len(ROWS)
    assert all(failure.endswith("and openvino in float32") for failure in failures)


@pytest.mark.parametrize(
    ("served", "failure"),
    [
        ([2, 7, 9, 3], None),
        ([2, 7, 8, 3], "token 2 of 'a cat' is id 8; it should be id 9"),
        ([2, 7, 9], "token 3 of 'a cat' is missing; it should be id 3"),
        ([2, 7, 9, 3, 3], "token 4 of 'a cat' is id 3; it should be missing"),
    ],
)
def test_first_different_token_id_is_reported(
    served: list[int], failure: str | None, tiny: Artifact, model: ReferenceModel
) -> None:
    result = parity_of(tiny, model, tokenized=[Tokenized("a cat", served, [2, 7, 9, 3])])
    assert result.failures == (() if failure is None else (failure,))


def test_layer_norm_stress_rows_pass_on_the_installed_onnxruntime() -> None:
    for width, kind in product((24, 384, 768, 1024), KINDS):
        for eps in (1e-12, 1e-5):
            rows = norm_stress(width, eps, kind)
            assert [stress.row for stress in rows] == list(STRESS_ROWS)
            assert all(stress.finite and stress.error <= stress.bound for stress in rows)


@pytest.mark.parametrize("width", [6, 30, 450])
def test_rows_with_large_means_are_left_out_at_widths_where_they_are_not_exact(width: int) -> None:
    rows = norm_stress(width, 1e-12, "layer_norm")
    assert {row.row for row in rows} == {"constant", "zero", "tiny values", "huge"}
    assert all(row.finite and row.error <= row.bound for row in rows)


def single_pass(x: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    """Normalise with the variance as mean(x^2) - mean(x)^2, which cancels for a large mean."""
    mean = x.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (x - mean) / np.sqrt((x * x).mean(-1, keepdims=True) - mean * mean + np.float32(eps))


def clipped(x: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    """Normalise like `single_pass`, with the variance clipped at zero."""
    mean = x.mean(-1, keepdims=True)
    variance = np.maximum((x * x).mean(-1, keepdims=True) - mean * mean, np.float32(0))
    return (x - mean) / np.sqrt(variance + np.float32(eps))


@pytest.mark.parametrize(("norm", "finite"), [(single_pass, False), (clipped, True)])
def test_single_pass_variance_fails_on_a_row_with_a_large_mean(
    norm: Callable[[NDArray[np.float32], float], NDArray[np.float32]],
    finite: bool,
    tiny: Artifact,
    model: ReferenceModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Session:
        def run(
            self, _: list[str], inputs: dict[str, NDArray[np.float32]]
        ) -> list[NDArray[np.float32]]:
            return [norm(inputs["x"] + inputs["residual"], 1e-12)]

    def session(graph: bytes, threads: int, folder: Path | None = None) -> object:
        is_norm_alone = len(onnx.load_from_string(graph).graph.node) == 2
        return Session() if is_norm_alone else onnxruntime_session(graph, threads, folder=folder)

    served = served_by(self_contained(tiny), ROWS)
    monkeypatch.setattr("models.gradients.parity.onnxruntime_session", session)
    result = parity_of(tiny, model, served=served)
    stress = {stress.row: stress for stress in result.layer_norm}
    assert stress["zero"].error <= stress["zero"].bound
    assert stress["large mean"].finite is finite
    assert not stress["large mean"].error <= stress["large mean"].bound
    assert any("on the row 'large mean'" in line for line in result.failures)
    assert not any("on the row 'zero'" in line for line in result.failures)


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
