import json
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch

from models.artifact import Artifact, ArtifactError
from models.engines import open_engine
from models.gradients.twin import Row, Twin
from models.packing import pack
from tests.models.gradients.toys import A, B, toy_twin


def test_its_vectors_are_those_of_the_served_graph(artifact: Artifact) -> None:
    twin, check = Twin.open(artifact), artifact.check()
    served = open_engine(artifact).run(pack(check.rows, [len(row) // 4 for row in check.rows]))
    ours = [twin.vector(Row(row, len(row) // 4)).numpy() for row in check.rows]
    np.testing.assert_allclose(np.stack(ours), served, atol=2e-6)


@pytest.mark.parametrize("changes", [{}, {"norm_first": True}, {"position_padding_id": 1}])
def test_every_point_leads_to_the_same_vector(changes: dict[str, object]) -> None:
    twin = toy_twin(**changes)  # type: ignore[arg-type]
    assert twin.points == ("words", "embeddings", "layers.0", "output")
    row = Row([0, 7, 1, 4, 9, 2])  # with a padding token, which RoBERTa numbers in another way
    ids = torch.tensor([row.ids])
    ones = torch.ones(1, len(row.ids), dtype=torch.float64)
    wanted = twin.model(ids, ones, ones)[0]
    for point in twin.points:
        tokens = twin.tokens(point, row)
        assert tokens.shape == (len(row.ids), 16)
        versions = torch.stack([tokens, 2 * tokens])
        torch.testing.assert_close(twin.onwards(point, versions, row)[0], wanted)
    torch.testing.assert_close(twin.vector(row), wanted)


def test_other_ids_stand_in_at_the_positions_of_the_row() -> None:
    twin = toy_twin(position_padding_id=1)
    padding = [0, 1, 1, 1, 1, 2]  # which RoBERTa's numbering would put at one position
    words = twin.model.encoder.embeddings.word.weight[padding]
    positions = twin.model.encoder.positions(torch.tensor([A.ids]))
    wanted = twin.model.encoder.embeddings.place(words[None], positions, None)[0]
    torch.testing.assert_close(twin.tokens("embeddings", A, padding), wanted)


def test_a_row_is_not_changed_by_the_rows_before_it() -> None:
    twin = toy_twin()
    first = twin.vector(A)
    twin.vector(B)
    assert torch.equal(twin.vector(A), first)


def test_weights_that_the_graph_was_not_exported_from_are_refused(
    artifact: Artifact, tmp_path: Path
) -> None:
    copy = copytree(artifact.path, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    name = next(iter(manifest["weights_sha256"]))
    manifest["weights_sha256"][name] = "0" * 64
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=f"twin/{name} is not what the graph was exported from"):
        Twin.open(Artifact.load(copy))


def test_a_twin_that_was_changed_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    copy = copytree(artifact.path, tmp_path / "copy")
    (copy / "twin/config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"twin/config.json .* is not the file"):
        Twin.open(Artifact.load(copy))


def test_what_is_used_is_what_was_compared_even_if_the_file_is_swapped_meanwhile(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copytree(artifact.path, tmp_path / "copy")
    read = Artifact.read

    def read_and_swap(self: Artifact, name: str) -> bytes:
        content = read(self, name)
        if name.endswith(".safetensors"):
            (copy / name).write_bytes(content[:-4000] + bytes(4000))
        return content

    monkeypatch.setattr(Artifact, "read", read_and_swap)
    twin = Twin.open(Artifact.load(copy))
    with pytest.raises(ArtifactError, match="is not the file"):
        Twin.open(Artifact.load(copy))
    for name, tensor in Twin.open(artifact).model.state_dict().items():
        torch.testing.assert_close(twin.model.state_dict()[name], tensor, msg=name)


def test_an_artifact_without_its_twin_says_what_is_missing(
    artifact: Artifact, tmp_path: Path
) -> None:
    copy = copytree(artifact.path, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    for name in [name for name in manifest["files"] if name.startswith("twin/")]:
        del manifest["files"][name]
        (copy / name).unlink()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="was exported without its twin, which gradients need"):
        Twin.open(Artifact.load(copy))
