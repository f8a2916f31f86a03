"""Deepstack levels are added to their tokens alone, however prompts are cut and mixed."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from llm_service.engine.engine import EmbeddedEngine
from llm_service.engine.refusals import PromptInvalid
from llm_service.engine.values import EngineSettings, ImageSpan, Prompt
from tests.llm_service.engine.rig import greedy, play_parts, tokenizer
from tests.llm_service.engine.tiny_families import Picture, case, parts_of, qwen2_vl, qwen3_vl

CLOSE = 1e-5
COUNT = 6


@pytest.fixture(scope="module")
def model() -> Any:
    return qwen3_vl()


@pytest.mark.parametrize("budget", [512, 11, 3, 1])
def test_a_cut_picture_has_the_levels_of_the_rows_that_a_step_computes(
    model: Any, budget: int
) -> None:
    one = case(model, 2, 3, Picture(4, 4), 2, Picture(2, 3), 4, count=COUNT)
    played = play_parts(parts_of(model, stateful=False), [one.prompt], COUNT, budget=budget)
    assert played.tokens == [one.tokens]
    assert (played.logits[0] - one.logits).abs().max() < CLOSE


def test_steps_of_text_alone_and_steps_of_both_are_the_whole_models(model: Any) -> None:
    seen = case(model, 2, 3, Picture(4, 4), 2, count=COUNT)
    read = case(model, 3, 40, count=COUNT)
    played = play_parts(
        parts_of(model, stateful=False), [read.prompt, seen.prompt, read.prompt], COUNT, budget=16
    )
    for one, logits in zip((read, seen, read), played.logits, strict=True):
        assert (logits - one.logits).abs().max() < CLOSE


def test_levels_matter(model: Any) -> None:
    one = case(model, 2, 3, Picture(4, 4), 2, count=1)
    prompt = _with_levels(one.prompt, lambda image: tuple(-level for level in image.levels))
    played = play_parts(parts_of(model, stateful=False), [prompt], 1)
    assert (played.logits[0] - one.logits).abs().max() > 100 * CLOSE


def _with_levels(prompt: Prompt, change: Any) -> Prompt:
    return replace(prompt, images=tuple(replace(one, levels=change(one)) for one in prompt.images))


@pytest.mark.parametrize(
    "change",
    [
        lambda image: (),
        lambda image: image.levels[:1],
        lambda image: (*image.levels, image.levels[0]),
        lambda image: (image.levels[0], image.levels[1][:-1]),
        lambda image: (image.levels[0], image.levels[1].long()),
    ],
)
def test_levels_of_another_number_or_form_are_refused(model: Any, change: Any) -> None:
    prompt = case(model, 2, 3, Picture(2, 2), 2, count=1).prompt
    _refused(model, _with_levels(prompt, change))


def test_levels_are_refused_where_the_decoder_takes_none() -> None:
    model = qwen2_vl()
    prompt = case(model, 2, 3, Picture(2, 2), 2, count=1).prompt
    _refused(model, _with_levels(prompt, lambda image: (image.rows,)))


def _refused(model: Any, prompt: Prompt) -> None:
    engine = EmbeddedEngine(
        parts_of(model, stateful=False), tokenizer(), EngineSettings(kv_bytes=4 << 20),
        on_fatal=lambda: None,
    )  # fmt: skip
    with pytest.raises(PromptInvalid, match="evels"):
        engine.submit("request", prompt, greedy(1), None, lambda event: None)
    engine.stop()


def test_levels_of_half_precision_are_cast(model: Any) -> None:
    one = case(model, 2, 3, Picture(4, 4), 2, count=1)

    def halved(image: ImageSpan) -> tuple[torch.Tensor, ...]:
        return tuple(level.half() for level in image.levels)

    played = play_parts(parts_of(model, stateful=False), [_with_levels(one.prompt, halved)], 1)
    assert (played.logits[0] - one.logits).abs().max() < 1e-2
