"""Runs the processes of a plan together: start, wait until healthy, work, stop in order.

    code = asyncio.run(supervise(plan, job, limits, show))

`job(plan)` runs once all parts are healthy. Whatever ends first decides: the job, a part that dies,
a part that is not ready in time, or a signal. Then everything is stopped, the lowest rank first.
With a `Backoff` a part that dies after all were healthy is started again instead.
"""

import asyncio
import contextlib
import http.client
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from chiasm.cli.part import Part, Sink
from chiasm.cli.plan import Plan
from chiasm.cli.restart import Backoff, Keeper

Job = Callable[[Plan], Awaitable[int]]
Show = Callable[[str], None]
T = TypeVar("T")
_HEALTH_INTERVAL = 0.05
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A part that dies breaks its neighbours' calls a moment before its own end is seen.
_DEATH_NOTICE_SECONDS = 0.5


@dataclass(frozen=True)
class Limits:
    """Longest times in seconds: until all is healthy, and of each part's stop."""

    ready: float
    stop: float


class PartFailed(Exception):
    """A part died or was not ready in time; the text says which and why."""


class Interrupted(Exception):
    """A person or the system asked for the stop."""


class Signals:
    """The signals that ask for a stop, while open: the first politely, the second at once."""

    def __init__(self) -> None:
        self._received: asyncio.Queue[signal.Signals] = asyncio.Queue()

    async def next(self) -> signal.Signals:
        return await self._received.get()

    @contextmanager
    def watched(self) -> Any:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._received.put_nowait, number)
        try:
            yield self
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)


async def supervise(
    plan: Plan,
    job: Job,
    limits: Limits,
    show: Show,
    sink: Sink,
    restart: Backoff | None = None,
) -> int:
    """Runs `job` over the started plan; returns its result.

    Raises PartFailed or Interrupted. In each case all processes are gone afterwards.
    """
    signals = Signals()
    with signals.watched():
        work = _run(plan, job, limits, show, sink, signals, restart)
        return await _until_signal(work, signals)


async def _until_signal(work: Coroutine[Any, Any, int], signals: Signals) -> int:
    task, asked = asyncio.create_task(work), asyncio.create_task(signals.next())
    await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        asked.cancel()
        return task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    raise Interrupted(asked.result().name)


async def _run(
    plan: Plan,
    job: Job,
    limits: Limits,
    show: Show,
    sink: Sink,
    signals: Signals,
    restart: Backoff | None,
) -> int:
    async with _started(plan, limits, show, sink, signals) as parts:
        await _until_death(parts, _healthy(parts, plan, limits, show))
        if restart is None:
            return await _until_death(parts, job(plan))
        return await _until_hopeless(
            Keeper(parts, _how_it_ended, limits.ready, show, restart), job(plan)
        )


