"""Positions on several axes come out as in the whole model, however prompts are cut and mixed."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from llm_service.engine.block_keys import BlockKeys
from llm_service.engine.engine import EmbeddedEngine
from llm_service.engine.positions import name_of_places, places_of
from llm_service.engine.refusals import PromptInvalid
from llm_service.engine.runner import Known, Runner
from llm_service.engine.values import EngineSettings, Prompt
from tests.llm_service.engine.rig import greedy, play_parts, running_parts, tokenizer
from tests.llm_service.engine.tiny_families import (
    Picture,
    cases,
    conversation,
    parts_of,
    qwen2_vl,
    qwen3_vl,
)

CLOSE = 1e-5
COUNT = 10
MODELS = {"qwen2_vl": qwen2_vl, "qwen3_vl": qwen3_vl}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


@pytest.mark.parametrize("budget", [512, 64, 7])
def test_answers_alone_and_together_are_the_whole_models(model: Any, budget: int) -> None:
    expected = cases(model, 8, COUNT)
    decoder = parts_of(model, stateful=False)
    for group in (expected[:1], expected):
        played = play_parts(decoder, [one.prompt for one in group], COUNT, budget=budget)
        for one, tokens, logits in zip(group, played.tokens, played.logits, strict=True):
            assert tokens == one.tokens
            assert (logits - one.logits).abs().max() < CLOSE


def test_answers_that_lose_their_blocks_are_the_whole_models(model: Any) -> None:
    expected = cases(model, 8, COUNT)
    played = play_parts(
        parts_of(model, stateful=False),
        [one.prompt for one in expected],
        COUNT,
        budget=64,
        blocks=30,
        block_size=4,
    )
    assert played.preempted > 0
    for one, tokens, logits in zip(expected, played.tokens, played.logits, strict=True):
        assert tokens == one.tokens
        assert (logits - one.logits).abs().max() < CLOSE


def test_a_second_turn_over_a_picture_finds_its_blocks_and_answers_the_same(model: Any) -> None:
    first = cases(model, 1, COUNT)[0]
    with running_parts(parts_of(model, stateful=False)) as run:
        plain = run.answer(first.prompt, greedy(COUNT, ignore_eos=True, min_tokens=COUNT))
        again = run.answer(first.prompt, greedy(COUNT, ignore_eos=True, min_tokens=COUNT))
    assert again.finished.cached_tokens > 0
    assert plain.token_ids == again.token_ids


def test_the_grid_of_a_picture_separates_blocks_of_equal_rows(model: Any) -> None:
    wide = conversation(model, 3, 5, Picture(2, 8), 30)
    tall = conversation(model, 3, 5, Picture(8, 2), 30)
    assert wide.token_ids == tall.token_ids
    assert all(
        torch.equal(one.rows, other.rows) and one.digest == other.digest
        for one, other in zip(wide.images, tall.images, strict=True)
    )
    decoder = parts_of(model, stateful=False)
    with running_parts(decoder) as run:
        run.answer(wide, greedy(4))
        after = run.answer(tall, greedy(4))
    with running_parts(decoder) as run:
        alone = run.answer(tall, greedy(4))
    assert after.token_ids == alone.token_ids
    assert after.finished.cached_tokens == 0


def test_places_behind_the_prompt_go_on_from_the_index_by_the_delta() -> None:
    stated = torch.tensor([[0, 1, 1, 2], [0, 1, 1, 2], [0, 1, 2, 3]])
    sequence = Known((7, 7, 7, 7), (), stated, -1)
    assert places_of(sequence, 2, 6, 3).tolist() == [[1, 2, 3, 4], [1, 2, 3, 4], [2, 3, 3, 4]]
    assert places_of(sequence, 5, 6, 3).tolist() == [[4], [4], [4]]
    assert places_of(Known(), 3, 5, 3).tolist() == [[3, 4]] * 3


def test_blocks_have_other_names_only_where_places_are_not_indices() -> None:
    stated = torch.arange(8).expand(3, -1).clone()
    stated[2, 6] = 5
    placed = Known((7,) * 8, (), stated, 0)
    plain = Known((7,) * 8)
    names = [
        BlockKeys(one.token_ids, (), b"", 4, partial(name_of_places, one))
        for one in (placed, plain)
    ]
    assert names[0].key(0) == names[1].key(0)
    assert names[0].key(1) != names[1].key(1)


def test_native_layers_are_left_out(model: Any) -> None:
    assert not Runner(parts_of(model, stateful=False), 8, 16).native


def test_positions_of_another_form_are_refused(model: Any) -> None:
    engine = EmbeddedEngine(
        parts_of(model, stateful=False), tokenizer(), EngineSettings(kv_bytes=4 << 20),
        on_fatal=lambda: None,
    )  # fmt: skip
    good = conversation(model, 1, 5, Picture(2, 4), 5)
    assert good.positions is not None
    bad: list[Prompt] = [
        replace(good, positions=good.positions[:2]),
        replace(good, positions=good.positions[:, :-1]),
        replace(good, positions=good.positions.int()),
        replace(good, positions=good.positions - 5),
        replace(good, position_delta=-len(good.token_ids) - 1),
        replace(good, positions=None),
    ]
    for prompt in bad:
        with pytest.raises(PromptInvalid):
            engine.submit("request", prompt, greedy(1), None, lambda event: None)
    engine.stop()
