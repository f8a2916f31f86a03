"""What the LLM service gets of a request."""

import base64
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import image_pb2, llm_service_pb2
from tests.gateway.gateway_system import System
from tests.scripted_llm import MODEL, WIDTH, Script, finished

pytestmark = pytest.mark.asyncio(loop_scope="module")

ODD_IMAGES = Path(__file__).parent.parent / "odd_images"
PICTURE = (ODD_IMAGES / "p_trns_single.png").read_bytes()
OTHER = (ODD_IMAGES / "hopper_orientation_6.jpg").read_bytes()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def picture(data: bytes = PICTURE, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)} | more}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def embeds(payload: bytes) -> dict[str, Any]:
    return {"type": "image_embeds", "image_embeds": base64.b64encode(payload).decode()}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def torch_file(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def npy_file(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def safetensors_file(array: np.ndarray[Any, Any]) -> bytes:
    raw = array.tobytes()
    entry = {"dtype": "F32", "shape": array.shape, "data_offsets": [0, len(raw)]}
    header = json.dumps({"features": entry}).encode()
    return struct.pack("<Q", len(header)) + header + raw


def rows(count: int = 4, width: int = WIDTH) -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).standard_normal((count, width)).astype(np.float32)


async def sent(system: System, *messages: dict[str, Any], **fields: Any) -> Any:
    """What the LLM service received for a request that was answered."""
    answer = await system.ask(messages=list(messages), **fields)
    assert answer.status_code == 200, answer.text
    return system.llm.last


async def refused(system: System, *messages: dict[str, Any], **fields: Any) -> Any:
    """The error of a request that never reached the LLM service."""
    answer = await system.ask(messages=list(messages), **fields)
    assert answer.status_code in {400, 413}, answer.text
    assert system.llm.received == []
    return answer.json()["error"]


async def test_every_role_and_form_of_content_reaches_the_llm_service(system: System) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    got = await sent(
        system,
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "one", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [text("42")], "tool_call_id": "c1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant"},
        {"role": "system", "content": "late"},
        {"role": "user", "content": [text("two"), text("three")]},
    )
    messages = got.message.messages
    assert [m.role for m in messages] == [1, 2, 3, 4, 3, 3, 1, 2]
    assert [[p.text for p in m.parts] for m in messages] == [
        ["be brief"], ["one"], [], ["42"], ["no"], [""], ["late"], ["two", "three"],
    ]  # fmt: skip
    assert messages[1].name == "ann"
    assert messages[2].tool_calls[0].arguments_json == "{"
    assert messages[3].tool_call_id == "c1"


async def test_sampling_fields_arrive_and_absent_ones_stay_absent(system: System) -> None:
    plain = (await sent(system, {"role": "user", "content": "x"})).message
    assert plain.model == MODEL
    assert plain.sampling == llm_service_pb2.SamplingParameters()
    system.llm.script = Script(end=finished(*[llm_service_pb2.FINISH_REASON_STOP] * 3))
    full = await sent(
        system,
        {"role": "user", "content": "x"},
        temperature=0, top_p=0.5, top_k=-1, min_p=0.25, seed=-7, max_tokens=9, min_tokens=2,
        stop=["a", "b"], stop_token_ids=[5], ignore_eos=True, n=3, presence_penalty=0.5,
        frequency_penalty=-1.5, repetition_penalty=1.25, logit_bias={"5": -100, "006": 0.5},
        logprobs=True, top_logprobs=4, cache_salt="pepper",
    )  # fmt: skip
    assert full.message.sampling == llm_service_pb2.SamplingParameters(
        temperature=0, top_p=0.5, top_k=0, min_p=0.25, seed=-7, max_token_count=9,
        min_token_count=2, stop=["a", "b"], stop_token_ids=[5], ignore_eos=True,
        choice_count=3, presence_penalty=0.5, frequency_penalty=-1.5, repetition_penalty=1.25,
        logit_bias={5: -100, 6: 0.5}, logprobs=True, top_logprob_count=4,
    )  # fmt: skip
    assert full.message.cache_salt == "pepper"


async def test_the_newer_token_limit_wins(system: System) -> None:
    message = {"role": "user", "content": "x"}
    got = await sent(system, message, max_completion_tokens=4)
    assert got.message.sampling.max_token_count == 4
    got = await sent(system, message, max_completion_tokens=4, max_tokens=99)
    assert got.message.sampling.max_token_count == 4


async def test_stop_as_text_and_as_list_are_the_same_and_null_is_none(system: System) -> None:
    message = {"role": "user", "content": "x"}
    for value, expected in (("STOP", ["STOP"]), (["STOP"], ["STOP"]), ([], []), (None, [])):
        assert (await sent(system, message, stop=value)).message.sampling.stop == expected


