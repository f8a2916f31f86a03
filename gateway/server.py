"""Listens, says so, serves, and stops in order.

On SIGTERM or SIGINT: `/ready` says no, everything is served for `drain_seconds`, then no connection
is taken any more and running answers have `grace_seconds` to end. A second signal stops at once.
"""

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Iterator

import uvicorn

from chiasm import telemetry
from gateway.app import Readiness, create_app
from gateway.settings import GatewaySettings

# Above the idle limits of clients' pools, so that the client closes first.
_KEEP_ALIVE_SECONDS = 90
_BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """A server that leaves signals to its owner; `listening` is set once it takes connections."""

    def __init__(self, settings: GatewaySettings, readiness: Readiness | None = None) -> None:
        config = uvicorn.Config(
            create_app(settings, readiness),
            http="httptools",
            loop="none",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            # None waits for ever, and so would 0.
            timeout_graceful_shutdown=max(1, int(settings.grace_seconds)),
        )
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
    """Serves until a signal; returns the process's exit code. Raises OSError for a taken port."""
    readiness = Readiness()
    listener = listen(settings.host, settings.port)
    server = HttpServer(settings, readiness)
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
