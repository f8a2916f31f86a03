"""`GenerateResponse` messages to OpenAI's JSON: one body, or the chunks of a stream. Pure."""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from chiasm.errors import INTERNAL_TEXT, ChiasmError, Reason
from chiasm.v1 import llm_service_pb2

Json = dict[str, Any]
_S = llm_service_pb2

_FINISH: Final = {
    _S.FINISH_REASON_STOP: "stop",
    _S.FINISH_REASON_LENGTH: "length",
    _S.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
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


class Whole:
    """Gathers an answer that is sent in one piece."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._text: list[str] = []
        self._finished: llm_service_pb2.Finished | None = None

    def take(self, response: llm_service_pb2.GenerateResponse) -> None:
        """Adds one message of the LLM service."""
        if response.HasField("finished"):
            self._finished = response.finished
        self._text.extend(delta.text for delta in response.delta.deltas)

    def body(self) -> Json:
        """The answer. Raises INTERNAL if the LLM service never ended it."""
        finished = _required(self._finished)
        message = {"role": "assistant", "content": "".join(self._text), "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": _finish(finished.choices[0]),
        }
        return {
            **self._head.of("chat.completion"),
            "choices": [choice],
            "usage": usage_of(finished.usage),
            "chiasm": trace_of(finished),
        }


class Chunks:
    """Turns messages of the LLM service into chunks as they come."""

    def __init__(self, head: Head, *, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._finished = False

    def opening(self) -> Json:
        """The first chunk: who speaks."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def take(self, response: llm_service_pb2.GenerateResponse) -> Iterator[Json]:
        """The chunks that one message of the LLM service gives."""
        for delta in response.delta.deltas:
            if delta.text:
                yield self._chunk({"content": delta.text})
        if response.HasField("finished"):
            self._finished = True
            yield from self._closing(response.finished)

    def check_ended(self) -> None:
        """Raises INTERNAL if the LLM service's stream ended without an end of the answer."""
        _required(self._finished or None)

    def _closing(self, finished: llm_service_pb2.Finished) -> Iterator[Json]:
        last = self._chunk({}, _finish(finished.choices[0]))
        if self._include_usage:
            yield last
            last = self._head.of("chat.completion.chunk")
            last |= {"choices": [], "usage": usage_of(finished.usage)}
        yield last | {"chiasm": trace_of(finished)}

    def _chunk(self, delta: Json, finish_reason: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
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


def _finish(choice: llm_service_pb2.FinishedChoice) -> str:
    return _FINISH[_required(choice.reason or None)]


def _required(value: Any) -> Any:
    if value is None:
        raise ChiasmError(Reason.INTERNAL, INTERNAL_TEXT)
    return value
