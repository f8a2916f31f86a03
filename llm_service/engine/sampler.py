"""Picks the next token of every row, each under its own settings.

A row draws one number from its own generator and finds it in the cumulative distribution laid out
in the order of the vocabulary, so what it picks depends neither on its batch mates nor on how
nearly equal tokens happen to be ranked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llm_service.engine.values import SamplingParams

# Below this a temperature would only overflow; the likeliest token has all the mass anyway.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, eq=False)
class Draw:
    """How one row is drawn.

    Attributes:
        generator: on the CPU, owned by the row's sequence.
        forbidden: tokens that may not come now.
    """

    sampling: SamplingParams
    generator: torch.Generator
    forbidden: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < _GREEDY_BELOW


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id a row of `logits`, finite float32 `[rows, vocab_size]`."""
    logits = _without_forbidden(logits, draws)
    chosen: list[int] = logits.argmax(-1).tolist()
    drawn = [row for row, draw in enumerate(draws) if not draw.greedy]
    if drawn:
        picks = _draw(logits[drawn], [draws[row] for row in drawn])
        for row, pick in zip(drawn, picks, strict=True):
            chosen[row] = pick
    return chosen


def _without_forbidden(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    rows = [row for row, draw in enumerate(draws) for _ in draw.forbidden]
    if not rows:
        return logits
    tokens = [token for draw in draws for token in draw.forbidden]
    masked = logits.clone()
    masked[rows, tokens] = float("-inf")
    return masked


def _draw(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    temperatures = _column([draw.sampling.temperature for draw in draws], logits)
    weights = torch.softmax(logits / temperatures, -1)
    if any(_filters(draw.sampling) for draw in draws):
        weights = weights * _kept(weights, draws)
    # Double precision: a float32 sum over a large vocabulary drifts by more than small tails weigh.
    cumulative = weights.double().cumsum(-1)
    dice = [torch.rand(1, generator=draw.generator, dtype=torch.float64) for draw in draws]
    aims = torch.stack(dice).to(logits.device) * cumulative[:, -1:]
    # The first token whose cumulative weight exceeds the aim, so never one of no weight.
    picks: list[int] = torch.searchsorted(cumulative, aims, right=True).squeeze(1).tolist()
    return picks


def _filters(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _kept(weights: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Which tokens top_k, then top_p over what is left, then min_p keep: bool, as `weights`."""
    settings = [draw.sampling for draw in draws]
    ranked, order = weights.sort(stable=True, dim=-1, descending=True)
    width = weights.shape[-1]
    top_k = _column([params.top_k or width for params in settings], weights)
    kept = torch.arange(width, device=weights.device)[None] < top_k
    ranked = ranked * kept
    mass = ranked.cumsum(-1)
    top_p = _column([params.top_p for params in settings], weights)
    # A token is kept while the mass before it is short of top_p. At 1 all are, whatever the
    # rounding of the sum.
    kept &= (mass - ranked < top_p * mass[:, -1:]) | (top_p >= 1)
    min_p = _column([params.min_p for params in settings], weights)
    kept &= ranked >= min_p * ranked[:, :1]
    return torch.zeros_like(kept).scatter(-1, order, kept)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
