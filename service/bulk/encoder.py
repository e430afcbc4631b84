"""Results of records as Arrow record batches, with an error for each record that fails."""

import asyncio
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from service.bulk.kinds import RESULT_KINDS, Columns
from service.bulk.options import ERROR, BulkOptions, Kind, OptionError
from service.bulk.texts import Item
from service.inference.errors import InferenceFailed, InvalidInput, TooLarge
from service.inference.model.model import Model
from service.inference.tokenizing.tokenizer import refuse_empty

# Items of more characters are encoded one at a time: tokenising one takes up to 620 bytes per
# character.
_LONG_CHARS = 200_000
# Index of the input in the pointer of an error, such as "/documents/3".
_INDEX = re.compile(r"/(\d+)$")


class RecordEncoder:
    """Computes the results of records with a model, as Arrow record batches.

    Args:
        model: The model.
        options: Settings of the job.
        kind: Kind of the results.
        columns: Results of any items, which have the names and types of the columns.

    Attributes:
        schema: Columns of the results: those of the kind, and the number of tokens, whether the
            text was truncated, and the error. With an error, all others are null.
    """

    def __init__(self, model: Model, options: BulkOptions, kind: Kind, columns: Columns) -> None:
        self._model = model
        self._options = options
        self._kind = RESULT_KINDS[kind]
        self._long_item = asyncio.Lock()
        self.schema = pa.schema(
            [
                *(pa.field(name, column.type) for name, column in columns.items()),
                pa.field(ERROR, pa.string()),
            ]
        )

    def result_bytes(self, items: Sequence[Item]) -> int:
        """Return the approximate size of the results of some items, in bytes."""
        sizes = map(item_chars, items)
        return sum(self._kind.row_bytes(self._model, self._options, size) for size in sizes)

    @classmethod
    async def create(cls, model: Model, options: BulkOptions, kind: Kind) -> "RecordEncoder":
        """Return an encoder that has encoded a short text with all settings of the job.

        Raises:
            OptionError: The model refuses a setting, such as the name of a prompt.
        """
        item = ("check", "check") if kind == "scores" else "check"
        try:
            columns = await RESULT_KINDS[kind].compute(model, [item], options)
        except InvalidInput as error:
            raise OptionError(error.detail) from error
        return cls(model, options, kind, columns)

    async def encode(self, items: Sequence[Item]) -> pa.RecordBatch:
        """Return the results of items, in their order; an item that fails has an error.

        Raises:
            VitrineError: The engine has stopped.
        """
        errors: dict[int, str] = {}
        for index, item in enumerate(items):
            texts = (item,) if isinstance(item, str) else item
            try:
                refuse_empty(texts)
                for text in texts:
                    self._model.tokenizer.check_text(text, index)
            except (InvalidInput, TooLarge) as error:
                errors[index] = error.detail
        valid = [index for index in range(len(items)) if index not in errors]
        longest = [index for index in valid if item_chars(items[index]) > _LONG_CHARS]
        others = [index for index in valid if index not in longest]
        computed = await self._compute(items, others, errors)
        for index in longest:
            async with self._long_item:
                computed += await self._compute(items, [index], errors)
        done = [index for indices, _ in computed for index in indices]
        order = {index: position for position, index in enumerate(done)}
        return self.in_order([batch for _, batch in computed], order, errors)

    def in_order(
        self,
        batches: Sequence[pa.RecordBatch],
        order: Mapping[int, int],
        errors: Mapping[int, str],
    ) -> pa.RecordBatch:
        """Return a row per record, with its results or its error.

        Args:
            batches: Results.
            order: Index in all results together, for each record that has any.
            errors: Errors of the other records.
        """
        failed = sorted(errors)
        indices = np.empty(len(order) + len(failed), np.int64)
        indices[list(order)] = list(order.values())
        indices[failed] = sum(map(len, batches)) + np.arange(len(failed))
        rows = [*batches, self.error_rows([errors[index] for index in failed])]
        return pa.concat_batches(rows).take(pa.array(indices))

    def error_rows(self, errors: Sequence[str]) -> pa.RecordBatch:
        """Return rows without results."""
        nulls = [pa.nulls(len(errors), field.type) for field in self.schema][:-1]
        return pa.record_batch([*nulls, pa.array(errors, pa.string())], self.schema)

    async def _compute(
        self, items: Sequence[Item], indices: Sequence[int], errors: dict[int, str]
    ) -> list[tuple[Sequence[int], pa.RecordBatch]]:
        """Return the results of the items at the indices, except of those that fail.

        An item that fails makes the whole call fail, so the others are computed again without it.
        """
        if not indices:
            return []
        try:
            columns = await self._kind.compute(
                self._model, [items[index] for index in indices], self._options
            )
        except (InvalidInput, TooLarge, InferenceFailed) as error:
            match = _INDEX.search(error.pointer or "")
            if match is None and len(indices) > 1:
                parts = _halves(indices)  # such as texts that have too many chunks together
            else:
                failed = 0 if match is None else int(match[1])
                errors[indices[failed]] = error.detail
                # In halves, because the others may fail as well, one by one.
                parts = [indices[:failed], *_halves(indices[failed + 1 :])]
            return [batch for part in parts for batch in await self._compute(items, part, errors)]
        columns[ERROR] = pa.nulls(len(indices), pa.string())
        arrays = [columns[name] for name in self.schema.names]
        return [(indices, pa.record_batch(arrays, self.schema))]


def item_chars(item: Item) -> int:
    """Return the number of characters of a text, or of a query and a text."""
    return len(item) if isinstance(item, str) else sum(map(len, item))


def _halves(indices: Sequence[int]) -> list[Sequence[int]]:
    middle = len(indices) // 2
    return [indices[:middle], indices[middle:]]
