import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper

from models.artifact import Artifact, ArtifactError
from models.engines.with_onnxruntime import onnxruntime_session
from models.export import export
from models.gradients.parity import (
    MAX_RELATIVE,
    STRESS_ROWS,
    VectorDifference,
    compare_vectors,
    compare_weights,
    first_divergence,
    layer_norm_stress,
    parity,
)
from models.gradients.twin import Row, Twin
from models.onnx_graph import build_graph
from models.recipe import Overrides
from models.sentence_encoder import DenseHead
from models.sources import resolve
from tests.models.checkpoints import save_checkpoint, save_tokenizer
from tests.models.gradients.toys import toy_twin

LAYER = "encoder.layers.3"
LAYERS = 5
# 0 is [CLS], the first token of every row.
ROWS = [Row([0, 7, 31, 44, 2]), Row([0, 5, 2])]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A random BERT, exported; all of its weights fit into a few hundred kilobytes."""
    folder = tmp_path_factory.mktemp("parity")
    save_checkpoint(folder / "tiny", "bert", num_hidden_layers=LAYERS)
    save_tokenizer(folder / "tiny")
    overrides = Overrides(pooling=["mean"])
    return export(resolve(str(folder / "tiny")), folder / "artifact", overrides=overrides)[0]


@pytest.fixture(scope="module")
def graph(tiny: Artifact) -> bytes:
    return tiny.read("model.onnx")


@pytest.fixture(scope="module")
def twin(tiny: Artifact) -> Twin:
    return Twin.open(tiny)


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
    """The graph with one number of a tensor changed, in the row of [CLS] where it is a table."""

    def perturb(tensor: NDArray[np.float32]) -> NDArray[np.float32]:
        tensor[(0, 5)[-tensor.ndim :]] += by
        return tensor

    return edited_tensor(graph, name, perturb)


def projection(graph: bytes, layer: int, place: int, operand: int) -> str:
    """The name of a layer's query, key or value weight (operand 1) or bias (operand 2)."""
    gemms = [n for n in onnx.load_from_string(graph).graph.node if n.op_type == "Gemm"]
    return gemms[6 * layer + place].input[operand]


def token_type(graph: bytes) -> str:
    (add,) = (
        node
        for node in onnx.load_from_string(graph).graph.node
        if node.op_type == "Add" and "embedding" in node.input
    )
    return add.input[1]


def blamed(graph: bytes, twin: Twin) -> dict[str, float | None]:
    return {w.name: w.max_abs for w in compare_weights(graph, twin) if w.status != "equal"}


def test_the_exported_artifact_passes_with_all_weights_equal(artifact: Artifact) -> None:
    twin = Twin.open(artifact)
    result = parity(artifact, twin)
    assert result.failures == []
    assert result.passes
    assert {weight.status for weight in result.weights} == {"equal"}
    assert len(result.vectors) == len(artifact.check().rows)
    assert [point.point for point in result.curve] == list(twin.points[1:])
    assert [file.name for file in result.files] == ["model.onnx", "twin/model.safetensors"]


def test_every_weight_of_the_twin_is_compared(graph: bytes, twin: Twin) -> None:
    names = [weight.name for weight in compare_weights(graph, twin)]
    assert len(names) == len(set(names))
    assert {name.partition("[")[0] for name in names} == {
        name for name, _ in twin.model.named_parameters()
    }
    # In each layer two parameters are held in three parts.
    assert len(names) == len(list(twin.model.parameters())) + 2 * 2 * LAYERS


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
def test_one_number_of_one_weight_is_seen_and_its_weight_named(
    weight: str, graph: bytes, twin: Twin
) -> None:
    found = blamed(perturbed(graph, WEIGHTS[weight](graph)), twin)
    assert found == {weight: pytest.approx(1e-3, rel=1e-3)}


