"""Panics of libraries that are written in Rust, as errors. Standard library only."""


class LibraryPanic(RuntimeError):
    """A library panicked: it met a state that its authors held to be impossible."""


class panics_as_errors:  # noqa: N801 - faster per request than a generator's context manager
    """Raise a panic as `LibraryPanic`; other exceptions pass unchanged.

    A panic is a `BaseException` of PyO3, which `except Exception` misses. Its class cannot be
    imported, so it is known by its name.

    Args:
        subject: What panicked, for the message, such as "the tokenizer".

    Raises:
        LibraryPanic: The block panicked.
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if type(error).__name__ == "PanicException":
            raise LibraryPanic(f"{self._subject} panicked: {error}") from error
