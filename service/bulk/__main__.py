"""`vitrine-encode`, if the packages of the extra "bulk" are installed."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    packages = ("pyarrow", "rich")
    return run("vitrine-encode", "bulk", packages, "service.bulk.command_line", arguments)


def run(
    name: str,
    extra: str,
    packages: Sequence[str],
    module: str,
    arguments: Sequence[str] | None,
) -> int:
    """Run `main` of a module that needs packages of an extra, and return its exit status.

    Without one of the packages, a sentence says what to install.
    """
    for package in packages:
        if find_spec(package) is None:
            print(
                f"{name}: the package {package} is not installed; install Vitrine with its extra "
                f"'{extra}'",
                file=sys.stderr,
            )
            return 2
    # Imported late: it needs these packages.
    status: int = import_module(module).main(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
