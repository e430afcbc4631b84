"""The service with an engine that tests hold: `ENGINE_HOLD=file python -m tests.held_service`.

Runs wait while the file exists. Runs time out only if they hang on an id of `tests.faulty_service`,
and not because the machine is slow.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from models.engines import Output, with_onnxruntime
from models.packing import PackedBatch
from service.__main__ import main
from service.inference import batcher
from tests.faulty_service import HANGS, IS_STUCK, FaultyEngine


@contextmanager
def held(file: Path) -> Iterator[None]:
    """Hold all runs of the service that was started with this file as ENGINE_HOLD."""
    file.touch()
    try:
        yield
    finally:
        file.unlink()


class HeldEngine(FaultyEngine):
    """A FaultyEngine whose runs wait while a file exists.

    Attributes:
        file: The file.
        running: Threads of the runs in flight.
        hanging: Threads of the runs that hang until they are cancelled.
        stuck: Threads of the runs that never end.
    """

    file: Path
    running: ClassVar[set[int]] = set()
    hanging: ClassVar[set[int]] = set()
    stuck: ClassVar[set[int]] = set()
    _lock = threading.Lock()

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        """Wait, then hang, raise or run."""
        thread = threading.get_ident()
        self.running.add(thread)
        try:
            while self.file.exists():
                time.sleep(0.005)
            if IS_STUCK in batch.input_ids:
                self.stuck.add(thread)
                threading.Event().wait()
            if HANGS in batch.input_ids:
                with self._lock:
                    before = self.cancellations
                    self.hanging.add(thread)
                while self.cancellations == before:
                    time.sleep(0.005)
                raise RuntimeError("cancelled")
            return super().run(batch, output)
        finally:
            self.running.discard(thread)

    def cancel(self) -> None:
        """End the runs that hang, and those that do not."""
        with self._lock:
            self.hanging.clear()
            super().cancel()


class HangClock(batcher.Clock):
    """A clock whose timeouts pass only while all runs hang."""

    async def wait(self, future: asyncio.Future[Any], timeout_s: float) -> None:
        """Return when the future is done, or when all runs hang."""
        del timeout_s
        engine = HeldEngine
        while not (future.done() or set() < engine.running <= engine.hanging | engine.stuck):
            await super().wait(future, 0.005)


if __name__ == "__main__":
    HeldEngine.file = Path(os.environ["ENGINE_HOLD"])
    with_onnxruntime.CpuEngine = HeldEngine  # type: ignore[attr-defined]
    batcher.Clock = HangClock  # type: ignore[misc]
    sys.exit(main())
