"""Whatever stage a sequence fails at, it ends alone; what is nobody's own fault ends all, at once.

Each stage is the engine's own code, made to raise over the marked request only. Of two neighbours
one is greedy and one drawn with penalties; they are held at their first token until the marked
request is in, so that it surely shares their steps.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from chiasm.client import AsyncClient
from chiasm.conversation import Sampling, user
from chiasm.errors import ChiasmError, Reason
from llm_service.engine import engine as engine_module
from llm_service.engine import sampler
from llm_service.engine.block_keys import BlockKeys
from llm_service.engine.native import library
from llm_service.engine.native.decoder import NativeDecoder
from llm_service.engine.penalties import Bias
from llm_service.engine.refusals import EngineStopped
from llm_service.engine.runner import Runner
from llm_service.engine.sampler import Draw
from llm_service.engine.scheduler import Scheduler
from llm_service.engine.sequence import Request, Sequence, _Teller
from llm_service.engine.text import StopFilter
from llm_service.engine.values import (
    Delta,
    EngineSettings,
    Event,
    Failed,
    Finished,
    Prompt,
    SamplingParams,
)
from tests.llm_service.engine.rig import (
    CONTEXT,
    EOS,
    VOCABULARY,
    WAIT_SECONDS,
    WIDTH,
    Listener,
    Running,
    greedy,
    random_llama,
    random_prompt,
    running,
    with_image,
)

SECRET = "a detail that belongs into the log"
# What the marked request, and no other, is known by.
MARK, SEED, BIASED, LONGEST = "marked", 424_242, 7, 163
ODD_TOKEN = 3
PLACE = 130  # only the marked request comes so far
PROMPT = Prompt((ODD_TOKEN, *random_prompt(1, LONGEST - 9).token_ids))
DRAWN = SamplingParams(seed=SEED, max_tokens=8, ignore_eos=True)
ENGINES = ("native", "transformers")


class Fault(RuntimeError):
    def __init__(self) -> None:
        super().__init__(SECRET)


class Panic(BaseException):
    """As a panic in a library's Rust code comes up: no Exception."""


def llama(engine: str) -> Any:
    """A random decoder that runs in native code, or one of a head size that does not."""
    if engine == "transformers":
        return random_llama()
    if library.load_library() is None:
        pytest.skip("rows.c was not compiled: there is no C compiler")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=32, initializer_range=0.1,
            max_position_embeddings=CONTEXT, eos_token_id=EOS, pad_token_id=0,
        )  # fmt: skip
        model: Any = LlamaForCausalLM(config)
        return model.eval()


@contextmanager
def started(engine: str, model: Any, settings: EngineSettings | None = None) -> Iterator[Running]:
    # No prompt waits for the sake of the answers: how long it would depends on the machine's load.
    with running(model, settings or EngineSettings(kv_bytes=4 << 20, decode_stretch=0)) as system:
        assert system.engine._runner.native is (engine == "native")
        yield system


class Held(Listener):
    """Holds the engine's thread at its first token until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self._go = threading.Event()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        assert self._go.wait(WAIT_SECONDS)

    def let_go(self) -> None:
        self._go.set()


NEIGHBOURS = (
    (random_prompt(5, 20), greedy(24, ignore_eos=True)),
    (
        random_prompt(6, 37),
        SamplingParams(
            seed=5, max_tokens=24, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.3,
            logit_bias=((20, 1.0),), top_logprobs=2, stop=("\x00\x00never",),
        ),
    ),
)  # fmt: skip


@dataclass
class Ask:
    """The marked request, and how often its stage was made to raise."""

    sampling: SamplingParams = DRAWN
    prompt: Prompt = PROMPT
    choices: int = 1
    tokens: int = 0  # that it gets before it fails
    raised: int = 0


class Seam:
    """Makes the engine's own functions raise where the marked request is concerned."""

    def __init__(self, patch: pytest.MonkeyPatch, model: Any) -> None:
        self._patch = patch
        self.model = model
        self.ask = Ask()

    def fault(
        self,
        owner: Any,
        name: str,
        concerns: Callable[..., bool],
        error: type[BaseException] = Fault,
    ) -> None:
        """`owner.name` raises where `concerns` says so of its arguments."""
        real = getattr(owner, name)

        def made_to_raise(*arguments: Any, **options: Any) -> Any:
            if concerns(*arguments, **options):
                self.ask.raised += 1
                raise error
            return real(*arguments, **options)

        self._patch.setattr(owner, name, made_to_raise)

    def hook(self, module: Any, concerns: Callable[[Any, Any], bool]) -> None:
        """A module of the model raises where `concerns` says so of what it is given."""

        def raising(_: Any, inputs: Any, options: Any) -> None:
            if concerns(inputs, options):
                self.ask.raised += 1
                raise Fault

        module.register_forward_pre_hook(raising, with_kwargs=True)


