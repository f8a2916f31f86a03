"""Small decoders, a tokenizer of bytes, and a listener, for the engine's tests."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llm_service.engine.block_pool import BlockPool
from llm_service.engine.engine import EmbeddedEngine
from llm_service.engine.runner import Runner
from llm_service.engine.scheduler import Scheduler
from llm_service.engine.stateful import StatefulRunner
from llm_service.engine.values import (
    Constraint,
    DecoderParts,
    Delta,
    EngineSettings,
    Event,
    Failed,
    Finished,
    ImageSpan,
    Prompt,
    SamplingParams,
    Ticket,
    TokenDecoder,
)

EOS = 2
FIRST_BYTE = 4
VOCABULARY = FIRST_BYTE + 256
WIDTH = 64
CONTEXT = 512
WAIT_SECONDS = 30.0


def tokenizer() -> TokenDecoder:
    """One token a byte, and four special tokens before them."""
    specials = ["<pad>", "<s>", "</s>", "<image>"]
    vocabulary = {name: number for number, name in enumerate([*specials, *_byte_symbols()])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True) for name in specials])
    fast: Any = PreTrainedTokenizerFast
    decoder: TokenDecoder = fast(tokenizer_object=core, eos_token="</s>", pad_token="<pad>")
    return decoder


def _byte_symbols() -> list[str]:
    """GPT-2's table: printable bytes stand for themselves, the others for 256 and up."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(moved)) for byte in range(256)]


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(FIRST_BYTE + byte for byte in text.encode())


