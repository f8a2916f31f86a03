"""Text completions and the tokenizer's routes before real models."""

from typing import Any

import httpx
import pytest

from chiasm.conversation import user
from tests.system.three import Json, Three, figure, messages_to_json, noise

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

QUESTION = "What do you see? Say it in a few words."


async def ok(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


async def completed(demo: Three, http: httpx.AsyncClient, **body: Any) -> Any:
    return await ok(http, "/v1/completions", model=demo.model, temperature=0, **body)


async def test_text_becomes_tokens_and_text_again(demo: Three) -> None:
    async with demo.http() as http:
        for text in ("Hello, world", "\N{EYE} caf\u00e9 \u4e2d\n\n", " two  spaces "):
            told = await ok(http, "/tokenize", prompt=text, add_special_tokens=False)
            assert told["count"] == len(told["tokens"]) > 0
            back = await ok(http, "/detokenize", tokens=told["tokens"])
            assert back == {"prompt": text}


async def test_a_conversations_tokens_are_those_that_an_answer_is_charged_for(demo: Three) -> None:
    turns = [user(noise(71), QUESTION)]
    async with demo.http() as http:
        other = [user(noise(72), QUESTION)]
        await ok(http, "/v1/chat/completions", **demo.body(other, max_tokens=1))
        before = figure(demo.encoder, "chiasm_encoder_cache_lookups_total")
        told = await ok(http, "/tokenize", model=demo.model, messages=messages_to_json(turns))
        assert figure(demo.encoder, "chiasm_encoder_cache_lookups_total") == before
        answer = await ok(http, "/v1/chat/completions", **demo.body(turns, max_tokens=1))
        models = (await http.get("/v1/models")).json()["data"]
    assert told["count"] == answer["usage"]["prompt_tokens"]
    assert told["max_model_len"] == models[0]["max_model_len"] > told["count"]


async def test_a_conversations_tokens_as_a_prompt_get_the_chats_answer(demo: Three) -> None:
    turns = [user("Tell me of red circles.")]
    async with demo.http() as http:
        chat = await ok(http, "/v1/chat/completions", **demo.body(turns, max_tokens=12))
        tokens = (await ok(http, "/tokenize", messages=messages_to_json(turns)))["tokens"]
        text = await completed(demo, http, prompt=tokens, max_tokens=12)
    assert text["choices"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert text["choices"][0]["finish_reason"] == chat["choices"][0]["finish_reason"]
    assert text["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"] == len(tokens)


async def test_prompts_of_one_request_get_the_answers_that_each_gets_alone(demo: Three) -> None:
    prompts = ["The colour is", "A blue", "One two three"]
    async with demo.http() as http:
        alone = [await completed(demo, http, prompt=one, max_tokens=8) for one in prompts]
        together = await completed(demo, http, prompt=prompts, max_tokens=8)
    texts = [one["choices"][0]["text"] for one in alone]
    assert [choice["text"] for choice in together["choices"]] == texts
    assert together["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)


async def test_sixteen_tokens_are_the_default_and_logprobs_tell_each(demo: Three) -> None:
    async with demo.http() as http:
        body = await completed(demo, http, prompt="The", ignore_eos=True, logprobs=2)
    (choice,) = body["choices"]
    told = choice["logprobs"]
    assert body["usage"]["completion_tokens"] == 16 == len(told["tokens"])
    assert choice["finish_reason"] == "length"
    assert all(2 <= len(top) <= 3 for top in told["top_logprobs"])
    assert all(value <= 0 for value in told["token_logprobs"])
    assert told["text_offset"][0] == 0 and told["text_offset"] == sorted(told["text_offset"])


async def test_a_stream_joins_to_the_whole_answer(demo: Three) -> None:
    fields: Json = {
        "prompt": ["The", "A red"],
        "n": 2,
        "seed": 5,
        "temperature": 1,
        "max_tokens": 9,
    }
    body = {"model": demo.model, **fields}
    async with demo.http() as http:
        whole = await ok(http, "/v1/completions", **body)
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as came:
            lines = [line.removeprefix("data: ") async for line in came.aiter_lines() if line]
    texts = [""] * 4
    for line in lines[:-1]:
        for choice in httpx.Response(200, content=line).json()["choices"]:
            texts[choice["index"]] += choice["text"]
    assert lines[-1] == "[DONE]"
    assert texts == [choice["text"] for choice in whole["choices"]]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([10**9], "prompt"),
        (["fine", [10**9]], "prompt[1]"),
        ([[5], [10**9]], "prompt[1]"),
        ("word " * 5000, "prompt"),
        ("<image>", "prompt"),
    ],
    ids=["empty", "no token", "mixed", "no token in a list", "too long", "image token"],
)
async def test_a_wrong_prompt_is_a_400_that_names_it(demo: Three, prompt: Any, param: str) -> None:
    async with demo.http() as http:
        told = await refused(http, "/v1/completions", model=demo.model, prompt=prompt)
        assert told["param"] == param
        again = await completed(demo, http, prompt="The", max_tokens=1)
    assert again["usage"]["completion_tokens"] == 1


async def test_a_token_that_is_none_is_a_400(demo: Three) -> None:
    async with demo.http() as http:
        assert (await refused(http, "/detokenize", tokens=[1, 10**9]))["param"] == "tokens"
