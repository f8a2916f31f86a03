"""From the rounds' figures to a table of medians and ratios against the targets. Pure."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

OURS, PEER = "chiasm", "vllm"
START, BURST = "start-up", "burst"


@dataclass(frozen=True, order=True)
class Measure:
    """What a figure is of: a scenario (a cell as pictures@concurrency) and its metric."""

    scenario: str
    metric: str


@dataclass(frozen=True)
class Round:
    """The figures of one system in one round."""

    system: str
    number: int
    figures: Mapping[Measure, float]


@dataclass(frozen=True)
class Target:
    """A bound that the issue sets on a ratio."""

    bound: float
    direction: Literal["at least", "at most"]

    def met(self, ratio: float) -> bool:
        return ratio >= self.bound if self.direction == "at least" else ratio <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.direction == 'at least' else '≤'} {self.bound:g}"


@dataclass(frozen=True)
class Row:
    """One line of the table; `peer` is NaN where only our own system was measured."""

    measure: Measure
    ours: float
    peer: float
    ratio: float
    target: Target | None = None

    @property
    def verdict(self) -> str:
        if self.target is None or math.isnan(self.ratio):
            return ""
        return "met" if self.target.met(self.ratio) else "missed"


# Of the ratio to the peer's figure, for the shown metrics in this order.
METRICS: Mapping[str, str] = {
    "requests_per_second": "requests/s",
    "tokens_per_second": "tokens/s",
    "first_p50": "TTFT p50, ms",
    "first_p99": "TTFT p99, ms",
    "gap_p50": "inter-token p50, ms",
    "gap_p99": "inter-token p99, ms",
    "calm_gap_p50": "inter-token p50 without pictures, ms",
    "calm_gap_p99": "inter-token p99 without pictures, ms",
    "burst_gap_p50": "inter-token p50 in the burst, ms",
    "burst_gap_p99": "inter-token p99 in the burst, ms",
    "picture_first_p50": "TTFT p50 of the pictures, ms",
    "picture_first_p99": "TTFT p99 of the pictures, ms",
    "picture_seconds": "first burst to last picture's answer, s",
    "seconds_to_ready": "process start to ready, s",
    "seconds_to_picture": "process start to a picture's answer, s",
}
TARGETS: Mapping[Measure, Target] = {
    Measure("0@1", "tokens_per_second"): Target(1.2, "at least"),
    Measure("0@8", "tokens_per_second"): Target(1.2, "at least"),
    Measure("0@32", "tokens_per_second"): Target(1.0, "at least"),
    Measure("1@8", "requests_per_second"): Target(1.5, "at least"),
    Measure("1@8", "first_p50"): Target(0.5, "at most"),
    Measure(BURST, "tokens_per_second"): Target(1.0, "at least"),
    Measure(START, "seconds_to_ready"): Target(0.1, "at most"),
}
# Each system's burst figure over its own calm one; the target is on ours.
STALL = Measure(BURST, "p99 in the burst / without")
STALL_TARGET = Target(2.0, "at most")


def rows(rounds: Sequence[Round]) -> list[Row]:
    """Medians over the rounds of each system, scenario by scenario as first measured."""
    ours, peer = _medians(rounds, OURS), _medians(rounds, PEER)
    found = []
    for scenario in dict.fromkeys(measure.scenario for measure in (*ours, *peer)):
        for metric in METRICS:
            measure = Measure(scenario, metric)
            if measure in ours or measure in peer:
                found.append(_row(measure, ours, peer, TARGETS.get(measure)))
        if scenario == BURST:
            stalls = (_stall(ours), _stall(peer))
            found.append(Row(STALL, *stalls, stalls[0], STALL_TARGET))
    return found


def table(lines: Sequence[Row]) -> str:
    """The rows in Markdown."""
    head = ("scenario", "figure (median)", "Chiasm", "vLLM", "ratio", "target", "")
    cells = [head, ("---", "---", *(["---:"] * 3), "---", "---"), *map(_cells, lines)]
    return "\n".join("| " + " | ".join(cell) + " |" for cell in cells)


def _cells(row: Row) -> tuple[str, ...]:
    metric = METRICS.get(row.measure.metric, row.measure.metric)
    ratio = "" if row.measure == STALL else number(row.ratio)
    target = str(row.target) if row.target else ""
    if row.measure == STALL:
        target += " (Chiasm's own)"
    figures = (number(row.ours), number(row.peer), ratio)
    return (scenario_title(row.measure.scenario), metric, *figures, target, row.verdict)


def scenario_title(scenario: str) -> str:
    """The scenario in words."""
    pictures, at, concurrency = scenario.partition("@")
    if not at:
        return scenario
    what = {"0": "text", "1": "1 picture"}.get(pictures, f"{pictures} pictures")
    return f"{what}, {concurrency} at once"


def number(value: float) -> str:
    """Three digits that count, as many before the point as there are; empty for NaN."""
    if math.isnan(value):
        return ""
    decimals = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(max(decimals, 0), 3)}f}"


def _medians(rounds: Sequence[Round], system: str) -> dict[Measure, float]:
    own = [one.figures for one in rounds if one.system == system]
    measures = dict.fromkeys(measure for figures in own for measure in figures)
    return {
        measure: statistics.median(figures[measure] for figures in own if measure in figures)
        for measure in measures
    }


def _row(
    measure: Measure,
    ours: Mapping[Measure, float],
    peer: Mapping[Measure, float],
    target: Target | None,
) -> Row:
    mine, theirs = (figures.get(measure, math.nan) for figures in (ours, peer))
    return Row(measure, mine, theirs, mine / theirs if theirs else math.nan, target)


def _stall(medians: Mapping[Measure, float]) -> float:
    calm = medians.get(Measure(BURST, "calm_gap_p99"), math.nan)
    return medians.get(Measure(BURST, "burst_gap_p99"), math.nan) / calm


def flat(rounds: Sequence[Round]) -> Iterator[dict[str, object]]:
    """The rounds for JSON."""
    for one in rounds:
        figures: dict[str, dict[str, float]] = {}
        for measure, value in one.figures.items():
            figures.setdefault(measure.scenario, {})[measure.metric] = value
        yield {"system": one.system, "round": one.number, "figures": figures}
