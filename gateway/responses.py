"""`POST /v1/responses`: a chat by another name, without state."""

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chiasm import telemetry
from chiasm.errors import INTERNAL_TEXT, ChiasmError, Reason
from gateway.chat import Chat, note, told_error
from gateway.http.answering import as_stream, as_whole
from gateway.http.body import BodyBudget, read_body, unless_gone
from gateway.http.events import event
from gateway.http.observed import Exchange, exchange_of
from gateway.llm import Answers
from gateway.metrics import GatewayMetrics
from gateway.openai.answer import Json
from gateway.openai.errors import invalid
from gateway.openai.parse import Parsed, checked, read_json
from gateway.openai.pulled import Data, all_placed, pull
from gateway.openai.responses.answer import Head, echo_of
from gateway.openai.responses.events import Events
from gateway.openai.responses.schema import read
from gateway.openai.responses.to_chat import Origins, to_chat
from gateway.openai.translate import Places
from gateway.settings import GatewaySettings


@dataclass(frozen=True)
class Accepted:
    """A request that the LLM service answers, and what the response tells of it."""

    answers: Answers
    places: Places
    origins: Origins
    head: Head
    stream: bool
    logprobs: bool

    def events(self) -> Events:
        return Events(self.head, self.origins, logprobs=self.logprobs)

    def told(self, error: ChiasmError) -> ChiasmError:
        """`error` of the LLM service with its field as a path of the request."""
        return self.origins.told(told_error(error, self.places))


class Responses:
    """Answers as `chat` does, in the form of OpenAI's Responses."""

    def __init__(
        self, settings: GatewaySettings, metrics: GatewayMetrics, budget: BodyBudget, chat: Chat
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._budget = budget
        self._chat = chat

    async def answer(self, request: Request) -> Response:
        """The answer, or a stream of it once the LLM service has accepted the request."""
        exchange = exchange_of(request.scope)
        accepted = await self._accepted(request, exchange)
        if accepted.stream:
            events = _events(accepted, exchange)
            return as_stream(request, events, self._settings.keep_alive_seconds)
        return await as_whole(request, _gather(accepted, exchange))

    async def _accepted(self, request: Request, exchange: Exchange) -> Accepted:
        # The request's text and pictures end with this call: an answer may take minutes.
        with self._budget.lease() as lease:
            body = await read_body(request, self._settings.max_body_bytes, lease)
            self._metrics.body_bytes.observe(len(body))
            asked = await parse_body(body)
            del body
            chat = asked.parsed.chat
            exchange.notes["stream"] = chat.stream
            with _telling(asked.origins):
                answers, places = await unless_gone(
                    request.receive, self._chat.ask(asked.parsed, exchange)
                )
        wanted = bool(chat.logprobs)
        return Accepted(answers, places, asked.origins, asked.head, chat.stream, wanted)


@dataclass(frozen=True)
class Asked:
    """A checked request as a chat, where it came from, and what its response echoes."""

    parsed: Parsed
    origins: Origins
    head: Head


async def parse_body(body: bytearray) -> Asked:
    """The request in `body`. Raises REQUEST_INVALID or UNSUPPORTED with the field at fault."""
    pulled = await pull(body)
    if pulled.data:
        asked = _asked(read_json(pulled.body), pulled.data)
        if asked is not None:
            return asked
    asked = _asked(read_json(body), {})
    assert asked is not None
    return asked


def _asked(value: Any, data: Data) -> Asked | None:
    """None if a part of `data` has no place in the request."""
    request = read(value)
    chat, origins = to_chat(request)
    if not all_placed(chat, data):
        return None
    with _telling(origins):
        parsed = Parsed(checked(chat), data)
    echo = echo_of(request, parsed.chat)
    _check_sound(echo)
    return Asked(parsed, origins, Head(echo))


def _check_sound(echo: Json) -> None:
    """What is echoed must be text, or the answer could not be sent."""
    for name in ("metadata", "text", "tools"):
        try:
            json.dumps(echo[name], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            text = f"{name} holds half of a surrogate pair, no character; remove it."
            raise invalid(text, name) from None


@contextmanager
def _telling(origins: Origins) -> Iterator[None]:
    """Errors of the chat as errors of the request."""
    try:
        yield
    except ChiasmError as error:
        raise origins.told(error) from error.__cause__


async def _gather(accepted: Accepted, exchange: Exchange) -> Json:
    events = accepted.events()
    try:
        async for response in accepted.answers:
            note(response.message, exchange)
            for _ in events.take(response.message):
                pass
    except ChiasmError as error:
        raise accepted.told(error) from error
    finally:
        accepted.answers.cancel()
    return events.response()


async def _events(accepted: Accepted, exchange: Exchange) -> AsyncGenerator[bytes, None]:
    events = accepted.events()
    try:
        for one in events.opening():
            yield _named(one)
        async for response in accepted.answers:
            note(response.message, exchange)
            for one in events.take(response.message):
                yield _named(one)
        events.response()
    except ChiasmError as error:
        fault = accepted.told(error)
        exchange.tell(fault)
        for one in events.failed(fault):
            yield _named(one)
    except Exception:
        telemetry.logger().exception("fault", route=exchange.route)
        fault = ChiasmError(Reason.INTERNAL, INTERNAL_TEXT)
        exchange.tell(fault)
        for one in events.failed(fault):
            yield _named(one)
    finally:
        accepted.answers.cancel()


def _named(one: Json) -> bytes:
    return b"event: %b\n%b" % (one["type"].encode(), event(one))
