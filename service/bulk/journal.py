"""The journal of an output folder: its settings, its finished parts, and its lock.

    _journal           a line with the settings, then one per finished part
    _journal-3-of-16   the same for a shard
    _lock              locked while a process writes to the folder

A line is written after the files of its part were synced and renamed. A kill can only lose the last
line, whose part is then encoded again.
"""

import errno
import fcntl
import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from models.artifact import sha256, sync
from models.json_reader import parse_json
from service.bulk.options import BulkError, OptionError

log = logging.getLogger("vitrine")

_LOCK = "_lock"
_JOURNAL = re.compile(r"_journal(-\d+-of-(?P<count>\d+))?")
# The files that a journal can name. Others are not this command's, which removes joined parts.
_FILE = r"(part-\d{5,}|embeddings)\.(parquet|jsonl|npy)"
_SHARE_WORK = "wait for it, or let several processes share the work with --shard 1/2, --shard 2/2"

_Count = Annotated[int, Field(strict=True, ge=0)]
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_FileName = Annotated[str, Field(pattern=f"^{_FILE}$")]
_Files = Annotated[dict[_FileName, _Sha256], Field(min_length=1)]


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
        records_sha256: SHA-256 of the records of standard input; None for files, each block of
            which was compared with the hash of the input when it was read.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    number: _Count
    rows: _Count
    tokens: _Count
    truncated: _Count
    errors: _Count
    files: _Files
    records_sha256: _Sha256 | None


# The value of a line, by the name of the line.
_LINES: Mapping[str, TypeAdapter[Any]] = {
    "settings": TypeAdapter(dict),
    "part": TypeAdapter(FinishedPart),
    "rows": TypeAdapter(_Count),
    "joined": TypeAdapter(_Files),
}


class Journal:
    """The finished parts of an output folder.

    Attributes:
        finished: The finished parts of all shards, by number.
        input_rows: Number of records of the input; None: no run without `--shard`, or of standard
            input, has been completed.
        joined: SHA-256 of the files that replace all parts, by name; None: there are none.
    """

    def __init__(self, folder: Path, file: BinaryIO) -> None:
        self.finished: dict[int, FinishedPart] = {}
        self.input_rows: int | None = None
        self.joined: Mapping[str, str] | None = None
        self._folder = folder
        self._file = file

    def add(self, part: FinishedPart) -> None:
        """Record a finished part."""
        self._append({"part": asdict(part)})
        self.finished[part.number] = part

    @property
    def rows(self) -> int | None:
        """Number of rows of the whole output; None: not all parts are finished."""
        finished = sum(part.rows for part in self.finished.values())
        return finished if finished == self.input_rows else None

    def complete(self, rows: int) -> None:
        """Record the number of records of the input, all of which were read."""
        self._append({"rows": rows})
        self.input_rows = rows

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
            if part := line.get("part"):
                self.finished[part.number] = part
            self.input_rows = line.get("rows", self.input_rows)
            self.joined = line.get("joined", self.joined)

    def drop_damaged(self) -> None:
        """Forget parts whose files are missing, or differ from those that were written.

        Raises:
            OptionError: In place of a file there is a link, or another thing than a file.
        """
        if self.joined is not None:
            if self.rows is not None and not self._problems(self.joined):
                return
            self.joined = None
        for part in list(self.finished.values()):
            if problems := self._problems(part.files):
                log.warning("%s; its rows are encoded again", problems[0])
                del self.finished[part.number]

    def check_files(self, parts: Iterable[FinishedPart]) -> None:
        """Check the files of parts at the end of a job, which another process may have changed.

        Raises:
            BulkError: A file is missing, or differs from the one that was written.
        """
        for part in parts:
            if problems := self._problems(part.files):
                raise BulkError(f"{problems[0]}; start again, and its rows are encoded again")

    def check_strangers(self) -> None:
        """Check that a complete output has no files that are named as parts, but are none.

        Raises:
            BulkError: There is such a file, which readers of the folder would read.
        """
        own = {name for part in self.finished.values() for name in part.files} | {
            *(self.joined or ())
        }
        for path in sorted(self._folder.iterdir()):
            if re.fullmatch(_FILE, path.name) and path.name not in own:
                raise BulkError(
                    f"{path} is no part of this job, but would be read as one; remove it"
                )

    def _problems(self, files: Mapping[str, str]) -> list[str]:
        problems = []
        for name, expected in files.items():
            path = self._folder / name
            if not _is_there(path):
                problems.append(f"{path} is missing")
            elif sha256(path) != expected:
                problems.append(f"{path} was changed")
        return problems


