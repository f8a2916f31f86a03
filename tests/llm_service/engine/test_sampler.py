"""How the next token is drawn, and what is told of it."""

from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llm_service.engine.penalties import Seen, bias_of, seen_of
from llm_service.engine.sampler import Draw, Sampled, sample
from llm_service.engine.values import SamplingParams

WIDTH = 24
# More than the tokens that are ranked first, and no multiple of the stretches that are summed.
WIDE = 1000
DRAWS = 500


def _logits(seed: int, rows: int = 1, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 2


def _warped(logits: torch.Tensor, *warpers: Any) -> torch.Tensor:
    for warper in warpers:
        logits = warper(None, logits)
    return logits


def _draw(sampling: SamplingParams, dice: float = 0.0, **more: Any) -> Draw:
    return Draw(sampling, dice, **more)


def _sampled(logits: torch.Tensor, draws: list[Draw]) -> list[Sampled]:
    return sample(logits.clone(), draws, logits.argmax(-1).tolist())


def _tokens(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    return [sampled.token_id for sampled in _sampled(logits, draws)]


def _frequencies(logits: torch.Tensor, sampling: SamplingParams, **more: Any) -> torch.Tensor:
    draws = [_draw(sampling, number / DRAWS, **more) for number in range(DRAWS)]
    tokens = torch.tensor(_tokens(logits.expand(DRAWS, -1), draws))
    return torch.bincount(tokens, minlength=logits.shape[-1]) / DRAWS


def _assert_drawn_from(frequencies: torch.Tensor, warped: torch.Tensor) -> None:
    """Dice that are spread evenly hit each token as often as its probability says."""
    expected = torch.softmax(warped[0], -1)
    assert not frequencies[expected == 0].any()
    assert (frequencies - expected).abs().max() < 1.5 / DRAWS


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = _logits(1, rows=5)
    draws = [_draw(SamplingParams(temperature=0))] * 5
    assert _tokens(logits, draws) == logits.argmax(-1).tolist()


def test_a_tiny_temperature_takes_the_likeliest() -> None:
    logits = _logits(1)
    assert _tokens(logits, [_draw(SamplingParams(temperature=1e-40))]) == [int(logits.argmax())]


def test_temperature_divides_the_logits() -> None:
    frequencies = _frequencies(_logits(2), SamplingParams(temperature=0.7))
    _assert_drawn_from(frequencies, _logits(2) / 0.7)


@pytest.mark.parametrize("top_k", [5, 128, 129, 500, 999])
def test_top_k_keeps_what_transformers_keeps(top_k: int) -> None:
    logits = _logits(3, width=WIDE)
    warped = _warped(logits, TopKLogitsWarper(top_k))
    _assert_drawn_from(_frequencies(logits, SamplingParams(top_k=top_k)), warped)


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    _assert_drawn_from(_frequencies(_logits(3), SamplingParams(top_k=10**6)), _logits(3))


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.8, 0.999])
def test_top_p_keeps_what_transformers_keeps(top_p: float) -> None:
    logits = _logits(4, width=WIDE)
    warped = _warped(logits, TopPLogitsWarper(top_p))
    _assert_drawn_from(_frequencies(logits, SamplingParams(top_p=top_p)), warped)


def test_min_p_keeps_what_transformers_keeps() -> None:
    warped = _warped(_logits(5), MinPLogitsWarper(0.2))
    _assert_drawn_from(_frequencies(_logits(5), SamplingParams(min_p=0.2)), warped)


@pytest.mark.parametrize(("top_k", "top_p"), [(6, 0.9), (300, 0.9), (300, 0.3)])
def test_min_p_comes_before_top_k_and_that_before_top_p(top_k: int, top_p: float) -> None:
    logits = _logits(6, width=WIDE)
    warpers = (MinPLogitsWarper(0.01), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p))
    sampling = SamplingParams(temperature=1.5, top_k=top_k, top_p=top_p, min_p=0.01)
    _assert_drawn_from(_frequencies(logits, sampling), _warped(logits / 1.5, *warpers))


def test_the_tiniest_top_p_leaves_the_first_of_the_likeliest() -> None:
    logits = torch.zeros(1, WIDE)
    logits[0, [7, 900]] = 1
    assert set(_frequencies(logits, SamplingParams(top_p=1e-30)).nonzero()[:, 0].tolist()) == {7}


def test_of_equal_tokens_top_k_keeps_the_first() -> None:
    kept = _frequencies(torch.zeros(1, WIDE), SamplingParams(top_k=3)).nonzero()[:, 0]
    assert kept.tolist() == [0, 1, 2]


def test_a_row_is_drawn_alike_whoever_is_in_the_batch() -> None:
    logits = _logits(7, rows=6, width=WIDE)
    mixed = [
        _draw(SamplingParams(temperature=0.9, top_k=4), 0.3),
        _draw(SamplingParams(temperature=0)),
        _draw(SamplingParams(top_p=0.999), 0.99),
        _draw(SamplingParams(temperature=1.3, min_p=0.05), 0.5),
        _draw(SamplingParams(logit_bias=((3, 2.0),)), 0.7, forbidden=(5,)),
        _draw(SamplingParams(repetition_penalty=1.3, top_logprobs=3), 0.2, seen=Seen([1, 2])),
    ]
    together = _sampled(logits, mixed)
    alone = [_sampled(logits[i : i + 1], [draw])[0] for i, draw in enumerate(mixed)]
    assert together == alone


def test_the_greatest_dice_draw_a_token_that_has_weight() -> None:
    logits = _logits(7, width=WIDE)
    logits[0, 500:] = float("-inf")
    assert _tokens(logits, [_draw(SamplingParams(), 1 - 2**-53)]) == [499]


