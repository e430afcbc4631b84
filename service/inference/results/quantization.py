"""Quantisation of pooled vectors with the ranges that the model was calibrated with."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from models.manifest import Manifest
from models.quantization import (
    DTYPES,
    Calibration,
    Codes,
    OutputDtype,
    Vectors,
    dequantize,
    quantize,
)
from service.inference.errors import InvalidInput
from service.inference.results.vectors import VectorOptions

_POINTER = "/output_dtype"


@dataclass(frozen=True)
class Quantizer:
    """Converts vectors of one width to a dtype, and back.

    Attributes:
        dtype: Dtype of the codes, in `models.quantization.DTYPES`. "float32" leaves vectors as they
            are, but for wider numbers.
        width: Number of dimensions of a vector, W.
        ranges: Minimum and maximum of each dimension, `(2, W)`; None: the dtype needs none.
    """

    dtype: OutputDtype
    width: int
    ranges: Vectors | None

    @property
    def columns(self) -> int:
        """Number of codes of a vector: W, or W / 8 if bits are packed."""
        return self.width // 8 if DTYPES[self.dtype].packs_bits else self.width

    @property
    def element(self) -> str:
        """Numpy dtype of a code: "float32", "int8" or "uint8"."""
        return DTYPES[self.dtype].element

    def __call__(self, vectors: ArrayLike) -> Codes:
        """Return the codes of vectors `(B, W)`; see `models.quantization.quantize`.

        They equal those of `quantize_embeddings` in sentence-transformers.

        Raises:
            InvalidInput: The vectors are not of this width.
        """
        return quantize(_of_width(vectors, self.width), self.dtype, self.ranges)

    def dequantize(self, codes: ArrayLike) -> Vectors:
        """Return the vectors `(B, W)` that codes stand for; bits stand for 1 and -1.

        The dot products of int8 codes are not those of the vectors, because each dimension has a
        range of its own.

        Raises:
            InvalidInput: The codes are not of this dtype and width.
        """
        rows = _of_width(codes, self.columns)
        own = rows.astype(self.element, copy=False)  # numbers of JSON are wider
        if self.element != "float32" and not np.array_equal(own, rows):
            raise InvalidInput(f"the codes are not all of the type {self.element}")
        return dequantize(own, self.dtype, self.ranges)


def _of_width(rows: ArrayLike, width: int) -> NDArray[Any]:
    try:
        array = np.asarray(rows)
    except (TypeError, ValueError):  # rows of several lengths
        raise InvalidInput(f"expected rows of {width} numbers") from None
    if array.dtype.kind not in "fiu":
        raise InvalidInput(f"expected rows of {width} numbers, not of the type {array.dtype}")
    if array.shape[-1:] != (width,):
        raise InvalidInput(f"expected rows of {width} numbers, not an array of {array.shape}")
    return array


def make_quantizer(
    dtype: OutputDtype,
    manifest: Manifest,
    calibration: Calibration | None,
    options: VectorOptions,
) -> Quantizer:
    """Return the quantizer for vectors that a call of `Model.encode` returns.

    Args:
        dtype: Dtype of the codes.
        manifest: Description of the model.
        calibration: Ranges of the model's vectors; None: not calibrated.
        options: Options of the call.

    Raises:
        InvalidInput: There are no ranges for such vectors, or the bits of a vector do not fill
            whole bytes.
    """
    dimensions, truncate_dim, normalize = options
    spec = DTYPES[dtype]
    width = dimensions or truncate_dim or manifest.width
    if spec.packs_bits and width % 8:
        raise InvalidInput(
            f"{dtype} packs 8 dimensions into a byte, so the number of dimensions must be a "
            f"multiple of 8, and is {width}",
            code="dimensions",
            pointer=_POINTER,
        )
    if not spec.needs_ranges:
        return Quantizer(dtype, width, None)
    if calibration is None:
        raise _calibration_error(
            f"{dtype} needs the ranges of the model's vectors; vitrine-export --calibrate exports "
            "them"
        )
    if normalize not in (None, manifest.normalize):
        unit = "of unit length" if manifest.normalize else "not normalised"
        raise _calibration_error(
            f"{dtype} needs vectors that are {unit}, for which the model is calibrated"
        )
    # Vectors that are not normalised after their truncation are the start of those of full width.
    is_start = not manifest.normalize or (truncate_dim is not None and normalize is None)
    ranges = calibration.ranges
    if is_start:
        return Quantizer(dtype, width, ranges[manifest.width][:, :width])
    if width not in ranges:
        calibrated = ", ".join(map(str, ranges))
        raise _calibration_error(
            f"{dtype} has no ranges for {width} normalised dimensions; calibrated: {calibrated}; "
            "vitrine-export --calibrate adds the model's matryoshka_dimensions"
        )
    return Quantizer(dtype, width, ranges[width])


def _calibration_error(detail: str) -> InvalidInput:
    return InvalidInput(detail, code="not_calibrated", pointer=_POINTER)
