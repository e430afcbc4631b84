"""Settings in a model's own files, against sentence-transformers."""

from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from starlette.testclient import TestClient
from torch import nn

import vitrine
from models.artifact import Artifact
from models.export.exporter import export
from models.export.sources import resolve
from models.export.tokenizer_file import tokenizer_of_source
from models.gradients.inputs import InputRow
from models.gradients.reference_model import ReferenceModel
from service.app import create_app
from service.inference.call_options import OnOverflow
from service.settings import EngineSettings, ModelSettings, Settings
from tests.models.checkpoints import edit_json, save_checkpoint, save_tokenizer
from tests.serving import serving

LONG = " ".join(f"w{index}" for index in range(5, 45))
TEXTS = ["w7 w9", LONG, "w21"]


@pytest.fixture(scope="module")
def truncating(tmp_path_factory: pytest.TempPathFactory) -> tuple[SentenceTransformer, Artifact]:
    """A model whose files truncate texts on the left, and vectors to 8 of 32 dimensions."""
    folder = tmp_path_factory.mktemp("truncating")
    save_checkpoint(folder, "bert", num_hidden_layers=1)
    save_tokenizer(folder)
    edit_json(folder / "tokenizer_config.json", truncation_side="left")
    modules: list[nn.Module] = [
        Transformer(str(folder), max_seq_length=12),
        Pooling(32),
        Normalize(),
    ]
    SentenceTransformer(modules=modules, truncate_dim=8, device="cpu").save(str(folder))
    edit_json(folder / "config_sentence_transformers.json", truncate_dim=8)
    edit_json(folder / "config.json", matryoshka_dimensions=[16, 4, 8])
    exported, _ = export(resolve(str(folder)), folder / "artifact")
    return SentenceTransformer(str(folder), device="cpu"), exported


@pytest.mark.slow
def test_vectors_are_truncated_as_by_the_config(
    truncating: tuple[SentenceTransformer, Artifact],
) -> None:
    oracle, artifact = truncating
    expected = oracle.encode(TEXTS, truncate_dim=8)
    assert max(np.linalg.norm(expected, axis=1)) < 0.9
    with vitrine.SyncModel(artifact.path, vitrine.ModelOptions(threads=1)) as model:
        np.testing.assert_allclose(model.encode(TEXTS).vectors, expected, rtol=1e-5, atol=1e-6)
        shorter = model.encode(TEXTS, dimensions=4).vectors
        np.testing.assert_allclose(shorter, expected[:, :4], rtol=1e-5, atol=1e-6)
        unit = model.encode(TEXTS, normalize=True).vectors
        expected = oracle.encode(TEXTS, truncate_dim=8, normalize_embeddings=True)
        np.testing.assert_allclose(unit, expected, rtol=1e-5, atol=1e-6)
        with pytest.raises(vitrine.InvalidInput, match="dimensions must be from 1 to 8"):
            model.encode("w5", dimensions=9)
    # The gradients' reference model computes the same vector.
    row = InputRow(tokenizer_of_source(artifact).encode(TEXTS[0]).ids)
    vector = ReferenceModel.open(artifact).vector(row)
    np.testing.assert_allclose(vector, oracle.encode(TEXTS[0], truncate_dim=8), rtol=1e-5)


@pytest.mark.slow
def test_long_texts_lose_their_tokens_at_the_end_that_the_tokenizer_truncates(
    truncating: tuple[SentenceTransformer, Artifact],
) -> None:
    oracle, artifact = truncating
    with vitrine.SyncModel(artifact.path, vitrine.ModelOptions(threads=1)) as model:
        left, right = ([0, *ids, 2] for ids in (list(range(35, 45)), list(range(5, 15))))
        assert oracle.tokenizer(LONG, truncation=True)["input_ids"] == left
        modes: tuple[OnOverflow, OnOverflow] = ("truncate", "truncate_left")
        for on_overflow in modes:
            assert model.encode(LONG, on_overflow=on_overflow).rows[0].ids == left
        assert model.encode(LONG, on_overflow="truncate_right").rows[0].ids == right
        row = list(range(5, 45))
        assert model.encode([row]).rows[0].ids == row[-12:]
        assert model.encode([row], on_overflow="truncate_right").rows[0].ids == row[:12]
    assert tokenizer_of_source(artifact).encode(LONG).ids == left


@pytest.mark.slow
def test_info_has_the_dimensions_and_the_truncation_of_the_model(
    truncating: tuple[SentenceTransformer, Artifact],
) -> None:
    model = ModelSettings(path=truncating[1].path)
    with serving(create_app(Settings(model=model, engine=EngineSettings(threads=1)))) as client:
        info = client.get("/info").json()
    # 16 dimensions are more than the model returns.
    assert (info["dimensions"], info["matryoshka_dimensions"]) == (8, [4, 8])
    assert (info["normalize"], info["truncation_side"]) == (False, "left")


def test_truncate_dim_of_a_request_keeps_normalised_dimensions(
    client: TestClient, small_folder: Path
) -> None:
    texts = ["The cat sat on the mat.", "Strassenbahn"]
    oracle = SentenceTransformer(str(small_folder), device="cpu")

    def vectors(**fields: object) -> list[list[float]]:
        body = client.post("/encode", json={"inputs": texts, **fields}).json()
        assert body["dimensions"] == 10
        result: list[list[float]] = body["embeddings"]
        return result

    expected = oracle.encode(texts, truncate_dim=10, normalize_embeddings=True)
    actual = vectors(truncate_dim=10, normalize=True)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    expected = oracle.encode(texts, truncate_dim=10)
    np.testing.assert_allclose(vectors(truncate_dim=10), expected, rtol=0, atol=1e-5)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors(dimensions=10), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"truncate_dim": 33}, "truncate_dim must be from 1 to 32, the model's width"),
        ({"truncate_dim": 8, "dimensions": 8}, "truncate_dim are mutually exclusive"),
        (
            {"truncate_dim": 8, "output": "tokens"},
            'truncate_dim does not apply to the output "tokens"',
        ),
    ],
)
def test_invalid_truncate_dim_is_named(
    client: TestClient, fields: dict[str, object], message: str
) -> None:
    response = client.post("/encode", json={"inputs": "cat", **fields})
    assert response.status_code == 422
    assert response.json()["pointer"] == "/truncate_dim"
    assert message in response.json()["detail"]
