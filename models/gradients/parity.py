"""Parity: comparison of the served model with the reference model.

The comparisons cover the files on disk, token ids, vectors from the serving engine, weights of the
onnxruntime graph, token vectors after each layer of this graph, and onnxruntime's norm on
numerically difficult rows. Weights and layers of other graphs are not compared: these graphs are
exported from the same weights.
"""

import copy
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from torch import Tensor

from models.artifact import Artifact
from models.engines import OUTPUTS, Precision, available_cpus, cosines
from models.engines.with_onnxruntime import onnxruntime_session
from models.gradients.graph_weights import LoadedGraph, compare_weights, norm_nodes
from models.gradients.inputs import InputRow
from models.gradients.layer_norm_implementations import onnxruntime_outputs
from models.gradients.layer_norm_operands import Operands, rounded_to
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.parity import (
    FileHash,
    LayerDifference,
    ParityCheck,
    StressRow,
    TokenIds,
    VectorDifference,
    WeightDifference,
)
from models.network.taps import OutputTap
from models.packing import pack

Array = NDArray[np.float32]

_EPSILON = float(np.finfo(np.float32).eps)

# Largest accepted relative difference of the token vectors after a layer. Correct graphs reach up
# to 18 float32 epsilons after six layers, and rounding errors add up over more layers.
MAX_RELATIVE = 256 * _EPSILON

# Largest accepted relative difference of a row's two vectors, by precision of the engine. With
# all-MiniLM-L6-v2, engines reach 1.1e-6 in float32 and 0.008 in bfloat16.
_MAX_RELATIVE_OF_VECTORS: dict[Precision, float] = {
    "float32": 1e-4,
    "float16": 0.05,
    "bfloat16": 0.05,
}

# Numerically difficult rows for the norm. The values of a row are repeated up to the norm's width.
# Values much larger than in "huge" would overflow float32 when squared.
STRESS_ROWS: dict[str, tuple[float, ...]] = {
    "large mean": (40000, 40001, 40002, 40003),
    "larger mean": (1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3),
    "constant": (1234,),
    "zero": (0,),
    "tiny variance": (1, 1 + 2**-20, 1, 1 - 2**-20),
    "tiny values": (1e-20, -1e-20, 2e-20, 0),
    "huge": (1e15, -1e15, 2e15, 3e15),
}
# Rows that layer norm is tested on only if the width is a multiple of 4. At other widths their
# means are not exact in float32, and onnxruntime does not correct the rounding error of a mean.
_EXACT_MEANS = ("large mean", "larger mean", "tiny variance")
# Error bound of a stress row, in units of its rounding error (see `norm_stress`). Correct kernels
# reach up to 3.
_STRESS_UNITS = 64


class Served(NamedTuple):
    """Vectors of some rows from the serving engine, before normalisation, `(B, W)`."""

    engine: str
    precision: Precision
    vectors: Array


class Tokenized(NamedTuple):
    """A text, its token ids from the served tokenizer, and its expected token ids."""

    text: str
    served: Sequence[int]
    expected: Sequence[int]


