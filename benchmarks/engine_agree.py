"""How often a greedy answer beside others differs from the same answer alone.

Sums in another order round otherwise, so where two tokens are nearly equally likely the likeliest
may change with what shares the step. The native layers sum each row in one order, whatever is
beside it; a library's matrix products choose theirs by the size of the batch. This counts it: the
same prompts one by one, then all at once, through scheduler and runner as the engine has them.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from chiasm import torch_tensors
from chiasm.models.language import LanguageHalf
from llm_service.app import decoder_parts
from llm_service.engine.block_pool import BlockPool
from llm_service.engine.runner import Runner
from llm_service.engine.scheduler import Scheduler
from llm_service.engine.values import ImageSpan
from llm_service.settings import DTypeName, LlmSettings

_LAYERS = {"native": True, "transformers": False}
# Past the special tokens and the single bytes of most vocabularies.
_FIRST_ID = 300


@dataclass(frozen=True)
class Agreement:
    """Answers of `tokens` in all, by one kind of layers.

    Attributes:
        alike: tokens before the first that differs in its answer.
        places: of each answer that differs, its first token that does.
    """

    layers: str
    answers: int
    tokens: int
    alike: int
    places: tuple[int, ...]

    @property
    def share(self) -> float:
        """Of answers that differ."""
        return len(self.places) / self.answers


@dataclass
class _Sequence:
    token_ids: list[int]
    images: tuple[ImageSpan, ...] = ()
    positions: torch.Tensor | None = None
    position_delta: int = 0
    prompt_tokens: int = 0


def agreements(
    model: Path, dtype: DTypeName, threads: int, count: int, context: int, new_tokens: int
) -> Iterator[Agreement]:
    """What each kind of layers does, where this machine and this model have it."""
    torch.set_num_threads(threads)
    settings = LlmSettings(model=model, dtype=dtype, torch_threads=threads, vision="none")
    half = LanguageHalf.load(
        model, model_id=settings.served_name, dtype=torch_tensors.dtype_of(dtype)
    )
    size = settings.engine.block_size
    blocks = count * -(-(context + new_tokens) // size) + 1
    for layers, native in _LAYERS.items():
        runner = Runner(decoder_parts(settings, half), blocks, size, native=native)
        if runner.native is native:
            own = _Answers(runner, blocks, settings)
            yield own.compared(layers, _prompts(count, context, half.vocab_size), new_tokens)


def _prompts(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Prompts of even lengths from half of `longest` up, so that rows of steps differ too."""
    stream = random.Random(count)
    lengths = [longest // 2 + longest * place // (2 * count) for place in range(1, count + 1)]
    return [[stream.randrange(_FIRST_ID, vocabulary) for _ in range(one)] for one in lengths]


class _Answers:
    def __init__(self, runner: Runner, blocks: int, settings: LlmSettings) -> None:
        self._runner = runner
        self._blocks = blocks
        self._settings = settings.engine

    def compared(self, layers: str, prompts: Sequence[list[int]], new_tokens: int) -> Agreement:
        alone = [self._of([prompt], new_tokens)[0] for prompt in prompts]
        beside = self._of(prompts, new_tokens)
        found = [first_difference(*pair) for pair in zip(alone, beside, strict=True)]
        places = tuple(place for place in found if place is not None)
        alike = sum(new_tokens if place is None else place - 1 for place in found)
        return Agreement(layers, len(prompts), len(prompts) * new_tokens, alike, places)

    def _of(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy answers, past any end-of-sequence token."""
        pool = BlockPool(self._blocks, self._settings.block_size)
        budget, most = self._settings.step_token_budget, self._settings.max_running
        scheduler = Scheduler(pool, budget, most)
        sequences = {key: _Sequence([*prompt]) for key, prompt in enumerate(prompts)}
        for key, prompt in enumerate(prompts):
            scheduler.add(key, len(prompt), len(prompt) + new_tokens)
        while (step := scheduler.plan()).chunks:
            predicted = self._runner.run(step, sequences)
            scheduler.commit(step)
            for key, token in zip(predicted.keys, predicted.best, strict=True):
                sequences[key].token_ids.append(token)
                if len(sequences[key].token_ids) == len(prompts[key]) + new_tokens:
                    scheduler.remove(key)
        return [one.token_ids[-new_tokens:] for one in sequences.values()]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The place, from 1, of the first token in which two answers of one length differ."""
    pairs = enumerate(zip(one, other, strict=True), start=1)
    return next((place for place, (mine, theirs) in pairs if mine != theirs), None)
