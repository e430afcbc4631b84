"""Access to the JSON and safetensors files of a model folder.

Pickles are never read, and paths that point outside the folder are rejected. The names of the files
that were read are recorded.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from models.artifact import Artifact
from models.json_reader import JsonError, parse_json
from models.manifest import SOURCE

Json = TypeVar("Json", dict[str, object], list[object])

WEIGHTS = "model.safetensors"
# Maximum size of a JSON file. Indices of shards and vocabularies in JSON take a few MB.
_MAX_JSON_BYTES = 16 * 2**20
# Name of the subfolder that stands for the folder of an adapter's base model.
BASE = "base_model"

# Maximum length of a tensor's name, in characters, because patterns are searched in it.
_MAX_NAME = 500


class CheckpointError(Exception):
    """A model folder is incomplete, invalid or unsupported; the message gives the reason."""


class ModelFolder:
    """A folder of model files.

    Args:
        path: Path of the folder.
        read: Function that returns the verified content of a file; None: files are read unverified,
            and weights are mapped into memory.
        base: Folder of the base model of an adapter in the folder; None: unknown or no adapter.

    Attributes:
        path: Path of the folder.
        base: Folder of the base model, or None. Its files are addressed as `BASE/<name>`.
        name: Name of the folder, for error messages.
        files_read: Names of the files read so far, in the order of first access.
        weights: Names of the weight files read so far.
        is_outline: Whether `tensors` returns tensors on the device "meta", which have no data, from
            the headers of the weight files.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], bytes] | None = None,
        base: Path | None = None,
    ) -> None:
        self.path = path
        self.base = base
        self._read_verified = read
        self.name = path.resolve().name
        self.files_read: list[str] = []
        self.weights: list[str] = []
        self.is_outline = False

    def has(self, name: str) -> bool:
        """Return whether the folder has a file `name`, a path relative to the folder.

        Raises:
            CheckpointError: The path points outside the folder or is invalid.
        """
        try:
            return self.locate(name).is_file()
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error

    def json(self, name: str, kind: type[Json], default: Json | None = None) -> Json:
        """Return the content of a JSON file.

        Args:
            name: Path relative to the folder.
            kind: Required type of the top-level value: `dict` or `list`.
            default: Value to return if the file is missing; None: a missing file is an error.

        Raises:
            CheckpointError: The file is missing, cannot be read, is outside the folder, or does not
                contain JSON of the required type.
        """
        if default is not None and not self.has(name):
            return default
        try:
            content = parse_json(self.bytes(name))
        except JsonError as error:
            raise CheckpointError(f"{name} is not valid JSON: {error}") from error
        if not isinstance(content, kind):
            raise CheckpointError(f"{name} is not a JSON {'object' if kind is dict else 'array'}")
        return content

    def bytes(self, name: str, limit: int = _MAX_JSON_BYTES) -> bytes:
        """Return the content of a file.

        Args:
            name: Path relative to the folder.
            limit: Maximum size of the file, in bytes.

        Raises:
            CheckpointError: The file is missing, too large, cannot be read, or is outside the
                folder.
        """
        read = self._read_verified or Path.read_bytes
        with self._access(name) as file:
            if (size := file.stat().st_size) > limit:
                raise CheckpointError(f"{name} has {size:,} bytes; the limit is {limit:,}")
            return read(file)

    def tensors(self, subfolder: str = "", weights: str = WEIGHTS) -> dict[str, Tensor]:
        """Return the tensors of a subfolder's weights, by name.

        Weights are either one safetensors file, or shards that are listed in an index file.

        Args:
            subfolder: Path relative to the folder.
            weights: Name of the safetensors file. The index file of shards has this name with
                ".index.json" appended.

        Raises:
            CheckpointError: The weights are missing, cannot be read, are pickles, or are outside
                the folder, or two shards have the same tensor.
        """
        tensors: dict[str, Tensor] = {}
        for name in self._weight_files(subfolder, weights):
            with self._access(name) as file:
                own = self._load(file)
            if twice := tensors.keys() & own.keys():
                raise CheckpointError(f"{name}: another shard has the tensor {min(twice)!r} too")
            if long := [key for key in own if len(key) > _MAX_NAME]:
                raise CheckpointError(f"{name}: a tensor's name has {len(long[0])} characters")
            tensors |= own
            if name not in self.weights:
                self.weights.append(name)
        return tensors

    def _load(self, file: Path) -> dict[str, Tensor]:
        if self.is_outline:  # the file is mapped into memory, and only its header is read
            return {name: tensor.to("meta") for name, tensor in load_file(file).items()}
        return load_file(file) if self._read_verified is None else load(self._read_verified(file))

    @contextmanager
    def outline(self) -> Iterator[None]:
        """Let `tensors` return names, shapes and dtypes alone, from the headers of the files."""
        self.is_outline = True
        try:
            yield
        finally:
            self.is_outline = False

    @contextmanager
    def _access(self, name: str) -> Iterator[Path]:
        """Yield the path of a file, translate errors to CheckpointError, and record the name."""
        try:
            path = self.locate(name)
            if path.exists() and not path.is_file():  # opening a FIFO would wait for a writer
                raise CheckpointError(f"{name} is not a regular file")
            path.open("rb").close()  # safetensors calls an unreadable file missing
            yield path
        except FileNotFoundError:
            raise CheckpointError(f"{self.name} has no {name}") from None
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
        except SafetensorError as error:
            raise CheckpointError(f"{name} cannot be read: {error}") from error
        if name not in self.files_read:
            self.files_read.append(name)

    def _weight_files(self, subfolder: str, weights: str) -> list[str]:
        if self.has(join(subfolder, weights)):
            return [join(subfolder, weights)]
        index = f"{weights}.index.json"
        if self.has(join(subfolder, index)):
            shards = self.json(join(subfolder, index), dict).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise CheckpointError(f"{index} has no weight_map")
            return sorted({join(subfolder, str(name)) for name in shards.values()})
        pickles = sorted(path.name for path in self.locate(subfolder).glob("*.bin"))
        if pickles:
            raise CheckpointError(
                f"{self.name} has pickled weights only ({', '.join(pickles)}); loading a pickle "
                "can run code. Convert them to safetensors with model.save_pretrained(folder)"
            )
        raise CheckpointError(f"{self.name} has no {join(subfolder, weights)}")

    def locate(self, name: str) -> Path:
        """Return the path of the file `name`, a path relative to the folder.

        Raises:
            CheckpointError: The path points outside the folder or is invalid.
        """
        # Symbolic links are not resolved: in the hub's cache, files are links to other folders.
        path = PurePosixPath(name)
        if "\0" in name:
            raise CheckpointError(f"{name!r} is not a valid path")
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{name!r} points outside the model folder")
        if self.base is not None and path.parts[:1] == (BASE,):
            return self.base / path.relative_to(BASE)
        return self.path / name


