"""`GenerateResponse` messages to the events of a response, and to the response itself. Pure.

    created, in_progress
        output_item.added, content_part.added, output_text.delta ..., output_text.done,
            content_part.done, output_item.done                            for the model's words
        output_item.added, function_call_arguments.delta ..., function_call_arguments.done,
            output_item.done                                                for each call
    completed, or incomplete, or failed and then error

Format: https://platform.openai.com/docs/api-reference/responses-streaming. There is no `[DONE]`.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from chiasm.errors import INTERNAL_TEXT, ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from gateway.openai.errors import error_body
from gateway.openai.responses.answer import (
    Head,
    Json,
    call_item,
    failure_of,
    logprob_of,
    message_item,
    new_id,
    text_part,
    trace_within,
    usage_of,
)
from gateway.openai.responses.to_chat import Origins

_S = llm_service_pb2
_DONE: Final = "completed"
_CUT: Final = "incomplete"
_PROGRESS: Final = "in_progress"


@dataclass
class _Words:
    """Text of the model."""

    id: str = field(default_factory=lambda: new_id("msg"))
    texts: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    def part(self) -> Json:
        return text_part("".join(self.texts), self.logprobs)

    def item(self, status: str) -> Json:
        return message_item(self.id, status, [] if status == _PROGRESS else [self.part()])


@dataclass
class _Call:
    """A call of the model."""

    call_id: str
    name: str
    id: str = field(default_factory=lambda: new_id("fc"))
    texts: list[str] = field(default_factory=list)

    def item(self, status: str) -> Json:
        arguments = "" if status == _PROGRESS else "".join(self.texts)
        return call_item(self.id, status, self.call_id, self.name, arguments)


class Events:
    """One answer: what came, and the events that tell it."""

    def __init__(self, head: Head, origins: Origins, *, logprobs: bool) -> None:
        self._head = head
        self._origins = origins
        self._wants_logprobs = logprobs
        self._numbers = itertools.count()
        self._done: list[Json] = []
        self._open: _Words | _Call | None = None
        self._call_count = 0
        # Of tokens whose text is held back.
        self._pending: list[Json] = []
        self._end: Json | None = None

    def opening(self) -> Iterator[Json]:
        """The events before any token."""
        response = self._head.response(_PROGRESS, [])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def take(self, response: llm_service_pb2.GenerateResponse) -> Iterator[Json]:
        """The events that one message of the LLM service gives."""
        for delta in response.delta.deltas:
            yield from self._take(delta)
        if response.HasField("finished"):
            yield from self._finish(response.finished)

    def response(self) -> Json:
        """The response at its end. Raises INTERNAL if the LLM service never ended the answer."""
        if self._end is None:
            raise ChiasmError(Reason.INTERNAL, INTERNAL_TEXT)
        return self._end

    def failed(self, error: ChiasmError) -> Iterator[Json]:
        """The events of a failure under way.

        The error has its fields twice: as documented, and under `error` as OpenAI's servers send
        them, which is what its clients raise.
        """
        if self._open is not None:
            self._done.append(self._open.item(_CUT))
        response = self._head.response("failed", self._done, error=failure_of(error))
        yield self._event("response.failed", response=response)
        told = error_body(error)["error"]
        flat = {name: told[name] for name in ("code", "message", "param")}
        yield self._event("error", **flat, error=told)

    def _take(self, delta: llm_service_pb2.Delta) -> Iterator[Json]:
        if self._wants_logprobs:
            self._pending += map(logprob_of, delta.logprobs)
        if delta.text:
            yield from self._say(delta.text)
        for call in delta.tool_calls:
            yield from self._call(call)
        if isinstance(self._open, _Call):
            self._pending = []  # those of the call's own tokens: no text shows them

    def _say(self, text: str) -> Iterator[Json]:
        words = self._open
        if not isinstance(words, _Words):
            words = _Words()
            yield from self._begin(words)
            yield self._on_text("response.content_part.added", part=text_part("", []))
        new, self._pending = self._pending, []
        words.texts.append(text)
        words.logprobs += new
        yield self._on_text("response.output_text.delta", delta=text, logprobs=new)

    def _call(self, delta: llm_service_pb2.ToolCallDelta) -> Iterator[Json]:
        call = self._open
        if delta.call_index == self._call_count:
            call = _Call(delta.id, delta.name)
            self._call_count += 1
            yield from self._begin(call)
        if not isinstance(call, _Call) or delta.call_index != self._call_count - 1:
            raise ChiasmError(Reason.INTERNAL, INTERNAL_TEXT)  # calls come one after the other
        if delta.arguments_json:
            call.texts.append(delta.arguments_json)
            kind = "response.function_call_arguments.delta"
            yield self._on_item(kind, delta=delta.arguments_json)

    def _begin(self, item: _Words | _Call) -> Iterator[Json]:
        yield from self._close(_DONE)
        self._open = item
        kind = "response.output_item.added"
        yield self._event(kind, output_index=len(self._done), item=item.item(_PROGRESS))

    def _close(self, status: str) -> Iterator[Json]:
        """Ends the item under way, if there is one."""
        match self._open:
            case None:
                return
            case _Words() as words:
                yield from self._end_text(words)
            case _Call() as call:
                kind = "response.function_call_arguments.done"
                yield self._on_item(kind, name=call.name, arguments="".join(call.texts))
        item, index = self._open.item(status), len(self._done)
        self._open = None
        self._done.append(item)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _end_text(self, words: _Words) -> Iterator[Json]:
        if self._pending:
            new, self._pending = self._pending, []
            words.logprobs += new
            yield self._on_text("response.output_text.delta", delta="", logprobs=new)
        part = words.part()
        told = {"text": part["text"], "logprobs": words.logprobs}
        yield self._on_text("response.output_text.done", **told)
        yield self._on_text("response.content_part.done", part=part)

    def _finish(self, finished: llm_service_pb2.Finished) -> Iterator[Json]:
        choice = next(iter(finished.choices), None)
        if choice is None or not choice.reason:
            raise ChiasmError(Reason.INTERNAL, INTERNAL_TEXT)
        if not self._done and self._open is None and not choice.tool_calls:
            yield from self._say("")
        for index, call in enumerate(choice.tool_calls[self._call_count :], self._call_count):
            whole = _S.ToolCallDelta(
                call_index=index, id=call.id, name=call.name, arguments_json=call.arguments_json
            )
            yield from self._call(whole)
        cut = choice.reason == _S.FINISH_REASON_LENGTH
        yield from self._close(_CUT if cut else _DONE)
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        self._end = self._head.response(
            _CUT if cut else _DONE,
            self._done,
            usage=usage_of(finished.usage),
            chiasm=trace_within(finished, self._origins),
            **details,
        )
        yield self._event(f"response.{_CUT if cut else _DONE}", response=self._end)

    def _on_item(self, kind: str, **told: Any) -> Json:
        assert self._open is not None
        place = {"item_id": self._open.id, "output_index": len(self._done)}
        return self._event(kind, **place, **told)

    def _on_text(self, kind: str, **told: Any) -> Json:
        return self._on_item(kind, content_index=0, **told)

    def _event(self, kind: str, **told: Any) -> Json:
        return {"type": kind, "sequence_number": next(self._numbers), **told}
