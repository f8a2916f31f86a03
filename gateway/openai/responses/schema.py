"""The body of `POST /v1/responses`, as far as it differs from a chat's.

Format: https://platform.openai.com/docs/api-reference/responses/create. What has the same name and
the same meaning in a chat is not read here but judged by the chat's own schema. Null is the same as
absent, and fields that are unknown are ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from chiasm.errors import ChiasmError, Reason
from gateway.openai import paths
from gateway.openai.base import Body, Text
from gateway.openai.errors import invalid
from gateway.openai.schema import Detail

_ITEMS: Final = ("message", "function_call", "function_call_output", "reasoning")
_PARTS: Final = ("input_text", "input_image", "image_embeds", "output_text", "refusal")
_UNSERVED_PARTS: Final = frozenset({"input_file", "input_audio"})
_CHOICES: Final = ("none", "auto", "required")
LOGPROBS: Final = "message.output_text.logprobs"
# Of the other values each asks for a part of items that never occur here.
_INCLUDABLE: Final = frozenset(
    {
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
_MAX_METADATA: Final = 16
_MAX_KEY: Final = 64
_MAX_VALUE: Final = 512
_MAX_INT32: Final = 2**31 - 1


def _kind_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else None


def _item_tag(value: Any) -> str | None:
    kind = _kind_of(value)
    if kind is None and isinstance(value, dict):
        kind = "message" if "role" in value else "item_reference" if "id" in value else None
    return f"<{kind}>" if kind in (*_ITEMS, "item_reference") else None


def _part_tag(value: Any) -> str | None:
    kind = _kind_of(value)
    if isinstance(kind, str) and kind in _UNSERVED_PARTS:
        return "<unserved>"
    return f"<{kind}>" if kind in _PARTS else None


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


def _choice_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "<mode>"
    return "<object>" if isinstance(value, dict) else None


def _sound_metadata(pairs: dict[str, str]) -> dict[str, str]:
    """One fault names the whole field: keys are the caller's, and are not echoed."""
    if len(pairs) > _MAX_METADATA:
        raise PydanticCustomError("too_long", "The metadata has more than 16 pairs.")
    for key, value in pairs.items():
        if not isinstance(value, str):
            raise PydanticCustomError("metadata_type", "The values of metadata are texts.")
        if len(key) > _MAX_KEY or len(value) > _MAX_VALUE:
            raise PydanticCustomError(
                "string_too_long",
                "A key of metadata has at most 64 characters, a value at most 512.",
            )
    return pairs


def _sound_include(names: list[str]) -> list[str]:
    if not _INCLUDABLE.issuperset(names):
        told = f"Of include only {LOGPROBS} changes an answer; other values are OpenAI's own names."
        raise PydanticCustomError("include_value", told)
    return names


class InputText(Body):
    """A piece of text."""

    type: Literal["input_text"]
    text: Text


class OutputText(Body):
    """Text of an earlier answer, sent back."""

    type: Literal["output_text"]
    text: Text


class Refusal(Body):
    """The model's own refusal in an earlier answer, sent back."""

    type: Literal["refusal"]
    refusal: Text


class InputImage(Body):
    """A picture by its URL. `file_id` is read only to refuse it."""

    type: Literal["input_image"]
    image_url: str | None = None
    detail: Detail = "auto"
    file_id: Any = None


class UnservedPart(Body):
    """A kind of content that no served model takes."""

    type: str


Part = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[OutputText, Tag("<output_text>")]
    | Annotated[Refusal, Tag("<refusal>")]
    | Annotated[InputImage, Tag("<input_image>")]
    # As in a chat, whose schema judges it.
    | Annotated[dict[str, Any], Tag("<image_embeds>")]
    | Annotated[UnservedPart, Tag("<unserved>")],
    Discriminator(
        _part_tag,
        custom_error_type=paths.PART_TYPE,
        custom_error_message=f"The type of a part is one of {', '.join(_PARTS)}.",
    ),
]
Content = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[Part], Field(fail_fast=True), Tag("<list>")],
    Discriminator(
        _text_or_list,
        custom_error_type="content_type",
        custom_error_message="The content is a text or a list of parts.",
    ),
]


class Message(Body):
    """Somebody's words: the caller's, or an earlier answer's, sent back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class FunctionCall(Body):
    """A call in an earlier answer, sent back; its arguments are text, whole JSON or not."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class FunctionCallOutput(Body):
    """What the function that was called gave."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content


class Reasoning(Body):
    """A model's thoughts, sent back. No template takes them, so they are left out."""

    type: Literal["reasoning"]


class ItemReference(Body):
    """An item that a server with state would hold."""


Item = Annotated[
    Annotated[Message, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[Reasoning, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(
        _item_tag,
        custom_error_type=paths.PART_TYPE,
        custom_error_message=f"The type of an item is one of {', '.join(_ITEMS)}.",
    ),
]
Input = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Item], Field(min_length=1, fail_fast=True), Tag("<list>")],
    Discriminator(
        _text_or_list,
        custom_error_type="input_type",
        custom_error_message="The input is a text or a list of items.",
    ),
]


class Tool(Body):
    """A tool; only functions are served. Name and parameters are judged by the chat's schema."""

    type: str
    name: Any = None
    description: Any = None
    parameters: Any = None
    strict: Any = None


