"""A checked `ChatRequest` to a `GenerateRequest`; the LLM service's errors back to JSON paths."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chiasm import wire
from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from gateway.llm import Card
from gateway.openai import tools
from gateway.openai.constraint import Constraint, constraint_of
from gateway.openai.parse import Parsed
from gateway.openai.parts import PartReader
from gateway.openai.schema import (
    ChatRequest,
    Drawn,
    ImageEmbedsPart,
    ImageUrlPart,
    Message,
    Part,
)
from gateway.settings import PictureLimits

_S = llm_service_pb2
_ROLES: Final = {
    "system": _S.ROLE_SYSTEM,
    "developer": _S.ROLE_SYSTEM,
    "user": _S.ROLE_USER,
    "assistant": _S.ROLE_ASSISTANT,
    "tool": _S.ROLE_TOOL,
}
_OF_A_PART: Final = re.compile(r"messages\[(\d+)\]\.parts\[(\d+)\]")
_OF_THE_REQUEST: Final = {
    ".image.options.min_pixels": "mm_processor_kwargs.min_pixels",
    ".image.options.max_pixels": "mm_processor_kwargs.max_pixels",
}
_WITHIN_A_PART: Final = {
    ".alias": "uuid",
    ".image.options.detail": "image_url.detail",
    ".embedding.grid_thw": "image_embeds.image_grid_thw",
    ".embedding.image_size": "image_embeds.image_sizes",
    ".reference": "image_embeds.ref",
}
_OF_THE_CHAT: Final = {
    "chat_template_variables_json": "chat_template_kwargs",
}
_CALL_NAME: Final = re.compile(r"(\.tool_calls\[\d+\])\.name$")
_ALL_PARTS: Final = re.compile(r"^(messages\[\d+\])\.parts$")
_SAMPLING: Final = {
    "min_token_count": "min_tokens",
    "choice_count": "n",
    "top_logprob_count": "top_logprobs",
}


@dataclass(frozen=True)
class Places:
    """Where in the JSON each part of a request came from; messages and parts keep their order.

    `parts[i][j]` is the path of part `j` within the content of message `i`, empty for a content
    that was one text. `limit` names the field that bounds the answer.
    """

    parts: tuple[tuple[str, ...], ...]
    limit: str
    constraint: Constraint | None = None

    def told(self, error: ChiasmError) -> ChiasmError:
        """`error` of the LLM service with its field as a path of the JSON."""
        if error.reason is Reason.CANCELLED:  # not by our caller, who still waits
            return ChiasmError(Reason.NOT_READY, "The LLM service stopped; try again.")
        code = error.metadata.get("code")
        metadata = {"code": code} if code else {}
        if error.reason is Reason.ENCODER_MISMATCH and not self._is_embedding(error.field):
            # The caller sent a picture: encoders and language model do not belong together.
            metadata["http_status"] = "502"
        field = None if error.field is None else self._path(error.field)
        return ChiasmError(error.reason, error.message, field, error.retry_after, metadata)

    def _path(self, field: str) -> str:
        part = _OF_A_PART.match(field)
        if part:
            inner = self._inner(part)
            rest = field[part.end() :]
            if rest in _OF_THE_REQUEST:
                return _OF_THE_REQUEST[rest]
            if inner and rest in _WITHIN_A_PART:
                inner = f"[{part[2]}].{_WITHIN_A_PART[rest]}"
            return f"messages[{part[1]}].content{inner}"
        if field.startswith("constraint") and self.constraint is not None:
            return self.constraint.path(field)
        if (about_tools := tools.path_of(field)) is not None:
            return about_tools
        if field in _OF_THE_CHAT:
            return _OF_THE_CHAT[field]
        if field.startswith("sampling."):
            name = field.removeprefix("sampling.")
            return self.limit if name == "max_token_count" else _SAMPLING.get(name, name)
        return _CALL_NAME.sub(r"\1.function.name", _ALL_PARTS.sub(r"\1.content", field))

    def _is_embedding(self, field: str | None) -> bool:
        part = _OF_A_PART.match(field or "")
        return part is not None and ".image_embeds" in self._inner(part)

    def _inner(self, part: re.Match[str]) -> str:
        message, number = int(part[1]), int(part[2])
        known = self.parts[message] if message < len(self.parts) else ()
        return known[number] if number < len(known) else ""


@dataclass(frozen=True)
class Asked:
    """A request as the LLM service takes it, and what tells its errors in JSON's terms."""

    wired: wire.Wired[llm_service_pb2.GenerateRequest]
    places: Places


