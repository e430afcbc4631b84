"""`local_path`: the paths of command lines."""

import argparse
import re
from pathlib import Path


def local_path(text: str) -> Path:
    """Return the path of an argument.

    Raises:
        ArgumentTypeError: It is empty, which would be the working directory, or a URL, which would
            be a folder such as `s3:`.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise argparse.ArgumentTypeError(
            f"{text} is a URL; give the path of a file or folder, such as one where it is mounted"
        )
    return Path(text)
