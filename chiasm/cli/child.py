"""Runs Python in a process that ends when its parent does, even if that was killed.

    python CHILD_FILE PARENT_PID -m llm_service ...

The kernel is asked to kill this process at its parent's death, then the real program takes its
place; a request of that kind outlives `exec`. Where there is no such call (outside Linux) the
program runs without it. Loads nothing of the package, so that it costs no time.
"""

import ctypes
import os
import signal
import sys

# As `python FILE`: `-m` would import the parent package first.
PROGRAM = ("-I", "-S", __file__)
# From Linux's <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties this process to its parent, then becomes `python REST`."""
    parent, rest = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It may have died before the call.
        if os.getppid() != parent:
            sys.exit(1)
    os.execv(sys.executable, [sys.executable, *rest])  # noqa: S606 - our own interpreter


if __name__ == "__main__":
    main()
