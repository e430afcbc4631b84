"""The packages of the images: pinned by hash, in the tested versions."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "deploy/requirements"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Extras that each image installs from the lock, in the order of the Dockerfile.
IMAGES = {
    "serve": ["cpu", "otel"],
    "debug": ["cpu", "otel", "torch"],
    "gpu": ["gpu", "otel"],
    "gpu-debug": ["gpu", "otel", "torch"],
}
PLATFORMS = [
    {"python_version": version, "python_full_version": f"{version}.9", "platform_machine": machine}
    for version in ("3.11", "3.12", "3.13")
    for machine in ("x86_64", "aarch64")
]


def pins(file: Path) -> list[tuple[Requirement, int]]:
    """Return each line of a lock and the number of its hashes."""
    lines = file.read_text().replace("\\\n", " ").splitlines()
    return [
        (
            Requirement(line.partition(" --hash")[0]),
            len(re.findall(r"--hash=sha256:\w{64}\b", line)),
        )
        for line in lines
        if not line.startswith("#")
    ]


def versions(file: Path, platform: dict[str, str]) -> dict[str, str]:
    """Return the version of each package on a platform with Linux.

    Raises:
        AssertionError: A package has two versions.
    """
    own: dict[str, str] = {}
    environment = {"sys_platform": "linux", "os_name": "posix", **platform}
    for requirement, _ in pins(file):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            assert name not in own
            own[name] = str(requirement.specifier)
    return own


@pytest.mark.parametrize("lock", ["lock", "build", "model"])
def test_locked_packages_have_hashes(lock: str) -> None:
    for requirement, hashes in pins(LOCKS / f"{lock}.txt"):
        assert hashes > 0, requirement
        assert re.fullmatch(r"==[\w.!+]+", str(requirement.specifier)), requirement


@pytest.mark.parametrize("lock", ["lock", "build", "model"])
@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: "-".join(platform.values()))
def test_locked_packages_have_the_tested_versions(lock: str, platform: dict[str, str]) -> None:
    tested = versions(ROOT / "constraints.txt", platform)
    locked = versions(LOCKS / f"{lock}.txt", platform)
    assert locked
    locked.pop("pip", None)  # installs the packages, and is not tested
    assert {name: tested[name] for name in locked} == locked


def test_images_install_their_extras() -> None:
    installed = re.findall(r"python extras\.py ([\w ]+) > requirements\.txt", DOCKERFILE)
    assert [extras.split() for extras in installed] == list(IMAGES.values())
    with_hashes = "--require-hashes \\\n    --constraint lock.txt --requirement requirements.txt"
    assert DOCKERFILE.count(with_hashes) == len(installed)


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: "-".join(platform.values()))
def test_lock_has_every_requirement_of_an_image(image: str, platform: dict[str, str]) -> None:
    printed = subprocess.run(
        [sys.executable, LOCKS / "extras.py", *IMAGES[image]],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    expected = [*PROJECT["dependencies"]]
    for extra in IMAGES[image]:
        expected += PROJECT["optional-dependencies"][extra]
    assert printed == expected
    locked = versions(LOCKS / "lock.txt", platform)
    for requirement in map(Requirement, printed):
        version = locked[canonicalize_name(requirement.name)].removeprefix("==")
        assert requirement.specifier.contains(version), requirement


def test_each_image_has_exactly_one_onnxruntime() -> None:
    for extras in IMAGES.values():
        assert len({"cpu", "gpu"}.intersection(extras)) == 1
    for extra, name in (("cpu", "onnxruntime"), ("gpu", "onnxruntime-gpu")):
        names = {Requirement(line).name for line in PROJECT["optional-dependencies"][extra]}
        assert {own for own in names if "onnxrun" in own} == {name}


def test_lock_names_no_index() -> None:
    for file in (ROOT / "constraints.txt", *LOCKS.glob("*.txt")):
        assert not re.search(r"://|--(extra-)?index|--find-links", file.read_text())


def test_images_have_the_tested_torch() -> None:
    tested = versions(ROOT / "constraints.txt", PLATFORMS[0])["torch"]
    assert [f"=={version}" for version in re.findall(r"ARG TORCH=(\S+)", DOCKERFILE)] == [tested]
