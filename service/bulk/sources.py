"""The input of a job: its files, which are found, hashed and read."""

import csv
import glob
import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

import pyarrow as pa

from service.bulk.columns import (
    SAMPLE_BYTES,
    columns_in,
    copied_columns,
    json_columns,
    read_columns,
    read_start,
)
from service.bulk.input_files import InputFile, hash_file, with_verification
from service.bulk.options import BulkError, BulkOptions, InputFormat, Kind, OptionError
from service.bulk.readers import READERS, Block, ReadPlan

STDIN = "-"
_STDIN_NAME = "standard input"

_SUFFIXES: Mapping[str, InputFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
}
_COMPRESSIONS = (".gz", ".zst")
_KNOWN_SUFFIXES = (
    f"known suffixes are {', '.join(_SUFFIXES)}, also with {' or '.join(_COMPRESSIONS)}; "
    "set --input-format"
)


@dataclass(frozen=True)
class Source:
    """The input of a job.

    Attributes:
        format: Format of all files.
        files: The files in their order; empty for standard input.
        text_columns: Columns from which texts are made.
        copied: Names and types of the columns that are copied to the output.
        stream: Standard input, if it is the input.
    """

    format: InputFormat
    files: tuple[InputFile, ...]
    text_columns: tuple[str, ...]
    copied: pa.Schema
    stream: BinaryIO | None = None

    @property
    def columns(self) -> Sequence[str]:
        """Columns that are read."""
        return tuple(dict.fromkeys((*self.text_columns, *self.copied.names)))

    def read(self, plan: ReadPlan) -> Iterator[Block]:
        """Yield blocks of records; `Block.share` is the share of the whole input.

        Raises:
            BulkError: A file cannot be read, or was changed.
        """
        read = READERS[self.format]
        if self.stream is not None:
            with reading_errors(_STDIN_NAME):
                yield from read(self.stream, self.columns, 0, plan)
            return
        first, done, total = 0, 0, max(1, sum(file.size for file in self.files))
        for file in self.files:
            with _open_verified(file) as raw:
                for block in read(_decompress(raw, file.path), self.columns, first, plan):
                    first = block.first + block.rows
                    share = block.share or min(1.0, raw.tell() / max(1, file.size))
                    yield replace(block, share=(done + share * file.size) / total)
            done += file.size

    def check_unchanged(self) -> None:
        """Compare the input files with their content when the job began.

        Raises:
            BulkError: A file has other content, or cannot be read.
        """
        for file in self.files:
            file.check_unchanged(_hash(Path(file.path)))


def open_source(options: BulkOptions, kind: Kind) -> Source:
    """Find and hash the input files, and check their columns.

    Raises:
        OptionError: There is no such file or column, or its format is unknown. Or a file is
            compressed that cannot be.
        BulkError: A file cannot be read.
    """
    texts = tuple(options.text_columns(kind))
    if STDIN in options.inputs:
        return _open_stdin(options, texts)
    paths = _find(options)
    format_ = _format_of(paths, options.input_format)
    if format_ == "parquet":
        for path in paths:
            check_not_compressed(path)

    def columns(opened: Iterable[AbstractContextManager[BinaryIO]]) -> pa.Schema:
        schemas = {}
        for path, opening in zip(paths, opened, strict=True):
            with opening as raw:
                file = _decompress(raw, path.name)
                own = read_columns(file, format_, copied, str(path))
                if own is not None:
                    schemas[str(path)] = own
        if not schemas:
            raise no_records(options)
        if format_ == "jsonl":
            schemas = json_columns(schemas)
        return copied_columns(schemas, texts, copied)

    copied = options.copied_columns
    # Before the files are hashed, which takes long, so that a missing column is reported at once.
    columns(map(_open, paths))
    files = tuple(map(_hash, paths))
    return Source(format_, files, texts, columns(map(_open_verified, files)))


def no_records(options: BulkOptions) -> BulkError:
    """Return the error that the input has no records."""
    return BulkError(f"the input has no records: {' '.join(options.inputs)}")


def _open_stdin(options: BulkOptions, texts: tuple[str, ...]) -> Source:
    if options.inputs != (STDIN,):
        raise OptionError("- (standard input) must be the only input")
    if sys.stdin is None:
        raise OptionError("standard input is closed")
    format_ = options.input_format or "text"
    if format_ == "parquet":
        raise OptionError("Parquet cannot be read from standard input; write it to a file")
    # Not `sys.stdin`, with which Python aborts if a thread still waits for it at the end.
    stdin = open(sys.stdin.fileno(), "rb", closefd=False)  # noqa: SIM115 - open until the end
    with reading_errors(_STDIN_NAME):
        start = read_start(stdin, format_)
        if not start:
            raise no_records(options)
        copied = options.copied_columns
        schemas = {_STDIN_NAME: columns_in(start, format_, copied, _STDIN_NAME)}
    if format_ == "jsonl":
        schemas = json_columns(schemas)
    stream = io.BufferedReader(_Replayed(start, stdin), SAMPLE_BYTES)
    return Source(
        format_, (), texts, copied_columns(schemas, texts, copied), cast(BinaryIO, stream)
    )


class _Replayed(io.RawIOBase):
    """The start of a stream, which was read before, and then the rest of the stream."""

    def __init__(self, start: bytes, rest: io.BufferedIOBase) -> None:
        self._start = io.BytesIO(start)
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return self._start.readinto(buffer) or self._rest.readinto1(buffer)


