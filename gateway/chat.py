"""`POST /v1/chat/completions`: read, check, translate, ask, answer."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from chiasm import telemetry
from chiasm.errors import INTERNAL_TEXT, ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from gateway.http.answering import as_stream, as_whole
from gateway.http.body import BodyBudget, read_body, unless_gone
from gateway.http.events import DONE, event
from gateway.http.observed import Exchange, exchange_of
from gateway.llm import Answers, Card, Llm
from gateway.metrics import GatewayMetrics
from gateway.openai.answer import Chunks, Form, Head, Json, Whole
from gateway.openai.errors import error_body
from gateway.openai.parse import Parsed, parse_body
from gateway.openai.translate import Places, check_model, translate
from gateway.openai.url_pictures import UrlPictures
from gateway.settings import GatewaySettings

# A model that the card does not name may have been loaded since: look again, not at every try.
_RECHECK_SECONDS = 0.5


@dataclass(frozen=True)
class Accepted:
    """A request that the LLM service answers, and the form in which the answer is wanted."""

    answers: Answers
    places: Places
    head: Head
    stream: bool
    include_usage: bool
    form: Form


class Chat:
    """Answers conversations with one LLM service."""

    def __init__(
        self,
        settings: GatewaySettings,
        llm: Llm,
        metrics: GatewayMetrics,
        budget: BodyBudget,
        urls: UrlPictures,
    ) -> None:
        self._settings = settings
        self._llm = llm
        self._metrics = metrics
        self._budget = budget
        self._urls = urls

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
            parsed = await parse_body(body)
            del body
            chat = parsed.chat
            exchange.notes["stream"] = chat.stream
            answers, places = await unless_gone(request.receive, self.ask(parsed, exchange))
        options = chat.stream_options
        usage = options is not None and options.include_usage
        form = Form(chat.n or 1, logprobs=bool(chat.logprobs))
        return Accepted(answers, places, Head(chat.model), chat.stream, usage, form)

    async def ask(self, parsed: Parsed, exchange: Exchange) -> tuple[Answers, Places]:
        """The answers to a request that the LLM service has accepted. Raises ChiasmError."""
        card = await self.card_of(parsed.chat.model, exchange.request_id)
        with self._urls.room() as room:
            parsed = await self._urls.fetched(parsed, card, room)
            asked = await translate(parsed, card, self._settings.pictures)
            exchange.expect(asked.wired.message)
            try:
                answers = await self._llm.generate(
                    asked.wired,
                    request_id=exchange.request_id,
                    tenant=exchange.tenant,
                    seconds=exchange.seconds_left(self._settings.request_timeout_seconds),
                )
            except ChiasmError as error:
                raise told_error(error, asked.places) from error
        return answers, asked.places

    async def card_of(self, model: str, request_id: str) -> Card:
        """The card of `model`. Raises MODEL_NOT_FOUND."""
        card = await self._llm.card(request_id)
        if card.model_id != model:
            card = await self._llm.card(request_id, max_age=_RECHECK_SECONDS)
        check_model(model, card)
        return card


async def _gather(accepted: Accepted, exchange: Exchange) -> Json:
    whole = Whole(accepted.head, accepted.form)
    try:
        async for response in accepted.answers:
            note(response.message, exchange)
            whole.take(response.message)
    except ChiasmError as error:
        raise told_error(error, accepted.places) from error
    finally:
        accepted.answers.cancel()
    return whole.body()


async def _events(accepted: Accepted, exchange: Exchange) -> AsyncGenerator[bytes, None]:
    chunks = Chunks(accepted.head, accepted.form, include_usage=accepted.include_usage)
    ending = b""
    try:
        yield chunks.opening()
        async for response in accepted.answers:
            note(response.message, exchange)
            ending = chunks.take(response.message)
            if ending and response.message.HasField("delta"):
                yield ending
        chunks.check_ended()
    except ChiasmError as error:
        told = told_error(error, accepted.places)
        exchange.tell(told)
        ending = event(error_body(told))
    except Exception:
        telemetry.logger().exception("fault", route=exchange.route)
        fault = ChiasmError(Reason.INTERNAL, INTERNAL_TEXT)
        exchange.tell(fault)
        ending = event(error_body(fault))
    finally:
        accepted.answers.cancel()
    yield ending + DONE


def told_error(error: ChiasmError, places: Places) -> ChiasmError:
    """`error` of the LLM service with its field as a path of the JSON."""
    told = places.told(error)
    if "http_status" in told.metadata:
        telemetry.logger().error("deployment is wrong", detail=str(error))
    return told


def note(response: llm_service_pb2.GenerateResponse, exchange: Exchange) -> None:
    """Writes the first token's time and the counts of tokens for the log line and the metrics."""
    if response.HasField("delta") and not exchange.first_token_at:
        exchange.first_token_at = time.monotonic()
    if response.HasField("finished"):
        usage = response.finished.usage
        exchange.notes["prompt_tokens"] = usage.prompt_token_count
        exchange.notes["completion_tokens"] = usage.completion_token_count