def test_a_forbidden_token_never_comes() -> None:
    logits = _logits(8)
    best = int(logits.argmax())
    assert _tokens(logits, [_draw(SamplingParams(temperature=0), forbidden=(best,))]) != [best]
    frequencies = _frequencies(logits, SamplingParams(temperature=3), forbidden=(best,))
    assert frequencies[best] == 0


def test_only_what_a_constraint_allows_comes() -> None:
    allowed = torch.zeros(WIDTH, dtype=torch.bool).index_fill(0, torch.tensor([2, 9, 17]), True)
    warped = _logits(9).masked_fill(~allowed, float("-inf"))
    _assert_drawn_from(_frequencies(_logits(9), SamplingParams(), allowed=allowed), warped)
    greedy = _draw(SamplingParams(temperature=0), allowed=allowed)
    assert _tokens(_logits(9), [greedy]) == [int(warped.argmax())]


def test_what_is_forbidden_comes_where_a_constraint_allows_nothing_else() -> None:
    allowed = torch.zeros(WIDTH, dtype=torch.bool).index_fill(0, torch.tensor([2, 9]), True)
    one = _draw(SamplingParams(), 0.9, allowed=allowed, forbidden=(2,))
    both = _draw(SamplingParams(), 0.0, allowed=allowed, forbidden=(2, 9))
    assert _tokens(_logits(9, rows=2), [one, both])[0] == 9
    assert _tokens(_logits(9, rows=2), [one, both])[1] in {2, 9}


def test_a_bias_is_added_to_the_logits() -> None:
    sampling = SamplingParams(logit_bias=((3, 4.0), (5, -100.0), (20, 0.5)))
    expected = _logits(10)
    expected[0, [3, 5, 20]] += torch.tensor([4.0, -100.0, 0.5])
    _assert_drawn_from(_frequencies(_logits(10), sampling, bias=bias_of(sampling)), expected)


def _counted(sampling: SamplingParams, prompt: list[int], answer: list[int]) -> Seen:
    seen = seen_of(sampling, prompt)
    assert seen is not None
    for token_id in answer:
        seen.add(token_id)
    return seen


def _repetition(penalty: float, ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    processor: Any = RepetitionPenaltyLogitsProcessor(penalty)
    penalised: torch.Tensor = processor(torch.tensor([ids]), logits)
    return penalised


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    sampling = SamplingParams(repetition_penalty=penalty)
    prompt, answer = [1, 4, 4, 9], [4, 11, 0, 11]
    expected = _repetition(penalty, prompt + answer, _logits(11))
    seen = _counted(sampling, prompt, answer)
    _assert_drawn_from(_frequencies(_logits(11), sampling, seen=seen), expected)


def test_frequency_and_presence_count_the_answer_alone() -> None:
    sampling = SamplingParams(frequency_penalty=0.4, presence_penalty=-1.2)
    expected = _logits(12)
    # The answer holds 5 four times and 6 once; 7 is of the prompt.
    expected[0, 5] -= 4 * 0.4 - 1.2
    expected[0, 6] -= 0.4 - 1.2
    seen = _counted(sampling, [7, 5], [5, 5, 6, 5, 5])
    _assert_drawn_from(_frequencies(_logits(12), sampling, seen=seen), expected)


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_repetition_penalty_comes_after_the_bias_and_before_the_others(
    temperature: float,
) -> None:
    sampling = SamplingParams(
        temperature=temperature,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias=((5, 3.0), (6, -3.0)),
    )
    expected = _logits(13)
    expected[0, [5, 6]] += torch.tensor([3.0, -3.0])
    expected = _repetition(1.5, [5, 6, 7], expected)
    expected[0, [5, 6]] -= torch.tensor([2 * 0.5 + 0.25, 0.5 + 0.25])
    seen, bias = _counted(sampling, [7], [5, 6, 5]), bias_of(sampling)
    if temperature:
        frequencies = _frequencies(_logits(13), sampling, seen=seen, bias=bias)
        _assert_drawn_from(frequencies, expected)
    else:
        draw = _draw(sampling, seen=seen, bias=bias)
        assert _tokens(_logits(13), [draw]) == [int(expected.argmax())]


def test_what_a_text_holds_is_counted_beyond_the_room_that_was_first_made() -> None:
    seen = Seen(range(10))
    for token_id in [*range(5, 500), *range(100)]:
        seen.add(token_id)
    counts = dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True))
    assert counts == {one: (one >= 5) + (one < 100) for one in range(500)}


def test_without_penalties_and_biases_nothing_is_kept() -> None:
    assert seen_of(SamplingParams(), [1, 2]) is None
    assert bias_of(SamplingParams()) is None


def test_log_probabilities_are_of_the_logits_before_any_setting() -> None:
    logits = _logits(14, rows=3)
    expected = torch.log_softmax(logits, -1)
    settings = [
        SamplingParams(temperature=0, top_logprobs=4),
        SamplingParams(temperature=0.3, top_k=2, logit_bias=((5, 50.0),), top_logprobs=0),
        SamplingParams(temperature=0),
    ]
    draws = [_draw(one, 0.5, bias=bias_of(one)) for one in settings]
    greedy, biased, silent = _sampled(logits, draws)
    assert biased.token_id == 5
    assert biased.logprob == pytest.approx(float(expected[1, 5]), abs=1e-6)
    assert (biased.top, silent.logprob, silent.top) == ((), None, ())
    top = expected[0].topk(4)
    assert [token_id for token_id, _ in greedy.top] == top.indices.tolist()
    assert [value for _, value in greedy.top] == pytest.approx(top.values.tolist(), abs=1e-6)
    assert greedy.logprob == greedy.top[0][1]
