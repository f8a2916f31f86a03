"""Checks a request from the wire and turns it into plain values. Pure; raises ChiasmError.

The wire is not trusted: every role, count, range and combination is checked here, and what this
version does not do yet is refused by name rather than left out silently.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from chiasm import wire
from chiasm.errors import ChiasmError, Reason, within
from chiasm.models.contract import ContractError, PixelOptions
from chiasm.models.language import GenerationDefaults
from chiasm.models.wire import options_from_wire
from chiasm.v1 import image_pb2, llm_service_pb2
from llm_service.engine.values import MAX_TOP_LOGPROBS, SamplingParams

RoleName = Literal["system", "user", "assistant", "tool"]
_ROLES: dict[int, RoleName] = {
    llm_service_pb2.ROLE_SYSTEM: "system",
    llm_service_pb2.ROLE_USER: "user",
    llm_service_pb2.ROLE_ASSISTANT: "assistant",
    llm_service_pb2.ROLE_TOOL: "tool",
}
MAX_MESSAGES = 4096
# Of all messages together; adjacent texts can always be joined.
MAX_PARTS = 16_384
MAX_STOP_TOKEN_IDS = 1024
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_CHOICES = 128
ALIAS_LIMIT = 256
_ID_LIMIT = 128
_TENANT_LIMIT = 256
_FIRST_PART = "messages[0].parts[0]"
AboutAPicture = llm_service_pb2.HoldEmbeddingRequest | llm_service_pb2.PoolImageRequest
_SALT_LIMIT = 128
MAX_CALLS = 128
_NAME_LIMIT = 64
_CALL_NAME_LIMIT = 256
_VARIABLES = "chat_template_variables_json"
_VARIABLES_LIMIT = 4096


@dataclass(frozen=True)
class Text:
    """Text as the caller wrote it."""

    text: str


@dataclass(frozen=True)
class RawImage:
    """A picture file to be encoded."""

    data: memoryview
    options: PixelOptions


@dataclass(frozen=True)
class CallerEmbedding:
    """Features from outside, unchecked yet; `features` and `levels` are their bytes."""

    message: image_pb2.ImageEmbedding
    features: memoryview
    levels: tuple[memoryview, ...]


@dataclass(frozen=True)
class Reference:
    """Features that the service holds: under an id of its own, or the caller's alias if empty."""

    id: str


@dataclass(frozen=True)
class Picture:
    """A picture of any kind and where it stands in the request.

    Attributes:
        alias: the caller's own name of it within its tenant, empty if it gave none.
    """

    content: RawImage | CallerEmbedding | Reference
    message_index: int
    part_index: int
    alias: str = ""

    @property
    def part(self) -> str:
        return f"messages[{self.message_index}].parts[{self.part_index}]"

    @property
    def place(self) -> str:
        match self.content:
            case RawImage():
                return f"{self.part}.image"
            case CallerEmbedding():
                return f"{self.part}.embedding"
            case Reference(id):
                return f"{self.part}.{'reference' if id else 'alias'}"


Part = Text | Picture


