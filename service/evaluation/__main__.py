"""`python -m service.evaluation`, which is `vitrine eval`."""

import sys

from service.evaluation.command_line import main

if __name__ == "__main__":
    sys.exit(main())
