"""The output is read by the libraries that people use, with the same vectors."""

from pathlib import Path

import datasets
import numpy as np
import polars
import pytest
from numpy.typing import NDArray

from tests.service.bulk.conftest import Encode, rows_of, write_lines


@pytest.fixture
def vectors(encode: Encode, tmp_path: Path, output: Path) -> NDArray[np.float32]:
    """Vectors of an output with several parts and one error, by pyarrow."""
    texts = [*(f"text number {number}" for number in range(50)), ""]
    records = [{"text": text, "key": f"k{index}"} for index, text in enumerate(texts)]
    encode(write_lines(tmp_path, records), part_rows=20, id_column="key")
    table = rows_of(output)
    assert table.num_rows == 51
    assert table["embedding"].null_count == 1
    return np.stack(table["embedding"].to_numpy()[:50])


def test_datasets_reads_the_output(
    vectors: NDArray[np.float32], output: Path, tmp_path: Path
) -> None:
    files = sorted(map(str, output.glob("*.parquet")))
    rows = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )
    np.testing.assert_array_equal(np.array(rows["embedding"][:50], np.float32), vectors)
    assert rows["embedding"][50] is None
    assert rows["key"][:2] == ["k0", "k1"]


def test_polars_reads_the_output(vectors: NDArray[np.float32], output: Path) -> None:
    rows = polars.read_parquet(output / "*.parquet")
    assert rows.schema["embedding"] == polars.Array(polars.Float32, 32)
    np.testing.assert_array_equal(rows["embedding"][:50].to_numpy(), vectors)
    assert rows["error"][50] == "the text is empty"


def test_duckdb_finds_the_nearest_neighbours(vectors: NDArray[np.float32], output: Path) -> None:
    import duckdb  # here, because it imports for long, as lance does

    query = """
        select key from read_parquet(?) where error is null
        order by array_cosine_distance(embedding::float[32], ?::float[32]) limit 5
    """
    found = duckdb.execute(query, [f"{output}/*.parquet", vectors[7].tolist()]).fetchall()
    expected = np.argsort(-(vectors @ vectors[7]), kind="stable")[:5]
    assert [key for (key,) in found] == [f"k{index}" for index in expected]


def test_lance_stores_the_output_and_finds_the_nearest_neighbours(
    vectors: NDArray[np.float32], output: Path, tmp_path: Path
) -> None:
    import lance

    stored = lance.write_dataset(rows_of(output), str(tmp_path / "vectors.lance"))
    nearest = {"column": "embedding", "q": vectors[7], "k": 5, "metric": "cosine"}
    found = stored.to_table(nearest=nearest, filter="error is null", prefilter=True)
    expected = np.argsort(-(vectors @ vectors[7]), kind="stable")[:5]
    assert found["key"].to_pylist() == [f"k{index}" for index in expected]
