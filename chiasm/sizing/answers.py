"""What one LLM service does under a load: steps of a batch engine, in closed form.

A step of n tokens takes `fixed + n * each` seconds (`StepLine`), and every running answer gets a
token in each. Answers that begin at random then share steps like this: with r answers a second, P
prompt tokens to compute and O tokens to write in each, a step brings rP * step prompt tokens and
has rO * step answers running, so that

    step = (fixed + each) / (1 - each * r * (P + O))

for an answer that is there itself. It is a fluid model: means are close, what happens in one
crowded second is not in it. Prompts wait for one another in the order of arrival and get the tokens
that `--decode-stretch` leaves beside running answers; that line is taken as one server with the
mean wait of Pollaczek and Khinchin, which is rough. docs/operations.md has the errors against a
simulation of the engine's own scheduler.
"""

import math
from dataclasses import dataclass
from typing import Final

from chiasm.sizing.queueing import Overloaded

# Slow beginnings count up to so many times what answers alone take: the engine's own bound.
_SLOWEST_BEGINNING: Final = 3.0
_BLOCK_TOKENS: Final = 16
# Share of an answer's life that a prompt waits where it has to; by `python -m benchmarks.sizing`.
_OF_A_LIFE: Final = 0.2
# The line of prompts is steadier than its mean: it is never taken for fuller.
_LINE_FULL: Final = 0.99


@dataclass(frozen=True)
class StepLine:
    """Seconds of a step: `fixed`, and `each` for every token in it."""

    fixed: float
    each: float


@dataclass(frozen=True)
class Engine:
    """An LLM service's settings of the same names, and the tokens that its KV memory holds."""

    line: StepLine
    max_running: int = 64
    step_token_budget: int = 512
    decode_stretch: float = 1.5
    kv_tokens: float = math.inf


@dataclass(frozen=True)
class Answers:
    """What is asked of one LLM service.

    Attributes:
        rate: answers a second.
        prompt: tokens of a prompt that are computed: those in the prefix cache are not among them.
        held: tokens of a whole prompt, which stand in KV memory.
        written: tokens of an answer.
        prompt_variation: squared coefficient of variation of `prompt`.
    """

    rate: float
    prompt: float
    held: float
    written: float
    prompt_variation: float = 0.0


@dataclass(frozen=True)
class Pace:
    """How answers fare.

    Attributes:
        utilisation: rate over the highest rate that can be kept up.
        running: sequences that write, on average.
        running_p99: as many or fewer run for 99 % of the time.
        token_seconds: from one token to the next.
        first_token_seconds: mean from the engine's queue to the first token.
        bound: what bounds the highest rate: `running`, `memory` or `prompts`.
    """

    utilisation: float
    running: float
    running_p99: float
    token_seconds: float
    first_token_seconds: float
    bound: str


def pace(engine: Engine, answers: Answers) -> Pace:
    """Raises Overloaded where one service cannot keep up with `answers`."""
    highest, bound = highest_rate(engine, answers)
    if answers.rate >= highest:
        raise Overloaded
    step = _step(engine, answers, answers.rate)
    running = answers.rate * answers.written * step
    spread = running + 2.33 * math.sqrt(running) + (running > 0)
    most = _most_running(engine, answers)[0]
    return Pace(
        utilisation=answers.rate / highest,
        running=running,
        running_p99=min(spread, most),
        token_seconds=step,
        first_token_seconds=_first_token(engine, answers, running, step),
        bound=bound,
    )


def highest_rate(engine: Engine, answers: Answers) -> tuple[float, str]:
    """Answers a second that are just not kept up any more, and what bounds them.

    It depends on the shape of `answers`, not on its rate.
    """
    most, bound = _most_running(engine, answers)
    line, tokens = engine.line, answers.prompt + answers.written
    by_running = most / (answers.written * (line.fixed + line.each) + most * line.each * tokens)
    if _prompt_share(engine, answers, by_running) < 1:
        return by_running, bound
    low, high = 0.0, by_running
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _prompt_share(engine, answers, middle) < 1 else (low, middle)
    return high, "prompts"


def kv_tokens(answers: Answers, sequences: float) -> float:
    """Tokens of KV memory for so many sequences at their longest, in whole blocks."""
    blocks = math.ceil((answers.held + answers.written) / _BLOCK_TOKENS)
    return sequences * blocks * _BLOCK_TOKENS


def _most_running(engine: Engine, answers: Answers) -> tuple[float, str]:
    in_memory = engine.kv_tokens / (answers.held + answers.written / 2)
    if in_memory < engine.max_running:
        return in_memory, "memory"
    return engine.max_running, "running"


def _step(engine: Engine, answers: Answers, rate: float) -> float:
    line = engine.line
    return (line.fixed + line.each) / (1 - line.each * rate * (answers.prompt + answers.written))


def _prompt_share(engine: Engine, answers: Answers, rate: float) -> float:
    """Prompt tokens that come in a step over those that a step takes at most; 1 is too much."""
    line = engine.line
    if line.each * rate * (answers.prompt + answers.written) >= 1:
        return 1.0
    step = _step(engine, answers, rate)
    running = rate * answers.written * step
    return rate * answers.prompt * step / _room(engine, running, _SLOWEST_BEGINNING)


def _room(engine: Engine, running: float, pace: float) -> float:
    """Prompt tokens of a step beside `running` answers that began at `pace` times their step."""
    line = engine.line
    left = max(engine.step_token_budget - running, 1.0)
    if not engine.decode_stretch or running < 1 / 2:
        return left
    alone = line.fixed + line.each * running
    stretched = max(engine.decode_stretch * pace, 1 + (engine.decode_stretch - 1) / 2)
    return min(left, max((stretched - 1) * alone / line.each, 1.0)) if line.each else left


def _first_token(engine: Engine, answers: Answers, running: float, step: float) -> float:
    """The longer of two lines of prompts.

    In the one, those that run began in calm and leave prompts little; it ends when they do, so that
    nobody waits longer than a share of an answer's life. In the other they began as slowly as they
    go, and the line is as long as work comes.
    """
    alone = engine.line.fixed + engine.line.each * running
    ends = _OF_A_LIFE * (1 + answers.prompt_variation) * answers.written * step
    calm = _line_of_prompts(engine, answers, running, 1.0, ends)
    slow = _line_of_prompts(
        engine, answers, running, min(step / alone, _SLOWEST_BEGINNING), math.inf
    )
    # Who comes into a step under way waits for its end.
    return max(calm, slow) + (1 - math.exp(-running)) * step / 2


def _line_of_prompts(
    engine: Engine, answers: Answers, running: float, began: float, ends: float
) -> float:
    """Waiting and own time where the answers beside began at `began` times their own step; neither
    lasts beyond `ends` longer than where nothing else runs."""
    # Where nothing else runs, a prompt has whole steps.
    nothing_runs = math.exp(-running)
    whole = _prompt_seconds(engine.line, answers.prompt, engine.step_token_budget, 0)
    room = _room(engine, running, began)
    beside = _prompt_seconds(engine.line, answers.prompt, room, running)
    own = min(nothing_runs * whole + (1 - nothing_runs) * beside, whole + ends)
    busy = answers.rate * own
    if busy >= _LINE_FULL and ends == math.inf:
        busy = _LINE_FULL
    if busy >= 1:
        return own + ends
    return own + min(busy * own * (1 + answers.prompt_variation) / (2 * (1 - busy)), ends)


def _prompt_seconds(line: StepLine, tokens: float, room: float, running: float) -> float:
    steps = max(tokens / room, 1.0)
    return steps * (line.fixed + line.each * running) + line.each * tokens
