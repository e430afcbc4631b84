"""Static models, against Model2Vec and sentence-transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

import vitrine
from models.artifact import Artifact
from models.engines import open_engine
from models.export.exporter import export
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from tests.models.checkpoints import edit_json
from tests.models.static_models import (
    bytes_bpe,
    random_vectors,
    save_model2vec,
    save_static_embedding,
    unigrams,
    word_pieces,
)
from tests.sentences import SENTENCES

Vectors = NDArray[np.floating]
Encode = Callable[[Sequence[str]], Vectors]

# Texts of unknown tokens alone, of special tokens, and of words with many characters per token.
TEXTS = [
    *SENTENCES,
    "語 文 字",
    "語 the 文",
    "[CLS] the [PAD]",
    "The\tcat\x00 sat",
    "z" * 40,
    "Z z" * 9,
]


def quantized(tokens: int) -> dict[str, Any]:
    """Arguments for a vocabulary that is reduced to 20 vectors."""
    rng = np.random.default_rng(1)
    return {
        "vectors": random_vectors(20),
        "token_mapping": rng.integers(0, 20, tokens),
        "weights": rng.uniform(0.1, 2, tokens),
    }


def exported(folder: Path, **overrides: Any) -> Artifact:  # noqa: ANN401
    artifact, _ = export(
        resolve(str(folder)), folder.parent / "artifact", overrides=Overrides(**overrides)
    )
    return artifact


PIECES, GRAMS, BYTES = word_pieces(), unigrams(), bytes_bpe()


def truncating(tokenizer: Tokenizer, limit: int, direction: str) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.enable_truncation(limit, direction=direction)
    return copy


# Functions that save a model and return its `encode`, and the number of tokens that are encoded;
# None: all tokens of all texts.
MODELS: dict[str, tuple[Callable[[Path], Encode], int | None]] = {
    "Model2Vec, unit length": (lambda f: save_model2vec(f, PIECES, normalize=True).encode, None),
    "Model2Vec, 5 tokens": (lambda f: save_model2vec(f, PIECES, max_length=5).encode, 5),
    "Model2Vec, no limit": (lambda f: save_model2vec(f, GRAMS, max_length=None).encode, None),
    "Model2Vec, 20 vectors": (
        lambda f: (
            save_model2vec(
                f, GRAMS, normalize=True, max_length=None, **quantized(GRAMS.get_vocab_size())
            ).encode
        ),
        None,
    ),
    "Model2Vec, int8": (
        lambda f: (
            save_model2vec(
                f,
                BYTES,
                vectors=(40 * random_vectors(BYTES.get_vocab_size())).astype(np.int8),
                max_length=9,
            ).encode
        ),
        9,
    ),
    "StaticEmbedding": (lambda f: save_static_embedding(f, PIECES).encode, None),
    "StaticEmbedding, last 5 tokens": (
        lambda f: save_static_embedding(f, truncating(GRAMS, 5, "left"), normalize=True).encode,
        5,
    ),
    "StaticEmbedding, first 6 tokens": (
        lambda f: save_static_embedding(f, truncating(BYTES, 6, "right")).encode,
        6,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_vectors_equal_those_of_the_package_alone_and_in_batches(name: str, tmp_path: Path) -> None:
    save, limit = MODELS[name]
    expected = save(tmp_path / "model")(TEXTS)
    with vitrine.SyncModel(exported(tmp_path / "model").path) as model:
        batch = model.encode(TEXTS)
        alone = np.concatenate([model.encode(text).vectors for text in TEXTS])
    atol = 1e-6 * max(1.0, np.abs(expected).max())
    for actual in (batch.vectors, alone):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)
    assert any(row.truncated for row in batch.rows) == (limit is not None)
    assert limit is None or max(len(row.ids) for row in batch.rows) == limit


def test_only_model2vec_leaves_unknown_tokens_out_of_the_mean(tmp_path: Path) -> None:
    save_model2vec(tmp_path / "a" / "model", word_pieces(), normalize=True)
    save_static_embedding(tmp_path / "b" / "model", word_pieces(), normalize=True)
    pairs = []
    for layout in "ab":
        with vitrine.SyncModel(exported(tmp_path / layout / "model").path) as model:
            result = model.encode(["語 文", "語 the", "the"])
            pairs.append((result.vectors, [len(row.ids) for row in result.rows]))
    (of_model2vec, lengths), (others, other_lengths) = pairs
    assert (lengths, other_lengths) == ([1, 1, 1], [2, 2, 1])
    assert not of_model2vec[0].any()
    np.testing.assert_array_equal(of_model2vec[1], of_model2vec[2])
    assert others[0].any()
    assert not np.allclose(others[1], others[2])


def test_text_is_cut_by_characters_before_it_is_cut_by_tokens(tmp_path: Path) -> None:
    oracle = save_model2vec(tmp_path / "model", word_pieces(), max_length=5)
    chars = 5 * oracle.median_token_length
    text = "the" + " " * chars + "cat"
    with vitrine.SyncModel(exported(tmp_path / "model").path) as model:
        result = model.encode([text, "the"])
        assert [row.truncated for row in result.rows] == [True, False]
        np.testing.assert_array_equal(*result.vectors)
        np.testing.assert_allclose(result.vectors, oracle.encode([text, "the"]), atol=1e-6)
        with pytest.raises(vitrine.InvalidInput, match=f"5 tokens or {chars} characters"):
            model.encode(text, on_overflow="error")
        # Chunks lose no character.
        chunks = model.encode_chunks(text, vitrine.Chunking())
        assert [text[c.start : c.end] for c in chunks.chunks[0]] == ["the", "cat"]
        rest = model.encode(["the", "cat"]).vectors
        np.testing.assert_array_equal(np.concatenate(chunks.vectors), rest)


def test_chunk_of_one_token_beyond_the_characters_names_their_limit(tmp_path: Path) -> None:
    oracle = save_model2vec(tmp_path / "model", word_pieces(), max_length=50)
    chars = 50 * oracle.median_token_length
    with vitrine.SyncModel(exported(tmp_path / "model").path) as model:
        text = f"the cat sat. {'A' * chars} the cat."  # the unknown word is one token
        (chunks,) = model.encode_chunks(text, vitrine.Chunking()).chunks
        parts = [text[chunk.start : chunk.end] for chunk in chunks]
        assert parts == ["the cat sat.", "A" * chars, "the cat."]
        text = f"the cat sat. {'A' * (chars + 1)} the cat."
        expected = rf"has {chars + 1} characters, which exceed the model's maximum of {chars} "
        with pytest.raises(vitrine.InvalidInput, match=expected) as raised:
            model.encode_chunks(text, vitrine.Chunking())
        assert (raised.value.code, raised.value.pointer) == ("too_long", "/chunking")


def test_float16_vectors_are_those_of_the_package_before_it_rounds_them(tmp_path: Path) -> None:
    tokenizer = word_pieces()
    vectors = random_vectors(tokenizer.get_vocab_size()).astype(np.float16)
    expected = save_model2vec(tmp_path / "model", tokenizer, vectors=vectors).encode(TEXTS)
    with vitrine.SyncModel(exported(tmp_path / "model").path) as model:
        actual = model.encode(TEXTS).vectors
    np.testing.assert_allclose(actual, expected, rtol=2**-10, atol=2**-12)
    double = save_model2vec(tmp_path / "b", tokenizer, vectors=vectors.astype(np.float64))
    np.testing.assert_allclose(actual, double.encode(TEXTS), rtol=0, atol=1e-6)


def test_long_text_is_the_mean_of_all_its_tokens(tmp_path: Path) -> None:
    oracle = save_static_embedding(tmp_path / "model", word_pieces())
    text = " ".join(SENTENCES[:60]) * 3
    with vitrine.SyncModel(exported(tmp_path / "model").path) as model:
        result = model.encode([text, "cat"])
    assert len(result.rows[0].ids) > 2000
    expected = oracle.double().encode([text, "cat"])  # in float32 it has an error of 1e-6 itself
    np.testing.assert_allclose(result.vectors, expected, rtol=0, atol=1e-6)


def test_prompts_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    prompts = {"query": "find: ", "document": ""}
    oracle = save_static_embedding(tmp_path / "model", word_pieces(), prompts=prompts)
    with vitrine.SyncModel(exported(tmp_path / "model").path) as model:
        actual = model.encode(TEXTS, prompt_name="query").vectors
    np.testing.assert_allclose(actual, oracle.encode_query(TEXTS), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def unit_model(tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401
    """A model of Model2Vec with vectors of unit length."""
    folder = tmp_path_factory.mktemp("static")
    save_model2vec(folder / "model", word_pieces(), normalize=True)
    with vitrine.SyncModel(exported(folder / "model").path) as model:
        yield model


def test_zero_vectors_stay_finite(unit_model: vitrine.SyncModel) -> None:
    texts = ["語 文", "the cat"]
    assert unit_model.encode(texts, dimensions=8, normalize=True).vectors[0].tolist() == [0] * 8
    codes = unit_model.quantizer("ubinary")(unit_model.encode(texts).vectors)
    assert codes[0].tolist() == [0, 0]
    assert unit_model.score("語 文", texts).scores.tolist() == [0, 0]
    for explain in (vitrine.Deletion(), vitrine.Terms()):
        for query, document in (("語", "the cat sat"), ("the cat", "語"), ("cat", "cat")):
            scores = unit_model.score(query, [document], explain=explain)
            assert np.isfinite(scores.scores).all()


def test_terms_of_a_score_are_exact_and_recomputable(unit_model: vitrine.SyncModel) -> None:
    query, document = "a blue sky at noon", "the sky 語 is red at dusk"
    result = unit_model.score(query, [document], explain=vitrine.Terms())
    (explanation,) = result.explanations.values()
    total = sum(term.value for term in explanation.terms) + explanation.other
    assert total == pytest.approx(result.scores[0], abs=1e-6)
    tokens = {
        text: dict(zip(encoded.offsets[0] or (), encoded.vectors[0], strict=True))
        for text in (query, document)
        for encoded in [unit_model.encode_tokens(text)]
    }
    # The span of the unknown token is missing: it does not count.
    assert document.index("語") not in {span[0] for span in tokens[document] if span}
    sums = {text: np.sum(list(own.values()), axis=0) for text, own in tokens.items()}
    scale = np.linalg.norm(sums[query]) * np.linalg.norm(sums[document])
    for term in explanation.terms:
        own = tokens[query][term.query.span] @ tokens[document][term.document.span]
        assert term.value == pytest.approx(own / scale, abs=1e-6)


def test_deletion_of_a_word_is_the_score_without_it(unit_model: vitrine.SyncModel) -> None:
    query, document = "a blue sky", "the sky is red"
    result = unit_model.score(query, [document], explain=vitrine.Deletion(by="words"))
    (explanation,) = result.deletions.values()
    (effects,) = explanation.texts
    rests = ["sky is red", "the is red", "the sky red", "the sky is"]
    for unit, rest in zip(effects.units, rests, strict=True):
        (without,) = unit_model.score(query, [rest]).scores
        assert unit.left_out == pytest.approx(effects.whole - without, abs=1e-6)
    # Without its only word, a text has the zero vector.
    (only,) = unit_model.score(
        "cat", ["cat"], explain=vitrine.Deletion(by="words")
    ).deletions.values()
    assert only.texts[0].units[0].left_out == pytest.approx(1, abs=1e-6)


def test_late_chunking_is_refused(unit_model: vitrine.SyncModel) -> None:
    with pytest.raises(vitrine.InvalidInput, match="it is static"):
        unit_model.encode_chunks("the cat", vitrine.Chunking(late=True))


def test_rows_of_token_ids_have_the_vectors_of_their_texts(unit_model: vitrine.SyncModel) -> None:
    ids = [[token for token, _, _ in row] for row in unit_model.tokenize(["語 the cat", "語"])]
    assert len(ids[0]) > 2
    np.testing.assert_array_equal(
        unit_model.encode(ids).vectors, unit_model.encode(["語 the cat", "語"]).vectors
    )


def test_static_models_run_on_the_engine_numpy_alone(tmp_path: Path) -> None:
    save_model2vec(tmp_path / "model", PIECES)
    artifact = exported(tmp_path / "model")
    assert open_engine(artifact).name == "numpy"
    for options, message in (
        (vitrine.ModelOptions(engine="onnxruntime"), "is a static model"),
        (vitrine.ModelOptions(precision="bfloat16"), "supports only float32"),
    ):
        with pytest.raises(vitrine.EngineError, match=message):
            vitrine.SyncModel(artifact.path, options)


def test_settings_of_an_export_replace_those_of_the_folder(tmp_path: Path) -> None:
    oracle = save_model2vec(tmp_path / "model", word_pieces(), normalize=True)
    artifact = exported(tmp_path / "model", normalize=False, max_tokens=3)
    with vitrine.SyncModel(artifact.path) as model:
        actual = model.encode(TEXTS).vectors
    expected = oracle.encode(TEXTS, normalize=False, max_length=3)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def test_calibrated_codes_leave_unknown_tokens_out(tmp_path: Path) -> None:
    oracle = save_model2vec(tmp_path / "model", PIECES, normalize=True)
    texts = [f"語 {SENTENCES[i % 15]} {i}" for i in range(1000)]
    artifact, _ = export(
        resolve(str(tmp_path / "model")),
        tmp_path / "artifact",
        calibration_texts=texts,
    )
    with vitrine.SyncModel(artifact.path) as model:
        quantizer = model.quantizer("int8")
        codes = quantizer(model.encode(texts).vectors)
    assert quantizer.ranges is not None
    expected = oracle.encode(texts)[::2]  # every second text calibrates
    np.testing.assert_allclose(quantizer.ranges, [expected.min(0), expected.max(0)], atol=1e-6)
    assert codes.dtype == np.int8


def test_folder_without_modules_is_read_as_by_model2vec(tmp_path: Path) -> None:
    oracle = save_model2vec(tmp_path / "model", word_pieces())
    (tmp_path / "model" / "modules.json").unlink()
    edit_json(tmp_path / "model" / "config.json", model_type="model2vec", normalize=True)
    oracle.normalize = True
    with vitrine.SyncModel(exported(tmp_path / "model").path) as model:
        actual = model.encode(TEXTS).vectors
    np.testing.assert_allclose(actual, oracle.encode(TEXTS), rtol=0, atol=1e-6)
