"""`python -m benchmarks.encoder COMMAND`: the encoder service against plain loops and plain queues.

throughput  pictures/s of a real encoder process over gRPC, with so many pictures in flight, and of
            a loop over transformers' own model and image processor in a process of its own, one
            picture and eight at a time. Both read JPEG files and use the same cores, type and
            checkpoint; no two pictures are alike. In rounds, whose order alternates; medians.
order       how long small pictures wait while large ones arrive, by the order of work: a
            simulation with the service's own line.

Build a checkpoint first: `python -m benchmarks.engine checkpoint --out DIR`.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.encoder_order import order
from benchmarks.engine_compare import to_stderr
from chiasm.rpc.channel import EncoderMethods, open_channel
from chiasm.v1 import encoder_service_pb2 as pb
from chiasm.v1 import image_pb2
from chiasm.wire import Buffers, Wired

ROOT: Final = Path(__file__).parents[1]
BATCHES: Final = (1, 8)
STAGES: Final = ("preprocess", "queue", "forward", "reply")
JPEG_QUALITY: Final = 90
# A photograph's JPEG file of these settings has about as many bytes a pixel.
COARSE_SIDE, DETAIL = 24, 6


@dataclass(frozen=True)
class Plan:
    """What is measured; `size` is width and height of the files."""

    model: Path
    rounds: int
    in_flight: tuple[int, ...]
    pictures: int
    size: tuple[int, int]
    dtype: str
    threads: int
    encoder_flags: tuple[str, ...]


@dataclass(frozen=True)
class Speed:
    """Of one cell of one round; `stages`: mean milliseconds that one picture spent in each."""

    pictures_per_second: float
    stages: Mapping[str, float]


Speeds = dict[str, Speed]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], None] = options.run
    try:
        run(options)
    except KeyboardInterrupt:
        return 130
    return 0


# ---- pictures


class Pictures:
    """JPEG files, each made once and asked for once."""

    def __init__(self, size: tuple[int, int]) -> None:
        self._stream = np.random.default_rng(0)
        self._size = size

    def some(self, count: int) -> list[bytes]:
        return [self._one() for _ in range(count)]

    def _one(self) -> bytes:
        coarse = self._stream.integers(0, 256, (COARSE_SIDE, COARSE_SIDE, 3), np.uint8)
        blown = Image.fromarray(coarse).resize(self._size, Image.Resampling.BICUBIC)
        smooth = np.asarray(blown, np.int16)
        detail = self._stream.integers(-DETAIL, DETAIL + 1, (*smooth.shape[:2], 1), np.int16)
        file = BytesIO()
        pixels = np.clip(smooth + detail, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(file, "JPEG", quality=JPEG_QUALITY)
        return file.getvalue()


# ---- the service


@contextmanager
def _process(plan: Plan, module: str, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A Python process that has said that it is ready, by a line; ended at the end."""
    threads = {"OMP_NUM_THREADS": str(plan.threads), "HF_HUB_OFFLINE": "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", module, *words, "--model", str(plan.model), "--dtype", plan.dtype],
        cwd=ROOT, env={**os.environ, **threads}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield child
    finally:
        child.terminate()
        child.wait(60)


def _line_of(child: "subprocess.Popen[bytes]") -> Any:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise SystemExit("a process ended early; its reason is above")
    return json.loads(line)


class Service:
    """An encoder process, asked over gRPC in closed loops."""

    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        ports = _line_of(child)
        self._target = f"127.0.0.1:{ports['port']}"
        self._figures = f"http://127.0.0.1:{ports['metrics_port']}/metrics"

    def speed(self, pictures: list[bytes], in_flight: int) -> Speed:
        """With `in_flight` calls at any time, as long as there are pictures."""
        before = self._stages()
        seconds = asyncio.run(self._ask(pictures, in_flight))
        after = self._stages()
        means = {stage: (after[stage] - before.get(stage, 0)) / len(pictures) for stage in STAGES}
        return Speed(len(pictures) / seconds, means)

    async def _ask(self, pictures: list[bytes], in_flight: int) -> float:
        left = list(pictures)

        async def ask() -> None:
            while left:
                await EncoderMethods.ENCODE_IMAGE.call(channel, _request(left.pop()))

        async with open_channel(self._target) as channel:
            began = time.monotonic()
            await asyncio.gather(*(ask() for _ in range(in_flight)))
            return time.monotonic() - began

    def _stages(self) -> dict[str, float]:
        """Milliseconds that all pictures so far spent in each stage."""
        with urllib.request.urlopen(self._figures) as reply:
            text = reply.read().decode()
        return {
            sample.labels["stage"]: sample.value * 1000
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "chiasm_encoder_stage_seconds_sum"
        }


def _request(picture: bytes) -> Wired[pb.EncodeImageRequest]:
    buffers = Buffers()
    image = image_pb2.Image(data=buffers.put(picture))
    return Wired(pb.EncodeImageRequest(image=image), buffers)


# ---- the plain loop


class Loop:
    """The loop over transformers in a process of its own."""

    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self._child = child
        _line_of(child)

    def speed(self, pictures: list[bytes], batch: int) -> Speed:
        """With `batch` pictures in one forward."""
        assert self._child.stdin is not None
        asked = {"batch": batch, "pictures": [b64encode(one).decode() for one in pictures]}
        self._child.stdin.write(json.dumps(asked).encode() + b"\n")
        self._child.stdin.flush()
        return Speed(**_line_of(self._child))


