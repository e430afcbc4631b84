"""Traces of networks, each made once until the code that is traced changes.

Tracing takes most of the time of an export, and many tests export equal networks.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import BuiltinFunctionType, FunctionType

import grimp
import onnx
import onnx_ir as ir
import torch
from filelock import FileLock

from models.export.onnx_graph import trace
from models.network.sentence_encoder import SentenceEncoder

ROOT = Path(__file__).parents[1]
# Versions of the code whose traces are kept: that of now, and the one before. Those of all tests
# take half a gigabyte.
_KEPT = 2


def traced_code() -> list[Path]:
    """Return the files that determine a trace: the tracer, the networks, and all they import."""
    graph = grimp.build_graph("models", cache_dir=None)
    modules = {trace.__module__, "models.network", *graph.find_descendants("models.network")}
    for module in [*modules]:
        modules |= graph.find_upstream_modules(module)
    paths = (ROOT.joinpath(*name.split(".")) for name in modules)
    return sorted(p / "__init__.py" if p.is_dir() else p.with_suffix(".py") for p in paths)


def folder_of_traces(code: Sequence[Path], root: Path = ROOT) -> Path:
    """Return the folder of the traces of some code with the installed exporter.

    Folders of older code are deleted.

    Args:
        code: Files of the code.
        root: Folder of the project.
    """
    digest = hashlib.sha256()
    for package in ("onnx-ir", "onnxscript", "torch"):
        digest.update(version(package).encode())
    for file in code:
        digest.update(f"{file.relative_to(root)} {file.stat().st_size}".encode())
        digest.update(file.read_bytes())
    folder = root / "build" / "traces" / digest.hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "build" / "traces.lock"):
        os.utime(folder)
        by_age = sorted(folder.parent.iterdir(), key=lambda each: each.stat().st_mtime)
        for old in by_age[:-_KEPT]:
            shutil.rmtree(old)
    return folder


@cache
def _folder() -> Path:
    """Return the folder of the traces, which all processes of test runs share."""
    return folder_of_traces(traced_code())


def trace_once(model: SentenceEncoder, target: str) -> ir.Model:
    """Return what `models.export.onnx_graph.trace` returns, or has returned for an equal network.

    Args:
        model: Model in evaluation mode.
        target: Target hardware.
    """
    file = _folder() / f"{_key(model, target)}.onnx"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            partial = file.with_suffix(".partial")  # a killed run leaves no damaged trace
            partial.write_bytes(ir.to_proto(trace(model, target)).SerializeToString())
            partial.rename(file)
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
