"""Signatures of artifacts, compared in both directions with the package model-signing."""

import base64
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from models.artifact import Artifact
from models.manifest import MANIFEST, SIGNATURE, ArtifactError
from models.signing import KeyFileError, key_hint, read_private_key, read_public_key
from tests.hostile_artifacts import copy_of, edit, replace
from tests.signing_keys import new_key, openssl

CURVES = ("prime256v1", "secp384r1", "secp521r1")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Private and public key by curve."""
    folder = tmp_path_factory.mktemp("keys")
    return {curve: new_key(folder, curve, curve) for curve in CURVES}


@pytest.fixture(scope="module")
def key(keys: dict[str, tuple[Path, Path]]) -> tuple[Path, Path]:
    return keys["prime256v1"]


@pytest.fixture(scope="module")
def certificate(key: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of the key, signed by itself."""
    file = tmp_path_factory.mktemp("certificate") / "certificate.pem"
    usage = ("-addext", "keyUsage=digitalSignature")
    openssl("req", "-x509", "-key", key[0], "-subj", "/CN=signer", *usage, "-out", file)
    return file


@pytest.fixture
def signed(copy: Path, key: tuple[Path, Path]) -> Path:
    sign_folder(copy, key[0])
    return copy


def test_key_files_may_begin_with_a_byte_order_mark(
    key: tuple[Path, Path], certificate: Path, tmp_path: Path
) -> None:
    for name, file in (("key", key[0]), ("public", key[1]), ("certificate", certificate)):
        (tmp_path / name).write_text(file.read_text(), encoding="utf-8-sig")
    public = read_public_key(tmp_path / "public")
    assert public == load_pem_public_key(key[1].read_bytes())
    assert read_public_key(tmp_path / "certificate") == public
    assert read_private_key(tmp_path / "key").public_key() == public


def sign_folder(folder: Path, private: Path) -> str:
    return Artifact.load(folder).sign(read_private_key(private), folder.name)


def check(folder: Path, public: Path) -> None:
    """Verify an artifact as a start does: its signature first, then its files."""
    Artifact.load(folder, public).verify_all()


