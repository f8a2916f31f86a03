"""How the next token is drawn."""

from typing import Any

import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from llm_service.engine.sampler import Draw, sample
from llm_service.engine.values import SamplingParams

WIDTH = 24
DRAWS = 3000


def _logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)) * 2


def _warped(logits: torch.Tensor, *warpers: Any) -> torch.Tensor:
    for warper in warpers:
        logits = warper(None, logits)
    return logits


def _draw(sampling: SamplingParams, seed: int = 0, forbidden: tuple[int, ...] = ()) -> Draw:
    return Draw(sampling, torch.Generator().manual_seed(seed), forbidden)


def _frequencies(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    draws = [_draw(sampling, seed) for seed in range(DRAWS)]
    tokens = torch.tensor(sample(logits.expand(DRAWS, -1), draws))
    return torch.bincount(tokens, minlength=WIDTH) / DRAWS


def _assert_drawn_from(frequencies: torch.Tensor, warped: torch.Tensor) -> None:
    expected = torch.softmax(warped[0], -1)
    assert not frequencies[expected == 0].any()
    # Four standard deviations of a frequency of one half.
    assert (frequencies - expected).abs().max() < 4 * 0.5 / DRAWS**0.5


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = _logits(1, rows=5)
    draws = [_draw(SamplingParams(temperature=0))] * 5
    assert sample(logits, draws) == logits.argmax(-1).tolist()


def test_a_tiny_temperature_takes_the_likeliest() -> None:
    logits = _logits(1)
    assert sample(logits, [_draw(SamplingParams(temperature=1e-40))]) == [int(logits.argmax())]


def test_temperature_divides_the_logits() -> None:
    frequencies = _frequencies(_logits(2), SamplingParams(temperature=0.7))
    _assert_drawn_from(frequencies, _logits(2) / 0.7)


def test_top_k_keeps_what_transformers_keeps() -> None:
    warped = _warped(_logits(3), TopKLogitsWarper(5))
    _assert_drawn_from(_frequencies(_logits(3), SamplingParams(top_k=5)), warped)


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    _assert_drawn_from(_frequencies(_logits(3), SamplingParams(top_k=10**6)), _logits(3))


def test_top_p_keeps_what_transformers_keeps() -> None:
    warped = _warped(_logits(4), TopPLogitsWarper(0.8))
    _assert_drawn_from(_frequencies(_logits(4), SamplingParams(top_p=0.8)), warped)


def test_min_p_keeps_what_transformers_keeps() -> None:
    warped = _warped(_logits(5), MinPLogitsWarper(0.2))
    _assert_drawn_from(_frequencies(_logits(5), SamplingParams(min_p=0.2)), warped)


def test_filters_apply_in_the_order_of_transformers() -> None:
    warpers = (TopKLogitsWarper(6), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1))
    warped = _warped(_logits(6) / 1.5, *warpers)
    sampling = SamplingParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.1)
    _assert_drawn_from(_frequencies(_logits(6), sampling), warped)


def test_the_tiniest_top_p_still_leaves_the_likeliest() -> None:
    logits = torch.zeros(1, WIDTH)
    assert len({*sample(logits, [_draw(SamplingParams(top_p=1e-30))])}) == 1


def test_a_row_is_drawn_alike_whoever_is_in_the_batch() -> None:
    logits = _logits(7, rows=4)
    mixed = [
        SamplingParams(temperature=0.9, top_k=4),
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.6),
        SamplingParams(temperature=1.3, min_p=0.05),
    ]
    together = sample(logits, [_draw(sampling, seed) for seed, sampling in enumerate(mixed)])
    alone = [
        sample(logits[seed : seed + 1], [_draw(sampling, seed)])[0]
        for seed, sampling in enumerate(mixed)
    ]
    assert together == alone


def test_a_forbidden_token_never_comes() -> None:
    logits = _logits(8)
    best = int(logits.argmax())
    assert sample(logits, [_draw(SamplingParams(temperature=0), forbidden=(best,))]) != [best]
    draws = [_draw(SamplingParams(temperature=3), seed, (best,)) for seed in range(200)]
    assert best not in sample(logits.expand(200, -1), draws)
