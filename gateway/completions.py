"""`POST /v1/completions`: texts continued, each prompt of a request by a call of its own."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chiasm import telemetry, wire
from chiasm.errors import INTERNAL_TEXT, ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from gateway.http.answering import as_stream, as_whole
from gateway.http.body import BodyBudget, read_body, unless_gone
from gateway.http.events import DONE, event
from gateway.http.observed import Exchange, exchange_of
from gateway.llm import Answers, Card, Llm
from gateway.metrics import GatewayMetrics
from gateway.openai.answer import Json
from gateway.openai.completions import Chunks, Completion, Whole, completion_of
from gateway.openai.errors import error_body
from gateway.openai.parse import read_json
from gateway.settings import GatewaySettings

CardOf = Callable[[str, str], Awaitable[Card]]
"""The card of a model, by its name and the request's id."""
Told = tuple[int, llm_service_pb2.GenerateResponse]
"""The number of a prompt, and one message about it."""


@dataclass(frozen=True)
class Accepted:
    """A request whose prompts the LLM service all answers, in their order."""

    completion: Completion
    answers: Sequence[Answers]

    def cancel(self) -> None:
        """Ends all; harmless after their end."""
        for one in self.answers:
            one.cancel()


class Completions:
    """Continues texts with one LLM service."""

    def __init__(
        self,
        settings: GatewaySettings,
        llm: Llm,
        metrics: GatewayMetrics,
        budget: BodyBudget,
        card_of: CardOf,
    ) -> None:
        self._settings = settings
        self._llm = llm
        self._metrics = metrics
        self._budget = budget
        self._card_of = card_of

    async def answer(self, request: Request) -> Response:
        """The answer, or a stream of it once the LLM service has accepted every prompt."""
        exchange = exchange_of(request.scope)
        accepted = await self._accepted(request, exchange)
        if accepted.completion.request.stream:
            events = _events(accepted, exchange)
            return as_stream(request, events, self._settings.keep_alive_seconds)
        return await as_whole(request, _gather(accepted, exchange))

    async def _accepted(self, request: Request, exchange: Exchange) -> Accepted:
        # The request's text ends with this call: an answer may take minutes.
        with self._budget.lease() as lease:
            body = await read_body(request, self._settings.max_body_bytes, lease)
            self._metrics.body_bytes.observe(len(body))
            completion = completion_of(read_json(body))
            del body
            exchange.notes["stream"] = completion.request.stream
            return await unless_gone(request.receive, self._ask(completion, exchange))

    async def _ask(self, completion: Completion, exchange: Exchange) -> Accepted:
        await self._card_of(completion.request.model, exchange.request_id)
        exchange.expect(*(completion.asked(n) for n in range(len(completion.prompts))))
        asking = [self._ask_one(completion, n, exchange) for n in range(len(completion.prompts))]
        return Accepted(completion, await _all(asking))

    async def _ask_one(self, completion: Completion, number: int, exchange: Exchange) -> Answers:
        try:
            return await self._llm.generate(
                wire.plain(completion.asked(number)),
                request_id=exchange.request_id,
                tenant=exchange.tenant,
                seconds=exchange.seconds_left(self._settings.request_timeout_seconds),
            )
        except ChiasmError as error:
            raise completion.told(error, number) from error


async def _all(asking: Sequence[Coroutine[Any, Any, Answers]]) -> list[Answers]:
    """All answers in order. The first refusal ends the others, whether accepted or not."""
    tasks: list[asyncio.Task[Answers]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in asking]
    except BaseException as error:
        for task in tasks:
            if not task.cancelled() and task.exception() is None:
                task.result().cancel()
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from error
        raise
    return [task.result() for task in tasks]


async def _gather(accepted: Accepted, exchange: Exchange) -> Json:
    whole, note = Whole(accepted.completion), _Notes(exchange)
    try:
        async for number, message in _messages(accepted):
            note.take(message)
            whole.take(number, message)
    finally:
        accepted.cancel()
    return whole.body()


async def _events(accepted: Accepted, exchange: Exchange) -> AsyncGenerator[bytes, None]:
    chunks, note = Chunks(accepted.completion), _Notes(exchange)
    messages = _messages(accepted)
    try:
        async for number, message in messages:
            note.take(message)
            for chunk in chunks.take(number, message):
                yield event(chunk)
        chunks.check_ended()
    except ChiasmError as error:
        exchange.tell(error)
        yield event(error_body(error))
    except Exception:
        telemetry.logger().exception("fault", route=exchange.route)
        fault = ChiasmError(Reason.INTERNAL, INTERNAL_TEXT)
        exchange.tell(fault)
        yield event(error_body(fault))
    finally:
        accepted.cancel()
        await messages.aclose()
    yield DONE


async def _messages(accepted: Accepted) -> AsyncGenerator[Told, None]:
    """What comes about all prompts, as it comes. Raises ChiasmError with the request's path."""
    sources = [_numbered(accepted, number) for number in range(len(accepted.answers))]
    if len(sources) == 1:
        async for told in sources[0]:
            yield told
        return
    waiting = {_next(source): source for source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                message = task.result()
                source = waiting.pop(task)
                if message is not None:
                    waiting[_next(source)] = source
                    yield message
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _numbered(accepted: Accepted, number: int) -> AsyncIterator[Told]:
    try:
        async for response in accepted.answers[number]:
            yield number, response.message
    except ChiasmError as error:
        raise accepted.completion.told(error, number) from error


def _next(source: AsyncIterator[Told]) -> "asyncio.Task[Told | None]":
    async def step() -> Told | None:
        return await anext(source, None)

    return asyncio.ensure_future(step())


@dataclass
class _Notes:
    """What the log line tells of an answer: tokens over all its prompts, and the first's time."""

    exchange: Exchange
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def take(self, response: llm_service_pb2.GenerateResponse) -> None:
        exchange = self.exchange
        if response.HasField("delta") and not exchange.first_token_at:
            exchange.first_token_at = time.monotonic()
        if response.HasField("finished"):
            usage = response.finished.usage
            self.prompt_tokens += usage.prompt_token_count
            self.completion_tokens += usage.completion_token_count
            exchange.notes["prompt_tokens"] = self.prompt_tokens
            exchange.notes["completion_tokens"] = self.completion_tokens