@dataclass(frozen=True)
class PastCall:
    """A tool call of an earlier turn; `arguments` is text as it was sent, whole JSON or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """One message of the conversation.

    Attributes:
        name: of who speaks, empty if not told.
        calls: made by the assistant.
        call_id: of the call that a tool's message answers, empty if not told.
    """

    role: RoleName
    parts: tuple[Part, ...]
    name: str = ""
    calls: tuple[PastCall, ...] = ()
    call_id: str = ""


@dataclass(frozen=True)
class Conversation:
    """A checked conversation. `pictures` are in prompt order.

    Attributes:
        tools: definitions of tools, as the chat template takes them.
        variables: further variables of the template: texts, numbers and truth values.
        continued: the last turn is the assistant's, and the answer goes on with it.
    """

    turns: tuple[Turn, ...]
    tenant: str
    tools: tuple[dict[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return tuple(
            part for turn in self.turns for part in turn.parts if isinstance(part, Picture)
        )


def read_conversation(
    messages: Sequence[llm_service_pb2.Message],
    buffers: wire.Buffers,
    *,
    tenant: str,
    max_images: int,
    continued: bool = False,
) -> Conversation:
    """The conversation of a request. Raises REQUEST_INVALID, TOO_MANY_IMAGES and others."""
    if not messages:
        raise _invalid("messages", "A request needs at least one message.")
    if len(messages) > MAX_MESSAGES:
        raise _invalid("messages", f"At most {MAX_MESSAGES} messages, but {len(messages)} came.")
    if len(tenant) > _TENANT_LIMIT:
        raise _invalid("tenant", f"A tenant has at most {_TENANT_LIMIT} characters.")
    part_count = sum(len(message.parts) for message in messages)
    if part_count > MAX_PARTS:
        raise _invalid(
            "messages", f"All messages have at most {MAX_PARTS} parts, but {part_count} came."
        )
    _check_count(messages, max_images)
    turns = tuple(_read_turn(number, message, buffers) for number, message in enumerate(messages))
    if continued:
        _check_continued(turns[-1])
    return Conversation(turns, tenant, continued=continued)


def _check_continued(last: Turn) -> None:
    text_only = all(isinstance(part, Text) for part in last.parts)
    if last.role != "assistant" or last.calls or not text_only:
        raise _invalid(
            "continue_final_message",
            "What is continued is a last message of the assistant that is text.",
        )


def read_raw_prompt(message: llm_service_pb2.RawPrompt) -> str | tuple[int, ...]:
    """A prompt that no template makes: text, or token ids. Raises REQUEST_INVALID."""
    match message.WhichOneof("content"):
        case "text":
            if not message.text:
                raise _invalid("prompt.text", "A prompt has at least one character.")
            return message.text
        case "token_ids":
            if not message.token_ids.ids:
                raise _invalid("prompt.token_ids", "A prompt has at least one token.")
            return tuple(message.token_ids.ids)
        case _:
            raise _invalid("prompt", "A prompt is a text or token ids.")


def refuse_beside_prompt(request: llm_service_pb2.GenerateRequest) -> None:
    """Raises REQUEST_INVALID for what only a conversation has."""
    beside = {
        "messages": bool(request.messages),
        "tools": bool(request.tools.tools_json),
        "chat_template_variables_json": request.HasField("chat_template_variables_json"),
        "continue_final_message": request.continue_final_message,
    }
    for name, given in beside.items():
        if given:
            raise _invalid(name, "A prompt comes without this: no chat template is used.")


def read_salt(request: llm_service_pb2.GenerateRequest) -> bytes:
    """What separates the request's prefix-cache entries from others': tenant and cache salt.

    Each is framed by its length, so that no two pairs give the same bytes.
    """
    if len(request.cache_salt) > _SALT_LIMIT:
        raise _invalid("cache_salt", f"A cache salt has at most {_SALT_LIMIT} characters.")
    fields = (request.tenant.encode(), request.cache_salt.encode())
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def read_choice_count(wanted: llm_service_pb2.SamplingParameters) -> int:
    """How many answers are wanted. Raises REQUEST_INVALID."""
    count = wanted.choice_count if wanted.HasField("choice_count") else 1
    if not 1 <= count <= MAX_CHOICES:
        raise _invalid("sampling.choice_count", f"A request has 1 to {MAX_CHOICES} choices.")
    return count


def check_model(asked: str, served: str) -> None:
    """Raises MODEL_NOT_FOUND unless `asked` is empty or the served name."""
    if asked and asked != served:
        raise ChiasmError(
            Reason.MODEL_NOT_FOUND, f"This service serves the model {served!r} only.", "model"
        )


def read_variables(text: str, allowed: Collection[str]) -> dict[str, Any]:
    """Variables of the chat template, of the names in `allowed`.

    Raises REQUEST_INVALID for what is no JSON object of texts, numbers and truth values, and
    UNSUPPORTED for another name: a template may do anything with what it is given.
    """
    if len(text) > _VARIABLES_LIMIT:
        raise _invalid(_VARIABLES, f"The variables have at most {_VARIABLES_LIMIT} characters.")
    try:
        variables = json.loads(text)
    except (ValueError, RecursionError):
        variables = None
    if not isinstance(variables, dict):
        raise _invalid(_VARIABLES, "The variables of the template are a JSON object.")
    for name, value in variables.items():
        if name not in allowed:
            known = ", ".join(sorted(allowed)) or "none"
            text = f"The variables of the template that may be set here: {known}."
            raise ChiasmError(Reason.UNSUPPORTED, text, _VARIABLES)
        if not isinstance(value, str | int | float | bool):
            raise _invalid(_VARIABLES, f"{name} is a text, a number, true or false.")
    return variables


def read_sampling(
    wanted: llm_service_pb2.SamplingParameters, defaults: GenerationDefaults
) -> SamplingParams:
    """How the answer is drawn: the request's values, else the checkpoint's, else the schema's."""
    greedy = defaults.do_sample is False
    temperature = _chosen(wanted, "temperature", 0.0 if greedy else defaults.temperature, 1.0)
    with within("sampling"):
        _check_range("temperature", temperature, 0, 2)
        stops = _read_stops(wanted.stop)
        _check_seed_and_counts(wanted)
        return SamplingParams(
            temperature=temperature,
            top_p=_chosen(wanted, "top_p", defaults.top_p, 1.0),
            top_k=int(_chosen(wanted, "top_k", defaults.top_k, 0)),
            min_p=_chosen(wanted, "min_p", defaults.min_p, 0.0),
            seed=wanted.seed if wanted.HasField("seed") else None,
            max_tokens=_max_tokens(wanted, defaults),
            min_tokens=wanted.min_token_count,
            stop=stops,
            stop_token_ids=tuple(wanted.stop_token_ids),
            ignore_eos=wanted.ignore_eos,
            presence_penalty=_as_written(wanted.presence_penalty),
            frequency_penalty=_as_written(wanted.frequency_penalty),
            repetition_penalty=_chosen(
                wanted, "repetition_penalty", defaults.repetition_penalty, 1.0
            ),
            logit_bias=tuple((one, _as_written(bias)) for one, bias in wanted.logit_bias.items()),
            top_logprobs=_top_logprobs(wanted),
        )


