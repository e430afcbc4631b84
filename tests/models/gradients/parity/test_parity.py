"""Layers, vectors and tokens of a served graph and of the reference model."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnxruntime.quantization import quantize_dynamic

from models.artifact import Artifact
from models.export.exporter import export
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from models.gradients.graph_weights import LoadedGraph, compare_weights
from models.gradients.inputs import InputRow
from models.gradients.parity import (
    MAX_RELATIVE,
    Tokenized,
    compare_vectors,
    first_divergence,
)
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.parity import VectorDifference
from tests.conftest import FamilyArtifact
from tests.models.checkpoints import SHALLOW, save_checkpoint, save_tokenizer
from tests.models.gradients.parity.conftest import (
    LAYERS,
    ROWS,
    differences,
    edited,
    loaded,
    parity_of,
    perturbed,
    self_contained,
    served_by,
    with_graph,
)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "modernbert"])  # post-norm and pre-norm
def test_layers_are_compared_without_the_output_tokens(family: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", family, **{**SHALLOW[family], "num_hidden_layers": 2})
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
