"""Signatures of artifacts with elliptic curve keys, in the format of OpenSSF's model-signing.

model.sig is a Sigstore bundle with a DSSE envelope, whose payload is an in-toto statement with the
SHA-256 of every other file. The package model-signing verifies the signatures that are written
here, and those of its modes `key` and `certificate` are verified here.

A start that requires no signatures does not import this module, nor cryptography.

Sources: https://github.com/sigstore/model-transparency and
https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md
"""

import base64
import codecs
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from cryptography.x509 import InvalidVersion, load_pem_x509_certificate

from models.json_reader import parse_json
from models.manifest import SIGNATURE, ArtifactError
from models.printable import printable
from models.typed_json import describe

_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"

# Curves of model-signing, with the hash that each signs.
_HASHES: Mapping[str, hashes.HashAlgorithm] = {
    "secp256r1": hashes.SHA256(),
    "secp384r1": hashes.SHA384(),
    "secp521r1": hashes.SHA512(),
}


class KeyFileError(ArtifactError):
    """A file has no key that can sign or verify artifacts."""


class SignatureError(ValueError):
    """A signature is invalid; the message is the rest of a sentence that begins with its name."""


@dataclass(frozen=True)
class Signature:
    """A verified signature.

    Attributes:
        hint: SHA-256 of the PEM public key that verified it, in hexadecimal.
        files: SHA-256 of each signed file, by its path in the artifact.
    """

    hint: str
    files: Mapping[str, str]

    def check(self, artifact: str, files: Mapping[str, str]) -> None:
        """Check that files are signed.

        Args:
            artifact: Name of their artifact, for the message.
            files: SHA-256 of each file, by path.

        Raises:
            ArtifactError: A file is not signed, or is not the signed one.
        """
        for name, digest in files.items():
            if (signed := self.files.get(name)) is None:
                raise ArtifactError(f"{printable(name)} in the artifact {artifact} is not signed")
            if signed != digest:
                raise ArtifactError(
                    f"{printable(name)} in the artifact {artifact} is not the signed file: "
                    "its SHA-256 differs from the signature's"
                )