def random_llama(seed: int = 0) -> Any:
    """Random weights, large enough that logits differ; equal seeds give equal weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=CONTEXT,
            initializer_range=0.1,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        model: Any = LlamaForCausalLM(config)
        return model.eval()


def chain(text: str) -> Any:
    """A stock Llama that says `text` after any other token, then ends; no byte may repeat.

    Its layer adds nothing, so each token is predicted from the one before alone.
    """
    said = ids_of(text)
    assert len(set(said)) == len(said)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=VOCABULARY,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model: Any = LlamaForCausalLM(config)
    model.eval()
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCABULARY))
        model.lm_head.weight.zero_()
        successors = dict.fromkeys(range(VOCABULARY), said[0])
        successors |= dict(zip(said, [*said[1:], EOS], strict=True))
        for token, successor in successors.items():
            model.lm_head.weight[successor, token] = 1.0
    return model


def parts(model: Any, context_length: int = CONTEXT) -> DecoderParts:
    config = model.config
    return DecoderParts(
        model=model.get_decoder(),
        embed_tokens=model.get_input_embeddings(),
        lm_head=model.get_output_embeddings(),
        layer_count=config.num_hidden_layers,
        kv_head_count=config.num_key_value_heads,
        head_dim=config.head_dim,
        eos_ids=(EOS,),
        context_length=context_length,
        dtype=model.dtype,
        device="cpu",
    )


def random_prompt(seed: int, length: int) -> Prompt:
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_BYTE, VOCABULARY, (length,), generator=numbers)
    return Prompt(tuple(ids.tolist()))


def random_rows(seed: int, length: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(length, width, generator=torch.Generator().manual_seed(seed)) * 0.2


def with_image(prompt: Prompt, start: int, rows: torch.Tensor) -> Prompt:
    return Prompt(prompt.token_ids, (*prompt.images, ImageSpan(start, len(rows), rows)))


def generated(model: Any, prompt: Prompt, count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of transformers' own `generate` on a whole model, and their logits."""
    rows = model.get_input_embeddings()(torch.tensor(prompt.token_ids)).detach().clone()
    for image in prompt.images:
        rows[image.start : image.start + image.length] = image.rows
    answer = model.generate(
        inputs_embeds=rows[None],
        attention_mask=torch.ones(1, len(rows), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return answer.sequences[0].tolist(), torch.cat(answer.logits)


@dataclass
class Greedy:
    """One sequence of `play`."""

    token_ids: list[int]
    images: tuple[ImageSpan, ...]
    positions: torch.Tensor | None = None
    position_delta: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.token_ids)


@dataclass(frozen=True)
class Played:
    tokens: list[list[int]]
    logits: list[torch.Tensor]
    preempted: int


def play(
    model: Any,
    prompts: Sequence[Prompt],
    count: int,
    *,
    budget: int = CONTEXT,
    blocks: int = 400,
    block_size: int = 16,
) -> Played:
    """`play_parts` of a whole model."""
    return play_parts(
        parts(model), prompts, count, budget=budget, blocks=blocks, block_size=block_size
    )


def play_parts(
    decoder: DecoderParts,
    prompts: Sequence[Prompt],
    count: int,
    *,
    budget: int = CONTEXT,
    blocks: int = 400,
    block_size: int = 16,
) -> Played:
    """Greedy answers of `count` tokens by scheduler and runner, without the engine's thread.

    The end-of-sequence token, being forbidden in `generated` too, is never chosen.
    """
    whole = decoder.stateful is not None
    runner = StatefulRunner(decoder) if whole else Runner(decoder, blocks, block_size)
    scheduler = Scheduler(BlockPool(blocks, block_size), budget, 64, whole_prompts=whole)
    sequences = {
        key: Greedy([*one.token_ids], one.images, one.positions, one.position_delta)
        for key, one in enumerate(prompts)
    }
    for key, prompt in enumerate(prompts):
        scheduler.add(key, len(prompt.token_ids), len(prompt.token_ids) + count)
    while (step := scheduler.plan()).chunks:
        runner.retain(scheduler.running_keys)
        predictions = runner.run(step, sequences)
        scheduler.commit(step)
        for key, row in zip(predictions.keys, predictions.logits, strict=True):
            sequence = sequences[key]
            sequence.logits.append(row.clone())
            allowed = row.index_fill(0, torch.tensor([EOS]), float("-inf"))
            sequence.token_ids.append(int(allowed.argmax()))
            if len(sequence.logits) == count:
                scheduler.remove(key)
    tokens = [sequence.token_ids[-count:] for sequence in sequences.values()]
    logits = [torch.stack(sequence.logits) for sequence in sequences.values()]
    return Played(tokens, logits, scheduler.preempted_total)


class Listener:
    """Gathers the events of one request.

    `pace` is seconds it takes over each delta, so that a request surely still runs when a test
    gets to the next line.
    """

    def __init__(self, pace: float = 0.0, choices: int = 1) -> None:
        self._pace = pace
        self._choices = choices
        self.deltas: list[Delta] = []
        self.ends: dict[int, Finished] = {}
        self.end: Finished | Failed | None = None  # of the choice that ended last
        self.ended_at = float("inf")
        self.begun = threading.Event()
        self._ended = threading.Event()

    def __call__(self, event: Event) -> None:
        assert self.end is None, "an event came after the end"
        if isinstance(event, Delta):
            assert event.choice not in self.ends, "a token came after its choice's end"
            self.deltas.append(event)
            self.begun.set()
            time.sleep(self._pace)
            return
        if isinstance(event, Finished):
            assert event.choice not in self.ends, "a choice ended twice"
            self.ends[event.choice] = event
        if isinstance(event, Failed) or len(self.ends) == self._choices:
            self.end = event
            self.ended_at = time.monotonic()
            self._ended.set()

    def wait(self) -> "Listener":
        assert self._ended.wait(WAIT_SECONDS), "the request never ended"
        return self

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    def tokens_of(self, choice: int) -> list[int]:
        deltas = [delta for delta in self.deltas if delta.choice == choice]
        return [token for delta in deltas for token in delta.token_ids]

    @property
    def finished(self) -> Finished:
        assert isinstance(self.end, Finished), self.end
        return self.end


@dataclass
class Running:
    """A started engine."""

    engine: EmbeddedEngine
    fatal_calls: list[None]

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        deadline: float | None = None,
        pace: float = 0.0,
        choices: int = 1,
        constraint: Constraint | None = None,
    ) -> tuple[Ticket, Listener]:
        listener = Listener(pace, choices)
        ticket = self.engine.submit(
            "request", prompt, sampling, deadline, listener, choices=choices, constraint=constraint
        )
        return ticket, listener

    def answer(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        choices: int = 1,
        constraint: Constraint | None = None,
    ) -> Listener:
        return self.submit(prompt, sampling, None, 0.0, choices, constraint)[1].wait()


@contextmanager
def running(
    model: Any, settings: EngineSettings | None = None, context_length: int = CONTEXT
) -> Iterator[Running]:
    with running_parts(parts(model, context_length), settings) as started:
        yield started


@contextmanager
def running_parts(
    decoder: DecoderParts, settings: EngineSettings | None = None
) -> Iterator[Running]:
    fatal_calls: list[None] = []
    engine = EmbeddedEngine(
        decoder,
        tokenizer(),
        settings or EngineSettings(kv_bytes=4 << 20),
        on_fatal=lambda: fatal_calls.append(None),
    )
    engine.start()
    try:
        yield Running(engine, fatal_calls)
    finally:
        engine.stop()


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)
