"""Downloads from a real host that hangs, drips, lies and redirects."""

import asyncio
import contextlib
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import trustme

from chiasm.errors import ChiasmError, Reason
from gateway.fetch.download import DownloadLimits, Downloads
from gateway.fetch.policy import Address, Forbidden, UrlPolicy, listing
from tests.gateway.picture_host import MIB, PICTURE, PictureHost, picture_host

LIMITS = DownloadLimits(seconds=5, max_bytes=4 * MIB, redirects=3, at_once=8, at_once_of_a_host=8)


@dataclass
class Names:
    """Tells of each name one set of addresses after another, the last one for ever."""

    answers: dict[str, list[list[str]]]
    asked: list[str] = field(default_factory=list)

    async def addresses(self, host: str) -> Sequence[Address]:
        self.asked.append(host)
        sets = self.answers[host]
        found = sets.pop(0) if len(sets) > 1 else sets[0]
        return [ip_address(one) for one in found]


class Silence:
    """Never tells anything."""

    async def addresses(self, host: str) -> Sequence[Address]:
        await asyncio.sleep(3600)
        return []


@pytest_asyncio.fixture
async def host() -> AsyncIterator[PictureHost]:
    async with picture_host() as running:
        yield running


def downloads(
    *hosts: PictureHost,
    limits: DownloadLimits = LIMITS,
    names: Any = None,
    allow: str = "127.0.0.2,127.0.0.3",
    tls: ssl.SSLContext | None = None,
) -> Downloads:
    ports = frozenset({80, 443, *(host.port for host in hosts)})
    policy = UrlPolicy(allowed=listing(allow), ports=ports)
    return Downloads(policy, limits, names or Names({}), tls)


async def fetched(by: Downloads, url: str) -> bytes:
    return await by.fetch(by.policy.target(url), lambda count: None)


async def refusal(by: Downloads, url: str) -> ChiasmError:
    with pytest.raises(ChiasmError) as caught:
        await fetched(by, url)
    error = caught.value
    assert "secret-of-the-host" not in str(error)
    assert url not in str(error)
    return error


def code_of(error: ChiasmError) -> tuple[Reason, str | None]:
    return error.reason, error.metadata.get("code")


FAILED = (Reason.URL_FETCH_FAILED, "failed_to_download_image")
FORBIDDEN = (Reason.URL_FORBIDDEN, "invalid_image_url")
TOO_LARGE = (Reason.IMAGE_TOO_LARGE, "image_file_too_large")


# What arrives


@pytest.mark.parametrize("path", ["/ok", "/ok?x=%2C&y=a+b", "/crumbs", "/loop/1", "/loop/3"])
async def test_the_bytes_arrive_as_they_are(host: PictureHost, path: str) -> None:
    assert await fetched(downloads(host), host.url(path)) == PICTURE


async def test_what_the_host_is_told_names_nobody(host: PictureHost) -> None:
    by = downloads(host)
    await fetched(by, host.redirect(host.url("/ok/a%2Fb?x=%2C#part")) + "#mine")
    first, second = host.requests
    assert second.startswith("GET /ok/a%2Fb?x=%2C HTTP/1.1\r\n")
    for request in (first, second):
        names = {line.partition(":")[0].lower() for line in request.split("\r\n")[1:] if line}
        assert names == {"host", "accept", "accept-encoding", "user-agent", "connection"}
        assert "accept-encoding: identity" in request.lower()
    assert host.connections == 2


FETCH = """
import asyncio, sys
from gateway.fetch.download import DownloadLimits, Downloads
from gateway.fetch.lookup import SystemLookup
from gateway.fetch.policy import UrlPolicy, listing

async def main(url, port):
    policy = UrlPolicy(allowed=listing("127.0.0.2"), ports=frozenset({int(port)}))
    by = Downloads(policy, DownloadLimits(), SystemLookup(1))
    sys.stdout.buffer.write(await by.fetch(policy.target(url), lambda count: None))

asyncio.run(main(*sys.argv[1:]))
"""


