"""Bill of materials of an artifact, in CycloneDX 1.6: its model, files and origin.

Equal artifacts have equal bills of materials: there is no time in them.

Source: https://cyclonedx.org/docs/1.6/json/
"""

import uuid
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

from models.artifact import Artifact, sha256
from models.manifest import MANIFEST, Manifest
from models.quantization import read_calibration

# SPDX ids of licenses that the hub names in lower case. Others are given by their name.
_SPDX = {
    spdx.lower(): spdx
    for spdx in (
        *("Apache-2.0", "MIT", "ISC", "MPL-2.0", "Unlicense", "WTFPL", "Zlib", "OFL-1.1"),
        *("BSD-2-Clause", "BSD-3-Clause", "BSD-3-Clause-Clear", "BSL-1.0", "AFL-3.0", "MS-PL"),
        *("AGPL-3.0", "GPL-2.0", "GPL-3.0", "LGPL-2.1", "LGPL-3.0", "EPL-2.0", "EUPL-1.2"),
        *("CC0-1.0", "CC-BY-3.0", "CC-BY-4.0", "CC-BY-SA-3.0", "CC-BY-SA-4.0", "CC-BY-ND-4.0"),
        *("CC-BY-NC-2.0", "CC-BY-NC-3.0", "CC-BY-NC-4.0", "CC-BY-NC-ND-3.0", "CC-BY-NC-ND-4.0"),
        *("CC-BY-NC-SA-2.0", "CC-BY-NC-SA-3.0", "CC-BY-NC-SA-4.0", "CDLA-Permissive-2.0"),
    )
}
# Types of package URLs, by the kind of a checkpoint's source; a folder has none.
_PURLS = {"package": "pypi", "hub": "huggingface"}

# An object of CycloneDX.
Component = dict[str, Any]


def bill_of_materials(artifact: Artifact) -> Component:
    """Return the bill of materials as an object of JSON.

    Args:
        artifact: The artifact, whose files are verified.

    Raises:
        ArtifactError: A file differs from the manifest.
    """
    artifact.verify_all()
    manifest = artifact.manifest
    digest = sha256(artifact.path / MANIFEST)
    files = {**manifest.files, MANIFEST: digest}
    model = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": manifest.name,
        "version": manifest.revision or digest,
        **_licenses(manifest),
        # That of the manifest, which has those of all other files.
        "hashes": _hashes(digest),
        "components": [_file(name, files[name]) for name in sorted(files)],
        "pedigree": {"ancestors": [_checkpoint(manifest)]},
        "modelCard": _model_card(artifact),
        "properties": [
            {"name": f"vitrine:exported-with:{name}", "value": own}
            for name, own in manifest.versions.items()
        ],
    }
    tool = {"type": "application", "name": "vitrine", "version": version("vitrine")}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}",
        "version": 1,
        "metadata": {"tools": {"components": [tool]}, "component": model},
    }


def _hashes(digest: str) -> list[Component]:
    return [{"alg": "SHA-256", "content": digest}]


def _file(name: str, digest: str) -> Component:
    return {"type": "file", "name": name, "hashes": _hashes(digest)}


def _licenses(manifest: Manifest) -> Component:
    names = (manifest.license or "").split(", ")
    licenses = [
        {"license": {"id": _SPDX[name.lower()]} if name.lower() in _SPDX else {"name": name}}
        for name in names
        if name
    ]
    return {"licenses": licenses} if licenses else {}


def _checkpoint(manifest: Manifest) -> Component:
    """Return the checkpoint from which the model was exported."""
    weights = [_file(name, own) for name, own in sorted(manifest.weights_sha256.items())]
    kind, space, name = manifest.source.partition(" ")
    if not space:
        kind, name = "hub", manifest.source
    checkpoint = {
        "type": "machine-learning-model",
        "name": name,
        **({"version": manifest.revision} if manifest.revision else {}),
        **_licenses(manifest),
        "components": weights,
    }
    if kind in _PURLS:
        checkpoint["purl"] = f"pkg:{_PURLS[kind]}/{quote(name)}@{manifest.revision}"
    return checkpoint


def _model_card(artifact: Artifact) -> Component:
    manifest = artifact.manifest
    return {
        "modelParameters": {
            "task": _task(manifest),
            "architectureFamily": "static" if manifest.is_static else "transformer",
            "modelArchitecture": manifest.family,
            "inputs": [{"format": "text"}],
            "outputs": [{"format": output} for output in manifest.outputs],
        },
        "quantitativeAnalysis": {
            "performanceMetrics": [
                {"type": name, "value": f"{value:g}", "slice": part}
                for part, name, value in _measures(artifact)
            ]
        },
    }


def _task(manifest: Manifest) -> str:
    """Return the task of a model, in the hub's terms."""
    if manifest.outputs[0] == "logits":
        return "text-ranking" if len(manifest.labels) == 1 else "text-classification"
    return (
        "token-classification" if manifest.outputs[0] in ("tags", "spans") else "feature-extraction"
    )


def _measures(artifact: Artifact) -> Iterator[tuple[str, str, float]]:
    """Yield the part of the artifact, the name and the value of what the export measured."""
    for graph in artifact.manifest.graphs:
        measured = graph.quality.measures if graph.quality else graph.parity or {}
        for name, value in measured.items():
            yield graph.file, name, value
    if (calibration := read_calibration(artifact)) is not None:
        for method, value in calibration.recall.items():
            yield f"vectors in {method}", "recall_at_10", value
