"""OpenAI's text completions (`POST /v1/completions`): JSON to and from messages of `chiasm.v1`.

One request has up to 128 prompts, each answered by a `GenerateRequest` of its own. Choice `c` of
prompt `p` has the index `p * n + c`, as OpenAI counts them. Pure; raises ChiasmError with the path.
"""

import codecs
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError

from chiasm.errors import INTERNAL_TEXT, ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from gateway.openai import paths
from gateway.openai.answer import Head, Json, trace_of, usage_of
from gateway.openai.constraint import Constraint, Forms, the_one
from gateway.openai.errors import invalid
from gateway.openai.schema import Drawn, Text, TokenId
from gateway.openai.translate import Places, drawn

_S = llm_service_pb2
MAX_ANSWERS: Final = 128
DEFAULT_MAX_TOKENS: Final = 16
_KIND: Final = "text_completion"
_FINISH: Final = {_S.FINISH_REASON_STOP: "stop", _S.FINISH_REASON_LENGTH: "length"}
# JSON has no infinity.
_IMPOSSIBLE: Final = -9999.0
_PLACE: Final = re.compile(r"^(?:prompt|messages)(?:\.(?:text|token_ids|ids))*(\[\d+\])?")


def _off(value: Any) -> bool:
    """Empty or false: as if it were absent."""
    return not value


# What would change the answer and is not served, with the values of it that change nothing.
_HARMLESS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "echo": _off,
    "suffix": _off,
    # Beyond OpenAI: names that other servers of the same interface take.
    "add_special_tokens": lambda value: value is True,
    "allowed_token_ids": _off,
    "bad_words": _off,
    "guided_whitespace_pattern": _off,
    "include_stop_str_in_output": _off,
    "ec_transfer_params": _off,
    "kv_transfer_params": _off,
    "length_penalty": lambda value: value == 1,
    "logits_processors": _off,
    "logprob_token_ids": _off,
    "prompt_embeds": _off,
    "prompt_logprobs": lambda value: value is False,
    "repetition_detection": _off,
    "return_token_ids": _off,
    "return_tokens_as_token_ids": _off,
    "skip_special_tokens": lambda value: value is True,
    "thinking_token_budget": lambda value: value == -1,
    "truncate_prompt_tokens": lambda value: False,
    "use_beam_search": _off,
    "vllm_xargs": _off,
    "watermarking": _off,
}


def _prompt_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, list):
        return "<lists of tokens>"
    return "<tokens>" if isinstance(first, int) and not isinstance(first, bool) else "<texts>"


Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_UP_TO: Final = Field(min_length=1, max_length=MAX_ANSWERS, fail_fast=True)
Prompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], _UP_TO, Tag("<texts>")]
    | Annotated[Tokens, Tag("<tokens>")]
    | Annotated[list[Tokens], _UP_TO, Tag("<lists of tokens>")],
    Discriminator(
        _prompt_tag,
        custom_error_type="prompt_type",
        custom_error_message="The prompt is a text, a list of token ids, or a list of either.",
    ),
]


class CompletionRequest(Drawn, Forms):
    """The body of a text completion. `logprobs` counts the alternatives; 0 has none beside the
    token that was drawn."""

    model_config = ConfigDict(extra="allow")

    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = Field(None, ge=1, le=MAX_ANSWERS)

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1


@dataclass(frozen=True)
class Completion:
    """A checked request: a prompt as the LLM service takes it, and its path, for each answer."""

    request: CompletionRequest
    prompts: tuple[llm_service_pb2.RawPrompt, ...]
    constraint: Constraint | None

    def asked(self, number: int) -> llm_service_pb2.GenerateRequest:
        """What the LLM service is asked about prompt `number`."""
        request = self.request
        sampling = drawn(request)
        if request.max_tokens is None:
            sampling.max_token_count = DEFAULT_MAX_TOKENS
        if request.logprobs is not None:
            sampling.logprobs, sampling.top_logprob_count = True, request.logprobs
        return _S.GenerateRequest(
            model=request.model,
            prompt=self.prompts[number],
            sampling=sampling,
            cache_salt=request.cache_salt or "",
            constraint=None if self.constraint is None else self.constraint.message,
        )

    def told(self, error: ChiasmError, number: int) -> ChiasmError:
        """`error` of the LLM service about prompt `number`, with the request's own path."""
        told = Places((), "max_tokens", self.constraint).told(error)
        field = told.field or ""
        place = _PLACE.match(field)
        if place is not None:
            told.field = self._place(number) + (place[1] or "")
        elif field == "top_logprobs":
            told.field = "logprobs"
        return told

    def _place(self, number: int) -> str:
        prompt = self.request.prompt
        alone = isinstance(prompt, str) or isinstance(prompt[0], int)
        return "prompt" if alone else f"prompt[{number}]"


