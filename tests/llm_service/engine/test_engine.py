"""The engine as its callers see it: events, ends, failures, and what it holds."""

import threading
import time
from typing import Any

import pytest
import torch

from chiasm.errors import ChiasmError, Reason
from llm_service.engine.refusals import EngineBusy, EngineStopped, PromptInvalid, PromptTooLong
from llm_service.engine.values import (
    Delta,
    EngineSettings,
    Event,
    Failed,
    ImageSpan,
    Prompt,
    SamplingParams,
)
from tests.llm_service.engine.rig import (
    CONTEXT,
    EOS,
    WAIT_SECONDS,
    Listener,
    Running,
    chain,
    generated,
    greedy,
    ids_of,
    random_llama,
    random_prompt,
    random_rows,
    running,
    tokenizer,
    with_image,
)

LONG = greedy(400, ignore_eos=True)
PACE = 0.005
HELLO = Prompt(ids_of("hello"))


def _poisoned(value: float) -> Prompt:
    return with_image(random_prompt(1, 16), 3, torch.full((2, 64), value))


def _unreadable() -> Prompt:
    """An image whose rows cannot be read: they have a shape but no storage."""
    return with_image(random_prompt(1, 16), 3, torch.empty(2, 64, device="meta"))


def _until(holds: Any) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_greedy_text_and_usage_equal_generate() -> None:
    prompt = with_image(random_prompt(4, 40), 5, random_rows(4, 16))
    tokens, _ = generated(random_llama(), prompt, 20)
    with running(random_llama()) as system:
        answer = system.answer(prompt, greedy(20, min_tokens=20))
    assert answer.token_ids == tokens
    assert answer.text == tokenizer().decode(tokens, skip_special_tokens=True)
    end = answer.finished
    assert (end.reason, end.prompt_tokens, end.completion_tokens) == ("length", 40, 20)
    assert end.cached_tokens == 0
    assert min(end.queue_seconds, end.prefill_seconds, end.decode_seconds) >= 0
    assert end.decode_seconds > 0


def test_thirty_two_at_once_answer_as_each_alone() -> None:
    prompts = [random_prompt(seed, 3 + 2 * seed) for seed in range(32)]
    with running(random_llama(), EngineSettings(kv_bytes=4 << 20, step_token_budget=64)) as system:
        together = [system.submit(prompt, greedy(12))[1] for prompt in prompts]
        texts = [listener.wait().text for listener in together]
        assert texts == [system.answer(prompt, greedy(12)).text for prompt in prompts]
        assert system.engine.stats().blocks_used == 0


def test_short_requests_join_and_leave_while_a_long_one_runs_undisturbed() -> None:
    prompt = random_prompt(9, 30)
    with running(random_llama()) as system:
        alone = system.answer(prompt, greedy(150, ignore_eos=True)).token_ids
        _, long = system.submit(prompt, greedy(150, ignore_eos=True))
        assert long.begun.wait(WAIT_SECONDS)
        shorts = [system.submit(random_prompt(seed, 50), greedy(3))[1] for seed in range(4)]
        for short in shorts:
            short.wait()
        assert long.wait().token_ids == alone
        assert max(short.ended_at for short in shorts) < long.ended_at


def test_requests_that_lose_their_blocks_still_answer_as_alone() -> None:
    prompts = [random_prompt(seed, 40) for seed in range(6)]
    # 16 blocks of 1 KiB a token: four such requests fit at their start, two at their end.
    settings = EngineSettings(kv_bytes=16 * 16 * 512)
    with running(random_llama(), settings) as system:
        listeners = [system.submit(prompt, greedy(60, min_tokens=60))[1] for prompt in prompts]
        texts = [listener.wait().text for listener in listeners]
        assert system.engine.stats().preempted_total > 0
        alone = [system.answer(prompt, greedy(60, min_tokens=60)).text for prompt in prompts]
    assert texts == alone


def test_an_answer_ends_at_the_end_token_without_its_text() -> None:
    with running(chain("abc")) as system:
        answer = system.answer(HELLO, greedy(50))
    assert (answer.text, answer.finished.reason) == ("abc", "stop")
    assert answer.token_ids == [*ids_of("abc"), EOS]
    assert answer.finished.completion_tokens == 4


