"""The engine's events to the messages of an answer. Pure."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from chiasm import wire
from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from llm_service.engine.values import Delta, Event, Failed, Finished, TokenLogprob
from llm_service.pictures import Ready
from llm_service.prompt import Layout
from llm_service.tools.hermes import CallDelta, Calls

_S = llm_service_pb2
Answer = wire.Wired[llm_service_pb2.GenerateResponse]
_REASONS = {"stop": _S.FINISH_REASON_STOP, "length": _S.FINISH_REASON_LENGTH}
FAILURES = {
    "DEADLINE": ChiasmError(Reason.DEADLINE, "The deadline passed before the answer was whole."),
    "CANCELLED": ChiasmError(Reason.CANCELLED, "The call was cancelled."),
    "SHUTTING_DOWN": ChiasmError(Reason.NOT_READY, "The service is stopping; try another replica."),
    "INTERNAL": ChiasmError(
        Reason.INTERNAL, "This answer failed; the log holds the detail beside the request id."
    ),
}


@dataclass
class Clock:
    """Times of one request, time.monotonic."""

    arrived: float = field(default_factory=time.monotonic)
    submitted: float = 0.0
    first_token: float = 0.0


def gathered(events: Sequence[Event]) -> tuple[list[Delta], dict[int, Finished]]:
    """One delta a choice for all that came, and the choices that ended. Raises a failure."""
    by_choice: dict[int, list[Delta]] = {}
    ends: dict[int, Finished] = {}
    for event in events:
        match event:
            case Delta():
                by_choice.setdefault(event.choice, []).append(event)
            case Finished():
                ends[event.choice] = event
            case Failed():
                told = FAILURES[event.reason]
                raise ChiasmError(told.reason, told.message)
    return [_merged(choice, deltas) for choice, deltas in by_choice.items()], ends


def _merged(choice: int, deltas: Sequence[Delta]) -> Delta:
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(told for delta in deltas for told in delta.logprobs),
        choice=choice,
    )


def as_deltas(deltas: Sequence[Delta], calls: Sequence[Calls] = ()) -> Answer:
    """The message of deltas. `calls`, of each choice, take their part of the text."""
    wired = []
    for delta in deltas:
        text, called = calls[delta.choice].push(delta.text) if calls else (delta.text, [])
        wired.append(
            _S.Delta(
                choice_index=delta.choice,
                text=text,
                token_ids=delta.token_ids,
                logprobs=[_as_logprob(told) for told in delta.logprobs],
                tool_calls=[_as_call_delta(one) for one in called],
            )
        )
    return wire.plain(_S.GenerateResponse(delta=_S.DeltaBatch(deltas=wired)))


def rests_of(calls: Sequence[Calls]) -> Iterator[Answer]:
    """The ends of choices that might have gone on otherwise, and did not."""
    for choice, one in enumerate(calls):
        text, called = one.close()
        if text or called:
            told = [_as_call_delta(delta) for delta in called]
            deltas = [_S.Delta(choice_index=choice, text=text, tool_calls=told)]
            yield wire.plain(_S.GenerateResponse(delta=_S.DeltaBatch(deltas=deltas)))


def _as_call_delta(delta: CallDelta) -> llm_service_pb2.ToolCallDelta:
    return _S.ToolCallDelta(
        call_index=delta.index, id=delta.id, name=delta.name, arguments_json=delta.arguments
    )


def _as_choice(one: Finished, calls: Calls | None) -> llm_service_pb2.FinishedChoice:
    """The end of a choice. A call that has no end was cut, by whatever it was."""
    reason = _REASONS[one.reason]
    made = [] if calls is None else calls.made
    if calls is not None and calls.cut:
        reason = _S.FINISH_REASON_LENGTH
    elif made and reason == _S.FINISH_REASON_STOP:
        reason = _S.FINISH_REASON_TOOL_CALLS
    told = [_S.ToolCall(id=c.id, name=c.name, arguments_json=c.arguments) for c in made]
    return _S.FinishedChoice(choice_index=one.choice, reason=reason, tool_calls=told)


def _as_logprob(told: TokenLogprob) -> llm_service_pb2.TokenLogprob:
    return _S.TokenLogprob(
        token_id=told.token_id,
        token=told.token,
        logprob=told.logprob,
        top=[_as_logprob(one) for one in told.top],
    )


def as_finished(
    finished: Sequence[Finished],
    layout: Layout,
    ready: Sequence[Ready],
    clock: Clock,
    calls: Sequence[Calls] = (),
) -> Answer:
    """The message of the end of all choices. The first one's prompt was computed for all."""
    first = finished[0]
    encode = max((one.encode_seconds for one in ready), default=0.0)
    fetch = max((one.fetch_seconds for one in ready), default=0.0)
    timings = _S.GenerateTimings(
        queue_seconds=first.queue_seconds,
        fetch_seconds=fetch,
        encode_seconds=encode,
        transfer_seconds=max((o.fetch_seconds - o.encode_seconds for o in ready), default=0.0),
        prefill_seconds=first.prefill_seconds,
        decode_seconds=max(one.decode_seconds for one in finished),
        total_seconds=time.monotonic() - clock.arrived,
    )
    usage = _S.Usage(
        prompt_token_count=len(layout.token_ids),
        text_token_count=layout.text_token_count,
        image_token_count=layout.image_token_count,
        cached_token_count=first.cached_tokens,
        completion_token_count=sum(one.completion_tokens for one in finished),
    )
    end = _S.Finished(
        choices=[_as_choice(one, calls[one.choice] if calls else None) for one in finished],
        usage=usage,
        timings=timings,
        image_paths=[one.path() for one in ready],
    )
    return wire.plain(_S.GenerateResponse(finished=end))
