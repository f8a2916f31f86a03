"""A wire between two network namespaces that is slow, loses packets, or is cut (Linux, root).

    with wire(seed=1, far_count=3) as way:     # this namespace has way.near
        start_inside(way.namespace, "-m", "encoder_service", "--host", way.far(0), ...)
        way.set(delay=0.02, loss=0.05)         # both ways; seconds one way, share of packets
        way.set(cut=[way.far(0)])              # nothing to or from these addresses

Both ends are TUN devices, and a process of its own carries the packets between them: whatever the
kernel can do about delay and loss, the packets that TCP sees are late or missing.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import random
import shutil
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from ipaddress import IPv4Address
from pathlib import Path

from tests.chaos.namespaces import enter
from tests.system.processes import ServiceProcess

_DEVICE = "/dev/net/tun"
# From Linux's <linux/if_tun.h>.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 1500
# The network of RFC 2544, for measurements: nobody routes it.
_NETWORK = "198.18.{}.{}"
_FIRST_FAR = 11
_SOURCE, _TARGET = slice(12, 16), slice(16, 20)


@dataclass(frozen=True)
class Condition:
    """Of the wire: seconds one way, share of packets lost, addresses that nothing reaches."""

    delay: float = 0.0
    loss: float = 0.0
    cut: tuple[str, ...] = ()


def unavailable() -> str:
    """Why there can be no such wire on this machine; empty if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip is not installed (iproute2)"
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        return f"{_DEVICE} is missing"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True)
    return "" if made.returncode == 0 else "this machine allows no network namespace"


class Wire:
    """The two ends, and the process that carries packets between them."""

    def __init__(self, process: "subprocess.Popen[str]", namespace: str, third: int) -> None:
        self._process = process
        self.namespace = namespace
        self.near = _NETWORK.format(third, 1)
        self._third = third

    def far(self, number: int) -> str:
        """One of the addresses at the other end."""
        return _NETWORK.format(self._third, _FIRST_FAR + number)

    def set(self, *, delay: float = 0.0, loss: float = 0.0, cut: Sequence[str] = ()) -> None:
        """The wire is like this from now on."""
        self._tell(Condition(delay, loss, tuple(cut)))

    def _tell(self, condition: Condition) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(condition)) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == "set"


@contextmanager
def wire(seed: int, far_count: int) -> Iterator[Wire]:
    """A good wire to a new namespace with `far_count` addresses."""
    # Two runs on one machine must not meet.
    third = os.getpid() % 200
    name = f"chaos{third}"
    with ExitStack() as stack:
        # What a run that was killed left behind.
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)
        process = stack.enter_context(_carrier(name, seed))
        way = Wire(process, name, third)
        _address(name, [way.near])
        _address(name, [way.far(number) for number in range(far_count)], namespace=name)
        yield way


@contextmanager
def _carrier(name: str, seed: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.chaos.wire", name, str(seed)]
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline().strip() == "open"
            yield process
        finally:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()


def _address(device: str, addresses: Sequence[str], namespace: str = "") -> None:
    inside = ("-n", namespace) if namespace else ()
    for address in addresses:
        _ip(*inside, "addr", "add", f"{address}/24", "dev", device)
    _ip(*inside, "link", "set", device, "mtu", str(_MTU), "up")
    if namespace:
        _ip(*inside, "link", "set", "lo", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def start_inside(namespace: str, *command: str) -> ServiceProcess:
    """A service in that namespace, once it is ready."""
    return ServiceProcess("-m", "tests.chaos.namespaces", namespace, *command)


class _Carrier:
    """Takes packets out of one end and puts them into the other."""

    def __init__(self, ends: tuple[int, int], seed: int) -> None:
        self._chance = random.Random(seed)
        self._condition = Condition()
        self._cut: frozenset[bytes] = frozenset()
        self._loop = asyncio.get_running_loop()
        near, far = ends
        for source, target in ((near, far), (far, near)):
            self._loop.add_reader(source, self._read, source, self._late(target))

    def set(self, condition: Condition) -> None:
        self._condition = condition
        self._cut = frozenset(IPv4Address(one).packed for one in condition.cut)

    def _late(self, target: int) -> Callable[[bytes], None]:
        waiting: deque[bytes] = deque()

        def deliver() -> None:
            with contextlib.suppress(OSError):
                os.write(target, waiting.popleft())

        def late(packet: bytes) -> None:
            waiting.append(packet)
            self._loop.call_later(self._condition.delay, deliver)

        return late

    def _read(self, source: int, late: Callable[[bytes], None]) -> None:
        with contextlib.suppress(BlockingIOError):
            # All that is there, so that a burst is not a packet a turn.
            while packet := os.read(source, 1 << 16):
                if self._passes(packet):
                    late(packet)

    def _passes(self, packet: bytes) -> bool:
        ends = {packet[_SOURCE], packet[_TARGET]}
        if ends & self._cut:
            return False
        return self._condition.loss == 0 or self._chance.random() >= self._condition.loss


def _tun(name: str) -> int:
    end = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(end, _TUNSETIFF, request)
    return end


async def _carry(name: str, seed: int) -> None:
    near = _tun(name)
    enter(name)
    carrier = _Carrier((near, _tun(name)), seed)
    print("open", flush=True)
    # Until the other side closes.
    while line := await asyncio.to_thread(sys.stdin.readline):
        told = json.loads(line)
        carrier.set(Condition(told["delay"], told["loss"], tuple(told["cut"])))
        print("set", flush=True)


if __name__ == "__main__":
    asyncio.run(_carry(sys.argv[1], int(sys.argv[2])))
