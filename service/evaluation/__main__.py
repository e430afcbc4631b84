"""`vitrine eval` and `vitrine migrate`, if the packages of the extra "eval" are installed."""

import sys
from collections.abc import Sequence

from service.bulk.__main__ import run

_PACKAGES = ("pyarrow", "rich", "httpx2", "pytrec_eval", "scipy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `vitrine eval` and return its exit status."""
    return run("vitrine eval", "eval", _PACKAGES, "service.evaluation.command_line", arguments)


def migrate(arguments: Sequence[str] | None = None) -> int:
    """Run `vitrine migrate` and return its exit status."""
    module = "service.evaluation.migrate_command"
    return run("vitrine migrate", "eval", _PACKAGES, module, arguments)


if __name__ == "__main__":
    sys.exit(main())
