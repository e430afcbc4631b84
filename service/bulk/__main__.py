"""`vitrine-encode`, if the packages of the extra "bulk" are installed."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

_PACKAGES = ("pyarrow", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            print(
                f"vitrine-encode: the package {package} is not installed; install Vitrine with its "
                "extra 'bulk'",
                file=sys.stderr,
            )
            return 2
    # Imported late: it needs these packages.
    from service.bulk.command_line import main as command

    return command(arguments)


if __name__ == "__main__":
    sys.exit(main())