def _of_request(it: Any, *_: Any) -> bool:
    request = it if isinstance(it, Request) else it.request
    return bool(request.request_id == MARK)


def _among_draws(_: Any, draws: Any, *__: Any) -> bool:
    return any(draw.sampling.seed == SEED for draw in draws)


def scheduling(seam: Seam) -> None:
    seam.fault(Scheduler, "add", lambda _, __, ___, longest, ____: longest == LONGEST)


def keys_begun(seam: Seam) -> None:
    seam.fault(BlockKeys, "__init__", lambda _, tokens, *__: tokens[0] == ODD_TOKEN)


def keys_sought(seam: Seam) -> None:
    seam.fault(BlockKeys, "_following", lambda keys: keys._token_ids[0] == ODD_TOKEN)


def keys_of_the_answer(seam: Seam) -> None:
    def grown(keys: Any) -> bool:
        return keys._token_ids[0] == ODD_TOKEN and len(keys._token_ids) > len(PROMPT.token_ids)

    seam.ask.tokens = 160 - len(PROMPT.token_ids)
    seam.fault(BlockKeys, "_following", grown)


def deadline(seam: Seam) -> None:
    seam.fault(Request, "overdue", _of_request)


def clock(seam: Seam) -> None:
    seam.fault(Sequence, "start", _of_request)


def embedding(seam: Seam) -> None:
    seam.hook(seam.model.model.embed_tokens, lambda inputs, _: bool((inputs[0] == ODD_TOKEN).any()))


def mixing_pictures(seam: Seam) -> None:
    # Rows that have a shape but nothing to read.
    rows = torch.empty(4, WIDTH, device="meta")
    seam.ask = replace(seam.ask, prompt=with_image(PROMPT, 3, rows), raised=1)


def layers(seam: Seam) -> None:
    seam.fault(NativeDecoder, "compute", lambda _, rows: bool((rows.positions >= PLACE).any()))
    seam.hook(
        seam.model.model.layers[1],
        lambda _, options: bool((options["position_ids"] >= PLACE).any()),
    )


def logits_no_numbers(seam: Seam) -> None:
    rows = torch.full((4, WIDTH), float("nan"))
    seam.ask = replace(seam.ask, prompt=with_image(PROMPT, 3, rows), raised=1)


def drawing(seam: Seam) -> None:
    seam.fault(Sequence, "draw", _of_request)


def drawing_later(seam: Seam) -> None:
    seam.ask.tokens = 4
    seam.fault(Sequence, "draw", lambda one: _of_request(one) and one.generated == 4)


def least_tokens(seam: Seam) -> None:
    seam.ask.sampling = replace(DRAWN, ignore_eos=False, min_tokens=8)
    seam.fault(sampler, "_forbid", _among_draws)


def biases(seam: Seam) -> None:
    def odd(_: Any, rows: list[tuple[int, Bias]]) -> bool:
        return any(BIASED in bias.ids for _, bias in rows)

    seam.ask.sampling = replace(DRAWN, logit_bias=((BIASED, 1.0),))
    seam.fault(sampler, "add_biases", odd)


def penalties(seam: Seam) -> None:
    def odd(_: Any, rows: Any) -> bool:
        return any(sampling.seed == SEED for _, sampling, _ in rows)

    seam.ask.sampling = replace(DRAWN, presence_penalty=0.5)
    seam.fault(sampler, "penalise", odd)


