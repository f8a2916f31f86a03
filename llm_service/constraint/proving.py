"""Owns the trial process: one grammar at a time, killed when it takes too long."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process

import psutil

from llm_service.constraint.limits import ConstraintLimits

# Of a Python process on a busy machine; no grammar's time.
_START_SECONDS = 60.0


# Of the time that a grammar has: with less processor time than that, it was kept waiting.
_OWN_SHARE = 0.5


class TrialFailed(Exception):
    """Compiling took too long, too much memory, or brought the trial process down.

    Attributes:
        blameless: not for the grammar's sake: the process could not start, or hardly ran.
    """

    def __init__(self, why: str, *, blameless: bool = False) -> None:
        super().__init__(why)
        self.blameless = blameless


class Trial:
    """Tries grammars in a process of their own. Used on one event loop.

    The process starts with the first grammar, and anew after it had to be killed.
    """

    def __init__(self, limits: ConstraintLimits) -> None:
        self._limits = limits
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    async def fault_of(self, grammar: str) -> str:
        """What the library says against `grammar`, or "". Raises TrialFailed."""
        async with self._turn:
            try:
                return await self._ask(grammar)
            except BaseException:
                # Also where the caller left: a late answer would be taken for the next one's.
                await self._kill()
                raise

    async def close(self) -> None:
        """Ends the process."""
        async with self._turn:
            await self._kill()

    async def _ask(self, grammar: str) -> str:
        process = self._process or await self._start()
        assert process.stdin is not None
        seconds, before = self._limits.compile_seconds, _processor_seconds(process)
        process.stdin.write(json.dumps(grammar).encode() + b"\n")
        try:
            fault: str = json.loads(await _line(process, seconds))
        except TimeoutError:
            used = _processor_seconds(process) - before
            why = f"{used:.2f} s of processor in {seconds} s"
            raise TrialFailed(why, blameless=used < _OWN_SHARE * seconds) from None
        return fault

    async def _start(self) -> Process:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "llm_service.constraint.trial", str(self._limits.trial_bytes),
            stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
        )  # fmt: skip
        try:
            await _line(self._process, _START_SECONDS)
        except (TrialFailed, TimeoutError):
            raise TrialFailed("it could not start", blameless=True) from None
        return self._process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def _line(process: Process, seconds: float) -> bytes:
    """The next line; raises TimeoutError, and TrialFailed if there is none."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(seconds):
            line = await process.stdout.readline()
    except ValueError:  # longer than any line of ours
        raise TrialFailed("its line has no end") from None
    if not line.endswith(b"\n"):
        raise TrialFailed("it is gone")
    return line


def _processor_seconds(process: Process) -> float:
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
