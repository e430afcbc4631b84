from collections.abc import Callable
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from models.export.exporter import export
from models.export.model_folder import CheckpointError, ModelFolder
from models.export.requirements import check_requirements
from models.export.sources import CheckpointSource
from tests.models.checkpoints import save_sentence_model, write_json


@pytest.mark.parametrize("form", [str, lambda own: {"specifier": own, "reason": "Why."}])
def test_required_versions_are_those_of_sentence_transformers(
    form: Callable[[str], object], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    save_sentence_model(folder)

    def require(**packages: str) -> None:
        own = {"requirements": {name: form(value) for name, value in packages.items()}}
        write_json(folder / "config_sentence_transformers.json", own)

    require(transformers=">=5.0,<99", pytorch="~=2.0", numpy="newest")
    SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    check_requirements(ModelFolder(folder))
    require(transformers=">=5.0", pytorch="~=1.0")
    with pytest.raises(ImportError, match=r"torch~=1\.0, but torch==2"):
        SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    with pytest.raises(CheckpointError, match=r"the model requires torch~=1\.0, and torch 2"):
        export(CheckpointSource(folder, "model", f"folder {folder}", None), tmp_path / "out")
    require(python=">=3,<3.1")
    with pytest.raises(ImportError, match=r"python>=3,<3\.1, but"):
        SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    with pytest.raises(CheckpointError, match=r"requires python>=3,<3\.1, and python 3\.\d+\.\d+"):
        check_requirements(ModelFolder(folder))
    require(flash_attn=">=2")  # not used here
    check_requirements(ModelFolder(folder))


def test_development_version_counts_as_in_sentence_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    save_sentence_model(folder)
    own = {"requirements": {"numpy": ">=2.0"}}
    write_json(folder / "config_sentence_transformers.json", own)
    for reader in (
        "models.export.requirements.version",
        "sentence_transformers.util.environment.get_installed_version",
    ):
        monkeypatch.setattr(reader, lambda _: "2.5.0.dev0")
    SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    check_requirements(ModelFolder(folder))
