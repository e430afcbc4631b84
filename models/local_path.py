"""Paths of command lines and settings."""

import argparse
import re
from pathlib import Path


def is_url(text: str) -> bool:
    """Return whether a text is a URL: as a path, it would be one in a folder such as `s3:`."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def local_path(text: str) -> Path:
    """Return the path of an argument.

    Raises:
        ArgumentTypeError: It is empty, which would be the working directory, or a URL.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    if is_url(text):
        raise argparse.ArgumentTypeError(
            f"{text} is a URL; give the path of a file or folder, such as one where it is mounted"
        )
    return Path(text)
