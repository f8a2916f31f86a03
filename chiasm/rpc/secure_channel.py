"""Channels under mutual TLS, whose connections always show the newest certificate.

gRPC keeps the certificate that a channel was opened with, so once the files have changed a new one
is connected and replaces it (`lined_channel`). A server's certificate must have an expected DNS
name whatever address was dialled. gRPC compares one name a channel, so several are tried in turn,
the next when no server that can be reached has the present one.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import grpc
import grpc.aio

from chiasm.rpc.lined_channel import LAST_SECONDS, Line, LinedChannel, Option
from chiasm.rpc.mtls import Material

# Between two looks at a connection that is being made, at first and at most.
_LOOK_SECONDS, _MOST_LOOK_SECONDS = 0.02, 2.0
# For which a name is tried before the next.
_NAME_SECONDS: Final = 1.0
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


class _Line(Line):
    """A channel with the certificate, and the number of the name, that it was opened with."""

    def __init__(self, channel: grpc.aio.Channel, material: Material, name: int) -> None:
        super().__init__(channel)
        self.material, self.name = material, name


class SecureChannel(LinedChannel[_Line]):
    """See the module. Use and close it on one event loop."""

    def __init__(self, target: str, tls: ClientTls, options: Sequence[Option]) -> None:
        self._target, self._tls, self._options = target, tls, options
        self._renewing: asyncio.Task[None] | None = None
        super().__init__(self._opened(tls.latest(), 0))
        if len(tls.names) > 1:
            self.keep(self._try_names())

    def anew(self) -> _Line:
        return self._opened(self._tls.latest(), self._line.name)

    def line(self) -> _Line:
        newest = self._tls.latest()
        stale = newest is not self._line.material
        if stale and (self._renewing is None or self._renewing.done()):
            self._renewing = self.keep(self._renew(newest))
        return super().line()

    def _opened(self, material: Material, name: int) -> _Line:
        options = _expecting(self._tls.names[name], self._options)
        opened = grpc.aio.secure_channel(self._target, _credentials(material), options=options)
        return _Line(opened, material, name)

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
        self.replace(new)

    async def _try_names(self) -> None:
        while True:
            await asyncio.sleep(_NAME_SECONDS)
            if self._line.channel.get_state() is _FAILING:
                name = (self._line.name + 1) % len(self._tls.names)
                self.replace(self._opened(self._tls.latest(), name))


class SecureSyncChannel(grpc.Channel):
    """The blocking form, for clients; safe to share between threads.

    A channel that was replaced serves the calls that run on it for at most an hour.
    """

    def __init__(self, target: str, tls: ClientTls, options: Sequence[Option]) -> None:
        self._target, self._tls, self._options = target, tls, options
        self._gate = threading.Lock()
        self._material = tls.latest()
        self._channel = self._opened()
        # Since when (monotonic seconds) which channel gets no new calls, oldest first.
        self._replaced: deque[tuple[float, grpc.Channel]] = deque()

    def _opened(self) -> grpc.Channel:
        options = _expecting(self._tls.names[0], self._options)
        return grpc.secure_channel(self._target, _credentials(self._material), options=options)

    def _newest(self) -> grpc.Channel:
        newest = self._tls.latest()
        with self._gate:
            if newest is not self._material:
                self._material = newest
                self._replaced.append((time.monotonic(), self._channel))
                self._channel = self._opened()
                self._close_oldest()
            return self._channel

    def _close_oldest(self) -> None:
        while time.monotonic() - self._replaced[0][0] > LAST_SECONDS:
            self._replaced.popleft()[1].close()

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
            for _, channel in self._replaced:
                channel.close()
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
