"""numpy on CPUs, for static models: the vector of a text is the mean of its tokens' vectors.

There is no graph. The table of token vectors is an array that is mapped into memory from a file.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.engines.engine import BatchSizes, Engine, EngineError, GraphFile, Hardware, Run
from models.engines.outputs import Precision
from models.manifest import Output
from models.packing import PackedBatch

# Number of tokens whose vectors are copied at a time: with 256 dimensions they take 0.5 MB, which
# stays in the cache until they are added.
_BLOCK = 512


class TableEngine:
    """A table of token vectors.

    Args:
        table: Vector of each token, `(V, W)`.
        hardware: Threads to compute with.
    """

    name, target = "numpy", "cpu"
    precision: Precision = "float32"
    # A batch has a fixed cost of about 0.2 ms, mostly in Python, as much as 1,000 tokens.
    batches = BatchSizes(
        max_tokens=16_384, min_split_tokens=4_096, fixed_cost=1_024, padding_cost=0.05
    )

    def __init__(self, table: NDArray[np.float32], hardware: Hardware) -> None:
        self.threads = self.streams = hardware.threads
        self.weight_bytes = table.nbytes
        self._table = table
        self.runs: Sequence[Run] = (self.run_outputs,)

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        """Return one vector per row, `(B, W)`, or per token, `(T, W)`; see `engines.OUTPUTS`."""
        return self.run_outputs(batch, (output,))[0]

    def run_outputs(
        self, batch: PackedBatch, outputs: Sequence[Output]
    ) -> list[NDArray[np.float32]]:
        """Return several outputs of one batch, in the order of their names.

        Raises:
            ValueError: An output is neither "pooled" nor "tokens".
        """
        table = self._table  # `close` replaces it
        results: list[NDArray[np.float32]] = []
        for output in outputs:
            match output:
                case "pooled":
                    results.append(_means(table, batch))
                case "tokens":
                    results.append(table[batch.input_ids])
                case _:
                    raise ValueError(f"a table has no output {output!r}")
        return results

    def cancel(self) -> None:
        """Do nothing: the duration of a run is in proportion to its tokens."""

    def close(self) -> None:
        """Free the table; runs in flight keep it until they end."""
        self._table, self.runs = self._table[:0], ()


def _means(table: NDArray[np.float32], batch: PackedBatch) -> NDArray[np.float32]:
    """Return the mean of the token vectors of each row, `(B, W)`."""
    ends = batch.cumulative_lengths
    starts, lengths = ends[:-1], np.diff(ends)  # (B,)
    order = np.argsort(lengths, kind="stable")
    means = np.zeros((batch.rows, table.shape[1]), np.float32)
    # Rows of one length are added together: four times as fast as `np.add.reduceat`.
    for rows in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        length = int(lengths[rows[0]])
        count = max(1, _BLOCK // length)
        for block_rows in (rows[i : i + count] for i in range(0, len(rows), count)):
            for start in range(0, length, _BLOCK):
                positions = np.arange(start, min(start + _BLOCK, length))
                tokens = batch.input_ids[starts[block_rows, None] + positions]
                means[block_rows] += np.add.reduce(table[tokens], 1)
    means /= lengths[:, None]
    return means


def open_table(graph: GraphFile, _precision: Precision, hardware: Hardware) -> Engine:
    """Return the engine "numpy" for a table; see `models.engines.EngineSpec`.

    Raises:
        EngineError: The file has another shape or dtype than the model.
    """
    table = np.load(graph.path, mmap_mode="r", allow_pickle=False)
    shape, dtype = getattr(table, "shape", None), getattr(table, "dtype", None)  # not of archives
    if shape != graph.table_shape or dtype != np.float32:
        raise EngineError(
            f"{graph.path.name} has shape {shape} and dtype {dtype}; the model requires shape "
            f"{graph.table_shape} and dtype float32"
        )
    return TableEngine(np.asarray(table), hardware)  # still mapped; indexing a memmap is slower
