"""The identity of a served model: one hash over everything that determines its results.

It is the SHA-256 of the artifact's manifest, with the hashes of its files, and of the engine's name
and precision. Everything in them is part of it, except what the tables below exclude. So a new
field or file is part of it until it is excluded.

The artifact's path and times, and runtime options such as threads and limits, are no part of it:
they decide whether and when there is a result, not which.
"""

import hashlib
import json
from dataclasses import asdict

from models.artifact import Artifact
from models.engines import Precision, graph_of
from models.manifest import CHECK, SOURCE, SPACES

# Fields of the manifest that determine no result, and why.
EXCLUDED_FIELDS = {
    "name": "the same model under another name has the same results",
    "source": "origin of the checkpoint",
    "revision": "origin of the checkpoint",
    "weights_sha256": "the weights of the graph are part of it",
    "license": "terms of the checkpoint",
    "baseline_ids": "gradients alone are compared with them",
    "versions": "the files that the libraries wrote are part of it",
    "has_experts": "the graph, which has them, is part of it",
    "spaces": "maps of finished vectors, which responses name by their own hash",
}
# Fields of the engine's graph that determine no result, and why. Other graphs are no part at all.
EXCLUDED_GRAPH_FIELDS = {
    "file": "its content is part of it",
    "weights": "its content is part of it",
    "parity": "measured at export",
    "quality": "measured at export",
}
# Files and folders that determine no result, and why. So do graphs and weights of other engines.
EXCLUDED_FILES = {
    CHECK: "verifies the graph at startup",
    SOURCE: "the graph was exported from it",
    SPACES: "maps of finished vectors, which responses name by their own hash",
}


def identity_of(artifact: Artifact, engine: str, precision: Precision) -> str:
    """Return the identity of an artifact's model on an engine, in hexadecimal.

    The hashes of files are the manifest's.

    Args:
        artifact: Artifact of the model.
        engine: Name in `models.engines.ENGINES`.
        precision: Precision of the engine.

    Raises:
        ArtifactError: The artifact has no graph for the engine and precision.
    """
    manifest = asdict(artifact.manifest)
    for name, absent in (("unknown_id", None), ("prompt_adapters", {})):
        if manifest[name] == absent:  # older artifacts keep their identity
            del manifest[name]
    hashes = manifest.pop("files")
    graph = asdict(graph_of(artifact, engine, precision))
    graph_files = {own[part] for own in manifest.pop("graphs") for part in ("file", "weights")}
    description = {
        "manifest": _without(manifest, EXCLUDED_FIELDS),
        "graph": _without(graph, EXCLUDED_GRAPH_FIELDS),
        "graph_sha256": artifact.graph_sha256(engine, graph["dtype"]),
        "files": {
            name: digest
            for name, digest in hashes.items()
            if name not in graph_files and name.partition("/")[0] not in EXCLUDED_FILES
        },
        "engine": engine,
        "precision": precision,
    }
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _without(fields: dict[str, object], excluded: dict[str, str]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name not in excluded}
