"""Which encoders there are: `host:port`, every address of a DNS name, or the lines of a file.

    host:port             one encoder, for good
    dns:///name:port      every address of the name, looked up again every few seconds
    file:///path          one host:port a line; `#` begins a comment; read again when it changes

What cannot be looked up or read at the moment leaves things as they were: encoders that are really
gone fail their probes, and an address that now belongs to something else fails the identity check,
whereas a resolver that stumbles must not take a healthy fleet away. For the same reason an empty
answer removes nobody. A file that is there and lists nobody does.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from chiasm import telemetry

DNS, FILE = "dns:///", "file:///"
FORMS = "host:port, dns:///name:port or file:///path"
_DNS_SECONDS, _FILE_SECONDS = 2.0, 1.0
# One look-up may take so long; the resolver's own patience (resolv.conf) ends its thread.
_DNS_PATIENCE_SECONDS = 5.0
_FILE_BYTES = 1 << 20

Found = frozenset[str]
# Name and port to addresses; raises OSError. A seam: the system's resolver, or a test's.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Discovery(Protocol):
    """Names the encoders of a fleet."""

    def addresses(self) -> AsyncIterator[Found]:
        """The set of `host:port`, at once and after each change. Never raises, never ends."""
        ...


def check_target(target: str) -> None:
    """Raises ValueError, saying how to mend it, for a target of none of the three forms."""
    if target.startswith(FILE):
        if target == FILE:
            raise ValueError(f"{target!r} names no file; write file:///path")
        return
    if "://" in target and not target.startswith(DNS):
        raise ValueError(f"{target!r} is none of {FORMS}")
    try:
        split_address(target.removeprefix(DNS))
    except ValueError as error:
        raise ValueError(f"{target!r}: {error}; write {FORMS}") from None


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise ValueError("it has no host or no port")
    bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not bracketed:
        raise ValueError("an IPv6 address stands in brackets, [::1]:50061")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError("the port is a number from 1 to 65535")
    if any(c.isspace() or c in "/@?#," for c in host):
        raise ValueError("the host is a name or an address")
    return host.strip("[]"), int(port)


def discovery(
    targets: Sequence[str],
    *,
    dns_seconds: float = _DNS_SECONDS,
    file_seconds: float = _FILE_SECONDS,
    resolve: Resolve | None = None,
) -> Discovery:
    """The union of all `targets`, each as `check_target` takes them.

    `dns_seconds` and `file_seconds` are the time between two looks.
    """
    fixed, looks = set(), []
    for target in targets:
        if target.startswith(FILE):
            looks.append(_Look(_read_file(Path(target.removeprefix("file://"))), file_seconds))
        elif target.startswith(DNS):
            host, port = split_address(target.removeprefix(DNS))
            looks.append(_Look(_look_up(host, port, resolve or _system), dns_seconds))
        else:
            fixed.add(target)
    return _Union(frozenset(fixed), looks)


class _Look:
    """One source that is asked again every `seconds`; remembers its last answer."""

    def __init__(self, ask: Callable[[], Awaitable[Found | None]], seconds: float) -> None:
        self.seconds = seconds
        self.found: Found = frozenset()
        self._ask = ask

    async def again(self) -> None:
        try:
            found = await self._ask()
        except Exception:
            telemetry.logger().exception("fault", detail="a look for encoders")
            return
        if found is not None:
            self.found = found


class _Union:
    def __init__(self, fixed: Found, looks: Sequence[_Look]) -> None:
        self._fixed = fixed
        self._looks = looks

    async def addresses(self) -> AsyncIterator[Found]:
        told: Found | None = None
        changed = asyncio.Event()
        # What is fixed need not wait for a slow name.
        if self._fixed:
            told = self._fixed
            yield told
        tasks = [asyncio.create_task(_repeat(look, changed)) for look in self._looks]
        try:
            while True:
                now = self._fixed.union(*(look.found for look in self._looks))
                if now != told:
                    told = now
                    yield told
                await changed.wait()
                changed.clear()
        finally:
            for task in tasks:
                task.cancel()


async def _repeat(look: _Look, changed: asyncio.Event) -> None:
    while True:
        before = look.found
        await look.again()
        if look.found != before:
            changed.set()
        await asyncio.sleep(look.seconds)


def _look_up(host: str, port: int, resolve: Resolve) -> Callable[[], Awaitable[Found | None]]:
    trouble = _Trouble("encoders' name cannot be looked up", name=host)

    async def look() -> Found | None:
        try:
            async with asyncio.timeout(_DNS_PATIENCE_SECONDS):
                found = frozenset(await resolve(host, port))
        except (OSError, TimeoutError, UnicodeError) as error:
            trouble.tell(type(error).__name__ + (f": {error}" if str(error) else ""))
            return None
        trouble.tell("" if found else "it has no address")
        return found or None

    return look


async def _system(host: str, port: int) -> list[str]:
    """By the system's resolver, so that hosts files and search domains count."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [
        f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        for family, _, _, _, address in found
    ]


def _read_file(path: Path) -> Callable[[], Awaitable[Found | None]]:
    trouble = _Trouble("encoders' file cannot be read", path=str(path))
    bad_lines = _Trouble("encoders' file has lines that are not host:port", path=str(path))

    async def look() -> Found | None:
        try:
            content = await asyncio.to_thread(_content, path)
        except OSError as error:
            trouble.tell(error.strerror or type(error).__name__)
            return None
        except ValueError as error:
            trouble.tell(str(error))
            return None
        trouble.tell("")
        found, bad = parse_lines(content)
        bad_lines.tell(f"ignored: lines {', '.join(map(str, bad[:20]))}" if bad else "")
        return found

    return look


def _content(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(_FILE_BYTES + 1)
    if len(data) > _FILE_BYTES:
        raise ValueError(f"it has more than {_FILE_BYTES} bytes")
    return data.decode("utf-8", "replace")


def parse_lines(content: str) -> tuple[Found, list[int]]:
    """The addresses of a file's lines, and the numbers of the lines that are none."""
    found, bad = set(), []
    for number, line in enumerate(content.splitlines(), 1):
        address = line.partition("#")[0].strip()
        if not address:
            continue
        try:
            split_address(address)
        except ValueError:
            bad.append(number)
        else:
            found.add(address)
    return frozenset(found), bad


class _Trouble:
    """Says in the log when something begins to fail, changes, or works again; not at each look."""

    def __init__(self, event: str, **what: str) -> None:
        self._event = event
        self._what = what
        self._told = ""

    def tell(self, detail: str) -> None:
        """`detail` is empty while all is well."""
        if detail == self._told:
            return
        self._told = detail
        log = telemetry.logger()
        if detail:
            log.warning(self._event, detail=detail, **self._what)
        else:
            log.info(f"{self._event}: over", **self._what)