def check_token_ids(sampling: SamplingParams, vocabulary_size: int) -> None:
    """Raises REQUEST_INVALID for a token outside the vocabulary."""
    fields = {
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": tuple(token_id for token_id, _ in sampling.logit_bias),
    }
    for name, token_ids in fields.items():
        wrong = next((one for one in token_ids if not 0 <= one < vocabulary_size), None)
        if wrong is not None:
            raise _invalid(
                f"sampling.{name}",
                f"Token ids run from 0 to {vocabulary_size - 1}, but {wrong} came.",
            )


def read_picture(request: AboutAPicture, buffers: wire.Buffers) -> tuple[Picture, str]:
    """The one picture of a request about one, and its tenant.

    Errors name the first part of the first message: see `as_one_part`.
    """
    if len(request.tenant) > _TENANT_LIMIT:
        raise _invalid("tenant", f"A tenant has at most {_TENANT_LIMIT} characters.")
    part = _read_part(0, 0, request.part, buffers)
    if isinstance(part, Text):
        raise _invalid(
            f"{_FIRST_PART}.text", "This takes a picture, an embedding, a reference or an alias."
        )
    return part, request.tenant


@contextmanager
def as_one_part() -> Iterator[None]:
    """Tells the errors of a request that has a `part` and no messages."""
    try:
        yield
    except ChiasmError as error:
        error.field = error.field and error.field.replace(_FIRST_PART, "part", 1)
        raise


def _read_turn(number: int, message: llm_service_pb2.Message, buffers: wire.Buffers) -> Turn:
    place = f"messages[{number}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise _invalid(f"{place}.role", "The role is system, user, assistant or tool.")
    _check_calls(place, role, message)
    calls = tuple(
        _read_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
    )
    if not message.parts and not calls:
        raise _invalid(f"{place}.parts", "A message needs at least one part.")
    parts = tuple(_read_part(number, i, part, buffers) for i, part in enumerate(message.parts))
    return Turn(role, parts, message.name, calls, message.tool_call_id)


def _check_calls(place: str, role: RoleName, message: llm_service_pb2.Message) -> None:
    if message.tool_calls and role != "assistant":
        raise _invalid(f"{place}.tool_calls", "Only the assistant makes tool calls.")
    if len(message.tool_calls) > MAX_CALLS:
        raise _invalid(f"{place}.tool_calls", f"A message has at most {MAX_CALLS} tool calls.")
    if message.HasField("tool_call_id") and role != "tool":
        raise _invalid(f"{place}.tool_call_id", "Only a tool's message answers a tool call.")
    if len(message.tool_call_id) > _ID_LIMIT:
        raise _invalid(f"{place}.tool_call_id", f"An id has at most {_ID_LIMIT} characters.")
    if len(message.name) > _NAME_LIMIT:
        raise _invalid(f"{place}.name", f"A name has at most {_NAME_LIMIT} characters.")


def _read_call(call: llm_service_pb2.ToolCall, place: str) -> PastCall:
    if len(call.id) > _ID_LIMIT:
        raise _invalid(f"{place}.id", f"An id has at most {_ID_LIMIT} characters.")
    if not 1 <= len(call.name) <= _CALL_NAME_LIMIT:
        raise _invalid(f"{place}.name", f"A name has 1 to {_CALL_NAME_LIMIT} characters.")
    return PastCall(call.id, call.name, call.arguments_json)


