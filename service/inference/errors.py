"""Errors of inference. They know nothing of HTTP: `service.api.errors` gives them statuses.

VitrineError
├── InvalidInput       an argument or an input is invalid
├── TooLarge           an input is too large
├── Overloaded         the queue is full, or too long for the deadline
├── InferenceFailed    the engine failed on one input
├── NotReady           the model is loading or closed, or its engine has stopped
└── DeadlineExceeded   the deadline has passed
"""


class VitrineError(Exception):
    """An error with a stable code and a sentence for the caller.

    Args:
        detail: What is wrong, and the limit or the remedy.
        code: Replaces the class's code.
        index: Index of the input that is wrong.
        pointer: JSON pointer to the argument that is wrong, such as "/prompt_name".
    """

    code: str = "internal"
    index: int | None = None
    pointer: str | None = None

    def __init__(
        self,
        detail: str,
        *,
        code: str | None = None,
        index: int | None = None,
        pointer: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code or self.code
        if index is not None:
            self.set_index(index)
        if pointer is not None:
            self.pointer = pointer

    def set_index(self, index: int) -> None:
        """Set the index of the input that is wrong, and the pointer to it."""
        self.index = index
        self.pointer = f"/inputs/{index}"


class InvalidInput(VitrineError):
    """An argument or an input is invalid."""

    code = "invalid"


class TooLarge(VitrineError):
    """An input is too large."""

    code = "too_large"


class Overloaded(VitrineError):
    """The queue is full, or too long for the deadline.

    Args:
        detail: See `VitrineError`.
        retry_after_s: Estimated seconds until there is room.
        code: See `VitrineError`.
    """

    code = "overloaded"

    def __init__(self, detail: str, retry_after_s: float = 0.0, *, code: str | None = None) -> None:
        super().__init__(detail, code=code)
        self.retry_after_s = retry_after_s


class InferenceFailed(VitrineError):
    """The engine failed on one input."""

    code = "inference_failed"


class NotReady(VitrineError):
    """The model is loading or closed, or its engine has stopped."""

    code = "not_ready"


class DeadlineExceeded(VitrineError):
    """The deadline has passed."""

    code = "deadline"
