"""A synchronous wrapper of `Model`, with an event loop in a background thread."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from models.quantization import OutputDtype
from service.inference.errors import NotReady
from service.inference.model.model import Model
from service.inference.model.opening import DEFAULT_OPTIONS, ModelOptions, open_model
from service.inference.model.similarity import VectorsOfTexts
from service.inference.results.quantization import Quantizer
from service.inference.results.scores import Scores

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Maximum duration of a wait, in seconds. A signal that arrives just before it does not end it.
_WAIT_S = 0.5


def _synchronous(
    method: Callable[Concatenate[Model, Arguments], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate["SyncModel", Arguments], Result]:
    """Return a method of `SyncModel` that runs a method of `Model` to its end."""

    @wraps(method)
    def call(self: "SyncModel", /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return self._run(method(self.model, *args, **kwargs))

    return call


class SyncModel:
    """An open model with synchronous methods, which may be called from any thread.

    An interrupted call leaves the queue, and the model stays usable. A model that nobody refers to
    any more ends its thread, as after a second run of the cell of a notebook that opens it.

    Args:
        path: Folder of an artifact written by `vitrine-export`.
        options: Runtime options.

    Raises:
        ArtifactError: The artifact is incomplete or invalid, or was modified after its export.
        EngineError: The engine is unknown or unavailable on this machine, or fails the self-check.
    """

    def __init__(self, path: Path | str, options: ModelOptions = DEFAULT_OPTIONS) -> None:
        self._loop = loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(loop,), daemon=True)
        self._lock = threading.Lock()  # no call is submitted after the stop
        self._stop = weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)
        self._thread.start()
        try:
            self.model: Model = self._run(open_model(path, options))
        except BaseException:
            self._stop()
            raise
        _open_models.add(self)

    def __repr__(self) -> str:
        return f"Sync{self.model!r}"

    def __enter__(self) -> "SyncModel":
        """Return the model."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the model."""
        self.close()

    def close(self) -> None:
        """Close the model and end the background thread; a closed model stays closed."""
        with suppress(NotReady):
            self._run(self.model.close())
        with self._lock:
            self._stop()
        self._thread.join()

    encode = _synchronous(Model.encode)
    encode_chunks = _synchronous(Model.encode_chunks)
    encode_tokens = _synchronous(Model.encode_tokens)
    encode_sparse = _synchronous(Model.encode_sparse)
    encode_multi = _synchronous(Model.encode_multi)
    encode_outputs = _synchronous(Model.encode_outputs)
    classify = _synchronous(Model.classify)
    tag = _synchronous(Model.tag)
    rerank = _synchronous(Model.rerank)
    score = _synchronous(Model.score)
    tokenize = _synchronous(Model.tokenize)
    decode = _synchronous(Model.decode)

    def similarity(self, a: VectorsOfTexts, b: VectorsOfTexts) -> Scores:
        """Return the similarity of each text of `a` with each of `b`; see `Model.similarity`."""
        return self.model.similarity(a, b)

    def quantizer(
        self,
        dtype: OutputDtype,
        *,
        dimensions: int | None = None,
        truncate_dim: int | None = None,
        normalize: bool | None = None,
    ) -> Quantizer:
        """Return the conversion to `dtype` of the vectors of `encode`; see `Model.quantizer`."""
        return self.model.quantizer(
            dtype, dimensions=dimensions, truncate_dim=truncate_dim, normalize=normalize
        )

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        with self._lock:
            if not self._stop.alive:
                work.close()
                raise _closed_error()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not wait([future], _WAIT_S).done:
                pass
            return future.result()
        except CancelledError:
            raise _closed_error() from None
        finally:
            future.cancel()  # of a caller that was interrupted


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped; then cancel its tasks and close it."""
    loop.run_forever()
    loop.run_until_complete(_cancel_tasks())
    loop.close()


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_open_models: "weakref.WeakSet[SyncModel]" = weakref.WeakSet()


def _close_all() -> None:
    """Close the models that are open when the interpreter exits."""
    for model in list(_open_models):
        model.close()


def _detach_all() -> None:
    """Let no call wait for a thread that a forked process does not have."""
    for model in _open_models:
        model._stop.detach()
        model._lock = threading.Lock()  # another thread may have held it


# Before the threads of engines take no more work, which their models would log as a failure.
# `atexit` comes after that.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_detach_all)


def _closed_error() -> NotReady:
    return NotReady("the model is closed")
