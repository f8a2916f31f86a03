"""A `ResponsesRequest` to the body of a chat, and paths in that body back to the request. Pure."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, assert_never

from chiasm.errors import ChiasmError, Reason
from gateway.openai.errors import invalid
from gateway.openai.responses.schema import (
    Choice,
    Content,
    FunctionCall,
    FunctionCallOutput,
    InputImage,
    InputText,
    Message,
    OutputText,
    Part,
    Refusal,
    ResponsesRequest,
    Tool,
    UnservedPart,
)

Json = dict[str, Any]

# The same name and meaning in both. After the first line: what chats take beyond OpenAI's fields of
# Responses, so that a client can ask for it here as well.
SHARED: Final = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls",
    "add_generation_prompt", "cache_salt", "chat_template_kwargs", "continue_final_message",
    "frequency_penalty", "ignore_eos", "logit_bias", "min_p", "min_tokens", "mm_processor_kwargs",
    "presence_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids",
    "structured_outputs", "top_k",
)  # fmt: skip
_MESSAGE: Final = re.compile(r"messages\[(\d+)\]")
_CALL: Final = re.compile(r"\.tool_calls\[(\d+)\]")
_TOOL: Final = re.compile(r"^(tools\[\d+\])\.function\b")
_WITHIN_A_CALL: Final = {
    ".id": ".call_id",
    ".function.name": ".name",
    ".function.arguments": ".arguments",
}
# The first that begins a path is replaced.
_PREFIXES: Final[Mapping[str, str]] = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.function": "tool_choice",
    "logprobs": "include",
    "messages": "input",
}


@dataclass(frozen=True)
class Origin:
    """Where a message of the chat came from: paths of it, of its content and of its tool calls.

    `item` is the index of the item with its content; None for instructions and a text.
    """

    place: str
    content: str
    item: int | None = None
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Origins:
    """The origin of each message of a chat, in its order."""

    messages: tuple[Origin, ...]

    def told(self, error: ChiasmError) -> ChiasmError:
        """`error` of the chat with its field as a path of the request."""
        if error.field is None:
            return error
        place = self.path(error.field)
        # A bare name is also a word.
        named = "." in error.field or "[" in error.field
        message = error.message.replace(error.field, place) if named else error.message
        return ChiasmError(error.reason, message, place, error.retry_after, error.metadata)

    def path(self, field: str) -> str:
        """The path in the request of a path in the chat."""
        message = _MESSAGE.match(field)
        if message:
            return _within(self.messages[int(message[1])], field[message.end() :])
        for chat, own in _PREFIXES.items():
            if field == chat or field.startswith((f"{chat}.", f"{chat}[")):
                return own + field.removeprefix(chat)
        return _TOOL.sub(r"\1", field)

    def item_of(self, message: int) -> int:
        """The index within the input of the item with a message's content; 0 for a text."""
        return self.messages[message].item or 0


def _within(origin: Origin, rest: str) -> str:
    call = _CALL.match(rest)
    if call:
        return origin.calls[int(call[1])] + _WITHIN_A_CALL.get(rest[call.end() :], "")
    if rest.startswith(".content"):
        inner = rest.removeprefix(".content")
        return origin.content + inner.replace(".image_url.url", ".image_url").replace(
            ".image_url.detail", ".detail"
        )
    return f"{origin.place}.call_id" if rest == ".tool_call_id" else origin.place


def to_chat(request: ResponsesRequest) -> tuple[Json, Origins]:
    """The body of the chat that asks the same, and where its messages came from.

    Raises REQUEST_INVALID for an output whose call is not in the input.
    """
    messages, origins = [], []
    for message, origin in _messages(request):
        messages.append(message)
        origins.append(origin)
    if not messages:
        raise invalid("The input holds no message; add one.", "input", "empty_array")
    given = request.model_extra or {}
    chat = {name: given[name] for name in SHARED if name in given}
    return chat | _renamed(request) | {"messages": messages}, Origins(tuple(origins))


def _renamed(request: ResponsesRequest) -> Json:
    wanted = request.wants_logprobs
    fields = {
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": wanted or None,
        "top_logprobs": request.top_logprobs if wanted else None,
        "response_format": _format(request.text.format),
        "tools": [_tool(tool) for tool in request.tools] or None,
        "tool_choice": _choice(request.tool_choice),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _format(given: Json | None) -> Json | None:
    if given is None or given.get("type") != "json_schema":
        return given
    inner = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": inner}


def _tool(tool: Tool) -> Json:
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": function}


def _choice(choice: str | Choice | None) -> str | Json | None:
    if isinstance(choice, Choice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _messages(request: ResponsesRequest) -> Iterator[tuple[Json, Origin]]:
    if request.instructions is not None:
        origin = Origin("instructions", "instructions")
        yield {"role": "system", "content": request.instructions}, origin
    if isinstance(request.input, str):
        yield {"role": "user", "content": request.input}, Origin("input", "input")
    else:
        yield from _Turns().of(request.input)


class _Turns:
    """Gathers items to messages: the calls that follow an answer are part of its message."""

    def __init__(self) -> None:
        self._answer: Json | None = None
        self._place = Origin("", "")
        self._known: set[str] = set()

    def of(self, items: list[Any]) -> Iterator[tuple[Json, Origin]]:
        for number, item in enumerate(items):
            match item:
                case FunctionCall():
                    self._call(item, number)
                case Message(role="assistant"):
                    yield from self._flushed()
                    self._answer = {"role": "assistant", "content": _content(item.content)}
                    self._place = _origin(number, "content")
                case Message():
                    yield from self._flushed()
                    message = {"role": item.role, "content": _content(item.content)}
                    yield message, _origin(number, "content")
                case FunctionCallOutput():
                    yield from self._flushed()
                    yield self._output(item, number), _origin(number, "output")
        yield from self._flushed()

    def _flushed(self) -> Iterator[tuple[Json, Origin]]:
        if self._answer is not None:
            yield self._answer, self._place
            self._answer = None

    def _call(self, item: FunctionCall, number: int) -> None:
        if self._answer is None:
            self._answer, self._place = {"role": "assistant"}, _origin(number, "name")
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._answer.setdefault("tool_calls", []).append(call)
        place = self._place
        calls = (*place.calls, f"input[{number}]")
        self._place = Origin(place.place, place.content, place.item, calls)
        self._known.add(item.call_id)

    def _output(self, item: FunctionCallOutput, number: int) -> Json:
        if item.call_id not in self._known:
            text = "No function_call with this call_id comes before its output; send both."
            raise invalid(text, f"input[{number}].call_id")
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}


def _origin(number: int, content: str) -> Origin:
    return Origin(f"input[{number}]", f"input[{number}].{content}", number)


def _content(content: Content) -> str | list[Json]:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Part) -> Json:
    match part:
        case InputImage(image_url=url, detail=detail):
            return {"type": "image_url", "image_url": {"url": url, "detail": detail}}
        case Refusal(refusal=refusal):
            return {"type": "refusal", "refusal": refusal}
        case InputText(text=text) | OutputText(text=text):
            return {"type": "text", "text": text}
        case UnservedPart(type=kind):
            raise ChiasmError(Reason.UNSUPPORTED, f"Parts of type {kind} are not served.")
        case dict():
            return part
        case _:
            assert_never(part)
