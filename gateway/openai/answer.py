"""`GenerateResponse` messages to OpenAI's JSON: one body, or the chunks of a stream. Pure."""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from chiasm.errors import INTERNAL_TEXT, ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from gateway.http.events import TextEvent, event

Json = dict[str, Any]
_S = llm_service_pb2

_FINISH: Final = {
    _S.FINISH_REASON_STOP: "stop",
    _S.FINISH_REASON_LENGTH: "length",
    _S.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
# JSON has no infinity.
_IMPOSSIBLE: Final = -9999.0
_STAGES: Final = ("queue", "fetch", "encode", "transfer", "prefill", "decode", "total")


@dataclass(frozen=True)
class Head:
    """What all chunks of an answer share."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    # Unix seconds.
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True)
class Form:
    """What the request wants of its answer: how many choices, and whether with logprobs."""

    choices: int = 1
    logprobs: bool = False


class Whole:
    """Gathers an answer that is sent in one piece."""

    def __init__(self, head: Head, form: Form) -> None:
        self._head = head
        self._form = form
        self._texts: list[list[str]] = [[] for _ in range(form.choices)]
        self._logprobs: list[list[Json]] = [[] for _ in range(form.choices)]
        self._finished: llm_service_pb2.Finished | None = None

    def take(self, response: llm_service_pb2.GenerateResponse) -> None:
        """Adds one message of the LLM service."""
        if response.HasField("finished"):
            self._finished = response.finished
        for delta in response.delta.deltas:
            self._texts[delta.choice_index].append(delta.text)
            self._logprobs[delta.choice_index].extend(map(_logprob_of, delta.logprobs))

    def body(self) -> Json:
        """The answer. Raises INTERNAL if the LLM service never ended it."""
        finished = _required(self._finished)
        reasons = _reasons(finished, self._form)
        return {
            **self._head.of("chat.completion"),
            "choices": [self._choice(index, reason) for index, reason in enumerate(reasons)],
            "usage": usage_of(finished.usage),
            "chiasm": trace_of(finished),
        }

    def _choice(self, index: int, reason: str) -> Json:
        told = _told(self._logprobs[index]) if self._form.logprobs else None
        return {
            "index": index,
            "message": self._message(index),
            "logprobs": told,
            "finish_reason": reason,
        }

    def _message(self, index: int) -> Json:
        text = "".join(self._texts[index])
        finished = _required(self._finished)
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": _function(call.name, call.arguments_json),
            }
            for choice in finished.choices
            if choice.choice_index == index
            for call in choice.tool_calls
        ]
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        return message | {"content": text or None, "tool_calls": calls} if calls else message


class Chunks:
    """Turns messages of the LLM service into chunks as they come, each an event.

    A chunk tells the log-probabilities of the tokens that came, whether or not their text is held
    back, as vLLM's do: none is lost, and none is told twice.
    """

    def __init__(self, head: Head, form: Form, *, include_usage: bool) -> None:
        self._head = head
        self._form = form
        self._include_usage = include_usage
        self._finished = False
        self._texts: dict[int, TextEvent] = {}

    def opening(self) -> bytes:
        """The first chunk of each choice: who speaks."""
        first: Json = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(event(self._chunk(index, first)) for index in range(self._form.choices))

    def take(self, response: llm_service_pb2.GenerateResponse) -> bytes:
        """The chunks that one message of the LLM service gives; maybe none."""
        if response.HasField("finished"):
            self._finished = True
            return b"".join(map(event, self._closing(response.finished)))
        return b"".join(one for delta in response.delta.deltas for one in self._of_delta(delta))

    def _of_delta(self, delta: llm_service_pb2.Delta) -> Iterator[bytes]:
        if self._form.logprobs and delta.logprobs:
            told = [_logprob_of(one) for one in delta.logprobs]
            yield event(self._chunk(delta.choice_index, {"content": delta.text}, told))
        elif delta.text:
            yield self._text(delta.choice_index).of(delta.text)
        if delta.tool_calls:
            called = [_call_delta(one) for one in delta.tool_calls]
            yield event(self._chunk(delta.choice_index, {"tool_calls": called}))

    def _text(self, index: int) -> TextEvent:
        known = self._texts.get(index)
        if known is None:
            known = TextEvent(self._chunk(index, {"content": ""}), "content")
            self._texts[index] = known
        return known

    def check_ended(self) -> None:
        """Raises INTERNAL if the LLM service's stream ended without an end of the answer."""
        _required(self._finished or None)

    def _closing(self, finished: llm_service_pb2.Finished) -> Iterator[Json]:
        *others, last = [
            self._chunk(index, {}, finish_reason=reason)
            for index, reason in enumerate(_reasons(finished, self._form))
        ]
        yield from others
        if self._include_usage:
            yield last
            last = self._head.of("chat.completion.chunk")
            last |= {"choices": [], "usage": usage_of(finished.usage)}
        yield last | {"chiasm": trace_of(finished)}

    def _chunk(
        self,
        index: int,
        delta: Json,
        told: list[Json] | None = None,
        finish_reason: str | None = None,
    ) -> Json:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": _told(told) if told else None,
            "finish_reason": finish_reason,
        }
        chunk = {**self._head.of("chat.completion.chunk"), "choices": [choice]}
        return chunk | {"usage": None} if self._include_usage else chunk


