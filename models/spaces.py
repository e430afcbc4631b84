"""Maps of a model's vectors of queries into the spaces of other models, whose indexes are searched.

    spaces/NAME.json   the other model, and what was measured
    spaces/NAME.npy    matrix and constant term, (W', W + 1) in float32

A map changes no other result of the model, so it is no part of the model's identity.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from models.artifact import Artifact
from models.json_reader import parse_json
from models.manifest import SPACES, ArtifactError, SimilarityName
from models.printable import reason_of
from models.typed_json import Number, length, read_dataclass, within

Vectors = NDArray[np.float32]

NAME_RULE = "1 to 64 letters, digits and _-"
_NAME = re.compile("[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class SpaceInfo:
    """The model in whose space a map ends, and the quality of the map.

    Attributes:
        model: Name of the model.
        similarity: How its vectors are compared.
        normalizes: Whether mapped vectors are scaled to unit length, as its own are.
        prompt_name: Prompt of the queries with which the map was measured, which queries without
            one get; None: the default prompt.
        form: How the map was fitted; see `service.evaluation.migration`.
        pairs: Number of texts with whose vectors it was fitted.
        queries: Number of other queries with which it was measured.
        measures: Results by name.
    """

    model: Annotated[str, length(1, 256)]
    similarity: SimilarityName
    normalizes: bool
    prompt_name: Annotated[str, length(1, 256)] | None
    form: Annotated[str, length(1, 64)]
    pairs: Annotated[int, within(1, 2**31)]
    queries: Annotated[int, within(1, 2**31)]
    measures: Annotated[Mapping[Annotated[str, length(1, 64)], Number], length(0, 64)]


@dataclass(frozen=True)
class Space:
    """A map into the space of another model.

    Attributes:
        info: The other model.
        version: Its identity.
        matrix: Matrix `(W', W)`.
        constant: Constant term, `(W',)`.
        sha256: SHA-256 of the map.
    """

    info: SpaceInfo
    version: str
    matrix: Vectors
    constant: Vectors
    sha256: str

    @property
    def width(self) -> int:
        """Width of mapped vectors, W'."""
        return len(self.constant)

    def map(self, vectors: Vectors) -> Vectors:
        """Return vectors `(B, W)` of the model in the other space, `(B, W')`, not normalised."""
        return np.asarray(vectors @ self.matrix.T + self.constant, np.float32)


def is_name(name: str) -> bool:
    """Return whether a space can have a name; see `NAME_RULE`."""
    return _NAME.fullmatch(name) is not None


def read_spaces(artifact: Artifact) -> dict[str, Space]:
    """Return the maps of an artifact by the names of their spaces.

    Raises:
        ArtifactError: A file was changed since it was written, or is invalid.
    """
    return {name: _read(artifact, name) for name in artifact.manifest.spaces}


def write_space(
    folder: Path, name: str, info: SpaceInfo, matrix: NDArray[Any], constant: NDArray[Any]
) -> None:
    """Write a map to the folder of an artifact, whose manifest must then list it and its files."""
    (folder / SPACES).mkdir(exist_ok=True)
    (folder / SPACES / f"{name}.json").write_text(
        json.dumps(asdict(info), indent=2) + "\n", "utf-8"
    )
    np.save(folder / SPACES / f"{name}.npy", np.column_stack([matrix, constant]).astype(np.float32))


def _read(artifact: Artifact, name: str) -> Space:
    file, table = f"{SPACES}/{name}.json", f"{SPACES}/{name}.npy"
    try:
        info = read_dataclass(SpaceInfo, parse_json(artifact.read(file)))
    except ValueError as error:
        raise ArtifactError(f"{file} is invalid: {error}") from error
    content = artifact.read(table)
    try:
        map_ = np.load(BytesIO(content), allow_pickle=False)
    except Exception as error:  # numpy documents few of its errors
        raise ArtifactError(f"{table} is invalid: {reason_of(error)}") from error
    columns = artifact.manifest.width + 1
    if not isinstance(map_, np.ndarray) or map_.dtype != np.float32 or map_.ndim != 2:
        raise ArtifactError(f"{table} is not a matrix in float32")
    if map_.shape[1] != columns or not len(map_):
        raise ArtifactError(f"{table} has {map_.shape[1]} columns; the model requires {columns}")
    if not np.isfinite(map_).all():
        raise ArtifactError(f"{table} has an infinity or a NaN")
    matrix, constant = np.ascontiguousarray(map_[:, :-1]), map_[:, -1].copy()
    version, digest = artifact.manifest.spaces[name], artifact.manifest.files[table]
    return Space(info, version, matrix, constant, digest)
