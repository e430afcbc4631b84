"""`python -m service.bulk`, which is `vitrine-encode`."""

import sys

from service.commands import encode

if __name__ == "__main__":
    sys.exit(encode())
