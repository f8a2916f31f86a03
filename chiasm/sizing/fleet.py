"""From a load, measured rates and targets to replicas: what `chiasm plan` shows.

    sized = size(traffic, rates, shape, limits, targets)
    sized.encoders.needed, sized.answers.needed, sized.bytes_per_second

Times are in seconds, sizes in bytes, rates a second.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from chiasm.sizing.answers import Answers, Engine, Pace, StepLine, kv_tokens, pace
from chiasm.sizing.queueing import MOST_SERVERS, Load, Overloaded, Placed, thinned, utilisation

T = TypeVar("T")
# Below this the model of waits is far off in proportion, and the wait is a part of one service.
_LITTLE_BUSY: Final = 0.45
# Beyond it no model holds: a load that differs by a few hundredths waits twice as long.
_VERY_BUSY: Final = 0.96
# What the model was compared with a simulation for.
_MOST_VARIATION: Final = 2.0
# Steps of a full budget over steps of one token, where answers without a stretch are lumped.
_LUMPED: Final = 10


class Impossible(Exception):
    """No number of replicas meets a target; the text says which and why."""


@dataclass(frozen=True)
class Traffic:
    """What is asked of the whole system.

    Attributes:
        requests: a second, at random times (Poisson).
        pictures: probability that a request has 0, 1, 2, ... pictures.
        rows: feature rows of a picture, with the share of pictures that have as many.
        text_tokens: of a prompt, template included, pictures not.
        answer_tokens: mean of what is written.
        cache_hits: share of pictures whose features the LLM service has already.
        encoder_cache_hits: share of the others that an encoder has already.
        prefix_hits: share of prompt tokens that the prefix cache has already.
    """

    requests: float
    pictures: tuple[float, ...]
    rows: tuple[tuple[int, float], ...]
    text_tokens: float
    answer_tokens: float
    cache_hits: float = 0.0
    encoder_cache_hits: float = 0.0
    prefix_hits: float = 0.0

    @property
    def pictures_a_request(self) -> float:
        return sum(n * share for n, share in enumerate(self.pictures))

    @property
    def rows_a_picture(self) -> float:
        return _mean(self.rows)

    @property
    def fetched(self) -> float:
        """Pictures a second whose features come from an encoder."""
        return self.requests * self.pictures_a_request * (1 - self.cache_hits)

    @property
    def encoded(self) -> float:
        """Pictures a second that go through a tower."""
        return self.fetched * (1 - self.encoder_cache_hits)

    @property
    def prompt_tokens(self) -> float:
        return self.text_tokens + self.pictures_a_request * self.rows_a_picture


@dataclass(frozen=True)
class Rates:
    """How long work takes, as `chiasm plan --measure` measures it.

    Attributes:
        encode: one picture on one encoder under load: `fixed`, and `each` for every feature row.
        encode_variation: squared coefficient of variation between pictures of one size.
        step: of the LLM service's engine: `fixed`, and `each` for every token in it.
    """

    encode: StepLine
    step: StepLine
    encode_variation: float = 0.0


@dataclass(frozen=True)
class Shape:
    """Sizes that follow from the model; 0 where they are not known.

    Attributes:
        row_bytes: of one feature row with all its levels.
        kv_token_bytes: keys and values of one token.
    """

    row_bytes: int = 0
    kv_token_bytes: int = 0


@dataclass(frozen=True)
class Limits:
    """The LLM service's settings of the same names; `kv_bytes` 0 sets no limit."""

    max_running: int = 64
    step_token_budget: int = 512
    decode_stretch: float = 1.5
    kv_bytes: int = 0


@dataclass(frozen=True)
class Targets:
    """What the plan has to keep; None is not asked for.

    Attributes:
        busy: highest utilisation of encoders and LLM services.
        encode_wait: of 95 % of the pictures, before the tower.
        token: mean from one token to the next.
        first_token: mean from the engine's queue to the first token.
    """

    busy: float = 0.7
    encode_wait: float = 1.0
    token: float | None = None
    first_token: float | None = None


@dataclass(frozen=True)
class EncoderChoice:
    """So many encoders; waits are None in overload. `fault`: the target that is missed, or none."""

    replicas: int
    busy: float
    wait_mean: float | None
    wait_p95: float | None
    fault: str


