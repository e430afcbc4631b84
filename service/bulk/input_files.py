"""Input files: hashed before a job, and compared with these hashes wherever the job reads them.

Times of modification prove nothing: any program can set them. So the hash of each block of a file
is kept, and the job reads the file through `with_verification`, which gives no byte of a block
before its hash was compared. Every finished part is then of the content whose hash is in the
journal.
"""

import hashlib
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, cast

from service.bulk.options import BulkError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Size of a block in bytes. Reading two columns of a wide Parquet file reads whole blocks.
BLOCK_BYTES = 2**18
_HASH_BYTES = 32


@dataclass(frozen=True)
class InputFile:
    """The content of an input file.

    Attributes:
        path: Path of the file in its file system.
        size: Size in bytes.
        blocks: SHA-256 of each block of `BLOCK_BYTES`, the last of which may be shorter.
    """

    path: str
    size: int
    blocks: bytes = field(repr=False)

    @property
    def sha256(self) -> str:
        """SHA-256 of the hashes of the blocks, in hexadecimal."""
        return hashlib.sha256(self.blocks).hexdigest()

    def check_unchanged(self, now: "InputFile") -> None:
        """Compare the content with that of a later time.

        Raises:
            BulkError: It differs.
        """
        if now.blocks != self.blocks:
            raise self.change_error()

    def change_error(self) -> BulkError:
        """Return the error that the content has changed since the job began."""
        return BulkError(
            f"the input {self.path} was changed during the job; the output is of its earlier "
            "content: restore it and start again, or choose another output folder"
        )


def hash_file(path: str, file: BinaryIO) -> InputFile:
    """Read an opened file to its end, and return the hashes of its content."""
    size, blocks = 0, bytearray()
    while block := file.read(BLOCK_BYTES):
        size += len(block)
        blocks += hashlib.sha256(block).digest()
    return InputFile(path, size, bytes(blocks))


def with_verification(file: BinaryIO, expected: InputFile) -> BinaryIO:
    """Return an opened file that raises a `BulkError` where its content is not the expected one."""
    return cast(BinaryIO, io.BufferedReader(_VerifiedFile(file, expected), BLOCK_BYTES))


class _VerifiedFile(io.RawIOBase):
    """A file, each block of which is compared with its hash before it is used.

    Args:
        file: The opened file, which can seek.
        expected: Its content.
    """

    def __init__(self, file: BinaryIO, expected: InputFile) -> None:
        self._file = file
        self._expected = expected
        self._position = 0
        # The last block that was read, and its index: reads need not begin where blocks begin.
        self._last = b""
        self._last_index = -1

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position, and return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._expected.size}
        self._position = max(0, start[whence] + offset)
        return self._position

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Read as many bytes as the buffer holds and the file has, and return their number.

        Raises:
            BulkError: The content differs from the expected one.
        """
        target = memoryview(buffer).cast("B")
        start = min(self._position, self._expected.size)
        count = min(len(target), self._expected.size - start)
        if not count:
            return 0
        first = start // BLOCK_BYTES
        blocks = memoryview(self._blocks(first, -(-(start + count) // BLOCK_BYTES)))
        offset = start - first * BLOCK_BYTES
        target[:count] = blocks[offset : offset + count]
        self._position = start + count
        return count

    def _blocks(self, first: int, end: int) -> bytes:
        """Return the blocks from `first` to `end`."""
        kept = self._last if first == self._last_index < end else b""
        first += bool(kept)
        if first >= end:
            return kept
        self._file.seek(first * BLOCK_BYTES)
        content = self._file.read((end - first) * BLOCK_BYTES)
        for index in range(first, end):
            start = (index - first) * BLOCK_BYTES
            block = content[start : start + BLOCK_BYTES]
            digest = self._expected.blocks[index * _HASH_BYTES :][:_HASH_BYTES]
            if hashlib.sha256(block).digest() != digest:
                raise self._expected.change_error()
        self._last, self._last_index = block, end - 1
        return kept + content