def _plain(options: argparse.Namespace) -> None:
    # torch and transformers take seconds to load, which the other commands do not need.
    import torch
    from transformers import AutoImageProcessor, LlavaForConditionalGeneration

    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = LlavaForConditionalGeneration.from_pretrained(options.model, dtype=dtype)
    processors: Any = AutoImageProcessor
    processor = processors.from_pretrained(options.model)

    def encode(batch: Sequence[bytes]) -> tuple[float, float]:
        began = time.monotonic()
        images = [Image.open(BytesIO(file)).convert("RGB") for file in batch]
        pixels = processor(images=images, return_tensors="pt")["pixel_values"]
        prepared = time.monotonic()
        model.get_image_features(pixels.to(model.dtype))
        return prepared - began, time.monotonic() - prepared

    print("{}", flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            asked = json.loads(line)
            batch, files = asked["batch"], [b64decode(one) for one in asked["pictures"]]
            spent = [encode(files[at : at + batch]) for at in range(0, len(files), batch)]
            seconds = [sum(times) for times in zip(*spent, strict=True)]
            stages = {
                name: 1000 * one / len(files)
                for name, one in zip(("preprocess", "forward"), seconds, strict=True)
            }
            print(json.dumps(asdict(Speed(len(files) / sum(seconds), stages))), flush=True)


# ---- rounds


def _throughput(options: argparse.Namespace) -> None:
    plan = _plan(options)
    rounds = list(measure(plan))
    if options.json:
        record = [{cell: asdict(speed) for cell, speed in one.items()} for one in rounds]
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print("\n".join(table(rounds)))


def measure(plan: Plan) -> Iterator[Speeds]:
    """Both processes live all the time, one of them at work; the order of the cells alternates."""
    encoder = (
        "--port",
        "0",
        "--metrics-port",
        "0",
        "--log-level",
        "warning",
        "--drain-seconds",
        "0",
        "--torch-threads",
        str(plan.threads),
        *plan.encoder_flags,
    )
    with (
        _process(plan, "encoder_service", *encoder) as service,
        _process(plan, "benchmarks.encoder", "plain", "--threads", str(plan.threads)) as loop,
    ):
        chiasm, plain = Service(service), Loop(loop)
        cells = {
            f"chiasm, {count} in flight": partial(chiasm.speed, in_flight=count)
            for count in plan.in_flight
        }
        cells |= {
            f"transformers, batch {count}": partial(plain.speed, batch=count) for count in BATCHES
        }
        pictures = Pictures(plan.size)
        for measured in cells.values():
            measured(pictures.some(BATCHES[-1]))
        for number in range(plan.rounds):
            speeds = {}
            for cell in cells if number % 2 == 0 else reversed(cells):
                speeds[cell] = cells[cell](pictures.some(plan.pictures))
                to_stderr(
                    f"round {number + 1} of {plan.rounds}: {cell}: "
                    f"{speeds[cell].pictures_per_second:.2f} pictures/s"
                )
            yield {cell: speeds[cell] for cell in cells}


def table(rounds: Sequence[Speeds]) -> Iterator[str]:
    """Markdown: medians of the rounds, and the ratio to the better loop of the same round."""
    yield (
        "| way | pictures/s | of the better loop | "
        + " | ".join(f"{stage}, ms" for stage in STAGES)
        + " |"
    )
    yield "|---|" + "---:|" * (2 + len(STAGES))
    for cell in rounds[0]:
        ratio = statistics.median(one[cell].pictures_per_second / _better(one) for one in rounds)
        yield _row(cell, [one[cell] for one in rounds], ratio)


def _better(speeds: Speeds) -> float:
    return max(speeds[f"transformers, batch {batch}"].pictures_per_second for batch in BATCHES)


def _row(cell: str, speeds: Sequence[Speed], ratio: float) -> str:
    speed = statistics.median(one.pictures_per_second for one in speeds)
    stages = (
        f"{statistics.median(one.stages[stage] for one in speeds):.1f}"
        if stage in speeds[0].stages
        else "-"
        for stage in STAGES
    )
    return f"| {cell} | {speed:.2f} | {ratio:.2f} | {' | '.join(stages)} |"


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(
        model=options.model,
        rounds=options.rounds,
        in_flight=options.in_flight,
        pictures=options.pictures,
        size=options.size,
        dtype=options.dtype,
        threads=options.threads,
        encoder_flags=tuple(options.encoder_flags.split()),
    )


def _parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "benchmarks.encoder", description=__doc__, formatter_class=shape
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _throughput_options(commands.add_parser("throughput", help="pictures/s against a plain loop"))
    ordered = commands.add_parser("order", help="waits by the order of work, simulated")
    ordered.add_argument("--seeds", type=int, default=5)
    ordered.add_argument("--seconds", type=float, default=2000, help="simulated")
    ordered.set_defaults(run=lambda options: order(options.seeds, options.seconds))
    # For `throughput`, which starts it.
    plain = commands.add_parser("plain")
    _shared_options(plain)
    plain.set_defaults(run=_plain)
    return parser


def _shared_options(parser: argparse.ArgumentParser) -> None:
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--model", type=Path, required=True, help="LLaVA-shaped checkpoint")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=cores, help="of torch, on both sides")


def _throughput_options(parser: argparse.ArgumentParser) -> None:
    _shared_options(parser)
    numbers = partial(_numbers, separator=",")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", type=numbers, default=(1, 8, 32), metavar="N,N,...")
    parser.add_argument("--pictures", type=int, default=48, help="of each cell")
    size = partial(_numbers, separator="x")
    parser.add_argument("--size", type=size, default=(800, 600), metavar="WIDTHxHEIGHT")
    parser.add_argument("--encoder-flags", default="", help="further ones, in one word")
    parser.add_argument("--json", type=Path, help="file for the figures of all rounds")
    parser.set_defaults(run=_throughput)


def _numbers(text: str, separator: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(separator))


if __name__ == "__main__":
    raise SystemExit(main())
