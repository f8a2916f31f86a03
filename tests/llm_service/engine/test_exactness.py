"""The engine's logits are transformers' own, whatever shares the step."""

from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from llm_service.engine.block_pool import BlockPool
from llm_service.engine.refusals import UnsupportedDecoder
from llm_service.engine.runner import Runner
from llm_service.engine.scheduler import Chunk, Scheduler, Step
from llm_service.engine.values import Prompt
from tests.llm_service.engine.rig import (
    VOCABULARY,
    Greedy,
    Played,
    generated,
    parts,
    play,
    random_llama,
    random_prompt,
    random_rows,
    with_image,
)

TOLERANCE = 1e-5
COUNT = 10
TEXTS = [random_prompt(length, length) for length in (1, 2, 15, 16, 17, 33, 100)]


def _mixed() -> list[Prompt]:
    start = with_image(random_prompt(1, 20), 0, random_rows(1, 9))
    middle = with_image(random_prompt(2, 40), 7, random_rows(2, 16))
    adjacent = with_image(with_image(middle, 23, random_rows(3, 16)), 39, random_rows(4, 1))
    return [start, middle, adjacent, random_prompt(3, 12)]


def _assert_equals_generate(played: Played, prompts: list[Prompt]) -> None:
    reference = random_llama()
    for prompt, tokens, logits in zip(prompts, played.tokens, played.logits, strict=True):
        expected_tokens, expected_logits = generated(reference, prompt, COUNT)
        torch.testing.assert_close(logits, expected_logits, atol=TOLERANCE, rtol=0)
        assert tokens == expected_tokens


@pytest.mark.parametrize("prompt", TEXTS, ids=lambda prompt: str(len(prompt.token_ids)))
def test_logits_of_a_text_prompt_equal_generate(prompt: Prompt) -> None:
    _assert_equals_generate(play(random_llama(), [prompt], COUNT), [prompt])


def test_prompts_that_share_steps_equal_generate() -> None:
    _assert_equals_generate(play(random_llama(), TEXTS, COUNT), TEXTS)


def test_prompts_with_image_rows_equal_generate() -> None:
    _assert_equals_generate(play(random_llama(), _mixed(), COUNT), _mixed())


@pytest.mark.parametrize("budget", [12, 29, 71])
def test_prompts_cut_into_chunks_equal_generate(budget: int) -> None:
    prompts = [*_mixed(), *TEXTS]
    _assert_equals_generate(play(random_llama(), prompts, COUNT, budget=budget), prompts)


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_the_size_of_a_block_changes_nothing(block_size: int) -> None:
    played = play(random_llama(), _mixed(), COUNT, block_size=block_size)
    _assert_equals_generate(played, _mixed())


def test_sequences_that_lost_their_blocks_and_were_computed_again_equal_generate() -> None:
    played = play(random_llama(), TEXTS, COUNT, blocks=36, block_size=4)
    assert played.preempted > 0
    _assert_equals_generate(played, TEXTS)


def test_thirty_two_together_equal_each_alone() -> None:
    prompts = [random_prompt(seed, 3 + seed) for seed in range(32)]
    together = play(random_llama(), prompts, COUNT)
    for number in (0, 7, 31):
        alone = play(random_llama(), prompts[number : number + 1], COUNT)
        torch.testing.assert_close(together.logits[number], alone.logits[0], atol=TOLERANCE, rtol=0)
        assert together.tokens[number] == alone.tokens[0]


def test_image_rows_of_half_precision_are_cast() -> None:
    rows = random_rows(5, 8).half()
    half = with_image(random_prompt(5, 12), 2, rows)
    full = with_image(random_prompt(5, 12), 2, rows.float())
    assert torch.equal(
        play(random_llama(), [half], 3).logits[0], play(random_llama(), [full], 3).logits[0]
    )


def test_a_half_precision_decoder_computes_what_generate_does() -> None:
    prompt = _mixed()[1]
    played = play(random_llama().bfloat16(), [prompt], 1)
    _, expected = generated(random_llama().bfloat16(), prompt, 1)
    # bfloat16 keeps 8 bits; the logits reach 3.
    torch.testing.assert_close(played.logits[0], expected.float(), atol=0.05, rtol=0)


def test_a_block_that_held_nan_does_not_poison_its_next_owner() -> None:
    runner = Runner(parts(random_llama()), 3, 16)
    poison = with_image(random_prompt(1, 16), 0, torch.full((16, 64), float("nan")))
    owners = {0: Greedy([*poison.token_ids], poison.images), 1: Greedy([5, 6, 7], ())}
    before = runner.run(Step((Chunk(1, 0, 3, True, (2,), (2,)),)), owners)
    assert runner.run(Step((Chunk(0, 0, 16, True, (1,), (1,)),)), owners).whole == [False]
    runner.run(Step((Chunk(1, 0, 2, False, (1,), (1,)),)), owners)
    after = runner.run(Step((Chunk(1, 2, 1, True, (1,)),)), owners)
    torch.testing.assert_close(after.logits, before.logits, atol=TOLERANCE, rtol=0)


def test_a_row_of_nan_leaves_its_neighbours_in_the_step_alone() -> None:
    scheduler = Scheduler(BlockPool(40, 16), 64, 8)
    poison = with_image(random_prompt(1, 16), 3, torch.full((2, 64), float("nan")))
    prompts = [poison, random_prompt(2, 9)]
    for key, prompt in enumerate(prompts):
        scheduler.add(key, len(prompt.token_ids), 32)
    sequences = {
        key: Greedy([*prompt.token_ids], prompt.images) for key, prompt in enumerate(prompts)
    }
    predictions = Runner(parts(random_llama()), 40, 16).run(scheduler.plan(), sequences)
    assert dict(zip(predictions.keys, predictions.whole, strict=True)) == {0: False, 1: True}


def test_another_architecture_equals_its_generate() -> None:
    def qwen() -> Any:
        torch.manual_seed(3)
        config_class: Any = Qwen2Config
        config = config_class(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=1, head_dim=16, initializer_range=0.1,
            max_position_embeddings=512, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        model: Any = Qwen2ForCausalLM(config)
        return model.eval()

    prompts = [random_prompt(1, 21), with_image(random_prompt(2, 30), 4, random_rows(2, 16))]
    played = play(qwen(), prompts, COUNT, budget=64)
    for prompt, tokens, logits in zip(prompts, played.tokens, played.logits, strict=True):
        expected_tokens, expected_logits = generated(qwen(), prompt, COUNT)
        torch.testing.assert_close(logits, expected_logits, atol=TOLERANCE, rtol=0)
        assert tokens == expected_tokens


def test_a_decoder_that_sees_less_than_its_context_is_refused_at_the_start() -> None:
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=64,
    )  # fmt: skip
    model = MistralForCausalLM(config)
    assert Runner(parts(model, context_length=64), 4, 16).probe()
    with pytest.raises(UnsupportedDecoder, match="window of 64"):
        Runner(parts(model, context_length=65), 4, 16).probe()
