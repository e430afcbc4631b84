"""The service with an engine that fails on some token ids: `python -m tests.faulty_service`."""

import sys
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.engines import CpuEngine, Output, with_onnxruntime
from models.packing import PackedBatch
from service.serve_command import main

RAISES = 2000
IS_NAN = 2001
HANGS = 2002  # until it is cancelled
IS_STUCK = 2003  # for ever
BREAKS = 2004  # from then on, every batch raises


class FaultyEngine(CpuEngine):
    """CpuEngine with a fault for each of those ids."""

    cancellations = 0
    is_broken = False
    _changed = threading.Condition()

    def run_outputs(
        self, batch: PackedBatch, outputs: Sequence[Output]
    ) -> list[NDArray[np.float32]]:
        """Fail, hang or run."""
        self.is_broken |= BREAKS in batch.input_ids
        if self.is_broken or RAISES in batch.input_ids:
            raise RuntimeError("engine fault")
        if HANGS in batch.input_ids or IS_STUCK in batch.input_ids:
            with self._changed:
                before = self.cancellations
                while IS_STUCK in batch.input_ids or self.cancellations == before:
                    self._changed.wait()
            raise RuntimeError("cancelled")
        (vectors,) = super().run_outputs(batch, outputs)
        vectors[batch.input_ids[batch.padded_index[:, 0]] == IS_NAN] = np.nan
        return [vectors]

    def cancel(self) -> None:
        """Cancel all runs, those that hang too."""
        with self._changed:
            self.cancellations += 1
            self._changed.notify_all()
        super().cancel()


if __name__ == "__main__":
    with_onnxruntime.CpuEngine = FaultyEngine  # type: ignore[attr-defined]
    sys.exit(main())
