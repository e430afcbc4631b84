import os
from pathlib import Path

from tests.shared_traces import ROOT, folder_of_traces, traced_code


def test_code_of_traces_is_that_of_the_graph_and_not_that_of_the_export() -> None:
    code = {str(file.relative_to(ROOT / "models")) for file in traced_code()}
    assert {file.name for file in (ROOT / "models/network").glob("*.py")} <= {
        Path(name).name for name in code if name.startswith("network/")
    }
    assert code >= {"add_layer_norm/op.py", "export/attention_nodes.py", "export/onnx_graph.py"}
    assert not code & {"engines/__init__.py", "export/exporter.py", "gradients/attribution.py"}


def test_traces_of_other_code_are_in_another_folder(tmp_path: Path) -> None:
    code = tmp_path / "norms.py"
    code.write_text("EPS = 1e-5")
    first = folder_of_traces([code], tmp_path)
    assert folder_of_traces([code], tmp_path) == first
    code.write_text("EPS = 1e-6")
    assert folder_of_traces([code], tmp_path) != first


def test_traces_of_the_two_latest_versions_of_the_code_are_kept(tmp_path: Path) -> None:
    code = tmp_path / "artifact.py"
    folders: list[Path] = []
    for version in range(3):
        code.write_text(f"VERSION = {version}")
        folders.append(folder_of_traces([code], tmp_path))
        os.utime(folders[-1], (version, version))  # the clock of the files may stand still
    assert [folder.exists() for folder in folders] == [False, True, True]
