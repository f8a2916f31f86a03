"""What a prompt need not compute because another began alike, and what it must never take."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from llm_service.engine.values import EngineSettings, Failed, ImageSpan, Prompt
from tests.llm_service.engine.rig import (
    WAIT_SECONDS,
    WIDTH,
    Listener,
    Running,
    generated,
    greedy,
    random_llama,
    random_prompt,
    random_rows,
    running,
)

BLOCK = 16
ANSWER = greedy(20, min_tokens=20)
UNCACHED = EngineSettings(kv_bytes=4 << 20, prefix_cache=False)


def _with_picture(prompt: Prompt, start: int, seed: int, digest: bytes | None = None) -> Prompt:
    name = f"picture {seed}".encode() if digest is None else digest
    image = ImageSpan(start, 24, random_rows(seed, 24), name)
    return replace(prompt, images=(*prompt.images, image))


def _chat(picture: int = 1) -> Prompt:
    return _with_picture(_with_picture(random_prompt(1, 70), 5, picture), 40, 2)


def _next_turn(prompt: Prompt, answer: Listener, length: int = 9) -> Prompt:
    question = random_prompt(77, length).token_ids
    return replace(prompt, token_ids=(*prompt.token_ids, *answer.token_ids, *question))


def _prefilled(system: Running, ask: Callable[[], Listener]) -> tuple[Listener, int]:
    before = system.engine.stats().prefill_tokens_total
    answer = ask()
    return answer, system.engine.stats().prefill_tokens_total - before


def _alone(prompt: Prompt) -> list[int]:
    return generated(random_llama(), prompt, 20)[0]


def test_the_second_turn_of_a_chat_with_pictures_computes_only_what_is_new() -> None:
    with running(random_llama()) as system:
        first, computed = _prefilled(system, lambda: system.answer(_chat(), ANSWER))
        assert (computed, first.finished.cached_tokens) == (70, 0)
        turn = _next_turn(_chat(), first)
        second, computed = _prefilled(system, lambda: system.answer(turn, ANSWER))
    # 70 and 20 tokens are known but for the answer's last, which was sampled and not computed.
    held = 89 // BLOCK * BLOCK
    assert (computed, second.finished.cached_tokens) == (99 - held, held)
    assert second.finished.prompt_tokens == 99
    assert second.token_ids == _alone(turn)


def test_many_turns_answer_as_without_a_cache() -> None:
    prompt, expected = _chat(), _chat()
    with running(random_llama()) as system, running(random_llama(), UNCACHED) as plain:
        for length in (1, 15, 16, 17, 31):
            answer = system.answer(prompt, ANSWER)
            assert answer.token_ids == plain.answer(expected, ANSWER).token_ids
            prompt = expected = _next_turn(prompt, answer, length)
        assert system.engine.stats().prefix_cache_hit_tokens_total > 300
        assert plain.engine.stats().prefix_cache_hit_tokens_total == 0


def test_the_same_prompt_again_computes_its_last_block_only() -> None:
    prompt = random_prompt(3, 64)
    with running(random_llama()) as system:
        first = system.answer(prompt, ANSWER)
        again, computed = _prefilled(system, lambda: system.answer(prompt, ANSWER))
        stats = system.engine.stats()
    assert (again.token_ids, again.finished.cached_tokens, computed) == (first.token_ids, 48, 16)
    assert stats.prefix_cache_hit_tokens_total == 48
    assert stats.prefix_cache_query_tokens_total == 128
    # Both answers' full blocks: 83 tokens had been computed, so five.
    assert (stats.blocks_used, stats.blocks_cached) == (0, 5)


def test_the_same_text_with_another_picture_takes_nothing_from_its_block_on() -> None:
    with running(random_llama()) as system:
        red = system.answer(_chat(1), ANSWER)
        blue, computed = _prefilled(system, lambda: system.answer(_chat(9), ANSWER))
        assert (blue.finished.cached_tokens, computed) == (0, 70)
        red_again = system.answer(_chat(1), ANSWER)
    assert red_again.finished.cached_tokens == 64
    assert red_again.token_ids == red.token_ids == _alone(_chat(1))
    assert blue.token_ids == _alone(_chat(9)) != red.token_ids


def test_pictures_that_change_places_are_not_confused() -> None:
    base = random_prompt(1, 70)
    one_way = _with_picture(_with_picture(base, 5, 1), 40, 2)
    other_way = _with_picture(_with_picture(base, 5, 2), 40, 1)
    later = _with_picture(_with_picture(base, 6, 1), 40, 2)
    with running(random_llama()) as system:
        for prompt in (one_way, other_way, later):
            answer = system.answer(prompt, ANSWER)
            assert answer.finished.cached_tokens == 0
            assert answer.token_ids == _alone(prompt)


def test_another_second_picture_takes_what_comes_before_it() -> None:
    first = _with_picture(random_prompt(1, 70), 5, 1)
    with running(random_llama()) as system:
        system.answer(_with_picture(first, 40, 2), ANSWER)
        other = _with_picture(first, 40, 3)
        answer = system.answer(other, ANSWER)
    assert answer.finished.cached_tokens == 32
    assert answer.token_ids == _alone(other)


def test_a_picture_of_unknown_content_shares_nothing_from_its_block_on() -> None:
    prompt = _with_picture(random_prompt(1, 70), 40, 1, digest=b"")
    with running(random_llama()) as system:
        cached = [system.answer(prompt, ANSWER).finished.cached_tokens for _ in range(3)]
    assert cached == [0, 32, 32]


def test_another_salt_takes_nothing() -> None:
    with running(random_llama()) as system:
        cached = [
            system.answer(replace(_chat(), salt=salt), ANSWER).finished.cached_tokens
            for salt in (b"one", b"two", b"", b"one", b"two", b"")
        ]
    assert cached == [0, 0, 0, 64, 64, 64]


def test_choices_compute_their_prompt_once() -> None:
    with running(random_llama()) as system:
        answer, computed = _prefilled(system, lambda: system.answer(_chat(), ANSWER, choices=4))
    assert computed == 70 + 3 * (70 - 64)
    assert [answer.tokens_of(choice) for choice in range(4)] == [_alone(_chat())] * 4


def test_prompts_that_begin_alike_share_blocks_while_they_run() -> None:
    system_text = random_prompt(5, 160).token_ids
    prompts = [Prompt((*system_text, *random_prompt(seed, 12).token_ids)) for seed in range(8)]
    with running(random_llama()) as system:
        _, first = system.submit(prompts[0], greedy(200, ignore_eos=True), pace=0.002)
        assert first.begun.wait(WAIT_SECONDS)
        others = [system.submit(prompt, ANSWER)[1] for prompt in prompts[1:]]
        answers = [other.wait() for other in others]
        assert first.wait().finished.completion_tokens == 200
    assert [answer.finished.cached_tokens for answer in answers] == [160] * 7
    assert [answer.token_ids for answer in answers] == [_alone(prompt) for prompt in prompts[1:]]


def test_a_pool_too_small_for_all_evicts_and_preempts_and_answers_stay_right() -> None:
    # 19 blocks of 512 bytes a token; four chats of 7 blocks each.
    settings = EngineSettings(kv_bytes=19 * BLOCK * 512, step_token_budget=64)
    prompts = [_chat(picture) for picture in range(4)]
    expected = [generated(random_llama(), prompt, 40)[0] for prompt in prompts]
    with running(random_llama(), settings) as system:
        for _ in range(2):
            listeners = [system.submit(one, greedy(40, min_tokens=40))[1] for one in prompts]
            assert [listener.wait().token_ids for listener in listeners] == expected
            answer = system.answer(prompts[0], greedy(40, min_tokens=40))
            assert answer.token_ids == expected[0]
        stats = system.engine.stats()
        assert stats.preempted_total > 0
        assert 0 < stats.prefix_cache_hit_tokens_total < stats.prefix_cache_query_tokens_total
        assert stats.blocks_used == 0
        assert 0 < stats.blocks_cached <= stats.blocks_total


def test_a_cancelled_answer_leaves_its_prompt_to_the_next() -> None:
    with running(random_llama()) as system:
        ticket, listener = system.submit(_chat(), greedy(300, ignore_eos=True), pace=0.002)
        assert listener.begun.wait(WAIT_SECONDS)
        system.engine.cancel(ticket)
        assert listener.wait().end == Failed("CANCELLED")
        answer = system.answer(_chat(), ANSWER)
    assert answer.finished.cached_tokens == 64
    assert answer.token_ids == _alone(_chat())


class _Flaw:
    """While it lasts, the decoder gives numbers that are none for whoever brings a mark."""

    def __init__(self, mark: float) -> None:
        self.lasts = True
        self._mark = mark

    def __call__(self, module: Any, inputs: Any, options: Any) -> Any:
        rows = options["inputs_embeds"]
        if self.lasts:
            marked = (rows == self._mark).all(-1, keepdim=True)
            options["inputs_embeds"] = torch.where(marked, float("nan"), rows)
        return inputs, options


def test_what_a_failed_answer_computed_is_not_taken_by_the_next() -> None:
    model, flaw = random_llama(), _Flaw(0.125)
    model.model.register_forward_pre_hook(flaw, with_kwargs=True)
    image = ImageSpan(5, 24, torch.full((24, WIDTH), 0.125), b"marked")
    prompt = replace(random_prompt(1, 70), images=(image,))
    with running(model) as system:
        assert system.answer(prompt, ANSWER).end == Failed("INTERNAL")
        flaw.lasts = False
        answer = system.answer(prompt, ANSWER)
    assert answer.finished.cached_tokens == 0
    assert answer.token_ids == _alone(prompt)


def test_without_a_cache_nothing_is_kept() -> None:
    with running(random_llama(), UNCACHED) as system:
        answers = [system.answer(_chat(), ANSWER) for _ in range(2)]
        stats = system.engine.stats()
    assert [answer.finished.cached_tokens for answer in answers] == [0, 0]
    assert stats.blocks_cached == stats.prefix_cache_query_tokens_total == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_short_prompts_are_answered_while_a_long_one_is_computed(prefix_cache: bool) -> None:
    settings = EngineSettings(
        kv_bytes=8 << 20, step_token_budget=40, max_running=16, prefix_cache=prefix_cache
    )
    with running(random_llama(), settings) as system:
        # Its listener takes its time over each token, so no step is shorter than that.
        ticket, _ = system.submit(random_prompt(1, 8), greedy(400, ignore_eos=True), pace=0.02)
        _, long = system.submit(random_prompt(2, 480), greedy(1))
        shorts = [system.submit(random_prompt(seed, 9), greedy(1))[1] for seed in range(3, 13)]
        last = max(short.wait().ended_at for short in shorts)
        assert last < long.wait().ended_at
        system.engine.cancel(ticket)
