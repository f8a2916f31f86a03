"""Which encoders there are: `host:port`, every address of a DNS name, or the lines of a file.

    host:port             one encoder, for good
    dns:///name:port      every address of the name, looked up again every few seconds
    file:///path          one host:port a line; `#` begins a comment; read again when it changes

What cannot be looked up or read at the moment leaves things as they were: encoders that are really
gone fail their probes, and an address that now belongs to something else fails the identity check,
whereas a resolver that stumbles must not take a healthy fleet away. For the same reason a name
without addresses (NXDOMAIN, or none of a service's replicas ready) removes nobody: with nobody
left to answer, a kept address costs a probe now and then and no request, and when all replicas
stumble over one health check the connections still work. A file that is there and lists nobody
does remove everybody.
"""

import asyncio
import contextlib
import ipaddress
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from chiasm import telemetry

DNS, FILE = "dns:///", "file:///"
FORMS = "host:port, dns:///name:port or file:///path"
_DNS_SECONDS, _FILE_SECONDS = 2.0, 1.0
# Then a look counts as failed. The call itself goes on until the system gives up.
_PATIENCE_SECONDS = 5.0
# Who saves a file empties it first and then writes: a change counts once it has lasted so long.
_SETTLE_SECONDS = 0.1
_FILE_BYTES = 1 << 20
_MOST_LINES_TOLD = 20
# Host names of RFC 1123, with the underscore that container networks allow, perhaps rooted.
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*\.?", re.I | re.A)
_BRACKETED = re.compile(r"\[([0-9a-f:.]+(?:%[\w.-]+)?)\]", re.I | re.A)

Found = frozenset[str]
# The IP addresses of a host; may block; raises OSError. The system's resolver, or another.
Resolve = Callable[[str], Sequence[str]]
T = TypeVar("T")


class Discovery(Protocol):
    """Names the encoders of a fleet."""

    def addresses(self) -> AsyncIterator[Found]:
        """The set of `host:port`, at once and after each change. Never raises, never ends."""
        ...


def check_target(target: str) -> None:
    """Raises ValueError, saying how to mend it, for a target of none of the three forms."""
    if target.startswith(FILE):
        if target == FILE or "\0" in target:
            raise ValueError(f"{target!r} names no file; write file:///path")
        return
    if "://" in target and not target.startswith(DNS):
        raise ValueError(f"{target!r} is none of {FORMS}")
    try:
        split_address(target.removeprefix(DNS))
    except ValueError as error:
        raise ValueError(f"{target!r}: {error}; write {FORMS}") from None


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `name:port`, `v4:port` or `[v6]:port`; the host in its one usual spelling.

    Raises ValueError.
    """
    host, _, port = address.rpartition(":")
    if not host:
        raise ValueError("it has no host or no port")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError("the port is a number from 1 to 65535")
    return _usual_host(host), int(port)


def _usual_host(host: str) -> str:
    if host.startswith("["):
        inner = _BRACKETED.fullmatch(host)
        try:
            return str(ipaddress.IPv6Address(inner[1] if inner else ""))
        except ValueError:
            raise ValueError("what stands in brackets is an IPv6 address") from None
    if ":" in host:
        raise ValueError("an IPv6 address stands in brackets, [::1]:50061")
    if not _NAME.fullmatch(host):
        raise ValueError("the host is a name of letters, digits, hyphens and dots, or an address")
    if host.rstrip(".").rpartition(".")[2].isdigit():
        return _usual_v4(host)
    return host.lower()


def _usual_v4(host: str) -> str:
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        raise ValueError("an IPv4 address is four numbers from 0 to 255") from None


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def addresses_of(host: str) -> list[str]:
    """By the system's resolver, so that hosts files and search domains count. May block for long.

    A replica that is reachable over IPv4 and IPv6 is still one: only addresses of the family that
    the system would try first (RFC 6724) are given. Raises OSError.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(place[0]) for family, _, _, _, place in found if family == found[0][0]]


def discovery(
    targets: Sequence[str],
    *,
    dns_seconds: float = _DNS_SECONDS,
    file_seconds: float = _FILE_SECONDS,
    patience_seconds: float = _PATIENCE_SECONDS,
    resolve: Resolve = addresses_of,
) -> Discovery:
    """The union of all `targets`, each as `check_target` takes them; else ValueError.

    `dns_seconds` and `file_seconds` are the time between two looks; a look that takes longer than
    `patience_seconds` has failed. `resolve` is called in a thread, one call at a time for a name.
    """
    fixed: set[str] = set()
    looks: list[_Look] = []
    for target in targets:
        check_target(target)
        if target.startswith(FILE):
            path = Path(target.removeprefix("file://"))
            looks.append(_Look(_FileLook(path, patience_seconds), file_seconds))
        elif target.startswith(DNS):
            host, port = split_address(target.removeprefix(DNS))
            looks.append(_Look(_NameLook(host, port, resolve, patience_seconds), dns_seconds))
        else:
            fixed.add(_address(*split_address(target)))
    return _Union(frozenset(fixed), looks)


