"""The journal of an output folder: its settings, its finished parts, and its lock.

    _journal           a line with the settings, then one per finished part
    _journal-3-of-16   the same for a shard
    _lock              locked while a process writes to the folder

A line is written after the files of its part were synced and renamed. A kill can only lose the last
line, whose part is then encoded again.
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from models.artifact import sha256
from service.bulk.options import BulkError, OptionError
from service.bulk.parts import sync

log = logging.getLogger("vitrine")

_LOCK = "_lock"
_PATTERN = "_journal*"


@dataclass(frozen=True)
class FinishedPart:
    """A part whose files are complete.

    Attributes:
        number: Number of the part, from 0.
        rows: Number of rows.
        tokens: Number of tokens.
        truncated: Number of truncated texts.
        errors: Number of rows with an error.
        files: SHA-256 of each file, by name.
        records_sha256: SHA-256 of the records of standard input; None for files.
    """

    number: int
    rows: int
    tokens: int
    truncated: int
    errors: int
    files: Mapping[str, str]
    records_sha256: str | None = None


class Journal:
    """The finished parts of an output folder.

    Attributes:
        finished: The finished parts of all shards, by number.
        rows: Number of rows of the whole output; None: not all parts are finished.
        joined: SHA-256 of the files that replace all parts, by name; None: there are none.
    """

    def __init__(self, folder: Path, file: BinaryIO) -> None:
        self.finished: dict[int, FinishedPart] = {}
        self.rows: int | None = None
        self.joined: Mapping[str, str] | None = None
        self._folder = folder
        self._file = file

    def add(self, part: FinishedPart) -> None:
        """Record a finished part."""
        self._append({"part": asdict(part)})
        self.finished[part.number] = part

    def complete(self, rows: int) -> None:
        """Record that all parts are finished."""
        self._append({"rows": rows})
        self.rows = rows

    def join(self, files: Mapping[str, str]) -> None:
        """Record the files that replace all parts."""
        self._append({"joined": files})
        self.joined = files

    def begin(self, settings: Mapping[str, object]) -> None:
        """Record the settings of the job."""
        self._append({"settings": settings})

    def _append(self, line: Mapping[str, object]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def read(self, lines: list[dict[str, Any]]) -> None:
        """Add the parts of a journal."""
        for line in lines:
            if "part" in line:
                part = FinishedPart(**line["part"])
                self.finished[part.number] = part
            self.rows = line.get("rows", self.rows)
            self.joined = line.get("joined", self.joined)

    def drop_damaged(self) -> None:
        """Forget parts whose files are missing, or differ from those that were written."""
        if self.joined is not None:
            if all(self._is_intact(*file) for file in self.joined.items()):
                return
            self.joined = None
        for part in list(self.finished.values()):
            if not all(self._is_intact(*file) for file in part.files.items()):
                del self.finished[part.number]
                self.rows = None

    def _is_intact(self, name: str, expected: str) -> bool:
        path = self._folder / name
        is_there = path.is_file()
        if is_there and sha256(path) == expected:
            return True
        problem = "was changed" if is_there else "is missing"
        log.warning("%s %s; its rows are encoded again", path, problem)
        return False


def check_unlocked(folder: Path, shard: tuple[int, int]) -> None:
    """Check early that no other process writes to an output folder. This keeps no lock.

    Raises:
        BulkError: Another process writes to the folder.
    """
    for name, is_shared in ((_LOCK, shard[1] > 1), (_name(shard), False)):
        if (folder / name).exists():
            with (folder / name).open("rb") as file:
                _lock(file, folder, is_shared=is_shared)


@contextmanager
def open_journal(
    folder: Path, settings: Mapping[str, object], shard: tuple[int, int]
) -> Iterator[Journal]:
    """Lock an output folder, and yield its journal; the folder is created if it is missing.

    Raises:
        OptionError: The folder has other files and no journal, or was begun with other settings.
        BulkError: Another process writes to the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise OptionError(f"{folder} is not a folder") from None
    names = [path.name for path in folder.iterdir()]
    if not any(name.startswith("_journal") for name in names) and set(names) - {_LOCK}:
        raise OptionError(f"{folder} has files, but no job was begun there; choose an empty folder")
    shard_journal = folder / _name(shard)
    with ExitStack() as stack:
        lock = stack.enter_context((folder / _LOCK).open("ab"))
        _lock(lock, folder, is_shared=shard[1] > 1)
        journals = sorted(folder.glob(_PATTERN))
        for path in journals:
            _check_shards(folder, path, shard)
            if lines := _lines(path):
                check_settings(str(folder), lines[0]["settings"], settings)
        file = stack.enter_context(shard_journal.open("ab+"))
        _lock(file, folder, is_shared=False)
        _drop_torn_line(file)
        journal = Journal(folder, file)
        # This shard's is the last, because it has the newest hashes of parts encoded again.
        for path in [*(path for path in journals if path != shard_journal), shard_journal]:
            journal.read(_lines(path))
        if not _lines(shard_journal):
            journal.begin(settings)
            sync(folder)
        journal.drop_damaged()
        yield journal


def _name(shard: tuple[int, int]) -> str:
    index, count = shard
    return "_journal" if count == 1 else f"_journal-{index}-of-{count}"


def _lock(file: BinaryIO, folder: Path, *, is_shared: bool) -> None:
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BulkError(
            f"another process writes to {folder}; wait for it, or let several processes share the "
            "work with --shard 1/2, --shard 2/2"
        ) from None


def _drop_torn_line(file: BinaryIO) -> None:
    """Drop a last line without an end: its writing was interrupted."""
    file.seek(0)
    content = file.read()
    file.truncate(content.rfind(b"\n") + 1)


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise BulkError(f"{path} is damaged: {error}; remove the folder and start again") from None


def _check_shards(folder: Path, path: Path, shard: tuple[int, int]) -> None:
    _, _, count = path.name.partition("-of-")
    if count and shard[1] > 1 and int(count) != shard[1]:
        raise OptionError(
            f"{folder} was begun with {count} shards, not {shard[1]}; without --shard one process "
            "encodes all that is left"
        )


def check_settings(
    folder: str, begun: Mapping[str, object], settings: Mapping[str, object]
) -> None:
    """Compare the settings of a job with those that its output folder was begun with.

    Raises:
        OptionError: A setting differs; the message has its name. Or another version of Vitrine
            began the job, and recorded other settings.
    """
    for name in settings.keys() - begun.keys():
        if not name.startswith("input file"):  # their number may differ
            raise OptionError(
                f"{folder} was begun with another version of Vitrine, which recorded no {name}; "
                "choose another output folder"
            )
    for name in dict.fromkeys((*settings, *begun)):
        before, now = begun.get(name), settings.get(name)
        if before != now:
            raise OptionError(
                f"{folder} was begun with another {name}: {before}, not {now}; use the same, or "
                "another output folder"
            )
