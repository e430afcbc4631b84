"""The other tree of `make bench-against`."""

import subprocess
from pathlib import Path

import pytest

from tests.benchmarks import bench_against


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two commits, as the tree of the benchmark."""
    folder = tmp_path / "repository"
    folder.mkdir()
    name = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    for content in ("old", "new"):
        (folder / "file").write_text(content)
        subprocess.run(["git", "add", "file"], cwd=folder, check=True)
        subprocess.run(["git", *name, "commit", "-qm", content], cwd=folder, check=True)
    monkeypatch.setattr(bench_against, "_ROOT", folder)
    return folder


def test_commit_is_checked_out_beside_this_tree_for_the_time_of_the_block(
    repository: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    with bench_against._checkout("HEAD~1", other):
        assert (other / "file").read_text() == "old"
        assert (repository / "file").read_text() == "new"
    assert not other.exists()
    trees = ["git", "worktree", "list", "--porcelain"]
    listed = subprocess.run(trees, cwd=repository, check=True, capture_output=True, text=True)
    assert listed.stdout.count("worktree ") == 1


def test_unknown_commit_is_named(repository: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(SystemExit, match="git cannot check out 'no-such-commit'"),
        bench_against._checkout("no-such-commit", tmp_path / "other"),
    ):
        pass
    assert repository.exists()
