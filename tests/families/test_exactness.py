"""The split answers as transformers' `generate` on the whole checkpoint, family by family."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llm_service.engine.values import EngineSettings
from tests.families import zoo
from tests.families.conversations import conversations
from tests.families.oracle import Expected, Whole
from tests.families.split import Answer, Split, difference

pytestmark = [
    pytest.mark.families,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

TOKENS = 8
# Of logits, relative to the greatest: these checkpoints have logits of about 6, of which the last
# bit of float32 is 5e-7, and sums in another order differ in several last bits.
NEAR = 1e-5
WAIT_SECONDS = 120
SAID = conversations()


class Pair:
    """A checkpoint whole and split, and what the whole one answers to `SAID`."""

    def __init__(self, whole: Whole, split: Split) -> None:
        self.whole = whole
        self.split = split
        self.expected = [whole.expected(turns, TOKENS) for turns in SAID]


@pytest.fixture(scope="module", params=sorted(zoo.BUILDERS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    zoo.BUILDERS[request.param](made)
    return made


@pytest.fixture(scope="module")
def pair(directory: Path) -> Iterator[Pair]:
    with Split(directory, EngineSettings(kv_bytes=64 * 1024 * 1024)) as split:
        yield Pair(Whole(directory), split)


def test_the_prompt_is_the_processors(pair: Pair) -> None:
    for turns, expected in zip(SAID, pair.expected, strict=True):
        assert list(pair.split.prompt(turns).token_ids) == expected.prompt


def test_features_are_the_whole_models_bit_for_bit(pair: Pair) -> None:
    pictures = [part for turns in SAID for _, parts in turns for part in parts]
    for picture in pictures:
        if not isinstance(picture, str):
            rows, levels = pair.whole.features(picture)
            found = pair.split.ready(picture).rows
            assert torch.equal(found.rows, rows)
            assert len(found.levels) == len(levels)
            assert all(map(torch.equal, found.levels, levels))


def test_answers_alone_are_the_whole_models(pair: Pair) -> None:
    for turns, expected in zip(SAID, pair.expected, strict=True):
        answer = pair.split.submit(pair.split.prompt(turns), TOKENS)
        check(answer, expected)


def test_answers_at_once_are_the_whole_models(pair: Pair) -> None:
    prompts = [pair.split.prompt(turns, salt=b"other") for turns in SAID]
    answers = [pair.split.submit(prompt, TOKENS) for prompt in prompts]
    for answer, expected in zip(answers, pair.expected, strict=True):
        check(answer, expected)


def test_pictures_matter(pair: Pair) -> None:
    """A tiny checkpoint that answers alike whatever it sees would prove nothing."""
    told = {tuple(expected.answer) for expected in pair.expected}
    assert len(told) > len(SAID) // 2
    assert any(len(set(expected.answer)) > 1 for expected in pair.expected)


def check(answer: Answer, expected: Expected) -> None:
    assert answer.ended.wait(WAIT_SECONDS)
    assert answer.failed is None
    assert answer.tokens == expected.answer
    assert difference(answer.logprobs, expected.logprobs) < NEAR * max(1, expected.greatest)
