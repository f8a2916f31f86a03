"""The table of fields in `docs/responses.md` says what happens."""

import re
from pathlib import Path
from typing import Any, Final

import pytest
from openai.types.responses import response_create_params as official

from gateway.openai.responses.schema import ResponsesRequest
from gateway.openai.responses.to_chat import SHARED
from tests.gateway.gateway_system import System
from tests.gateway.responses_client import WEATHER, respond, sent
from tests.gateway.test_responses_refusals import STATEFUL
from tests.scripted_llm import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT: Final = (Path(__file__).parents[2] / "docs" / "responses.md").read_text()
ROW: Final = re.compile(r"^\| `(\w+)` \| (honoured|ignored|refused) \|", re.MULTILINE)
TABLE: Final = dict(ROW.findall(TEXT))
HONOURED: Final = [name for name, here in TABLE.items() if here == "honoured"]
IGNORED: Final = [name for name, here in TABLE.items() if here == "ignored"]

# A value of each field that is ignored, other than what OpenAI takes for its absence.
OTHER: Final[dict[str, Any]] = {
    "user": "u",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "store": True,
    "stream_options": {"include_obfuscation": False},
    "reasoning": {"effort": "high"},
    "service_tier": "flex",
    "max_tool_calls": 3,
    "background_options": {"completion_window": "2h"},
    "access_programs": {"cyber": "standard"},
    "image": {"context_compression": "disabled"},
}
# A value of each field that is honoured, as a response to it or a request for it shows.
CHANGING: Final[dict[str, Any]] = {
    "input": "other",
    "instructions": "a",
    "max_output_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "text": {"format": {"type": "json_object"}},
    "tools": [WEATHER],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 3,
}
BESIDE: Final[dict[str, dict[str, Any]]] = {
    "tool_choice": {"tools": [WEATHER]},
    "parallel_tool_calls": {"tools": [WEATHER]},
    "top_logprobs": {"include": ["message.output_text.logprobs"]},
}


async def test_the_table_has_every_field_of_the_official_client_and_no_other() -> None:
    fields = set(official.ResponseCreateParamsBase.__annotations__) | {"stream"}
    assert set(TABLE) == fields


async def test_each_refused_field_is_tried_by_the_refusals() -> None:
    tried = {param for _, param in STATEFUL.values()}
    refused = {name for name, here in TABLE.items() if here == "refused"}
    assert refused <= tried
    assert not tried & set(HONOURED)


@pytest.mark.parametrize("name", IGNORED)
async def test_what_is_ignored_changes_nothing(system: System, name: str) -> None:
    plain = (await sent(system)).message
    assert (await sent(system, **{name: OTHER[name]})).message == plain


@pytest.mark.parametrize("name", sorted(set(HONOURED) - {"model", "stream", "metadata"}))
async def test_what_is_honoured_changes_the_request(system: System, name: str) -> None:
    beside = BESIDE.get(name, {})
    plain = (await sent(system, **beside)).message
    assert (await sent(system, **beside | {name: CHANGING[name]})).message != plain


async def test_model_stream_and_metadata_are_honoured(system: System) -> None:
    assert (await respond(system, model="other")).status_code == 404
    streamed = await respond(system, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    told = await respond(system, metadata={"a": "b"}, model=MODEL)
    assert told.json()["metadata"] == {"a": "b"}


async def test_the_fields_beyond_openais_are_all_named() -> None:
    beyond = TEXT.split("Beyond OpenAI's fields")[1].split(". Names that")[0]
    named = set(re.findall(r"`(\w+)`", beyond))
    assert named == set(SHARED) - set(TABLE)
    assert not named & set(ResponsesRequest.model_fields)
