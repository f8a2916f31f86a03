"""A web server of pictures on a real socket that does what a path says, also against HTTP."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

PICTURE = (Path(__file__).parents[1] / "odd_images" / "p_trns_single.png").read_bytes()
HTML = b"<!doctype html><title>secret-of-the-host</title>"
MIB = 1 << 20


@dataclass
class PictureHost:
    """What came to the server. Change `waits_for` or `body` at any time."""

    address: str
    port: int = 0
    connections: int = 0
    requests: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    sent_bytes: int = 0
    waits_for: int = 0
    body: bytes = PICTURE
    serving: set[asyncio.Task[None]] = field(default_factory=set)
    came: asyncio.Condition = field(default_factory=asyncio.Condition)

    def redirect(self, location: str, status: int = 302) -> str:
        """The URL of a redirect to `location`."""
        return self.url(f"/to/{status}/{quote(location, safe='')}")

    def url(self, path: str, host: str | None = None, scheme: str = "http") -> str:
        return f"{scheme}://{host or self.address}:{self.port}{path}"

    async def until(self, true: Callable[[], bool]) -> None:
        """Waits until something that is told here is true."""
        async with asyncio.timeout(10), self.came:
            await self.came.wait_for(true)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)
        try:
            await self._serve(reader, writer)
            writer.close()
            await writer.wait_closed()
        except (ConnectionError, asyncio.CancelledError):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head.decode("latin-1"))
            await self._tell(1)
            path = head.split(b" ")[1].partition(b"?")[0].decode()
            await self._unless_gone(unquote(path), reader, writer)
            await self._tell(-1)

    async def _unless_gone(
        self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        answering = asyncio.create_task(self._answer(path, reader, writer))
        leaving = asyncio.create_task(reader.read())
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        left = leaving.done()
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)
        if left:
            writer.transport.abort()

    async def _tell(self, more: int) -> None:
        async with self.came:
            self.running += more
            self.most_running = max(self.most_running, self.running)
            self.came.notify_all()

    async def _answer(
        self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        name, _, rest = path.removeprefix("/").partition("/")
        await getattr(self, f"_{name}", self._missing)(rest, reader, writer)

    async def _missing(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await _whole(writer, HTML, "text/html", "404 Not Found")

    async def _ok(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await _whole(writer, self.body)

    async def _named(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """The file of that name among the odd pictures."""
        file = Path(__file__).parents[1] / "odd_images" / Path(rest).name
        await _whole(writer, file.read_bytes(), "application/octet-stream")

    async def _status(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await _whole(writer, HTML, "text/html", f"{rest} Told")

    async def _html(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await _whole(writer, HTML, rest.replace("-", "/"))

    async def _together(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answers nobody before `waits_for` have asked."""
        await self.until(lambda: self.most_running >= self.waits_for)
        await _whole(writer, self.body)

    async def _to(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Redirects; `rest` is a status, a slash and the whole location."""
        status, _, location = rest.partition("/")
        more = f"location: {location}\r\nset-cookie: left=here\r\n"
        await _whole(writer, b"", "text/plain", f"{status} Moved", more)

    async def _loop(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Redirects `rest` times, then gives the picture."""
        left = int(rest)
        if left == 0:
            await _whole(writer, self.body)
        else:
            more = f"location: /loop/{left - 1}\r\n"
            await _whole(writer, b"", "text/plain", "302 Found", more)

    async def _hang(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await asyncio.sleep(3600)

    async def _drip(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """A byte every half second."""
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        for byte in self.body[:1000]:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.5)

    async def _endless(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Chunks for as long as somebody reads, up to a gigabyte."""
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        for _ in range(1 << 14):
            writer.write(chunk)
            await writer.drain()
            self.sent_bytes += len(chunk)

    async def _crumbs(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """The picture in chunks of one byte."""
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in self.body) + b"0\r\n\r\n")
        await writer.drain()

    async def _more(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """States 10 bytes and sends a gigabyte, if somebody reads it."""
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n")
        for _ in range(1 << 14):
            writer.write(bytes(1 << 16))
            await writer.drain()
            self.sent_bytes += 1 << 16

    async def _less(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """States a byte more than it sends."""
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(self.body) + 1}\r\n\r\n"
        writer.write(head.encode() + self.body)
        await writer.drain()

    async def _huge(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """States ten gigabytes and sends none."""
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10000000000\r\n\r\n")
        await asyncio.sleep(3600)

    async def _packed(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await _whole(writer, b"\x1f\x8b" + bytes(100), more=f"content-encoding: {rest}\r\n")

    async def _headers(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Header after header."""
        writer.write(b"HTTP/1.1 200 OK\r\n")
        for number in range(1 << 16):
            writer.write(f"x-{number}: {'x' * 1000}\r\n".encode())
            await writer.drain()
            self.sent_bytes += 1000

    async def _noise(
        self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(bytes.fromhex(rest))
        await writer.drain()


@asynccontextmanager
async def picture_host(
    address: str = "127.0.0.2", tls: ssl.SSLContext | None = None
) -> AsyncIterator[PictureHost]:
    """A host on a free port of `address`, an address of this machine."""
    host = PictureHost(address)
    server = await asyncio.start_server(host.serve, address, 0, ssl=tls)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()
        for task in host.serving.copy():
            task.cancel()
        await asyncio.gather(*host.serving, return_exceptions=True)


async def _whole(
    writer: asyncio.StreamWriter,
    body: bytes,
    kind: str = "image/png",
    status: str = "200 OK",
    more: str = "",
) -> None:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{more}\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
