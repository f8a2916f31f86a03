"""`python -m chiasm.cli`: the same as the command `chiasm`."""

import sys

from chiasm.cli import main

if __name__ == "__main__":
    sys.exit(main())