def completion_of(value: Any) -> Completion:
    """The request in the JSON object `value`. Raises REQUEST_INVALID or UNSUPPORTED."""
    try:
        request = CompletionRequest.model_validate(value)
    except ValidationError as faults:
        first = faults.errors(include_url=False, include_context=False, include_input=False)[0]
        raise paths.told(first) from None
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream to be true.", "stream_options")
    _refuse_unserved(request)
    prompts = tuple(_prompts(request.prompt))
    count = len(prompts) * request.choices
    if count > MAX_ANSWERS:
        text = f"Prompts times n are {count} answers; a request has at most {MAX_ANSWERS}."
        raise invalid(text, "n", "above_max_value")
    return Completion(request, prompts, the_one(request))


def _refuse_unserved(request: CompletionRequest) -> None:
    given = request.model_extra or {}
    harmful = [
        name
        for name, harmless in _HARMLESS.items()
        if given.get(name) is not None and not harmless(given[name])
    ]
    if request.best_of not in {None, request.choices}:
        harmful.append("best_of")
    if harmful:
        text = f"This version does not serve {harmful[0]} with that value; leave it out."
        raise ChiasmError(Reason.UNSUPPORTED, text, harmful[0])


def _prompts(prompt: Any) -> Iterator[llm_service_pb2.RawPrompt]:
    alone = isinstance(prompt, str) or isinstance(prompt[0], int)
    for one in [prompt] if alone else prompt:
        if isinstance(one, str):
            yield _S.RawPrompt(text=one)
        else:
            yield _S.RawPrompt(token_ids=_S.TokenIds(ids=one))


def head_of(request: CompletionRequest) -> Head:
    """What all chunks of the answer share."""
    return Head(request.model, f"cmpl-{uuid.uuid4().hex}")


class Logprobs:
    """Log-probabilities of one choice in the legacy form, as its tokens come.

    `text_offset` counts the characters of the choice's own text before each token.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def told(self, tokens: Sequence[llm_service_pb2.TokenLogprob]) -> Json:
        """The next tokens."""
        offsets = []
        for one in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(one.token))
        return {
            "tokens": [_text_of(one) for one in tokens],
            "token_logprobs": [_value_of(one) for one in tokens],
            "top_logprobs": [_top_of(one) for one in tokens],
            "text_offset": offsets,
        }


def _text_of(told: llm_service_pb2.TokenLogprob) -> str:
    """The token's text. Bytes that are no whole characters are spelled, so that each differs."""
    try:
        return told.token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in told.token)


def _value_of(told: llm_service_pb2.TokenLogprob) -> float:
    return max(told.logprob, _IMPOSSIBLE)


def _top_of(told: llm_service_pb2.TokenLogprob) -> Json:
    """The likeliest tokens, and always the one that was drawn: up to one more than asked for."""
    top = {_text_of(one): _value_of(one) for one in reversed(told.top)}
    return dict(reversed(top.items())) | {_text_of(told): _value_of(told)}


class _Ends:
    """How the answers to the prompts of one request ended."""

    def __init__(self, completion: Completion) -> None:
        self._choices = completion.request.choices
        self._ends: list[llm_service_pb2.Finished | None] = [None] * len(completion.prompts)

    def take(self, number: int, finished: llm_service_pb2.Finished) -> None:
        self._ends[number] = finished

    @property
    def complete(self) -> bool:
        """Whether all are answered."""
        return None not in self._ends

    def reasons(self, number: int) -> list[str]:
        """Why each choice of prompt `number` ended. Raises INTERNAL if one did not."""
        end = self._ends[number]
        choices = () if end is None else end.choices
        found = {one.choice_index: _FINISH.get(one.reason) for one in choices}
        return [_required(found.get(index)) for index in range(self._choices)]

    def usage(self) -> Json:
        """The tokens of all prompts. Raises INTERNAL if an answer never ended."""
        total = _S.Usage()
        for end in self._ends:
            for field, count in _required(end).usage.ListFields():
                setattr(total, field.name, getattr(total, field.name) + count)
        return usage_of(total)

    def trace(self) -> Json:
        """The times of the prompt whose answer took longest."""
        ends: list[llm_service_pb2.Finished] = [_required(end) for end in self._ends]
        return trace_of(max(ends, key=lambda end: end.timings.total_seconds))


