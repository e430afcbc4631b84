"""Blocks of records in, encoded blocks out, in the same order.

Several blocks are in flight at a time, so that the next ones are read and tokenised while the
engine runs, and batches are formed from thousands of records. Equal items are computed once, if
they are in the same block or in one of the recent blocks.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa

from service.bulk.encoder import RecordEncoder, item_chars
from service.bulk.options import ROW, BulkOptions, Kind
from service.bulk.readers import Block
from service.bulk.texts import Item, records_of
from service.inference.results.chunked_texts import PASSES

# Maximum number of records in flight. With more, batches have hardly less padding.
_MAX_ROWS = 4096
# Maximum number of characters in flight, unless one block has more: `open_model` refuses more than
# 16 Mi characters that are tokenised at the same time.
_MAX_CHARS = 8 * 2**20
# Number of characters of a text and of its variants for highlights, per character of the text.
_HIGHLIGHT_PASSES = 9
# Approximate size of a Python text and of its tokens, in bytes per character.
_CHAR_BYTES = 8
# Share of the memory for results of recent blocks.
_RECENT = 0.1


@dataclass(frozen=True)
class EncodedBlock:
    """The rows of a block.

    Attributes:
        first: Index of the first record in the input.
        count: Number of records.
        rows: Rows of the output; None if the part is not wanted.
        share: See `Block.share`.
    """

    first: int
    count: int
    rows: pa.RecordBatch | None
    share: float


@dataclass(eq=False)
class _Pending:
    """A block in flight.

    Attributes:
        block: The block; without columns, it is skipped.
        origins: Block and index there of the result of each record; None: the record has an error.
        errors: Errors of records, by index in the block.
        copied: Columns that are copied to the output.
        items: Items of the block that occur in no recent block; each occurs once.
        results: Results of these items.
        chars: Number of characters of these items.
        size: Approximate size of the records and results, in bytes.
    """

    block: Block
    origins: list["tuple[_Pending, int] | None"] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    copied: list[pa.Array] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    results: "asyncio.Task[pa.RecordBatch] | None" = None
    chars: int = 0
    size: int = 0

    @property
    def is_done(self) -> bool:
        """Whether its items are encoded."""
        return self.results is None or self.results.done()

    @property
    def rows_in_flight(self) -> int:
        """Number of records that it counts as: 1 for a skipped block, which has no values."""
        return self.block.rows if self.block.columns else 1

    def release(self) -> None:
        """Drop everything but the results, so that recent blocks keep no older ones in memory."""
        self.origins, self.errors, self.copied = [], {}, []
        self.block = Block(self.block.first, self.block.rows)


def _next_of(blocks: Iterator[Block]) -> "asyncio.Future[Block | None]":
    """Return a future of the next block, None at the end, from a thread.

    The thread may wait for standard input for ever, and does not keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Block | None] = loop.create_future()

    def finish(block: Block | None, error: Exception | None) -> None:
        if future.done():  # cancelled
            return
        if error is None:
            future.set_result(block)
        else:
            future.set_exception(error)

    def read() -> None:
        block, error = None, None
        try:
            block = next(blocks, None)
        except Exception as raised:  # noqa: BLE001 - raised where the future is awaited
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, block, error)

    threading.Thread(target=read, name="reader", daemon=True).start()
    return future


