"""The decode step of the embedded engine, in this process, against the machine's own limit.

A step must read every weight of the layers and of the head once, so it takes at least their bytes
over the bandwidth of memory, which is measured here too. Steps are timed where the engine publishes
a token, so they hold all that a token costs: planning, forward, sampling, text, publishing.
"""

import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch
from torch.profiler import ProfilerActivity, profile

from chiasm import torch_tensors
from chiasm.models.language import LanguageHalf
from llm_service.app import decoder_parts
from llm_service.engine.engine import EmbeddedEngine
from llm_service.engine.values import (
    DecoderParts,
    Delta,
    Event,
    Failed,
    Prompt,
    SamplingParams,
    TokenDecoder,
)
from llm_service.settings import DTypeName, LlmSettings

_RUNS = 9
_MATRIX_WIDTH = 4096
_WAIT_SECONDS = 600.0
# Past the special tokens and the single bytes of most vocabularies.
_FIRST_ID = 300


@dataclass(frozen=True)
class Bandwidth:
    """Gigabytes (1e9) read a second, by way of reading."""

    ways: dict[str, float]

    @property
    def best(self) -> float:
        """The machine can do no less than this."""
        return max(self.ways.values())


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of one decode step of `batch` sequences; `steps` were timed.

    `limit` is the least that a step can take at the bandwidth of `gigabytes` a second.
    """

    batch: int
    median: float
    p10: float
    gigabytes: float
    limit: float
    steps: int

    @property
    def of_limit(self) -> float:
        """How many times the limit the median step takes."""
        return self.median / self.limit


@dataclass(frozen=True)
class OpCost:
    """What one operator took of a step, its callees left out: microseconds and calls."""

    name: str
    microseconds: float
    calls: float


@dataclass(frozen=True)
class Profile:
    """Torch's operators by cost, and a whole step under the profiler, which slows it down."""

    ops: tuple[OpCost, ...]
    step_microseconds: float

    @property
    def outside(self) -> float:
        """Microseconds of a step in no operator: Python, kernels of our own, the profiler."""
        return self.step_microseconds - sum(op.microseconds for op in self.ops)


def bandwidth(megabytes: int, threads: int) -> Bandwidth:
    """Reads a buffer far larger than the caches in several ways; each the median of some runs."""
    torch.set_num_threads(threads)
    rows = megabytes * 1_000_000 // (4 * _MATRIX_WIDTH)
    whole = torch.ones(rows, _MATRIX_WIDTH)
    half = whole.to(torch.bfloat16)
    vector = torch.ones(_MATRIX_WIDTH)
    half_vector = vector.to(torch.bfloat16)
    return Bandwidth(
        {
            "sum of float32": _rate(whole.sum, whole),
            "maximum of float32": _rate(whole.amax, whole),
            "matrix times vector, float32": _rate(lambda: whole @ vector, whole),
            "matrix times vector, bfloat16": _rate(lambda: half @ half_vector, half),
        }
    )


def _rate(read: Callable[[], object], buffer: torch.Tensor) -> float:
    read()
    times = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        read()
        times.append(time.perf_counter() - began)
    return buffer.nbytes / statistics.median(times) / 1e9


