"""The body of `POST /v1/chat/completions`, as far as it is served.

Null is the same as absent. Fields that are unknown are ignored, as OpenAI's clients echo back what
they were sent; fields that are known, would change the answer and are not served are refused by
`parse`. Types are strict: `"1"` is no number.
"""

import re
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
)
from pydantic_core import PydanticCustomError

from gateway.openai import paths
from gateway.openai.base import Body as Body
from gateway.openai.base import JsonObject, sound
from gateway.openai.base import Text as Text
from gateway.openai.tools import Kind, ToolChoice, Tools

PART_TYPES: Final = ("text", "image_url", "image_embeds", "refusal")
UNSERVED_PART_TYPES: Final = frozenset(
    {"input_audio", "audio_url", "audio_embeds", "video_url", "video_embeds", "file"}
)
_TOKEN: Final = re.compile("[0-9]{1,10}")
_MAX_INT32: Final = 2**31 - 1
_MAX_ALIAS_BYTES: Final = 256
_MAX_STOPS: Final = 16
_MAX_STOP_LENGTH: Final = 256


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_image_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


def _content_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<parts>" if isinstance(value, list) else None


def _embeds_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "<base64>"
    return "<object>" if isinstance(value, dict) else None


def _part_tag(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is None:  # some clients leave it out, as the other field says it
        kind = next((name for name in PART_TYPES if name in value), None)
    if isinstance(kind, str) and kind in UNSERVED_PART_TYPES:
        return "<unserved>"
    return f"<{kind}>" if kind in PART_TYPES else None


def _short_alias(alias: str) -> str:
    if len(sound(alias).encode()) > _MAX_ALIAS_BYTES:
        raise PydanticCustomError("string_too_long", "The uuid has more than 256 bytes in UTF-8.")
    return alias


def _sound_biases(biases: dict[str, float]) -> dict[str, float]:
    """One fault names the whole field, as OpenAI has no path into it."""
    for token, bias in biases.items():
        if not _TOKEN.fullmatch(token) or int(token) > _MAX_INT32:
            raise PydanticCustomError(
                "bias_token", "The keys of logit_bias are token ids, written as whole numbers."
            )
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or not -100 <= bias <= 100:
            raise PydanticCustomError(
                "bias_value", "The values of logit_bias are numbers from -100 to 100."
            )
    return biases


Name = Annotated[str, Field(max_length=64), AfterValidator(sound)]
StopText = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_LENGTH), AfterValidator(sound)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT32)]
LogitBias = Annotated[dict[str, Any], AfterValidator(_sound_biases)]
Detail = Literal["low", "high", "auto", "original"]
Alias = Annotated[str, Field(min_length=1), AfterValidator(_short_alias)]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataText = Annotated[str, Field(max_length=512)]
PixelCount = Annotated[int, Field(ge=1, le=_MAX_INT32)]


Embeds = Annotated[
    Annotated[str, Tag("<base64>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(
        _embeds_tag,
        custom_error_type="embeds_type",
        custom_error_message="The embedding is a text, base64 of a file of torch.save, numpy.save "
        "or safetensors, or an object with that text under image_embeds, with data, dtype and "
        "shape, or with a ref.",
    ),
]


class TextPart(Body):
    """A piece of text."""

    type: Literal["text"] = "text"
    text: Text


class RefusalPart(Body):
    """The model's own refusal in an earlier turn, sent back."""

    type: Literal["refusal"] = "refusal"
    refusal: Text


class ImageUrl(Body):
    """A picture by its URL, and how closely to look at it."""

    url: str
    detail: Detail = "auto"


class ImageUrlPart(Body):
    """A picture; the URL alone is taken too, as some clients send it.

    `uuid` is the caller's own name of it; with one, the picture itself may be left out.
    """

    type: Literal["image_url"] = "image_url"
    image_url: Annotated[ImageUrl, BeforeValidator(_as_image_url)] | None = None
    uuid: Alias | None = None


class ImageEmbedsPart(Body):
    """Precomputed features: base64 of a file of torch.save, numpy.save or safetensors, alone or in
    an object, whose forms `gateway.openai.embeds` lists. `uuid` as for pictures. The last two stand
    in that object; here they are read only to say so."""

    type: Literal["image_embeds"] = "image_embeds"
    image_embeds: Embeds | None = None
    uuid: Alias | None = None
    image_grid_thw: Any = None
    image_sizes: Any = None


class UnservedPart(Body):
    """A kind of content that no served model takes."""

    type: str = ""


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ImageUrlPart, Tag("<image_url>")]
    | Annotated[ImageEmbedsPart, Tag("<image_embeds>")]
    | Annotated[UnservedPart, Tag("<unserved>")],
    Discriminator(
        _part_tag,
        custom_error_type=paths.PART_TYPE,
        custom_error_message=f"The type of a part is one of {', '.join(PART_TYPES)}.",
    ),
]
Content = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[Part], Field(fail_fast=True), Tag("<parts>")],
    Discriminator(
        _content_tag,
        custom_error_type="content_type",
        custom_error_message="The content is a text or a list of parts.",
    ),
]


class Function(Body):
    """The function of an earlier tool call; its arguments are text, whole JSON or not."""

    name: Text
    arguments: Text = ""


class ToolCall(Body):
    """A tool call in an earlier turn."""

    id: Text
    type: Kind = "function"
    function: Function


class Message(Body):
    """One message of the conversation. Its content may be absent for the assistant alone."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list, fail_fast=True, max_length=128)
    tool_call_id: Text | None = None
    # Read only to be refused: leaving it out would change the conversation.
    function_call: Any = None


class PixelBounds(Body):
    """Least and greatest height times width of each picture after scaling; `parse` refuses the
    names that it does not know."""

    model_config = ConfigDict(extra="allow")

    min_pixels: PixelCount | None = None
    max_pixels: PixelCount | None = None


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False


class Drawn(Body):
    """How an answer is drawn and sent: the fields that chats and text completions share.

    Further fields stay in `model_extra`, for `parse` to judge.
    """

    model_config = ConfigDict(extra="allow")

    model: Text
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INT32)
    min_tokens: int | None = Field(None, ge=0, le=_MAX_INT32)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    # -1 is vLLM's way to say "all".
    top_k: int | None = Field(None, ge=-1, le=_MAX_INT32)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[
        list[StopText], Field(max_length=_MAX_STOPS, fail_fast=True), BeforeValidator(_as_list)
    ] = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=1024, fail_fast=True)
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=128)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    logit_bias: LogitBias = Field(default_factory=dict)
    # Separates prefix-cache entries: requests of other salts cannot tell what this one asked.
    cache_salt: (
        Annotated[str, Field(min_length=1, max_length=128), AfterValidator(sound)] | None
    ) = None


class ChatRequest(Drawn):
    """The body of a chat."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_INT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    mm_processor_kwargs: PixelBounds | None = None
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    # Kept by OpenAI beside the answer; nothing is kept here, so it is checked and left out.
    metadata: Annotated[dict[MetadataKey, MetadataText], Field(max_length=16)] | None = None
    response_format: Any = None
