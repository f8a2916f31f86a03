"""The command `chiasm`: run the whole system, show it, compare its ways. `chiasm --help`.

Importing this loads neither torch nor any other large package; each command loads what it needs.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. A faulty command line exits with 2."""
    from chiasm.cli.arguments import read

    options = read(arguments)
    try:
        code: int = options.command(options)
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] == "chiasm":
            raise
        print(f"error: {error.name} is missing; install 'chiasm[all]'", file=sys.stderr)
        return 2
    return code
