"""Choices, log-probabilities, penalties and the prefix cache over a real socket."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from chiasm import wire
from chiasm.client import Answer, AsyncClient
from chiasm.conversation import Sampling, assistant, messages_to_wire, user
from chiasm.errors import ChiasmError, Reason
from chiasm.rpc.channel import LlmMethods, open_channel
from chiasm.v1 import llm_service_pb2
from tests.llm_service.conftest import Serve

SHORT = Sampling(temperature=0, max_tokens=12, ignore_eos=True)


def _sampled(seed: int = 3, **more: Any) -> Sampling:
    settings: dict[str, Any] = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
    return Sampling(seed=seed, **(settings | more))


async def test_choices_are_those_of_seeds_that_count_up_and_usage_sums_them(
    serve: Serve, pictures: list[bytes]
) -> None:
    turns = [user("Look:", pictures[0], "and tell")]
    async with serve() as (service, client):
        single = [await client.generate(turns, _sampled(seed)) for seed in (3, 4, 5)]
        answer = await client.generate(turns, _sampled(choices=3))
        assert service.engine.stats().blocks_used == 0
    assert [choice.text for choice in answer.choices] == [one.text for one in single]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
    assert answer.usage.completion_token_count == 3 * 16
    assert answer.usage.prompt_token_count == single[0].usage.prompt_token_count


async def test_choices_interleave_in_a_stream_each_under_its_index(serve: Serve) -> None:
    async with serve() as (_, client):
        stream = client.stream([user("go")], _sampled(choices=4, max_tokens=60))
        events = [event async for event in stream]
    *deltas, end = events
    order = [delta.choice for delta in deltas if not isinstance(delta, Answer)]
    assert isinstance(end, Answer)
    assert {*order} == {0, 1, 2, 3}
    assert order != sorted(order)
    assert len(end.choices) == 4


async def test_log_probabilities_equal_those_of_the_whole_model(
    serve: Serve, whole: Any, checkpoint: Path
) -> None:
    async with serve() as (_, client):
        answer = await client.generate([user("hello there")], _sampled(top_logprobs=3))
        silent = await client.generate([user("hello there")], _sampled())
    tokenizer: Any = AutoTokenizer
    tokenizer = tokenizer.from_pretrained(checkpoint)
    prompt = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = whole(input_ids=torch.tensor([[*ids, *answer.token_ids]])).logits[0]
    expected = torch.log_softmax(logits, -1)[len(ids) - 1 : -1]
    told = answer.choices[0].logprobs
    assert [one.token_id for one in told] == list(answer.token_ids)
    for one, row in zip(told, expected, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        assert [top.token_id for top in one.top] == row.topk(3).indices.tolist()
    assert silent.text == answer.text
    assert silent.choices[0].logprobs == ()


async def test_a_bias_and_a_penalty_change_the_answer(serve: Serve) -> None:
    async with serve() as (_, client):
        plain = await client.generate([user("hello")], SHORT)
        biased = await client.generate(
            [user("hello")],
            Sampling(temperature=0, max_tokens=3, ignore_eos=True, logit_bias={40: 100.0}),
        )
        diverse = await client.generate(
            [user("hello")],
            Sampling(temperature=0, max_tokens=60, ignore_eos=True, frequency_penalty=2.0,
                     presence_penalty=2.0, repetition_penalty=2.0),
        )  # fmt: skip
    assert biased.token_ids == (40, 40, 40)
    assert plain.token_ids != diverse.token_ids[:12]
    assert len({*diverse.token_ids}) > 50


async def test_what_is_out_of_range_is_refused_by_name(serve: Serve) -> None:
    async def field(sampling: Sampling) -> str | None:
        with pytest.raises(ChiasmError) as caught:
            await client.generate([user("hello")], sampling)
        assert caught.value.reason is Reason.REQUEST_INVALID
        return caught.value.field

    async with serve(max_active_requests=4) as (_, client):
        assert await field(Sampling(logit_bias={10**6: 1})) == "sampling.logit_bias"
        assert await field(Sampling(logit_bias={5: 101})) == "sampling.logit_bias"
        assert await field(Sampling(choices=129)) == "sampling.choice_count"
        assert await field(Sampling(choices=5)) == "sampling.choice_count"
        assert await field(Sampling(top_logprobs=21)) == "sampling.top_logprob_count"
        assert await field(Sampling(stop_token_ids=(5,) * 1025)) == "sampling.stop_token_ids"
        assert (await client.generate([user("hello")], SHORT)).text


async def test_each_choice_takes_a_permit(serve: Serve) -> None:
    async with serve(max_active_requests=4) as (_, client):
        stream = client.stream([user("go on")], _sampled(choices=3, max_tokens=400))
        await anext(stream)
        with pytest.raises(ChiasmError) as caught:
            await client.generate([user("hello")], _sampled(choices=2))
        assert (await client.generate([user("hello")], SHORT)).text
        await stream.aclose()
    assert caught.value.reason is Reason.QUEUE_FULL


async def test_leaving_ends_all_choices(serve: Serve) -> None:
    async with serve() as (service, client):
        stream = client.stream([user("go on")], _sampled(choices=6, max_tokens=400))
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(5):
            while service.engine.stats().running + service.engine.stats().blocks_used:
                await asyncio.sleep(0.01)


async def test_a_deadline_ends_all_choices(serve: Serve) -> None:
    async with (
        serve() as (service, _),
        AsyncClient(llm=f"127.0.0.1:{service.port}", timeout=0.2) as hurried,
    ):
        with pytest.raises(ChiasmError) as caught:
            await hurried.generate([user("go on")], _sampled(choices=8, max_tokens=480))
        async with asyncio.timeout(5):
            while service.engine.stats().running + service.engine.stats().blocks_used:
                await asyncio.sleep(0.01)
    assert caught.value.reason is Reason.DEADLINE


def _cached(answer: Answer) -> int:
    return answer.usage.cached_token_count


async def test_the_second_turn_computes_only_what_is_new(
    serve: Serve, pictures: list[bytes]
) -> None:
    first = [user("Look at these two pictures with care:", *pictures[:2], "what are they?")]
    async with serve() as (service, client):
        one = await client.generate(first, SHORT)
        begun = service.engine.stats().prefill_tokens_total
        two = await client.generate([*first, assistant(one.text), user("and why?")], SHORT)
        computed = service.engine.stats().prefill_tokens_total - begun
    assert _cached(one) == 0
    assert _cached(two) >= one.usage.prompt_token_count // 16 * 16
    assert computed == two.usage.prompt_token_count - _cached(two)


async def test_another_picture_another_tenant_and_another_salt_never_hit(
    serve: Serve, pictures: list[bytes]
) -> None:
    words = "the same words in every request, long enough for several blocks of tokens"
    async with serve() as (service, client):
        address = f"127.0.0.1:{service.port}"
        await client.generate([user(pictures[0], words)], SHORT)
        again = await client.generate([user(pictures[0], words)], SHORT)
        other = await client.generate([user(pictures[1], words)], SHORT)
        async with AsyncClient(llm=address, tenant="other") as stranger:
            foreign = await stranger.generate([user(pictures[0], words)], SHORT)
        salted = [await _with_salt(address, [user(pictures[0], words)], salt) for salt in "aab"]
    assert _cached(again) > 32
    # The blocks before the picture's are the same text: here there is none.
    assert [_cached(other), _cached(foreign), salted[0], salted[2]] == [0, 0, 0, 0]
    assert salted[1] == _cached(again)


async def _with_salt(address: str, turns: Any, salt: str) -> int:
    buffers = wire.Buffers()
    request = llm_service_pb2.GenerateRequest(
        messages=messages_to_wire(turns, buffers), sampling=SHORT.to_wire(), cache_salt=salt
    )
    channel = open_channel(address)
    stream = LlmMethods.GENERATE.stream(channel, wire.Wired(request, buffers), timeout=60)
    *_, last = [response.message async for response in stream]
    await channel.close()
    return last.finished.usage.cached_token_count


async def test_an_embedding_hits_by_its_content_whatever_its_sender_says_of_it(
    serve: Serve,
) -> None:
    rng = np.random.default_rng(3)
    rows = (rng.standard_normal((4, 64)) * 0.1).astype(np.float32)
    changed = rows.copy()
    changed[3, 63] += 1e-3
    words = "the same words in every request, long enough for several blocks of tokens"
    async with serve() as (_, client):
        answers = [
            await client.generate([user(one, words)], SHORT) for one in (rows, rows, changed)
        ]
        half = await client.generate([user(rows.astype(np.float16), words)], SHORT)
    assert [_cached(one) > 32 for one in (*answers, half)] == [False, True, False, False]