async def _until_hopeless(keeper: Keeper, work: Awaitable[int]) -> int:
    """The result of `work`, or PartFailed where a part cannot be kept alive."""
    task, keeping = asyncio.ensure_future(work), asyncio.create_task(keeper.keep())
    try:
        await asyncio.wait({task, keeping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise PartFailed(_how_it_ended(await keeping))
    finally:
        for pending in (task, keeping):
            pending.cancel()
        await asyncio.gather(task, keeping, return_exceptions=True)


@asynccontextmanager
async def _started(
    plan: Plan, limits: Limits, show: Show, sink: Sink, signals: Signals
) -> AsyncIterator[list[Part]]:
    parts = [Part(command, sink) for command in plan.commands]
    try:
        for part in parts:
            await part.start()
            show(f"{part.name:<12}starting")
        yield parts
    finally:
        await _to_its_end(_stop(parts, limits, show, signals))


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` whole, even if cancelled meanwhile: whoever cancels wants the stop too."""
    task = asyncio.create_task(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    task.result()


@asynccontextmanager
async def running_part(part: Part, limits: Limits) -> AsyncIterator[Part]:
    """One process by itself, ready while open. Raises PartFailed."""
    try:
        await part.start()
        try:
            async with asyncio.timeout(limits.ready):
                await _until_death([part], part.ready())
        except TimeoutError:
            raise PartFailed(f"not ready within {limits.ready:g} s: {part.name}") from None
        yield part
    finally:
        part.terminate()
        await part.gone(limits.stop)


async def _healthy(parts: Sequence[Part], plan: Plan, limits: Limits, show: Show) -> None:
    """Waits until every part said it is ready and the gateway reaches the LLM service."""

    async def told(part: Part) -> None:
        seconds = await part.ready()
        show(f"{part.name:<12}ready in {seconds:.1f} s at {part.command.target}")

    try:
        async with asyncio.timeout(limits.ready):
            await asyncio.gather(*map(told, parts))
            # Another process's state: there is nothing here to be woken by.
            while not await asyncio.to_thread(_answers_ready, plan.url):  # noqa: ASYNC110
                await asyncio.sleep(_HEALTH_INTERVAL)
    except TimeoutError:
        late = [part.name for part in parts if not part.is_ready]
        names = ", ".join(late) or "the gateway's path to the LLM service"
        raise PartFailed(f"not ready within {limits.ready:g} s: {names}") from None


def _answers_ready(url: str) -> bool:
    # No proxy of the environment must stand between parts of one machine.
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=2)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


async def _until_death(parts: Sequence[Part], work: Awaitable[T]) -> T:
    """The result of `work`, or PartFailed as soon as a part ends."""
    task = asyncio.ensure_future(work)
    deaths = [asyncio.create_task(part.ended()) for part in parts]
    try:
        await asyncio.wait({task, *deaths}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and task.exception() is not None:
            await asyncio.wait(
                deaths, timeout=_DEATH_NOTICE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
        _raise_first_death(parts)
        return await task
    finally:
        for pending in (task, *deaths):
            pending.cancel()
        await asyncio.gather(task, *deaths, return_exceptions=True)


def _raise_first_death(parts: Sequence[Part]) -> None:
    for part in parts:
        if part.exit_code is not None:
            raise PartFailed(_how_it_ended(part))


def _how_it_ended(part: Part) -> str:
    code = part.exit_code or 0
    how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    last = "".join(f"\n    {line}" for line in part.last_words())
    words = f"; the end of its log:{last}" if last else "; it wrote nothing to its log"
    return f"{part.name} (process {part.pid}) {how}{words}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


async def _stop(parts: Sequence[Part], limits: Limits, show: Show, signals: Signals) -> None:
    """Stops rank after rank, so that nobody's neighbour goes first; at once on a second signal."""
    hurried = asyncio.create_task(signals.next())
    ordered = sorted(parts, key=lambda part: part.command.rank)
    for _, rank in groupby(ordered, key=lambda part: part.command.rank):
        stopping = asyncio.create_task(_stop_together(list(rank), limits.stop, show))
        await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
        if hurried.done():
            show("stopping at once")
            for part in parts:
                part.kill()
        await stopping
    hurried.cancel()


async def _stop_together(parts: Sequence[Part], seconds: float, show: Show) -> None:
    async def stop(part: Part) -> None:
        if part.pid is None or part.exit_code is not None:
            await part.gone(seconds)
            return
        began = time.monotonic()
        part.terminate()
        by_itself = await part.gone(seconds)
        note = "" if by_itself else f", killed after {seconds:g} s"
        show(f"{part.name:<12}stopped in {time.monotonic() - began:.1f} s{note}")

    await asyncio.gather(*map(stop, parts))


class LogSink:
    """Writes the parts' log lines to standard error, each behind its part's name, and to files."""

    def __init__(self, stream: IO[str], directory: Path | None) -> None:
        self._stream = stream
        self._directory = directory
        self._files: dict[str, IO[str]] = {}
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, line: str) -> None:
        print(f"{name} | {line}", file=self._stream, flush=True)
        if self._directory is not None:
            print(line, file=self._file(name, self._directory), flush=True)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, name: str, directory: Path) -> IO[str]:
        if name not in self._files:
            path = directory / f"{name.replace(' ', '-').lower()}.log"
            self._files[name] = path.open("a", encoding="utf-8")
        return self._files[name]
