"""`POST /tokenize`, `POST /detokenize`, `GET /version` and what `GET /v1/models` tells."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

import chiasm
from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from tests.gateway.gateway_system import System
from tests.scripted_llm import FIRST_TOKEN, MODEL, PICTURE_TOKEN, PICTURE_TOKENS, Script

pytestmark = pytest.mark.asyncio(loop_scope="module")

_S = llm_service_pb2
PICTURE = (Path(__file__).parent.parent / "odd_images" / "p_trns_single.png").read_bytes()
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def forgotten(system: System) -> None:
    system.llm.tokenized.clear()
    system.llm.detokenized.clear()


async def ask(system: System, path: str, **fields: Any) -> Any:
    return await system.http.post(path, json=fields)


async def tokenized(system: System, **fields: Any) -> Any:
    answer = await ask(system, "/tokenize", **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(system: System, path: str, **fields: Any) -> Any:
    """The error of a request that never reached the LLM service."""
    answer = await ask(system, path, **fields)
    assert answer.status_code == 400, answer.text
    assert not system.llm.tokenized and not system.llm.detokenized
    return answer.json()["error"]


async def test_a_text_becomes_tokens_with_the_first_one_unless_it_is_not_wanted(
    system: System,
) -> None:
    assert await tokenized(system, model=MODEL, prompt="hi") == {
        "count": 3,
        "max_model_len": 128,
        "tokens": [FIRST_TOKEN, 104, 105],
        "token_strs": None,
    }
    told = await tokenized(system, model=MODEL, prompt="hi", add_special_tokens=False)
    assert told["tokens"] == [104, 105]
    assert [one.message for one in system.llm.tokenized] == [
        _S.TokenizeRequest(model=MODEL, prompt="hi"),
        _S.TokenizeRequest(model=MODEL, prompt="hi", add_special_tokens=False),
    ]


async def test_an_empty_text_and_no_model_are_fine(system: System) -> None:
    told = await tokenized(system, prompt="")
    assert (told["count"], told["tokens"]) == (1, [FIRST_TOKEN])


async def test_a_conversation_is_asked_as_a_chat_would_be(system: System) -> None:
    url = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [
            {"type": "text", "text": "see"},
            {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        ]},
    ]  # fmt: skip
    told = await tokenized(system, model=MODEL, messages=messages)
    assert told["tokens"] == [*b"be brief", *b"see", *[PICTURE_TOKEN] * PICTURE_TOKENS]
    got = system.llm.tokenized[-1]
    assert got.message.model == MODEL
    assert not got.message.HasField("prompt")
    assert bytes(got.data(got.message.messages[1].parts[1].image.data)) == PICTURE
    answer = await system.ask(messages=messages)
    assert answer.status_code == 200
    assert [m.role for m in system.llm.last.message.messages] == [
        m.role for m in got.message.messages
    ]


async def test_a_large_picture_comes_whole(system: System) -> None:
    large = PICTURE + bytes(400_000)
    url = f"data:image/png;base64,{base64.b64encode(large).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    await tokenized(system, messages=[{"role": "user", "content": [part]}])
    got = system.llm.tokenized[-1]
    assert bytes(got.data(got.message.messages[0].parts[0].image.data)) == large


async def test_the_last_message_may_be_left_open(system: System) -> None:
    messages = [*HI, {"role": "assistant", "content": "He"}]
    await tokenized(
        system, messages=messages, continue_final_message=True, add_generation_prompt=False
    )
    assert system.llm.tokenized[-1].message.continue_final_message
    await tokenized(system, messages=HI, add_generation_prompt=True)
    assert not system.llm.tokenized[-1].message.continue_final_message


async def test_tools_and_template_variables_go_along(system: System) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    system.llm.card.tool_format = "hermes"
    system.llm.card.template_variables[:] = ["enable_thinking"]
    await tokenized(
        system, messages=HI, tools=[tool], chat_template_kwargs={"enable_thinking": False}
    )
    got = system.llm.tokenized[-1].message
    assert json.loads(got.tools.tools_json[0])["function"]["name"] == "look"
    assert json.loads(got.chat_template_variables_json) == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": HI}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a\0"}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ({"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": HI, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": HI, "chat_template": "x"}, "chat_template"),
        ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ],
)
async def test_a_wrong_field_is_a_400_with_its_path(
    system: System, fields: dict[str, Any], param: str
) -> None:
    assert (await refused(system, "/tokenize", **fields))["param"] == param


async def test_tokens_become_text(system: System) -> None:
    answer = await ask(system, "/detokenize", model=MODEL, tokens=[FIRST_TOKEN, 104, 105])
    assert answer.json() == {"prompt": "hi"}
    assert system.llm.detokenized == [
        _S.DetokenizeRequest(model=MODEL, token_ids=[FIRST_TOKEN, 104, 105])
    ]
    assert (await ask(system, "/detokenize", tokens=[])).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "tokens"),
        ({"tokens": "a"}, "tokens"),
        ({"tokens": [1, "a"]}, "tokens[1]"),
        ({"tokens": [-1]}, "tokens[0]"),
        ({"tokens": [2**31]}, "tokens[0]"),
    ],
)
async def test_wrong_tokens_are_a_400_with_their_path(
    system: System, fields: dict[str, Any], param: str
) -> None:
    assert (await refused(system, "/detokenize", **fields))["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "field", "param"),
    [
        ("/detokenize", {"tokens": [999]}, "token_ids", "tokens"),
        ("/tokenize", {"prompt": "x"}, "prompt.text", "prompt"),
        ("/tokenize", {"messages": HI}, "messages[0].parts[0]", "messages[0].content"),
    ],
)
async def test_the_llm_services_refusals_name_the_field_of_the_json(
    system: System, path: str, fields: dict[str, Any], field: str, param: str
) -> None:
    refusal = ChiasmError(Reason.REQUEST_INVALID, "Told.", field)
    system.llm.script = Script(refusal=refusal)
    answer = await ask(system, path, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_another_model_is_not_found_and_no_json_is_a_400(system: System, path: str) -> None:
    answer = await ask(system, path, model="other", prompt="a", tokens=[1])
    assert answer.status_code == 404
    assert (await system.http.post(path, content=b"{")).status_code == 400
    assert (await system.http.get(path)).status_code == 405


async def test_the_version_is_told(system: System) -> None:
    assert (await system.http.get("/version")).json() == {"version": chiasm.__version__}


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}", "/version", "/health"])
async def test_head_gives_the_headers_alone(system: System, path: str) -> None:
    whole, head = await system.http.get(path), await system.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))


async def test_a_model_tells_how_long_its_context_is(system: System) -> None:
    (listed,) = (await system.http.get("/v1/models")).json()["data"]
    assert listed["max_model_len"] == 128
    assert (await system.http.get(f"/v1/models/{MODEL}")).json() == listed
