"""The service with an engine that tests hold: `ENGINE_HOLD=file python -m tests.held_service`.

Runs wait while the file exists. Runs time out only if they hang on an id of `tests.faulty_service`,
and not because the machine is slow. The gradient process has normal priority.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from models.engines import Output, with_onnxruntime
from models.packing import PackedBatch
from service.inference.batching import streams
from service.serve_command import main
from tests.faulty_service import HANGS, IS_STUCK, FaultyEngine
from tests.service.debug.held_worker import NO_FILE, held_workers


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
        begun: Number of runs so far.
        running: Number of runs that have not ended.
        hanging: Runs that hang until they are cancelled: by thread, the value of `begun`.
        is_stuck: Whether a run never ends.
    """

    file: Path
    begun = running = 0
    hanging: ClassVar[dict[int, int]] = {}
    is_stuck = False
    _lock = threading.Lock()

    def run_outputs(
        self, batch: PackedBatch, outputs: Sequence[Output]
    ) -> list[NDArray[np.float32]]:
        """Wait, then hang, raise or run."""
        with self._lock:
            HeldEngine.begun += 1
            HeldEngine.running += 1
        try:
            return self._run(batch, outputs)
        finally:
            with self._lock:
                HeldEngine.running -= 1

    def _run(self, batch: PackedBatch, outputs: Sequence[Output]) -> list[NDArray[np.float32]]:
        engine = HeldEngine
        while self.file.exists():
            time.sleep(0.005)
        if IS_STUCK in batch.input_ids:
            engine.is_stuck = True
            threading.Event().wait()
        if HANGS in batch.input_ids:
            with self._lock:
                before = self.cancellations
                self.hanging[threading.get_ident()] = engine.begun
            while self.cancellations == before:
                time.sleep(0.005)
            raise RuntimeError("cancelled")
        return super().run_outputs(batch, outputs)

    def cancel(self) -> None:
        """End the runs that hang, and those that do not."""
        with self._lock:
            self.hanging.clear()
            super().cancel()


class HangClock(streams.Clock):
    """A clock that lets only hanging runs time out, on one or two streams."""

    async def wait(self, future: asyncio.Future[Any], timeout_s: float) -> None:
        """Return when the future is done or all runs hang, or after further runs."""
        begun = HeldEngine.begun
        while True:
            await super().wait(future, 0.005)
            if future.done() or self._is_over(timeout_s, begun):
                return

    def _is_over(self, timeout_s: float, begun: int) -> bool:
        engine = HeldEngine
        if engine.is_stuck or timeout_s == streams._CANCEL_S:
            return engine.is_stuck
        hanging = list(engine.hanging.values())
        if not hanging or engine.running == len(hanging):
            return bool(hanging)
        # One stream hangs, and the other has begun two runs since. If this is the other, the
        # service sees that it has made progress, and waits again.
        return engine.begun - max(begun, *hanging) >= 2


if __name__ == "__main__":
    HeldEngine.file = Path(os.environ["ENGINE_HOLD"])
    with_onnxruntime.CpuEngine = HeldEngine  # type: ignore[attr-defined]
    streams.Clock = HangClock  # type: ignore[misc]
    with held_workers(Path(NO_FILE)):
        sys.exit(main())