class Bench:
    """The engine of one checkpoint, and the bytes that each of its decode steps must read."""

    def __init__(self, engine: EmbeddedEngine, vocabulary: int, weight_bytes: int) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._runs = 0
        self.weight_bytes = weight_bytes

    def steps(self, batch: int, prompt_tokens: int, new_tokens: int) -> list[float]:
        """Seconds of each decode step in which all of `batch` sequences took part."""
        watch = Watch(batch)
        self._run(watch, prompt_tokens, new_tokens)
        return common_steps(watch.moments)

    def profile(self, batch: int, prompt_tokens: int, new_tokens: int) -> Profile:
        """Where the time of such steps goes, by operator; half of `new_tokens` are profiled."""
        # The profiler's library wants its first use on the main thread.
        with profile(activities=[ProfilerActivity.CPU], acc_events=True):
            pass
        watch = ProfiledWatch(batch, new_tokens // 2)
        self._run(watch, prompt_tokens, new_tokens)
        return watch.result()

    def _run(self, watch: "Watch", prompt_tokens: int, new_tokens: int) -> None:
        self._runs += 1
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        for place in range(len(watch.moments)):
            stream = random.Random(f"{self._runs}/{place}")
            ids = tuple(stream.randrange(_FIRST_ID, self._vocabulary) for _ in range(prompt_tokens))
            self._engine.submit(
                f"step-{place}", Prompt(ids), sampling, None, partial(watch.take, place)
            )
        watch.wait()


class Watch:
    """Notes the moments of each sequence's tokens. `take` runs on the engine's thread."""

    def __init__(self, batch: int) -> None:
        self.moments: list[list[float]] = [[] for _ in range(batch)]
        self._left = batch
        self._failed = False
        self._ended = threading.Event()

    def take(self, place: int, event: Event) -> None:
        """One event of the sequence at `place`."""
        if isinstance(event, Delta):
            self.moments[place].append(time.perf_counter())
            self.note(place)
        else:
            self._failed |= isinstance(event, Failed)
            self._left -= 1
        if self._left == 0:
            self._ended.set()

    def note(self, place: int) -> None:
        """Called after each token."""

    def wait(self) -> None:
        """Until all sequences ended. Raises RuntimeError where one failed."""
        if not self._ended.wait(_WAIT_SECONDS) or self._failed:
            raise RuntimeError("the engine did not finish the batch")


class ProfiledWatch(Watch):
    """Profiles `count` steps as soon as all sequences give tokens."""

    def __init__(self, batch: int, count: int) -> None:
        super().__init__(batch)
        self._count = count
        self._profiler = profile(activities=[ProfilerActivity.CPU], acc_events=True)
        self._first_steps = 0
        self._began = self._seconds = 0.0

    def note(self, place: int) -> None:
        if place != 0 or not all(self.moments) or self._seconds:
            return
        # Here, for a profiler sees the thread that starts it.
        done = len(self.moments[0]) - self._first_steps
        if not self._began:
            self._profiler.start()
            self._first_steps = len(self.moments[0])
            self._began = time.perf_counter()
        elif done == self._count:
            self._seconds = time.perf_counter() - self._began
            self._profiler.stop()

    def result(self) -> Profile:
        """What was profiled. Raises RuntimeError where the answers ended before that."""
        if not self._seconds:
            raise RuntimeError("the answers ended before enough steps were profiled")
        rows = sorted(self._profiler.key_averages(), key=lambda row: -row.self_cpu_time_total)
        ops = (
            OpCost(row.key, row.self_cpu_time_total / self._count, row.count / self._count)
            for row in rows
        )
        return Profile(tuple(ops), self._seconds * 1e6 / self._count)


def common_steps(moments: Sequence[Sequence[float]]) -> list[float]:
    """The seconds from token to token of the first sequence, while all sequences gave tokens."""
    begin = max(own[0] for own in moments)
    end = min(own[-1] for own in moments)
    common = [moment for moment in moments[0] if begin <= moment <= end]
    return [after - before for before, after in pairwise(common)]


def bytes_read(parts: DecoderParts) -> int:
    """Bytes of the layers, the last norm and the head; the embeddings are only looked up in."""
    apart = {id(parameter) for parameter in parts.embed_tokens.parameters()}
    layers = [one for one in parts.model.parameters() if id(one) not in apart]
    return sum(one.nbytes for one in (*layers, *parts.lm_head.parameters()))


def step_times(
    seconds: Sequence[float], batch: int, weight_bytes: int, gigabytes: float
) -> StepTimes:
    """The steps against the limit that reading `gigabytes` a second sets."""
    tenth = statistics.quantiles(seconds, n=10, method="inclusive")[0]
    limit = weight_bytes / (gigabytes * 1e9)
    median = statistics.median(seconds)
    return StepTimes(batch, median * 1000, tenth * 1000, gigabytes, limit * 1000, len(seconds))


@contextmanager
def opened(model: Path, dtype: DTypeName, threads: int, kv_gib: int) -> Iterator[Bench]:
    """Loads the language half and runs its engine while open, set as the service sets it."""
    torch.set_num_threads(threads)
    settings = LlmSettings(
        model=model, dtype=dtype, torch_threads=threads, vision="none", kv_bytes=kv_gib << 30
    )
    half = LanguageHalf.load(
        model, model_id=settings.served_name, dtype=torch_tensors.dtype_of(dtype)
    )
    parts = decoder_parts(settings, half)
    # Before the engine takes the decoder, which may lay its weights out anew.
    weight_bytes = bytes_read(parts)
    engine = EmbeddedEngine(
        parts, cast(TokenDecoder, half.tokenizer), settings.engine, on_fatal=_tell_broken
    )
    engine.start()
    try:
        yield Bench(engine, half.vocab_size, weight_bytes)
    finally:
        engine.stop()


def _tell_broken() -> None:
    print("the engine has failed", file=sys.stderr)
