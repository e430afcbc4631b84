"""Files of an artifact that were changed, or cannot be read."""

import os
import shutil
from pathlib import Path

import pytest

from models.artifact import Artifact
from models.gradients.reference_model import ReferenceModel
from tests.models.gradients.parity.conftest import (
    ROWS,
    parity_of,
    self_contained,
    served_by,
    with_graph,
)


def test_changed_or_missing_source_weights_are_reported(
    tiny: Artifact, model: ReferenceModel, tmp_path: Path
) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(tiny.path, copied)
    moved = Artifact.load(copied)
    weights = copied / "source" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    served = served_by(self_contained(tiny), ROWS)
    result = parity_of(moved, model, served=served)
    assert result.failures == (
        "source/model.safetensors was changed or replaced since the service started",
    )
    weights.unlink()
    result = parity_of(moved, model, served=served)
    assert result.failures == ("source/model.safetensors was removed since the service started",)


@pytest.mark.parametrize("content", [b"", b"not a graph", None])
def test_graph_file_that_became_unreadable_is_reported(
    content: bytes | None, tiny: Artifact, model: ReferenceModel, tmp_path: Path
) -> None:
    changed = with_graph(tiny, content or b"", tmp_path)
    if content is None:
        (changed.path / "model.onnx").unlink()
    result = parity_of(changed, model, served=served_by(self_contained(tiny), ROWS))
    gone, unreadable = result.failures
    assert gone.startswith("model.onnx ")
    assert unreadable.startswith("model.onnx cannot be compared: ")
    assert (result.weights, result.curve) == ((), ())
    assert all(vector.relative < 1e-5 for vector in result.vectors)


def test_artifact_with_hard_linked_weights_is_compared(
    tiny: Artifact, model: ReferenceModel, tmp_path: Path
) -> None:
    served = served_by(self_contained(tiny), ROWS)
    shutil.copytree(tiny.path, tmp_path / "copy")
    shutil.copytree(tmp_path / "copy", tmp_path / "linked", copy_function=os.link)
    linked = Artifact.load(tmp_path / "linked")
    assert parity_of(linked, model, served=served).failures == ()


def test_weights_that_became_unreadable_are_reported(
    tiny: Artifact, model: ReferenceModel, tmp_path: Path
) -> None:
    served = served_by(self_contained(tiny), ROWS)
    changed = with_graph(tiny, tiny.read("model.onnx"), tmp_path)
    with (changed.path / "model.weights").open("r+b") as file:
        file.truncate(1000)
    failures = parity_of(changed, model, served=served).failures
    assert failures[0].startswith("model.weights was changed or replaced")
    assert failures[1].startswith("model.onnx cannot be compared: ")


def test_defect_of_the_comparison_itself_is_not_reported_as_a_changed_file(
    tiny: Artifact, model: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("models.gradients.parity.compare_weights", broken)
    with pytest.raises(ZeroDivisionError):
        parity_of(tiny, model)
