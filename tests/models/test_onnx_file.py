"""Tests of `models.engines.onnx_file`, against the package onnx."""

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

from models.artifact import Artifact
from models.engines.onnx_file import read_onnx


def outside(location: str) -> TensorProto:
    tensor = numpy_helper.from_array(np.zeros(3, np.float32), location)
    set_external_data(tensor, location)
    tensor.ClearField("raw_data")
    return tensor


def sparse(values: TensorProto, indices: TensorProto) -> onnx.SparseTensorProto:
    return helper.make_sparse_tensor(values, indices, [9])


def graph(name: str, nodes: list[NodeProto], tensors: list[TensorProto]) -> GraphProto:
    return helper.make_graph(nodes, name, [], [], initializer=tensors)


def hiding_model() -> ModelProto:
    """A model with tensors of other files in every place where a model can have tensors."""
    inner = graph("inner", [helper.make_node("Constant", [], ["c"], value=outside("i"))], [])
    branch = graph("branch", [helper.make_node("Loop", ["n"], ["v"], body=inner)], [outside("h")])
    nodes = [
        helper.make_node("Constant", [], ["a"], value=outside("b")),
        helper.make_node("Constant", [], ["b"], sparse_value=sparse(outside("c"), outside("d"))),
        helper.make_node("Custom", [], ["c"], domain="x", many=[outside("e"), outside("f")]),
        helper.make_node(
            "Custom", [], ["d"], domain="x", sparse=[sparse(outside("g"), outside(""))]
        ),
        helper.make_node("If", ["a"], ["e"], then_branch=branch, else_branch=branch),
        helper.make_node("Custom", [], ["f"], domain="x", graphs=[branch]),
    ]
    model = helper.make_model(graph("main", nodes, [outside("../a"), outside("/etc/é")]))
    model.graph.sparse_initializer.append(sparse(outside("s"), outside("t")))
    function = model.functions.add(name="f", domain="x")
    function.node.append(helper.make_node("Scan", [], ["z"], body=graph("z", [], [outside("z")])))
    function.attribute_proto.append(helper.make_attribute("w", outside("w")))
    training = model.training_info.add()
    training.initialization.initializer.append(outside("x"))
    training.algorithm.initializer.append(outside("y"))
    return model


def messages_in(message: object) -> Iterator[object]:
    """Yield a message of protobuf and all messages in it, whatever their fields."""
    yield message
    for field, value in message.ListFields():  # type: ignore[attr-defined]
        if field.message_type is not None:
            for inner in value if isinstance(value, list) or hasattr(value, "add") else [value]:
                yield from messages_in(inner)


def expected_of(model: ModelProto) -> tuple[set[str], set[str]]:
    every = list(messages_in(model))
    tensors = [own for own in every if isinstance(own, TensorProto)]
    files = {
        entry.value for own in tensors for entry in own.external_data if entry.key == "location"
    }
    return files, {own.op_type for own in every if isinstance(own, NodeProto)}


def test_files_and_operators_are_found_wherever_they_are() -> None:
    model = hiding_model()
    files, operators = expected_of(model)
    assert {"../a", "/etc/é", "i", "w", "z"} <= files
    assert {"Loop", "Scan", "If"} <= operators
    assert read_onnx(model.SerializeToString()) == (files, operators)


@pytest.mark.parametrize("name", ["model.onnx", "model.openvino.onnx"])
def test_exported_graphs_have_their_weights_in_one_file(
    small_artifact: Artifact, name: str
) -> None:
    content = small_artifact.read(name)
    assert read_onnx(content) == expected_of(onnx.load_from_string(content))
    assert read_onnx(content).files == {"model.weights"}


CONTENT = hiding_model().SerializeToString()


@given(st.integers(0, len(CONTENT)), st.binary(max_size=12), st.integers(0, 12))
def test_other_content_is_refused_or_read_without_any_other_error(
    position: int, inserted: bytes, removed: int
) -> None:
    try:
        read_onnx(CONTENT[:position] + inserted + CONTENT[position + removed :])
    except ValueError:
        return


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x3b", "wire type 3"),  # the start of a group, which onnx.proto has none of
        (b"\x3a\x05a", "ends within a field"),
        (b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "an integer does not end"),
        (b"\xba\x80\x80\x80\x80\x01\x00", "too large"),  # field 7 for readers of 32 bits
        (b"{}", "wire type 3"),
    ],
)
def test_content_that_other_readers_may_read_otherwise_is_refused(
    content: bytes, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_onnx(content)
