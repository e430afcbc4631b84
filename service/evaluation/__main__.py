"""`vitrine eval`, if the packages of the extra "eval" are installed."""

import sys
from collections.abc import Sequence

from service.bulk.__main__ import run

PACKAGES = ("pyarrow", "rich", "httpx2", "pytrec_eval", "scipy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run("vitrine eval", "eval", PACKAGES, "service.evaluation.command_line", arguments)


if __name__ == "__main__":
    sys.exit(main())
