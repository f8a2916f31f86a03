"""The bytes behind a URL that the policy lets through.

Each hop looks its name up once, has every address checked, and dials nothing else: the connector
knows no other address, and the last step before a socket is made refuses all others. There is one
deadline for all of it, waiting included, and the bytes are counted as they come.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from chiasm.errors import ChiasmError, Reason
from gateway.fetch.lookup import Lookup
from gateway.fetch.policy import Address, Forbidden, Target, UrlPolicy

Take = Callable[[int], None]
"""Told of each count of bytes before they are kept; raises ChiasmError where there is no room."""

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_HEADERS: Final = {
    "accept": "image/*,*/*;q=0.5",
    "accept-encoding": "identity",
    "user-agent": "chiasm-gateway",
}
_CHUNK: Final = 1 << 16  # bytes that are read ahead of us
_RETRY_SECONDS: Final = 1.0


@dataclass(frozen=True)
class DownloadLimits:
    """Bounds on downloads. `seconds`: a whole one, redirects and waiting for a place included.

    `at_once` is the number of all, `at_once_of_a_host` of those from one host.
    """

    seconds: float = 10
    max_bytes: int = 20 << 20
    redirects: int = 5
    at_once: int = 64
    at_once_of_a_host: int = 16


class Downloads:
    """Fetches pictures, a bounded number at a time."""

    def __init__(
        self,
        policy: UrlPolicy,
        limits: DownloadLimits,
        lookup: Lookup,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.policy = policy
        self._limits = limits
        self._lookup = lookup
        self._tls = ssl.create_default_context() if tls is None else tls
        self._places = asyncio.Semaphore(limits.at_once)
        self._hosts = HostPlaces(limits.at_once_of_a_host)

    async def fetch(self, target: Target, take: Take) -> bytes:
        """The bytes at `target`. Raises ChiasmError without a field.

        URL_FORBIDDEN: it redirects or resolves to where it may not; URL_FETCH_FAILED;
        IMAGE_TOO_LARGE; QUEUE_FULL: no place was free in time.
        """
        began = False
        try:
            async with (
                asyncio.timeout(self._limits.seconds),
                self._hosts.place(target.host),
                self._places,
            ):
                began = True
                return await self._follow(target, take)
        except Forbidden as error:
            raise forbidden(error) from None
        except TimeoutError:
            raise (self._late() if began else _full()) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise failed(_told(error)) from error

    async def _follow(self, target: Target, take: Take) -> bytes:
        for _ in range(self._limits.redirects + 1):
            async with _get(target, await self._addresses(target), self._tls) as response:
                location = response.headers.get("location")
                if response.status not in _REDIRECTS or location is None:
                    return await self._read(response, take)
            target = self.policy.redirected(target, location)
        raise failed(f"it redirects more than {self._limits.redirects} times")

    async def _addresses(self, target: Target) -> Sequence[Address]:
        if target.address is not None:
            return [target.address]
        try:
            found = await self._lookup.addresses(target.host)
        except socket.gaierror as error:
            if error.errno == socket.EAI_AGAIN:
                raise failed("its name cannot be looked up now") from error
            found = []  # told as a name of private addresses is, so that nobody can tell which are
        self.policy.check_addresses(target, found)
        return found

    async def _read(self, response: aiohttp.ClientResponse, take: Take) -> bytes:
        if response.status != 200:
            raise failed(f"its server answered with status {response.status}")
        if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise failed("its server answered in a compressed form, which was not asked for")
        self._check_size(response.content_length or 0)
        data = bytearray()
        async for chunk in response.content.iter_any():
            self._check_size(len(data) + len(chunk))
            take(len(chunk))
            data += chunk
        if not data:
            text = "The file at the image URL has 0 bytes."
            raise ChiasmError(Reason.IMAGE_INVALID, text, metadata={"code": "empty_image_file"})
        return bytes(data)

    def _check_size(self, count: int) -> None:
        if count > self._limits.max_bytes:
            text = f"The file at the image URL has more than {self._limits.max_bytes} bytes; "
            metadata = {"code": "image_file_too_large"}
            raise ChiasmError(
                Reason.IMAGE_TOO_LARGE, text + "use a smaller one.", None, None, metadata
            )

    def _late(self) -> ChiasmError:
        return failed(f"it did not arrive within {self._limits.seconds:g} seconds")


class HostPlaces:
    """At most `limit` downloads from one host, so that a slow one leaves places for others."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @contextlib.asynccontextmanager
    async def place(self, host: str) -> AsyncIterator[None]:
        """A place for one download from `host`; waits for it."""
        places = self._join(host)
        try:
            async with places:
                yield
        finally:
            self._leave(host)

    def _join(self, host: str) -> asyncio.Semaphore:
        places, users = self._places.get(host, (asyncio.Semaphore(self._limit), 0))
        self._places[host] = places, users + 1
        return places

    def _leave(self, host: str) -> None:
        places, users = self._places.pop(host)
        if users > 1:
            self._places[host] = places, users - 1


class _Checked(AbstractResolver):
    """Tells the addresses that were checked, and no others."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host, host=str(one), port=port, family=_family(one), proto=0, flags=0
            )
            for one in self._addresses
        ]

    async def close(self) -> None:
        pass


def _socket_factory(addresses: Sequence[Address]) -> Callable[[Any], socket.socket]:
    """Makes sockets for `addresses` only: the last step before one is dialled."""

    def make(info: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, _, address = info
        if ip_address(address[0]) not in addresses:
            raise Forbidden
        return socket.socket(family, kind, protocol)

    return make


@contextlib.asynccontextmanager
async def _get(
    target: Target, addresses: Sequence[Address], tls: ssl.SSLContext
) -> AsyncIterator[aiohttp.ClientResponse]:
    """One request on a connection of its own: nothing of one caller's is left for another's."""
    connector = aiohttp.TCPConnector(
        resolver=_Checked(addresses),
        socket_factory=_socket_factory(addresses),
        use_dns_cache=False,
        force_close=True,
        ssl=tls,
    )
    async with (
        aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=_HEADERS,
            auto_decompress=False,
            trust_env=False,
            read_bufsize=_CHUNK,
        ) as session,
        session.get(target.url, allow_redirects=False) as response,
    ):
        yield response


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def forbidden(error: Forbidden) -> ChiasmError:
    """`error` for a caller."""
    metadata = {"code": "invalid_image_url"}
    return ChiasmError(Reason.URL_FORBIDDEN, error.message, metadata=metadata)


def failed(why: str) -> ChiasmError:
    """A download that failed; `why` goes on with "it" for the picture."""
    text = f"The picture at the image URL could not be fetched: {why}."
    metadata = {"code": "failed_to_download_image"}
    return ChiasmError(Reason.URL_FETCH_FAILED, text, metadata=metadata)


def _full() -> ChiasmError:
    text = "As many pictures are being fetched from URLs as may be; try again shortly."
    return ChiasmError(Reason.QUEUE_FULL, text, retry_after=_RETRY_SECONDS)


def _told(error: Exception) -> str:
    match error:
        case aiohttp.ClientSSLError() | ssl.SSLError():
            return "its server's certificate or TLS is not accepted"
        case aiohttp.ClientPayloadError() | aiohttp.ServerDisconnectedError():
            return "its server broke off, or sent what is against HTTP"
        case aiohttp.ClientConnectionError() | OSError():
            return "its server cannot be reached, or broke off"
        case _:
            return "its server answered with what is not HTTP"
