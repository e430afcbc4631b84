"""A loaded version of a model, and the leases that keep it open."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from service.inference.model.model import Model


class ModelVersion:
    """A loaded version of a model. Once it is retired, it closes when its last lease is released.

    It closes once. All methods run in the event loop.

    Args:
        model: The model.

    Attributes:
        leases: Number of leases.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.leases = 0
        self._on_closed: Callable[[ModelVersion], None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        """Size of the weights in memory, in bytes."""
        return self.model.engine.weight_bytes

    def lease(self) -> "Lease":
        """Return a new lease.

        Raises:
            RuntimeError: The version is retired or closed.
        """
        if self._on_closed is not None or self._closing is not None:
            raise RuntimeError("a retired version gives no leases")
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
        """Close the model, even if it is leased; later calls wait for the first."""
        await asyncio.shield(self._start_closing())

    def _start_closing(self) -> asyncio.Task[None]:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        return self._closing

    async def _close(self) -> None:
        try:
            await self.model.close()
        finally:  # loads that need its room wait for it
            if self._on_closed is not None:
                self._on_closed(self)

    def _release(self) -> None:
        self.leases -= 1
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._on_closed is not None and not self.leases:
            self._start_closing()


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
