"""Channels under mutual TLS, whose connections always show the newest certificate.

gRPC keeps the certificate that a channel was opened with, so a channel here is a line of them: once
the files have changed, a new one is connected, new calls go there, and the old one is closed when
its last call has ended. A server's certificate must have an expected DNS name whatever address was
dialled. gRPC compares one name a channel, so several are tried in turn, the next when no server
that can be reached has the present one.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import grpc
import grpc.aio

from chiasm import telemetry
from chiasm.rpc.mtls import Material

Option = tuple[str, Any]
# Between two looks at a connection that is being made, at first and at most.
_LOOK_SECONDS, _MOST_LOOK_SECONDS = 0.02, 2.0
# For which a name is tried before the next.
_NAME_SECONDS: Final = 1.0
# Longest that calls may run on a channel whose certificate is not the newest.
_LAST_SECONDS: Final = 3600.0
_READY: Final = grpc.ChannelConnectivity.READY
_FAILING: Final = grpc.ChannelConnectivity.TRANSIENT_FAILURE


@dataclass(frozen=True)
class ClientTls:
    """What a client shows and expects.

    Attributes:
        latest: the files' newest usable state; asked at every call.
        names: DNS names of which a server's certificate must have one.
    """

    latest: Callable[[], Material]
    names: tuple[str, ...]


def _credentials(material: Material) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


def _expecting(name: str, options: Sequence[Option]) -> list[Option]:
    return [*options, ("grpc.ssl_target_name_override", name)]


class _Line:
    """One channel of gRPC's, with the number of its running calls."""

    def __init__(
        self, target: str, material: Material, name: int, tls: ClientTls, options: Sequence[Option]
    ) -> None:
        self.material, self.name = material, name
        self.channel = grpc.aio.secure_channel(
            target, _credentials(material), options=_expecting(tls.names[name], options)
        )
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begun(self, call: Any) -> None:
        self._running += 1
        self._idle.clear()
        call.add_done_callback(self._ended)

    def _ended(self, _: Any) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()

    async def close_when_idle(self) -> None:
        try:
            async with asyncio.timeout(_LAST_SECONDS):
                await self._idle.wait()
        except TimeoutError:
            telemetry.logger().warning("calls outlast their certificate", calls=self._running)
        finally:
            await self.channel.close()


class SecureChannel(grpc.aio.Channel):
    """See the module. Use and close it on one event loop."""

    def __init__(self, target: str, tls: ClientTls, options: Sequence[Option]) -> None:
        self._target, self._tls, self._options = target, tls, options
        self._line = self._opened(tls.latest(), 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._renewing: asyncio.Task[None] | None = None
        if len(tls.names) > 1:
            self._keep(self._try_names())

    def line(self) -> _Line:
        """Where a call that is made now goes."""
        newest = self._tls.latest()
        stale = newest is not self._line.material
        if stale and (self._renewing is None or self._renewing.done()):
            self._renewing = self._keep(self._renew(newest))
        return self._line

    def _opened(self, material: Material, name: int) -> _Line:
        return _Line(self._target, material, name, self._tls, self._options)

    async def _renew(self, material: Material) -> None:
        """Goes over to `material` once it connects, or the old one does not any more.

        So a certificate that peers do not take yet harms nobody whose connection works.
        """
        new, wait = self._opened(material, self._line.name), _LOOK_SECONDS
        try:
            while new.channel.get_state(try_to_connect=True) is not _READY:
                if self._line.channel.get_state() is not _READY:
                    break
                await asyncio.sleep(wait)
                wait = min(wait * 1.5, _MOST_LOOK_SECONDS)
                if self._tls.latest() is not material:
                    await new.channel.close()
                    return
        except BaseException:
            await new.channel.close()
            raise
        self._replace(new)

    async def _try_names(self) -> None:
        while True:
            await asyncio.sleep(_NAME_SECONDS)
            if self._line.channel.get_state() is _FAILING:
                name = (self._line.name + 1) % len(self._tls.names)
                self._replace(self._opened(self._tls.latest(), name))
                self._line.channel.get_state(try_to_connect=True)

    def _replace(self, new: _Line) -> None:
        old, self._line = self._line, new
        self._keep(old.close_when_idle())

    def _keep(self, work: Any) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, grace: float | None = None) -> None:
        """Closes at once, or after `grace` seconds for running calls."""
        tasks = tuple(self._tasks)
        for task in tasks:  # first, or one of them might open another channel
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._line.channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.line().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._line.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.line().channel.channel_ready()

    def unary_unary(self, method: str, *how: Any, **more: Any) -> Any:
        return self._counted("unary_unary", method, how, more)

    def unary_stream(self, method: str, *how: Any, **more: Any) -> Any:
        return self._counted("unary_stream", method, how, more)

    def stream_unary(self, method: str, *how: Any, **more: Any) -> Any:
        return self._counted("stream_unary", method, how, more)

    def stream_stream(self, method: str, *how: Any, **more: Any) -> Any:
        return self._counted("stream_stream", method, how, more)

    def _counted(self, kind: str, method: str, how: Any, more: Any) -> Callable[..., Any]:
        def begin(*request: Any, **call: Any) -> Any:
            line = self.line()
            begun = getattr(line.channel, kind)(method, *how, **more)(*request, **call)
            line.begun(begun)
            return begun

        return begin


class SecureSyncChannel(grpc.Channel):
    """The blocking form, for clients; safe to share between threads.

    A channel that was replaced ends with its last call: nothing else holds it.
    """

    def __init__(self, target: str, tls: ClientTls, options: Sequence[Option]) -> None:
        self._target, self._tls, self._options = target, tls, options
        self._gate = threading.Lock()
        self._material = tls.latest()
        self._channel = self._opened()

    def _opened(self) -> grpc.Channel:
        options = _expecting(self._tls.names[0], self._options)
        return grpc.secure_channel(self._target, _credentials(self._material), options=options)

    def _newest(self) -> grpc.Channel:
        newest = self._tls.latest()
        with self._gate:
            if newest is not self._material:
                self._material = newest
                self._channel = self._opened()
            return self._channel

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        self._newest().subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self._channel.unsubscribe(callback)

    def unary_unary(self, method: str, *how: Any, **more: Any) -> Any:
        return self._newest().unary_unary(method, *how, **more)

    def unary_stream(self, method: str, *how: Any, **more: Any) -> Any:
        return self._newest().unary_stream(method, *how, **more)

    def stream_unary(self, method: str, *how: Any, **more: Any) -> Any:
        return self._newest().stream_unary(method, *how, **more)

    def stream_stream(self, method: str, *how: Any, **more: Any) -> Any:
        return self._newest().stream_stream(method, *how, **more)

    def close(self) -> None:
        """Closes at once; running calls are cancelled."""
        with self._gate:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
