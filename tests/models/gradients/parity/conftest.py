"""A small artifact, its graph and reference model, and changes of the graph."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from models.artifact import Artifact, sha256
from models.engines.with_onnxruntime import onnxruntime_session
from models.export.exporter import export
from models.export.onnx_graph import graph_for
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from models.gradients.graph_weights import LoadedGraph, compare_weights
from models.gradients.inputs import InputRow
from models.gradients.parity import Served, Tokenized, parity
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.parity import FileHash, ParityCheck
from models.packing import pack
from tests.models.checkpoints import save_checkpoint, save_tokenizer
from tests.shared_traces import trace_once

LAYER = "encoder.layers.3"
LAYERS = 5
# Every row starts with [CLS], id 0.
ROWS = [InputRow([0, 7, 31, 44, 2]), InputRow([0, 5, 2])]


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Export a random BERT with a few hundred kilobytes of weights."""
    folder = tmp_path_factory.mktemp("parity")
    save_checkpoint(folder / "tiny", "bert", num_hidden_layers=LAYERS)
    save_tokenizer(folder / "tiny")
    overrides = Overrides(pooling=["mean"])
    return export(resolve(str(folder / "tiny")), folder / "artifact", overrides=overrides)[0]


@pytest.fixture(scope="package")
def graph(tiny: Artifact) -> bytes:
    return self_contained(tiny)


@pytest.fixture(scope="package")
def model(tiny: Artifact) -> ReferenceModel:
    return ReferenceModel.open(tiny)


def self_contained(artifact: Artifact) -> bytes:
    """Return the graph for onnxruntime, with its weights."""
    return onnx.load(artifact.path / "model.onnx").SerializeToString()


def loaded(graph: bytes) -> LoadedGraph:
    return LoadedGraph(onnx.load_from_string(graph), Path())


def graph_of(model: ReferenceModel) -> bytes:
    """Return the graph of a model for onnxruntime; the model's weights become float32."""
    return graph_for("onnxruntime", trace_once(model.network.float(), "cpu"))


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
