"""What a step costs, and so how many prompt tokens fit beside running answers. Pure policy.

A step of few tokens takes as long as reading the weights takes; each token adds its share of
arithmetic. So a step of n tokens takes about `fixed + n * each` seconds, and some prompt tokens
ride along with the answers of a step nearly for nothing, while a whole picture would hold them up
for as long as many steps.
"""

from dataclasses import dataclass
from typing import Final, Self

# Below a nanosecond a token, time was not measured but rounded.
_LEAST_SECONDS = 1e-9
# An answer's beginning counts as slow by this at most, in times what answers alone take.
_SLOWEST_BEGINNING: Final = 3.0


@dataclass(frozen=True)
class StepPrices:
    """Seconds of a step: `fixed`, and `each` for every token in it."""

    fixed: float
    each: float

    @classmethod
    def fit(cls, few: tuple[int, float], many: tuple[int, float]) -> Self:
        """The line through two measurements, each the tokens and the seconds of a step."""
        each = max((many[1] - few[1]) / (many[0] - few[0]), _LEAST_SECONDS)
        return cls(max(few[1] - few[0] * each, 0.0), each)

    def seconds(self, answers: int, prompt_tokens: int = 0) -> float:
        """Of a step of so many answers, each with a token, and of prompt tokens beside them."""
        return self.fixed + (answers + prompt_tokens) * self.each

    def prompt_tokens_within(self, answers: int, seconds: float) -> int:
        """Prompt tokens with which a step of `answers` takes at most so long; at least 1: prompts
        go on, whatever the price."""
        return max(int((seconds - self.seconds(answers)) / self.each), 1)


@dataclass(frozen=True)
class ApartPrices(StepPrices):
    """Where no two answers share a forward, each costs a whole one."""

    def seconds(self, answers: int, prompt_tokens: int = 0) -> float:
        """The same; a prompt's forward counts by its tokens alone."""
        return answers * (self.fixed + self.each) + prompt_tokens * self.each


@dataclass(frozen=True)
class StepLimits:
    """Keeps prompts from stretching answers: no answer's steps take more than `stretch` times the
    steps that it began with.

    An answer that began while prompts went in, as all do under a load of pictures, began slowly.
    Beside such, prompts get more, and more answers come to share a step. Beside one that began in
    calm they get less, so that its reader does not see it falter.
    """

    prices: StepPrices
    stretch: float

    def pace(self, answers: int, prompt_tokens: int) -> float:
        """Seconds a token that such a step stands for, to an answer that begins with it.

        Bounded by what answers alone take: slow beginnings do not add up.
        """
        slowest = _SLOWEST_BEGINNING * self.prices.seconds(answers)
        return min(self.prices.seconds(answers, prompt_tokens), slowest)

    def prompt_tokens_beside(self, answers: int, pace: float | None) -> int:
        """Prompt tokens for a step of `answers`, the swiftest of which began at `pace`.

        Args:
            pace: seconds a token; None where all are about to begin.
        """
        alone = self.prices.seconds(answers)
        if pace is None:
            return self.prices.prompt_tokens_within(answers, self.stretch * alone)
        # Many answers may alone take longer than a few did: then at least half of the stretch.
        least = (1 + (self.stretch - 1) / 2) * alone
        return self.prices.prompt_tokens_within(answers, max(self.stretch * pace, least))