async def test_proxies_and_credentials_of_the_environment_are_not_used(
    host: PictureHost, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine {host.address} login me password secret\n")
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FETCH, host.url("/ok"), str(host.port),
        stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2],
        env={**os.environ, **proxies, "NETRC": str(netrc)},
    )  # fmt: skip
    written, _ = await process.communicate()
    assert (process.returncode, written) == (0, PICTURE)
    assert "authorization" not in host.requests[0].lower()


async def test_a_name_is_looked_up_once_a_hop_and_its_own_address_dialled(
    host: PictureHost,
) -> None:
    names = Names({"pictures.example": [["127.0.0.2"]]})
    url = host.url("/loop/2", "pictures.example")
    assert await fetched(downloads(host, names=names), url) == PICTURE
    assert names.asked == ["pictures.example"] * 3
    assert f"host: pictures.example:{host.port}" in host.requests[0].lower()


async def test_another_address_of_a_name_is_tried_where_the_first_is_deaf(
    host: PictureHost,
) -> None:
    names = Names({"pictures.example": [["127.0.0.3", "127.0.0.2"]]})
    url = host.url("/ok", "pictures.example")
    assert await fetched(downloads(host, names=names), url) == PICTURE


# What may not be dialled


@dataclass
class Dialled:
    """The addresses that sockets of this process were connected to, and the names looked up."""

    addresses: list[Any] = field(default_factory=list)
    names: list[Any] = field(default_factory=list)


_watching: list[Dialled] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    for dialled in _watching:
        if event == "socket.connect":
            dialled.addresses.append(arguments[1])
        elif event == "socket.getaddrinfo":
            dialled.names.append(arguments[0])


sys.addaudithook(_watch)


@contextlib.contextmanager
def watched() -> Iterator[Dialled]:
    dialled = Dialled()
    _watching.append(dialled)
    try:
        yield dialled
    finally:
        _watching.remove(dialled)


async def test_the_watch_sees_what_is_dialled(host: PictureHost) -> None:
    with watched() as dialled:
        await fetched(downloads(host), host.url("/ok"))
    assert dialled.addresses == [(host.address, host.port)]


@pytest.mark.parametrize(
    "host_name",
    ["127.0.0.1", "169.254.169.254", "10.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "2130706433",
     "0x7f.1", "localhost", "127.0.0.1.", "me@127.0.0.2"],
)  # fmt: skip
async def test_a_forbidden_host_is_neither_looked_up_nor_dialled(host_name: str) -> None:
    async with picture_host("127.0.0.1") as inner:
        with watched() as dialled, pytest.raises(Forbidden):
            await fetched(downloads(inner), inner.url("/ok", host_name))
        assert (dialled.addresses, dialled.names, inner.connections) == ([], [], 0)


@pytest.mark.parametrize(
    "answer",
    [["127.0.0.1"], ["127.0.0.2", "127.0.0.1"], ["127.0.0.1", "127.0.0.2"], ["::1", "127.0.0.2"],
     ["::ffff:127.0.0.1"], ["fe80::1%lo"], ["64:ff9b::7f00:1"], []],
)  # fmt: skip
async def test_a_name_with_any_forbidden_address_is_not_dialled(answer: list[str]) -> None:
    async with picture_host("127.0.0.1") as inner:
        by = downloads(inner, names=Names({"pictures.example": [answer]}))
        with watched() as dialled:
            error = await refusal(by, inner.url("/ok", "pictures.example"))
        assert code_of(error) == FORBIDDEN
        assert (dialled.addresses, inner.connections) == ([], 0)


