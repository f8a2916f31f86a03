"""Names to addresses."""

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Protocol

from gateway.fetch.policy import Address


class Lookup(Protocol):
    """Who tells the addresses of a name."""

    async def addresses(self, host: str) -> Sequence[Address]:
        """All addresses of `host`, the best first. Raises OSError."""


class SystemLookup:
    """The system's resolver.

    It has no time limit and cannot be interrupted, so it has threads of its own: names that nobody
    answers for hold up nothing but other names.
    """

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, "lookup")

    async def addresses(self, host: str) -> Sequence[Address]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, _lookup, host)
        return list(dict.fromkeys(ip_address(one[4][0]) for one in found))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _lookup(host: str) -> list[tuple[int, int, int, str, tuple[str | int, ...]]]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)  # type: ignore[return-value]
