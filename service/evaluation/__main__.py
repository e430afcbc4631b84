"""`python -m service.evaluation`, which is `vitrine eval`."""

import sys

from service.commands import run

if __name__ == "__main__":
    sys.exit(run("eval"))
