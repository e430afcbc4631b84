"""The operators and the files of weights of an ONNX file, without onnx. Standard library only.

The tensors of an ONNX file can be in any file of the machine, by a path. The service maps the file
of weights alone, whose hash it has verified.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

# Fields of onnx.proto that lead to the tensors and operators of a message, by their number.
_MESSAGES: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse_tensor"},
    "function": {7: "node", 11: "attribute"},
    "node": {4: "operator", 5: "attribute"},
    "attribute": {
        5: "tensor",
        6: "graph",
        10: "tensor",
        11: "graph",
        22: "sparse_tensor",
        23: "sparse_tensor",
    },
    "sparse_tensor": {1: "tensor", 2: "tensor"},
    "tensor": {13: "external_data"},
    "external_data": {1: "key", 2: "value"},
}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class OnnxFile(NamedTuple):
    """What the service needs to know of an ONNX file before it opens it.

    Attributes:
        files: Paths of the files with tensors, as the ONNX file has them.
        operators: Types of the operators, in all graphs and functions, whatever their domain.
    """

    files: set[str]
    operators: set[str]


def read_onnx(content: bytes) -> OnnxFile:
    """Return what an ONNX file refers to.

    Raises:
        ValueError: The content is not an ONNX file.
    """
    result = OnnxFile(set(), set())
    messages = [("model", memoryview(content))]
    while messages:
        kind, message = messages.pop()
        parts = [(_MESSAGES[kind].get(number, ""), own) for number, own in _fields(message)]
        if kind == "external_data":
            entry = {part: str(own, "utf-8") for part, own in parts}
            if entry.get("key") == "location":
                result.files.add(entry.get("value", ""))
        result.operators.update(str(own, "utf-8") for part, own in parts if part == "operator")
        messages += [(part, own) for part, own in parts if part in _MESSAGES]
    return result


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield number and content of each field of a protobuf message that has a length."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        if tag >= 2**32:  # other readers would take its lower bits alone
            raise ValueError("it is not an ONNX file: the number of a field is too large")
        if tag & 7 == _VARINT:
            _, position = _varint(message, position)
            continue
        if tag & 7 == _BYTES:
            size, position = _varint(message, position)
        elif tag & 7 in (_FIXED64, _FIXED32):
            size = 8 if tag & 7 == _FIXED64 else 4
        else:
            raise ValueError(f"it is not an ONNX file: a field has the wire type {tag & 7}")
        if position + size > len(message):
            raise ValueError("it is not an ONNX file: it ends within a field")
        if tag & 7 == _BYTES:
            yield tag >> 3, message[position : position + size]
        position += size


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """Return the integer at a position, and the position after it."""
    value = 0
    for index, byte in enumerate(message[position : position + 10]):
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, position + index + 1
    raise ValueError("it is not an ONNX file: an integer does not end")