class Whole:
    """Gathers an answer that is sent in one piece."""

    def __init__(self, completion: Completion) -> None:
        request = completion.request
        self._request = request
        self._head = head_of(request)
        self._ends = _Ends(completion)
        self._count = len(completion.prompts)
        size = self._count * request.choices
        self._texts: list[list[str]] = [[] for _ in range(size)]
        self._logprobs: list[list[llm_service_pb2.TokenLogprob]] = [[] for _ in range(size)]

    def take(self, number: int, response: llm_service_pb2.GenerateResponse) -> None:
        """Adds one message of the LLM service about prompt `number`."""
        if response.HasField("finished"):
            self._ends.take(number, response.finished)
        for delta in response.delta.deltas:
            index = number * self._request.choices + delta.choice_index
            self._texts[index].append(delta.text)
            self._logprobs[index].extend(delta.logprobs)

    def body(self) -> Json:
        """The answer. Raises INTERNAL if the LLM service never ended it."""
        reasons = [reason for number in range(self._count) for reason in self._ends.reasons(number)]
        return {
            **self._head.of(_KIND),
            "choices": [self._choice(index, reason) for index, reason in enumerate(reasons)],
            "usage": self._ends.usage(),
            "chiasm": self._ends.trace(),
        }

    def _choice(self, index: int, reason: str) -> Json:
        wanted = self._request.logprobs is not None
        told = Logprobs().told(self._logprobs[index]) if wanted else None
        return _choice(index, "".join(self._texts[index]), told, reason)


class Chunks:
    """Turns messages of the LLM service into chunks as they come.

    As in a chat's stream, no log-probability is lost, and none is told twice.
    """

    def __init__(self, completion: Completion) -> None:
        request = completion.request
        options = request.stream_options
        self._choices = request.choices
        self._include_usage = options is not None and options.include_usage
        self._head = head_of(request)
        self._ends = _Ends(completion)
        size = len(completion.prompts) * request.choices
        wanted = request.logprobs is not None
        self._logprobs = [Logprobs() for _ in range(size)] if wanted else None

    def take(self, number: int, response: llm_service_pb2.GenerateResponse) -> Iterator[Json]:
        """The chunks that one message about prompt `number` gives."""
        for delta in response.delta.deltas:
            index = number * self._choices + delta.choice_index
            told = self._told(index, delta.logprobs)
            if delta.text or told is not None:
                yield self._chunk(_choice(index, delta.text, told, None))
        if response.HasField("finished"):
            self._ends.take(number, response.finished)
            yield from self._closing(number)

    def check_ended(self) -> None:
        """Raises INTERNAL if the LLM service's streams ended without an end of each answer."""
        self._ends.usage()

    def _closing(self, number: int) -> Iterator[Json]:
        *others, last = [
            self._chunk(_choice(index, "", None, reason))
            for index, reason in enumerate(self._ends.reasons(number), number * self._choices)
        ]
        yield from others
        if not self._ends.complete:
            yield last
            return
        if self._include_usage:
            yield last
            last = {**self._head.of(_KIND), "choices": [], "usage": self._ends.usage()}
        yield last | {"chiasm": self._ends.trace()}

    def _told(self, index: int, logprobs: Sequence[llm_service_pb2.TokenLogprob]) -> Json | None:
        if self._logprobs is None or not logprobs:
            return None
        return self._logprobs[index].told(logprobs)

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._head.of(_KIND), "choices": [choice]}
        return chunk | {"usage": None} if self._include_usage else chunk


def _choice(index: int, text: str, told: Json | None, reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": told, "finish_reason": reason}


def _required(value: Any) -> Any:
    if value is None:
        raise ChiasmError(Reason.INTERNAL, INTERNAL_TEXT)
    return value
