"""Listens, says so, serves, and stops in order.

On SIGTERM or SIGINT: `/ready` says no, everything is served for `drain_seconds`, then no connection
is taken any more and running answers have `grace_seconds` to end. A second signal stops at once.
"""

import asyncio
import contextlib
import json
import resource
import signal
import socket
from collections.abc import Iterator

import uvicorn

from chiasm import telemetry
from gateway.app import Readiness, create_app
from gateway.http.connection import Connection, ConnectionLimits, ServingConfig
from gateway.http.tls import Certificate
from gateway.settings import GatewaySettings

_BACKLOG = 2048
# Open files beside the callers' connections: those to services and to servers of pictures, logs.
_OTHER_FILES = 512


class HttpServer(uvicorn.Server):
    """A server that leaves signals to its owner; `listening` is set once it takes connections.

    Raises KeysFileError, TlsFileError or MtlsFileError.
    """

    def __init__(self, settings: GatewaySettings, readiness: Readiness | None = None) -> None:
        config = ServingConfig(
            create_app(settings, readiness),
            http=Connection,
            loop="none",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=settings.idle_timeout_seconds,
            # None waits for ever, and so would 0.
            timeout_graceful_shutdown=max(1, int(settings.grace_seconds)),
        )
        config.connection_limits = _limits(settings)
        super().__init__(config)
        self._certificate = _certificate(settings)
        self.listening = asyncio.Event()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        if self._certificate is None:
            await super().serve(sockets)
            return
        following = asyncio.create_task(self._certificate.follow())
        try:
            await super().serve(sockets)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._certificate is not None:
            self.config.ssl = self._certificate.context
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _certificate(settings: GatewaySettings) -> Certificate | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificate(settings.tls_cert, settings.tls_key)


def _limits(settings: GatewaySettings) -> ConnectionLimits:
    return ConnectionLimits(
        header_bytes=settings.max_header_bytes,
        header_count=settings.max_headers,
        header_seconds=settings.header_timeout_seconds,
        idle_seconds=settings.idle_timeout_seconds,
        connections=settings.max_connections,
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError if the address is taken or not of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, or asyncio leaves its accepted sockets to delay each token by 40 ms (Nagle).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


async def run(settings: GatewaySettings) -> int:
    """Serves until a signal; returns the process's exit code.

    Raises OSError for a taken port, KeysFileError, TlsFileError, MtlsFileError.
    """
    readiness = Readiness()
    _allow_files(settings.max_connections + _OTHER_FILES)
    listener = listen(settings.host, settings.port)
    server = HttpServer(settings, readiness)
    if settings.keys_file is None:
        telemetry.logger().warning("open to whoever reaches it; API keys come with --keys-file")
    signals: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    serving = asyncio.create_task(server.serve([listener]))
    stopping = asyncio.create_task(_stop_on_signal(server, readiness, signals, settings))
    announcing = asyncio.create_task(_announce(server, listener.getsockname()[1]))
    try:
        await serving
    finally:
        stopping.cancel()
        announcing.cancel()
        await asyncio.gather(stopping, announcing, return_exceptions=True)
    return 0 if server.started else 1


def _allow_files(count: int) -> None:
    """Raises the process's limit of open files to `count`, or as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < count:
        text = "fewer files may be open than --max-connections needs; raise the limit (ulimit -n)"
        telemetry.logger().warning(text, files=most)


async def _announce(server: HttpServer, port: int) -> None:
    await server.listening.wait()
    print(json.dumps({"event": "ready", "service": "gateway", "port": port}), flush=True)


async def _stop_on_signal(
    server: HttpServer,
    readiness: Readiness,
    signals: "asyncio.Queue[str]",
    settings: GatewaySettings,
) -> None:
    telemetry.logger().info("draining", cause=await signals.get())
    readiness.draining = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(settings.drain_seconds):
            await signals.get()
            server.force_exit = True
    server.should_exit = True
    await signals.get()
    server.force_exit = True