async def test_null_is_absent_and_unknown_fields_are_ignored(system: System) -> None:
    names = (
        "temperature", "top_p", "seed", "stop", "max_tokens", "n", "stream", "stream_options",
        "tools", "tool_choice", "response_format", "logit_bias", "logprobs", "functions", "audio",
    )  # fmt: skip
    echoed: dict[str, Any] = {
        "role": "assistant", "content": "hello", "id": "msg", "refusal": None,
        "reasoning_content": "hm", "annotations": [], "function_call": None, "tool_calls": None,
    }  # fmt: skip
    got = await sent(
        system, {"role": "user", "content": "x", "foo": 1}, echoed,
        **dict.fromkeys(names), user="me", metadata={"a": "b"}, invented={"deep": [1]},
    )  # fmt: skip
    assert got.message.sampling == llm_service_pb2.SamplingParameters()


async def test_harmless_values_of_unserved_fields_are_taken(system: System) -> None:
    await sent(
        system, {"role": "user", "content": "x"},
        tools=[], tool_choice="none", response_format={"type": "text"},
        modalities=["text"], parallel_tool_calls=False, skip_special_tokens=True,
    )  # fmt: skip


async def test_pictures_and_text_keep_their_order_in_any_turn(system: System) -> None:
    got = await sent(
        system,
        user(text("A"), picture(PICTURE), text("B"), picture(OTHER)),
        {"role": "assistant", "content": "ok"},
        user(picture(OTHER), text("C"), embeds(npy_file(rows()))),
    )
    kinds = [[p.WhichOneof("content") for p in m.parts] for m in got.message.messages]
    assert kinds == [
        ["text", "image", "text", "image"], ["text"], ["image", "text", "embedding"],
    ]  # fmt: skip
    assert [got.image(0, 1), got.image(0, 3), got.image(2, 0)] == [PICTURE, OTHER, OTHER]


async def test_each_detail_arrives(system: System) -> None:
    details = {
        "low": image_pb2.IMAGE_DETAIL_LOW,
        "high": image_pb2.IMAGE_DETAIL_HIGH,
        "auto": image_pb2.IMAGE_DETAIL_AUTO,
        "original": image_pb2.IMAGE_DETAIL_ORIGINAL,
    }
    for name, number in details.items():
        got = await sent(system, user(picture(detail=name)))
        assert got.message.messages[0].parts[0].image.options.detail == number


async def test_an_image_url_may_be_the_url_alone(system: System) -> None:
    got = await sent(system, user({"type": "image_url", "image_url": data_url(PICTURE)}))
    assert got.image(0, 0) == PICTURE


async def test_a_picture_above_a_megabyte_of_base64_arrives_whole(system: System) -> None:
    data = np.random.default_rng(1).bytes(1_000_000)
    assert (await sent(system, user(picture(data)))).image(0, 0) == data


@pytest.mark.parametrize(
    "write", [lambda a: torch_file(torch.from_numpy(a)), npy_file, safetensors_file]
)
@pytest.mark.parametrize("shape", [(4, WIDTH), (1, 4, WIDTH)])
async def test_an_embedding_of_each_container_arrives_bit_for_bit(
    system: System, write: Any, shape: tuple[int, ...]
) -> None:
    array = rows().reshape(shape)
    got = (await sent(system, user(text("x"), embeds(write(array))))).features(0, 1)
    assert got.data_type.name == "float32"
    assert got.shape == shape
    assert bytes(got.data) == array.tobytes()


async def test_an_embedding_in_an_object_is_the_same_as_alone(system: System) -> None:
    part = embeds(npy_file(rows()))
    part["image_embeds"] = {"image_embeds": part["image_embeds"], "image_sizes": None}
    assert bytes((await sent(system, user(part))).features(0, 0).data) == rows().tobytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
