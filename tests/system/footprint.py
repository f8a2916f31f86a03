"""What a process holds, as the kernel tells it: bytes of memory, threads, open descriptors."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tests.system.processes import ServiceProcess


@dataclass(frozen=True)
class Memory:
    """Bytes of one process: resident now, mapped files included, and the most that ever were."""

    now: int
    peak: int

    def __sub__(self, other: "Memory") -> "Memory":
        return Memory(self.now - other.now, self.peak - other.peak)


def memory(process: ServiceProcess) -> Memory:
    """The memory of a process."""
    found = _status(process)
    # /proc gives kB.
    return Memory(found["VmRSS"] << 10, found["VmHWM"] << 10)


def thread_count(process: ServiceProcess) -> int:
    """Threads of a process."""
    return _status(process)["Threads"]


def descriptor_count(process: ServiceProcess) -> int:
    """Open files, sockets and pipes of a process."""
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def _status(process: ServiceProcess) -> dict[str, int]:
    text = Path(f"/proc/{process.pid}/status").read_text()
    return {name: int(value) for name, value in re.findall(r"(\w+):\s+(\d+)", text)}
