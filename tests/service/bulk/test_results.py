"""Results of jobs of each kind, beside those of the reference."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from transformers import pipeline

import vitrine
from models.artifact import Artifact
from service.bulk.options import OptionError
from tests.service.bulk.conftest import TEXTS, Encode, rows_of, write_lines, write_texts


def test_dense_vectors_equal_sentence_transformers(
    encode: Encode, tmp_path: Path, output: Path, small_folder: Path
) -> None:
    texts = [f"{text} {number}" for number in range(200) for text in TEXTS]
    progress = encode(write_texts(tmp_path, texts), part_rows=300)
    table = rows_of(output)
    oracle = SentenceTransformer(str(small_folder), device="cpu")
    actual = np.stack(table["embedding"].to_numpy())
    np.testing.assert_allclose(actual, oracle.encode(texts), rtol=0, atol=1e-5)
    assert table["row"].to_pylist() == list(range(1000))
    assert table["tokens"].to_pylist() == [len(oracle.tokenizer(t)["input_ids"]) for t in texts]
    assert table["error"].null_count == 1000
    assert sorted(path.name for path in output.glob("*.parquet")) == [
        f"part-0000{number}.parquet" for number in range(4)
    ]
    assert (progress.rows, progress.is_complete) == (1000, True)
    assert progress.tokens == sum(table["tokens"].to_pylist())


def test_dimensions_prompt_and_type_of_vectors_are_those_of_the_options(
    encode: Encode, tmp_path: Path, output: Path, small_folder: Path
) -> None:
    encode(write_texts(tmp_path, TEXTS), dimensions=8, dtype="float16")
    table = rows_of(output)
    assert table.schema.field("embedding").type == pa.list_(pa.float16(), 8)
    oracle = SentenceTransformer(str(small_folder), device="cpu")
    expected = oracle.encode(TEXTS)[:, :8]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    actual = np.stack(table["embedding"].to_numpy())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_sparse_vectors_equal_sentence_transformers(
    encode: Encode,
    tmp_path: Path,
    output: Path,
    sparse_encoder: tuple[SparseEncoder, Artifact],
) -> None:
    texts = ["w3 w4 w5", "w6", "w7 w8 w9 " * 9]
    oracle, artifact = sparse_encoder
    encode(write_texts(tmp_path, texts), model=artifact.path)
    table = rows_of(output)
    expected = oracle.encode(texts, convert_to_sparse_tensor=False).numpy()
    actual = np.zeros_like(expected)
    for row, (ids, weights) in enumerate(
        zip(table["ids"].to_pylist(), table["weights"].to_pylist(), strict=True)
    ):
        actual[row, ids] = weights
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_multi_vectors_equal_sentence_transformers(
    encode: Encode,
    tmp_path: Path,
    output: Path,
    multi_encoder: tuple[MultiVectorEncoder, Artifact],
) -> None:
    oracle, artifact = multi_encoder
    texts = ["The cat sat on the mat.", "rain"]
    encode(write_texts(tmp_path, texts), model=artifact.path, prompt_name="document")
    expected = oracle.encode_document(texts)
    for actual, own in zip(rows_of(output)["embedding"].to_pylist(), expected, strict=True):
        np.testing.assert_allclose(actual, own.numpy(), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_scores_of_a_reranker_equal_sentence_transformers(
    encode: Encode, tmp_path: Path, output: Path, reranker: Artifact, cross_encoder: CrossEncoder
) -> None:
    pairs = [("w1 w2", "w3 w4 w5"), ("w6", "w7"), ("w1 w2", "w8 " * 30)]
    records = [{"query": query, "text": text} for query, text in pairs]
    encode(write_lines(tmp_path, records), model=reranker.path)
    expected = cross_encoder.predict(pairs)
    np.testing.assert_allclose(rows_of(output)["score"].to_numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_labels_equal_transformers(
    encode: Encode, tmp_path: Path, output: Path, classifier: Artifact
) -> None:
    texts = ["w1 w2 w3", "w4", "w5 w6 " * 20]
    encode(write_texts(tmp_path, texts), model=classifier.path)
    oracle = pipeline("text-classification", str(classifier.path.with_name("model")), device="cpu")
    table = rows_of(output)
    for label, score, expected in zip(
        table["label"].to_pylist(),
        table["score"].to_pylist(),
        oracle(texts, truncation=True),
        strict=True,
    ):
        assert label == expected["label"]
        assert score == pytest.approx(expected["score"], abs=1e-5)
    scores = np.stack(table["scores"].to_numpy())
    np.testing.assert_allclose(scores.sum(axis=1), 1.0, rtol=0, atol=1e-6)


def test_chunks_equal_those_of_the_model(
    encode: Encode, tmp_path: Path, output: Path, small_artifact: Artifact
) -> None:
    texts = ["One cat sat. Two cats ran. " * 9, "Short.", ""]
    chunking = vitrine.Chunking(strategy="sentences", size=12, overlap=4)
    encode(write_texts(tmp_path, texts), kind="chunks", chunking=chunking, verify=3)
    table = rows_of(output)
    with vitrine.SyncModel(small_artifact.path) as model:
        expected = model.encode_chunks(texts[:2], chunking)
    for row, chunks, vectors in zip(
        table.to_pylist(), expected.chunks, expected.vectors, strict=False
    ):
        assert row["chunks"] == [asdict(chunk) for chunk in chunks]
        np.testing.assert_allclose(row["embedding"], vectors, rtol=0, atol=1e-6)
    assert len(expected.chunks[0]) > 5
    assert table["tokens"].to_pylist() == [*expected.tokens, None]
    assert table["embedding"][2].as_py() is None


def test_scores_with_chunking_have_the_best_chunk(
    encode: Encode, tmp_path: Path, output: Path, small_artifact: Artifact
) -> None:
    query, text = "Two cats", "One dog sat. Two cats ran. It rained."
    chunking = vitrine.Chunking(strategy="sentences", size=6)
    path = write_lines(tmp_path, [{"query": query, "text": text}])
    encode(path, kind="scores", chunking=chunking)
    with vitrine.SyncModel(small_artifact.path) as model:
        expected = model.score([query], [text], chunking=chunking)
    (row,) = rows_of(output).to_pylist()
    assert row["score"] == pytest.approx(expected.scores[0], abs=1e-6)
    assert row["best_chunk"] == asdict(expected.best_chunks[0])


def test_scores_with_highlights_have_the_best_sentences(
    encode: Encode, tmp_path: Path, output: Path, small_artifact: Artifact
) -> None:
    query, text = "Two cats", "One dog sat. Two cats ran. It rained."
    records = [{"query": query, "text": own} for own in (text, "", "Two dogs.")]
    encode(write_lines(tmp_path, records), kind="scores", highlight=2, verify=3)
    with vitrine.SyncModel(small_artifact.path) as model:
        found = model.score(query, text, explain=vitrine.Highlights(2)).deletions[0].texts[0].units
    table = rows_of(output)
    assert table["error"].to_pylist()[::2] == [None, None]
    first, empty, single = table["highlights"].to_pylist()
    assert [own["start"] for own in first] == [unit.start for unit in found]
    for own, unit in zip(first, found, strict=True):
        assert own["end"] == unit.end
        assert own["left_out"] == pytest.approx(unit.left_out, abs=1e-5)
        assert own["alone"] == pytest.approx(unit.alone, abs=1e-5)
    assert empty is None
    assert [(own["start"], own["end"]) for own in single] == [(0, 9)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "dense", "highlight": 2}, "applies to scores, not to dense"),
        ({"kind": "scores", "highlight": 11}, "from 1 to 10"),
        (
            {"kind": "scores", "highlight": 2, "chunking": vitrine.Chunking()},
            "does not apply to chunks",
        ),
    ],
)
def test_highlights_that_do_not_apply_are_refused(
    encode: Encode, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = write_lines(tmp_path, [{"query": "a", "text": "b"}])
    with pytest.raises(OptionError, match=message):
        encode(path, **options)


def test_quantised_vectors_equal_the_model_s_own(
    encode: Encode, tmp_path: Path, output: Path, calibrated_artifact: Artifact
) -> None:
    path = write_texts(tmp_path, TEXTS)
    with vitrine.SyncModel(calibrated_artifact.path) as model:
        vectors = model.encode(TEXTS).vectors
        for dtype in ("int8", "uint8", "binary", "ubinary"):
            encode(path, model=calibrated_artifact.path, dtype=dtype, output=output / dtype)
            actual = np.stack(rows_of(output / dtype)["embedding"].to_numpy())
            expected = model.quantizer(dtype)(vectors)
            assert actual.dtype == expected.dtype
            assert np.abs(actual.astype(int) - expected).max() <= 1


def test_quantisation_without_calibration_is_refused(encode: Encode, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="int8 needs the ranges of the model's vectors"):
        encode(write_texts(tmp_path, TEXTS), dtype="int8")
