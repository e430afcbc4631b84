"""Keys that sign artifacts, as openssl makes them."""

import subprocess
from pathlib import Path


def openssl(*arguments: object) -> None:
    """Run openssl."""
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def new_key(folder: Path, name: str, curve: str = "prime256v1") -> tuple[Path, Path]:
    """Write a private key and its public key, and return their files."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    openssl("ecparam", "-name", curve, "-genkey", "-noout", "-out", private)
    openssl("pkey", "-in", private, "-pubout", "-out", public)
    return private, public