async def test_a_name_that_moves_to_a_forbidden_address_is_not_followed_there(
    host: PictureHost,
) -> None:
    async with picture_host("127.0.0.1") as inner:
        moving = [["127.0.0.2"], ["127.0.0.1"]]
        by = downloads(host, inner, names=Names({"pictures.example": moving}))
        url = host.url("/ok", "pictures.example")
        assert await fetched(by, url) == PICTURE
        assert code_of(await refusal(by, url)) == FORBIDDEN
        # Within one picture: the name moves between two hops.
        moving[:] = [["127.0.0.2"], ["127.0.0.1"]]
        assert code_of(await refusal(by, host.url("/loop/1", "pictures.example"))) == FORBIDDEN
        assert inner.connections == 0


async def test_no_resolver_can_make_it_dial_what_was_not_checked(host: PictureHost) -> None:
    """The name has one good address for whoever asks first, and bad ones for all who ask again."""
    names = Names({"pictures.example": [["127.0.0.2"], ["127.0.0.1"]]})
    with watched() as dialled:
        await fetched(downloads(host, names=names), host.url("/ok", "pictures.example"))
    assert dialled.addresses == [("127.0.0.2", host.port)]
    assert names.asked == ["pictures.example"]
    assert dialled.names == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_to_a_forbidden_place_is_not_followed(
    host: PictureHost, status: int
) -> None:
    async with picture_host("127.0.0.1") as inner:
        by = downloads(host, inner)
        for location in (inner.url("/ok"), f"//127.1:{inner.port}/", "file:///etc/passwd",
                         "http://169.254.169.254/", inner.url("/ok", "localhost")):  # fmt: skip
            error = await refusal(by, host.redirect(location, status))
            assert code_of(error) == FORBIDDEN
        assert inner.connections == 0


async def test_redirects_are_followed_up_to_the_limit(host: PictureHost) -> None:
    error = await refusal(downloads(host), host.url("/loop/4"))
    assert code_of(error) == FAILED
    assert "3 times" in error.message
    assert len(host.requests) == 4


# What fails


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/none", "status 404"),
        ("/status/500", "status 500"),
        ("/status/206", "status 206"),
        ("/status/302", "status 302"),
        ("/less", "broke off"),
        ("/packed/gzip", "compressed"),
        ("/packed/br", "compressed"),
        ("/headers", "not HTTP"),
        ("/noise/", "broke off"),
        ("/noise/00ff00ff0d0a0d0a", "not HTTP"),
        ("/noise/474946383961", "not HTTP"),
    ],
)
async def test_a_picture_that_does_not_arrive_says_why(
    host: PictureHost, path: str, told: str
) -> None:
    error = await refusal(downloads(host), host.url(path))
    assert code_of(error) == FAILED
    assert told in error.message


async def test_whatever_a_host_sends_ends_in_bytes_or_a_typed_error(host: PictureHost) -> None:
    whole = (
        b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nSet-Cookie: a=b\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"
    )
    plain = whole.replace(b"Transfer-Encoding: chunked", b"Content-Length: 15")
    moved = plain.replace(b"200 OK", b"302 Found").replace(b"Content-Type", b"Location")
    random = np.random.default_rng(11)
    by = downloads(host, limits=replace(LIMITS, seconds=1))
    ended: set[str] = set()
    for number in range(300):
        answer = bytearray((whole, plain, moved)[number % 3])
        for at in random.integers(0, len(answer), 1 + number % 3):
            answer[at] = random.integers(256)
        try:
            await fetched(by, host.url(f"/noise/{answer.hex()}"))
            ended.add("fetched")
        except ChiasmError as error:
            ended.add(str(error.reason))
    assert {"fetched", "URL_FETCH_FAILED"} <= ended
    assert ended <= {"fetched", "URL_FETCH_FAILED", "URL_FORBIDDEN", "IMAGE_INVALID",
                     "IMAGE_TOO_LARGE"}  # fmt: skip


async def test_a_host_that_refuses_connections_is_told_so(host: PictureHost) -> None:
    error = await refusal(downloads(host), host.url("/ok", "127.0.0.3"))
    assert code_of(error) == FAILED
    assert "cannot be reached" in error.message