def _find(options: BulkOptions) -> list[Path]:
    paths: list[Path] = []
    for name in options.inputs:
        with reading_errors(name):
            matches = _matches(name, options)
        if not matches and Path(name).is_dir() and options.input_format is None:
            raise OptionError(f"there is no file with a known suffix in {name}; {_KNOWN_SUFFIXES}")
        if not matches:
            raise OptionError(f"there is no input file at {name}")
        paths += matches
    for path in paths:
        if not path.is_file():
            raise OptionError(f"{path} is not a regular file; pipe it to standard input, as -")
    return paths


def _matches(name: str, options: BulkOptions) -> list[Path]:
    """Return the file of a name, or those in a folder, or of a pattern, sorted."""
    path = Path(name)
    if path.is_dir():
        return [file for file in _files_in(path) if _is_input(file, path, options)]
    if path.exists():
        return [path]
    matches = [Path(match) for match in sorted({*_expand(name)})]
    return [match for match in matches if not (match.is_dir() or _is_output(match, options))]


def _expand(pattern: str, root: Path | None = None) -> Iterator[str]:
    """Yield the paths that a pattern matches; with several `**`, some of them repeatedly.

    Args:
        pattern: The pattern.
        root: Folder of the first `**`; None: that of this pattern.
    """
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    index = parts.index("**")
    rest = parts[index + 1 :] or ("*",)
    for start in filter(os.path.isdir, glob.glob(str(Path(*parts[:index])))):
        own = root or Path(start)
        for folder, _ in _walk(Path(start), own):
            yield from _expand(str(Path(glob.escape(str(folder)), *rest)), own)


def _files_in(folder: Path) -> list[Path]:
    """Return the files in a folder and its subfolders, sorted; see `_walk`."""
    return sorted(path / name for path, names in _walk(folder, folder) for name in names)


def _walk(folder: Path, root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder and its subfolders that are not hidden, also linked ones, and their files.

    Args:
        folder: The folder.
        root: Folder in which the search began.

    Raises:
        BulkError: A subfolder cannot be read.
    """

    def fail(error: OSError) -> NoReturn:
        raise BulkError(f"{error.filename} cannot be read: {error.strerror}") from error

    for name, subfolders, names in os.walk(folder, onerror=fail, followlinks=True):
        path = Path(name)
        subfolders[:] = [
            each for each in subfolders if not (each.startswith(".") or _is_loop(path / each, root))
        ]
        yield path, names


def _is_loop(path: Path, root: Path) -> bool:
    """Return whether a path is a link that would be followed for ever.

    It is one to a folder above, or to one that was passed on the way from the root.
    """
    if not path.is_symlink():
        return False
    passed = (root / each for each in path.relative_to(root).parents)
    return any(each.resolve().is_relative_to(path.resolve()) for each in passed)


def _is_input(file: Path, folder: Path, options: BulkOptions) -> bool:
    hidden = any(part[0] in "._" for part in file.relative_to(folder).parts)
    is_known = options.input_format is not None or suffix_format(file) is not None
    return file.is_file() and is_known and not hidden and not _is_output(file, options)


def _is_output(file: Path, options: BulkOptions) -> bool:
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(options.output))


def check_not_compressed(path: Path) -> None:
    """Check the name of a file that is read as it is.

    Raises:
        OptionError: It is that of a compressed file.
    """
    if path.suffix.lower() in _COMPRESSIONS:
        raise OptionError(f"{path} must not be compressed; decompress it")


def suffix_format(path: Path) -> InputFormat | None:
    """Return the format that the name of a file says; None: it says none."""
    name = Path(path.name.lower())
    while name.suffix in _COMPRESSIONS:
        name = name.with_suffix("")
    return _SUFFIXES.get(name.suffix)


def _format_of(paths: Sequence[Path], format_: InputFormat | None) -> InputFormat:
    for path in paths:
        if {path.suffix.lower(), Path(path.stem).suffix.lower()}.issubset(_COMPRESSIONS):
            raise OptionError(f"{path} is compressed twice; decompress it once")
    formats = {format_ or suffix_format(path): path for path in paths}
    if None in formats:
        raise OptionError(f"the format of {formats[None]} is unknown; {_KNOWN_SUFFIXES}")
    if len(formats) > 1:
        raise OptionError(f"the input files have several formats: {', '.join(map(str, formats))}")
    return cast(InputFormat, next(iter(formats)))


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    with reading_errors(str(path)), path.open("rb") as file:
        yield file


@contextmanager
def _open_verified(file: InputFile) -> Iterator[BinaryIO]:
    """Open a file, whose content is compared with its hash before it is used."""
    with _open(Path(file.path)) as raw:
        yield with_verification(raw, file)


def _hash(path: Path) -> InputFile:
    with _open(path) as file:
        return hash_file(str(path), file)


def _decompress(raw: BinaryIO, name: str) -> BinaryIO:
    name = name.lower()
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if name.endswith(".zst"):
        stream = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
        return io.BufferedReader(cast(io.RawIOBase, stream))
    return raw


@contextmanager
def reading_errors(name: str) -> Iterator[None]:
    """Turn the errors of reading a file into a `BulkError`."""
    try:
        yield
    except (OSError, EOFError, UnicodeError, zlib.error, csv.Error, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BulkError(f"{name} cannot be read: {reason}") from error
