"""In float32 an answer is the same, token for token, alone and under load, in both engines.

In bfloat16 too where native code runs the layers, for it sums each row in one order.
"""

from dataclasses import dataclass, replace

import pytest

from llm_service.engine.values import EngineSettings, Prompt, SamplingParams
from tests.llm_service.engine.rig import (
    VOCABULARY,
    WIDTH,
    Listener,
    Running,
    greedy,
    random_prompt,
    random_rows,
    running,
    with_image,
)
from tests.llm_service.engine.test_isolation_stages import llama

COUNT = 32
TOKENS = 24


@dataclass(frozen=True)
class Ask:
    prompt: Prompt
    sampling: SamplingParams
    choices: int = 1


def _greedy(number: int) -> SamplingParams:
    """Plain, or with all that changes logits; some end early, some tell log-probabilities."""
    plain = greedy(TOKENS - number % 5, ignore_eos=True)
    penalised = replace(plain, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    biased = replace(plain, logit_bias=((number + 9, 2.0), (number + 40, -100.0)), top_logprobs=3)
    ending = greedy(TOKENS, min_tokens=4, stop_token_ids=tuple(range(4, VOCABULARY, 17)))
    return (plain, plain, penalised, biased, ending)[number % 5]


def _drawn(number: int) -> SamplingParams:
    seeded = SamplingParams(seed=number, max_tokens=TOKENS, ignore_eos=True)
    narrowed = replace(seeded, temperature=0.7, top_p=0.9, top_k=30, min_p=0.01)
    return (seeded, narrowed, replace(narrowed, frequency_penalty=0.5))[number % 3]


def _asks() -> list[Ask]:
    """32 prompts of 2 to 150 tokens, some with pictures, every fourth with two choices."""
    asks = []
    for number in range(COUNT):
        length = 2 + (number * 37) % 149
        prompt = random_prompt(number, length)
        if length > 30 and number % 3 == 0:
            prompt = with_image(prompt, 5, random_rows(number, 16))
        sampling = _drawn(number) if number % 6 == 5 else _greedy(number)
        asks.append(Ask(prompt, sampling, 2 if number % 4 == 3 else 1))
    return asks


def _tokens(listener: Listener, ask: Ask) -> list[list[int]]:
    return [listener.wait().tokens_of(choice) for choice in range(ask.choices)]


def _alone(system: Running, ask: Ask) -> list[list[int]]:
    return _tokens(system.answer(ask.prompt, ask.sampling, ask.choices), ask)


def _together(system: Running, asks: list[Ask]) -> list[list[list[int]]]:
    listeners = [system.submit(one.prompt, one.sampling, choices=one.choices)[1] for one in asks]
    return [_tokens(listener, ask) for listener, ask in zip(listeners, asks, strict=True)]


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_thirty_two_answers_are_token_for_token_those_that_each_gives_alone(engine: str) -> None:
    asks, model = _asks(), llama(engine)
    assert sum(one.sampling.temperature == 0 for one in asks) > 24
    # No answer finds anything of another's: each alone is computed from its first token on.
    with running(model, EngineSettings(kv_bytes=4 << 20, prefix_cache=False)) as system:
        assert system.engine._runner.native is (engine == "native")
        alone = [_alone(system, ask) for ask in asks]
        assert _together(system, asks) == alone
        # With other neighbours, later and earlier.
        assert _together(system, asks[::-1])[::-1] == alone
    # Prompts in small pieces, and blocks that are lost and computed again.
    tight = EngineSettings(kv_bytes=32 * 16 * 512, step_token_budget=70, decode_stretch=0)
    with running(llama(engine), tight) as system:
        assert _together(system, asks) == alone
        assert system.engine.stats().preempted_total > 0
        assert system.engine.stats().blocks_used == 0
    # Blocks that are found.
    with running(llama(engine), EngineSettings(kv_bytes=4 << 20)) as system:
        assert [_together(system, asks) for _ in range(2)] == [alone] * 2
        assert system.engine.stats().prefix_cache_hit_tokens_total > 1000


def test_in_half_precision_native_layers_give_the_same_beside_others_too() -> None:
    asks = _asks()
    settings = EngineSettings(kv_bytes=4 << 20, prefix_cache=False)
    with running(llama("native").bfloat16(), settings) as system:
        assert system.engine._runner.native
        assert _together(system, asks) == [_alone(system, ask) for ask in asks]


def test_the_asks_differ() -> None:
    asks = _asks()
    assert len({one.prompt.token_ids for one in asks}) == COUNT
    assert {one.choices for one in asks} == {1, 2}
    assert any(one.prompt.images for one in asks)
    assert all(one.prompt.images[0].rows.shape[1] == WIDTH for one in asks if one.prompt.images)
