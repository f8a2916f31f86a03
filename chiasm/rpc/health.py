"""What a process says of itself by gRPC's health service, on its main port and on one of its own.

The names "" and the service's own mean readiness; `live` means that the process is worth keeping.
The port of its own (`--health-port`) is plaintext and serves nothing else: who probes needs no
certificate and learns nothing but this.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

LIVE: Final = "live"
# Watchers of one server; each connection of a client of ours is one.
MAIN_WATCHES: Final = 8192
# Whoever reaches the plaintext port may watch, so few.
PROBE_WATCHES: Final = 32

Status = health_pb2.HealthCheckResponse


class Health:
    """The state that probes ask for; use it on one event loop. It begins as live and not ready."""

    def __init__(self, service: str) -> None:
        self._names = ("", service)
        self._live = True
        self._ready = False
        self._changed = asyncio.Event()

    def set_ready(self, ready: bool) -> None:
        self._ready = ready
        self._tell()

    def give_up(self) -> None:
        """The process is not worth keeping any more."""
        self._live = self._ready = False
        self._tell()

    def status(self, name: str) -> "health_pb2.HealthCheckResponse.ServingStatus":
        """SERVICE_UNKNOWN for a name that is none of the three."""
        if name != LIVE and name not in self._names:
            return Status.SERVICE_UNKNOWN
        well = self._live if name == LIVE else self._ready
        return Status.SERVING if well else Status.NOT_SERVING

    async def changed(self) -> None:
        """Waits for the next change of any state."""
        await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers from `health`, with at most `watches` watchers at once.

    Unlike that of the package grpcio-health-checking, where the end of one watcher of a name
    leaves the others without news.
    """

    def __init__(self, health: Health, watches: int) -> None:
        self._health = health
        self._left = watches

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        status = self._health.status(request.service)
        if status == Status.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "No such service here.")
        return Status(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        if self._left <= 0:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Too many watchers.")
        self._left -= 1
        try:
            await self._tell_changes(request.service, context)
        finally:
            self._left += 1

    async def _tell_changes(self, name: str, context: Any) -> None:
        told: int | None = None
        while True:
            status = self._health.status(name)
            if status != told:
                told = status
                await context.write(Status(status=status))
                continue  # it may have changed while that was written
            await self._health.changed()


@asynccontextmanager
async def health_port(health: Health, host: str, port: int | None) -> AsyncIterator[int | None]:
    """Serves `health` in plaintext while open: the port (0 takes a free one), None for none.

    Raises OSError if the port is taken.
    """
    if port is None:
        yield None
        return
    server = grpc.aio.server(options=_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(health, PROBE_WATCHES), server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:
        raise OSError(f"cannot listen on {host}:{port} (--health-port): is it taken?") from None
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


_OPTIONS: Final[list[tuple[str, Any]]] = [
    # A request has the name of a service in it and nothing else.
    ("grpc.max_receive_message_length", 4096),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.so_reuseport", 0),
]