@pytest.mark.parametrize("path", ["/hang", "/drip", "/huge"])
async def test_a_download_ends_at_its_deadline_however_it_goes_on(
    host: PictureHost, path: str
) -> None:
    quick = replace(LIMITS, seconds=1, max_bytes=1 << 40)
    began = time.monotonic()
    error = await refusal(downloads(host, limits=quick), host.url(path))
    assert 0.9 < time.monotonic() - began < 6
    assert code_of(error) == FAILED
    assert "within 1 seconds" in error.message
    await host.until(lambda: host.running == 0)  # and the connection with it


async def test_names_that_nobody_answers_for_end_at_the_deadline() -> None:
    quick = replace(LIMITS, seconds=1)
    error = await refusal(downloads(names=Silence(), limits=quick), "http://pictures.example/")
    assert code_of(error) == FAILED


async def test_no_bytes_are_an_empty_file(host: PictureHost) -> None:
    host.body = b""
    error = await refusal(downloads(host), host.url("/ok"))
    assert code_of(error) == (Reason.IMAGE_INVALID, "empty_image_file")


# Sizes


async def test_the_limit_of_bytes_is_exact(host: PictureHost) -> None:
    for path in ("/ok", "/crumbs"):
        fits = replace(LIMITS, max_bytes=len(PICTURE))
        assert await fetched(downloads(host, limits=fits), host.url(path)) == PICTURE
        short = replace(LIMITS, max_bytes=len(PICTURE) - 1)
        assert code_of(await refusal(downloads(host, limits=short), host.url(path))) == TOO_LARGE


async def test_a_stated_length_above_the_limit_is_refused_before_the_body(
    host: PictureHost,
) -> None:
    began = time.monotonic()
    assert code_of(await refusal(downloads(host), host.url("/huge"))) == TOO_LARGE
    assert time.monotonic() - began < 4


async def test_an_endless_body_is_cut_at_the_limit_with_memory_flat(host: PictureHost) -> None:
    by = downloads(host)
    before = psutil.Process().memory_info().rss
    for _ in range(4):
        assert code_of(await refusal(by, host.url("/endless"))) == TOO_LARGE
    await host.until(lambda: host.running == 0)
    assert host.sent_bytes < 4 * (4 + 16) * MIB  # what the sockets between hold, and no more
    assert psutil.Process().memory_info().rss - before < 40 * MIB


async def test_bytes_beyond_the_stated_length_are_never_read(host: PictureHost) -> None:
    by = downloads(host)
    before = psutil.Process().memory_info().rss
    # What follows at once may make it no answer in HTTP.
    with contextlib.suppress(ChiasmError):
        assert await fetched(by, host.url("/more")) == bytes(10)
    await host.until(lambda: host.running == 0)
    assert host.sent_bytes < 16 * MIB
    assert psutil.Process().memory_info().rss - before < 20 * MIB


async def test_endless_headers_are_cut(host: PictureHost) -> None:
    before = psutil.Process().memory_info().rss
    assert code_of(await refusal(downloads(host), host.url("/headers"))) == FAILED
    await host.until(lambda: host.running == 0)
    assert host.sent_bytes < 16 * MIB
    assert psutil.Process().memory_info().rss - before < 20 * MIB


async def test_each_byte_is_told_before_it_is_kept_and_a_refusal_ends_the_download(
    host: PictureHost,
) -> None:
    counts: list[int] = []
    by = downloads(host)
    await by.fetch(by.policy.target(host.url("/ok")), counts.append)
    assert sum(counts) == len(PICTURE)

    def full(count: int) -> None:
        raise ChiasmError(Reason.QUEUE_FULL, "No room.")

    with pytest.raises(ChiasmError) as caught:
        await by.fetch(by.policy.target(host.url("/endless")), full)
    assert caught.value.reason is Reason.QUEUE_FULL
    await host.until(lambda: host.running == 0)