def sampling(seam: Seam) -> None:
    seam.fault(sampler, "_draw", _among_draws)


def whole_sampler(seam: Seam) -> None:
    seam.fault(engine_module, "sample", lambda logits, draws, best: _among_draws(logits, draws))


def log_probabilities(seam: Seam) -> None:
    def odd(_: Any, __: Any, draws: list[Draw]) -> bool:
        return _among_draws(_, draws)

    seam.ask.sampling = replace(DRAWN, top_logprobs=3)
    seam.fault(sampler, "_told", odd)


def telling_log_probabilities(seam: Seam) -> None:
    seam.ask.sampling = replace(DRAWN, top_logprobs=5)
    seam.fault(_Teller, "tell", lambda _, sampled: len(sampled.top) == 5)


def text(seam: Seam) -> None:
    seam.fault(Sequence, "_read", _of_request)


def text_panics(seam: Seam) -> None:
    seam.fault(Sequence, "_read", _of_request, Panic)


def stop_texts(seam: Seam) -> None:
    seam.ask.sampling = replace(DRAWN, stop=("\x00marked",))
    seam.fault(StopFilter, "push", lambda one, _: "\x00marked" in one._stops)


def last_text(seam: Seam) -> None:
    seam.ask.sampling = replace(DRAWN, stop=("\x00marked",))
    seam.ask.tokens = 7
    seam.fault(StopFilter, "close", lambda one: "\x00marked" in one._stops)


def the_end(seam: Seam) -> None:
    seam.ask.tokens = 7
    seam.fault(Sequence, "finished", _of_request)


def what_was_cached(seam: Seam) -> None:
    seam.ask.tokens = 7
    seam.fault(Scheduler, "cached", lambda one, key: one._entries[key].length >= LONGEST)


def other_choices(seam: Seam) -> None:
    seam.ask.choices = 3
    added: list[int] = []

    def the_last(_: Any, key: int, __: int, longest: int, ___: Any) -> bool:
        added.extend([key] * (longest == LONGEST))
        return longest == LONGEST and len(added) % 3 == 0

    seam.fault(Scheduler, "add", the_last)


def one_of_several_choices(seam: Seam) -> None:
    seam.ask.choices = 3
    seam.fault(
        Sequence, "draw", lambda one: _of_request(one) and (one.choice, one.generated) == (2, 3)
    )


STAGES: tuple[Callable[[Seam], None], ...] = (
    scheduling, keys_begun, keys_sought, keys_of_the_answer, deadline, clock, embedding,
    mixing_pictures, layers, logits_no_numbers, drawing, drawing_later, least_tokens, biases,
    penalties, sampling, whole_sampler, log_probabilities, telling_log_probabilities, text,
    text_panics, stop_texts, last_text, the_end, what_was_cached, other_choices,
    one_of_several_choices,
)  # fmt: skip


# What comes after the logits is the same whoever computed them.
OWN_STAGES = (keys_of_the_answer, embedding, mixing_pictures, layers, logits_no_numbers)
CASES = [
    pytest.param(engine, stage, id=f"{engine}-{stage.__name__}")
    for engine, stages in (("native", STAGES), ("transformers", OWN_STAGES))
    for stage in stages
]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture(scope="module")
def alone(engine: str) -> list[list[int]]:
    with started(engine, llama(engine)) as system:
        return [system.answer(*one).token_ids for one in NEIGHBOURS]


def _submit_marked(system: Running, ask: Ask) -> Listener:
    listener = Listener(choices=ask.choices)
    system.engine.submit(MARK, ask.prompt, ask.sampling, None, listener, choices=ask.choices)
    return listener


@contextmanager
def _beside_neighbours(system: Running) -> Iterator[list[Held]]:
    neighbours = [Held() for _ in NEIGHBOURS]
    for number, (listener, (prompt, how)) in enumerate(zip(neighbours, NEIGHBOURS, strict=True)):
        system.engine.submit(f"neighbour {number}", prompt, how, None, listener)
    try:
        assert neighbours[0].begun.wait(WAIT_SECONDS)
        yield neighbours
    finally:
        for neighbour in neighbours:
            neighbour.let_go()


