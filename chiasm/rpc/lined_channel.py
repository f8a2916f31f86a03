"""A channel that is opened anew under its callers: new calls go there, running ones come to an end.

A channel of gRPC's that cannot reach anybody asks for the name's addresses again only after pauses
that grow to two minutes (https://github.com/grpc/grpc/blob/master/doc/connection-backoff.md; the
channel arguments bound those of connections, not those of names). A service that comes late would
be found that much later, so a channel that has failed for some seconds is replaced: a new one asks
at once.
"""

import asyncio
import time
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import grpc
import grpc.aio

from chiasm import telemetry

Option = tuple[str, Any]
# For which a channel may reach nobody before it is opened anew.
FAILING_SECONDS: Final = 5.0
# Longest that calls may run on a channel that was replaced.
LAST_SECONDS: Final = 3600.0
_FAILING: Final = grpc.ChannelConnectivity.TRANSIENT_FAILURE


class Line:
    """One channel of gRPC's, with the number of its running calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._failing_since: float | None = None

    def begun(self, call: Any) -> None:
        """Counts `call` until it is done."""
        self._running += 1
        self._idle.clear()
        call.add_done_callback(self._ended)

    def _ended(self, _: Any) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()

    def has_failed(self, seconds: float) -> bool:
        """Whether it has reached nobody at any look of the last `seconds`."""
        if self.channel.get_state() is not _FAILING:
            self._failing_since = None
            return False
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        return now - self._failing_since >= seconds

    async def close_when_idle(self) -> None:
        """Closes after the last running call, or after an hour."""
        try:
            async with asyncio.timeout(LAST_SECONDS):
                await self._idle.wait()
        except TimeoutError:
            telemetry.logger().warning(
                "calls outlast their channel by an hour", calls=self._running
            )
        finally:
            await self.channel.close()


AnyLine = TypeVar("AnyLine", bound=Line)


class LinedChannel(grpc.aio.Channel, Generic[AnyLine], metaclass=ABCMeta):
    """See the module. Use and close it on one event loop."""

    def __init__(self, first: AnyLine) -> None:
        self._line = first
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def anew(self) -> AnyLine:
        """A channel like the present one, whose names and connections nobody has asked for yet."""

    def line(self) -> AnyLine:
        """Where a call that is made now goes."""
        if self._line.has_failed(FAILING_SECONDS):
            self.replace(self.anew())
        return self._line

    def replace(self, new: AnyLine) -> None:
        """New calls go to `new`; the present channel is closed when its last call has ended."""
        old, self._line = self._line, new
        new.channel.get_state(try_to_connect=True)
        self.keep(old.close_when_idle())

    def keep(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Runs `work` until it ends or the channel is closed."""
        task = asyncio.create_task(work)
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


class PlainChannel(LinedChannel[Line]):
    """See the module; without TLS."""

    def __init__(self, target: str, options: Sequence[Option]) -> None:
        self._target, self._options = target, options
        super().__init__(self.anew())

    def anew(self) -> Line:
        return Line(grpc.aio.insecure_channel(self._target, options=self._options))