def test_the_report_says_which_weight_and_by_how_much(
    tiny: Artifact, graph: bytes, twin: Twin
) -> None:
    name = f"{LAYER}.linear1.weight"
    result = parity(tiny, twin, ROWS, perturbed(graph, f"model.{name}"))
    assert not result.passes
    assert result.failures[:2] == [
        "model.onnx is not what was exported",
        f"{name} differs by 1.0e-03",
    ]
    assert all(line.startswith("tokens diverge from layers.3 on") for line in result.failures[2:])


def test_relative_positions_heads_and_biases_of_zero_are_weights_too() -> None:
    heads = [DenseHead(16, 6, bias=False, activation="Tanh"), DenseHead(6, 4, True, "Identity")]
    twin = toy_twin(
        normalize=False,
        pooling="cls",
        heads=heads,
        num_layers=1,
        type_vocab_size=0,
        relative_buckets=8,
    )
    model = twin.model.float()
    # The exporter leaves it out.
    zero = "encoder.layers.0.linear1.bias"
    model.get_parameter(zero).zero_()
    graph = build_graph(model, "cpu")
    assert blamed(graph, twin) == {}
    assert first_divergence(graph, twin, [Row([3, 9, 4]), Row([5])])[1] is None
    names = ["encoder.relative_bias.weight", "heads.0.linear.weight", "heads.1.linear.bias"]
    for name in (zero, *names):
        model.get_parameter(name)[0] += 1
    assert blamed(graph, twin) == {zero: None} | dict.fromkeys(names, pytest.approx(1, rel=1e-5))


def test_query_and_key_changed_over_are_both_named(graph: bytes, twin: Twin) -> None:
    def swap(model: onnx.ModelProto) -> None:
        gemms = [node for node in model.graph.node if node.op_type == "Gemm"]
        query, key = gemms[18], gemms[19]
        query.input[1], key.input[1] = key.input[1], query.input[1]

    assert set(blamed(edited(graph, swap), twin)) == {
        f"{LAYER}.self_attn.in_proj_weight[query]",
        f"{LAYER}.self_attn.in_proj_weight[key]",
    }


@pytest.mark.parametrize("name", ["linear1", "self_attn.out_proj"])
def test_a_weight_that_the_graph_holds_transposed_is_found(
    name: str, graph: bytes, twin: Twin
) -> None:
    tensor = f"model.{LAYER}.{name}.weight"

    def tell(model: onnx.ModelProto) -> None:
        (gemm,) = (node for node in model.graph.node if tensor in node.input)
        (flag,) = (a for a in gemm.attribute if a.name == "transB")
        flag.i = 0

    transposed = edited_tensor(graph, tensor, lambda weight: weight.T.copy())
    assert blamed(edited(transposed, tell), twin) == {}
    changed = perturbed(edited(transposed, tell), tensor)
    assert set(blamed(changed, twin)) == {f"{LAYER}.{name}.weight"}
    # Transposed without telling the node, it is another weight, be it square or not.
    assert set(blamed(transposed, twin)) == {f"{LAYER}.{name}.weight"}


def test_equal_weights_may_share_one_tensor(graph: bytes, twin: Twin) -> None:
    first, second = (f"encoder.layers.{layer}.norm1.weight" for layer in (1, 4))
    model = copy.deepcopy(twin.model)
    with torch.no_grad():
        model.get_parameter(second).copy_(model.get_parameter(first))

    def share(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for place, name in enumerate(node.input):
                if name == f"model.{second}":
                    node.input[place] = f"model.{first}"

    shared = edited(graph, share)
    assert blamed(shared, Twin(model, normalize=True)) == {}
    changed = perturbed(shared, f"model.{first}")
    assert set(blamed(changed, Twin(model, normalize=True))) == {first, second}


def test_a_weight_that_the_graph_lacks_is_absent(tiny: Artifact, graph: bytes, twin: Twin) -> None:
    def drop(model: onnx.ModelProto) -> None:
        (norm,) = (n for n in model.graph.node if "model.encoder.layers.4.norm2.bias" in n.input)
        del norm.input[2]

    result = parity(tiny, twin, ROWS, edited(graph, drop))
    assert "encoder.layers.4.norm2.bias is absent from the graph" in result.failures
    assert [w.name for w in result.weights if w.status == "absent"] == [
        "encoder.layers.4.norm2.bias"
    ]


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("model.encoder.embeddings.word.weight", "embeddings"),
        ("model.encoder.layers.0.linear2.bias", "layers.0"),
        ("model.encoder.layers.3.norm1.weight", "layers.3"),
        ("model.encoder.layers.4.self_attn.out_proj.weight", "output"),
    ],
)
def test_tokens_diverge_from_the_layer_of_the_changed_weight_on(
    name: str, point: str, graph: bytes, twin: Twin
) -> None:
    curve, first = first_divergence(perturbed(graph, name, by=0.5), twin, ROWS)
    assert first == point
    beyond = [p.point for p in curve if p.relative > MAX_RELATIVE]
    assert beyond == list(twin.points[twin.points.index(point) :])


