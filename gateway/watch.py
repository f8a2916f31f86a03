"""Notices that files change, by looking once in a while: works on every file system and mount."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from chiasm import telemetry

_EVERY_SECONDS: Final = 1.0

State = tuple[tuple[int, int, int], ...]
"""Inode, size and time of change of each file; zeros for one that is not there."""


def state_of(paths: Sequence[Path]) -> State:
    return tuple(_seen(path) for path in paths)


async def watch(paths: Sequence[Path], known: State, changed: Callable[[], None]) -> None:
    """Calls `changed` in a thread after each change, until cancelled.

    Args:
        known: the state that was in force before; one from before the files were first read misses
            no change.
    """
    while True:
        await asyncio.sleep(_EVERY_SECONDS)
        seen = await asyncio.to_thread(state_of, paths)
        if seen == known:
            continue
        known = seen
        try:
            await asyncio.to_thread(changed)
        except Exception:  # the watch goes on: the next change may mend it
            telemetry.logger().exception("cannot reload", files=[str(path) for path in paths])


def _seen(path: Path) -> tuple[int, int, int]:
    try:
        found = os.stat(path)  # follows links: mounted secrets change by theirs
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns
