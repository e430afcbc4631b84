"""Export of static models: refused folders and options."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from models.artifact import Artifact, sha256
from models.engines import EngineError, open_engine, self_check
from models.export.exporter import export
from models.export.model_folder import CheckpointError
from models.export.sentence_config import Overrides
from models.export.sources import CheckpointSource, SourceError, resolve
from models.manifest import ArtifactError
from service.inference.model.sync_model import SyncModel
from tests.models.checkpoints import edit_json, edit_tensors, write_json, write_modules
from tests.models.static_models import save_model2vec, save_static_embedding, word_pieces
from tests.sentences import SENTENCES

TOKENS = word_pieces().get_vocab_size()
MODULE = "StaticEmbedding"


def refused(folder: Path, message: str, **overrides: Any) -> None:  # noqa: ANN401
    with pytest.raises(CheckpointError, match=message):
        export(resolve(str(folder)), folder.parent / "out", overrides=Overrides(**overrides))


def with_config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def with_tensors(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, **changes)


def with_model_config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: write_json(folder / "config_sentence_transformers.json", changes)


def with_nan(folder: Path) -> None:
    edit_tensors(folder, embeddings=torch.full((TOKENS, 4), torch.nan))


def with_tokenizer(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        write_json(folder / "tokenizer.json", content)

    return edit


def add_invisible_token(tokenizer: dict[str, Any]) -> None:
    """Add a token whose content the normalizer makes empty."""
    vocabulary = tokenizer["model"]["vocab"]
    last = vocabulary["\u200b"] = vocabulary.pop(max(vocabulary, key=vocabulary.get))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    token = {"id": last, "content": "\u200b", "special": True, "normalized": True, **flags}
    tokenizer["added_tokens"].append(token)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a Dense layer": (
        lambda folder: write_modules(folder, (MODULE, ""), ("Dense", "1_Dense")),
        "StaticEmbedding -> Dense; supported for static models",
    ),
    "code from elsewhere": (
        lambda folder: write_json(
            folder / "modules.json",
            [{"type": f"sentence_transformers.models.{MODULE}"}, {"type": "own.Normalize"}],
        ),
        "own.Normalize",
    ),
    "Normalize of another feature": (
        lambda folder: write_json(
            folder / "1_Normalize" / "config.json", {"module_input_name": "token_embeddings"}
        ),
        "module_input_name is 'token_embeddings'",
    ),
    "Normalize in one file alone": (with_config(normalize=False), "they must agree"),
    "no limit of a number": (with_config(max_length="512"), "max_length is '512'"),
    "a limit of zero": (with_config(max_length=0), "max_length is 0"),
    "normalize of another type": (with_config(normalize=1), "normalize has the invalid value 1"),
    "truncation after Normalize": (with_model_config(truncate_dim=4), "truncate_dim with"),
    "another similarity": (with_model_config(similarity_fn_name="jaccard"), "jaccard"),
    "another model_type": (with_model_config(model_type="SparseEncoder"), "SparseEncoder"),
    "an unknown tensor": (with_tensors(projection=torch.zeros(2)), "projection"),
    "no table": (with_tensors(embeddings=None, other=torch.zeros(1)), "other"),
    "too few vectors": (with_tensors(embeddings=torch.ones(9, 4)), "has 9 vectors"),
    "vectors that are not finite": (with_nan, "not finite"),
    "a table of one axis": (with_tensors(embeddings=torch.ones(TOKENS)), "a matrix"),
    "a table of int32": (
        with_tensors(embeddings=torch.ones(TOKENS, 4, dtype=torch.int32)),
        "torch.int32",
    ),
    "a mapping beyond the table": (
        with_tensors(embeddings=torch.ones(3, 4), mapping=torch.full((TOKENS,), 3)),
        "mapping must have an index",
    ),
    "a mapping from the end": (
        with_tensors(embeddings=torch.ones(3, 4), mapping=torch.full((TOKENS,), -1)),
        "mapping must have an index",
    ),
    "too few weights": (with_tensors(weights=torch.ones(3)), "weights has shape"),
    "zero vectors": (with_tensors(embeddings=torch.zeros(TOKENS, 4)), "no vector other than zero"),
    "random tokens": (
        lambda folder: edit_json(
            folder / "tokenizer.json",
            model={"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 0.1},
        ),
        "dropout is 0.1",
    ),
    "a tokenizer without its unknown token": (
        with_tokenizer(lambda own: own["model"].update(unk_token="[none]")),  # noqa: S106
        "the tokenizer fails on a text: .*Missing .* token from the vocabulary",
    ),
    "a tokenizer that panics": (
        with_tokenizer(add_invisible_token),
        "the tokenizer fails on a text: the tokenizers library panicked",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_folder_that_would_give_other_vectors_is_refused(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    save_model2vec(tmp_path / "model", word_pieces(), normalize=True)
    change(tmp_path / "model")
    refused(tmp_path / "model", message)


def test_int8_of_sentence_transformers_is_refused(tmp_path: Path) -> None:
    save_static_embedding(tmp_path / "model", word_pieces())
    name = {"embedding.weight": torch.ones(TOKENS, 4, dtype=torch.int8)}
    save_file(name, tmp_path / "model" / "model.safetensors")
    refused(tmp_path / "model", "or of int8 from Model2Vec")


def test_table_in_a_subfolder_is_read(tmp_path: Path) -> None:
    oracle = save_static_embedding(tmp_path / "model", word_pieces())
    folder = tmp_path / "model"
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / "0_StaticEmbedding").mkdir(exist_ok=True)
        (folder / name).rename(folder / "0_StaticEmbedding" / name)
    write_modules(folder, (MODULE, "0_StaticEmbedding"))
    artifact, _ = export(resolve(str(folder)), tmp_path / "out")
    check = artifact.check()
    expected = oracle.encode(check.texts)[:-1]  # the last text is truncated for the check
    np.testing.assert_allclose(check.outputs["pooled"][:-1], expected, rtol=0, atol=1e-6)


def test_other_config_beside_a_table_of_sentence_transformers_is_ignored(tmp_path: Path) -> None:
    save_static_embedding(tmp_path / "model", word_pieces(), normalize=True)
    config = {"model_type": "bert", "normalize": False, "max_length": 2}
    write_json(tmp_path / "model" / "config.json", config)
    oracle = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    artifact, _ = export(resolve(str(tmp_path / "model")), tmp_path / "out")
    with SyncModel(artifact.path) as model:
        actual = model.encode(SENTENCES).vectors
    np.testing.assert_allclose(actual, oracle.encode(SENTENCES), rtol=0, atol=1e-6)


def test_truncated_dimensions_are_the_leading_columns(tmp_path: Path) -> None:
    save_static_embedding(tmp_path / "model", word_pieces())
    edit_json(tmp_path / "model" / "config_sentence_transformers.json", truncate_dim=5)
    artifact, _ = export(resolve(str(tmp_path / "model")), tmp_path / "out")
    table = load_file(tmp_path / "model" / "model.safetensors")["embedding.weight"].numpy()
    np.testing.assert_array_equal(np.load(artifact.path / "embeddings.npy")[:-1], table[:, :5])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"pooling": ["max"]}, "--pooling"),
        ({"tokens": True}, "--tokens"),
        ({"sparse": True}, "--sparse"),
        ({"include_prompt": False}, "--include-prompt"),
        ({"pair_template": "chat"}, "--pair-template"),
    ],
)
def test_options_of_networks_are_refused(
    option: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_model2vec(tmp_path / "model", word_pieces())
    refused(tmp_path / "model", f"{message} does not apply to a static model", **option)


@pytest.mark.parametrize("save", [save_model2vec, save_static_embedding])
@pytest.mark.parametrize("limit", [0, -5, 2**20 + 1])
def test_invalid_maximum_length_names_the_option(
    save: Callable[..., Any], limit: int, tmp_path: Path
) -> None:
    save(tmp_path / "model", word_pieces())
    refused(tmp_path / "model", f"--max-tokens is {limit}; it must be from 1", max_tokens=limit)


@pytest.mark.parametrize("save", [save_model2vec, save_static_embedding])
def test_prompt_that_leaves_no_room_for_a_text_is_refused(
    save: Callable[..., Any], tmp_path: Path
) -> None:
    save(tmp_path / "model", word_pieces())
    message = "the prompt 'long' leaves no room for a text within 4 tokens"
    refused(tmp_path / "model", message, max_tokens=4, prompts={"long": "w1 w2 w3 w4 "})


def test_target_for_gpus_is_refused(tmp_path: Path) -> None:
    save_model2vec(tmp_path / "model", word_pieces())
    with pytest.raises(ArtifactError, match="a static model has no network"):
        export(resolve(str(tmp_path / "model")), tmp_path / "out", target="cuda")


def test_folder_without_any_config_is_refused(tmp_path: Path) -> None:
    save_static_embedding(tmp_path / "model", word_pieces())
    (tmp_path / "model" / "modules.json").unlink()
    with pytest.raises(SourceError, match="is no model folder"):
        resolve(str(tmp_path / "model"))


def check(artifact: Artifact) -> None:
    self_check(open_engine(artifact), artifact)


def test_self_check_detects_another_table(tmp_path: Path) -> None:
    save_model2vec(tmp_path / "model", word_pieces())
    source = CheckpointSource(tmp_path / "model", "model", "folder model", None)
    artifact, _ = export(source, tmp_path / "out")
    file = artifact.path / "embeddings.npy"
    table = np.load(file)
    manifest = json.loads((artifact.path / "manifest.json").read_text())
    for altered, message in (
        (table[:, :-1], "the model requires shape"),
        (table.astype(np.float64), "dtype float32"),
        (table * np.float32(1.001), "self-check failed"),
        (np.roll(table, 1, axis=1), "self-check failed"),
    ):
        np.save(file, altered)
        digest = sha256(file)
        changed = {**manifest, "files": {**manifest["files"], "embeddings.npy": digest}}
        (artifact.path / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(EngineError, match=message):
            check(Artifact.load(artifact.path))