def read_private_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a PEM file.

    Raises:
        KeyFileError: The file cannot be read, is no private key of a supported curve, or is
            encrypted.
    """
    content = _read(file)
    try:
        key = load_pem_private_key(content, None)
    except TypeError:
        raise KeyFileError(f"{file} is encrypted: decrypt it with openssl pkey") from None
    except (ValueError, UnsupportedAlgorithm):
        raise KeyFileError(f"{file} is not a private key in PEM") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in _HASHES:
        raise KeyFileError(_wrong_curve(file))
    return key


def read_public_key(file: Path) -> ec.EllipticCurvePublicKey:
    """Return the public key in a PEM file, or that of the certificate in it.

    Nothing else of a certificate counts: neither its dates nor its issuer, usage or revocation.

    Raises:
        KeyFileError: The file cannot be read, or is not one public key or certificate of a
            supported curve.
    """
    content = _read(file)
    try:
        (kind,) = re.findall(rb"^-----BEGIN ([A-Z0-9 ]+)-----", content, re.MULTILINE)
        is_certificate = kind == b"CERTIFICATE"
        key = (
            load_pem_x509_certificate(content).public_key()
            if is_certificate
            else load_pem_public_key(content)
        )
    except (ValueError, UnsupportedAlgorithm, InvalidVersion):
        raise KeyFileError(f"{file} is not one public key or one certificate in PEM") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _HASHES:
        raise KeyFileError(_wrong_curve(file))
    return key


def key_hint(key: ec.EllipticCurvePublicKey) -> str:
    """Return the SHA-256 of the PEM of a public key, in hexadecimal, which names it in bundles."""
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(pem).hexdigest()


def signature_of(files: Mapping[str, str], key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """Return the content of model.sig: the signature of an artifact's files.

    Args:
        files: SHA-256 of each file, in hexadecimal, by its path in the artifact.
        key: Private key of a supported curve.
        name: Name of the artifact in the signature, which only informs.
    """
    return _bundle(_statement(files, name), key)


def verify_signature(content: bytes, key: ec.EllipticCurvePublicKey) -> Signature:
    """Return the signature in a bundle, verified with a key.

    The files of the artifact remain to be compared with it.

    Args:
        content: Content of model.sig.
        key: Public key of a supported curve.

    Raises:
        SignatureError: The bundle is invalid, of another key or of another format.
    """
    hint = key_hint(key)
    try:
        bundle: Any = parse_json(content)
        _require("mediaType", bundle["mediaType"], _BUNDLE)
        material, envelope = bundle["verificationMaterial"], bundle["dsseEnvelope"]
        if "publicKey" in material:
            _require_hint(material["publicKey"].get("hint"), hint)
        elif "x509CertificateChain" not in material:
            raise SignatureError("is of a mode other than key and certificate")
        _require("payloadType", envelope["payloadType"], _PAYLOAD)
        payload = base64.b64decode(envelope["payload"], validate=True)
        (signature,) = envelope["signatures"]
        own = base64.b64decode(signature["sig"], validate=True)
        key.verify(own, _pre_authentication(payload), ec.ECDSA(_HASHES[key.curve.name]))
        return Signature(hint, dict(_resources(parse_json(payload))))
    except InvalidSignature:
        raise SignatureError("was changed, or is of another key") from None
    except SignatureError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SignatureError("is not a bundle of model-signing") from None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise KeyFileError(f"{file} cannot be read: {error.strerror}") from error


def _wrong_curve(file: Path) -> str:
    return f"{file} is not a key of an elliptic curve of {', '.join(_HASHES)}"


def _pre_authentication(payload: bytes) -> bytes:
    """Return what DSSE signs of a payload."""
    return b"DSSEv1 %d %b %d %b" % (len(_PAYLOAD), _PAYLOAD.encode(), len(payload), payload)


def _root_digest(digests: Iterator[str]) -> str:
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def _statement(files: Mapping[str, str], name: str) -> bytes:
    ordered = sorted(files, key=PurePosixPath)
    statement = {
        "_type": _STATEMENT,
        "subject": [
            # A lone surrogate, of a name that is not UTF-8, is no valid JSON.
            {
                "name": printable(name),
                "digest": {"sha256": _root_digest(files[own] for own in ordered)},
            }
        ],
        "predicateType": _PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [SIGNATURE],
            },
            "resources": [
                {"name": own, "algorithm": "sha256", "digest": files[own]} for own in ordered
            ],
        },
    }
    return json.dumps(statement, indent=2).encode()


def _bundle(payload: bytes, key: ec.EllipticCurvePrivateKey) -> bytes:
    signature = key.sign(_pre_authentication(payload), ec.ECDSA(_HASHES[key.curve.name]))
    bundle = {
        "mediaType": _BUNDLE,
        "verificationMaterial": {
            "publicKey": {"hint": key_hint(key.public_key())},
            "tlogEntries": [],
        },
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": _PAYLOAD,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return json.dumps(bundle).encode()


def _resources(statement: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - any JSON value
    """Yield the path and the SHA-256 of each file of a signed statement."""
    _require("_type", statement["_type"], _STATEMENT)
    _require("predicateType", statement["predicateType"], _PREDICATE)
    # Links are refused with any `allow_symlinks`, and files of `ignore_paths` as not signed.
    serialization = statement["predicate"]["serialization"]
    _require("method", serialization["method"], "files")
    _require("hash_type", serialization["hash_type"], "sha256")
    resources = statement["predicate"]["resources"]
    (subject,) = statement["subject"]
    if subject["digest"]["sha256"] != _root_digest(own["digest"] for own in resources):
        raise SignatureError("has a digest that is not that of its files")
    names = [own["name"] for own in resources]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(names)
    if len({*names}) < len(names):
        raise SignatureError("names a file twice")
    for own in resources:
        _require("algorithm", own["algorithm"], "sha256")
        yield own["name"], own["digest"]


def _require(field: str, actual: object, expected: str) -> None:
    if actual != expected:
        raise SignatureError(f"has the {field} {describe(actual)}; {expected} is required")


def _require_hint(actual: object, expected: str) -> None:
    # Before version 1.0, bundles had no hint.
    if actual not in (None, "", expected):
        hint = printable(str(actual))[: len(expected)]
        raise SignatureError(f"is of the key {hint}; {expected} is required")