# Many at once


async def test_places_are_bounded_and_those_who_wait_are_served_in_turn(
    host: PictureHost,
) -> None:
    by = downloads(host, limits=replace(LIMITS, at_once=3))
    host.waits_for = 3
    urls = [host.url("/together")] * 12
    assert await asyncio.gather(*(fetched(by, url) for url in urls)) == [PICTURE] * 12
    assert host.most_running == 3


async def test_who_finds_no_place_before_the_deadline_is_told_to_come_again(
    host: PictureHost,
) -> None:
    by = downloads(host, limits=replace(LIMITS, at_once=2, seconds=1.5))
    hanging = [asyncio.create_task(refusal(by, host.url("/hang"))) for _ in range(2)]
    await host.until(lambda: host.running == 2)
    late = [asyncio.create_task(refusal(by, host.url("/ok"))) for _ in range(3)]
    assert [code_of(error) for error in await asyncio.gather(*hanging)] == [FAILED] * 2
    for error in await asyncio.gather(*late, return_exceptions=True):
        # The first places come free as the last moments of these pass: all three are right.
        if isinstance(error, ChiasmError):
            assert error.reason in {Reason.QUEUE_FULL, Reason.URL_FETCH_FAILED}
            assert error.retry_after or error.reason is Reason.URL_FETCH_FAILED


async def test_a_slow_host_leaves_places_for_others(host: PictureHost) -> None:
    by = downloads(host, limits=replace(LIMITS, at_once=4, at_once_of_a_host=2, seconds=4))
    names = ("127.0.0.2", "127.0.0.3")
    async with picture_host(names[1]) as other:
        by.policy = replace(by.policy, ports=by.policy.ports | {other.port})
        slow = [asyncio.create_task(refusal(by, host.url("/drip"))) for _ in range(10)]
        await host.until(lambda: host.running == 2)
        began = time.monotonic()
        assert await fetched(by, other.url("/ok")) == PICTURE
        assert time.monotonic() - began < 3
        assert host.most_running == 2
        reasons = [error.reason for error in await asyncio.gather(*slow)]
    assert reasons.count(Reason.URL_FETCH_FAILED) >= 2
    assert set(reasons) <= {Reason.URL_FETCH_FAILED, Reason.QUEUE_FULL}


async def test_a_download_that_is_cancelled_closes_its_connection_and_frees_its_place(
    host: PictureHost,
) -> None:
    by = downloads(host, limits=replace(LIMITS, at_once=1))
    for path in ("/hang", "/drip", "/endless"):
        limits = asyncio.create_task(fetched(by, host.url(path)))
        await host.until(lambda: host.running == 1)
        limits.cancel()
        with pytest.raises((asyncio.CancelledError, ChiasmError)):
            await limits
        await host.until(lambda: host.running == 0)
        assert await fetched(by, host.url("/ok")) == PICTURE


# TLS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def serving(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*names).configure_cert(context)
    return context


async def test_certificates_are_checked_against_the_name_and_the_authorities(
    authority: trustme.CA,
) -> None:
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    names = Names({"pictures.example": [["127.0.0.2"]], "other.example": [["127.0.0.2"]]})
    async with picture_host(tls=serving(authority, "pictures.example")) as host:
        good = host.url("/ok", "pictures.example", "https")
        assert await fetched(downloads(host, names=names, tls=trusting), good) == PICTURE
        for by, name in (
            (downloads(host, names=names), "pictures.example"),  # no authority of the system
            (downloads(host, names=names, tls=trusting), "other.example"),
            (downloads(host, names=names, tls=trusting), "127.0.0.2"),
        ):
            error = await refusal(by, host.url("/ok", name, "https"))
            assert code_of(error) == FAILED
            assert "certificate" in error.message
        assert len(host.requests) == 1
