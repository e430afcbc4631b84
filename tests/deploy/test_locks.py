"""The packages of the images: pinned by hash, in the tested versions."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Packages excluded from the locks; see `make lock`.
EXCLUDED = {"torch", "openvino-telemetry"}
LOCKS = {
    "serve": ["cpu", "otel"],
    "debug": ["cpu", "otel", "torch"],
    "gpu": ["gpu", "otel"],
    "gpu-debug": ["gpu", "otel", "torch"],
}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: Path) -> dict[str, tuple[str, int]]:
    """Return version and number of hashes of each package."""
    entries = re.findall(
        r"^([\w.-]+)==(\S+).*?((?:\\\n +--hash=sha256:[0-9a-f]{64} ?)*)$",
        file.read_text(),
        re.MULTILINE,
    )
    return {
        normalized(name): (version, hashes.count("--hash")) for name, version, hashes in entries
    }


@pytest.mark.parametrize("lock", [*LOCKS, "build", "model"])
def test_locked_packages_have_hashes_and_the_tested_versions(lock: str) -> None:
    tested = pins(ROOT / "constraints.txt")
    locked = pins(ROOT / f"deploy/requirements/{lock}.txt")
    assert locked
    for name, (version, hashes) in locked.items():
        assert hashes > 0, name
        assert version == tested.get(name, (version,))[0], name


@pytest.mark.parametrize(("lock", "extras"), LOCKS.items())
def test_lock_has_every_requirement_of_its_extras(lock: str, extras: list[str]) -> None:
    requirements = [*PROJECT["dependencies"]]
    for extra in extras:
        requirements += PROJECT["optional-dependencies"][extra]
    names = {normalized(re.match(r"[\w.-]+", requirement)[0]) for requirement in requirements}  # type: ignore[index]
    assert names - EXCLUDED <= pins(ROOT / f"deploy/requirements/{lock}.txt").keys()


def test_each_image_has_exactly_one_onnxruntime() -> None:
    packages = {
        lock: [name for name in pins(ROOT / f"deploy/requirements/{lock}.txt") if "onnxrun" in name]
        for lock in LOCKS
    }
    cpu, gpu = ["onnxruntime"], ["onnxruntime-gpu"]
    assert packages == {"serve": cpu, "debug": cpu, "gpu": gpu, "gpu-debug": gpu}


def test_images_have_the_tested_torch() -> None:
    tested, _ = pins(ROOT / "constraints.txt")["torch"]
    assert set(re.findall(r"ARG TORCH=(\S+)", (ROOT / "Dockerfile").read_text())) == {tested}
