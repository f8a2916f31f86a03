"""What a step costs, and so how many prompt tokens fit beside running answers. Pure policy.

A step of few tokens takes as long as reading the weights takes; each token adds its share of
arithmetic. So a step of n tokens takes about `fixed + n * each` seconds, and some prompt tokens
ride along with the answers of a step nearly for nothing, while a whole picture would hold them up
for as long as many steps.
"""

from dataclasses import dataclass
from typing import Self

# Below a nanosecond a token, time was not measured but rounded.
_LEAST_SECONDS = 1e-9


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

    def seconds(self, tokens: int) -> float:
        return self.fixed + tokens * self.each

    def prompt_tokens_beside(self, answers: int, stretch: float) -> int:
        """Prompt tokens with which a step of `answers` takes at most `stretch` times as long.

        At least 1: prompts go on, whatever the price.
        """
        return max(int((stretch - 1) * self.seconds(answers) / self.each), 1)
