"""`vitrine sign`, `verify` and `bom`."""

import json
from pathlib import Path

import pytest

from models.artifact import Artifact
from models.bom import bill_of_materials
from models.manifest import SIGNATURE
from models.signing import key_hint, read_public_key
from service.commands import main
from tests.hostile_artifacts import copy_of
from tests.signing_keys import new_key


@pytest.fixture
def copy(small_artifact: Artifact, tmp_path: Path) -> Path:
    return copy_of(small_artifact.path, tmp_path / "copy")


def test_artifact_is_signed_and_verified_by_two_commands(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private, public = new_key(tmp_path, "key")
    hint = key_hint(read_public_key(public))
    assert main(["sign", str(copy), "--key", str(private)]) == 0
    assert capsys.readouterr().out == f"{copy} is signed by the key {hint}\n"
    assert main(["verify", str(copy), "--key", str(public)]) == 0
    files = sum(file.is_file() for file in copy.rglob("*")) - 1  # without the signature
    expected = f"{copy}: all {files} files are those signed by the key {hint}\n"
    assert capsys.readouterr().out == expected


def test_name_of_a_folder_is_printed_without_its_line_breaks_and_escape_sequences(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private, public = new_key(tmp_path, "key")
    folder = copy.rename(tmp_path / "a\n\x1b[31m")
    for verb, key in (("sign", private), ("verify", public)):
        assert main([verb, str(folder), "--key", str(key)]) == 0
        assert capsys.readouterr().out.startswith(f"{tmp_path}/a\\n\\x1b[31m")


def test_commands_end_with_one_sentence_and_status_1(
    copy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    private, public = new_key(tmp_path, "key")
    assert main(["sign", str(copy), "--key", str(private)]) == 0
    file = copy / "source/config.json"
    content = file.read_bytes()
    file.unlink()  # a hard link
    file.write_bytes(content[:-1])
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for arguments, problem in (
        (["verify", copy, "--key", public], "source/config.json in the artifact copy is not the"),
        (["sign", copy, "--key", private], "source/config.json in the artifact copy is not the"),
        (["bom", copy], "source/config.json in the artifact copy is not the"),
        (["sign", copy, "--key", public], "key.pub.pem is not a private key in PEM"),
        (["verify", copy, "--key", private], "key.pem is not one public key or one certificate"),
        (["verify", copy, "--key", tmp_path / "none"], "none cannot be read: No such file"),
        (["bom", tmp_path], "is not an artifact: it has no manifest.json"),
        (["sign", circle, "--key", private], "circle is not an artifact: it has no manifest.json"),
        (["verify", circle, "--key", public], "circle is not an artifact: it has no manifest.js"),
    ):
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"vitrine {arguments[0]}: ")
        assert problem in err
        assert len(err.splitlines()) == 1
    monkeypatch.chdir(copy)
    assert main(["bom", "."]) == 1
    assert "in the artifact copy is not the" in capsys.readouterr().err
    (copy / SIGNATURE).unlink()
    assert main(["verify", str(copy), "--key", str(public)]) == 1
    assert "copy has no signature model.sig, which vitrine sign writes" in capsys.readouterr().err


def test_bill_of_materials_is_printed_as_json(
    small_artifact: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bom", str(small_artifact.path)]) == 0
    assert json.loads(capsys.readouterr().out) == bill_of_materials(small_artifact)
