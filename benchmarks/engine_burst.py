"""Text streams run while requests with a picture arrive in bursts: how long does text wait?

The work is fixed, so that throughputs compare: some long text streams, and every burst's requests
at their set times. First the streams run alone ("calm"), then others of their kind with the bursts.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engine_client import Answer, Server, ask
from benchmarks.engine_drive import closed_loop, percentile
from benchmarks.engine_load import Ask, bodies


@dataclass(frozen=True)
class Mix:
    """What runs together.

    Attributes:
        streams: text streams at once, each of `stream_tokens` new tokens.
        bursts: how often `burst_size` requests with one picture each arrive at once.
        every: seconds from one burst to the next; the first comes when all streams give text.
        picture_tokens: new tokens of each request with a picture.
    """

    streams: int = 4
    stream_tokens: int = 512
    bursts: int = 3
    burst_size: int = 16
    every: float = 5.0
    picture_tokens: int = 64

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.streams} streams, {self.bursts} bursts of {self.burst_size} pictures"


@dataclass(frozen=True)
class MixFigures:
    """Times in milliseconds. A gap is a wait for further text in one text stream; burst gaps are
    those that ended between the first burst's sending and the last picture's answer.

    `tokens_per_second` is of the whole mix over the time that all of it took.
    """

    calm_gap_p50: float
    calm_gap_p99: float
    burst_gap_p50: float
    burst_gap_p99: float
    burst_gaps: int
    tokens_per_second: float
    picture_first_p50: float
    picture_first_p99: float
    picture_seconds: float


@dataclass(frozen=True)
class Observed:
    """All answers of one run of the mix and when it ran, by `time.perf_counter`."""

    texts: Sequence[Answer]
    pictures: Sequence[Answer]
    began: float
    first_burst: float

    @property
    def ended(self) -> float:
        return max(answer.ended for answer in (*self.texts, *self.pictures))

    @property
    def tokens_per_second(self) -> float:
        tokens = sum(answer.completion_tokens for answer in (*self.texts, *self.pictures))
        return tokens / (self.ended - self.began)

    @property
    def last_picture(self) -> float:
        return max(answer.ended for answer in self.pictures)

    def burst_gaps(self) -> list[float]:
        """Seconds of the text streams' gaps that ended while pictures were in hand."""
        return [
            gap
            for answer in self.texts
            for moment, gap in answer.gaps
            if self.first_burst < moment <= self.last_picture
        ]


async def burst(server: Server, model: str, mix: Mix, seed: str) -> MixFigures:
    """Runs the calm part, then the mix. Raises AnswerFailed."""
    text = Ask(model, 0, mix.stream_tokens)
    with_picture = Ask(model, 1, mix.picture_tokens)
    warm = bodies(with_picture, 2, f"{seed}/warm-up")
    await closed_loop(server, warm, len(warm), mix.picture_tokens)
    calm_requests = bodies(text, mix.streams, f"{seed}/calm")
    calm = await closed_loop(server, calm_requests, mix.streams, mix.stream_tokens)
    texts = bodies(text, mix.streams, f"{seed}/burst")
    pictures = bodies(with_picture, mix.bursts * mix.burst_size, f"{seed}/burst")
    return mix_figures(calm, await _observe(server, mix, texts, pictures))


def mix_figures(calm: Sequence[Answer], observed: Observed) -> MixFigures:
    """The figures of a calm part and of a run of the mix."""
    calm_gaps = [gap * 1000 for answer in calm for _, gap in answer.gaps]
    burst_gaps = [gap * 1000 for gap in observed.burst_gaps()]
    first = [answer.first_after * 1000 for answer in observed.pictures]
    return MixFigures(
        calm_gap_p50=percentile(calm_gaps, 50),
        calm_gap_p99=percentile(calm_gaps, 99),
        burst_gap_p50=percentile(burst_gaps, 50),
        burst_gap_p99=percentile(burst_gaps, 99),
        burst_gaps=len(burst_gaps),
        tokens_per_second=observed.tokens_per_second,
        picture_first_p50=percentile(first, 50),
        picture_first_p99=percentile(first, 99),
        picture_seconds=observed.last_picture - observed.first_burst,
    )


async def _observe(
    server: Server, mix: Mix, texts: Sequence[bytes], pictures: Sequence[bytes]
) -> Observed:
    """Starts the streams, waits until each gives text, then sends burst after burst."""
    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            speaking = [asyncio.Event() for _ in texts]
            streams = [
                group.create_task(ask(server, body, mix.stream_tokens, event))
                for body, event in zip(texts, speaking, strict=True)
            ]
            for event in speaking:
                await event.wait()
            first_burst = time.perf_counter()
            asked = []
            for place in range(mix.bursts):
                await asyncio.sleep(first_burst + place * mix.every - time.perf_counter())
                own = pictures[place * mix.burst_size : (place + 1) * mix.burst_size]
                asked += [group.create_task(ask(server, body, mix.picture_tokens)) for body in own]
    except* Exception as failed:
        raise failed.exceptions[0] from None
    results = [[task.result() for task in tasks] for tasks in (streams, asked)]
    return Observed(results[0], results[1], began, first_burst)
