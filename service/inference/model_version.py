"""A loaded version of a model, and the leases that keep it open."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from service.inference.model import Model


class ModelVersion:
    """A loaded version of a model. Once it is retired, it closes when its last lease is released.

    All methods run in the event loop.

    Args:
        model: The model.
        size: Size of its file of weights, in bytes.

    Attributes:
        leases: Number of leases.
        closed: Set once the model is closed.
    """

    def __init__(self, model: Model, size: int) -> None:
        self.model = model
        self.size = size
        self.leases = 0
        self.closed = asyncio.Event()
        self._on_closed: Callable[[ModelVersion], None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def lease(self) -> "Lease":
        """Return a new lease."""
        self.leases += 1
        return Lease(self.model, self._release)

    def retire(self, on_closed: "Callable[[ModelVersion], None]") -> None:
        """Close the model when its last lease is released; no more leases are given.

        Args:
            on_closed: Called with this version once the model is closed.
        """
        self._on_closed = on_closed
        self._close_if_unused()

    async def close(self) -> None:
        """Close the model, even if it is leased."""
        await self.model.close()
        self.closed.set()
        if self._on_closed is not None:
            self._on_closed(self)

    def _release(self) -> None:
        self.leases -= 1
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._on_closed is not None and not self.leases:
            self._closing = asyncio.create_task(self.close())


class Lease:
    """A model that stays open until the lease is released.

    Args:
        model: The model.
        release: Called once, when the lease is released.
    """

    def __init__(self, model: Model, release: Callable[[], None]) -> None:
        self.model = model
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Release the lease; later calls have no effect."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Model:
        """Return the model."""
        return self.model

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the lease."""
        self.release()