async def test_half_types_stay_what_they_are(system: System, dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(rows()).to(dtype)
    got = (await sent(system, user(embeds(torch_file(tensor))))).features(0, 0)
    assert got.data_type.name == str(dtype).removeprefix("torch.")
    np.testing.assert_array_equal(got.to_float32(), tensor.float().numpy())


async def test_the_request_id_and_a_deadline_go_along(system: System) -> None:
    answer = await system.http.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
        headers={"x-request-id": "mine-1"},
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert system.llm.last.request_id == "mine-1"
    assert system.llm.last.deadline is not None


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((4, WIDTH + 1), ["[rows, 8]", "[4, 9]"]),
        ((4, 1, WIDTH), ["[1, rows, 8]", "[4, 1, 8]", "one picture"]),
        ((2, 4, WIDTH), ["[2, 4, 8]"]),
        ((WIDTH,), ["[8]"]),
        ((1, 1, 4, WIDTH), ["[1, 1, 4, 8]"]),
        ((0, WIDTH), ["[0, 8]", "empty"]),
    ],
)
async def test_an_embedding_of_another_shape_is_refused_naming_both(
    system: System, shape: tuple[int, ...], words: list[str]
) -> None:
    error = await refused(system, user(text("x"), embeds(npy_file(np.ones(shape, np.float32)))))
    assert error["param"] == "messages[0].content[1].image_embeds"
    assert error["code"] == "invalid_image_embeds"
    assert all(word.lower() in error["message"].lower() for word in words), error


@pytest.mark.parametrize(
    "payload",
    [
        torch_file(torch.eye(WIDTH).to_sparse()),
        npy_file(np.array([{"a": 1}], dtype=object)),
        npy_file(rows().astype(np.int8)),
        PICTURE,
        b"\x80\x04N.",
        npy_file(rows())[:-1],
    ],
    ids=["sparse", "objects", "int8", "picture", "pickle", "cut short"],
)
async def test_what_is_no_dense_floating_tensor_is_refused(system: System, payload: bytes) -> None:
    error = await refused(system, user(embeds(payload)))
    assert error["code"] == "invalid_image_embeds"
    assert error["param"] == "messages[0].content[0].image_embeds"


@pytest.mark.parametrize("value", ["", [], [[0.5]], 5, {}, {"image_embeds": 5}])
async def test_an_embedding_that_is_no_base64_text_is_refused(system: System, value: Any) -> None:
    error = await refused(system, user({"type": "image_embeds", "image_embeds": value}))
    assert error["param"].startswith("messages[0].content[0].image_embeds")
    assert error["type"] == "invalid_request_error"


async def test_an_embedding_that_says_it_is_huge_is_a_413_before_it_is_built(
    system: System,
) -> None:
    payload = npy_file(rows(4)).replace(b"(4, 8), }" + b" " * 11, b"(1048576, 1048576), }")
    assert b"1048576" in payload
    error = await refused(system, user(embeds(payload)))
    assert error["code"] == "image_embeds_too_large"
    assert error["param"] == "messages[0].content[0].image_embeds"


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("iVBORw0KGgo=", "invalid_image_url"),
        ("/etc/hostname", "invalid_image_url"),
        ("file:///etc/hostname", "invalid_image_url"),
        ("http://127.0.0.1:9/x.png", "invalid_image_url"),
        ("HTTPS://10.0.0.1/x.png", "invalid_image_url"),
        ("data:image/png;base64,", "empty_image_file"),
        ("data:image/png;base64,@@@@", "invalid_base64_image"),
        ("data:image/png;base64,\u00e9", "invalid_base64_image"),
        ("\ud83d", "invalid_image_url"),
        (data_url(b"x" * 1_100_000), "image_file_too_large"),
    ],
)
async def test_a_url_that_gives_no_picture_is_refused_at_its_path(
    system: System, url: str, code: str
) -> None:
    body = {"model": MODEL, "messages": [user(text("a"), picture())]}
    body["messages"][0]["content"][1]["image_url"]["url"] = url  # type: ignore[index]
    answer = await system.send(json.dumps(body).encode())
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert system.llm.received == []


async def test_untidy_base64_is_read(system: System) -> None:
    encoded = base64.b64encode(PICTURE).decode()
    lines = "\r\n".join(encoded[start : start + 76] for start in range(0, len(encoded), 76))
    safe = encoded.translate(str.maketrans("+/", "-_"))
    escaped = encoded.replace("+", "%2B").replace("/", "%2F")
    for form in (encoded.rstrip("="), lines, safe, escaped):
        part = picture()
        part["image_url"]["url"] = f"data:image/jpeg;base64,{form}"
        assert (await sent(system, user(part))).image(0, 0) == PICTURE


