"""A synchronous wrapper of `Model`, with an event loop in a background thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from models.quantization import OutputDtype
from service.inference.errors import NotReady
from service.inference.model.model import Model
from service.inference.model.opening import DEFAULT_OPTIONS, ModelOptions, open_model
from service.inference.results.quantization import Quantizer

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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

    Args:
        path: Folder of an artifact written by `vitrine-export`.
        options: Runtime options.

    Raises:
        ArtifactError: The artifact is incomplete or invalid, or was modified after its export.
        EngineError: The engine is unknown or unavailable on this machine, or fails the self-check.
    """

    def __init__(self, path: Path | str, options: ModelOptions = DEFAULT_OPTIONS) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self.model: Model = self._run(open_model(path, options))
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> "SyncModel":
        """Return the model."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the model."""
        self.close()

    def close(self) -> None:
        """Close the model and end the background thread."""
        self._run(self.model.close())
        self._stop_loop()

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
        if self._loop.is_closed():
            work.close()
            raise NotReady("the model is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
