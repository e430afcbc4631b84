"""Fixtures of the tests of artifacts."""

import shutil
from pathlib import Path

import pytest

from models.artifact import Artifact


@pytest.fixture
def copy(small_artifact: Artifact, tmp_path: Path) -> Path:
    """A copy of the small artifact, whose files may be changed."""
    return shutil.copytree(small_artifact.path, tmp_path / "copy")