def usage_of(usage: llm_service_pb2.Usage) -> Json:
    """Tokens in OpenAI's form, the parts of the prompt among the details."""
    return {
        "prompt_tokens": usage.prompt_token_count,
        "completion_tokens": usage.completion_token_count,
        "total_tokens": usage.prompt_token_count + usage.completion_token_count,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_token_count,
            "image_tokens": usage.image_token_count,
            "text_tokens": usage.text_token_count,
        },
    }


def trace_of(finished: llm_service_pb2.Finished) -> Json:
    """Chiasm's own part of an answer: the stages' times and the path that each picture took."""
    timings = {
        f"{stage}_ms": round(getattr(finished.timings, f"{stage}_seconds") * 1000, 3)
        for stage in _STAGES
    }
    return {"timings": timings, "images": [_image_of(path) for path in finished.image_paths]}


def stages_of(body: Json) -> dict[str, float]:
    """The milliseconds of each stage that an answer tells."""
    timings: dict[str, float] = body["chiasm"]["timings"]
    return {name.removesuffix("_ms"): value for name, value in timings.items()}


def _image_of(path: llm_service_pb2.ImagePath) -> Json:
    return {
        "message": path.message_index,
        "part": path.part_index,
        "source": _S.ImageSource.Name(path.source).removeprefix("IMAGE_SOURCE_").lower(),
        "encoder": path.encoder_name or None,
        "tokens": path.placeholder_count,
        "identity_checked": path.identity_checked,
        "encoder_cache_hit": path.encoder_cache_hit,
    }


def _reasons(finished: llm_service_pb2.Finished, form: Form) -> list[str]:
    """Why each choice ended, in their order. Raises INTERNAL if one did not."""
    found = {choice.choice_index: choice.reason or None for choice in finished.choices}
    return [_FINISH[_required(found.get(index))] for index in range(form.choices)]


def _function(name: str, arguments: str) -> Json:
    return {"name": name, "arguments": arguments}


def _call_delta(delta: llm_service_pb2.ToolCallDelta) -> Json:
    """What a call gained: its id and name once, then text of its arguments."""
    if not delta.HasField("id"):
        return {"index": delta.call_index, "function": {"arguments": delta.arguments_json}}
    function = _function(delta.name, delta.arguments_json)
    return {"index": delta.call_index, "id": delta.id, "type": "function", "function": function}


def _told(content: list[Json]) -> Json:
    return {"content": content, "refusal": None}


def _logprob_of(told: llm_service_pb2.TokenLogprob) -> Json:
    top = [_token_of(one) for one in told.top]
    return _token_of(told) | {"top_logprobs": top}


def _token_of(told: llm_service_pb2.TokenLogprob) -> Json:
    """A token in OpenAI's form. Its text is marked where the bytes are no whole characters."""
    return {
        "token": told.token.decode(errors="replace"),
        "logprob": max(told.logprob, _IMPOSSIBLE),
        "bytes": list(told.token),
    }


def _required(value: Any) -> Any:
    if value is None:
        raise ChiasmError(Reason.INTERNAL, INTERNAL_TEXT)
    return value
