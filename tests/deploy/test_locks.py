"""The images' packages: each pinned by hash, in the version that is tested."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What a lock leaves out, as the Makefile says.
LEFT_OUT = {"torch", "openvino-telemetry"}
LOCKS = {
    "serve": ["cpu"],
    "debug": ["cpu", "torch"],
    "gpu": ["gpu"],
    "gpu-debug": ["gpu", "torch"],
}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: Path) -> dict[str, tuple[str, int]]:
    """Return version and number of hashes of each package."""
    entries = re.findall(
        r"^([\w.-]+)==(\S+).*?((?:\\\n +--hash=sha256:[0-9a-f]{64} ?)*)$",
        file.read_text(),
        re.MULTILINE,
    )
    return {plain(name): (version, hashes.count("--hash")) for name, version, hashes in entries}


@pytest.mark.parametrize("lock", [*LOCKS, "build", "model"])
def test_every_package_has_a_hash_and_the_version_that_is_tested(lock: str) -> None:
    tested = pins(ROOT / "constraints.txt")
    locked = pins(ROOT / f"deploy/requirements/{lock}.txt")
    assert locked
    for name, (version, hashes) in locked.items():
        assert hashes > 0, name
        assert version == tested.get(name, (version,))[0], name


@pytest.mark.parametrize(("lock", "extras"), LOCKS.items())
def test_a_lock_has_all_that_the_project_asks_for(lock: str, extras: list[str]) -> None:
    wanted = [*PROJECT["dependencies"]]
    for extra in extras:
        wanted += PROJECT["optional-dependencies"][extra]
    names = {plain(re.match(r"[\w.-]+", requirement)[0]) for requirement in wanted}  # type: ignore[index]
    assert names - LEFT_OUT <= pins(ROOT / f"deploy/requirements/{lock}.txt").keys()


def test_an_image_has_one_onnxruntime() -> None:
    found = {
        lock: [name for name in pins(ROOT / f"deploy/requirements/{lock}.txt") if "onnxrun" in name]
        for lock in LOCKS
    }
    cpu, gpu = ["onnxruntime"], ["onnxruntime-gpu"]
    assert found == {"serve": cpu, "debug": cpu, "gpu": gpu, "gpu-debug": gpu}


def test_the_images_have_the_torch_that_is_tested() -> None:
    tested, _ = pins(ROOT / "constraints.txt")["torch"]
    assert set(re.findall(r"ARG TORCH=(\S+)", (ROOT / "Dockerfile").read_text())) == {tested}
