"""`vitrine-export --calibrate`: ranges of some texts, and recall measured with the others."""

from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.util.quantization import quantize_embeddings

from models.artifact import Artifact
from models.export.__main__ import main
from models.export.calibration import MIN_TEXTS, distinct, measure_recall
from models.export.exporter import export
from models.export.sources import resolve
from models.manifest import CALIBRATION, ArtifactError
from models.quantization import Vectors, read_calibration
from tests.models.checkpoints import edit_json, save_classifier, save_tokenizer
from tests.models.static_models import save_model2vec, word_pieces
from tests.sentences import calibration_texts


def unit(vectors: Vectors) -> Vectors:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("width", [8, 12, 32])
def test_ranges_are_those_of_every_second_text_truncated_and_normalized(
    calibrated_artifact: Artifact, width: int
) -> None:
    calibration = read_calibration(calibrated_artifact)
    assert calibration is not None
    assert (calibration.texts, calibration.evaluated_texts) == (600, 600)
    model = SentenceTransformer(str(calibrated_artifact.path.with_name("model")), device="cpu")
    vectors = unit(model.encode(calibration_texts()[::2])[:, :width])
    expected = np.stack([vectors.min(0), vectors.max(0)])
    np.testing.assert_allclose(calibration.ranges[width], expected, atol=1e-5)


def test_mean_is_that_of_every_second_text_normalized(calibrated_artifact: Artifact) -> None:
    calibration = read_calibration(calibrated_artifact)
    assert calibration is not None
    model = SentenceTransformer(str(calibrated_artifact.path.with_name("model")), device="cpu")
    expected = unit(model.encode(calibration_texts()[::2])).mean(axis=0)
    np.testing.assert_allclose(calibration.mean, expected, atol=1e-5)


