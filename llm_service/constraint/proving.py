"""Owns the trial process: one grammar at a time, killed when it takes too long."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process

from llm_service.constraint.limits import ConstraintLimits

# Of a Python process on a busy machine; no grammar's time.
_START_SECONDS = 60.0


class TrialFailed(Exception):
    """Compiling took too long, too much memory, or brought the trial process down."""


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
        process.stdin.write(json.dumps(grammar).encode() + b"\n")
        fault: str = json.loads(await _line(process, self._limits.compile_seconds))
        return fault

    async def _start(self) -> Process:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "llm_service.constraint.trial", str(self._limits.trial_bytes),
            stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
        )  # fmt: skip
        await _line(self._process, _START_SECONDS)
        return self._process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def _line(process: Process, seconds: float) -> bytes:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(seconds):
            line = await process.stdout.readline()
    except (TimeoutError, ValueError) as error:  # too late, or longer than any line of ours
        raise TrialFailed from error
    if not line.endswith(b"\n"):  # it is gone
        raise TrialFailed
    return line
