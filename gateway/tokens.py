"""`POST /tokenize` and `POST /detokenize`, in the form that vLLM gave them."""

from typing import Annotated, Any, Final, TypeVar

from pydantic import ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chiasm import wire
from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from gateway.completions import CardOf
from gateway.http.body import BodyBudget, read_body, unless_gone
from gateway.http.observed import Exchange, exchange_of
from gateway.llm import Card, Llm
from gateway.openai import paths
from gateway.openai.errors import invalid
from gateway.openai.parse import Parsed, checked, read_json
from gateway.openai.pulled import Data, all_placed, pull
from gateway.openai.schema import Body, Text, TokenId
from gateway.openai.translate import translate
from gateway.openai.url_pictures import UrlPictures
from gateway.settings import GatewaySettings

_S = llm_service_pb2
Json = dict[str, Any]
B = TypeVar("B", bound=Body)
_OF_A_CHAT: Final = ("tools", "chat_template_variables_json", "continue_final_message")
# What is asked of the tokenizer; all other fields are a chat's.
_TOKENIZERS: Final = frozenset(
    {"prompt", "add_special_tokens", "add_generation_prompt", "return_token_strs"}
)


class TokenizeRequest(Body):
    """A text or a conversation. The fields of a conversation are those of a chat, and are checked
    as there."""

    model_config = ConfigDict(extra="allow")

    model: Text = ""
    prompt: Text | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Tokens to be made text."""

    model: Text = ""
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class Tokens:
    """Answers both routes with one LLM service."""

    def __init__(
        self,
        settings: GatewaySettings,
        llm: Llm,
        budget: BodyBudget,
        card_of: CardOf,
        urls: UrlPictures,
    ) -> None:
        self._settings = settings
        self._llm = llm
        self._budget = budget
        self._card_of = card_of
        self._urls = urls

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`. Pictures are measured, and never encoded."""
        exchange = exchange_of(request.scope)
        with self._budget.lease() as lease:
            body = await read_body(request, self._settings.max_body_bytes, lease)
            answer = await unless_gone(request.receive, self._tokenize(body, exchange))
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        exchange = exchange_of(request.scope)
        with self._budget.lease() as lease:
            body = await read_body(request, self._settings.max_body_bytes, lease)
            asked = _validated(DetokenizeRequest, read_json(body))
            answer = await unless_gone(request.receive, self._detokenize(asked, exchange))
        return JSONResponse(answer)

    async def _tokenize(self, body: bytearray, exchange: Exchange) -> Json:
        value, data = await _read(body)
        fields = _validated(TokenizeRequest, value)
        _check_together(fields)
        card = await self._card(fields.model, exchange)
        if fields.prompt is None:
            message = await self._of_messages(value, data, fields, card, exchange)
        else:
            message = await self._of_prompt(fields, fields.prompt, card, exchange)
        tokens = list(message.token_ids)
        return {
            "count": len(tokens),
            "max_model_len": message.context_length,
            "tokens": tokens,
            "token_strs": None,
        }

    async def _of_prompt(
        self, fields: TokenizeRequest, prompt: str, card: Card, exchange: Exchange
    ) -> llm_service_pb2.TokenizeResponse:
        asked = _S.TokenizeRequest(
            model=card.model_id, prompt=prompt, add_special_tokens=fields.add_special_tokens
        )
        try:
            return (
                await self._llm.tokenize(
                    wire.plain(asked), tenant=exchange.tenant, **self._how(exchange)
                )
            ).message
        except ChiasmError as error:
            raise _told(error, "prompt", "prompt") from error

    async def _of_messages(
        self, value: Json, data: Data, fields: TokenizeRequest, card: Card, exchange: Exchange
    ) -> llm_service_pb2.TokenizeResponse:
        chat = Parsed(checked(_as_chat(value, fields, card)), data)
        with self._urls.room() as room:
            chat = await self._urls.fetched(chat, card, room)
            return await self._of_chat(chat, card, exchange)

    async def _of_chat(
        self, chat: Parsed, card: Card, exchange: Exchange
    ) -> llm_service_pb2.TokenizeResponse:
        asked = await translate(chat, card, self._settings.pictures)
        message = asked.wired.message
        given = {name: getattr(message, name) for name in _OF_A_CHAT if message.HasField(name)}
        request = _S.TokenizeRequest(
            model=card.model_id, messages=message.messages, tenant=message.tenant, **given
        )
        wired = wire.Wired(request, asked.wired.buffers)
        try:
            return (
                await self._llm.tokenize(wired, tenant=exchange.tenant, **self._how(exchange))
            ).message
        except ChiasmError as error:
            raise asked.places.told(error) from error

    async def _detokenize(self, asked: DetokenizeRequest, exchange: Exchange) -> Json:
        card = await self._card(asked.model, exchange)
        request = _S.DetokenizeRequest(model=card.model_id, token_ids=asked.tokens)
        try:
            answer = await self._llm.detokenize(wire.plain(request), **self._how(exchange))
        except ChiasmError as error:
            raise _told(error, "token_ids", "tokens") from error
        return {"prompt": answer.message.text}

    async def _card(self, model: str, exchange: Exchange) -> Card:
        if not model:  # whatever is served
            return await self._llm.card(exchange.request_id)
        return await self._card_of(model, exchange.request_id)

    def _how(self, exchange: Exchange) -> Json:
        left = exchange.seconds_left(self._settings.request_timeout_seconds)
        return {"request_id": exchange.request_id, "seconds": left}


async def _read(body: bytearray) -> tuple[Json, Data]:
    """The JSON object of `body`, and the large base64 texts that were decoded beside it."""
    pulled = await pull(body)
    if pulled.data:
        value = read_json(pulled.body)
        if all_placed(value, pulled.data):
            return value, pulled.data
    return read_json(body), {}


def _as_chat(value: Json, fields: TokenizeRequest, card: Card) -> Json:
    """The chat whose prompt is wanted, to be checked as any other."""
    chat = {name: inner for name, inner in value.items() if name not in _TOKENIZERS}
    return chat | {"model": card.model_id, "continue_final_message": fields.continue_final_message}


def _told(error: ChiasmError, field: str, name: str) -> ChiasmError:
    """`error` of the LLM service about `field`, as the request names it."""
    if error.reason is Reason.CANCELLED:  # not by our caller, who still waits
        return ChiasmError(Reason.NOT_READY, "The LLM service stopped; try again.")
    if error.field is not None and error.field.startswith(field):
        error.field = name
    return error


def _check_together(fields: TokenizeRequest) -> None:
    if (fields.prompt is None) == (fields.messages is None):
        text = "The request has either a prompt or messages."
        raise invalid(text, "prompt", "missing_required_parameter")
    unserved = {
        "return_token_strs": fields.return_token_strs,
        # A chat's template writes them.
        "add_special_tokens": fields.messages is not None and fields.add_special_tokens,
        "add_generation_prompt": not fields.add_generation_prompt
        and not fields.continue_final_message,
    }
    for name, asked in unserved.items():
        if asked:
            text = f"This version does not serve {name} with that value here; leave it out."
            raise ChiasmError(Reason.UNSUPPORTED, text, name)


def _validated(kind: type[B], value: Json) -> B:
    try:
        return kind.model_validate(value)
    except ValidationError as faults:
        first = faults.errors(include_url=False, include_context=False, include_input=False)[0]
        raise paths.told(first) from None
