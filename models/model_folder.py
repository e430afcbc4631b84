"""A folder of model files as it lies on disk: JSON and safetensors, each by its name.

Nothing outside the folder is read, no pickle is read, and every file that is read is remembered.
"""

import json
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TypeVar

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

Json = TypeVar("Json", dict[str, object], list[object])

WEIGHTS = "model.safetensors"
SHARDS = "model.safetensors.index.json"


class CheckpointError(Exception):
    """A model folder that cannot be loaded, and what would help."""


class ModelFolder:
    """A folder of model files.

    Args:
        path: Where it is.
        read: Gives the content of one of its files.

    Attributes:
        path: Where it is.
        name: What errors call it.
        read: Names of the files that have been read, in order.
        weights: Those of them that hold tensors.
    """

    def __init__(self, path: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> None:
        self.path = path
        self._content = read
        self.name = path.resolve().name
        self.read: list[str] = []
        self.weights: list[str] = []

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name."""
        return self._file(name).is_file()

    def json(self, name: str, kind: type[Json], default: Json | None = None) -> Json:
        """Return the content of a JSON file.

        Args:
            name: Relative to the folder.
            kind: What the outermost value must be.
            default: Returned where there is no such file.

        Raises:
            CheckpointError: There is none, or it is not JSON of that kind.
        """
        if default is not None and not self.has(name):
            return default
        try:
            content = json.loads(self.bytes(name))
        except ValueError as error:
            raise CheckpointError(f"{name} is not JSON: {error}") from error
        if not isinstance(content, kind):
            raise CheckpointError(f"{name} is not a JSON {'object' if kind is dict else 'array'}")
        return content

    def bytes(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            CheckpointError: It is not there or cannot be read.
        """
        try:
            content = self._content(self._file(name))
        except FileNotFoundError:
            raise CheckpointError(f"{self.name} has no {name}") from None
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
        if name not in self.read:
            self.read.append(name)
        return content

    def tensors(self, subfolder: str = "") -> dict[str, Tensor]:
        """Return all tensors of a subfolder's weights, one file or a set of shards.

        Raises:
            CheckpointError: There are none, or they cannot be read.
        """
        tensors: dict[str, Tensor] = {}
        for name in self._weight_files(subfolder):
            try:
                tensors |= load(self.bytes(name))
            except SafetensorError as error:
                raise CheckpointError(f"{name} cannot be read: {error}") from error
            self.weights.append(name)
        return tensors

    def _weight_files(self, subfolder: str) -> list[str]:
        if self.has(join(subfolder, WEIGHTS)):
            return [join(subfolder, WEIGHTS)]
        if self.has(join(subfolder, SHARDS)):
            shards = self.json(join(subfolder, SHARDS), dict).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise CheckpointError(f"{SHARDS} has no weight_map")
            return sorted({join(subfolder, str(name)) for name in shards.values()})
        pickles = sorted(path.name for path in self._file(subfolder).glob("*.bin"))
        if pickles:
            raise CheckpointError(
                f"{self.name} has {', '.join(pickles)} only, a pickle, which can run code when "
                "read. Save it again with safetensors: model.save_pretrained(folder)"
            )
        raise CheckpointError(f"{self.name} has no {join(subfolder, WEIGHTS)}")

    def _file(self, name: str) -> Path:
        # By the name alone: files of a hub's cache are links that lead out of the folder.
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"{name!r} points outside the model folder")
        return self.path / name


def join(subfolder: str, name: str) -> str:
    """Return the name of a file of a subfolder, which may be the folder itself, ""."""
    return str(PurePosixPath(subfolder) / name)
