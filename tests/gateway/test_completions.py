"""`POST /v1/completions`: what the LLM service gets of it, and what the caller gets."""

import asyncio
import json
import time
from typing import Any

import openai
import pytest

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from tests.gateway.gateway_system import System, whole_system
from tests.scripted_llm import MODEL, Script, finished

pytestmark = pytest.mark.asyncio(loop_scope="module")

_S = llm_service_pb2
STOP, LENGTH = _S.FINISH_REASON_STOP, _S.FINISH_REASON_LENGTH
PATH = "/v1/completions"


def logprob(token: bytes, value: float, *top: tuple[bytes, float]) -> llm_service_pb2.TokenLogprob:
    others = [_S.TokenLogprob(token=one, logprob=p) for one, p in top]
    return _S.TokenLogprob(token=token, logprob=value, top=others)


async def ask(system: System, **fields: Any) -> Any:
    return await system.http.post(PATH, json={"model": MODEL, "prompt": "Once"} | fields)


async def sent(system: System, **fields: Any) -> llm_service_pb2.GenerateRequest:
    """What the LLM service received for a request that was answered."""
    answer = await ask(system, **fields)
    assert answer.status_code == 200, answer.text
    return system.llm.last.message


async def refused(system: System, **fields: Any) -> Any:
    """The error of a request that never reached the LLM service."""
    answer = await ask(system, **fields)
    assert answer.status_code == 400, answer.text
    assert system.llm.received == []
    return answer.json()["error"]