def parity(
    artifact: Artifact,
    model: ReferenceModel,
    rows: Sequence[InputRow],
    served: Served,
    files: Sequence[FileHash],
    tokenized: Sequence[Tokenized] = (),
) -> ParityCheck:
    """Compare the served model with the reference model of an artifact.

    Errors from loading or running the CPU graph are raised if the graph's files are unchanged since
    startup. Otherwise, they are returned as `ParityCheck.unreadable`.

    Args:
        artifact: The served artifact; its files may have changed on disk since startup.
        model: Reference model of the artifact.
        rows: Inputs of the engine, the CPU graph and the reference model; at least one.
        served: Vectors of the rows from the serving engine.
        files: Hashes of the artifact's files, at startup and now.
        tokenized: Texts with their served and expected token ids.

    Raises:
        ArtifactError: The artifact has no graph for onnxruntime.
        ValueError: `rows` is empty, or the widths of the vectors differ.
    """
    config = model.network.encoder.config
    served_graph = artifact.graph("onnxruntime")
    file = served_graph.file
    weights: tuple[WeightDifference, ...] = ()
    curve: tuple[LayerDifference, ...] = ()
    unreadable = first = None
    try:
        graph = LoadedGraph.load(artifact.path / file)
        weights, (curve, first) = (
            compare_weights(graph, model),
            first_divergence(graph, model, rows),
        )
    except Exception as error:
        # A changed file can have any content, and onnxruntime raises many types of exceptions.
        names = (file, served_graph.weights)
        if all(f.actual == f.expected for f in files if f.name in names):
            raise
        # The full message of an OSError would reveal the path of the artifact.
        reason = error.strerror if isinstance(error, OSError) else error
        unreadable = f"{file} cannot be compared: {reason}"
    return ParityCheck(
        files=tuple(files),
        unreadable=unreadable,
        tokenizer=tuple(compare_ids(*text) for text in tokenized),
        engine=served.engine,
        precision=served.precision,
        min_cosine=OUTPUTS["pooled"].bounds[served.precision].cosine,
        max_relative=_MAX_RELATIVE_OF_VECTORS[served.precision],
        vectors=compare_vectors(served.vectors, model, rows),
        weights=weights,
        curve=curve,
        first_divergence=first,
        layer_norm=norm_stress(config.d_model, config.norm_eps, config.norm),
    )


def compare_ids(text: str, served: Sequence[int], expected: Sequence[int]) -> TokenIds:
    """Return the first difference between the served and the expected token ids of a text."""
    for position, ids in enumerate(zip_longest(served, expected)):
        if ids[0] != ids[1]:
            return TokenIds(text, position, *ids)
    return TokenIds(text, None, None, None)


def compare_vectors(
    served: Array, model: ReferenceModel, rows: Sequence[InputRow]
) -> tuple[VectorDifference, ...]:
    """Compare served vectors with the reference model's vectors, both before normalisation.

    Args:
        served: Served vectors of the rows, `(B, W)`.
        model: Reference model of the served graph.
        rows: Inputs of the reference model; at least one.

    Raises:
        ValueError: `rows` is empty, or the widths of the vectors differ.
    """
    expected = np.stack([model.vector(row).cpu().numpy() for row in rows])  # (B, W)
    if served.shape != expected.shape:
        raise ValueError(
            f"the served vectors have shape {served.shape}, "
            f"the reference model's have shape {expected.shape}"
        )
    differences = map(_difference, served, expected)
    return tuple(
        VectorDifference(float(cosine), *difference)
        for cosine, difference in zip(cosines(served, expected), differences, strict=True)
    )


def _difference(served: Array, expected: Array) -> tuple[float, float]:
    """Return the largest absolute difference, and its ratio to the maximum of |expected|."""
    max_abs = float(np.abs(served - expected).max())
    return max_abs, max_abs / (float(np.abs(expected).max()) or 1.0)


