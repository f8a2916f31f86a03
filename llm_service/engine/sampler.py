"""Picks the next token of every row, each under its own settings.

A row's dice point into the cumulative distribution laid out in the order of the vocabulary, so what
it picks depends neither on its batch mates nor on how nearly equal tokens happen to be ranked.

What changes the logits comes in vLLM's order (`vllm/v1/sample/sampler.py`): the constraint's mask,
least number of tokens, biases, penalties, temperature, min_p, top_k, top_p. Log-probabilities are
of the logits before any of it, as vLLM's default `raw_logprobs` are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llm_service.engine.penalties import Bias, Seen, add_biases, penalise
from llm_service.engine.values import SamplingParams

# Below this a temperature would only overflow; the likeliest token has all the mass anyway.
_GREEDY_BELOW = 1e-5
# Upper halves of the bits of float32 numbers from 0 to 1.
_BINS = 0x3F81
# Weights that are summed as one while the drawn token is looked for.
_STRETCH = 128


@dataclass(frozen=True, eq=False)
class Draw:
    """How one row is drawn.

    Attributes:
        dice: where in the distribution, from 0 to below 1.
        forbidden: tokens that may not come now, unless nothing else is allowed.
        allowed: tokens that may come, bool `[vocab_size]`; None: all.
        bias: added to logits.
        seen: what penalties apply to.
    """

    sampling: SamplingParams
    dice: float = 0.0
    forbidden: tuple[int, ...] = ()
    allowed: torch.Tensor | None = None
    bias: Bias | None = None
    seen: Seen | None = None

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < _GREEDY_BELOW

    @property
    def changes_logits(self) -> bool:
        changes = (self.allowed, self.bias, self.seen)
        return bool(self.forbidden) or any(change is not None for change in changes)


@dataclass(frozen=True)
class Sampled:
    """A token, and what the model's own distribution says of it where the row asked.

    Attributes:
        logprob: natural logarithm of its probability; None if not asked for.
        top: the likeliest tokens, likeliest first, each with its own.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Sequence[Draw], best: Sequence[int]) -> list[Sampled]:
    """One token a row.

    Args:
        logits: finite float32 `[rows, vocab_size]`; may be overwritten.
        best: the likeliest token of each row.
    """
    telling = [row for row, draw in enumerate(draws) if draw.sampling.top_logprobs is not None]
    raw = logits[telling]
    _adjust(logits, draws)
    chosen = _chosen(logits, draws, best)
    sampled = [Sampled(token_id) for token_id in chosen]
    if telling:
        told = _told(raw, [chosen[row] for row in telling], [draws[row] for row in telling])
        for row, one in zip(telling, told, strict=True):
            sampled[row] = one
    return sampled


def _chosen(logits: torch.Tensor, draws: Sequence[Draw], best: Sequence[int]) -> list[int]:
    chosen = [*best]
    changed = [row for row, draw in enumerate(draws) if draw.greedy and draw.changes_logits]
    if changed:
        for row, likeliest in zip(changed, logits[changed].argmax(-1).tolist(), strict=True):
            chosen[row] = likeliest
    drawn = [row for row, draw in enumerate(draws) if not draw.greedy]
    if drawn:
        picks = _draw(_rows(logits, drawn), [draws[row] for row in drawn])
        for row, pick in zip(drawn, picks, strict=True):
            chosen[row] = pick
    return chosen