async def events_of(system: System, **fields: Any) -> list[str]:
    answer = await ask(system, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, end = answer.text.split("\n\n")
    assert end == ""
    return [line.removeprefix("data: ") for line in lines]


async def chunks_of(system: System, **fields: Any) -> list[Any]:
    *chunks, done = await events_of(system, **fields)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


async def until(condition: Any, seconds: float = 2.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.005)


async def test_a_whole_answer_has_the_legacy_shape(system: System) -> None:
    answer = await ask(system)
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == MODEL
    assert abs(body["created"] - time.time()) < 60
    assert body["choices"] == [
        {"index": 0, "text": "Hello, world", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"]["total_tokens"] == 37
    assert body["chiasm"]["timings"]["decode_ms"] == 20.0
    assert "decode;dur=20.000" in answer.headers["server-timing"]


async def test_a_prompt_goes_out_raw_and_sixteen_tokens_are_the_default(system: System) -> None:
    got = await sent(system)
    assert got == _S.GenerateRequest(
        model=MODEL,
        prompt=_S.RawPrompt(text="Once"),
        sampling=_S.SamplingParameters(max_token_count=16),
    )


async def test_sampling_fields_arrive(system: System) -> None:
    system.llm.script = Script(end=finished(STOP, STOP))
    got = await sent(
        system, prompt=[5, 6], max_tokens=9, temperature=0, top_p=0.5, n=2, logprobs=3, stop="x",
        presence_penalty=0.5, frequency_penalty=-1, logit_bias={"5": 2}, seed=-7, user="ann",
        top_k=-1, min_p=0.25, repetition_penalty=1.5, min_tokens=2, ignore_eos=True,
        stop_token_ids=[3], cache_salt="pepper", best_of=2,
    )  # fmt: skip
    assert got == _S.GenerateRequest(
        model=MODEL,
        prompt=_S.RawPrompt(token_ids=_S.TokenIds(ids=[5, 6])),
        cache_salt="pepper",
        sampling=_S.SamplingParameters(
            max_token_count=9, temperature=0, top_p=0.5, choice_count=2, logprobs=True,
            top_logprob_count=3, stop=["x"], presence_penalty=0.5, frequency_penalty=-1,
            logit_bias={5: 2}, seed=-7, top_k=0, min_p=0.25, repetition_penalty=1.5,
            min_token_count=2, ignore_eos=True, stop_token_ids=[3],
        ),
    )  # fmt: skip


async def test_an_answer_of_a_form_is_asked_for_as_in_a_chat(system: System) -> None:
    got = await sent(system, response_format={"type": "json_object"})
    assert got.constraint == _S.OutputConstraint(json_object=True)
    got = await sent(system, structured_outputs={"regex": "a+"})
    assert got.constraint == _S.OutputConstraint(regex="a+")
    system.llm.received.clear()
    told = await refused(system, guided_regex="a", response_format={"type": "json_object"})
    assert told["param"] == "guided_regex"


async def test_null_is_absent_and_unknown_fields_are_ignored(system: System) -> None:
    nulls = ("max_tokens", "n", "logprobs", "echo", "suffix", "best_of", "stop", "stream",
             "stream_options", "user", "logit_bias", "temperature", "seed")  # fmt: skip
    plain = await sent(system)
    assert await sent(system, invented=5, **dict.fromkeys(nulls)) == plain
    harmless = {"echo": False, "suffix": "", "best_of": 1, "skip_special_tokens": True}
    assert await sent(system, **harmless) == plain


async def test_each_prompt_is_asked_alone_and_choices_are_counted_over_all(
    system: System,
) -> None:
    system.llm.script = Script(
        deltas=[[_S.Delta(choice_index=0, text="a"), _S.Delta(choice_index=1, text="b")]],
        end=finished(STOP, LENGTH),
    )
    body = (await ask(system, prompt=["one", "two", "three"], n=2)).json()
    prompts = sorted(got.message.prompt.text for got in system.llm.received)
    assert prompts == ["one", "three", "two"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in body["choices"]] == ["a", "b"] * 3
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"] * 3
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (90, 21)
    assert usage["total_tokens"] == 111
    assert usage["prompt_tokens_details"]["cached_tokens"] == 15


async def test_lists_of_token_lists_are_prompts_of_their_own(system: System) -> None:
    body = (await ask(system, prompt=[[1, 2], [3]])).json()
    assert len(body["choices"]) == 2
    got = sorted(list(one.message.prompt.token_ids.ids) for one in system.llm.received)
    assert got == [[1, 2], [3]]


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no prompt": ({"prompt": None}, "prompt", "missing_required_parameter"),
    "prompt number": ({"prompt": 5}, "prompt", "invalid_type"),
    "prompt object": ({"prompt": {}}, "prompt", "invalid_type"),
    "no prompts": ({"prompt": []}, "prompt", "empty_array"),
    "no tokens": ({"prompt": [[]]}, "prompt[0]", "empty_array"),
    "mixed": ({"prompt": ["a", 5]}, "prompt[1]", "invalid_type"),
    "mixed tokens": ({"prompt": [5, "a"]}, "prompt[1]", "invalid_type"),
    "token true": ({"prompt": [True]}, "prompt[0]", "invalid_type"),
    "token -1": ({"prompt": [[4], [5, -1]]}, "prompt[1][1]", "below_min_value"),
    "token huge": ({"prompt": [2**31]}, "prompt[0]", "above_max_value"),
    "NUL": ({"prompt": ["a", "b\0"]}, "prompt[1]", "invalid_value"),
    "many prompts": ({"prompt": ["a"] * 129}, "prompt", "array_above_max_length"),
    "many answers": ({"prompt": ["a"] * 65, "n": 2}, "n", "above_max_value"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens", "below_min_value"),
    "logprobs 6": ({"logprobs": 6}, "logprobs", "above_max_value"),
    "logprobs true": ({"logprobs": True}, "logprobs", "invalid_type"),
    "n 129": ({"n": 129}, "n", "above_max_value"),
    "echo": ({"echo": True}, "echo", "unsupported_parameter"),
    "suffix": ({"suffix": "end"}, "suffix", "unsupported_parameter"),
    "best_of": ({"best_of": 3}, "best_of", "unsupported_parameter"),
    "best_of below n": ({"best_of": 1, "n": 2}, "best_of", "unsupported_parameter"),
    "prompt_embeds": ({"prompt_embeds": "AA"}, "prompt_embeds", "unsupported_parameter"),
    "options alone": ({"stream_options": {}}, "stream_options", "invalid_value"),
    "model": ({"model": None}, "model", "missing_required_parameter"),
}


@pytest.mark.parametrize(("fields", "param", "code"), WRONG.values(), ids=WRONG.keys())
async def test_a_wrong_field_is_a_400_with_its_path(
    system: System, fields: dict[str, Any], param: str, code: str
) -> None:
    told = await refused(system, **fields)
    assert (told["param"], told["code"]) == (param, code)


async def test_another_model_is_not_found(system: System) -> None:
    answer = await ask(system, model="other")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_a_body_that_is_no_json_object_is_a_400(system: System) -> None:
    for body in (b"", b"{", b"[]"):
        assert (await system.http.post(PATH, content=body)).status_code == 400


@pytest.mark.parametrize(
    ("field", "prompt", "param"),
    [
        ("prompt.text", "a", "prompt"),
        ("prompt.text", ["a"], "prompt[0]"),
        ("prompt.token_ids", [4], "prompt"),
        ("prompt.token_ids.ids[1]", [4, 9], "prompt[1]"),
        ("prompt.token_ids.ids[1]", [[4, 9]], "prompt[0][1]"),
        ("messages", "a", "prompt"),
        ("sampling.max_token_count", "a", "max_tokens"),
        ("sampling.choice_count", "a", "n"),
        ("sampling.top_logprob_count", "a", "logprobs"),
        ("sampling.logit_bias", "a", "logit_bias"),
        (None, "a", None),
    ],
)
async def test_the_llm_services_refusals_name_the_field_of_the_json(
    system: System, field: str | None, prompt: Any, param: str | None
) -> None:
    refusal = ChiasmError(Reason.REQUEST_INVALID, "Told.", field)
    system.llm.script = Script(refusal=refusal)
    answer = await ask(system, prompt=prompt)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_refused_prompt_ends_its_accepted_neighbours() -> None:
    async with whole_system() as system:
        system.llm.script = Script(["x"] * 1000, pause_seconds=0.05)
        system.llm.refused_prompts.add("bad")
        answer = await ask(system, prompt=["good", "bad", "also good"], stream=True)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt[1]"
        await until(lambda: system.llm.running == 0)


async def test_logprobs_have_the_legacy_shape(system: System) -> None:
    eye = "\N{EYE}".encode()
    system.llm.script = Script(
        deltas=[
            [_S.Delta(text="H\u00e9", logprobs=[
                logprob(b"H", -0.5, (b"H", -0.5), (b"J", -1.5)),
                logprob("\u00e9".encode(), -1, (b"x", -0.25), (b"y", -0.75)),
            ])],
            [_S.Delta(text="\N{EYE}", logprobs=[logprob(eye[:2], -2), logprob(eye[2:], -1e30)])],
        ]
    )  # fmt: skip
    expected = {
        "tokens": ["H", "\u00e9", "bytes:\\xf0\\x9f", "bytes:\\x91\\x81"],
        "token_logprobs": [-0.5, -1.0, -2.0, -9999.0],
        "top_logprobs": [
            {"H": -0.5, "J": -1.5},
            {"x": -0.25, "y": -0.75, "\u00e9": -1.0},
            {"bytes:\\xf0\\x9f": -2.0},
            {"bytes:\\x91\\x81": -9999.0},
        ],
        "text_offset": [0, 1, 2, 2],
    }
    body = (await ask(system, logprobs=2)).json()
    assert body["choices"][0]["logprobs"] == expected
    chunks = await chunks_of(system, logprobs=2)
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert told[2] is None
    joined = {name: told[0][name] + told[1][name] for name in expected}
    assert joined == expected
    assert (await ask(system)).json()["choices"][0]["logprobs"] is None


async def test_a_stream_has_texts_one_finish_and_done(system: System) -> None:
    chunks = await chunks_of(system)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hello", ", ", "world", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    assert ["chiasm" in chunk for chunk in chunks] == [False, False, False, True]


async def test_the_usage_of_all_prompts_comes_last_and_once(system: System) -> None:
    chunks = await chunks_of(system, prompt=["a", "b"], stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 74
    assert "chiasm" in chunks[-1]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert not any("chiasm" in chunk for chunk in chunks[:-1])


async def test_a_stream_of_many_prompts_mixes_no_choices(system: System) -> None:
    system.llm.script = Script(
        deltas=[[_S.Delta(choice_index=i, text=f"{word}{i}") for i in (0, 1)] for word in "abc"],
        end=finished(STOP, LENGTH),
        pause_seconds=0.002,
    )
    chunks = await chunks_of(system, prompt=[f"p{i}" for i in range(8)], n=2)
    texts, reasons = [""] * 16, dict[int, str]()
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert choice["index"] not in reasons
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == ["a0b0c0", "a1b1c1"] * 8
    assert [reasons[index] for index in range(16)] == ["stop", "length"] * 8
    assert sum("chiasm" in chunk for chunk in chunks) == 1


@pytest.mark.parametrize("prompt", ["one", ["one", "two"]])
async def test_a_failure_in_a_stream_is_an_event_and_no_finish(system: System, prompt: Any) -> None:
    failure = ChiasmError(Reason.NOT_READY, "Gone.", retry_after=1)
    system.llm.script = Script(failure=failure)
    *texts, error, done = await events_of(system, prompt=prompt)
    assert json.loads(error)["error"]["code"] == "not_ready"
    assert done == "[DONE]"
    assert all(json.loads(text)["choices"][0]["finish_reason"] is None for text in texts)
    answer = await ask(system, prompt=prompt)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    await until(lambda: system.llm.running == 0)


@pytest.mark.parametrize("end", [None, finished(_S.FINISH_REASON_TOOL_CALLS), finished(STOP, STOP)])
async def test_an_answer_that_never_ends_well_is_an_error(
    system: System, end: llm_service_pb2.Finished | None
) -> None:
    system.llm.script = Script(end=end)
    count = 3 if end is not None and len(end.choices) == 2 else 1
    answer = await ask(system, n=count)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert json.loads((await events_of(system, n=count))[-2])["error"]["code"] == "internal_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["one", ["one", "two", "three"]])
async def test_a_caller_that_leaves_ends_all_the_work(
    system: System, prompt: Any, stream: bool
) -> None:
    system.llm.script = Script(["x"] * 1000, pause_seconds=0.02)
    count = 1 if prompt == "one" else 3
    request = asyncio.create_task(ask(system, prompt=prompt, stream=stream))
    await until(lambda: system.llm.running == count)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await until(lambda: system.llm.running == 0)


@pytest.mark.parametrize("prompt", ["one", ["one", "two", "three"]])
async def test_a_caller_that_leaves_before_admission_ends_all_the_work(
    system: System, prompt: Any
) -> None:
    system.llm.script = Script(admission_seconds=30)
    count = 1 if prompt == "one" else 3
    request = asyncio.create_task(ask(system, prompt=prompt, stream=True))
    await until(lambda: system.llm.running == count)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await until(lambda: system.llm.running == 0)


async def test_the_official_client_reads_both_forms(system: System) -> None:
    whole = await system.openai.completions.create(model=MODEL, prompt=["a", "b"])
    assert [choice.text for choice in whole.choices] == ["Hello, world"] * 2
    stream = await system.openai.completions.create(model=MODEL, prompt="a", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello, world"
    with pytest.raises(openai.BadRequestError) as caught:
        await system.openai.completions.create(model=MODEL, prompt="a", echo=True)
    assert caught.value.param == "echo"
