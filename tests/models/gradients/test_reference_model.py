import json
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from models.artifact import Artifact
from models.engines import open_engine
from models.export.checkpoint import load
from models.gradients.inputs import InputRow
from models.gradients.reference_model import ReferenceModel
from models.manifest import MANIFEST, ArtifactError
from models.packing import NO_ADAPTER, pack
from tests.hostile_artifacts import edit
from tests.models.checkpoints import save_classifier
from tests.models.gradients.toys import ADAPTED, DEBERTA, GATED, LLAMA, NARROW, A, B, toy_model


def test_reference_model_vectors_equal_those_of_the_served_graph(artifact: Artifact) -> None:
    model, check = ReferenceModel.open(artifact), artifact.check()
    served = open_engine(artifact).run(pack(check.rows, [len(row) // 4 for row in check.rows]))
    ours = [model.vector(InputRow(row, len(row) // 4)).numpy() for row in check.rows]
    np.testing.assert_allclose(np.stack(ours), served, atol=2e-6)


def test_reference_model_opens_without_transformers(small_artifact: Artifact) -> None:
    """Importing it takes a second, which the first gradient request would wait for."""
    code = (
        "import sys; from pathlib import Path; from models.artifact import Artifact; "
        "from models.gradients.reference_model import ReferenceModel; "
        "ReferenceModel.open(Artifact.load(Path(sys.argv[1]))); "
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(small_artifact.path)], check=True)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_first": True},
        {"position_padding_id": 1},
        GATED,
        NARROW,
        LLAMA,
        DEBERTA,
        {"distinct_layers": 1},
    ],
)
def test_continuing_from_any_layer_gives_the_same_vector(changes: dict[str, object]) -> None:
    model = toy_model(**changes)  # type: ignore[arg-type]
    assert model.layer_names == ("words", "embeddings", "layers.0", "output")
    row = InputRow([0, 7, 1, 4, 9, 2])  # id 1 is RoBERTa's padding token, which changes positions
    ids = torch.tensor([row.ids])
    ones = torch.ones(1, len(row.ids), dtype=torch.float64)
    expected = model.network(ids, ones, ones)[0]
    for layer_name in model.layer_names:
        tokens = model.tokens(layer_name, row)
        width = changes.get("embedding_width", 16) if layer_name == "words" else 16
        assert tokens.shape == (len(row.ids), width)
        versions = torch.stack([tokens, 2 * tokens])
        torch.testing.assert_close(model.continue_from(layer_name, versions, row)[0], expected)
    torch.testing.assert_close(model.vector(row), expected)


@pytest.mark.parametrize("family", ["bert", "eurobert", "qwen3"])
def test_logits_continue_from_any_layer_as_transformers_pools_them(
    family: str, tmp_path: Path
) -> None:
    reference = save_classifier(tmp_path, family, 2, pad_token_id=9)
    model = ReferenceModel(load(tmp_path)[0], normalize=False)
    row = InputRow([0, 7, 9, 4, 9])  # Qwen3 skips the last token
    with torch.no_grad():
        expected = reference(torch.tensor([row.ids])).logits[0]
    for layer_name in model.layer_names:
        actual = model.continue_from(layer_name, model.tokens(layer_name, row)[None], row)[0]
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer_name", ["words", "embeddings", "layers.0", "output"])
def test_adapter_of_the_row_is_used_from_every_layer_on(layer_name: str) -> None:
    model = toy_model(**ADAPTED)
    ids = [0, 7, 21, 4, 9, 2]
    ones = torch.ones(1, len(ids), dtype=torch.float64)
    vectors = []
    for adapter in (NO_ADAPTER, 0, 1):
        row = InputRow(ids, adapter=adapter)
        own = None if adapter == NO_ADAPTER else torch.tensor([adapter])
        expected = model.network(torch.tensor([ids]), ones, ones, adapters=own)[0]
        tokens = model.tokens(layer_name, row)[None]
        torch.testing.assert_close(model.continue_from(layer_name, tokens, row)[0], expected)
        torch.testing.assert_close(model.vector(row), expected)
        vectors.append(expected)
    assert min(torch.dist(a, b) for a, b in combinations(vectors, 2)) > 0.1


def test_replacement_ids_use_the_positions_of_the_row() -> None:
    model = toy_model(position_padding_id=1)
    padding = [0, 1, 1, 1, 1, 2]  # RoBERTa would give all padding the same position
    words = model.network.encoder.embeddings.word.weight[padding]
    positions = model.network.encoder.positions(torch.tensor([A.ids]))
    expected = model.network.encoder.embeddings(words[None], positions)[0]
    torch.testing.assert_close(model.tokens("embeddings", A, padding), expected)


def test_vector_does_not_depend_on_earlier_rows() -> None:
    model = toy_model()
    first = model.vector(A)
    model.vector(B)
    assert torch.equal(model.vector(A), first)


def test_weights_other_than_those_exported_are_rejected(copy: Path) -> None:
    name = "model.safetensors"
    edit(copy, MANIFEST, weights_sha256={name: "0" * 64})
    with pytest.raises(ArtifactError, match=f"source/{name} differs from the weights of the graph"):
        ReferenceModel.open(Artifact.load(copy))


def test_modified_reference_model_is_rejected(copy: Path) -> None:
    (copy / "source/config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"source/config.json .* is not the exported file"):
        ReferenceModel.open(Artifact.load(copy))


def test_weights_swapped_after_verification_are_not_used(
    small_artifact: Artifact, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Artifact.read

    def read_and_swap(self: Artifact, name: str) -> bytes:
        content = read(self, name)
        if name.endswith(".safetensors"):
            (copy / name).write_bytes(content[:-4000] + bytes(4000))
        return content

    monkeypatch.setattr(Artifact, "read", read_and_swap)
    model = ReferenceModel.open(Artifact.load(copy))
    with pytest.raises(ArtifactError, match="is not the exported file"):
        ReferenceModel.open(Artifact.load(copy))
    for name, tensor in ReferenceModel.open(small_artifact).network.state_dict().items():
        torch.testing.assert_close(model.network.state_dict()[name], tensor, msg=name)


def test_artifact_without_reference_model_raises_artifact_error(copy: Path) -> None:
    shutil.rmtree(copy / "source")
    files = json.loads((copy / MANIFEST).read_text())["files"]
    kept = {name: digest for name, digest in files.items() if not name.startswith("source/")}
    edit(copy, MANIFEST, files=kept)
    with pytest.raises(
        ArtifactError, match="was exported without its reference model, which gradients need"
    ):
        ReferenceModel.open(Artifact.load(copy))