def test_an_answer_goes_on_past_the_end_token_if_asked() -> None:
    with running(chain("abc")) as system:
        answer = system.answer(HELLO, greedy(9, ignore_eos=True))
    assert (answer.text, answer.finished.reason) == ("abcabca", "length")


def test_an_answer_ends_at_a_stop_token() -> None:
    with running(chain("abcd")) as system:
        answer = system.answer(HELLO, greedy(9, stop_token_ids=ids_of("c")))
    assert (answer.text, answer.finished.reason) == ("ab", "stop")


def test_no_end_counts_before_the_least_number_of_tokens() -> None:
    with running(chain("abc")) as system:
        answer = system.answer(HELLO, greedy(9, min_tokens=6, stop=("b",)))
    assert len(answer.token_ids) >= 6
    assert answer.text.startswith("abc")


def test_a_stop_text_over_several_tokens_is_never_shown() -> None:
    with running(chain("abcdefgh")) as system:
        answer = system.answer(HELLO, greedy(9, stop=("cdx", "def")))
    assert (answer.text, answer.finished.reason) == ("abc", "stop")
    assert answer.finished.completion_tokens == 6


def test_text_held_back_for_a_stop_is_shown_when_the_answer_ends_without_it() -> None:
    with running(chain("abcd")) as system:
        answer = system.answer(HELLO, greedy(9, stop=("cdX",)))
    assert (answer.text, answer.finished.reason) == ("abcd", "stop")


def test_a_character_of_several_tokens_is_never_split() -> None:
    with running(chain("é🦊x")) as system:
        answer = system.answer(HELLO, greedy(9))
    assert [delta.text for delta in answer.deltas if delta.text] == ["é", "🦊", "x"]


def test_a_request_for_more_than_the_context_holds_ends_by_length_at_its_limit() -> None:
    with running(random_llama(), context_length=64) as system:
        answer = system.answer(random_prompt(1, 60), greedy(1000, ignore_eos=True))
        assert (answer.finished.reason, answer.finished.completion_tokens) == ("length", 4)
        unlimited = SamplingParams(temperature=0, ignore_eos=True)
        assert system.answer(random_prompt(1, 50), unlimited).finished.completion_tokens == 14


def test_equal_seeds_give_equal_answers_whatever_the_neighbours() -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=7, max_tokens=20)
    prompt = random_prompt(3, 20)
    with running(random_llama()) as system:
        alone = system.answer(prompt, sampling).token_ids
        hot = SamplingParams(temperature=1.5, max_tokens=30)
        for seed in range(5):
            system.submit(random_prompt(seed, 10 + seed), hot)
        assert system.answer(prompt, sampling).token_ids == alone
        other = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=8, max_tokens=20)
        assert system.answer(prompt, other).token_ids != alone


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_any_64_bit_seed_works(seed: int) -> None:
    with running(random_llama()) as system:
        answer = system.answer(HELLO, SamplingParams(seed=seed, max_tokens=2, ignore_eos=True))
        assert answer.finished.completion_tokens == 2


def test_a_cancelled_request_ends_and_frees_its_blocks() -> None:
    with running(random_llama()) as system:
        ticket, listener = system.submit(HELLO, LONG, pace=PACE)
        assert listener.begun.wait(WAIT_SECONDS)
        assert system.engine.stats().blocks_used > 0
        system.engine.cancel(ticket)
        system.engine.cancel(ticket)
        assert listener.wait().end == Failed("CANCELLED")
        stats = system.engine.stats()
        assert (stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0)
        assert stats.cancelled_total == 1
        system.answer(HELLO, greedy(2))
        system.engine.cancel(ticket)


def test_a_cancelled_request_that_still_waits_never_starts() -> None:
    with running(random_llama(), EngineSettings(kv_bytes=4 << 20, max_running=1)) as system:
        first_ticket, first = system.submit(HELLO, LONG, pace=PACE)
        ticket, listener = system.submit(HELLO, LONG)
        assert first.begun.wait(WAIT_SECONDS)
        assert system.engine.stats().waiting == 1
        system.engine.cancel(ticket)
        assert listener.wait().end == Failed("CANCELLED")
        assert listener.deltas == []
        system.engine.cancel(first_ticket)