def _read_part(number: int, index: int, part: llm_service_pb2.Part, buffers: wire.Buffers) -> Part:
    place = f"messages[{number}].parts[{index}]"
    kind, alias = part.WhichOneof("content"), _read_alias(part, place)
    if kind == "text":
        if alias:
            raise _invalid(f"{place}.alias", "An alias names a picture or an embedding, no text.")
        return Text(part.text)
    if kind == "image":
        with within(f"{place}.image"):
            options = _read_options(part.image.options)
        return Picture(RawImage(buffers.get(part.image.data), options), number, index, alias)
    if kind == "embedding":
        return Picture(_caller_embedding(part.embedding, buffers), number, index, alias)
    if kind == "reference":
        return Picture(Reference(_read_id(part.reference, place)), number, index, alias)
    if alias:
        return Picture(Reference(""), number, index, alias)
    raise _invalid(place, "A part is one of text, image, embedding and reference.")


def _read_alias(part: llm_service_pb2.Part, place: str) -> str:
    if not part.HasField("alias"):
        return ""
    if not 1 <= len(part.alias.encode()) <= ALIAS_LIMIT:
        raise _invalid(f"{place}.alias", f"An alias has 1 to {ALIAS_LIMIT} bytes.")
    return part.alias


def _read_id(reference: image_pb2.EmbeddingReference, place: str) -> str:
    if not 1 <= len(reference.id) <= _ID_LIMIT:
        raise _invalid(f"{place}.reference", f"A reference has 1 to {_ID_LIMIT} characters.")
    return reference.id


def _read_options(message: image_pb2.ImageOptions) -> PixelOptions:
    try:
        return options_from_wire(message)
    except ContractError as error:
        raise ChiasmError(
            Reason.IMAGE_INVALID, "The detail is low, high, auto or original.", "options.detail"
        ) from error


def _caller_embedding(message: image_pb2.ImageEmbedding, buffers: wire.Buffers) -> CallerEmbedding:
    levels = tuple(buffers.get(level.data) for level in message.levels)
    return CallerEmbedding(message, buffers.get(message.features.data), levels)


def _check_count(messages: Iterable[llm_service_pb2.Message], limit: int) -> None:
    kinds = (part.WhichOneof("content") for message in messages for part in message.parts)
    # Without a content it is an alias, or an error.
    count = sum(kind != "text" for kind in kinds)
    if count > limit:
        raise ChiasmError(
            Reason.TOO_MANY_IMAGES,
            f"The conversation has {count} pictures; at most {limit} are accepted, counted over "
            "all its messages.",
            "messages",
        )


def _chosen(
    wanted: llm_service_pb2.SamplingParameters,
    name: Literal["temperature", "top_p", "top_k", "min_p", "repetition_penalty"],
    checkpoint: float | None,
    default: float,
) -> float:
    if wanted.HasField(name):
        return _as_written(getattr(wanted, name))
    return default if checkpoint is None else checkpoint


def _as_written(value: float) -> float:
    # A float field holds 0.9 as 0.8999999762: what the caller wrote is nearer.
    return float(f"{value:.7g}")


def _max_tokens(
    wanted: llm_service_pb2.SamplingParameters, defaults: GenerationDefaults
) -> int | None:
    return wanted.max_token_count if wanted.HasField("max_token_count") else defaults.max_new_tokens


def _top_logprobs(wanted: llm_service_pb2.SamplingParameters) -> int | None:
    if not 0 <= wanted.top_logprob_count <= MAX_TOP_LOGPROBS:
        raise _invalid(
            "top_logprob_count", f"top_logprob_count must be from 0 to {MAX_TOP_LOGPROBS}."
        )
    if wanted.logprobs:
        return wanted.top_logprob_count
    if wanted.top_logprob_count:
        raise _invalid("top_logprob_count", "top_logprob_count needs logprobs to be true.")
    return None


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise _invalid(name, f"{name} must be from {least} to {most}.")


def _check_seed_and_counts(wanted: llm_service_pb2.SamplingParameters) -> None:
    if wanted.HasField("max_token_count") and wanted.max_token_count < 1:
        raise _invalid("max_token_count", "max_token_count must be at least 1.")
    if len(wanted.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _invalid("stop_token_ids", f"At most {MAX_STOP_TOKEN_IDS} stop token ids are taken.")
    if wanted.min_token_count < 0:
        raise _invalid("min_token_count", "min_token_count must be at least 0.")


def _read_stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise _invalid("stop", f"At most {MAX_STOPS} stop texts, but {len(stops)} came.")
    for number, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise _invalid(f"stop[{number}]", f"A stop text has 1 to {MAX_STOP_LENGTH} characters.")
    return tuple(stops)


def _invalid(field: str, message: str) -> ChiasmError:
    return ChiasmError(Reason.REQUEST_INVALID, message, field)
