"""`python -m service.bulk`, which is `vitrine-encode`."""

import sys

from service.bulk.command_line import main

if __name__ == "__main__":
    sys.exit(main())