def test_a_deadline_ends_a_request_that_runs_and_one_that_waits() -> None:
    with running(random_llama(), EngineSettings(kv_bytes=4 << 20, max_running=1)) as system:
        _, runs = system.submit(HELLO, LONG, time.monotonic() + 0.5, PACE)
        _, waits = system.submit(HELLO, LONG, time.monotonic() + 0.05)
        assert waits.wait().end == Failed("DEADLINE")
        assert waits.deltas == []
        assert runs.wait().end == Failed("DEADLINE")
        assert runs.deltas
        assert system.engine.stats().blocks_used == 0


def test_a_request_whose_deadline_has_passed_costs_no_step() -> None:
    with running(random_llama()) as system:
        _, late = system.submit(HELLO, LONG, time.monotonic() - 1)
        assert late.wait().end == Failed("DEADLINE")
        assert system.engine.stats().steps_total == 0


@pytest.mark.parametrize(
    "prompt", [_poisoned(float("nan")), _poisoned(float("inf")), _unreadable()],
    ids=["nan", "infinite", "unreadable"],
)  # fmt: skip
def test_a_request_that_cannot_be_computed_ends_alone(prompt: Prompt) -> None:
    neighbour = random_prompt(5, 20)
    with running(random_llama()) as system:
        alone = system.answer(neighbour, greedy(60, ignore_eos=True)).token_ids
        _, good = system.submit(neighbour, greedy(60, ignore_eos=True))
        bad = [system.submit(prompt, greedy(5))[1] for _ in range(3)]
        assert [listener.wait().end for listener in bad] == [Failed("INTERNAL")] * 3
        assert good.wait().token_ids == alone
        # With no neighbour to prove the model sound, too.
        assert system.answer(prompt, greedy(5)).end == Failed("INTERNAL")
        assert system.engine.healthy
        assert system.engine.stats().blocks_used == 0
        assert system.answer(neighbour, greedy(60, ignore_eos=True)).token_ids == alone


class _Fuse:
    """Once blown, the decoder it is hooked into raises for good."""

    def __init__(self) -> None:
        self.blown = False

    def __call__(self, module: Any, inputs: Any) -> None:
        if self.blown:
            raise RuntimeError("the device is lost")


def test_a_broken_model_ends_all_and_calls_for_help_once() -> None:
    model, fuse = random_llama(), _Fuse()
    model.model.register_forward_pre_hook(fuse)
    with running(model) as system:
        listeners = [system.submit(HELLO, LONG, pace=PACE)[1] for _ in range(3)]
        assert listeners[0].begun.wait(WAIT_SECONDS)
        fuse.blown = True
        for listener in listeners:
            assert listener.wait().end == Failed("INTERNAL")
        _until(lambda: system.fatal_calls)
        assert not system.engine.healthy
        with pytest.raises(EngineStopped):
            system.submit(HELLO, LONG)
    assert len(system.fatal_calls) == 1


class _Deaf(Listener):
    def __call__(self, event: Event) -> None:
        super().__call__(event)
        raise ConnectionError("nobody listens")


def test_a_listener_that_fails_ends_its_own_request_only() -> None:
    with running(random_llama()) as system:
        _, good = system.submit(HELLO, greedy(100, ignore_eos=True))
        deaf = _Deaf()
        system.engine.submit("deaf", HELLO, LONG, None, deaf)
        assert good.wait().finished.completion_tokens == 100
        assert len(deaf.deltas) == 1
        assert system.engine.stats().blocks_used == 0


def test_stopping_ends_what_runs_and_what_waits() -> None:
    with running(random_llama(), EngineSettings(kv_bytes=4 << 20, max_running=1)) as system:
        listeners = [system.submit(HELLO, LONG, pace=PACE)[1] for _ in range(3)]
        assert listeners[0].begun.wait(WAIT_SECONDS)
        system.engine.stop()
        assert [listener.end for listener in listeners] == [Failed("SHUTTING_DOWN")] * 3
        with pytest.raises(EngineStopped):
            system.submit(HELLO, LONG)
        assert not any(thread.name == "engine" for thread in threading.enumerate())
    assert system.fatal_calls == []
    assert system.engine.healthy