def _check_works(system: Running, alone: list[list[int]]) -> None:
    stats = system.engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert [system.answer(*one).token_ids for one in NEIGHBOURS] == alone
    assert system.engine.healthy
    assert system.fatal_calls == []


@pytest.mark.parametrize(("engine", "stage"), CASES, indirect=["engine"])
def test_a_sequence_that_fails_at_a_stage_ends_alone(
    stage: Callable[[Seam], None], engine: str, alone: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    seam = Seam(monkeypatch, llama(engine))
    with started(engine, seam.model) as system:
        # Sound before, so that it is the fault that ends it; no block of this is found later.
        sound = _submit_marked(system, Ask(prompt=replace(PROMPT, salt=b"before")))
        assert sound.wait().finished.reason == "length"
        stage(seam)
        with _beside_neighbours(system) as neighbours:
            marked = _submit_marked(system, seam.ask)
        assert marked.wait().end == Failed("INTERNAL")
        assert [one.wait().token_ids for one in neighbours] == alone
        assert all(marked.ended_at < one.ended_at for one in neighbours)
        assert seam.ask.raised
        assert marked.ends == {}
        if seam.ask.choices == 1:
            assert len(marked.deltas) == seam.ask.tokens
        _check_works(system, alone)
        # With nobody beside it to prove the model sound, too.
        assert _submit_marked(system, seam.ask).wait().end == Failed("INTERNAL")
        _check_works(system, alone)


def test_a_sequence_that_fails_as_it_is_computed_again_ends_alone(
    engine: str, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seam = Seam(monkeypatch, llama(engine))

    def again(_: Any, step: Any, sequences: Any) -> bool:
        own = [chunk for chunk in step.chunks if sequences[chunk.key].token_ids[0] == ODD_TOKEN]
        return any(one.start == 0 and one.end > len(PROMPT.token_ids) for one in own)

    seam.fault(Runner, "run", again)
    seam.ask.sampling = replace(DRAWN, max_tokens=40)
    # 17 blocks of 512 bytes a token hold the three prompts, but not the answers too.
    settings = EngineSettings(kv_bytes=17 * 16 * 512, prefix_cache=False)
    with started(engine, seam.model, settings) as system:
        with _beside_neighbours(system) as neighbours:
            marked = _submit_marked(system, seam.ask)
        assert marked.wait().end == Failed("INTERNAL")
        assert system.engine.stats().preempted_total == 1
        assert 0 < len(marked.deltas) < 40
        assert [one.wait().token_ids for one in neighbours] == alone
        _check_works(system, alone)


class Deaf(Listener):
    """Raises over the events of one kind."""

    def __init__(self, kind: type[Event], error: type[BaseException] = Fault) -> None:
        super().__init__()
        self._kind = kind
        self._error = error

    def __call__(self, event: Event) -> None:
        if isinstance(event, self._kind):
            raise self._error
        super().__call__(event)


@pytest.mark.parametrize("error", [Fault, Panic])
@pytest.mark.parametrize("kind", [Delta, Finished])
def test_an_answer_that_cannot_be_delivered_ends_alone_and_says_so(
    kind: type[Event], error: type[BaseException], engine: str, alone: list[list[int]]
) -> None:
    with started(engine, llama(engine)) as system:
        deaf = Deaf(kind, error)
        with _beside_neighbours(system) as neighbours:
            system.engine.submit(MARK, PROMPT, DRAWN, None, deaf)
        assert deaf.wait().end == Failed("INTERNAL")
        assert [one.wait().token_ids for one in neighbours] == alone
        _check_works(system, alone)


def test_a_cancelled_answer_whose_listener_fails_ends_alone(
    engine: str, alone: list[list[int]]
) -> None:
    with started(engine, llama(engine)) as system:
        deaf = Deaf(Failed)
        with _beside_neighbours(system) as neighbours:
            ticket = system.engine.submit(MARK, PROMPT, DRAWN, None, deaf)
            system.engine.cancel(ticket)
        assert [one.wait().token_ids for one in neighbours] == alone
        assert system.engine.stats().cancelled_total == 1
        assert deaf.deltas == []
        _check_works(system, alone)


@pytest.mark.parametrize("choice", [0, 2])
def test_a_request_that_fails_as_it_is_submitted_is_nobody_elses_and_holds_nothing(
    choice: int, engine: str, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seam = Seam(monkeypatch, llama(engine))
    seam.fault(
        Sequence, "__init__", lambda _, request, own, __: _of_request(request) and own == choice
    )
    seam.ask.choices = 3
    with started(engine, seam.model) as system:
        with _beside_neighbours(system) as neighbours, pytest.raises(Fault):
            _submit_marked(system, seam.ask)
        assert [one.wait().token_ids for one in neighbours] == alone
        _check_works(system, alone)


async def test_the_wire_tells_that_an_answer_failed_and_nothing_of_why(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seam = Seam(monkeypatch, None)
    seam.fault(Sequence, "_read", lambda one, _: one._sampling.seed == SEED and one.generated == 3)
    client: AsyncClient
    async with serve() as (service, client):
        with pytest.raises(ChiasmError) as caught:
            await client.generate([user("Hi")], Sampling(seed=SEED, max_tokens=9, ignore_eos=True))
        assert seam.ask.raised == 1
        assert caught.value.reason is Reason.INTERNAL
        assert SECRET not in repr(caught.value) + caught.value.message
        assert (await client.generate([user("Hi")], Sampling(seed=1, max_tokens=4))).token_ids
        assert not service.broken.is_set()


def _planning(seam: Seam) -> None:
    seam.fault(Scheduler, "plan", lambda *_: True)


def _planning_panics(seam: Seam) -> None:
    seam.fault(Scheduler, "plan", lambda *_: True, Panic)


def _committing(seam: Seam) -> None:
    seam.fault(Scheduler, "commit", lambda *_: True)


def _freeing(seam: Seam) -> None:
    seam.fault(Scheduler, "remove", lambda *_, **__: True)


def _every_step(seam: Seam) -> None:
    seam.fault(Runner, "run", lambda *_: True)


def _weights(seam: Seam) -> None:
    seam.ask.raised = 1
    with torch.no_grad():
        seam.model.model.embed_tokens.weight.fill_(float("nan"))


def _telling_the_log(seam: Seam) -> None:
    _every_step(seam)
    seam.fault(engine_module, "logger", lambda: True)


@pytest.mark.parametrize(
    "breaks",
    [
        _planning, _planning_panics, _committing, _freeing, _every_step, _weights,
        _telling_the_log,
    ],
    ids=lambda breaks: breaks.__name__.strip("_"),
)  # fmt: skip
def test_what_is_no_sequences_own_fault_ends_all_and_calls_for_help_once(
    breaks: Callable[[Seam], None], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seam = Seam(monkeypatch, llama(engine))
    settings = EngineSettings(kv_bytes=4 << 20, max_running=2)
    with started(engine, seam.model, settings) as system:
        with _beside_neighbours(system) as neighbours:
            # One waits for a place.
            waits = _submit_marked(system, seam.ask)
            breaks(seam)
        for one in (*neighbours, waits):
            assert one.wait().end == Failed("INTERNAL")
        system.engine._thread.join(WAIT_SECONDS)
        assert seam.ask.raised
        assert not system.engine.healthy
        assert len(system.fatal_calls) == 1
        with pytest.raises(EngineStopped):
            _submit_marked(system, seam.ask)


def test_a_failure_that_the_log_does_not_take_ends_its_sequence_alone(
    engine: str, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seam = Seam(monkeypatch, llama(engine))
    text(seam)
    seam.fault(engine_module, "logger", lambda: True)
    with started(engine, seam.model) as system:
        with _beside_neighbours(system) as neighbours:
            marked = _submit_marked(system, seam.ask)
        assert marked.wait().end == Failed("INTERNAL")
        assert [one.wait().token_ids for one in neighbours] == alone
        _check_works(system, alone)
