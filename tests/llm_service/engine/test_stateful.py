"""Decoders with image masks, windows or recurrent state answer as the whole models do."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_service.engine.block_pool import BlockPool
from llm_service.engine.engine import EmbeddedEngine
from llm_service.engine.pricing import ApartPrices, StepLimits
from llm_service.engine.refusals import UnsupportedDecoder
from llm_service.engine.scheduler import Chunk, Scheduler, Step
from llm_service.engine.stateful import StatefulRunner
from llm_service.engine.values import EngineSettings, Failed
from tests.llm_service.engine import tiny_families
from tests.llm_service.engine.rig import (
    Greedy,
    Listener,
    Played,
    greedy,
    play_parts,
    running_parts,
    tokenizer,
)
from tests.llm_service.engine.tiny_families import IMAGE, Case, Picture, case, cases, parts_of

# Of the greatest logit: what rounding leaves where a cache is made anew in one forward.
CLOSE = 1e-5
COUNT = 10
FAMILIES = ("gemma3", "gemma4", "paligemma", "paligemma2", "qwen3_5", "lfm2_vl")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return getattr(tiny_families, request.param)()


def _agree(played: Played, expected: Sequence[Case]) -> None:
    for one, tokens, logits in zip(expected, played.tokens, played.logits, strict=True):
        assert tokens == one.tokens
        assert (logits - one.logits).abs().max() <= CLOSE * one.logits.abs().max()


def test_answers_alone_and_together_are_the_whole_models(model: Any) -> None:
    expected = cases(model, 8, COUNT)
    decoder = parts_of(model, stateful=True)
    for group in (expected[:1], expected):
        played = play_parts(decoder, [one.prompt for one in group], COUNT)
        for one, tokens, logits in zip(group, played.tokens, played.logits, strict=True):
            assert tokens == one.tokens
            assert torch.equal(logits, one.logits)


def test_answers_that_lose_their_blocks_are_the_whole_models(model: Any) -> None:
    expected = cases(model, 8, COUNT)
    prompts = [one.prompt for one in expected]
    decoder = parts_of(model, stateful=True)
    played = play_parts(decoder, prompts, COUNT, blocks=30, block_size=4)
    assert played.preempted > 0
    _agree(played, expected)


def test_prompts_longer_than_the_budget_are_not_cut(model: Any) -> None:
    expected = cases(model, 4, COUNT)
    prompts = [one.prompt for one in expected]
    played = play_parts(parts_of(model, stateful=True), prompts, COUNT, budget=8)
    _agree(played, expected)


def test_a_step_that_is_run_again_gives_the_same(model: Any) -> None:
    one = case(model, 1, 9, Picture(2, 4), 5, count=2)
    runner = StatefulRunner(parts_of(model, stateful=True))
    sequence = Greedy(
        [*one.prompt.token_ids], one.prompt.images, one.prompt.positions, one.prompt.position_delta
    )
    length = len(sequence.token_ids)
    steps = [Step((Chunk(0, 0, length, True, (1,)),)), Step((Chunk(0, length, 1, True, (1,)),))]
    for step, logits in zip(steps, one.logits, strict=True):
        for _ in range(3):
            again = runner.run(step, {0: sequence}).logits[0]
            assert (again - logits).abs().max() <= CLOSE * logits.abs().max()
        sequence.token_ids.append(one.tokens[0])


def test_an_answer_may_hold_the_token_that_stands_for_pictures(model: Any) -> None:
    # Text of the model's own, behind which a preemption makes it compute all in one forward.
    one = case(model, 1, 9, Picture(2, 4), 5, count=1)
    runner = StatefulRunner(parts_of(model, stateful=True))
    sequence = Greedy(
        [*one.prompt.token_ids], one.prompt.images, one.prompt.positions, one.prompt.position_delta
    )
    length = len(sequence.token_ids)
    runner.run(Step((Chunk(0, 0, length, True, (1,)),)), {0: sequence})
    sequence.token_ids.append(IMAGE)
    by_token = runner.run(Step((Chunk(0, length, 1, True, (1,)),)), {0: sequence}).logits
    at_once = runner.run(Step((Chunk(0, 0, length + 1, True, (1,)),)), {0: sequence}).logits
    assert (by_token - at_once).abs().max() <= CLOSE * by_token.abs().max()


def test_the_engine_serves_eight_at_once_and_outlives_neighbours_that_leave(model: Any) -> None:
    expected = cases(model, 8, COUNT)
    sampling = greedy(COUNT, min_tokens=COUNT)
    with running_parts(parts_of(model, stateful=True)) as run:
        listeners = [run.submit(one.prompt, sampling) for one in expected]
        leaving = [run.submit(one.prompt, greedy(200, ignore_eos=True)) for one in expected[:3]]
        for ticket, listener in leaving:
            assert listener.begun.wait(30)
            run.engine.cancel(ticket)
        for one, (_, listener) in zip(expected, listeners, strict=True):
            assert listener.wait().token_ids == one.tokens
        for _, listener in leaving:
            assert isinstance(listener.wait().end, Failed)
        stats = run.engine.stats()
    assert stats.blocks_used == stats.running == stats.blocks_cached == 0
    assert not run.fatal_calls


def test_the_engine_answers_the_same_in_a_pool_that_holds_few(model: Any) -> None:
    expected = cases(model, 8, COUNT)
    few = EngineSettings(kv_bytes=40 * 4 * 4 * 2 * 2 * 16 * 4, block_size=4, decode_stretch=0)
    engine = EmbeddedEngine(
        parts_of(model, stateful=True, context_length=128), tokenizer(), few, on_fatal=lambda: None
    )
    sampling = greedy(COUNT, min_tokens=COUNT)
    listeners = [Listener() for _ in expected]
    # Before it starts, so that all are there in its first step.
    for one, listener in zip(expected, listeners, strict=True):
        engine.submit("request", one.prompt, sampling, None, listener)
    engine.start()
    for one, listener in zip(expected, listeners, strict=True):
        assert listener.wait().token_ids == one.tokens
    engine.stop()
    assert engine.stats().preempted_total > 0


def test_choices_compute_their_prompt_each_and_agree(model: Any) -> None:
    one = case(model, 1, 9, Picture(2, 4), 5, count=COUNT)
    with running_parts(parts_of(model, stateful=True)) as run:
        listener = run.answer(one.prompt, greedy(COUNT, min_tokens=COUNT), choices=3)
    assert [listener.tokens_of(choice) for choice in range(3)] == [one.tokens] * 3
    assert all(end.cached_tokens == 0 for end in listener.ends.values())


def test_caches_of_sequences_without_blocks_are_dropped() -> None:
    model = tiny_families.gemma3()
    runner = StatefulRunner(parts_of(model, stateful=True))
    sequences = {key: Greedy([5, 6, 7], ()) for key in range(3)}
    runner.run(Step(tuple(Chunk(key, 0, 3, True, (1,)) for key in range(3))), sequences)
    assert runner.cached_tokens == 9
    runner.retain({1})
    assert runner.cached_tokens == 3
    runner.probe()
    runner.prices()
    assert runner.cached_tokens == 3


def test_levels_are_refused() -> None:
    model = tiny_families.qwen3_vl()
    with pytest.raises(UnsupportedDecoder):
        EmbeddedEngine(
            parts_of(model, stateful=True), tokenizer(), EngineSettings(kv_bytes=4 << 20),
            on_fatal=lambda: None,
        )  # fmt: skip


def _committed(scheduler: Scheduler) -> Step:
    step = scheduler.plan()
    scheduler.commit(step)
    return step


def _lengths(scheduler: Scheduler) -> dict[int, int]:
    return {chunk.key: chunk.length for chunk in _committed(scheduler).chunks}


def test_a_prompt_beyond_the_budget_goes_alone_and_whole() -> None:
    scheduler = Scheduler(BlockPool(100, 4), 10, 8, whole_prompts=True)
    scheduler.add(0, 30, 40)
    scheduler.add(1, 4, 40)
    scheduler.add(2, 9, 40)
    assert _lengths(scheduler) == {0: 30}
    # Twenty tokens more than were due: two steps of the answer that runs pay for them.
    assert [_lengths(scheduler) for _ in range(2)] == [{0: 1}] * 2
    assert _lengths(scheduler) == {0: 1, 1: 4}
    assert _lengths(scheduler) == {0: 1, 1: 1, 2: 9}


def test_prompts_that_fit_the_budget_together_share_a_step() -> None:
    scheduler = Scheduler(BlockPool(100, 4), 10, 8, whole_prompts=True)
    for key, length in enumerate((3, 9, 4)):
        scheduler.add(key, length, 40)
    assert _lengths(scheduler) == {0: 3, 2: 4}
    assert _lengths(scheduler) == {0: 1, 1: 9, 2: 1}


def test_prompts_leave_answers_the_steps_that_their_limits_promise() -> None:
    # An answer costs 10 alone, a prompt's token 1: with a stretch of 2, ten tokens are due a step.
    limits = StepLimits(ApartPrices(fixed=9, each=1), stretch=2)
    scheduler = Scheduler(BlockPool(500, 4), 512, 8, limits=limits, whole_prompts=True)
    scheduler.add(0, 2, 400)
    _lengths(scheduler)
    _lengths(scheduler)
    scheduler.add(1, 50, 100)
    scheduler.add(2, 10, 100)
    assert _lengths(scheduler) == {0: 1, 1: 50}
    waited = 0
    while 2 not in _lengths(scheduler):
        waited += 1
    assert 1 <= waited <= 4


def test_prompts_do_not_wait_for_answers_that_are_short_of_blocks() -> None:
    # The prompts of both fill the pool; the answer has no block to grow while the other waits.
    scheduler = Scheduler(BlockPool(9, 4), 8, 8, whole_prompts=True)
    lengths = {0: 20, 1: 3, 2: 8}
    for key, length in lengths.items():
        scheduler.add(key, length, 24)
    for _ in range(100):
        if not lengths:
            return
        for key in [chunk.key for chunk in _committed(scheduler).chunks]:
            lengths[key] += 1
            if lengths[key] == 24:
                scheduler.remove(key)
                del lengths[key]
    raise AssertionError(f"some never ended: {lengths}")


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    budget=st.integers(4, 24),
    blocks=st.integers(7, 16),
)
def test_whole_prompts_all_come_to_their_end(prompts: list[int], budget: int, blocks: int) -> None:
    limits = StepLimits(ApartPrices(fixed=9, each=1), stretch=1.5)
    pool = BlockPool(blocks, 4)
    scheduler = Scheduler(pool, budget, 4, limits=limits, whole_prompts=True)
    left = dict.fromkeys(range(len(prompts)), 4)
    lengths = dict(enumerate(prompts))
    for key, length in lengths.items():
        scheduler.add(key, length, length + 4)
    for _ in range(2000):
        if not left:
            break
        for chunk in _committed(scheduler).chunks:
            assert chunk.samples and (chunk.length == 1 or chunk.start == 0)
            assert chunk.end == lengths[chunk.key]
            lengths[chunk.key] += 1
            left[chunk.key] -= 1
            if not left[chunk.key]:
                scheduler.remove(chunk.key)
                del left[chunk.key]
    assert not left
    assert pool.used_count == 0