class _Union:
    def __init__(self, fixed: Found, looks: "Sequence[_Look]") -> None:
        self._fixed = fixed
        self._looks = looks

    async def addresses(self) -> AsyncIterator[Found]:
        told: Found | None = None
        changed = asyncio.Event()
        tasks = [asyncio.create_task(look.repeat(changed)) for look in self._looks]
        try:
            while True:
                now = self._fixed.union(*(look.found for look in self._looks))
                # At first without waiting: what is fixed need not wait for a slow name.
                if now != told:
                    told = now
                    yield told
                await changed.wait()
                changed.clear()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Look:
    """One source that is asked again every `seconds`; remembers its last answer."""

    def __init__(self, ask: Callable[[], Awaitable[Found | None]], seconds: float) -> None:
        self.found: Found = frozenset()
        self._ask = ask
        self._seconds = seconds
        self._fault = ""

    async def repeat(self, changed: asyncio.Event) -> None:
        while True:
            before = self.found
            await self._again()
            if self.found != before:
                changed.set()
            await asyncio.sleep(self._seconds)

    async def _again(self) -> None:
        try:
            found = await self._ask()
        except Exception as error:
            if repr(error) != self._fault:
                telemetry.logger().exception("fault", detail="a look for encoders")
            self._fault = repr(error)
            return
        self._fault = ""
        if found is not None:
            self.found = found


class _NameLook:
    def __init__(self, host: str, port: int, resolve: Resolve, patience: float) -> None:
        self._port = port
        self._resolving = _Aside(lambda: resolve(host), patience)
        self._trouble = _Trouble("encoders' name cannot be looked up", name=host)

    async def __call__(self) -> Found | None:
        try:
            hosts = await self._resolving.result()
        except (OSError, UnicodeError) as error:
            self._trouble.tell(_words(error))
            return None
        self._trouble.tell("" if hosts else "it has no address")
        return frozenset(_address(host, self._port) for host in hosts) or None


class _FileLook:
    def __init__(self, path: Path, patience: float) -> None:
        self._reading = _Aside(lambda: _content(path), patience)
        self._taken: str | None = None
        self._trouble = _Trouble("encoders' file cannot be read", path=str(path))
        self._bad_lines = _Trouble(
            "encoders' file has lines that are not host:port", path=str(path)
        )

    async def __call__(self) -> Found | None:
        try:
            content = await self._settled()
        except (OSError, ValueError) as error:
            self._trouble.tell(_words(error))
            return None
        self._trouble.tell("")
        return None if content is None else self._take(content)

    async def _settled(self) -> str | None:
        content = await self._reading.result()
        if content == self._taken:
            return None
        await asyncio.sleep(_SETTLE_SECONDS)
        return content if await self._reading.result() == content else None

    def _take(self, content: str) -> Found:
        self._taken = content
        found, bad = parse_lines(content)
        told = ", ".join(map(str, bad[:_MOST_LINES_TOLD]))
        more = " and more" if len(bad) > _MOST_LINES_TOLD else ""
        self._bad_lines.tell(f"ignored: lines {told}{more}" if bad else "")
        return found


def _content(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(_FILE_BYTES + 1)
    if len(data) > _FILE_BYTES:
        raise ValueError(f"it has more than {_FILE_BYTES} bytes")
    return data.decode("utf-8-sig", "replace")


def parse_lines(content: str) -> tuple[Found, list[int]]:
    """The addresses of a file's lines, and the numbers of the lines that are none."""
    found, bad = set(), []
    for number, line in enumerate(content.split("\n"), 1):
        address = line.partition("#")[0].strip()
        if not address:
            continue
        try:
            found.add(_address(*split_address(address)))
        except ValueError:
            bad.append(number)
    return frozenset(found), bad


def _words(error: Exception) -> str:
    said = getattr(error, "strerror", None) or str(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


class _Aside(Generic[T]):
    """A call that may block, in a thread beside the event loop, one at a time.

    A call that hangs holds its one thread and nobody else: whoever asks meanwhile waits for that
    call, and the process ends without it. (A pool's threads would be used up by calls that hang,
    and are waited for at exit.)
    """

    def __init__(self, call: Callable[[], T], patience: float) -> None:
        self._call = call
        self._patience = patience
        self._running: Future[T] | None = None
        self._ended = asyncio.Event()

    async def result(self) -> T:
        """What the call returns or raises; TimeoutError when it takes too long."""
        running = self._running = self._running or self._begin()
        async with asyncio.timeout(self._patience):
            await self._ended.wait()
        if self._running is running:
            self._running = None
        return running.result()

    def _begin(self) -> Future[T]:
        future: Future[T] = Future()
        self._ended.clear()
        run = threading.Thread(
            target=self._run,
            args=(future, asyncio.get_running_loop()),
            name="look for encoders",
            daemon=True,
        )
        run.start()
        return future

    def _run(self, future: Future[T], loop: asyncio.AbstractEventLoop) -> None:
        try:
            future.set_result(self._call())
        except BaseException as error:
            future.set_exception(error)
        # A closed loop, which raises, has nobody who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._ended.set)


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
