"""`vitrine migrate`, if the packages of the extra "eval" are installed."""

import sys
from collections.abc import Sequence

from service.bulk.__main__ import run
from service.evaluation.__main__ import PACKAGES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run("vitrine migrate", "eval", PACKAGES, "service.evaluation.migrate_command", arguments)


if __name__ == "__main__":
    sys.exit(main())
