"""Exports of a model into a cache, each killed at another change of a file.

    python -m tests.service.killed_exports FOLDER CACHE [ARTIFACT]

With ARTIFACT, that of the model, an export copies it. Each is a fork of this process, so that none
imports PyTorch again. Changes are counted by Python's audit events.
"""

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from models.artifact import Artifact
from models.export.__main__ import main as export
from service import model_cache
from service.artifacts import with_artifacts
from service.settings import ModelSettings, ModelsSettings, Settings

_CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir"}
# Number of killed exports, if they do not copy an artifact; then it is that of all changes.
_KILLS = 20


def attempt(folder: Path, cache: Path, last: int | None, *, refresh: bool = False) -> int:
    """Export the model, and kill the process before its change number `last`.

    Returns:
        The number of changes.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        _, status = os.waitpid(child, 0)
        with open(reader) as pipe:
            count = pipe.read()
        if last is None:
            return int(count)
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return last
    changes = 0

    def kill_before_last(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal changes
        flags = arguments[2] if event == "open" else 0
        if event in _CHANGES or (isinstance(flags, int) and flags & os.O_CREAT):
            if changes == last:
                os.kill(os.getpid(), signal.SIGKILL)
            changes += 1

    settings = Settings(model=ModelSettings(path=folder), models=ModelsSettings(cache=cache))
    sys.addaudithook(kill_before_last)
    try:
        with_artifacts(settings, refresh=refresh)
        os.write(writer, str(changes).encode())
    finally:
        os._exit(0)


def check(entry: Path, *, is_complete: bool) -> None:
    """Check that all artifacts of the model are whole, and that little else is there."""
    paths = [path for path in entry.glob("[!.]*") if path.is_dir()]
    for path in paths:
        artifact = Artifact.load(path)
        for name in artifact.manifest.files:
            artifact.verify(name)
    names = {path.name for path in entry.iterdir()}
    if is_complete:
        assert names == {paths[0].name, "lock"}, names
    assert len(paths) <= 1, names
    assert len(names) <= 4, names  # the lock, an artifact, the replaced one, and temporary files


def main(folder: Path, cache: Path, artifact: Path | None = None) -> None:
    """Kill exports of the model, and exports that replace its artifact."""

    def run(arguments: Sequence[str], *_: object) -> None:
        if artifact:
            shutil.copytree(artifact, arguments[arguments.index("--out") + 1])
        else:
            assert export(arguments) == 0

    vars(model_cache)["_run"] = run  # not the child process, which would outlive this one
    for refresh in (False, True):
        _kill(folder, cache / f"refresh-{refresh}", refresh=refresh, is_copied=artifact is not None)


def _kill(folder: Path, cache: Path, *, refresh: bool, is_copied: bool) -> None:
    start = partial(attempt, folder, cache)
    start(None)
    [entry] = cache.iterdir()

    def start_anew(last: int | None) -> int:
        if not refresh:
            shutil.rmtree(entry)
        return start(last, refresh=refresh)

    changes = start_anew(None)
    for last in range(0, changes, 1 if is_copied else -(-changes // _KILLS)):
        start_anew(last)
        start(None)
        check(entry, is_complete=False)
    start(None, refresh=True)
    check(entry, is_complete=True)
    print(f"killed before each of {changes} changes")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
