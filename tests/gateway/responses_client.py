"""What the tests of Responses share: requests as they are, and streams as events."""

import json
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from chiasm.v1 import llm_service_pb2
from tests.gateway.gateway_system import System
from tests.scripted_llm import MODEL, finished

_S = llm_service_pb2
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


async def respond(system: System, **fields: Any) -> httpx.Response:
    """A request with `fields` over a smallest one."""
    body = {"model": MODEL, "input": "hi"} | fields
    return await system.http.post("/v1/responses", json=body)


async def response_of(system: System, **fields: Any) -> Any:
    """The response to a good request, held against the official client's schema."""
    answer = await respond(system, **fields)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    return answer.json()


async def error_of(system: System, **fields: Any) -> Any:
    """The error of a request that never reached the LLM service."""
    answer = await respond(system, **fields)
    assert answer.status_code == 400, answer.text
    assert system.llm.received == []
    assert len(answer.content) < 2048
    return answer.json()["error"]


async def sent(system: System, **fields: Any) -> Any:
    """What the LLM service received for a request that was answered."""
    await response_of(system, **fields)
    return system.llm.last


async def events_of(system: System, **fields: Any) -> list[Any]:
    """The events of a streamed response, each held against the official client's schema."""
    answer = await respond(system, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = answer.text.split("\n\n")
    assert rest == ""
    events = [_event(block) for block in blocks]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def _event(block: str) -> Any:
    name, _, data = block.partition("\ndata: ")
    event = json.loads(data)
    assert name == f"event: {event['type']}"
    _EVENT.validate_python(event)
    return event


def kinds(events: list[Any]) -> list[str]:
    """The types of events without their common beginning."""
    return [event["type"].removeprefix("response.") for event in events]


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def words(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def call(call_id: str = "call_1", name: str = "weather", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str = "call_1", told: Any = "rain") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": told}


def said(text: str) -> list[llm_service_pb2.Delta]:
    """A message of the LLM service that adds text."""
    return [_S.Delta(text=text)]


def begun(index: int, name: str = "weather") -> list[llm_service_pb2.Delta]:
    """A message that begins a call."""
    delta = _S.ToolCallDelta(call_index=index, id=f"call_{index}", name=name)
    return [_S.Delta(tool_calls=[delta])]


def argued(index: int, arguments: str) -> list[llm_service_pb2.Delta]:
    """A message that adds to a call's arguments."""
    return [_S.Delta(tool_calls=[_S.ToolCallDelta(call_index=index, arguments_json=arguments)])]


def ended(*calls: str, cut: bool = False) -> llm_service_pb2.Finished:
    """An end with a whole call of `weather` for each of `calls`, their arguments."""
    reason = _S.FINISH_REASON_TOOL_CALLS if calls else _S.FINISH_REASON_STOP
    end = finished(_S.FINISH_REASON_LENGTH if cut else reason)
    for index, arguments in enumerate(calls):
        made = _S.ToolCall(id=f"call_{index}", name="weather", arguments_json=arguments)
        end.choices[0].tool_calls.append(made)
    return end