def _refused(system: Running, prompt: Prompt, sampling: SamplingParams = LONG) -> ChiasmError:
    with pytest.raises(ChiasmError) as caught:
        system.submit(prompt, sampling)
    return caught.value


def test_what_can_never_be_computed_is_refused_at_once() -> None:
    rows = random_rows(1, 4)
    base = random_prompt(1, 10)
    with running(random_llama()) as system:
        too_long = _refused(system, random_prompt(1, CONTEXT))
        assert isinstance(too_long, PromptTooLong)
        assert too_long.reason == Reason.CONTEXT_LENGTH_EXCEEDED
        for prompt, field in [
            (Prompt(()), "messages"),
            (Prompt((5, -1)), "messages"),
            (Prompt((5, 260)), "messages"),
            (with_image(base, 7, rows), "images[0]"),
            (with_image(base, -1, rows), "images[0]"),
            (with_image(with_image(base, 0, rows), 3, rows), "images[1]"),
            (with_image(base, 0, random_rows(1, 4, width=63)), "images[0]"),
            (with_image(base, 0, rows.long()), "images[0]"),
            (Prompt(base.token_ids, (ImageSpan(0, 3, rows),)), "images[0]"),
            (Prompt(base.token_ids, (ImageSpan(0, 0, rows[:0]),)), "images[0]"),
        ]:
            refusal = _refused(system, prompt)
            assert isinstance(refusal, PromptInvalid)
            assert refusal.field == field
        stop_ids = _refused(system, base, greedy(3, stop_token_ids=(260,)))
        assert stop_ids.field == "stop_token_ids"
        assert system.engine.stats().waiting == 0


def test_the_pool_limits_the_context_where_it_is_smaller() -> None:
    # 4 blocks of 16 tokens, 512 bytes each.
    with running(random_llama(), EngineSettings(kv_bytes=4 * 16 * 512)) as system:
        assert system.engine.context_length == 64
        assert isinstance(_refused(system, random_prompt(1, 64)), PromptTooLong)
        assert system.answer(random_prompt(1, 63), LONG).finished.completion_tokens == 1


def test_more_than_may_wait_is_refused_with_a_time_to_try_again() -> None:
    settings = EngineSettings(kv_bytes=4 << 20, max_running=1, max_waiting=2)
    with running(random_llama(), settings) as system:
        held = [system.submit(HELLO, LONG, pace=PACE) for _ in range(3)]
        refusal = _refused(system, HELLO)
        assert isinstance(refusal, EngineBusy)
        assert refusal.retry_after is not None
        for ticket, listener in held:
            system.engine.cancel(ticket)
            listener.wait()
        assert system.answer(HELLO, greedy(1)).deltas


def test_counts_add_up() -> None:
    with running(random_llama()) as system:
        for seed in range(2):
            system.answer(random_prompt(seed, 21), greedy(5, ignore_eos=True))
        stats = system.engine.stats()
    assert (stats.prefill_tokens_total, stats.tokens_generated_total) == (42, 10)
    assert stats.steps_total == 10
    assert stats.blocks_total > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("min_p", 1.5),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop", ("a", "")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.1),
        ("logit_bias", ((1, 0.0), (2, 101.0))),
        ("logit_bias", ((1, float("nan")),)),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
    ],
)
def test_a_sampling_setting_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ChiasmError) as caught:
        SamplingParams(**{field: value})
    assert (caught.value.reason, caught.value.field) == (Reason.REQUEST_INVALID, field)


def test_a_budget_below_a_token_for_each_running_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="step_token_budget"):
        EngineSettings(step_token_budget=8, max_running=9)


def test_a_delta_carries_each_token_once() -> None:
    with running(chain("abc")) as system:
        answer = system.answer(HELLO, greedy(50))
    assert answer.deltas == [
        Delta("a", ids_of("a")),
        Delta("b", ids_of("b")),
        Delta("c", ids_of("c")),
        Delta("", (EOS,)),
    ]
