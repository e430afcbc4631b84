"""The license of a checkpoint, from model cards that huggingface_hub writes."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData

from models.artifact import Artifact
from models.export.__main__ import main
from models.export.exporter import export
from models.export.model_card import license_of
from models.export.model_folder import ModelFolder
from models.export.sources import content_sha256, resolve
from models.manifest import MANIFEST, ArtifactError
from models.signing import read_private_key
from tests.models.checkpoints import edit_json, write_json
from tests.models.static_models import save_model2vec, word_pieces
from tests.signing_keys import new_key


def write_card(folder: Path, **metadata: Any) -> None:  # noqa: ANN401 - the metadata's own
    ModelCard(f"---\n{ModelCardData(**metadata)}\n---\n# A model\n").save(folder / "README.md")


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"license": "apache-2.0"}, "apache-2.0"),
        ({"license": ["mit", "apache-2.0"]}, "mit, apache-2.0"),
        ({"license": "other", "license_name": "own-terms"}, "own-terms"),
        ({"license": "other"}, "other"),
        ({"license": True}, None),
        ({"license": ["mit", None]}, None),
        ({"license": []}, None),
        ({"license": "The software is provided as is. " * 5}, None),
        ({"license": "a\x1b[31mb"}, "a\\x1b[31mb"),
        ({"tags": ["mteb"]}, None),
    ],
)
def test_license_is_that_of_the_model_card(
    tmp_path: Path, metadata: dict[str, Any], expected: str | None
) -> None:
    write_card(tmp_path, **metadata)
    assert license_of(ModelFolder(tmp_path), pytest.fail) == expected


def test_license_of_the_config_counts_only_without_one_in_the_model_card(tmp_path: Path) -> None:
    assert license_of(ModelFolder(tmp_path), pytest.fail) is None
    write_json(tmp_path / "config.json", {"license": "mit"})
    assert license_of(ModelFolder(tmp_path), pytest.fail) == "mit"
    (tmp_path / "README.md").write_text("# A model card without metadata\n")
    assert license_of(ModelFolder(tmp_path), pytest.fail) == "mit"
    write_card(tmp_path, license="apache-2.0")
    assert license_of(ModelFolder(tmp_path), pytest.fail) == "apache-2.0"


@pytest.mark.parametrize(
    "metadata",
    [b"- a list", b"license: [", b"\xff", b"license: !!bool x", b"license: " + b"[" * 3000],
)
def test_invalid_metadata_is_reported_and_states_no_license(
    tmp_path: Path, metadata: bytes
) -> None:
    (tmp_path / "README.md").write_bytes(b"---\n" + metadata + b"\n---\n")
    write_json(tmp_path / "config.json", {"license": "mit"})
    lines: list[str] = []
    assert license_of(ModelFolder(tmp_path), lines.append) == "mit"
    (line,) = lines
    assert line.startswith("The metadata of README.md, with the license, is invalid: ")


def test_license_of_a_network_is_in_the_manifest(small_artifact: Artifact) -> None:
    # The small model has the model card of all-MiniLM-L6-v2.
    assert small_artifact.manifest.license == "apache-2.0"


def test_changed_license_is_another_export(tmp_path: Path) -> None:
    save_model2vec(tmp_path / "model", word_pieces())
    write_card(tmp_path / "model", license="mit")
    before = content_sha256(tmp_path / "model")
    write_card(tmp_path / "model", license="apache-2.0")
    assert content_sha256(tmp_path / "model") != before


def test_changed_file_in_a_linked_folder_is_another_export(tmp_path: Path) -> None:
    """The folder has a link to itself too, which is not followed for ever."""
    write_json(tmp_path / "pooling" / "config.json", {"pooling_mode": "mean"})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "1_Pooling").symlink_to(tmp_path / "pooling")
    (tmp_path / "model" / "latest").symlink_to(tmp_path / "model")
    before = content_sha256(tmp_path / "model")
    write_json(tmp_path / "pooling" / "config.json", {"pooling_mode": "cls"})
    assert content_sha256(tmp_path / "model") != before


def test_static_model_is_exported_with_its_license_and_signed(tmp_path: Path) -> None:
    save_model2vec(tmp_path / "model", word_pieces())
    write_card(tmp_path / "model", license="mit")
    private, public = new_key(tmp_path, "key")
    export(resolve(str(tmp_path / "model")), tmp_path / "out", key=read_private_key(private))
    artifact = Artifact.load(tmp_path / "out", public)
    artifact.verify_all()
    assert artifact.manifest.license == "mit"
    edit_json(tmp_path / "out" / MANIFEST, license="apache-2.0")
    with pytest.raises(ArtifactError, match=r"manifest.json in the artifact out is not the signed"):
        Artifact.load(tmp_path / "out", public)


def test_export_with_a_wrong_key_ends_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, public = new_key(tmp_path, "key")
    for file, problem in (
        (public, "key.pub.pem is not a private key in PEM"),
        (tmp_path / "none.pem", "none.pem cannot be read: No such file"),
    ):
        assert main(["missing/model", "--out", str(tmp_path / "out"), "--sign", str(file)]) == 1
        assert problem in capsys.readouterr().err
