"""Measures rates for `chiasm plan` by calls of running services: a few dozen pictures and answers.

Measure a system that has nothing else to do, on the machines that will serve. No picture and no
prompt comes twice, so that no cache answers.
"""

import io
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image

from chiasm.cli.mixes import Size
from chiasm.client import Answer, Client
from chiasm.conversation import Embedding, Sampling, user
from chiasm.sizing.answers import StepLine

Say = Callable[[str], None]
SIZES: Final[tuple[Size, ...]] = ((224, 224), (672, 672), (1344, 1344))
PICTURES: Final = 24
IN_FLIGHT: Final = 4
TOGETHER: Final = 8
_WRITTEN: Final = 64
_WORDS: Final = ("red", "blue", "tree", "house", "nine", "two", "is", "the", "in", "of")


class Unmeasurable(Exception):
    """The services answered, but what they took cannot be a rate; the text says why."""


@dataclass(frozen=True)
class EncodeRates:
    """Of one encoder with some pictures in flight; see `chiasm.sizing.fleet.Rates`.

    Attributes:
        rows: feature rows of a picture of each size that was asked for.
        row_bytes: of one feature row with its levels.
    """

    line: StepLine
    variation: float
    rows: tuple[int, ...]
    row_bytes: int


@dataclass(frozen=True)
class _Timed:
    """Pictures of one size: rows of each, seconds a picture, variation of the tower's time."""

    rows: int
    seconds: float
    variation: float


def measure_encoder(client: Client, sizes: Sequence[tuple[Size, float]], say: Say) -> EncodeRates:
    """Pictures of each size, some at a time; `sizes` with their shares.

    Raises ChiasmError as the encoder does.
    """
    stream = np.random.default_rng()
    timed: list[_Timed] = []
    row_bytes = 0
    for size, _ in sizes:
        files = [_noise(stream, size) for _ in range(PICTURES + IN_FLIGHT)]
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            list(threads.map(client.encode, files[:IN_FLIGHT]))
            began = time.monotonic()
            replies = list(threads.map(client.encode, files[IN_FLIGHT:]))
            seconds = (time.monotonic() - began) / PICTURES
        row_bytes = _row_bytes(replies[0])
        rows = math.prod(replies[0].features.shape[:-1])
        timed.append(
            _Timed(rows, seconds, _variation([r.timings.forward_seconds for r in replies]))
        )
        say(f"encoder: {size[0]}x{size[1]}, {rows} rows: {seconds * 1000:.2f} ms a picture")
    line, variation = _fitted(timed, [share for _, share in sizes])
    return EncodeRates(line, variation, tuple(one.rows for one in timed), row_bytes)


def _fitted(timed: Sequence[_Timed], shares: Sequence[float]) -> tuple[StepLine, float]:
    """A line by rows, and the variation about it: within a size, and of sizes that it misses.

    Where the model gives every size as many rows, the line is the mean.
    """
    mean = sum(share * one.seconds for one, share in zip(timed, shares, strict=True))
    if len({one.rows for one in timed}) == 1:
        line = StepLine(mean, 0.0)
    else:
        line = line_through([(one.rows, one.seconds) for one in timed])
    missed = sum(
        share * (one.seconds - line.fixed - line.each * one.rows) ** 2
        for one, share in zip(timed, shares, strict=True)
    )
    within = sum(share * one.variation for one, share in zip(timed, shares, strict=True))
    return line, within + missed / mean**2


def measure_llm(client: Client, budget: int, say: Say) -> StepLine:
    """One answer, some together, a long prompt. Raises ChiasmError as the LLM service does.

    Args:
        budget: the service's `--step-token-budget`.
    """
    words = random.Random()
    context = client.get_model().context_length
    prompt = min(2 * budget, context // 2)
    few = min(_WRITTEN, max(context // 4, 2))

    def text(length: int) -> str:
        return " ".join(words.choices(_WORDS, k=length))

    def answer(length: int, written: int) -> Answer:
        wanted = Sampling(temperature=0, max_tokens=written, ignore_eos=True)
        return client.generate([user(text(length))], wanted)

    answer(4, 2)
    points = [(1.0, _token_seconds([answer(4, few) for _ in range(3)]))]
    say(f"LLM service: one answer, {points[0][1] * 1000:.2f} ms a token")
    with ThreadPoolExecutor(TOGETHER) as threads:
        together = list(threads.map(lambda _: answer(4, few), range(TOGETHER)))
    points.append((float(TOGETHER), _token_seconds(together)))
    say(f"LLM service: {TOGETHER} answers together, {points[1][1] * 1000:.2f} ms a token")
    tokens_a_word = client.count_tokens([user(text(100))]).total_token_count / 100
    read = [answer(max(int(prompt / tokens_a_word), 1), 1) for _ in range(3)]
    points.append(_prompt_step(read, budget))
    say(f"LLM service: steps of {points[2][0]:.0f} prompt tokens, {points[2][1] * 1000:.2f} ms")
    return line_through(points)


def line_through(points: Sequence[tuple[float, float]]) -> StepLine:
    """The line with the least relative errors, never falling and never below 0.

    Args:
        points: units of work, and the seconds that they took.
    """
    if any(seconds <= 0 for _, seconds in points):
        raise Unmeasurable("a measured time is 0; measure services that compute")
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    joint = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    each = max(joint / spread, 0.0) if spread else 0.0
    fixed = mean_y - each * mean_x
    if fixed < 0:
        # Through the origin.
        each = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / sum(
            w * x * x for w, (x, _) in zip(weights, points, strict=True)
        )
        fixed = 0.0
    return StepLine(fixed, each)


def _noise(stream: np.random.Generator, size: Size) -> bytes:
    """A JPEG of random blots: about as many bytes a pixel as a photograph."""
    blots = Image.fromarray(stream.integers(0, 256, (48, 48, 3), np.uint8))
    file = io.BytesIO()
    blots.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def _row_bytes(embedding: Embedding) -> int:
    rows = math.prod(embedding.features.shape[:-1])
    return embedding.features.data.nbytes // rows * (1 + len(embedding.levels))


def _variation(seconds: Sequence[float]) -> float:
    mean = statistics.fmean(seconds)
    return statistics.pvariance(seconds) / mean**2 if mean else 0.0


def _token_seconds(answers: Sequence[Answer]) -> float:
    paces = [
        one.timings.decode_seconds / (len(one.token_ids) - 1)
        for one in answers
        if len(one.token_ids) > 1
    ]
    if not paces:
        raise Unmeasurable("the LLM service wrote no second token; its context is too short")
    return statistics.median(paces)


def _prompt_step(answers: Sequence[Answer], budget: int) -> tuple[float, float]:
    tokens = statistics.fmean(one.usage.prompt_token_count for one in answers)
    steps = -(-tokens // budget)
    seconds = statistics.median(one.timings.prefill_seconds for one in answers)
    return tokens / steps, seconds / steps
