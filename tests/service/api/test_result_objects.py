"""Results of the Python API as arrays, sequences and reprs, for all kinds of models."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.util import cos_sim

import vitrine
from models.artifact import Artifact

pytestmark = pytest.mark.slow  # opens models of five kinds

Models = dict[str, vitrine.SyncModel]
TEXTS = ["w5 w6", "a cat", "w7 w8 w9"]


# By name: the model, a call, and the attribute with the result of each input.
RESULTS: dict[str, tuple[str, Callable[[vitrine.SyncModel], Any], str]] = {
    "Embeddings": ("dense", lambda model: model.encode(TEXTS), "vectors"),
    "TokenEmbeddings": ("dense", lambda model: model.encode_tokens(TEXTS), "vectors"),
    "ChunkEmbeddings": (
        "dense",
        lambda model: model.encode_chunks(TEXTS, vitrine.Chunking()),
        "vectors",
    ),
    "SparseEmbeddings": ("sparse", lambda model: model.encode_sparse(TEXTS), "vectors"),
    "MultiEmbeddings": ("multi", lambda model: model.encode_multi(TEXTS), "vectors"),
    "PairScores": ("dense", lambda model: model.rerank("w5", TEXTS), "scores"),
    "Classification": ("classifier", lambda model: model.classify(TEXTS), "scores"),
    "Tags": ("tagger", lambda model: model.tag(TEXTS), "entities"),
}
MATRICES = ("Embeddings", "PairScores", "Classification")


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_sequences_of_the_results_of_the_inputs(models: Models, name: str) -> None:
    kind, call, attribute = RESULTS[name]
    result = call(models[kind])
    own = getattr(result, attribute)
    assert len(result) == len(list(result)) == len(TEXTS)
    if name != "Classification":  # has labels by name
        assert all(
            result[index] is own[index] or np.all(result[index] == own[index]) for index in range(3)
        )


@pytest.mark.parametrize("name", MATRICES)
def test_array_of_a_result_is_its_matrix(models: Models, name: str) -> None:
    kind, call, attribute = RESULTS[name]
    result = call(models[kind])
    np.testing.assert_array_equal(np.asarray(result), getattr(result, attribute))
    assert np.asarray(result, np.float16).dtype == np.float16
    assert np.asarray(result).shape[0] == 3
    assert not np.shares_memory(np.array(result), getattr(result, attribute))


@pytest.mark.parametrize("name", [name for name in RESULTS if name not in MATRICES])
def test_array_of_a_result_that_is_no_matrix_is_refused(models: Models, name: str) -> None:
    kind, call, _ = RESULTS[name]
    with pytest.raises(TypeError, match=rf"^{name} is not a matrix; .*result"):
        np.asarray(call(models[kind]))


@pytest.mark.parametrize("name", RESULTS)
def test_reprs_have_the_name_the_tokens_and_one_line(models: Models, name: str) -> None:
    kind, call, _ = RESULTS[name]
    result = call(models[kind])
    text = repr(result)
    assert text.startswith(f"{name}(3 ")
    assert " tokens, " in text
    assert len(text.splitlines()) == 1
    assert len(text) < 200


def test_repr_names_the_best_three_the_truncated_and_the_model(models: Models) -> None:
    model = models["dense"]
    result = model.rerank("w5", [*TEXTS, "w5", "w6 " * 600])
    assert "(1 truncated)" in repr(result)
    best = np.argsort(-result.scores)[:3].tolist()
    assert repr(result).endswith(
        f"best: {', '.join(f'[{index}] {result.scores[index]:.4g}' for index in best)})"
    )
    assert repr(model) == f"Sync{model.model!r}"
    assert "pooled" in repr(model)
    assert len(repr(model)) < 200
    assert len(repr(models["sparse"].encode_sparse(TEXTS)[0])) < 100
    for explain in (vitrine.Terms(), True, vitrine.Deletion(method="shapley")):
        explained = model.score("w5", TEXTS, explain=explain)
        explanations = [explained.explanations, explained.deletions, explained.shapley_values]
        for explanation in [found[0] for found in explanations if found]:
            assert len(repr(explanation)) < 200
            assert repr(explanation).startswith(f"{type(explanation).__name__}(")


def test_labels_of_an_input_are_in_order_of_score(models: Models) -> None:
    result = models["classifier"].classify(TEXTS)
    for index in range(3):
        row = dict(zip(result.labels, result.scores[index].tolist(), strict=True))
        assert result[index] == row
        assert list(result[index].values()) == sorted(row.values(), reverse=True)


def test_embeddings_work_where_sentence_transformers_takes_its_own(models: Models) -> None:
    result = models["dense"].encode(TEXTS)
    expected = cos_sim(result.vectors, result.vectors)
    assert torch.equal(cos_sim(np.asarray(result), np.asarray(result)), expected)


def test_similarity_equals_that_of_sentence_transformers(
    models: Models,
    small_folder: Any,  # noqa: ANN401 - a path
    sparse_encoder: tuple[SparseEncoder, Artifact],
    multi_encoder: tuple[MultiVectorEncoder, Artifact],
) -> None:
    references = {
        "encode": (models["dense"], SentenceTransformer(str(small_folder), device="cpu")),
        "encode_sparse": (models["sparse"], sparse_encoder[0]),
        "encode_multi": (models["multi"], multi_encoder[0]),
    }
    for name, (model, reference) in references.items():
        first, second = (getattr(model, name)(texts) for texts in (TEXTS, TEXTS[:2]))
        actual = model.similarity(first, second)
        expected = reference.similarity(reference.encode(TEXTS), reference.encode(TEXTS[:2]))
        np.testing.assert_allclose(actual, expected.cpu().numpy(), rtol=1e-4, atol=1e-5)
        assert actual.shape == (3, 2)


def test_similarity_takes_arrays_and_one_vector(models: Models) -> None:
    model = models["dense"]
    result = model.encode(TEXTS)
    expected = model.similarity(result, result)
    for queries, own in (
        (result.vectors, expected),
        (result.vectors.tolist(), expected),
        (result[1], expected[1:2]),
    ):
        np.testing.assert_allclose(model.similarity(queries, result), own, rtol=0, atol=1e-9)


def test_truth_values_of_numpy_normalise_too(models: Models) -> None:
    expected = models["dense"].encode(TEXTS, truncate_dim=8, normalize=True)
    actual = models["dense"].encode(TEXTS, truncate_dim=8, normalize=np.True_)  # type: ignore[arg-type]
    np.testing.assert_array_equal(actual.vectors, expected.vectors)


def test_cosine_of_small_and_large_vectors_is_that_of_float64(models: Models) -> None:
    vectors = np.array([[3e-23, 4e-23], [3e20, 4e20], [0, 1e-44], [0, 0]], np.float32)
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    units = vectors / np.maximum(lengths, 1e-300)
    expected = units @ units.T
    actual = models["dense"].similarity(vectors, vectors)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_similarity_of_vectors_of_other_widths_is_refused(models: Models) -> None:
    for name in ("encode", "encode_sparse", "encode_multi"):
        model = models[{"encode": "dense"}.get(name, name.removeprefix("encode_"))]
        result = getattr(model, name)(TEXTS)
        if name == "encode_sparse":
            other = replace(result, width=result.width + 1)
        else:
            other = replace(result, vectors=[vector[..., :-1] for vector in result.vectors])
        for pair in ((result, other), (other, result)):
            with pytest.raises(vitrine.InvalidInput, match="a and b have vectors of") as raised:
                model.similarity(*pair)
            assert raised.value.pointer == "/b"


def test_similarity_of_different_kinds_and_of_a_classifier_is_refused(models: Models) -> None:
    dense, sparse = models["dense"].encode(TEXTS), models["sparse"].encode_sparse(TEXTS)
    with pytest.raises(vitrine.InvalidInput, match="both results of encode") as raised:
        models["dense"].similarity(dense, sparse)
    assert raised.value.pointer == "/b"
    with pytest.raises(vitrine.InvalidInput, match="cannot encode texts"):
        models["classifier"].similarity(dense, dense)
