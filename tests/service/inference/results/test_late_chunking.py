"""Late chunking against a plain implementation of arXiv:2409.04701 with transformers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Normalize,
    Pooling,
    Transformer,
)
from torch import nn
from transformers import AutoModel, AutoTokenizer

import vitrine
from models.artifact import Artifact
from models.engines import Output
from models.export.exporter import export
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from models.manifest import CHECK, MANIFEST
from models.packing import PackedBatch
from service.inference.tokenizing.chunking import Strategy
from tests.conftest import FamilyArtifact
from tests.hostile_artifacts import copy_of, edit
from tests.models.checkpoints import edit_json, save_checkpoint, save_tokenizer
from tests.sentences import SENTENCES

TWO_THREADS = vitrine.ModelOptions(threads=2)
SHORT = " ".join(SENTENCES[2:12])
LONG = "\n\n".join(SENTENCES) * 2
WORDS = " ".join(f"w{4 + 7 * i % 56}" for i in range(100))


@cache
def loaded(folder: Path) -> tuple[Any, Any]:
    """Return the tokenizer and the model of transformers."""
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def reference(
    folder: Path, text: str, chunks: list[vitrine.Chunk], max_tokens: int, prompt: str = ""
) -> Any:  # noqa: ANN401 - array
    """Return the mean token vector of each chunk, of a BERT-like model without padding.

    Algorithm 2 of the paper: macro chunks of as many tokens as fit, of which each but the first
    repeats a quarter for context, whose vectors are dropped. The first chunk has [CLS] and the
    prompt, and the last has [SEP].
    """
    tokenizer, model = loaded(folder)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    before = tokenizer(prompt).input_ids[:-1]
    ids, offsets = encoded.input_ids, encoded.offset_mapping
    room = max_tokens - len(before) - 1
    context = room // 4
    vectors: list[torch.Tensor] = []
    position = 0
    while True:
        row = [*before, *ids[position : position + room], tokenizer.sep_token_id]
        with torch.no_grad():
            hidden = model(torch.tensor([row])).last_hidden_state[0]
        vectors.append(hidden[:-1] if not vectors else hidden[len(before) + context : -1])
        if position + room >= len(ids):
            vectors.append(hidden[-1:])
            break
        position += room - context
    tokens = torch.cat(vectors)
    assert len(tokens) == len(before) + len(ids) + 1
    means = []
    for chunk in chunks:
        inside = [i for i, (a, b) in enumerate(offsets) if chunk.start <= a and b <= chunk.end]
        start = 0 if inside[0] == 0 else len(before) + inside[0]
        end = len(tokens) if inside[-1] == len(ids) - 1 else len(before) + inside[-1] + 1
        means.append(tokens[start:end].mean(0))
    return torch.stack(means).numpy()


def units(vectors: Any) -> Any:  # noqa: ANN401 - arrays
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def minilm(artifact: Artifact) -> Iterator[vitrine.SyncModel]:
    with vitrine.SyncModel(artifact.path, TWO_THREADS) as model:
        yield model


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tokens", "sentences", "paragraphs"])
@pytest.mark.parametrize("text", [SHORT, LONG], ids=["short", "long"])
def test_vectors_equal_the_reference_implementation(
    minilm: vitrine.SyncModel, minilm_folder: Path, text: str, strategy: Strategy
) -> None:
    chunking = vitrine.Chunking(strategy=strategy, size=40, overlap=8, late=True)
    result = minilm.encode_chunks(text, chunking)
    plain = minilm.encode_chunks(text, chunking, normalize=False, truncate_dim=100)
    expected = reference(minilm_folder, text, list(result.chunks[0]), 256)
    assert len(result.chunks[0]) > 3
    np.testing.assert_allclose(result.vectors[0], units(expected), rtol=0, atol=1e-6)
    np.testing.assert_allclose(plain.vectors[0], expected[:, :100], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert"])
def test_windows_of_small_models_equal_the_reference_implementation(
    family_artifact: FamilyArtifact, family: str
) -> None:
    artifact = family_artifact(family)
    with vitrine.SyncModel(artifact.path, TWO_THREADS) as model:
        chunking = vitrine.Chunking(size=9, overlap=2, late=True)
        result = model.encode_chunks([WORDS, "w5 w6"], chunking, normalize=False)
        assert result.tokens[0] > 100
    folder = artifact.path.with_name("model")
    for text, vectors, chunks in zip([WORDS, "w5 w6"], result.vectors, result.chunks, strict=True):
        expected = reference(folder, text, list(chunks), artifact.manifest.max_tokens)
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)


@contextmanager
def counted_rows(model: vitrine.Model, patch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Record the lengths of the rows that the engine computes."""
    lengths: list[float] = []
    run_outputs = model.engine.run_outputs

    def counting(batch: PackedBatch, outputs: Sequence[Output]) -> list[NDArray[np.float32]]:
        lengths.extend(batch.attention_mask.sum(1).tolist())
        return run_outputs(batch, outputs)

    with patch.context() as context:
        context.setattr(model.engine, "run_outputs", counting)
        yield lengths


