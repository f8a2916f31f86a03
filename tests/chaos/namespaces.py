"""`python -m tests.chaos.namespaces NAME -m module FLAGS`: Python in a network namespace (Linux).

The namespace is one of `ip netns`. What ties the process to its parent's life outlasts this.
"""

import ctypes
import os
import sys
from pathlib import Path

# From Linux's <sched.h>.
_CLONE_NEWNET = 0x4000_0000


def enter(name: str) -> None:
    """Moves this thread, and the threads and processes that it starts, into the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (Path("/run/netns") / name).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)


if __name__ == "__main__":
    enter(sys.argv[1])
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
