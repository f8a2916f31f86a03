"""`chiasm demo`: the whole system answers questions about shipped pictures, in two ways."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from chiasm.cli.dialogue import http_part
from chiasm.cli.plan import Plan
from chiasm.cli.samples import Sample, sample_questions
from chiasm.cli.up import run_system, say, since_start, wanted_of
from chiasm.client import AsyncClient
from chiasm.conversation import Embedding

_MAX_TOKENS = 32
_STAGES = ("queue", "fetch", "encode", "transfer", "prefill", "decode", "total")


@dataclass(frozen=True)
class Told:
    """One answer: its text, the path of the picture, and the milliseconds of each stage."""

    sample: Sample
    way: str
    text: str
    path: str
    stages: tuple[float, ...]


def run(options: argparse.Namespace) -> int:
    """0 if both ways agree on every question, else 1."""
    wanted = wanted_of(options)
    return run_system(wanted, options, partial(_ask_all, model=wanted.model_id))


async def _ask_all(plan: Plan, *, model: str) -> int:
    told: list[Told] = []
    first = 0.0
    async with (
        # A tenant of its own, so that this embedding is not the one the raw picture left behind.
        AsyncClient(encoder=plan.encoders[0], timeout=60, tenant="demo") as encoder,
        openai.AsyncOpenAI(
            base_url=f"{plan.url}/v1",
            api_key="none",
            max_retries=0,
            # No proxy of the environment must stand between parts of one machine.
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as http,
    ):
        for sample in _one_a_picture(sample_questions()):
            told.append(await _ask(http, model, sample, "picture", sample.picture))
            first = first or since_start()
            embedding = await encoder.encode(sample.picture)
            told.append(await _ask(http, model, sample, "embedding", embedding))
    Console().print(_answers(told), _stage_times(told))
    return _verdict(told, first)


async def _ask(
    http: openai.AsyncOpenAI, model: str, sample: Sample, way: str, picture: Path | Embedding
) -> Told:
    content: Any = [http_part(picture), http_part(sample.question)]
    answer = await http.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=_MAX_TOKENS,
    )
    trace: Any = (answer.model_extra or {})["chiasm"]
    text = answer.choices[0].message.content or ""
    stages = tuple(float(trace["timings"][f"{stage}_ms"]) for stage in _STAGES)
    return Told(sample, way, text, _path(trace["images"][0]), stages)


def _path(image: dict[str, Any]) -> str:
    if image["source"] == "caller":
        return "gateway > LLM"
    if image["source"] == "remote":
        return f"gateway > LLM > {image['encoder']}"
    return f"gateway > LLM ({image['source']})"


def _one_a_picture(samples: Sequence[Sample]) -> list[Sample]:
    return list({sample.picture: sample for sample in reversed(samples)}.values())[::-1]


def _answers(told: Sequence[Told]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("question", "sent as", "answer", "path"):
        table.add_column(name)
    for place, one in enumerate(told):
        second = place % 2 == 1
        label = one.sample.question if second else f"[bold]{one.sample.picture.name}"
        table.add_row(label, one.way, one.text, one.path, end_section=second)
    return table


def _stage_times(told: Sequence[Told]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("milliseconds", no_wrap=True)
    for stage in _STAGES:
        table.add_column(stage, justify="right")
    for one in told:
        stages = (f"{value:.1f}" for value in one.stages)
        table.add_row(f"{one.sample.picture.stem}, {one.way}", *stages)
    return table


def _verdict(told: Sequence[Told], first: float) -> int:
    pairs = list(zip(told[::2], told[1::2], strict=True))
    agreed = sum(raw.text == embedding.text for raw, embedding in pairs)
    right = sum(one.text == one.sample.answer for one in told)
    say(f"Both ways agree on {agreed} of {len(pairs)} questions.")
    say(f"{right} of {len(told)} answers are right.")
    say(f"From start to the first answer: {first:.1f} s.")
    return 0 if agreed == len(pairs) else 1