def test_a_good_graph_stays_far_below_the_bound_of_divergence(artifact: Artifact) -> None:
    rng = np.random.default_rng(0)
    rows = [Row(rng.integers(0, 30522, length).tolist()) for length in (1, 2, 17, 256)]
    graph = artifact.read("model.onnx")
    curve, first = first_divergence(graph, Twin.open(artifact), rows)
    assert first is None
    assert max(point.relative for point in curve) < MAX_RELATIVE / 4
    # They were computed twice, not compared with themselves.
    assert min(point.max_abs for point in curve) > 0


def test_another_epsilon_is_seen_though_all_weights_are_equal(
    tiny: Artifact, graph: bytes, twin: Twin
) -> None:
    def change(model: onnx.ModelProto) -> None:
        norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
        (epsilon,) = (a for a in norms[6].attribute if a.name == "epsilon")
        epsilon.f = 1e-2

    result = parity(tiny, twin, ROWS, edited(graph, change))
    assert {weight.status for weight in result.weights} == {"equal"}
    assert result.first_divergence == "layers.2"
    assert any(line.startswith("tokens diverge from layers.2 on") for line in result.failures)
    assert any(line.startswith("the vector of row 0 differs by") for line in result.failures)


def test_another_pooling_is_seen_in_the_vectors_alone(
    tiny: Artifact, graph: bytes, twin: Twin
) -> None:
    def pool_the_first(model: onnx.ModelProto) -> None:
        nodes = model.graph.node
        (mean,) = (node for node in nodes if "unsqueeze_2" in node.input)
        (pooled,) = (node for node in nodes if "pooled" in node.output)
        nodes.remove(pooled)
        model.graph.initializer.append(numpy_helper.from_array(np.array(0), "first"))
        nodes.append(onnx.helper.make_node("Gather", [mean.input[1], "first"], ["pooled"], axis=1))

    result = parity(tiny, twin, ROWS, edited(graph, pool_the_first))
    assert {weight.status for weight in result.weights} == {"equal"}
    assert result.first_divergence is None
    assert all(vector.cosine < 0.99 for vector in result.vectors)
    assert len(result.failures) == 1 + len(ROWS)


def test_tokens_that_pooling_leaves_out_are_left_out_on_both_sides(
    tiny: Artifact, twin: Twin
) -> None:
    rows = [Row(ROWS[0].ids, unpooled=2), ROWS[1]]
    assert parity(tiny, twin, rows).passes


def test_vectors_of_any_engine_can_be_compared(twin: Twin) -> None:
    exact = np.stack([twin.vector(row).numpy() for row in ROWS])
    served = exact.copy()
    served[1, 7] += 0.5
    good, bad = compare_vectors(lambda _: served, twin, ROWS)
    assert (good.max_abs, good.relative) == (0, 0)
    assert good.cosine == pytest.approx(1)
    assert bad.max_abs == pytest.approx(0.5)
    assert bad.relative == pytest.approx(0.5 / np.abs(exact[1]).max())
    assert bad.cosine < 0.999
    with pytest.raises(ValueError, match=r"the served vectors are \(2, 3\), the twin's \(2, 32\)"):
        compare_vectors(lambda _: served[:, :3], twin, ROWS)