@dataclass(frozen=True)
class AnswerChoice:
    """So many LLM services; None in overload. `fault`: the target that is missed, or none."""

    replicas: int
    pace: Pace | None
    kv_bytes: float | None
    fault: str


@dataclass(frozen=True)
class Encoders:
    """`choices` are those with one less, the needed one and one more."""

    needed: int
    seconds: float
    variation: float
    choices: tuple[EncoderChoice, ...]


@dataclass(frozen=True)
class LlmServices:
    """As `Encoders`."""

    needed: int
    choices: tuple[AnswerChoice, ...]


@dataclass(frozen=True)
class Sized:
    """The plan.

    Attributes:
        encoders: None where nothing is encoded.
        bytes_per_second: of embeddings, all encoders to all LLM services; None if not known.
        picture_bytes: of one picture's embedding; None if not known.
        notes: where the figures are rough, and why.
    """

    traffic: Traffic
    encoders: Encoders | None
    llm_services: LlmServices
    bytes_per_second: float | None
    picture_bytes: float | None
    notes: tuple[str, ...] = field(default=())


def size(traffic: Traffic, rates: Rates, shape: Shape, limits: Limits, targets: Targets) -> Sized:
    """The fewest replicas that keep the targets. Raises Impossible."""
    encoders = _encoders(traffic, rates, targets) if traffic.encoded else None
    services = _llm_services(traffic, rates, shape, limits, targets)
    picture_bytes = traffic.rows_a_picture * shape.row_bytes if shape.row_bytes else None
    return Sized(
        traffic,
        encoders,
        services,
        None if picture_bytes is None else traffic.fetched * picture_bytes,
        picture_bytes,
        tuple(_notes(traffic, encoders, services, rates, limits)),
    )


def encode_load(traffic: Traffic, rates: Rates) -> Load:
    """What arrives at the encoders: what a request's caches do not have comes as one group."""
    line = rates.encode
    mean = line.fixed + line.each * traffic.rows_a_picture
    square = sum(share * (line.fixed + line.each * rows) ** 2 for rows, share in traffic.rows)
    missed = (1 - traffic.cache_hits) * (1 - traffic.encoder_cache_hits)
    variation = square * (1 + rates.encode_variation) / mean**2 - 1 if mean else 0.0
    return Load(traffic.requests, thinned(traffic.pictures, missed), mean, max(variation, 0.0))


def _encoders(traffic: Traffic, rates: Rates, targets: Targets) -> Encoders:
    load = encode_load(traffic, rates)

    def choice(replicas: int) -> EncoderChoice:
        busy = utilisation(load, replicas)
        try:
            waits = Placed(load, replicas)
            mean, p95 = waits.mean, waits.quantile(0.95)
        except Overloaded:
            return EncoderChoice(replicas, busy, None, None, "overload")
        fault = "too busy" if busy > targets.busy else ""
        return EncoderChoice(
            replicas, busy, mean, p95, fault or ("too slow" if p95 > targets.encode_wait else "")
        )

    least = max(math.ceil(load.work / targets.busy - 1e-9), 1)
    if least > MOST_SERVERS:
        raise Impossible(_too_many("encoders"))
    needed = _fewest(least, lambda replicas: choice(replicas).fault, _why_no_encoders(targets))
    return Encoders(needed, load.seconds, load.variation, _around(needed, choice))


def _why_no_encoders(targets: Targets) -> str:
    return (
        f"no number of encoders up to {MOST_SERVERS} keeps a wait of {targets.encode_wait:g} s; "
        "raise --encode-wait: the pictures of one request wait for one another"
    )