def test_signature_is_on_the_disk_before_it_has_its_name(
    signed: Path, key: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    before = (signed / SIGNATURE).stat().st_ino

    def fsync(descriptor: int) -> None:
        assert (signed / SIGNATURE).stat().st_ino == before
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr("os.fsync", fsync)
    sign_folder(signed, key[0])
    assert synced == [(signed / SIGNATURE).stat().st_ino]


def test_signature_that_cannot_be_written_leaves_the_old_one(
    signed: Path, key: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(file: Path, content: bytes) -> int:
        with file.open("wb") as stream:
            stream.write(content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    before = (signed / SIGNATURE).read_bytes()
    monkeypatch.setattr(Path, "write_bytes", fill_the_disk)
    problem = f"^the signature model.sig of {signed.name} cannot be written: No space left on"
    with pytest.raises(ArtifactError, match=problem):
        sign_folder(signed, key[0])
    assert (signed / SIGNATURE).read_bytes() == before
    check(signed, key[1])  # which refuses other files


def edit_bundle(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    bundle = json.loads((folder / SIGNATURE).read_text())
    change(bundle)
    (folder / SIGNATURE).write_text(json.dumps(bundle))


def statement(folder: Path) -> dict[str, Any]:
    payload = json.loads((folder / SIGNATURE).read_text())["dsseEnvelope"]["payload"]
    loaded: dict[str, Any] = json.loads(base64.b64decode(payload))
    return loaded


def sign_by_package(
    folder: Path, private: Path, *, ignored: tuple[str, ...] = (), method: str = "files"
) -> None:
    from model_signing import hashing, signing

    config = hashing.Config().set_ignored_paths(paths=[SIGNATURE, *ignored])
    if method == "shards":
        config = config.use_shard_serialization()
    signer = signing.Config().use_elliptic_key_signer(private_key=private)
    signer.set_hashing_config(config).sign(folder, folder / SIGNATURE)


@pytest.mark.parametrize("curve", CURVES)
def test_package_verifies_our_signature_and_refuses_it_for_other_files(
    copy: Path, keys: dict[str, tuple[Path, Path]], curve: str
) -> None:
    from model_signing import verifying

    private, public = keys[curve]
    assert sign_folder(copy, private) == key_hint(read_public_key(public))
    verifier = verifying.Config().use_elliptic_key_verifier(public_key=public)
    verifier.verify(copy, copy / SIGNATURE)
    check(copy, public)
    replace(copy, MANIFEST, (copy / MANIFEST).read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"Hash mismatch for .*manifest\.json"):
        verifier.verify(copy, copy / SIGNATURE)
    other = verifying.Config().use_elliptic_key_verifier(public_key=keys[CURVES[0]][1])
    if curve != CURVES[0]:
        with pytest.raises((ValueError, InvalidSignature)):
            other.verify(copy, copy / SIGNATURE)


@pytest.mark.parametrize("curve", CURVES)
def test_signature_of_the_package_is_verified_and_signs_the_same_statement(
    copy: Path, keys: dict[str, tuple[Path, Path]], curve: str
) -> None:
    private, public = keys[curve]
    sign_by_package(copy, private)
    check(copy, public)
    expected = statement(copy)
    sign_folder(copy, private)  # in place of the other
    actual = statement(copy)
    for own in (expected, actual):
        # The package adds files of Git, which an artifact cannot have, in any order.
        assert SIGNATURE in own["predicate"]["serialization"].pop("ignore_paths")
    assert actual == expected


def test_certificate_verifies_signatures_of_both_modes_by_its_key(
    signed: Path, key: tuple[Path, Path], certificate: Path
) -> None:
    from model_signing import hashing, signing

    check(signed, certificate)
    signer = signing.Config().use_certificate_signer(
        private_key=key[0], signing_certificate=certificate, certificate_chain=[certificate]
    )
    ignored = hashing.Config().set_ignored_paths(paths=[SIGNATURE])
    signer.set_hashing_config(ignored).sign(signed, signed / SIGNATURE)
    assert "x509CertificateChain" in (signed / SIGNATURE).read_text()
    check(signed, certificate)
    check(signed, key[1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    file.write_bytes(content)


def truncate(file: Path) -> None:
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-1])


def rename(file: Path) -> None:
    file.rename(file.with_name(f"new-{file.name}"))


@pytest.mark.parametrize("tamper", [flip, truncate, rename, Path.unlink])
def test_any_file_that_is_not_the_signed_one_is_refused_by_name(
    small_artifact: Artifact, tmp_path: Path, key: tuple[Path, Path], tamper: Callable[[Path], None]
) -> None:
    signed = copy_of(small_artifact.path, tmp_path / "signed")
    sign_folder(signed, key[0])
    names = [MANIFEST, SIGNATURE, *small_artifact.manifest.files]
    assert any(name.startswith("source/") for name in names)
    for index, name in enumerate(names):
        tampered = copy_of(signed, tmp_path / str(index))
        check(tampered, key[1])
        tamper(tampered / name)
        with pytest.raises(ArtifactError) as error:
            check(tampered, key[1])
        assert name in str(error.value)
        assert str(index) in str(error.value)


def test_added_file_is_refused_even_if_the_manifest_lists_it(
    signed: Path, key: tuple[Path, Path]
) -> None:
    for name in ("extra.bin", ".git", "source/extra.bin"):
        (signed / name).touch()
        with pytest.raises(ArtifactError, match=f"copy has an unlisted file {name}"):
            check(signed, key[1])
        (signed / name).unlink()
    replace(signed, "extra.bin", b"")
    with pytest.raises(ArtifactError, match=r"manifest.json in the artifact copy is not the sign"):
        check(signed, key[1])


def test_replaced_file_is_refused_even_if_the_manifest_has_its_hash(
    signed: Path, key: tuple[Path, Path]
) -> None:
    edit(signed, "check.json", texts=[])
    with pytest.raises(ArtifactError, match=r"manifest.json in the artifact copy is not the sign"):
        check(signed, key[1])


def test_flipped_byte_of_the_bundle_is_refused_unless_it_says_the_same(
    signed: Path, key: tuple[Path, Path]
) -> None:
    def meaning(content: bytes) -> tuple[object, ...]:
        bundle = json.loads(content)
        envelope = bundle["dsseEnvelope"]
        decoded = [envelope["payload"], envelope["signatures"][0]["sig"]]
        return bundle["mediaType"], envelope["payloadType"], *map(base64.b64decode, decoded)

    content = (signed / SIGNATURE).read_bytes()
    accepted = 0
    for index in range(0, len(content), 5):
        tampered = bytearray(content)
        tampered[index] ^= 1
        (signed / SIGNATURE).write_bytes(tampered)
        with suppress(ArtifactError):
            Artifact.load(signed, key[1])
            assert meaning(bytes(tampered)) == meaning(content)
            accepted += 1
    assert accepted < 20


def test_signature_of_another_key_is_refused_with_both_hints(
    signed: Path, key: tuple[Path, Path], tmp_path: Path
) -> None:
    _, other = new_key(tmp_path, "other")
    hints = [key_hint(read_public_key(file)) for file in (key[1], other)]
    with pytest.raises(ArtifactError, match=f"copy is of the key {hints[0]}; {hints[1]} is"):
        check(signed, other)
    edit_bundle(
        signed, lambda own: own["verificationMaterial"].update(publicKey={"hint": hints[1]})
    )
    with pytest.raises(ArtifactError, match="copy was changed, or is of another key"):
        check(signed, other)


def test_signature_of_another_artifact_is_refused(
    copy: Path, other_artifact: Artifact, key: tuple[Path, Path], tmp_path: Path
) -> None:
    other = copy_of(other_artifact.path, tmp_path / "other")
    sign_folder(other, key[0])
    shutil.copy(other / SIGNATURE, copy)
    with pytest.raises(ArtifactError, match=r"manifest.json in the artifact copy is not the sign"):
        check(copy, key[1])


def test_bundle_without_a_hint_is_verified_as_by_the_package(
    signed: Path, key: tuple[Path, Path]
) -> None:
    from model_signing import verifying

    edit_bundle(signed, lambda own: own["verificationMaterial"].update(publicKey={}))
    verifying.Config().use_elliptic_key_verifier(public_key=key[1]).verify(
        signed, signed / SIGNATURE
    )
    check(signed, key[1])


def test_signing_again_leaves_hard_linked_copies_as_they_are(
    signed: Path, keys: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    linked = copy_of(signed, tmp_path / "linked")
    sign_folder(signed, keys["secp384r1"][0])
    check(signed, keys["secp384r1"][1])
    check(linked, keys["prime256v1"][1])


def test_renamed_artifact_keeps_its_signature(signed: Path, key: tuple[Path, Path]) -> None:
    check(signed.rename(signed.with_name("renamed")), key[1])


@pytest.mark.parametrize(
    ("ignored", "name"),
    [(("source",), "source/.*"), (("model.weights",), "model.weights"), ((MANIFEST,), MANIFEST)],
)
def test_signature_of_some_files_is_refused_with_a_file_that_is_not_signed(
    copy: Path, key: tuple[Path, Path], ignored: tuple[str, ...], name: str
) -> None:
    sign_by_package(copy, key[0], ignored=ignored)
    with pytest.raises(ArtifactError, match=f"^{name} in the artifact copy is not signed$"):
        check(copy, key[1])


def test_signed_file_that_is_missing_is_refused(copy: Path, key: tuple[Path, Path]) -> None:
    (copy / "extra.bin").touch()
    sign_by_package(copy, key[0])
    (copy / "extra.bin").unlink()
    with pytest.raises(ArtifactError, match=r"copy lacks file extra.bin"):
        check(copy, key[1])


def test_unsigned_artifact_is_refused_only_where_a_key_is_required(
    copy: Path, key: tuple[Path, Path]
) -> None:
    with pytest.raises(ArtifactError, match=r"the artifact copy has no signature model.sig"):
        check(copy, key[1])
    assert Artifact.load(copy).signed_by is None


def test_links_are_refused(signed: Path, key: tuple[Path, Path], tmp_path: Path) -> None:
    for name in (SIGNATURE, "model.weights", "source/config.json"):
        (signed / name).rename(tmp_path / "elsewhere")
        (signed / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ArtifactError, match=f"{name} in the artifact copy is a symbolic link"):
            check(signed, key[1])
        (signed / name).unlink()
        (tmp_path / "elsewhere").rename(signed / name)


def test_artifact_with_a_changed_file_is_not_signed(copy: Path, key: tuple[Path, Path]) -> None:
    flip(copy / "model.weights")
    with pytest.raises(ArtifactError, match=r"model.weights in the artifact copy is not the exp"):
        sign_folder(copy, key[0])
    assert not (copy / SIGNATURE).exists()


def test_shards_are_refused_by_name(copy: Path, key: tuple[Path, Path]) -> None:
    sign_by_package(copy, key[0], method="shards")
    with pytest.raises(ArtifactError, match="copy has the method 'shards'; files is required"):
        check(copy, key[1])


def resign(folder: Path, private: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Sign a changed statement, as the owner of the key could."""
    from models import signing as own

    changed = statement(folder)
    change(changed)
    bundle = own._bundle(json.dumps(changed).encode(), read_private_key(private))
    (folder / SIGNATURE).write_bytes(bundle)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda own: own.update(_type="x"), "has the _type 'x'; https://in-toto.io/Statement/v1"),
        (lambda own: own.update(predicateType="x"), "has the predicateType 'x'; https://model_"),
        (
            lambda own: own["predicate"]["serialization"].update(hash_type="blake3"),
            "has the hash_type 'blake3'; sha256",
        ),
        (
            lambda own: own["predicate"]["resources"][0].update(algorithm="blake3"),
            "has the algorithm 'blake3'; sha256",
        ),
        (
            lambda own: own["subject"][0]["digest"].update(sha256="0" * 64),
            "has a digest that is not that of its files",
        ),
        (
            lambda own: (
                own["predicate"].update(resources=[own["predicate"]["resources"][0]] * 2),
                own["subject"][0]["digest"].update(
                    sha256=hashlib.sha256(
                        bytes.fromhex(own["predicate"]["resources"][0]["digest"]) * 2
                    ).hexdigest()
                ),
            ),
            "names a file twice",
        ),
        (lambda own: own.update(subject=[]), "is not a bundle of model-signing"),
        (lambda own: own.pop("predicate"), "is not a bundle of model-signing"),
        (lambda own: own["predicate"].update(resources=None), "is not a bundle of model-signing"),
    ],
)
def test_signed_statement_of_another_format_is_refused_by_name(
    signed: Path,
    key: tuple[Path, Path],
    change: Callable[[dict[str, Any]], object],
    problem: str,
) -> None:
    resign(signed, key[0], change)
    with pytest.raises(ArtifactError, match=f"signature model.sig of the artifact copy {problem}"):
        check(signed, key[1])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda own: own.update(mediaType="x"), "has the mediaType 'x'; application/vnd.dev"),
        (lambda own: own["dsseEnvelope"].update(payloadType="x"), "has the payloadType 'x'"),
        (
            lambda own: own.update(verificationMaterial={"certificate": {}}),
            "is of a mode other than key and certificate",
        ),
        (lambda own: own.pop("dsseEnvelope"), "is not a bundle of model-signing"),
        (lambda own: own["dsseEnvelope"].update(signatures=[]), "is not a bundle of model-signing"),
        (lambda own: own["dsseEnvelope"].update(payload="?"), "is not a bundle of model-signing"),
    ],
)
def test_bundle_of_another_format_is_refused_by_name(
    signed: Path,
    key: tuple[Path, Path],
    change: Callable[[dict[str, Any]], object],
    problem: str,
) -> None:
    edit_bundle(signed, change)
    with pytest.raises(ArtifactError, match=f"signature model.sig of the artifact copy {problem}"):
        check(signed, key[1])


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 200])
def test_what_is_no_bundle_is_refused(signed: Path, key: tuple[Path, Path], content: bytes) -> None:
    (signed / SIGNATURE).write_bytes(content)
    with pytest.raises(ArtifactError, match=r"model.sig of the artifact copy is not a bundle of"):
        check(signed, key[1])


def test_file_without_one_key_is_refused_by_name(
    key: tuple[Path, Path], certificate: Path, tmp_path: Path
) -> None:
    rsa, rsa_public, curve, encrypted, two, empty = (
        tmp_path / name for name in ("rsa", "rsa-public", "curve", "encrypted", "two", "empty")
    )
    openssl("genrsa", "-out", rsa, "2048")
    openssl("pkey", "-in", rsa, "-pubout", "-out", rsa_public)
    openssl("ecparam", "-name", "secp256k1", "-genkey", "-noout", "-out", curve)
    openssl("pkey", "-in", key[0], "-aes256", "-passout", "pass:x", "-out", encrypted)
    two.write_bytes(certificate.read_bytes() * 2)
    empty.touch()
    for file, problem in (
        (rsa, "rsa is not a key of an elliptic curve of secp256r1, secp384r1, secp521r1"),
        (curve, "curve is not a key of an elliptic curve"),
        (encrypted, "encrypted is encrypted: decrypt it with openssl pkey"),
        (key[1], "prime256v1.pub.pem is not a private key in PEM"),
        (empty, "empty is not a private key in PEM"),
    ):
        with pytest.raises(KeyFileError, match=problem):
            read_private_key(file)
    for file, problem in (
        (rsa_public, "rsa-public is not a key of an elliptic curve"),
        (key[0], "prime256v1.pem is not one public key or one certificate in PEM"),
        (two, "two is not one public key or one certificate in PEM"),
        (empty, "empty is not one public key or one certificate in PEM"),
    ):
        with pytest.raises(KeyFileError, match=problem):
            read_public_key(file)


def test_hint_is_that_of_the_package(signed: Path, key: tuple[Path, Path]) -> None:
    ours = json.loads((signed / SIGNATURE).read_text())["verificationMaterial"]
    sign_by_package(signed, key[0])
    assert json.loads((signed / SIGNATURE).read_text())["verificationMaterial"] == ours
    assert Artifact.load(signed, key[1]).signed_by == ours["publicKey"]["hint"]
