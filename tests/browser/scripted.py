"""A gateway before a scripted LLM service, both served from a thread, for a browser to ask."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any, TypeVar

from tests.gateway.gateway_system import gateway_before
from tests.scripted_llm import Script, ScriptedLlm

T = TypeVar("T")
START_SECONDS = 30
# A name that is not this machine's own: what browsers allow only over TLS is not there.
PLAIN_HOST = "chiasm.test"


@dataclass(frozen=True)
class Scripted:
    """The service, which says what its script tells it to, and the address of the gateway."""

    llm: ScriptedLlm
    url: str


@contextmanager
def scripted_gateway(script: Script | None = None, **settings: object) -> Iterator[Scripted]:
    """Both, until the `with` ends. `settings` are the gateway's."""
    with _loop() as run:
        llm, stack = ScriptedLlm(script), AsyncExitStack()

        async def start() -> int:
            server = await stack.enter_async_context(llm.serving())
            return await stack.enter_async_context(gateway_before(server.port, **settings))

        port = run(start())
        try:
            yield Scripted(llm, f"http://127.0.0.1:{port}/")
        finally:
            run(stack.aclose())


@contextmanager
def scripted_llm_at(port: int) -> Iterator[ScriptedLlm]:
    """The service alone, at a port that a gateway knows already."""
    with _loop() as run:
        llm, stack = ScriptedLlm(), AsyncExitStack()
        run(stack.enter_async_context(llm.serving(port)))
        try:
            yield llm
        finally:
            run(stack.aclose())


class _Runner:
    """Runs coroutines on the loop of another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_SECONDS)


@contextmanager
def _loop() -> Iterator[_Runner]:
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="scripted")
    thread.start()
    try:
        yield _Runner(loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
