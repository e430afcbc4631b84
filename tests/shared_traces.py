"""Traces of networks, each made once per test run.

Tracing takes most of the time of an export, and many tests export equal networks.
"""

import hashlib
import json
import re
from pathlib import Path
from types import BuiltinFunctionType, FunctionType

import onnx
import onnx_ir as ir
import torch
from filelock import FileLock

from models.export.onnx_graph import trace
from models.network.sentence_encoder import SentenceEncoder


def trace_once(model: SentenceEncoder, target: str, folder: Path) -> ir.Model:
    """Return what `models.export.onnx_graph.trace` returns, or has returned for an equal network.

    Args:
        model: Model in evaluation mode.
        target: Target hardware.
        folder: Folder of the traces, which all processes of the test run share.
    """
    file = folder / f"{_key(model, target)}.onnx"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_bytes(ir.to_proto(trace(model, target)).SerializeToString())
    return ir.from_proto(onnx.load(file))


def _key(model: SentenceEncoder, target: str) -> str:
    """Hash the attributes of all modules, and all tensors."""
    digest = hashlib.sha256(target.encode())
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        digest.update(json.dumps([name, type(module).__qualname__, own], default=_plain).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _plain(value: object) -> object:
    """Return the content of a value that is the same in each process."""
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, FunctionType):
        return [value.__module__, value.__qualname__, value.__code__.co_firstlineno]
    if isinstance(value, torch.dtype | torch.device | BuiltinFunctionType):
        return re.sub(" at 0x[0-9a-f]+", "", repr(value))
    return [type(value).__qualname__, vars(value)]
