"""Panics of libraries that are written in Rust, as errors. Standard library only."""

from collections.abc import Iterator
from contextlib import contextmanager


class LibraryPanic(RuntimeError):
    """A library panicked: it met a state that its authors held to be impossible."""


@contextmanager
def panics_as_errors(subject: str) -> Iterator[None]:
    """Raise a panic as `LibraryPanic`; other exceptions pass unchanged.

    A panic is a `BaseException` of PyO3, which `except Exception` misses. Its class cannot be
    imported, so it is known by its name.

    Args:
        subject: What panicked, for the message, such as "the tokenizer".

    Raises:
        LibraryPanic: The block panicked.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise LibraryPanic(f"{subject} panicked: {error}") from error
