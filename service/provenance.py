"""`vitrine sign`, `verify` and `bom`: signatures and bills of materials of artifacts."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from models import signing
from models.artifact import Artifact
from models.bom import bill_of_materials
from models.local_path import local_path
from models.manifest import ArtifactError
from models.printable import printable
from service.model_cache import required_signer


def sign(arguments: Sequence[str] | None = None) -> int:
    """Run `vitrine sign` and return its exit status."""

    def run(path: Path, key: Path) -> str:
        artifact = _load(path)
        hint = artifact.sign(signing.read_private_key(key), artifact.path.name)
        return printable(f"{path} is signed by the key {hint}")

    parser = _parser("sign", "Sign all files of an artifact, in its file model.sig.")
    _add_key(parser, "PEM file with the private key of an elliptic curve")
    options = parser.parse_args(arguments)
    return _print(parser.prog, lambda: run(options.path, options.key))


def verify(arguments: Sequence[str] | None = None) -> int:
    """Run `vitrine verify` and return its exit status."""

    def run(path: Path, key: Path) -> str:
        artifact = _load(path, key)
        artifact.verify_all()
        files = len(artifact.manifest.files) + 1  # with the manifest
        return printable(
            f"{path}: all {files} files are those signed by the key {artifact.signed_by}"
        )

    parser = _parser("verify", "Verify the signature of an artifact, and all its files.")
    _add_key(parser, "PEM file with the public key, or with its certificate")
    options = parser.parse_args(arguments)
    return _print(parser.prog, lambda: run(options.path, options.key))


def bom(arguments: Sequence[str] | None = None) -> int:
    """Run `vitrine bom` and return its exit status."""

    def run(path: Path) -> str:
        return json.dumps(bill_of_materials(_load(path, required_signer())), indent=2)

    parser = _parser("bom", "Print an artifact's bill of materials, in CycloneDX 1.6.")
    options = parser.parse_args(arguments)
    return _print(parser.prog, lambda: run(options.path))


def _load(path: Path, verify: Path | None = None) -> Artifact:
    """Return the artifact at a path, whose name is that of its folder, as of `.`."""
    return Artifact.load(Path(os.path.realpath(path)), verify)


def _parser(verb: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"vitrine {verb}", description=description)
    parser.add_argument("path", metavar="PATH", type=local_path, help="folder of the artifact")
    return parser


def _add_key(parser: argparse.ArgumentParser, description: str) -> None:
    parser.add_argument("--key", metavar="FILE", type=local_path, required=True, help=description)


def _print(program: str, run: Callable[[], str]) -> int:
    try:
        text = run()
    except (ArtifactError, OSError) as error:
        print(printable(f"{program}: {error}"), file=sys.stderr)
        return 1
    print(text)
    return 0
