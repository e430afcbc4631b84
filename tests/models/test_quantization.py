"""Codes are those of sentence-transformers, and stand for vectors close to the original ones."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers.util.quantization import quantize_embeddings

from models.artifact import Artifact, sha256
from models.manifest import CALIBRATION, ArtifactError
from models.quantization import (
    DTYPES,
    Calibration,
    OutputDtype,
    Vectors,
    dequantize,
    quantize,
    read_calibration,
    write_calibration,
)

CALIBRATED = ("int8", "uint8")
BITS = ("binary", "ubinary")


def random_vectors(count: int, width: int = 24, seed: int = 0) -> Vectors:
    rng = np.random.default_rng(seed)
    # Dimensions of different scale and mean, as those of models.
    scale, mean = rng.uniform(0.1, 2, width), rng.uniform(-1, 1, width)
    return (rng.normal(size=(count, width)) * scale + mean).astype(np.float32)


def ranges_of(vectors: Vectors) -> Vectors:
    return np.stack([vectors.min(0), vectors.max(0)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_equal_those_of_sentence_transformers(dtype: OutputDtype) -> None:
    vectors = random_vectors(500)
    vectors[0] = 0
    ranges = ranges_of(random_vectors(100))  # some of the 500 vectors are outside
    codes = quantize(vectors, dtype, ranges)
    expected = quantize_embeddings(vectors, dtype, ranges=ranges)
    assert codes.dtype == np.dtype(DTYPES[dtype].element)
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize(("dtype", "lowest", "highest"), [("int8", -128, 127), ("uint8", 0, 255)])
def test_values_outside_the_ranges_are_clipped(
    dtype: OutputDtype, lowest: int, highest: int
) -> None:
    ranges = np.array([[-1] * 4, [1] * 4], np.float32)
    vectors = np.array([[-1.5, -1e30, 1.5, 1e30]], np.float32)
    assert quantize(vectors, dtype, ranges).tolist() == [[lowest, lowest, highest, highest]]


@pytest.mark.parametrize("spread", [0.0, 1e-37])
def test_dimension_that_was_constant_in_the_calibration_has_finite_codes(spread: float) -> None:
    ranges = np.array([[0.5, 0], [0.5, spread]], np.float32)
    vectors = np.array([[0.5, 0], [0.7, 0.9], [0.1, -0.9]], np.float32)
    codes = quantize(vectors, "uint8", ranges)
    assert codes[0].tolist() == [0, 0]
    assert np.isfinite(dequantize(codes, "uint8", ranges)).all()


@pytest.mark.parametrize("dtype", CALIBRATED)
def test_dequantized_vectors_differ_by_less_than_a_255th_of_the_range(dtype: OutputDtype) -> None:
    vectors = random_vectors(200)
    ranges = ranges_of(vectors)
    restored = dequantize(quantize(vectors, dtype, ranges), dtype, ranges)
    steps = (ranges[1] - ranges[0]) / 255
    assert (np.abs(restored - vectors) <= steps * 1.001).all()


@pytest.mark.parametrize("dtype", BITS)
def test_dequantized_bits_are_the_signs(dtype: OutputDtype) -> None:
    vectors = random_vectors(200)
    restored = dequantize(quantize(vectors, dtype), dtype)
    np.testing.assert_array_equal(restored, np.where(vectors > 0, 1, -1))


def test_float32_vectors_are_left_as_they_are() -> None:
    vectors = random_vectors(2)
    assert quantize(vectors, "float32") is vectors
    np.testing.assert_array_equal(dequantize(vectors, "float32"), vectors)


@pytest.mark.parametrize("dtype", CALIBRATED)
def test_missing_ranges_raise_value_error(dtype: OutputDtype) -> None:
    with pytest.raises(ValueError, match=f"{dtype} needs the ranges"):
        quantize(random_vectors(2), dtype)


# A calibration without the recall and the statistics of vectors.
COUNTS = {"texts": 1, "evaluated_texts": 1, "recall": {}}


def stored(artifact: Artifact, folder: Path, content: object) -> Artifact:
    """The artifact's manifest in `folder`, with a calibration of this content."""
    (folder / CALIBRATION).write_text(json.dumps(content))
    files = {CALIBRATION: sha256(folder / CALIBRATION)}
    return Artifact(folder, replace(artifact.manifest, files=files))


def test_calibration_is_read_as_it_was_written(small_artifact: Artifact, tmp_path: Path) -> None:
    ranges = {width: ranges_of(random_vectors(9, width)) for width in (8, 32)}
    calibration = Calibration(600, 500, {"int8": 0.99}, ranges, random_vectors(1, 32)[0])
    write_calibration(tmp_path, calibration)
    content = json.loads((tmp_path / CALIBRATION).read_text())
    actual = read_calibration(stored(small_artifact, tmp_path, content))
    assert actual is not None
    assert (actual.texts, actual.evaluated_texts, actual.recall) == (600, 500, {"int8": 0.99})
    np.testing.assert_array_equal(actual.mean, calibration.mean)
    assert actual.ranges.keys() == ranges.keys()
    for width, expected in ranges.items():
        np.testing.assert_array_equal(actual.ranges[width], expected)


def test_artifact_without_calibration_has_none(small_artifact: Artifact) -> None:
    assert read_calibration(small_artifact) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "is invalid"),
        ({"texts": 1, "evaluated_texts": 1, "recall": {}}, "is invalid"),
        ({**COUNTS, "ranges": {"x": []}, "mean": []}, "is invalid"),
        ({**COUNTS, "ranges": {}, "mean": []}, "own width"),
        (
            {**COUNTS, "ranges": {"32": [[0.0], [1.0]]}, "mean": []},
            "the ranges of width 32 must be 2 lists of 32 numbers",
        ),
        (
            {**COUNTS, "ranges": {"2": [[0.0, float("nan")], [1.0, 1.0]]}, "mean": []},
            "NaN is not a JSON number",
        ),
        (
            {**COUNTS, "ranges": {"1": [[1.0], [0.0]]}, "mean": []},
            "a minimum of the ranges of width 1 exceeds its maximum",
        ),
        (
            {**COUNTS, "ranges": {"32": [[0.0] * 32, [1.0] * 32]}, "mean": [0.0] * 31},
            "the mean must have 32 numbers",
        ),
        ({**COUNTS, "ranges": {}, "mean": [], "texts": True}, "texts must be an integer: True"),
    ],
)
def test_invalid_calibration_raises_artifact_error(
    small_artifact: Artifact, tmp_path: Path, content: object, message: str
) -> None:
    with pytest.raises(ArtifactError, match=message):
        read_calibration(stored(small_artifact, tmp_path, content))