def _is_there(path: Path) -> bool:
    """Return whether there is a file.

    Raises:
        OptionError: There is a link, or another thing than a file.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        raise _irregular(path)
    return True


def _irregular(path: Path) -> OptionError:
    return OptionError(
        f"{path} is a link, or no regular file; remove it, or choose another output folder"
    )


def _open(path: Path, mode: str) -> BinaryIO:
    """Open a file of the output folder, as `open` does.

    Raises:
        OptionError: There is a link, which could be to any file, or another thing than a file.
    """

    def opener(name: str, flags: int) -> int:
        # Without waiting for the writer of a pipe.
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    try:
        file = cast(BinaryIO, open(path, mode, opener=opener))  # noqa: SIM115 - the caller closes it
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _irregular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _irregular(path)
    return file


def check_folder(folder: Path) -> None:
    """Check that a path can be that of a folder.

    Raises:
        OptionError: Something else is there.
    """
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"{folder} is not a folder")


def check_unlocked(folder: Path, shard: tuple[int, int]) -> None:
    """Check early that no other process writes to an output folder. This keeps no lock.

    Raises:
        OptionError: It is no folder. In place of a file there is a link, or another thing than a
            file.
        BulkError: Another process writes to the folder.
    """
    check_folder(folder)
    for name, is_shared in ((_LOCK, shard[1] > 1), (_name(shard), False)):
        if _is_there(folder / name):
            with _open(folder / name, "rb") as file:
                _lock(file, folder, is_shared=is_shared)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for this process.

    Raises:
        OptionError: In place of the lock there is a link, or another thing than a file.
        BulkError: Another process writes to the folder.
    """
    with _open(folder / _LOCK, "ab") as file:
        _lock(file, folder, is_shared=False, remedy="wait for it, or choose another folder")
        yield


@contextmanager
def open_journal(
    folder: Path, settings: Mapping[str, object], shard: tuple[int, int]
) -> Iterator[Journal]:
    """Lock an output folder, and yield its journal; the folder is created if it is missing.

    Raises:
        OptionError: The folder has other files and no journal, or was begun with other settings.
            In place of a file there is a link, or another thing than a file.
        BulkError: Another process writes to the folder, or its journal is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [path.name for path in folder.iterdir()]
    if not any(map(_JOURNAL.fullmatch, names)) and set(names) - {_LOCK}:
        raise OptionError(f"{folder} has files, but no job was begun there; choose an empty folder")
    shard_journal = folder / _name(shard)
    with ExitStack() as stack:
        lock = stack.enter_context(_open(folder / _LOCK, "ab"))
        _lock(lock, folder, is_shared=shard[1] > 1)
        journals = sorted(path for path in folder.iterdir() if _JOURNAL.fullmatch(path.name))
        for path in journals:
            _check_shards(folder, path, shard)
            if lines := _lines(path):
                check_settings(str(folder), lines[0]["settings"], settings)
        file = stack.enter_context(_open(shard_journal, "ab+"))
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


def _lock(file: BinaryIO, folder: Path, *, is_shared: bool, remedy: str = _SHARE_WORK) -> None:
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BulkError(f"another process writes to {folder}; {remedy}") from None


def _drop_torn_line(file: BinaryIO) -> None:
    """Drop a last line without an end: its writing was interrupted."""
    file.seek(0)
    content = file.read()
    file.truncate(content.rfind(b"\n") + 1)


def _lines(path: Path) -> list[dict[str, Any]]:
    with _open(path, "rb") as file:
        lines = file.read().split(b"\n")[:-1]
    checked = []
    for number, line in enumerate(lines, 1):
        try:
            checked.append(_check_line(parse_json(line), is_first=number == 1))
        except ValueError as error:
            raise BulkError(
                f"{path} is damaged in line {number}: {error}; remove the folder and start again"
            ) from None
    return checked


def _check_line(line: object, *, is_first: bool) -> dict[str, Any]:
    """Return a line of a journal.

    Raises:
        ValueError: It is no line of a journal.
    """
    if isinstance(line, dict) and len(line) == 1:
        ((name, value),) = line.items()
        if (name == "settings") is is_first and name in _LINES:
            with suppress(ValidationError):
                return {name: _LINES[name].validate_python(value)}
    raise ValueError("it is no line of a journal")


def _check_shards(folder: Path, path: Path, shard: tuple[int, int]) -> None:
    match = _JOURNAL.fullmatch(path.name)
    count = match and match["count"]
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
