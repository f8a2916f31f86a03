"""Several choices and log-probabilities in OpenAI's form, whole and streamed."""

from collections import Counter
from typing import Any

import pytest

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from tests.gateway.gateway_system import System
from tests.gateway.test_gateway_answers import ASK, chunks_of
from tests.scripted_llm import Script, finished

pytestmark = pytest.mark.asyncio(loop_scope="module")

_S = llm_service_pb2


def _told(token: bytes, logprob: float, *top: tuple[bytes, float]) -> llm_service_pb2.TokenLogprob:
    alternatives = [_S.TokenLogprob(token=one, logprob=value) for one, value in top]
    return _S.TokenLogprob(token=token, logprob=logprob, top=alternatives)


def _delta(choice: int, text: str, *told: llm_service_pb2.TokenLogprob) -> llm_service_pb2.Delta:
    return _S.Delta(choice_index=choice, text=text, token_ids=[1], logprobs=told)


TWO = Script(
    deltas=[[_delta(0, "red"), _delta(1, "blue")], [_delta(1, " sky")], [_delta(0, " rose")]],
    end=finished(_S.FINISH_REASON_STOP, _S.FINISH_REASON_LENGTH),
)
# A character of two tokens, then a token whose text a stop text holds back.
TOLD = Script(
    deltas=[
        [_delta(0, "", _told(b"\xc3", -0.5, (b"\xc3", -0.5), (b"a", -1.25)))],
        [_delta(0, "é", _told(b"\xa9", -0.25, (b"\xa9", -0.25), (b"</s>", -float("inf"))))],
        [_delta(0, "", _told(b"!", -2.0, (b"?", -0.5), (b"!", -2.0)))],
    ],
)


async def test_whole_choices_stand_in_their_order(system: System) -> None:
    system.llm.script = TWO
    body = (await system.ask(n=2)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert texts == ["red rose", "blue sky"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]


async def test_streamed_choices_carry_their_index_and_each_begins_and_ends_once(
    system: System,
) -> None:
    system.llm.script = TWO
    chunks = await chunks_of(system, n=2)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    roles = Counter(one["index"] for one in choices if "role" in one["delta"])
    ends = {one["index"]: one["finish_reason"] for one in choices if one["finish_reason"]}
    assert roles == {0: 1, 1: 1}
    assert ends == {0: "stop", 1: "length"}
    assert sum(one["finish_reason"] is not None for one in choices) == 2
    said = [(one["index"], one["delta"]["content"]) for one in choices if one["delta"]]
    assert said[2:] == [(0, "red"), (1, "blue"), (1, " sky"), (0, " rose")]
    assert ["chiasm" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_the_official_client_reads_streamed_choices(system: System) -> None:
    system.llm.script = TWO
    stream = await system.openai.chat.completions.create(
        **ASK, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, usages = {0: "", 1: ""}, []
    async for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "red rose", 1: "blue sky"}
    assert [usage is not None for usage in usages] == [False] * (len(usages) - 1) + [True]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_never_ends_is_an_error(system: System, stream: bool) -> None:
    system.llm.script = Script(deltas=TWO.deltas, end=finished(_S.FINISH_REASON_STOP))
    answer = await system.ask(n=2, stream=stream)
    assert '"code":"internal_error"' in answer.text
    assert '"finish_reason":"stop"' not in answer.text


async def test_log_probabilities_are_told_in_openais_form(system: System) -> None:
    system.llm.script = TOLD
    (choice,) = (await system.ask(logprobs=True, top_logprobs=2)).json()["choices"]
    assert choice["message"]["content"] == "é"
    assert choice["logprobs"]["refusal"] is None
    content = choice["logprobs"]["content"]
    assert content[0] == {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]},
            {"token": "a", "logprob": -1.25, "bytes": [97]},
        ],
    }
    assert bytes(content[0]["bytes"] + content[1]["bytes"]).decode() == "é"
    assert content[1]["top_logprobs"][1]["logprob"] == -9999.0


async def test_a_stream_tells_the_log_probabilities_of_every_token_once(system: System) -> None:
    system.llm.script = TOLD
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    (choice,) = (await system.ask(**asked)).json()["choices"]
    chunks = [chunk["choices"][0] for chunk in await chunks_of(system, **asked)]
    told = [one["logprobs"]["content"] if one["logprobs"] else [] for one in chunks]
    assert [len(content) for content in told] == [0, 1, 1, 1, 0]
    assert [one for content in told for one in content] == choice["logprobs"]["content"]
    assert "".join(one["delta"].get("content", "") for one in chunks) == "é"


async def test_the_official_client_reads_log_probabilities(system: System) -> None:
    system.llm.script = TOLD
    asked: Any = {**ASK, "logprobs": True, "top_logprobs": 2}
    whole = await system.openai.chat.completions.create(**asked)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [one.logprob for one in logprobs.content] == [-0.5, -0.25, -2.0]
    assert [len(one.top_logprobs) for one in logprobs.content] == [2, 2, 2]


@pytest.mark.parametrize("fields", [{}, {"logprobs": False}, {"logprobs": None}])
async def test_what_was_not_asked_for_is_not_told(system: System, fields: dict[str, Any]) -> None:
    system.llm.script = TOLD
    assert (await system.ask(**fields)).json()["choices"][0]["logprobs"] is None
    chunks = await chunks_of(system, **fields)
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "é", None]


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("sampling.choice_count", "n"),
        ("sampling.logit_bias", "logit_bias"),
        ("sampling.top_logprob_count", "top_logprobs"),
        ("cache_salt", "cache_salt"),
    ],
)
async def test_the_llm_services_refusal_names_the_field_of_the_json(
    system: System, field: str, param: str
) -> None:
    system.llm.script = Script(refusal=ChiasmError(Reason.REQUEST_INVALID, "No.", field))
    answer = await system.ask(n=2)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