def _llm_services(
    traffic: Traffic, rates: Rates, shape: Shape, limits: Limits, targets: Targets
) -> LlmServices:
    held = traffic.prompt_tokens
    whole = Answers(
        traffic.requests,
        held * (1 - traffic.prefix_hits),
        held,
        traffic.answer_tokens,
        _prompt_variation(traffic),
    )
    engine = Engine(
        rates.step,
        limits.max_running,
        limits.step_token_budget,
        limits.decode_stretch,
        limits.kv_bytes / shape.kv_token_bytes
        if limits.kv_bytes and shape.kv_token_bytes
        else math.inf,
    )
    if engine.kv_tokens < held + traffic.answer_tokens:
        raise Impossible(
            f"one answer takes {held + traffic.answer_tokens:.0f} tokens of KV memory, which holds "
            f"{engine.kv_tokens:.0f}; raise --kv-bytes"
        )

    def choice(replicas: int) -> AnswerChoice:
        answers = replace(whole, rate=whole.rate / replicas)
        try:
            seen = pace(engine, answers)
        except Overloaded:
            return AnswerChoice(replicas, None, None, "overload")
        tokens = kv_tokens(answers, seen.running_p99)
        memory = tokens * shape.kv_token_bytes if shape.kv_token_bytes else None
        return AnswerChoice(replicas, seen, memory, _too_slow(seen, targets))

    if choice(MOST_SERVERS).fault in ("overload", "too busy"):
        raise Impossible(_too_many("LLM services"))
    why = (
        f"no number of LLM services up to {MOST_SERVERS} keeps the targets: alone, a token takes "
        f"{rates.step.fixed + rates.step.each:.3g} s and a prompt at least "
        f"{rates.step.each * whole.prompt + rates.step.fixed:.3g} s; "
        "raise --token-seconds or --first-token-seconds"
    )
    needed = _fewest(1, lambda replicas: choice(replicas).fault, why)
    return LlmServices(needed, _around(needed, choice))


def _too_many(what: str) -> str:
    return f"more than {MOST_SERVERS} {what} would be needed; give --requests of a part of the load"


def _prompt_variation(traffic: Traffic) -> float:
    """Of the tokens of a prompt; its text counts as of one length."""
    mean_rows = traffic.rows_a_picture
    rows_variance = sum(share * rows * rows for rows, share in traffic.rows) - mean_rows**2
    count = traffic.pictures_a_request
    count_variance = sum(n * n * share for n, share in enumerate(traffic.pictures)) - count**2
    variance = count * rows_variance + count_variance * mean_rows**2
    return max(variance, 0.0) / traffic.prompt_tokens**2 if traffic.prompt_tokens else 0.0


def _too_slow(seen: Pace, targets: Targets) -> str:
    if seen.utilisation > targets.busy:
        return "too busy"
    if targets.token is not None and seen.token_seconds > targets.token:
        return "too slow: tokens"
    if targets.first_token is not None and seen.first_token_seconds > targets.first_token:
        return "too slow: first token"
    return ""


def _fewest(least: int, fault: Callable[[int], str], why: str) -> int:
    """The smallest number without a fault, which all larger ones are without as well."""
    high = least
    while fault(high):
        high *= 2
        if high > MOST_SERVERS:
            raise Impossible(why)
    low = high // 2 if high > least else least - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fault(middle) else (low, middle)
    return high


def _around(needed: int, choice: Callable[[int], T]) -> tuple[T, ...]:
    return tuple(choice(n) for n in range(max(needed - 1, 1), needed + 2))


def _notes(
    traffic: Traffic, encoders: Encoders | None, services: LlmServices, rates: Rates, limits: Limits
) -> Iterator[str]:
    if encoders is not None:
        chosen = next(one for one in encoders.choices if one.replicas == encoders.needed)
        if chosen.busy < _LITTLE_BUSY:
            yield "encoders are little busy: waits may be half a picture's own time longer"
        if encoders.variation > _MOST_VARIATION:
            yield f"pictures take times that vary much ({encoders.variation:.1f}): waits are rough"
        if chosen.busy > _VERY_BUSY:
            yield "encoders are nearly full: waits depend on hundredths of the load"
        if services.needed > 1 and encoders.needed > 2:
            yield (
                "each LLM service sees only its own share of the encoders' load: "
                "waits are somewhat longer than said"
            )
        if len(traffic.rows) > 1:
            yield "small pictures pass large ones (--queue-stretch): they wait less, those more"
    lumped = limits.step_token_budget * rates.step.each > _LUMPED * (
        rates.step.fixed + rates.step.each
    )
    if not limits.decode_stretch and lumped:
        yield "without --decode-stretch long steps of prompts hold up answers: tokens come later"


def _mean(mix: tuple[tuple[int, float], ...]) -> float:
    return sum(value * share for value, share in mix)
