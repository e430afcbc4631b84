"""The declared similarity, against the attribute `similarity_fn_name` of sentence-transformers."""

from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder

from models.export.model_folder import CheckpointError, ModelFolder
from models.export.similarity import read_similarity
from models.manifest import SIMILARITIES, Output
from tests.models.checkpoints import write_json


def folder_with(folder: Path, **config: object) -> ModelFolder:
    write_json(folder / "config_sentence_transformers.json", config)
    return ModelFolder(folder)


@pytest.mark.parametrize("declared", ["cosine", "dot", "euclidean", "manhattan", None])
@pytest.mark.parametrize(
    ("output", "library"), [("pooled", SentenceTransformer), ("sparse", SparseEncoder)]
)
def test_similarity_is_that_of_sentence_transformers(
    declared: str | None,
    output: Output,
    library: type[SentenceTransformer | SparseEncoder],
    tmp_path: Path,
) -> None:
    oracle = library(modules=[torch.nn.Identity()], device="cpu")
    oracle._parse_model_config({"similarity_fn_name": declared})
    folder = folder_with(tmp_path, similarity_fn_name=declared)
    assert read_similarity(folder, output) == oracle.similarity_fn_name
    assert set(SIMILARITIES[output]) == set(library.SUPPORTED_SIMILARITY_FN_NAMES)


@pytest.mark.parametrize("output", ["pooled", "sparse", "multi", "logits", "tags"])
def test_folder_that_declares_none_has_the_default_of_its_kind(
    output: Output, tmp_path: Path
) -> None:
    expected = {"pooled": "cosine", "sparse": "dot", "multi": "maxsim"}.get(output)
    assert read_similarity(ModelFolder(tmp_path), output) == expected
    assert read_similarity(folder_with(tmp_path), output) == expected


@pytest.mark.parametrize("declared", ["maxsim", "MaxSim", "cosine", "dot"])
def test_multi_vectors_are_compared_by_maxsim(declared: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, similarity_fn_name=declared)
    assert read_similarity(folder, "multi") == "maxsim"


@pytest.mark.parametrize("output", ["logits", "tags"])
def test_models_without_vectors_ignore_the_similarity(output: Output, tmp_path: Path) -> None:
    assert read_similarity(folder_with(tmp_path, similarity_fn_name="dot"), output) is None


@pytest.mark.parametrize("output", ["pooled", "sparse", "multi"])
@pytest.mark.parametrize(
    "declared", ["dot_product", "Cosine", "meanmaxsim", "hamming", "", 1, True, ["dot"], {}]
)
def test_unknown_similarity_is_refused_by_name(
    declared: object, output: Output, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path, similarity_fn_name=declared)
    with pytest.raises(CheckpointError, match="similarity_fn_name is ") as error:
        read_similarity(folder, output)
    assert f"similarity_fn_name is {declared!r}; supported for" in str(error.value)
    assert str(error.value).endswith(": " + ", ".join(SIMILARITIES[output]))


@pytest.mark.parametrize(
    ("declared", "output"), [("maxsim", "pooled"), ("maxsim", "sparse"), ("euclidean", "multi")]
)
def test_similarity_of_other_vectors_is_refused(
    declared: str, output: Output, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"similarity_fn_name is '{declared}'"):
        read_similarity(folder_with(tmp_path, similarity_fn_name=declared), output)