def _told(raw: torch.Tensor, chosen: Sequence[int], draws: Sequence[Draw]) -> list[Sampled]:
    totals = raw.logsumexp(-1, keepdim=True)
    places = torch.tensor(chosen, device=raw.device)[:, None]
    logprobs: list[float] = (raw.gather(-1, places) - totals).squeeze(1).tolist()
    counts = [draw.sampling.top_logprobs or 0 for draw in draws]
    top = raw.topk(min(max(counts), raw.shape[-1]), -1)
    top_ids, top_logprobs = top.indices.tolist(), (top.values - totals).tolist()
    return [
        Sampled(token_id, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        for token_id, logprob, count, ids, values in zip(
            chosen, logprobs, counts, top_ids, top_logprobs, strict=True
        )
    ]


def _adjust(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Masks, biases and penalties, in place and only in the rows that have some."""
    constrained = [row for row, draw in enumerate(draws) if draw.allowed is not None]
    if constrained:
        allowed = torch.stack([_allowed(draws[row]) for row in constrained]).to(logits.device)
        logits[constrained] = logits[constrained].masked_fill_(~allowed, float("-inf"))
    _forbid(logits, draws)
    biases = [(row, draw.bias) for row, draw in enumerate(draws) if draw.bias is not None]
    if biases:
        add_biases(logits, biases)
    penalised = [
        (row, draw.sampling, draw.seen) for row, draw in enumerate(draws) if draw.seen is not None
    ]
    if penalised:
        penalise(logits, penalised)


def _allowed(draw: Draw) -> torch.Tensor:
    """What the constraint allows, less what is forbidden if that leaves anything."""
    assert draw.allowed is not None
    if not draw.forbidden:
        return draw.allowed
    left = draw.allowed.clone()
    left[list(draw.forbidden)] = False
    return left if left.any() else draw.allowed


def _forbid(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    vocabulary = logits.shape[-1]
    free = [
        (row, draw)
        for row, draw in enumerate(draws)
        if draw.allowed is None and _leaves_something(draw.forbidden, vocabulary)
    ]
    rows = [row for row, draw in free for _ in draw.forbidden]
    if rows:
        logits[rows, [token for _, draw in free for token in draw.forbidden]] = float("-inf")


def _leaves_something(forbidden: Sequence[int], vocabulary: int) -> bool:
    return len(forbidden) < vocabulary or len(set(forbidden)) < vocabulary


def _draw(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    temperatures = _column([draw.sampling.temperature for draw in draws], logits)
    weights = torch.softmax(logits / temperatures, -1)
    for keep in (_keep_min_p, _keep_top_k, _keep_top_p):
        weights = keep(weights, [draw.sampling for draw in draws])
    return _find(weights, [draw.dice for draw in draws])


def _keep_min_p(weights: torch.Tensor, settings: Sequence[SamplingParams]) -> torch.Tensor:
    """Drops what is less likely than a share of the likeliest. Here and below: to weight 0."""
    if not any(one.min_p for one in settings):
        return weights
    least = weights.amax(-1, keepdim=True) * _column([one.min_p for one in settings], weights)
    return weights.masked_fill_(weights < least, 0)


def _keep_top_k(weights: torch.Tensor, settings: Sequence[SamplingParams]) -> torch.Tensor:
    rows = [row for row, one in enumerate(settings) if 0 < one.top_k < weights.shape[-1]]
    if not rows:
        return weights
    limits = [float(settings[row].top_k) for row in rows]
    part = _rows(weights, rows)
    return _with_rows(weights, rows, _keep_until(part, torch.ones_like(part), limits))


def _keep_top_p(weights: torch.Tensor, settings: Sequence[SamplingParams]) -> torch.Tensor:
    rows = [row for row, one in enumerate(settings) if one.top_p < 1]
    if not rows:
        return weights
    part = _rows(weights, rows)
    totals: list[float] = part.sum(-1).tolist()
    limits = [settings[row].top_p * total for row, total in zip(rows, totals, strict=True)]
    return _with_rows(weights, rows, _keep_until(part, part, limits))


def _keep_until(
    weights: torch.Tensor, amounts: torch.Tensor, limits: Sequence[float]
) -> torch.Tensor:
    """Keeps each row's likeliest tokens while the amounts of likelier ones are below its limit.

    Nothing is sorted but the tokens near the cut. Weights from 0 to 1 are in the order of their
    bits, so the upper half of the bits says which bin a token is in, and sums over bins say in
    which bin the limit falls. Of equal tokens the lower id counts as likelier.
    """
    bins = (weights.view(torch.int32) >> 16).long()
    sums = amounts.new_zeros(len(weights), _BINS).scatter_add_(1, bins, amounts).double()
    above = sums.flip(-1).cumsum(-1).flip(-1) - sums
    limit = torch.tensor(limits, dtype=torch.float64, device=weights.device)[:, None]
    # What is above shrinks with the bin: the lowest bin at which it is short of the limit.
    cut = (above >= limit).sum(-1)
    dropped = bins < cut[:, None]
    for row, (edge, most) in enumerate(zip(cut.tolist(), limits, strict=True)):
        near = (bins[row] == edge).nonzero().squeeze(1)
        order = near[weights[row, near].sort(stable=True, descending=True).indices]
        own = amounts[row, order].double()
        before = above[row, edge] + own.cumsum(0) - own
        dropped[row, order[before >= most]] = True
    return weights.masked_fill(dropped, 0)


def _rows(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows, without a copy if they are all."""
    return tensor if len(rows) == len(tensor) else tensor[rows]


def _with_rows(tensor: torch.Tensor, rows: list[int], changed: torch.Tensor) -> torch.Tensor:
    if len(rows) == len(tensor):
        return changed
    tensor[rows] = changed
    return tensor


def _find(weights: torch.Tensor, dice: Sequence[float]) -> list[int]:
    """The token of each row at which the cumulative weight exceeds its dice's share of the sum.

    First the stretch of tokens, then the token in it: double precision, without which small tails
    of a large vocabulary vanish, is then needed for few sums only. Never one of no weight.
    """
    rows, width = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -width % _STRETCH)).view(rows, -1, _STRETCH)
    sums = padded.sum(-1).double()
    shares = torch.tensor(dice, dtype=torch.float64, device=weights.device)[:, None]
    stretch, rest = _aimed(sums, shares)
    inner = padded[torch.arange(rows, device=weights.device), stretch.squeeze(1)].double()
    token, _ = _aimed(inner, rest)
    picks: list[int] = (stretch * _STRETCH + token).squeeze(1).tolist()
    return picks


def _aimed(weights: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The place of each row where its share of the sum falls, and the share of that place."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # Below the sum even where the product rounds up to it.
    aims = torch.minimum(shares * total, torch.nextafter(total, torch.zeros_like(total)))
    places = torch.searchsorted(cumulative, aims, right=True)
    weight = weights.gather(-1, places)
    rest = (aims - (cumulative.gather(-1, places) - weight)) / weight
    return places, rest.clamp(0, 1)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
