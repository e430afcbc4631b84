"""The service with an engine that misbehaves on some ids: `python -m tests.faulty_service`."""

import sys
import time

import numpy as np
from numpy.typing import NDArray

from models.engines import CpuEngine, Output, with_onnxruntime
from models.packing import PackedBatch
from service.__main__ import main

RAISES = 2000
IS_NAN = 2001
HANGS = 2002  # until it is cancelled
IS_STUCK = 2003  # whatever is done
BREAKS = 2004  # from then on it raises on everything


class FaultyEngine(CpuEngine):
    """As the engine, but for those ids."""

    cancellations = 0
    is_broken = False

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        """Misbehave, or run."""
        self.is_broken |= BREAKS in batch.input_ids
        if self.is_broken or RAISES in batch.input_ids:
            raise RuntimeError("engine fault")
        before = self.cancellations
        while HANGS in batch.input_ids or IS_STUCK in batch.input_ids:
            time.sleep(0.01)
            if IS_STUCK not in batch.input_ids and self.cancellations > before:
                raise RuntimeError("cancelled")
        vectors = super().run(batch, output)
        vectors[batch.input_ids[batch.padded_index[:, 0]] == IS_NAN] = np.nan
        return vectors

    def cancel(self) -> None:
        """End the runs that hang, and those that do not."""
        self.cancellations += 1
        super().cancel()


if __name__ == "__main__":
    with_onnxruntime.CpuEngine = FaultyEngine  # type: ignore[attr-defined]
    sys.exit(main())
