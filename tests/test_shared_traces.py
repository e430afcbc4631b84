import os
from pathlib import Path

from tests.shared_traces import folder_of_traces


def test_traces_of_other_code_are_in_another_folder(tmp_path: Path) -> None:
    code = tmp_path / "models" / "network" / "norms.py"
    code.parent.mkdir(parents=True)
    code.write_text("EPS = 1e-5")
    first = folder_of_traces(tmp_path)
    assert folder_of_traces(tmp_path) == first
    code.write_text("EPS = 1e-6")
    assert folder_of_traces(tmp_path) != first


def test_traces_of_the_two_latest_versions_of_the_code_are_kept(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    code = tmp_path / "models" / "artifact.py"
    folders: list[Path] = []
    for version in range(3):
        code.write_text(f"VERSION = {version}")
        folders.append(folder_of_traces(tmp_path))
        os.utime(folders[-1], (version, version))  # the clock of the files may stand still
    assert [folder.exists() for folder in folders] == [False, True, True]
