"""Quantisation of vectors to bytes and bits, and the calibration of an artifact. numpy only.

The codes equal those of `sentence_transformers.util.quantization.quantize_embeddings`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.artifact import Artifact
from models.json_reader import parse_json
from models.manifest import CALIBRATION, ArtifactError
from models.typed_json import Float32, form, length, read_dataclass, within

OutputDtype = Literal["float32", "int8", "uint8", "binary", "ubinary"]
Vectors = NDArray[np.float32]
# Codes `(B, W)`, or `(B, W / 8)` if bits are packed.
Codes = NDArray[np.float32] | NDArray[np.int8] | NDArray[np.uint8]


class DtypeSpec(NamedTuple):
    """Entry of `DTYPES`.

    Attributes:
        element: numpy dtype of the codes.
        needs_ranges: Whether a code is the position of a value in the range of its dimension.
        packs_bits: Whether a code has the signs of 8 dimensions, the first in the highest bit.
    """

    element: str
    needs_ranges: bool = False
    packs_bits: bool = False


DTYPES: Mapping[OutputDtype, DtypeSpec] = {
    "float32": DtypeSpec("float32"),
    "int8": DtypeSpec("int8", needs_ranges=True),
    "uint8": DtypeSpec("uint8", needs_ranges=True),
    "binary": DtypeSpec("int8", packs_bits=True),
    "ubinary": DtypeSpec("uint8", packs_bits=True),
}
# Signed codes are unsigned codes minus 128, which is the same as the highest bit flipped.
_SIGN = np.uint8(128)


@dataclass(frozen=True)
class Calibration:
    """Ranges and mean of an artifact's pooled vectors, and the quality of quantised vectors.

    Attributes:
        texts: Number of texts from which the ranges were computed.
        evaluated_texts: Number of other texts, with which recall was measured.
        recall: Share of the 10 nearest texts by float32 vectors that quantised vectors find; by
            method, see `models.export.calibration`.
        ranges: Minimum and maximum of each dimension, `(2, W)`, by width W. They are those of
            vectors that were truncated and then normalised, if the model normalises vectors.
        mean: Mean of the vectors, each scaled to unit length, `(W,)`, of the model's own width.
    """

    texts: int
    evaluated_texts: int
    recall: Mapping[str, float]
    ranges: Mapping[int, Vectors]
    mean: Vectors


@dataclass(frozen=True)
class _File:
    """Content of calibration.json: a `Calibration`, with the widths of ranges as texts."""

    texts: Annotated[int, within(0, 2**31)]
    evaluated_texts: Annotated[int, within(0, 2**31)]
    recall: Annotated[Mapping[str, Annotated[float, within(0, 1)]], length(0, 64)]
    ranges: Annotated[
        Mapping[Annotated[str, form("[1-9][0-9]{0,7}", "with a width")], list[list[Float32]]],
        length(0, 1024),
    ]
    mean: list[Float32]


def quantize(vectors: Vectors, dtype: OutputDtype, ranges: Vectors | None = None) -> Codes:
    """Return the codes of vectors, `(B, W)`, or `(B, W / 8)` if bits are packed.

    Args:
        vectors: Vectors `(B, W)`.
        dtype: Name in `DTYPES`.
        ranges: Minimum and maximum of each dimension, `(2, W)`, for "int8" and "uint8". Values
            outside them are clipped.

    Raises:
        ValueError: "int8" or "uint8" without `ranges`.
    """
    spec = DTYPES[dtype]
    if spec.packs_bits:
        codes = np.packbits(vectors > 0, axis=-1)
    elif spec.needs_ranges:
        starts, steps = _starts_and_steps(dtype, ranges)
        # A dimension that is nearly constant in the calibration has tiny steps.
        with np.errstate(over="ignore"):
            codes = np.clip(np.floor((vectors - starts) / steps), 0, 255).astype(np.uint8)
    else:
        return np.asarray(vectors, np.float32)
    return (codes ^ _SIGN).view(np.int8) if spec.element == "int8" else codes


def dequantize(codes: Codes, dtype: OutputDtype, ranges: Vectors | None = None) -> Vectors:
    """Return the vectors `(B, W)` that codes stand for; bits stand for 1 and -1.

    Arguments are those of `quantize`, with codes in place of vectors.

    Raises:
        ValueError: "int8" or "uint8" without `ranges`.
    """
    spec = DTYPES[dtype]
    if dtype == "float32":
        return np.asarray(codes, np.float32)
    unsigned = codes.view(np.uint8) ^ _SIGN if spec.element == "int8" else codes.view(np.uint8)
    if spec.packs_bits:
        return np.unpackbits(unsigned, axis=-1).astype(np.float32) * 2 - 1
    starts, steps = _starts_and_steps(dtype, ranges)
    return unsigned * steps + starts


def _starts_and_steps(dtype: OutputDtype, ranges: Vectors | None) -> tuple[Vectors, Vectors]:
    if ranges is None:
        raise ValueError(f"{dtype} needs the ranges of a calibration")
    starts, ends = ranges.astype(np.float32, copy=False)
    steps = (ends - starts) / np.float32(255)
    return starts, np.where(steps == 0, np.float32(1), steps)


def read_calibration(artifact: Artifact) -> Calibration | None:
    """Return the calibration of an artifact; None if it was exported without `--calibrate`.

    Raises:
        ArtifactError: The file was changed since the export, or is invalid.
    """
    if CALIBRATION not in artifact.manifest.files:
        return None
    try:
        content = read_dataclass(_File, parse_json(artifact.read(CALIBRATION)))
    except ValueError as error:
        raise ArtifactError(f"{CALIBRATION} is invalid: {error}") from error
    for width, own in content.ranges.items():
        if [*map(len, own)] != [int(width)] * 2:
            raise ArtifactError(
                f"{CALIBRATION}: the ranges of width {width} must be 2 lists of {width} numbers"
            )
        if any(low > high for low, high in zip(*own, strict=True)):
            raise ArtifactError(
                f"{CALIBRATION}: a minimum of the ranges of width {width} exceeds its maximum"
            )
    ranges = {int(width): np.array(own, np.float32) for width, own in content.ranges.items()}
    if artifact.manifest.width not in ranges:
        raise ArtifactError(f"{CALIBRATION} has no ranges of the model's own width")
    if len(content.mean) != artifact.manifest.width:
        raise ArtifactError(f"{CALIBRATION}: the mean must have {artifact.manifest.width} numbers")
    mean = np.array(content.mean, np.float32)
    return Calibration(content.texts, content.evaluated_texts, content.recall, ranges, mean)


def write_calibration(folder: Path, calibration: Calibration) -> None:
    """Write the calibration to calibration.json in `folder`."""
    ranges = {str(width): own.tolist() for width, own in calibration.ranges.items()}
    text = json.dumps({**asdict(calibration), "ranges": ranges, "mean": calibration.mean.tolist()})
    (folder / CALIBRATION).write_text(text + "\n", "utf-8")
