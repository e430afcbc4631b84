"""Inference errors, independent of HTTP; `service.api.errors` maps them to HTTP statuses.

VitrineError
├── InvalidInput       an argument or an input is invalid
├── TooLarge           a text or a request body is too large
├── Overloaded         the queue is full, or the call would miss its deadline
├── UnknownModel       no served model has this name
├── InferenceFailed    the engine failed on one input
├── NotReady           the model is loading or closed, or its engine has stopped
└── DeadlineExceeded   the deadline of the call has passed
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class VitrineError(Exception):
    """Base class of inference errors, with a stable code and a message for the caller.

    Args:
        detail: Message that states the problem, then the limit or the remedy.
        code: Stable error code; None: the default code of the class.
        index: Index of the input that caused the error; None: no single input caused it.
        pointer: JSON pointer to the argument that caused the error, such as "/prompt_name".
        method: Method of the Python API to call instead; not for clients of HTTP.

    `str` of the error has the message, the input and the method.
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
        method: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.method = method
        self.code = code or self.code
        if index is not None:
            self.set_index(index)
        if pointer is not None:
            self.pointer = pointer

    def __str__(self) -> str:
        name, _, index = (self.pointer or "").lstrip("/").rpartition("/")
        subject = f"{name}[{index}]: " if index.isdecimal() else ""
        return subject + self.detail + (f"; call {self.method}" if self.method else "")

    def set_index(self, index: int) -> None:
        """Set the index of the input that caused the error, and the JSON pointer to that input."""
        self.index = index
        self.pointer = f"/inputs/{index}"

    def rename(self, names: Mapping[str, str]) -> None:
        """Replace the name of an argument in the JSON pointer by that of a field, if it has one.

        Args:
            names: Path in a request body, such as "parameters/top_k", by the argument's name.
        """
        if self.pointer:
            name, *rest = self.pointer.removeprefix("/").split("/")
            self.pointer = "/".join(["", names.get(name, name), *rest])


class InvalidInput(VitrineError):
    """An argument or an input is invalid."""

    code = "invalid"


class TooLarge(VitrineError):
    """A text has too many characters, or a request body too many bytes."""

    code = "too_large"


class Overloaded(VitrineError):
    """The queue is full, or the call would miss its deadline.

    Args:
        detail: See `VitrineError`.
        retry_after_s: Estimated seconds until a retry can succeed.
        code: See `VitrineError`.
    """

    code = "overloaded"

    def __init__(self, detail: str, retry_after_s: float = 0.0, *, code: str | None = None) -> None:
        super().__init__(detail, code=code)
        self.retry_after_s = retry_after_s


class UnknownModel(VitrineError):
    """No served model has this name."""

    code = "model_not_found"


class InferenceFailed(VitrineError):
    """The engine failed on one input."""

    code = "inference_failed"


class NotReady(VitrineError):
    """The model is loading or closed, or its engine has stopped.

    Args:
        detail: See `VitrineError`.
        retry_after_s: Seconds until a retry can succeed.
        code: See `VitrineError`.
    """

    code = "not_ready"

    def __init__(self, detail: str, retry_after_s: float = 1.0, *, code: str | None = None) -> None:
        super().__init__(detail, code=code)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(VitrineError):
    """The deadline of the call has passed."""

    code = "deadline"


@contextmanager
def convert_index(
    convert: Callable[[int], int], kind: type[VitrineError] = VitrineError
) -> Iterator[None]:
    """Convert the index in errors of a kind, and their pointers: from a row to its input."""
    try:
        yield
    except kind as error:
        if error.index is not None:
            error.set_index(convert(error.index))
        raise


@contextmanager
def point_to(pointer: str) -> Iterator[None]:
    """Let errors of a text that is no input have the JSON pointer to it, and no index."""
    try:
        yield
    except VitrineError as error:
        error.index, error.pointer = None, pointer
        raise