def first_divergence(
    graph: LoadedGraph, model: ReferenceModel, rows: Sequence[InputRow]
) -> tuple[tuple[LayerDifference, ...], str | None]:
    """Compare the token vectors after each layer, and find the first layer that diverges.

    Args:
        graph: CPU graph.
        model: Reference model of the graph.
        rows: Inputs of graph and reference model; at least one.

    Returns:
        A difference for each layer from "embeddings" on, and the name of the first layer whose
        relative difference exceeds `MAX_RELATIVE` or is NaN; None if there is no such layer.
    """
    onnx_model = copy.deepcopy(graph.model)
    names = _layer_outputs(onnx_model, model)
    onnx_model.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(name)
        for name in names.values()
        if name != "tokens"
    )
    session = onnxruntime_session(
        onnx_model.SerializeToString(), available_cpus(), folder=graph.folder
    )
    batch = pack(
        [row.ids for row in rows],
        [row.prompt_tokens for row in rows],
        [row.adapter for row in rows],
    )
    inputs = batch.inputs(value.name for value in onnx_model.graph.input)
    outputs = session.run(list(names.values()), inputs)
    served = dict(zip(names, outputs, strict=True))
    passes = [_outputs(model, row) for row in rows]
    curve = []
    for name in model.layer_names[1:]:
        step = model.steps[name]
        tokens = [steps[step][0].cpu().numpy() for steps in passes]  # (L, D) each
        if name == "output" and model.network.reads_first_tokens:
            tokens = [part[:1] for part in tokens]
        expected = np.concatenate(tokens)  # (T, D)
        curve.append(LayerDifference(name, *_difference(served.get(name, np.nan), expected)))
    return tuple(curve), next((d.layer for d in curve if not d.relative <= MAX_RELATIVE), None)


def _layer_outputs(onnx_model: onnx.ModelProto, model: ReferenceModel) -> dict[str, str]:
    """Return the name of the ONNX value that holds each layer's output, by layer name.

    A layer's output is the output of a norm node, or the input of the next norm node. The output of
    the embeddings can also be the output of a linear layer.
    """
    norms = norm_nodes(onnx_model, model)
    steps = list(_outputs(model, InputRow([0])))
    has_tokens = "tokens" in model.network.outputs
    values = {"output": "tokens" if has_tokens else norms[model.steps["output"]].output[0]}
    for layer_name in model.layer_names[1:-1]:
        step = model.steps[layer_name]
        if step in norms:
            values[layer_name] = norms[step].output[0]
        elif step == "embeddings.projection":
            normed = norms["embeddings.norm"].output[0]
            users = (node for node in onnx_model.graph.node if normed in node.input)
            values[layer_name] = next(users).output[0]
        else:
            next_norm = next(name for name in steps[steps.index(step) :] if name in norms)
            values[layer_name] = norms[next_norm].input[0]
    return values


def _outputs(model: ReferenceModel, row: InputRow) -> dict[str, Tensor]:
    """Return the output of every step of one forward pass."""
    tap = OutputTap()
    model.vectors(row, tap)
    return tap.outputs


def norm_stress(width: int, eps: float, kind: str) -> tuple[StressRow, ...]:
    """Return the errors of onnxruntime's norm on the rows in `STRESS_ROWS`.

    Errors are differences from float64. The bound of a row is a multiple of its rounding error: the
    float32 epsilon times (1 + max|output|). It does not depend on the row's mean. For layer norm,
    the rows in `_EXACT_MEANS` are omitted if `width` is not a multiple of 4.

    Args:
        width: Width of the norm, D.
        eps: Constant added to the variance.
        kind: Name of the norm in `models.network.norms.KINDS`.
    """
    centred = kind == "layer_norm"
    left_out = _EXACT_MEANS if centred and width % 4 else ()
    names = [name for name in STRESS_ROWS if name not in left_out]
    rows = np.stack([np.resize(STRESS_ROWS[name], width) for name in names])  # (N, D)
    half = (rows / 2).astype(np.float32)  # (N, D)
    scale, shift = np.ones(width, np.float32), np.zeros(width, np.float32)  # (D,)
    rounded_eps = float(np.float32(eps))
    operands = Operands(half, half, scale, shift, rounded_eps, half, None, centred)
    served = onnxruntime_outputs(operands)["out"]  # (N, D)
    exact, _ = rounded_to(operands, np.float64).forward()  # (N, D)
    error = np.abs(served - exact).max(1)  # (N,)
    bound = _STRESS_UNITS * _EPSILON * (1 + np.abs(exact).max(1))  # (N,)
    finite = np.all(np.isfinite(served), axis=1)  # (N,)
    return tuple(map(StressRow, names, finite.tolist(), error.tolist(), bound.tolist()))
