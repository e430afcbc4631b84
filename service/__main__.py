"""`python -m service`, which is `vitrine serve`."""

import sys

from service.commands import serve

if __name__ == "__main__":
    sys.exit(serve())