@pytest.mark.parametrize(
    ("field", "value"), [("cosine", 0.9999), ("max_abs", 2e-4), ("cosine", np.nan)]
)
def test_a_vector_fails_by_its_angle_and_by_its_size(
    field: str, value: float, tiny: Artifact, twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"cosine": 1.0, "max_abs": 0.0, "relative": 0.0, field: value}
    found = (VectorDifference(**numbers),)
    monkeypatch.setattr("models.gradients.parity.compare_vectors", lambda *_: found)
    (failure,) = parity(tiny, twin, ROWS[:1]).failures
    assert failure.startswith("the vector of row 0 differs by")


def test_a_graph_that_is_not_a_number_diverges(graph: bytes, twin: Twin) -> None:
    broken = perturbed(graph, "model.encoder.layers.1.norm2.bias", by=np.nan)
    curve, first = first_divergence(broken, twin, ROWS)
    assert first == "layers.1"
    assert np.isnan(curve[-1].relative)
    ((name, max_abs),) = blamed(broken, twin).items()
    assert name == "encoder.layers.1.norm2.bias"
    assert max_abs is not None
    assert np.isnan(max_abs)


def test_weights_on_disk_that_are_not_those_of_the_export_are_named(
    tiny: Artifact, twin: Twin, tmp_path: Path
) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(tiny.path, copied)
    moved = Artifact.load(copied)
    weights = copied / "twin" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    result = parity(moved, twin, ROWS)
    assert result.failures == ["twin/model.safetensors is not what was exported"]
    weights.unlink()
    assert parity(moved, twin, ROWS).files[1].found is None
    (copied / "model.onnx").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"model.onnx .* is not the file that was exported"):
        parity(moved, twin, ROWS)


def test_hard_rows_are_finite_and_right_with_the_installed_onnxruntime() -> None:
    for width in (4, 7, 384):
        for eps in (1e-12, 1e-5):
            found = layer_norm_stress(width, eps)
            assert [stress.row for stress in found] == list(STRESS_ROWS)
            assert all(stress.finite and stress.error <= stress.bound for stress in found)


def single_pass(x: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    """A norm whose variance is what squares leave of it, as kernels were written once."""
    mean = x.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (x - mean) / np.sqrt((x * x).mean(-1, keepdims=True) - mean * mean + np.float32(eps))


def clipped(x: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    """The same, made finite."""
    mean = x.mean(-1, keepdims=True)
    variance = np.maximum((x * x).mean(-1, keepdims=True) - mean * mean, np.float32(0))
    return (x - mean) / np.sqrt(variance + np.float32(eps))


@pytest.mark.parametrize(("norm", "finite"), [(single_pass, False), (clipped, True)])
def test_a_norm_of_squares_fails_on_rows_with_a_large_mean(
    norm: Callable[[NDArray[np.float32], float], NDArray[np.float32]],
    finite: bool,
    tiny: Artifact,
    twin: Twin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Session:
        def run(
            self, _: list[str], inputs: dict[str, NDArray[np.float32]]
        ) -> list[NDArray[np.float32]]:
            return [norm(inputs["x"] + inputs["residual"], 1e-12)]

    def session(graph: bytes, threads: int) -> object:
        is_norm_alone = len(onnx.load_from_string(graph).graph.node) == 2
        return Session() if is_norm_alone else onnxruntime_session(graph, threads)

    monkeypatch.setattr("models.gradients.parity.onnxruntime_session", session)
    result = parity(tiny, twin, ROWS)
    stress = {stress.row: stress for stress in result.layer_norm}
    assert stress["zero"].error <= stress["zero"].bound
    assert stress["large mean"].finite is finite
    assert not stress["large mean"].error <= stress["large mean"].bound
    assert any("on the row 'large mean'" in line for line in result.failures)
    assert not any("on the row 'zero'" in line for line in result.failures)
