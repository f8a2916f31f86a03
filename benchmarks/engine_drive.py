"""Closed loops of chat requests, and what they measured."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.engine_client import Answer, Server, ask
from benchmarks.engine_load import Ask, bodies

# More wait for nothing but the same code to have run once.
_MOST_WARM_UP = 8


@dataclass(frozen=True)
class Cell:
    """`pictures` a request, `concurrency` requests at any time, `requests` in all."""

    pictures: int
    concurrency: int
    requests: int

    @property
    def name(self) -> str:
        """As on the command line: pictures@concurrency."""
        return f"{self.pictures}@{self.concurrency}"


@dataclass(frozen=True)
class Figures:
    """What a loop gave. Times in milliseconds; a gap is a wait for further text in one answer.

    Tokens are counted by the server's usage, not by chunks. `client_cpu` is this process's own
    share of one core meanwhile.
    """

    requests: int
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    first_p50: float
    first_p99: float
    gap_p50: float
    gap_p99: float
    prompt_tokens: float
    pieces_per_token: float
    client_cpu: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks; NaN of nothing."""
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def figures(answers: Sequence[Answer], seconds: float, cpu_seconds: float) -> Figures:
    """The figures of all answers together."""
    first = [answer.first_after * 1000 for answer in answers]
    gaps = [gap * 1000 for answer in answers for _, gap in answer.gaps]
    tokens = sum(answer.completion_tokens for answer in answers)
    return Figures(
        requests=len(answers),
        seconds=seconds,
        requests_per_second=len(answers) / seconds,
        tokens_per_second=tokens / seconds,
        first_p50=percentile(first, 50),
        first_p99=percentile(first, 99),
        gap_p50=percentile(gaps, 50),
        gap_p99=percentile(gaps, 99),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers) / len(answers),
        pieces_per_token=sum(answer.pieces for answer in answers) / tokens,
        client_cpu=cpu_seconds / seconds,
    )


async def drive(server: Server, kind: Ask, cell: Cell, seed: str) -> Figures:
    """Warms up, then measures one cell. Requests are made before the clock starts.

    Raises AnswerFailed on the first request that does not end well.
    """
    warm = bodies(kind, min(cell.concurrency, _MOST_WARM_UP), f"{seed}/{cell.name}/warm-up")
    measured = bodies(kind, cell.requests, f"{seed}/{cell.name}/measured")
    await closed_loop(server, warm, cell.concurrency, kind.new_tokens)
    began, cpu = time.perf_counter(), time.process_time()
    answers = await closed_loop(server, measured, cell.concurrency, kind.new_tokens)
    return figures(answers, time.perf_counter() - began, time.process_time() - cpu)


async def closed_loop(
    server: Server, requests: Sequence[bytes], concurrency: int, new_tokens: int
) -> list[Answer]:
    """Answers all `requests`, `concurrency` at a time: whoever is done sends the next one."""
    left, answers = iter(requests), list[Answer]()

    async def one_after_another() -> None:
        for body in left:
            answers.append(await ask(server, body, new_tokens))

    try:
        async with asyncio.TaskGroup() as loops:
            for _ in range(concurrency):
                loops.create_task(one_after_another())
    except* Exception as group:
        raise group.exceptions[0] from None
    return answers