def test_document_that_fits_is_encoded_in_one_forward_pass(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [SHORT, SHORT[:200], SHORT[:90]]
    with vitrine.SyncModel(small_artifact.path, TWO_THREADS) as model:
        with counted_rows(model.model, monkeypatch) as lengths:
            result = model.encode_chunks(texts, vitrine.Chunking(size=10, late=True))
        assert len(lengths) == len(texts)
        assert result.tokens == [len(row.ids) for row in model.encode(texts).rows]
        assert sum(lengths) == sum(result.tokens)
        assert min(map(len, result.chunks)) > 1
        with counted_rows(model.model, monkeypatch) as lengths:
            early = model.encode_chunks(texts, vitrine.Chunking(size=10))
        assert len(lengths) == sum(map(len, early.chunks))


@pytest.fixture(scope="module", params=["pooled", "unpooled"])
def prompted(
    request: pytest.FixtureRequest, small_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    """The small model with a prompt, which pooling includes or not."""
    out = tmp_path_factory.mktemp("prompted") / "artifact"
    overrides = Overrides(
        prompts={"document": "a document: "}, include_prompt=request.param == "pooled"
    )
    return export(resolve(str(small_folder)), out, overrides=overrides)[0]


@pytest.mark.slow
def test_only_chunk_of_a_text_has_the_vector_of_the_text(prompted: Artifact) -> None:
    texts = [SHORT, "cat", "naïve ½ [SEP] 🎉"]
    with vitrine.SyncModel(prompted.path, TWO_THREADS) as model:
        for prompt in (None, "document"):
            result = model.encode_chunks(texts, vitrine.Chunking(late=True), prompt_name=prompt)
            expected = model.encode(texts, prompt_name=prompt)
            assert not any(row.truncated for row in expected.rows)
            np.testing.assert_allclose(
                np.concatenate(result.vectors), expected.vectors, rtol=0, atol=1e-6
            )


@pytest.mark.slow
def test_prompt_belongs_to_the_first_chunk_if_it_is_pooled(
    prompted: Artifact, small_folder: Path
) -> None:
    with vitrine.SyncModel(prompted.path, TWO_THREADS) as model:
        chunking = vitrine.Chunking(size=30, late=True)
        result = model.encode_chunks(LONG, chunking, prompt_name="document")
    chunks = list(result.chunks[0])
    expected = units(reference(small_folder, LONG, chunks, 256, prompt="a document: "))
    actual = result.vectors[0]
    np.testing.assert_allclose(actual[1:], expected[1:], rtol=0, atol=1e-6)
    is_pooled = prompted.manifest.include_prompt
    assert (np.abs(actual[0] - expected[0]).max() < 1e-6) == is_pooled


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [None, True])
def test_modules_that_only_scale_or_truncate_follow_the_mean(
    tmp_path: Path, normalize: bool | None
) -> None:
    save_checkpoint(tmp_path / "bert", "bert", num_hidden_layers=1)
    save_tokenizer(tmp_path / "bert")
    transformer = Transformer(str(tmp_path / "bert"), max_seq_length=24)
    modules: list[nn.Module] = [transformer, Pooling(32), Normalize()]
    model_folder = tmp_path / "model"
    SentenceTransformer(modules=modules, device="cpu").save(str(model_folder))
    edit_json(model_folder / "config_sentence_transformers.json", truncate_dim=8)
    artifact, _ = export(resolve(str(model_folder)), tmp_path / "artifact")
    assert artifact.manifest.heads == ("NormalizeHead", "TruncateHead")
    with vitrine.SyncModel(artifact.path, TWO_THREADS) as model:
        chunking = vitrine.Chunking(late=True)
        result = model.encode_chunks("w5 w6 w7 w8", chunking, normalize=normalize)
        expected = model.encode("w5 w6 w7 w8", normalize=normalize).vectors
    np.testing.assert_allclose(result.vectors[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling": ["cls"]}, "its pooling is cls, not mean"),
        ({"heads": ["DenseHead"]}, "its vectors pass through DenseHead"),
        ({"outputs": ["pooled"]}, "vitrine-export --tokens"),
    ],
)
def test_models_whose_vectors_are_not_means_of_token_vectors_are_refused(
    small_artifact: Artifact, tmp_path: Path, changes: dict[str, list[str]], message: str
) -> None:
    folder = copy_of(small_artifact.path, tmp_path / "copy")
    edit(folder, MANIFEST, **changes)
    if "outputs" in changes:
        edit(folder, CHECK, outputs={"pooled": small_artifact.check().outputs["pooled"]})
    with vitrine.SyncModel(folder, TWO_THREADS) as model:
        with pytest.raises(vitrine.InvalidInput, match=message) as raised:
            model.encode_chunks("a cat", vitrine.Chunking(late=True))
        assert raised.value.code == "wrong_model"
        with pytest.raises(vitrine.InvalidInput, match=message):
            model.score("cat", ["a cat"], chunking=vitrine.Chunking(late=True))
        assert model.encode_chunks("a cat", vitrine.Chunking(size=1)).vectors[0].shape[0] == 2


def test_tokens_of_late_chunks_are_limited(small_artifact: Artifact) -> None:
    options = vitrine.ModelOptions(threads=1, max_token_vectors=100)
    with vitrine.SyncModel(small_artifact.path, options) as model:
        with pytest.raises(vitrine.InvalidInput, match="the limit for results per token is 100"):
            model.encode_chunks("cat " * 99, vitrine.Chunking(late=True))
        model.encode_chunks("cat " * 98, vitrine.Chunking(late=True))
