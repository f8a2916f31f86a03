"""How answers are drawn through the whole engine: penalties, log-probabilities, seeds, ends."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from llm_service.engine.engine import EmbeddedEngine
from llm_service.engine.refusals import PromptInvalid
from llm_service.engine.values import (
    Constraint,
    EngineSettings,
    Failed,
    Prompt,
    SamplingParams,
    TokenLogprob,
)
from tests.llm_service.engine.rig import (
    EOS,
    FIRST_BYTE,
    VOCABULARY,
    WAIT_SECONDS,
    Listener,
    Running,
    chain,
    greedy,
    ids_of,
    parts,
    random_llama,
    random_prompt,
    random_rows,
    running,
    tokenizer,
    with_image,
)

HELLO = Prompt(ids_of("hello"))
COUNT = 24


def _step_logits(model: Any, prompt: Prompt, answer: Sequence[int]) -> torch.Tensor:
    """Logits before each token of `answer`, from one plain forward pass."""
    ids = torch.tensor([*prompt.token_ids, *answer])
    with torch.no_grad():
        rows = model.get_input_embeddings()(ids)
        for image in prompt.images:
            rows[image.start : image.start + image.length] = image.rows
        logits: torch.Tensor = model(inputs_embeds=rows[None]).logits[0]
    return logits[len(prompt.token_ids) - 1 : -1]


def _penalised(logits: torch.Tensor, sampling: SamplingParams, context: Any) -> torch.Tensor:
    """The stages by other means: transformers' processor, and OpenAI's formula term by term."""
    prompt, answer = context
    logits = logits.clone()
    for token_id, bias in sampling.logit_bias:
        logits[token_id] += bias
    repeat: Any = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    logits = repeat(torch.tensor([[*prompt, *answer]]), logits[None])[0]
    for token_id in set(answer):
        count = answer.count(token_id)
        logits[token_id] -= count * sampling.frequency_penalty + sampling.presence_penalty
    return logits


PENALTIES = {
    "repetition": {"repetition_penalty": 1.4},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "reward": {"presence_penalty": -1.0, "frequency_penalty": -0.3},
    "all": {
        "repetition_penalty": 0.8,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.4,
        "logit_bias": ((FIRST_BYTE + 7, 2.5), (FIRST_BYTE + 9, -3.0)),
    },
}


@pytest.mark.parametrize("options", PENALTIES.values(), ids=PENALTIES.keys())
def test_each_token_is_the_likeliest_after_penalties(options: dict[str, Any]) -> None:
    sampling = greedy(COUNT, min_tokens=COUNT, **options)
    prompt = with_image(random_prompt(3, 30), 4, random_rows(3, 10))
    text = [*prompt.token_ids[:4], *prompt.token_ids[14:]]
    plain = greedy(COUNT, min_tokens=COUNT)
    with running(random_llama()) as system:
        _, beside = system.submit(random_prompt(9, 12), plain)
        answer = system.answer(prompt, sampling).token_ids
        without = system.answer(prompt, plain).token_ids
        assert beside.wait().token_ids == system.answer(random_prompt(9, 12), plain).token_ids
    logits = _step_logits(random_llama(), prompt, answer)
    for place, row in enumerate(logits):
        penalised = _penalised(row, sampling, (text, answer[:place]))
        penalised[EOS] = float("-inf")
        assert answer[place] == int(penalised.argmax())
    assert answer != without


def test_placeholders_of_a_picture_are_no_text_that_repeats() -> None:
    placeholder = 3
    prompt = Prompt((*random_prompt(1, 6).token_ids, *[placeholder] * 8, FIRST_BYTE))
    prompt = with_image(prompt, 6, random_rows(2, 8))
    # So likely that only a penalty could keep it away.
    sampling = greedy(1, repetition_penalty=2.0, logit_bias=((placeholder, 30.0),))
    close = greedy(1, repetition_penalty=2.0, logit_bias=((placeholder, 30.0), (FIRST_BYTE, 40.0)))
    with running(random_llama()) as system:
        assert system.answer(prompt, sampling).token_ids == [placeholder]
        assert system.answer(prompt, close).token_ids == [placeholder]


def test_a_bias_on_a_token_outside_the_vocabulary_is_refused() -> None:
    with running(random_llama()) as system, pytest.raises(PromptInvalid) as caught:
        system.submit(HELLO, greedy(1, logit_bias=((VOCABULARY, 1.0),)))
    assert caught.value.field == "logit_bias"


def test_log_probabilities_equal_those_of_a_plain_forward_pass() -> None:
    prompt = with_image(random_prompt(3, 30), 4, random_rows(3, 10))
    sampling = SamplingParams(
        temperature=0.7, top_k=9, seed=4, max_tokens=COUNT, ignore_eos=True, top_logprobs=5,
        presence_penalty=1.0,
    )  # fmt: skip
    with running(random_llama()) as system:
        others = [system.submit(random_prompt(seed, 20), greedy(40))[1] for seed in range(6)]
        answer = system.answer(prompt, sampling)
        for other in others:
            assert not any(delta.logprobs for delta in other.wait().deltas)
    told = [one for delta in answer.deltas for one in delta.logprobs]
    logits = _step_logits(random_llama(), prompt, answer.token_ids)
    expected = torch.log_softmax(logits, -1)
    assert [one.token_id for one in told] == answer.token_ids
    for one, row in zip(told, expected, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=2e-5)
        assert [top.token_id for top in one.top] == row.topk(5).indices.tolist()
        assert [top.logprob for top in one.top] == pytest.approx(
            row.topk(5).values.tolist(), abs=2e-5
        )


def test_bytes_of_the_tokens_join_to_the_text() -> None:
    # A prompt's last token decides what the chain says next; each byte comes once.
    with running(chain("né€!")) as system:
        answer = system.answer(HELLO, greedy(9, top_logprobs=1))
    told = [one for delta in answer.deltas for one in delta.logprobs]
    assert b"".join(one.token for one in told[:-1]).decode() == answer.text == "né€!"
    assert told[-1].token == b"</s>"
    assert [one.top[0].token for one in told] == [one.token for one in told]


def test_log_probabilities_come_with_their_tokens_even_where_text_is_held_back() -> None:
    with running(chain("abcdef")) as system:
        answer = system.answer(HELLO, greedy(9, top_logprobs=0, stop=("bcx", "de")))
    assert answer.text == "abc"
    assert [(delta.text, [one.token for one in delta.logprobs]) for delta in answer.deltas] == [
        ("a", [b"a"]), ("", [b"b"]), ("", [b"c"]), ("bc", [b"d"]), ("", [b"e"]),
    ]  # fmt: skip


SAMPLED = SamplingParams(temperature=1.2, top_p=0.95, seed=77, max_tokens=40, ignore_eos=True)


def test_a_seed_gives_the_same_text_whatever_else_is_in_the_batch() -> None:
    prompt = random_prompt(1, 37)
    # 24 blocks of 16 tokens: too few for all, so some lose theirs and are computed again.
    settings = EngineSettings(kv_bytes=24 * 16 * 512, step_token_budget=64, max_running=16)
    with running(random_llama()) as system:
        alone = system.answer(prompt, SAMPLED).token_ids
    noise = [
        SamplingParams(temperature=0.5, top_k=3, max_tokens=50, ignore_eos=True),
        greedy(50, ignore_eos=True, repetition_penalty=1.5),
        SamplingParams(min_p=0.1, max_tokens=50, ignore_eos=True, logit_bias=((9, 4.0),)),
    ]
    with running(random_llama(), settings) as system:
        before = [system.submit(random_prompt(i, 20 + i), noise[i % 3])[1] for i in range(6)]
        asked = [system.submit(prompt, SAMPLED)[1] for _ in range(4)]
        after = [system.submit(random_prompt(i, 9 + i), noise[i % 3])[1] for i in range(6)]
        assert [one.wait().token_ids for one in asked] == [alone] * 4
        for other in (*before, *after):
            other.wait()
        assert system.engine.stats().preempted_total > 0


def test_other_seeds_and_no_seed_give_other_texts() -> None:
    with running(random_llama()) as system:
        texts = {
            tuple(system.answer(HELLO, SamplingParams(seed=seed, max_tokens=30)).token_ids)
            for seed in (None, None, 1, 2, -1, 2**63 - 1)
        }
    assert len(texts) == 6


def test_the_choices_of_a_request_are_those_of_seeds_that_count_up() -> None:
    prompt = random_prompt(5, 50)
    with running(random_llama()) as system:
        single = [system.answer(prompt, _seeded(seed)).token_ids for seed in (77, 78, 79, 80, 81)]
        answer = system.answer(prompt, _seeded(77), choices=5)
        assert system.engine.stats().blocks_used == 0
    assert [answer.tokens_of(choice) for choice in range(5)] == single
    assert len({*map(tuple, single)}) == 5
    assert [answer.ends[choice].completion_tokens for choice in range(5)] == [40] * 5


def _seeded(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.2, seed=seed, max_tokens=40, ignore_eos=True)


def test_choices_compute_the_prompt_once() -> None:
    with running(random_llama()) as system:
        answer = system.answer(random_prompt(6, 100), _seeded(1), choices=8)
        computed = system.engine.stats().prefill_tokens_total
    # Six full blocks are shared; each of the others computes the four tokens behind them.
    assert computed == 100 + 7 * 4
    assert answer.ends[0].cached_tokens == 0
    assert [answer.ends[choice].cached_tokens for choice in range(1, 8)] == [96] * 7


def test_choices_at_temperature_zero_are_equal_and_each_ends_alone() -> None:
    with running(random_llama()) as system:
        alone = system.answer(random_prompt(7, 20), greedy(15)).token_ids
        answer = system.answer(random_prompt(7, 20), greedy(15), choices=3)
    assert [answer.tokens_of(choice) for choice in range(3)] == [alone] * 3
    assert sorted(answer.ends) == [0, 1, 2]


def test_choices_of_which_the_first_ends_at_its_first_token_all_come() -> None:
    with running(chain("a")) as system:
        answer = system.answer(Prompt(ids_of("xa")), greedy(9), choices=4)
    assert {choice: end.reason for choice, end in answer.ends.items()} == dict.fromkeys(
        range(4), "stop"
    )


@pytest.mark.parametrize("begun", [False, True])
def test_cancelling_ends_all_choices_with_one_failure(begun: bool) -> None:
    with running(random_llama()) as system:
        _, busy = system.submit(random_prompt(1, 5), greedy(400, ignore_eos=True), pace=0.002)
        ticket, listener = system.submit(
            random_prompt(2, 300), greedy(200, ignore_eos=True), choices=4
        )
        if begun:
            assert listener.begun.wait(WAIT_SECONDS)
        system.engine.cancel(ticket)
        assert listener.wait().end == Failed("CANCELLED")
        assert system.engine.stats().cancelled_total == 1
        busy.wait()
        stats = system.engine.stats()
        assert (stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0)


def test_a_choice_that_ended_does_not_keep_its_request_from_being_cancelled() -> None:
    with running(random_llama()) as system:
        ticket, listener = system.submit(
            HELLO, SamplingParams(temperature=3, seed=1, max_tokens=500), pace=0.001, choices=12
        )
        end = time.monotonic() + WAIT_SECONDS
        while not listener.ends and time.monotonic() < end:
            time.sleep(0.001)
        assert listener.ends
        system.engine.cancel(ticket)
        assert listener.wait().end == Failed("CANCELLED")
        assert system.engine.stats().blocks_used == 0


def test_a_deadline_ends_all_choices() -> None:
    with running(random_llama()) as system:
        _, listener = system.submit(
            HELLO, greedy(500, ignore_eos=True), time.monotonic() + 0.1, pace=0.01, choices=3
        )
        assert listener.wait().end == Failed("DEADLINE")
        assert system.engine.stats().blocks_used == 0


def test_choices_take_as_many_places_as_they_are() -> None:
    settings = EngineSettings(kv_bytes=4 << 20, max_running=2, max_waiting=3)
    with running(random_llama(), settings) as system:
        ticket, listener = system.submit(HELLO, greedy(300, ignore_eos=True), pace=0.01, choices=3)
        with pytest.raises(Exception, match="waiting"):
            system.submit(HELLO, greedy(1), choices=3)
        with pytest.raises(Exception, match="1 to 5 choices"):
            system.submit(HELLO, greedy(1), choices=6)
        _, others = system.submit(HELLO, greedy(1), choices=2)
        system.engine.cancel(ticket)
        listener.wait()
        others.wait()
        assert len(system.answer(HELLO, greedy(2), choices=5).ends) == 5


def test_every_one_of_several_end_tokens_ends_an_answer() -> None:
    decoder = parts(chain("abc"))
    for end, text in ((ids_of("b")[0], "a"), (ids_of("c")[0], "ab")):
        listener = Listener()
        ends = (*decoder.eos_ids, end)
        engine = EmbeddedEngine(
            type(decoder)(**{**vars(decoder), "eos_ids": ends}),
            tokenizer(),
            EngineSettings(kv_bytes=4 << 20),
            on_fatal=lambda: None,
        )
        engine.start()
        engine.submit("request", HELLO, greedy(9), None, listener)
        assert (listener.wait().text, listener.finished.reason) == (text, "stop")
        engine.stop()


@dataclass
class Letters:
    """A constraint by hand: exactly these letters in this order, or fewer; then the end."""

    letters: tuple[int, ...]
    place: int = 0
    forks: list["Letters"] = field(default_factory=list)

    def allowed(self) -> torch.Tensor:
        mask = torch.zeros(VOCABULARY, dtype=torch.bool)
        mask[EOS] = self.place > 0
        mask[list(self.letters[self.place : self.place + 1])] = True
        return mask

    def advance(self, token_id: int) -> None:
        assert token_id in {EOS, self.letters[self.place]}
        self.place = len(self.letters) if token_id == EOS else self.place + 1

    @property
    def ended(self) -> bool:
        return self.place == len(self.letters)

    def fork(self) -> Constraint:
        self.forks.append(type(self)(self.letters, self.place))
        return self.forks[-1]


def test_a_constraint_decides_what_comes_and_when_it_ends() -> None:
    sampling = greedy(30, logit_bias=((EOS, -50.0),), top_logprobs=3)
    with running(random_llama()) as system:
        answer = system.answer(HELLO, sampling, constraint=Letters(ids_of("yes")))
    assert (answer.text, answer.finished.reason) == ("yes", "stop")
    assert answer.finished.completion_tokens == 3
    told = [one for delta in answer.deltas for one in delta.logprobs]
    assert all(isinstance(one, TokenLogprob) and one.logprob < 0 for one in told)


def test_a_constraint_that_runs_out_of_tokens_ends_with_length() -> None:
    with running(random_llama()) as system:
        sampling = greedy(2, logit_bias=((EOS, -50.0),))
        answer = system.answer(HELLO, sampling, constraint=Letters(ids_of("yes")))
    assert (answer.text, answer.finished.reason) == ("ye", "length")


def test_an_end_token_ends_a_constrained_answer_even_where_end_tokens_are_ignored() -> None:
    with running(random_llama()) as system:
        sampling = greedy(9, ignore_eos=True, logit_bias=((EOS, 90.0),))
        answer = system.answer(HELLO, sampling, constraint=Letters(ids_of("yes")))
    assert (answer.text, answer.finished.reason) == ("y", "stop")


def test_each_choice_follows_its_own_fork_of_a_constraint() -> None:
    constraint = Letters(ids_of("abcdefgh"))
    sampling = SamplingParams(seed=5, max_tokens=30)
    with running(random_llama()) as system:
        answer = system.answer(HELLO, sampling, choices=6, constraint=constraint)
    assert len(constraint.forks) == 5
    for choice in range(6):
        said = [one for one in answer.tokens_of(choice) if one != EOS]
        assert said == list(ids_of("abcdefgh")[: len(said)])
        assert said


@dataclass
class Faulty(Letters):
    """Raises, or allows nothing, at its third token."""

    stage: str = ""

    def allowed(self) -> torch.Tensor:
        if self.place == 2 and self.stage == "allowed":
            raise RuntimeError
        mask = super().allowed()
        return mask & (self.place != 2) if self.stage == "nothing" else mask

    def advance(self, token_id: int) -> None:
        if self.place == 2 and self.stage == "advance":
            raise RuntimeError
        super().advance(token_id)

    @property
    def ended(self) -> bool:
        if self.place == 2 and self.stage == "ended":
            raise RuntimeError
        return super().ended


@pytest.mark.parametrize("stage", ["allowed", "nothing", "advance", "ended"])
def test_a_constraint_that_fails_ends_its_request_alone(stage: str) -> None:
    faulty = Faulty(ids_of("abcdef"), stage=stage)
    sampling = greedy(9, logit_bias=((EOS, -50.0),))
    prompt = random_prompt(8, 20)
    with running(random_llama()) as system:
        alone = system.answer(prompt, greedy(60, ignore_eos=True)).token_ids
        _, beside = system.submit(prompt, greedy(60, ignore_eos=True))
        assert system.answer(HELLO, sampling, constraint=faulty).end == Failed("INTERNAL")
        assert beside.wait().token_ids == alone
        assert system.engine.healthy
        assert system.engine.stats().blocks_used == 0


def test_a_choice_that_fails_ends_its_siblings_with_one_failure() -> None:
    class Second(Letters):
        def fork(self) -> Constraint:
            return Faulty(self.letters, stage="advance")

    sampling = greedy(9, logit_bias=((EOS, -50.0),))
    with running(random_llama()) as system:
        answer = system.answer(HELLO, sampling, choices=3, constraint=Second(ids_of("abcdefghij")))
        assert answer.end == Failed("INTERNAL")
        assert system.engine.stats().blocks_used == 0
        assert system.answer(HELLO, greedy(3)).deltas


def test_a_listener_that_fails_in_one_choice_frees_all() -> None:
    heard = threading.Event()

    def deaf(event: Any) -> None:
        heard.set()
        raise RuntimeError

    with running(random_llama()) as system:
        system.engine.submit("r", HELLO, greedy(400, ignore_eos=True), None, deaf, choices=3)
        assert heard.wait(WAIT_SECONDS)
        _assert_idle(system)


def _assert_idle(system: Running) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while (stats := system.engine.stats()).running + stats.waiting + stats.blocks_used:
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_every_token_would_end_the_answer_it_ends(temperature: float) -> None:
    sampling = SamplingParams(
        temperature=temperature, top_p=0.9, min_tokens=4, max_tokens=9,
        stop_token_ids=tuple(range(VOCABULARY)),
    )  # fmt: skip
    with running(random_llama()) as system:
        answer = system.answer(random_prompt(3, 20), sampling)
        assert answer.finished.reason == "stop"
        assert len(answer.token_ids) == 1