class Choice(Body):
    """The one tool to be called."""

    type: str
    name: Text | None = None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[Choice, Tag("<object>")],
    Discriminator(
        _choice_tag,
        custom_error_type="choice_type",
        custom_error_message=f"The choice is one of {', '.join(_CHOICES)}, or an object.",
    ),
]


class TextOptions(Body):
    """How the text is wanted. The format, here flat, is judged by the chat's schema."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(Body):
    """The request. Further fields stay in `model_extra`."""

    model_config = ConfigDict(extra="allow")

    input: Input
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=_MAX_INT32)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: Annotated[list[str], AfterValidator(_sound_include)] = Field(default_factory=list)
    text: TextOptions = TextOptions()
    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    metadata: Annotated[dict[str, Any], AfterValidator(_sound_metadata)] = Field(
        default_factory=dict
    )
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    # Nothing is ever stored; most clients leave it out, which to OpenAI means true.
    store: bool = False
    background: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include


def read(value: Any) -> ResponsesRequest:
    """The request in parsed JSON. Raises REQUEST_INVALID or UNSUPPORTED with the path at fault."""
    try:
        request = ResponsesRequest.model_validate(value)
    except ValidationError as faults:
        first = faults.errors(include_url=False, include_context=False, include_input=False)[0]
        raise paths.told(first) from None
    _refuse_unserved(request)
    return request


@dataclass(frozen=True)
class _Unserved:
    """A field whose silence would lie, what of it changes nothing, and what to do instead."""

    harmless: Callable[[Any], bool]
    told: str


def _off(value: Any) -> bool:
    return not value


def _never(_: Any) -> bool:
    return False


def _moved(name: str) -> _Unserved:
    return _Unserved(_never, f"In Responses this field is named {name}; use that.")


_UNSERVED: Final[Mapping[str, _Unserved]] = {
    "previous_response_id": _Unserved(
        _never, "Nothing is stored here; send the earlier items in input."
    ),
    "conversation": _Unserved(
        _never, "Nothing is stored here; send the conversation's items in input."
    ),
    "prompt": _Unserved(
        _never, "No prompts are stored here; send their text in instructions or input."
    ),
    "background": _Unserved(
        _off, "Answers are not made in the background; leave it out, and stream long answers."
    ),
    "truncation": _Unserved(
        lambda value: value == "disabled",
        "Input is never truncated here; leave it out, and send less where it is too long.",
    ),
    "context_management": _Unserved(_off, "Input is never compacted here; leave it out."),
    "moderation": _Unserved(_never, "Nothing is moderated here; leave it out."),
    # Names that chats have for fields of Responses, and OpenAI refuses here as well.
    "messages": _moved("input"),
    "max_tokens": _moved("max_output_tokens"),
    "max_completion_tokens": _moved("max_output_tokens"),
    "response_format": _moved("text.format"),
    "n": _Unserved(lambda value: value == 1, "A response is one answer; leave n out."),
}


def _refuse_unserved(request: ResponsesRequest) -> None:
    given = {name: getattr(request, name) for name in request.model_fields_set}
    given |= request.model_extra or {}
    for name, field in _UNSERVED.items():
        value = given.get(name)
        if value is not None and not field.harmless(value):
            raise ChiasmError(Reason.UNSUPPORTED, field.told, name)
    _refuse_tools(request)
    if isinstance(request.input, list):
        for number, item in enumerate(request.input):
            _refuse_item(f"input[{number}]", item)


def _refuse_tools(request: ResponsesRequest) -> None:
    for number, tool in enumerate(request.tools):
        if tool.type != "function":
            text = "Only tools of type function are served; run others yourself as functions."
            raise ChiasmError(Reason.UNSUPPORTED, text, f"tools[{number}].type")
    choice = request.tool_choice
    if isinstance(choice, Choice):
        if choice.type != "function":
            text = f"The choice is one of {', '.join(_CHOICES)}, or names one function."
            raise ChiasmError(Reason.UNSUPPORTED, text, "tool_choice.type")
        if choice.name is None:
            text = "The required field tool_choice.name is missing."
            raise invalid(text, "tool_choice.name", "missing_required_parameter")


def _refuse_item(place: str, item: Item) -> None:
    if isinstance(item, ItemReference):
        text = "Nothing is stored here; send the item itself in place of a reference to it."
        raise ChiasmError(Reason.UNSUPPORTED, text, place)
    if isinstance(item, Message):
        _refuse_parts(f"{place}.content", item.content)
    if isinstance(item, FunctionCallOutput):
        _refuse_parts(f"{place}.output", item.output)


def _refuse_parts(place: str, content: Content) -> None:
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, UnservedPart):
            text = f"Parts of type {part.type} are not served by this model; leave the part out."
            raise ChiasmError(Reason.UNSUPPORTED, text, f"{place}[{number}].type")
        if isinstance(part, InputImage):
            _check_image(f"{place}[{number}]", part)


def _check_image(place: str, image: InputImage) -> None:
    if image.file_id is not None:
        text = "No files are stored here; send the picture as a URL in image_url."
        raise ChiasmError(Reason.UNSUPPORTED, text, f"{place}.file_id")
    if image.image_url is None:
        param = f"{place}.image_url"
        text = f"The required field {param} is missing."
        raise invalid(text, param, "missing_required_parameter")
