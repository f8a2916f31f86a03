"""One child process of a system: started, awaited, watched, stopped."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any

from chiasm.cli.child import PROGRAM
from chiasm.cli.plan import Command

_TAIL_LINES = 15
_CHUNK = 1 << 16
# Longest wait for the last words of a process that has ended.
_LAST_WORDS_SECONDS = 1.0

Sink = Callable[[str, str], None]


class Part:
    """A process that runs one `Command`. Start it from the main thread: it ends with that thread.

    `sink(name, line)` gets each line that the process writes to standard error.
    """

    def __init__(self, command: Command, sink: Sink) -> None:
        self.command = command
        self.sink = sink
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._ready: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._pipes: list[asyncio.ReadTransport] = []
        self._began = 0.0

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exit_code(self) -> int | None:
        """None while the process runs or was never started."""
        return self._process.returncode if self._process else None

    @property
    def is_ready(self) -> bool:
        return self._ready.done()

    async def start(self) -> None:
        """Starts the process, in a session of its own: the terminal's Ctrl-C is ours to handle."""
        self._began = time.monotonic()
        words = [*PROGRAM, str(os.getpid()), "-m", self.command.module, *self.command.flags]
        with ExitStack() as ours:
            # Not asyncio's own pipes: with those, a process counts as running for as long as
            # anything that it started holds them open.
            (out, out_end), (err, err_end) = await self._pipe(ours), await self._pipe(ours)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out_end,
                stderr=err_end,
                env={**os.environ, **self.command.environment},
                start_new_session=True,
            )
        self._readers = [
            asyncio.create_task(self._read_out(out)),
            asyncio.create_task(self._read_err(err)),
        ]

    async def _pipe(self, ours: ExitStack) -> tuple[asyncio.StreamReader, int]:
        """A stream, and the end to write to, which is closed here with `ours`."""
        read_end, write_end = os.pipe()
        ours.callback(os.close, write_end)
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb", 0)
        )
        self._pipes.append(transport)
        return stream, write_end

    async def ready(self) -> float:
        """Waits for the process's ready line; returns the seconds from the start to it."""
        return await asyncio.shield(self._ready)

    async def ended(self) -> int:
        """Waits for the process to end and for its last words; returns its exit code."""
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.wait(self._readers, timeout=_LAST_WORDS_SECONDS)
        return code

    def last_words(self) -> list[str]:
        """The last lines that the process wrote to standard error."""
        return list(self._tail)

    def terminate(self) -> None:
        """Asks the process to finish its work and end."""
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Ends the process and whatever it started, at once."""
        if self._process and self._process.returncode is None:
            self._kill_group(self._process.pid)

    async def gone(self, timeout: float) -> bool:  # noqa: ASYNC109
        """Waits for the end after `terminate`, kills after `timeout` seconds.

        Returns whether the process ended by itself. Nothing of its group is left either way.
        """
        if self._process is None:
            return True
        group = self._process.pid
        try:
            async with asyncio.timeout(timeout):
                await self._process.wait()
        except TimeoutError:
            return False
        finally:
            self._kill_group(group)
            await self.ended()
            for pipe in self._pipes:
                pipe.close()
        return True

    def _kill_group(self, group: int) -> None:
        # The session that `start` made bears the process's number, also when that is gone.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)

    async def _read_out(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            if not self._ready.done() and _is_ready(line):
                self._ready.set_result(time.monotonic() - self._began)

    async def _read_err(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            self._tail.append(line)
            self.sink(self.name, line)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of any length; `StreamReader`'s own iteration fails on long ones."""
    rest = b""
    while chunk := await stream.read(_CHUNK):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def _is_ready(line: str) -> bool:
    try:
        read: Any = json.loads(line)
    except ValueError:
        return False
    return isinstance(read, dict) and read.get("event") == "ready"
