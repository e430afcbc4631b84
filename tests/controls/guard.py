"""A piece of code that a test requires."""

from typing import NamedTuple


class Guard(NamedTuple):
    """A piece of code and the test that requires it.

    Attributes:
        file: File of the code.
        code: Code, which occurs once in the file.
        mistake: Replacement of the code.
        test: Test that fails with the replacement.
    """

    file: str
    code: str
    mistake: str
    test: str