def nearest(scores: Vectors, query: int, count: int) -> list[int]:
    """The documents with the highest scores, without the query."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return [index for index in order if index != query][:count]


def expected_recall(vectors: Vectors, ranges: Vectors) -> dict[str, float]:
    """Recall with codes of sentence-transformers, and Hamming distances of their bits."""
    codes = quantize_embeddings(vectors, "uint8", ranges=ranges).astype(np.float64)
    restored = unit((codes * (ranges[1] - ranges[0]) / 255 + ranges[0]).astype(np.float32))
    packed = quantize_embeddings(vectors, "ubinary")
    hits: dict[str, list[int]] = {"int8": [], "ubinary": [], "ubinary_int8": []}
    for query, vector in enumerate(vectors):
        expected = set(nearest(vectors @ vector, query, 10))
        hits["int8"].append(len(expected & {*nearest(restored @ vector, query, 10)}))
        distances = np.array(
            [sum(int(b).bit_count() for b in row ^ packed[query]) for row in packed]
        )
        candidates = nearest(-distances.astype(np.float32), query, 40)
        signs = np.unpackbits(packed, axis=1).astype(np.float32) * 2 - 1
        for method, documents in (("ubinary", signs), ("ubinary_int8", restored)):
            scores = {index: documents[index] @ vector for index in candidates}
            best = sorted(candidates, key=lambda index: -scores[index])[:10]
            hits[method].append(len(expected & {*best}))
    return {method: float(np.mean(own)) / 10 for method, own in hits.items()}


def test_recall_equals_that_of_a_search_with_codes_of_sentence_transformers() -> None:
    rng = np.random.default_rng(5)
    vectors = unit((rng.normal(size=(300, 64)) + rng.normal(size=64) / 2).astype(np.float32))
    ranges = np.stack([vectors.min(0), vectors.max(0)]) * np.float32(0.3)  # a coarse calibration
    actual = measure_recall(vectors, ranges)
    expected = expected_recall(vectors, ranges)
    assert actual.keys() == expected.keys()
    for method, value in expected.items():
        assert 0.1 < value < 0.97  # the three differ
        assert actual[method] == pytest.approx(value, abs=1e-3)  # ties by rounding


def test_odd_width_has_recall_of_int8_alone() -> None:
    vectors = np.random.default_rng(5).normal(size=(100, 12)).astype(np.float32)
    recall = measure_recall(vectors, np.stack([vectors.min(0), vectors.max(0)]))
    assert recall.keys() == {"int8"}


def test_recall_of_the_artifact_is_stored(calibrated_artifact: Artifact) -> None:
    calibration = read_calibration(calibrated_artifact)
    assert calibration is not None
    assert calibration.recall.keys() == {"int8", "ubinary", "ubinary_int8"}
    assert calibration.recall["ubinary"] < calibration.recall["int8"] <= 1


def test_too_few_different_texts_are_refused() -> None:
    texts = [str(number) for number in range(MIN_TEXTS - 1)]
    with pytest.raises(ArtifactError, match=f"needs {MIN_TEXTS} different texts.* got 999"):
        distinct([*texts, *texts, "", " "])
    assert distinct([*texts, "one more", *texts]) == [*texts, "one more"]


def test_long_texts_of_a_static_model_are_truncated_as_by_model2vec(tmp_path: Path) -> None:
    model = save_model2vec(tmp_path / "model", word_pieces(), normalize=False)
    edit_json(tmp_path / "model" / "config.json", max_length=4)
    texts = calibration_texts()
    artifact, _ = export(
        resolve(str(tmp_path / "model")), tmp_path / "out", calibration_texts=texts
    )
    calibration = read_calibration(artifact)
    assert calibration is not None
    assert calibration.texts == len(texts[::2])
    vectors = model.encode(texts[::2], max_length=4)
    expected = np.stack([vectors.min(0), vectors.max(0)])
    np.testing.assert_allclose(calibration.ranges[16], expected, atol=1e-5)


def test_texts_without_tokens_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model2vec(tmp_path / "model", word_pieces())
    file = tmp_path / "texts.txt"
    unknown = [f"{chr(0x4E00 + i)}" for i in range(MIN_TEXTS)]
    for known in ([], ["the cat", "a mat"]):
        file.write_text("\n".join([*unknown, *known]))
        arguments = [str(tmp_path / "model"), "--out", str(tmp_path / "out")]
        assert main([*arguments, f"--calibrate={file}"]) == 1
        expected = f"needs {MIN_TEXTS} different texts, one per line, and got {len(known)}"
        assert expected in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_command_line_calibrates_and_prints_recall(
    small_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(calibration_texts()) + "\n")
    assert main([str(small_folder), "--out", str(tmp_path / "out"), f"--calibrate={file}"]) == 0
    artifact = Artifact.load(tmp_path / "out")
    calibration = read_calibration(artifact)
    assert calibration is not None
    assert artifact.verify(CALIBRATION)
    shares = ", ".join(f"{method} {share:.3f}" for method, share in calibration.recall.items())
    assert (
        "Calibrated with 600 texts; recall@10 of float32's neighbours with 600 others: " + shares
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"one text\nanother\n", "needs 1000 different texts, one per line, and got 2"),
        (b"caf\xe9\n", "texts.txt is not UTF-8: invalid continuation byte, at byte 3"),
        # the mark is no part of the first text
        (b"\xef\xbb\xbfone\none\n", "needs 1000 different texts, one per line, and got 1"),
    ],
)
def test_unusable_file_of_texts_is_an_error_before_the_export(
    small_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    message: str,
) -> None:
    file = tmp_path / "texts.txt"
    file.write_bytes(content)
    assert main([str(small_folder), "--out", str(tmp_path / "out"), f"--calibrate={file}"]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Exporting" not in captured.out


def test_model_without_pooled_vectors_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_classifier(tmp_path / "a-classifier", "roberta", 3)
    save_tokenizer(tmp_path / "a-classifier")
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(calibration_texts()))
    arguments = [str(tmp_path / "a-classifier"), "--out", str(tmp_path / "out")]
    assert main([*arguments, f"--calibrate={file}"]) == 1
    expected = "--calibrate needs a model with the output pooled; a-classifier has logits"
    assert expected in capsys.readouterr().err