async def translate(parsed: Parsed, card: Card, limits: PictureLimits) -> Asked:
    """The LLM service's form of a request. Raises ChiasmError with the path of the fault."""
    chat = parsed.chat
    check_image_count(chat.messages, min(limits.max_images, card.max_image_count))
    reader = PartReader(limits, card, wire.Buffers(), parsed.data, chat.mm_processor_kwargs)
    messages = [
        await _translate_message(message, f"messages[{number}]", reader)
        for number, message in enumerate(chat.messages)
    ]
    constraint = constraint_of(chat)
    request = _S.GenerateRequest(
        model=chat.model,
        messages=messages,
        sampling=sampling_of(chat),
        cache_salt=chat.cache_salt or "",
        constraint=None if constraint is None else constraint.message,
        tools=tools.tool_options(chat.tools, chat.tool_choice, chat.parallel_tool_calls),
        chat_template_variables_json=_variables_of(chat),
        continue_final_message=chat.continue_final_message or None,
    )
    return Asked(wire.Wired(request, reader.buffers), places_of(chat, constraint))


def _variables_of(chat: ChatRequest) -> str | None:
    variables = chat.chat_template_kwargs
    return json.dumps(variables) if variables else None


def check_model(asked: str, card: Card) -> None:
    """Raises MODEL_NOT_FOUND unless `asked` is what is served."""
    if asked != card.model_id:
        text = f"There is no such model here; the one served is {card.model_id!r}."
        raise ChiasmError(Reason.MODEL_NOT_FOUND, text, "model")


def sampling_of(chat: ChatRequest) -> llm_service_pb2.SamplingParameters:
    """How the answer is drawn; what the request leaves open stays open."""
    newer = chat.max_completion_tokens
    sampling = drawn(chat)
    sampling.MergeFrom(
        _S.SamplingParameters(
            max_token_count=newer, logprobs=chat.logprobs, top_logprob_count=chat.top_logprobs
        )
    )
    return sampling


def drawn(request: Drawn) -> llm_service_pb2.SamplingParameters:
    """What chats and text completions share of how an answer is drawn."""
    return _S.SamplingParameters(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k is None else max(request.top_k, 0),
        min_p=request.min_p,
        seed=request.seed,
        max_token_count=request.max_tokens,
        min_token_count=request.min_tokens,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias={int(token): bias for token, bias in request.logit_bias.items()},
        choice_count=request.n,
    )


async def _translate_message(
    message: Message, place: str, reader: PartReader
) -> llm_service_pb2.Message:
    calls = [
        _S.ToolCall(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
        for call in message.tool_calls
    ]
    return _S.Message(
        role=_ROLES[message.role],
        parts=await reader.read(message, place),
        name=message.name,
        tool_calls=calls,
        tool_call_id=message.tool_call_id if message.role == "tool" else None,
    )


def check_image_count(messages: Sequence[Message], limit: int) -> None:
    """Raises TOO_MANY_IMAGES for more than `limit` pictures and embeddings."""
    count = sum(
        isinstance(part, ImageUrlPart | ImageEmbedsPart)
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
    )
    if count > limit:
        text = f"The conversation has {count} pictures, in all its messages; the limit is {limit}."
        raise ChiasmError(Reason.TOO_MANY_IMAGES, text, "messages")


def places_of(chat: ChatRequest, constraint: Constraint | None = None) -> Places:
    """The paths of `chat`, without its content."""
    newer = chat.max_completion_tokens is not None
    return Places(
        tuple(_inner_paths(message.content) for message in chat.messages),
        "max_completion_tokens" if newer else "max_tokens",
        constraint,
    )


def _inner_paths(content: str | list[Part] | None) -> tuple[str, ...]:
    if not isinstance(content, list):
        return ("",)
    return tuple(f"[{number}].{_field_of(part)}" for number, part in enumerate(content))


def _field_of(part: Part) -> str:
    if isinstance(part, ImageUrlPart):
        return "image_url.url"
    given = part.image_embeds if isinstance(part, ImageEmbedsPart) else None
    nested = isinstance(given, dict) and given.get("image_embeds") is not None
    return "image_embeds.image_embeds" if nested else part.type
