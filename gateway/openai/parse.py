"""From the bytes of a body to a checked `ChatRequest`. Pure; raises ChiasmError with the path."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from pydantic import ValidationError
from pydantic_core import from_json

from chiasm.errors import ChiasmError, Reason
from gateway.openai import paths
from gateway.openai.constraint import constraint_of
from gateway.openai.errors import invalid
from gateway.openai.pulled import Data, all_placed, pull
from gateway.openai.schema import (
    ChatRequest,
    ImageEmbedsPart,
    ImageUrlPart,
    Message,
    Part,
    PixelBounds,
)
from gateway.openai.tools import check_choice

# Each element of a list or an object costs up to a hundred bytes once parsed, and one comma here.
_MAX_COMMAS: Final = 1_000_000
_LONGEST_NAME: Final = 64
_POSITION: Final = re.compile(r"at (line \d+ column \d+)$")


def _off(value: Any) -> bool:
    """Empty or false: as if it were absent."""
    return not value


def _leaves_choice(value: Any) -> bool:
    return value in ("none", "auto")


# What would change the answer and is not served, with the values of it that change nothing.
_HARMLESS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "functions": _off,
    "function_call": _leaves_choice,
    "modalities": lambda value: value == ["text"],
    "audio": _off,
    "prediction": _off,
    "web_search_options": lambda value: False,
    "moderation": lambda value: False,
    # Beyond OpenAI: names that other servers of the same interface take.
    "add_special_tokens": _off,
    "allowed_token_ids": _off,
    "bad_words": _off,
    "best_of": lambda value: value == 1,
    "chat_template": _off,
    "documents": _off,
    "echo": _off,
    "ec_transfer_params": _off,
    "guided_whitespace_pattern": _off,
    "include_stop_str_in_output": _off,
    "kv_transfer_params": _off,
    "length_penalty": lambda value: value == 1,
    "logprob_token_ids": _off,
    "logits_processors": _off,
    "media_io_kwargs": _off,
    "min_pixels": _off,
    "max_pixels": _off,
    "prompt_logprobs": lambda value: value is False,
    "repetition_detection": _off,
    "return_prompt_text": _off,
    "return_token_ids": _off,
    "return_tokens_as_token_ids": _off,
    "skip_special_tokens": lambda value: value is True,
    "thinking_token_budget": lambda value: value == -1,
    "truncate_prompt_tokens": lambda value: False,
    "use_beam_search": _off,
    "vllm_xargs": _off,
    "watermarking": _off,
}


@dataclass(frozen=True)
class Parsed:
    """A request, and the large base64 texts that were decoded beside it."""

    chat: ChatRequest
    data: Data


async def parse_body(body: bytearray) -> Parsed:
    """As `parse_chat`; however large the pictures in `body` are, other requests go on."""
    pulled = await pull(body)
    if pulled.data:
        value = read_json(pulled.body)
        if all_placed(value, pulled.data):
            return Parsed(checked(value), pulled.data)
    return Parsed(parse_chat(body), {})


def parse_chat(body: bytes | bytearray) -> ChatRequest:
    """The request in `body`. Raises REQUEST_INVALID or UNSUPPORTED with the field at fault."""
    return checked(read_json(body))


def checked(value: Any) -> ChatRequest:
    try:
        request = ChatRequest.model_validate(value)
    except ValidationError as faults:
        first = faults.errors(include_url=False, include_context=False, include_input=False)[0]
        raise paths.told(first) from None
    _check_together(request)
    constraint_of(request)
    _refuse_unserved(request)
    return request


def read_json(body: bytes | bytearray) -> Any:
    if not body:
        raise invalid("The body is empty; send a JSON object.", None, "invalid_json")
    if body.count(b",") > _MAX_COMMAS:
        raise invalid(f"The body has more than {_MAX_COMMAS} elements.", None, "invalid_json")
    try:
        value = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        value = _read_lenient(body, str(error))
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.", None, "invalid_type")
    return value


def _read_lenient(body: bytes | bytearray, fault: str) -> Any:
    """JSON whose one fault is half a surrogate pair, so that the schema can say in which text."""
    if "surrogate" in fault or "hex escape" in fault:
        try:
            return json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            pass
    position = _POSITION.search(fault)
    place = f" (at {position[1]})" if position else ""
    text = f"The body is not valid JSON in UTF-8{place}, or it is nested too deeply."
    raise invalid(text, None, "invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _check_together(request: ChatRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream to be true.", "stream_options")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs to be true.", "top_logprobs")
    check_choice(request.tools, request.tool_choice)
    _check_continued(request)
    if request.mm_processor_kwargs is not None:
        _check_bounds(request.mm_processor_kwargs)
    for number, message in enumerate(request.messages):
        _check_message(f"messages[{number}]", message)


def _check_continued(request: ChatRequest) -> None:
    if request.add_generation_prompt is None:
        return
    if request.add_generation_prompt is request.continue_final_message:
        text = "add_generation_prompt is false where continue_final_message is true, and else true."
        raise invalid(text, "add_generation_prompt")


def _check_bounds(bounds: PixelBounds) -> None:
    for name in bounds.model_extra or {}:
        text = "Of mm_processor_kwargs only min_pixels and max_pixels are served; leave others out."
        known = name.isidentifier() and name.isascii() and len(name) <= _LONGEST_NAME
        inner = f".{name}" if known else ""
        raise ChiasmError(Reason.UNSUPPORTED, text, f"mm_processor_kwargs{inner}")
    least, most = bounds.min_pixels, bounds.max_pixels
    if least is not None and most is not None and least > most:
        text = f"min_pixels is {least}, above max_pixels, which is {most}."
        raise invalid(text, "mm_processor_kwargs.min_pixels")


def _check_message(place: str, message: Message) -> None:
    if isinstance(message.content, list):
        for number, part in enumerate(message.content):
            _check_part(f"{place}.content[{number}]", part)
    if message.function_call:
        text = "Functions without a call's id are not served; send tool_calls and a tool message."
        raise ChiasmError(Reason.UNSUPPORTED, text, f"{place}.function_call")
    if message.role == "assistant":
        return
    if message.tool_calls:
        raise invalid("Only the assistant makes tool calls.", f"{place}.tool_calls")
    if message.content is None:
        param = f"{place}.content"
        text = f"The required field {param} is missing."
        raise invalid(text, param, "missing_required_parameter")
    if message.content == []:
        raise invalid("The content has no part.", f"{place}.content", "empty_array")


def _check_part(place: str, part: Part) -> None:
    """A picture may be left out where its uuid names one that was sent before."""
    if isinstance(part, ImageEmbedsPart):
        _check_beside(place, part)
    match part:
        case (
            ImageUrlPart(image_url=None, uuid=None) | ImageEmbedsPart(image_embeds=None, uuid=None)
        ):
            param = f"{place}.{part.type}"
            text = f"The required field {param} is missing, and there is no uuid in its stead."
            raise invalid(text, param, "missing_required_parameter")


def _check_beside(place: str, part: ImageEmbedsPart) -> None:
    for name in ("image_grid_thw", "image_sizes"):
        if getattr(part, name) is not None:
            text = (
                f"{name} belongs into the object image_embeds, beside the rows: "
                f'{{"image_embeds": {{"image_embeds": ..., "{name}": ...}}}}.'
            )
            raise invalid(text, f"{place}.{name}")


def _refuse_unserved(request: ChatRequest) -> None:
    given = {name: getattr(request, name) for name in request.model_fields_set}
    given |= request.model_extra or {}
    for name, harmless in _HARMLESS.items():
        value = given.get(name)
        if value is None or harmless(value):
            continue
        text = f"This version does not serve {name} with that value; leave it out."
        raise ChiasmError(Reason.UNSUPPORTED, text, name)