def source_folder(artifact: Artifact) -> ModelFolder:
    """Return an artifact's copy of its model folder; each file is verified when it is read."""
    source = artifact.path / SOURCE
    return ModelFolder(
        source,
        read=lambda file: artifact.read(str(file.relative_to(artifact.path))),
        base=source / BASE,
    )


def join(subfolder: str, name: str) -> str:
    """Return the path of a file in a subfolder; the subfolder "" is the model folder itself."""
    return str(PurePosixPath(subfolder) / name)


def check_defaults(
    config: Mapping[str, object], defaults: Mapping[str, object], source: str
) -> None:
    """Raise CheckpointError unless each field is absent, null or equal to its default.

    Args:
        config: Fields of a JSON file.
        defaults: Only supported values, by field.
        source: Name of the file, for the error message.
    """
    for name, value in defaults.items():
        if config.get(name, value) not in (value, None):
            raise CheckpointError(
                f"{source}: {name} is {config[name]!r}; only {value!r} is supported"
            )


def check_known(config: Mapping[str, object], known: Collection[str], source: str) -> None:
    """Raise CheckpointError if the file `source` has a field that is not among the known ones."""
    if unknown := config.keys() - {*known}:
        raise CheckpointError(f"{source}: {min(unknown)} is not supported")


def check_required(config: Mapping[str, Any], required: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError if a field of config.json has another value than the supported one.

    An empty object, an empty text, zero, false and null are equivalent.

    Args:
        config: Content of config.json.
        required: Supported values by field, which are those of absent fields too.
        name: Name of the file, for errors.
    """
    for field, expected in required.items():
        actual = config.get(field, expected)
        if actual != expected and (actual or expected):
            raise CheckpointError(f"{name}: {field} is {actual!r}; only {expected!r} is supported")


def classes_of(config: Mapping[str, Any]) -> list[str]:
    """Return the classes of transformers that config.json names."""
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def first_class(config: Mapping[str, Any]) -> str:
    """Return the first class of transformers that config.json names; empty: it names none."""
    return next(iter(classes_of(config)), "")


def class_of_torch(path: object) -> str:
    """Return the name of a class in `torch.nn` or a module of it, by its path; empty: another."""
    package, _, name = str(path).rpartition(".")
    return name if f"{package}.".startswith("torch.nn.") else ""
