"""The codes of encoded vectors: the right ranges for every way to truncate and normalise them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from sentence_transformers.util.quantization import quantize_embeddings

from models.artifact import Artifact
from models.quantization import OutputDtype
from service.inference.errors import InvalidInput
from service.inference.model.model import Model
from service.inference.model.opening import open_model
from service.inference.model.sync_model import SyncModel
from service.inference.results.quantization import make_quantizer
from service.inference.results.vectors import VectorOptions
from tests.sentences import calibration_texts

TEXTS = calibration_texts()
# Ways to truncate and normalise vectors of a model that normalises them.
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"normalize": True},
    {"dimensions": 8},
    {"dimensions": 12, "normalize": True},
    {"dimensions": 32},
    {"truncate_dim": 8},  # not normalised again
    {"truncate_dim": 10},  # so ranges of that width are not needed
    {"truncate_dim": 8, "normalize": True},
]


@pytest.fixture(scope="module")
def model(calibrated_artifact: Artifact) -> Iterator[SyncModel]:
    with SyncModel(calibrated_artifact.path) as model:
        yield model


@pytest.fixture
async def uncalibrated(small_artifact: Artifact) -> Model:
    return await open_model(small_artifact.path)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_codes_have_the_ranges_of_calibration_texts_with_the_same_arguments(
    model: SyncModel, dtype: OutputDtype, arguments: dict[str, Any]
) -> None:
    calibrating = model.encode(TEXTS[::2], **arguments).vectors
    vectors = model.encode(TEXTS[1:200:2], **arguments).vectors
    quantizer = model.quantizer(dtype, **arguments)
    codes = quantizer(vectors)
    assert codes.shape == (100, quantizer.columns)
    assert codes.dtype == np.dtype(quantizer.element)
    ranges = np.stack([calibrating.min(0), calibrating.max(0)])
    expected = quantize_embeddings(vectors, dtype, ranges=ranges)
    # Batches of other rows change the last bits of a vector, and so a code in a thousand by one.
    differences = np.abs(codes.astype(int) - expected.astype(int))
    assert differences.max() <= 1
    assert differences.mean() < 0.01


@pytest.mark.parametrize("arguments", [*ARGUMENTS[:2], {"dimensions": 16}, {"normalize": False}])
@pytest.mark.parametrize("dtype", ["binary", "ubinary"])
def test_bits_need_no_calibration(
    model: SyncModel, dtype: OutputDtype, arguments: dict[str, Any]
) -> None:
    vectors = model.encode(TEXTS[:9], **arguments).vectors
    quantizer = model.quantizer(dtype, **arguments)
    codes = quantizer(vectors)
    np.testing.assert_array_equal(codes, quantize_embeddings(vectors, dtype))
    assert quantizer.columns == codes.shape[1] == vectors.shape[1] // 8
    np.testing.assert_array_equal(quantizer.dequantize(codes), np.where(vectors > 0, 1, -1))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "binary", "ubinary"])
def test_codes_of_json_are_dequantized_like_those_of_arrays(
    model: SyncModel, dtype: OutputDtype
) -> None:
    quantizer = model.quantizer(dtype)
    codes = quantizer(model.encode(TEXTS[:9]).vectors)
    for own in (codes.tolist(), codes.astype(np.int64)):
        np.testing.assert_array_equal(quantizer.dequantize(own), quantizer.dequantize(codes))
    with pytest.raises(InvalidInput, match=f"the codes are not all of the type {codes.dtype}"):
        quantizer.dequantize(codes.astype(np.int64) + 256)


def test_vectors_of_json_are_those_of_arrays_in_float32(model: SyncModel) -> None:
    quantizer = model.quantizer("float32")
    vectors = model.encode(TEXTS[:9]).vectors
    of_json = json.loads(orjson.dumps(vectors, option=orjson.OPT_SERIALIZE_NUMPY))
    for convert in (quantizer, quantizer.dequantize):
        converted = convert(of_json)
        assert converted.dtype == np.float32
        np.testing.assert_array_equal(converted, vectors)


@pytest.mark.parametrize("dtype", ["float32", "int8", "uint8", "binary", "ubinary"])
def test_vectors_and_codes_of_another_width_are_refused(
    model: SyncModel, dtype: OutputDtype
) -> None:
    full, short = model.quantizer(dtype), model.quantizer(dtype, dimensions=8)
    vectors = model.encode(TEXTS[:3]).vectors
    with pytest.raises(
        InvalidInput, match=r"expected rows of 8 numbers, not an array of \(3, 32\)"
    ):
        short(vectors)
    with pytest.raises(InvalidInput, match=f"expected rows of {short.columns} numbers"):
        short.dequantize(full(vectors))


@pytest.mark.parametrize("rows", [[[1, 2], [3]], ["x"] * 8, [None] * 8])
def test_rows_that_are_no_numbers_are_refused(model: SyncModel, rows: Any) -> None:  # noqa: ANN401
    quantizer = model.quantizer("binary", dimensions=8)
    for convert in (quantizer, quantizer.dequantize):
        with pytest.raises(InvalidInput, match=r"expected rows of \d numbers"):
            convert(rows)


def test_dequantized_vectors_have_the_neighbours_of_the_originals(model: SyncModel) -> None:
    vectors = model.encode(TEXTS[:100]).vectors
    quantizer = model.quantizer("int8")
    restored = quantizer.dequantize(quantizer(vectors))
    assert np.abs(restored @ vectors.T - vectors @ vectors.T).max() < 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dimensions": 16}, "no ranges for 16 normalised dimensions; calibrated: 8, 12, 32"),
        ({"truncate_dim": 16, "normalize": True}, "no ranges for 16 normalised dimensions"),
        ({"normalize": False}, "needs vectors that are of unit length"),
        ({"truncate_dim": 8, "normalize": False}, "needs vectors that are of unit length"),
    ],
)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_vectors_without_ranges_are_refused(
    model: SyncModel, dtype: OutputDtype, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as raised:
        model.quantizer(dtype, **arguments)
    assert (raised.value.code, raised.value.pointer) == ("not_calibrated", "/output_dtype")


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
async def test_model_without_calibration_is_refused_with_the_remedy(
    uncalibrated: Model, dtype: OutputDtype
) -> None:
    async with uncalibrated as model:
        with pytest.raises(InvalidInput, match="vitrine-export --calibrate") as raised:
            model.quantizer(dtype)
        assert raised.value.code == "not_calibrated"
        vectors = (await model.encode(TEXTS[:3])).vectors
        expected = quantize_embeddings(vectors, "ubinary")
        np.testing.assert_array_equal(model.quantizer("ubinary")(vectors), expected)


@pytest.mark.parametrize("dtype", ["binary", "ubinary"])
def test_bits_that_do_not_fill_bytes_are_refused(model: SyncModel, dtype: OutputDtype) -> None:
    for dimensions, truncate_dim in ((12, None), (None, 12)):
        with pytest.raises(InvalidInput, match="must be a multiple of 8, and is 12") as raised:
            model.quantizer(dtype, dimensions=dimensions, truncate_dim=truncate_dim)
        assert raised.value.code == "dimensions"


def test_invalid_dimensions_are_refused(model: SyncModel) -> None:
    with pytest.raises(InvalidInput, match="dimensions must be from 1 to 32"):
        model.quantizer("float32", dimensions=33)


def test_unnormalized_model_has_the_same_ranges_for_all_dimensions(model: SyncModel) -> None:
    inner = model.model
    manifest = replace(inner.artifact.manifest, normalize=False)
    assert inner.calibration is not None
    full = inner.calibration.ranges[32]
    for arguments in (
        (None, None, None),
        (16, None, None),
        (None, 16, None),
        (8, None, False),
        (None, 10, False),
    ):
        width = arguments[0] or arguments[1] or 32
        quantizer = make_quantizer("int8", manifest, inner.calibration, VectorOptions(*arguments))
        np.testing.assert_array_equal(quantizer.ranges, full[:, :width])
    with pytest.raises(InvalidInput, match="needs vectors that are not normalised"):
        make_quantizer("int8", manifest, inner.calibration, VectorOptions(normalize=True))