class Pipeline:
    """Encodes blocks of records.

    Args:
        encoder: Computes the results of items.
        options: Settings of the job.
        kind: Kind of the results.
        copied: Columns that are copied to the output.

    Attributes:
        schema: Columns of the output.
    """

    def __init__(
        self, encoder: RecordEncoder, options: BulkOptions, kind: Kind, copied: pa.Schema
    ) -> None:
        self._encoder = encoder
        self._options = options
        self._kind = kind
        self._copied = copied
        has_chunks = kind == "chunks" or options.chunking is not None
        self._passes = _HIGHLIGHT_PASSES if options.highlight is not None else 1
        self._max_chars = _MAX_CHARS // (PASSES if has_chunks else self._passes)
        self.schema = pa.schema([pa.field(ROW, pa.int64()), *copied, *encoder.schema])
        self._in_flight: deque[_Pending] = deque()
        self._rows_in_flight = self._chars_in_flight = self._bytes_in_flight = 0
        # Blocks whose results are kept for equal items, the oldest first.
        self._recent: deque[_Pending] = deque()
        self._recent_bytes = 0
        self._origins: dict[Item, tuple[_Pending, int]] = {}

    async def run(self, blocks: Iterator[Block]) -> AsyncGenerator[EncodedBlock, None]:
        """Yield the encoded blocks.

        Raises:
            VitrineError: The engine has stopped.
            BulkError: The input cannot be read.
        """
        try:
            while True:
                read = _next_of(blocks)
                while self._in_flight and await self._is_finished_before(read):
                    yield await self._finish()
                block = await read
                if block is None:
                    break
                pending = self._prepare(block) if block.columns else _Pending(block)
                while self._in_flight and (self._in_flight[0].is_done or self._is_full(pending)):
                    yield await self._finish()
                self._start(pending)
            while self._in_flight:
                yield await self._finish()
        finally:
            read.cancel()
            for pending in self._in_flight:
                if pending.results is not None:
                    pending.results.cancel()

    async def _is_finished_before(self, read: "asyncio.Future[Block | None]") -> bool:
        """Wait for the oldest block in flight or the reader; return whether it is the block.

        A reader that is done has precedence, so that the engine gets its next items first.
        """
        results = self._in_flight[0].results
        if results is None:
            return True
        await asyncio.wait({read, results}, return_when=asyncio.FIRST_COMPLETED)
        return not read.done()

    def _prepare(self, block: Block) -> _Pending:
        """Return a block with its items: those that occur in no recent block."""
        items, copied, errors = records_of(block, self._options, self._kind, self._copied)
        pending = _Pending(block, errors=errors, copied=copied)
        for index, item in enumerate(items):
            if item is None or index in errors:
                pending.origins.append(None)
                continue
            origin = self._origins.get(item)
            if origin is None:
                origin = self._origins[item] = pending, len(pending.items)
                pending.items.append(item)
            pending.origins.append(origin)
        pending.chars = sum(map(item_chars, pending.items))
        results = self._encoder.result_bytes(pending.items)
        chars = self._passes * pending.chars
        pending.size = _CHAR_BYTES * chars + results + sum(a.nbytes for a in copied)
        return pending

    def _start(self, pending: _Pending) -> None:
        if pending.items:
            pending.results = asyncio.create_task(self._encoder.encode(pending.items))
            self._recent.append(pending)
            self._recent_bytes += pending.size
        self._in_flight.append(pending)
        self._rows_in_flight += pending.rows_in_flight
        self._chars_in_flight += pending.chars
        self._bytes_in_flight += pending.size

    def _is_full(self, pending: _Pending) -> bool:
        """Return whether one more block exceeds a limit."""
        memory = self._options.max_memory * (1 - _RECENT)
        return (
            self._rows_in_flight + pending.rows_in_flight > _MAX_ROWS
            or self._chars_in_flight + pending.chars > self._max_chars
            or self._bytes_in_flight + pending.size > memory
        )

    async def _finish(self) -> EncodedBlock:
        """Return the oldest block in flight, once it is encoded."""
        pending = self._in_flight[0]
        block = pending.block
        rows = await self._rows(pending) if block.columns else None
        self._in_flight.popleft()
        self._rows_in_flight -= pending.rows_in_flight
        self._chars_in_flight -= pending.chars
        self._bytes_in_flight -= pending.size
        pending.release()
        self._forget()
        return EncodedBlock(block.first, block.rows, rows, block.share)

    async def _rows(self, pending: _Pending) -> pa.RecordBatch:
        batches: list[pa.RecordBatch] = []
        starts: dict[_Pending, int] = {}
        for origin in dict.fromkeys(origin[0] for origin in pending.origins if origin):
            assert origin.results is not None  # noqa: S101 - it has items
            starts[origin] = sum(map(len, batches))
            batches.append(await origin.results)
        order = {
            index: starts[origin[0]] + origin[1]
            for index, origin in enumerate(pending.origins)
            if origin is not None
        }
        results = self._encoder.in_order(batches, order, pending.errors)
        first = pending.block.first
        numbers = pa.array(range(first, first + len(results)), pa.int64())
        return pa.record_batch([numbers, *pending.copied, *results.columns], self.schema)

    def _forget(self) -> None:
        """Forget the oldest recent blocks that exceed the memory for them."""
        while (
            self._recent_bytes > self._options.max_memory * _RECENT
            and self._recent[0] not in self._in_flight
        ):
            oldest = self._recent.popleft()
            self._recent_bytes -= oldest.size
            for item in oldest.items:
                del self._origins[item]