async def test_pictures_are_counted_over_the_whole_conversation(system: System) -> None:
    turns = [user(picture(), picture(), embeds(npy_file(rows()))) for _ in range(3)]
    error = await refused(system, *turns)
    assert error["code"] == "too_many_images"
    assert error["param"] == "messages"
    assert "9" in error["message"]
    assert "8" in error["message"]


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("messages[1].parts[1].image", "messages[1].content[1].image_url.url"),
        ("messages[1].parts[1].image.options.detail", "messages[1].content[1].image_url.detail"),
        ("messages[1].parts[1].image.options.max_pixels", "mm_processor_kwargs.max_pixels"),
        ("messages[1].parts[2].embedding.features.shape", "messages[1].content[2].image_embeds"),
        (
            "messages[1].parts[2].embedding.grid_thw",
            "messages[1].content[2].image_embeds.image_grid_thw",
        ),
        ("messages[1].parts[2].alias", "messages[1].content[2].uuid"),
        ("messages[1].parts[2].reference", "messages[1].content[2].image_embeds.ref"),
        ("messages[1].parts[0]", "messages[1].content[0].text"),
        ("messages[0].parts[0].text", "messages[0].content"),
        ("messages[0].parts", "messages[0].content"),
        ("messages[7].parts[3].image", "messages[7].content"),
        ("messages[0].tool_calls", "messages[0].tool_calls"),
        ("sampling.max_token_count", "max_tokens"),
        ("sampling.stop[1]", "stop[1]"),
        ("sampling.min_token_count", "min_tokens"),
        ("messages", "messages"),
    ],
)
async def test_the_llm_services_fields_become_paths_of_the_json(
    system: System, field: str, param: str
) -> None:
    system.llm.script = Script(refusal=ChiasmError(Reason.REQUEST_INVALID, "No.", field))
    answer = await system.ask(
        messages=[
            {"role": "developer", "content": "s"},
            user(text("a"), picture(), embeds(npy_file(rows()))),
        ]
    )
    assert answer.json()["error"]["param"] == param


async def test_the_llm_services_code_for_a_picture_is_told(system: System) -> None:
    error = ChiasmError(
        Reason.IMAGE_INVALID, "An SVG.", "messages[0].parts[0].image",
        metadata={"code": "unsupported_image_media_type"},
    )  # fmt: skip
    system.llm.script = Script(refusal=error)
    told = (await system.ask(messages=[user(picture())])).json()["error"]
    assert told["code"] == "unsupported_image_media_type"
    assert told["param"] == "messages[0].content[0].image_url.url"


async def test_a_mismatched_encoder_is_the_callers_fault_only_for_the_callers_embedding(
    system: System,
) -> None:
    for number, status, kind in ((0, 502, "server_error"), (1, 400, "invalid_request_error")):
        field = f"messages[0].parts[{number}]"
        system.llm.script = Script(refusal=ChiasmError(Reason.ENCODER_MISMATCH, "Other.", field))
        answer = await system.ask(messages=[user(picture(), embeds(npy_file(rows())))])
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        assert answer.json()["error"]["code"] == "encoder_mismatch"


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "strict": True, "parameters": {"type": "object"}},
}


async def test_tools_arrive_with_the_choice_among_them(system: System) -> None:
    message = {"role": "user", "content": "x"}
    named = {"type": "function", "function": {"name": "weather"}}
    choices = {None: "", "none": "none", "auto": "auto", "required": "required"}
    for choice, expected in choices.items():
        got = (await sent(system, message, tools=[WEATHER], tool_choice=choice)).message.tools
        assert [json.loads(one) for one in got.tools_json] == [WEATHER]
        assert got.tool_choice == expected
        assert not got.HasField("parallel_tool_calls")
    got = (
        await sent(system, message, tools=[WEATHER], tool_choice=named, parallel_tool_calls=False)
    ).message.tools
    assert (got.tool_choice, got.parallel_tool_calls) == ("function:weather", False)
    assert got.HasField("parallel_tool_calls")


@pytest.mark.parametrize("content", ["absent", None, [], "", "I look it up."])
@pytest.mark.parametrize("answer", ["rain", [{"type": "text", "text": "rain"}]])
@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', "{"])
async def test_turns_with_tool_calls_arrive_as_they_were(
    system: System, content: Any, answer: Any, arguments: str
) -> None:
    call = {"id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": arguments}}  # fmt: skip
    turn: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [call]}
    if content == "absent":
        del turn["content"]
    told = {"role": "tool", "tool_call_id": "call_1", "content": answer}
    got = (await sent(system, {"role": "user", "content": "x"}, turn, told)).message.messages
    (made,) = got[1].tool_calls
    assert (made.id, made.name, made.arguments_json) == ("call_1", "weather", arguments)
    assert (got[2].tool_call_id, got[2].parts[0].text) == ("call_1", "rain")


async def test_variables_and_a_message_to_continue_arrive(system: System) -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]
    got = await sent(
        system, *turns, continue_final_message=True, add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    assert got.message.continue_final_message
    assert json.loads(got.message.chat_template_variables_json) == {"enable_thinking": False}
