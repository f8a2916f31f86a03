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
import tempfile
import time
import urllib.request
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


def write_pictures(directory: Path, plan: Plan, seed: int) -> list[Path]:
    """JPEG files that no other seed gives; the larger cells need no more than the first does."""
    stream = np.random.default_rng(seed)
    count = plan.pictures * len(plan.in_flight) + max(plan.in_flight)
    files = []
    for number in range(count):
        path = directory / f"{seed}-{number}.jpg"
        path.write_bytes(_jpeg(stream, plan.size))
        files.append(path)
    return files


def _jpeg(stream: np.random.Generator, size: tuple[int, int]) -> bytes:
    coarse = stream.integers(0, 256, (COARSE_SIDE, COARSE_SIDE, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), np.int16)
    detail = stream.integers(-DETAIL, DETAIL + 1, (size[1], size[0], 1), np.int16)
    file = BytesIO()
    pixels = np.clip(smooth + detail, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


# ---- the service


@contextmanager
def _encoder(plan: Plan) -> Iterator[Mapping[str, int]]:
    """A real encoder process; its ports."""
    command = [
        *(sys.executable, "-m", "encoder_service", "--model", str(plan.model)),
        *("--port", "0", "--metrics-port", "0", "--dtype", plan.dtype, "--log-level", "warning"),
        *("--torch-threads", str(plan.threads), "--drain-seconds", "0", *plan.encoder_flags),
    ]
    child = subprocess.Popen(
        command, cwd=ROOT, env=_environment(plan), stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        ready = child.stdout.readline()
        if not ready:
            raise SystemExit("the encoder did not start; its reason is above")
        yield json.loads(ready)
    finally:
        child.terminate()
        child.wait(60)


def _environment(plan: Plan) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(plan.threads), "HF_HUB_OFFLINE": "1"}


def measure_service(plan: Plan, files: Sequence[Path]) -> Speeds:
    """Closed loops: as many calls as are to be in flight, each with a picture of its own."""
    with _encoder(plan) as ports:
        return asyncio.run(_measure_service(plan, files, ports))


async def _measure_service(plan: Plan, files: Sequence[Path], ports: Mapping[str, int]) -> Speeds:
    speeds: Speeds = {}
    left = list(files)
    async with open_channel(f"127.0.0.1:{ports['port']}") as channel:

        async def ask_all(files: list[Path], in_flight: int) -> None:
            async def ask() -> None:
                while files:
                    await EncoderMethods.ENCODE_IMAGE.call(channel, _request(files.pop()))

            await asyncio.gather(*(ask() for _ in range(in_flight)))

        await ask_all([left.pop() for _ in range(max(plan.in_flight))], max(plan.in_flight))
        for in_flight in plan.in_flight:
            asked = [left.pop() for _ in range(plan.pictures)]
            before, began = _stages(ports["metrics_port"]), time.monotonic()
            await ask_all(asked, in_flight)
            seconds = time.monotonic() - began
            after = _stages(ports["metrics_port"])
            means = {stage: (after[stage] - before[stage]) / plan.pictures for stage in STAGES}
            speeds[f"{in_flight} in flight"] = Speed(plan.pictures / seconds, means)
            to_stderr(f"  {in_flight} in flight: {plan.pictures / seconds:.2f} pictures/s")
    return speeds


def _request(file: Path) -> Wired[pb.EncodeImageRequest]:
    buffers = Buffers()
    image = image_pb2.Image(data=buffers.put(file.read_bytes()))
    return Wired(pb.EncodeImageRequest(image=image), buffers)


def _stages(port: int) -> dict[str, float]:
    """Milliseconds that all pictures so far spent in each stage."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        text = reply.read().decode()
    return {
        sample.labels["stage"]: sample.value * 1000
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "chiasm_encoder_stage_seconds_sum"
    }


# ---- the plain loop


def measure_plain(plan: Plan, files: Sequence[Path]) -> Speeds:
    """The loop in a process of its own, once for each size of batch."""
    speeds: Speeds = {}
    for batch in BATCHES:
        told = subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.encoder", "plain", "--model", str(plan.model)),
                *("--dtype", plan.dtype, "--threads", str(plan.threads), "--batch", str(batch)),
            ],
            cwd=ROOT, env=_environment(plan), check=True, stdout=subprocess.PIPE, text=True,
            input="\n".join(map(str, files[: plan.pictures + BATCHES[-1]])),
        ).stdout  # fmt: skip
        speed = Speed(**json.loads(told))
        speeds[f"batch {batch}"] = speed
        to_stderr(f"  batch {batch}: {speed.pictures_per_second:.2f} pictures/s")
    return speeds


def _plain(options: argparse.Namespace) -> None:
    # torch and transformers take seconds to load, which the other commands do not need.
    import torch
    from transformers import AutoImageProcessor, LlavaForConditionalGeneration

    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = LlavaForConditionalGeneration.from_pretrained(options.model, dtype=dtype)
    processors: Any = AutoImageProcessor
    processor = processors.from_pretrained(options.model)
    files = sys.stdin.read().split("\n")
    preparing = computing = 0.0

    def encode(batch: Sequence[str]) -> None:
        nonlocal preparing, computing
        began = time.monotonic()
        images = [Image.open(file).convert("RGB") for file in batch]
        pixels = processor(images=images, return_tensors="pt")["pixel_values"]
        prepared = time.monotonic()
        model.get_image_features(pixels.to(model.dtype))
        preparing += prepared - began
        computing += time.monotonic() - prepared

    with torch.inference_mode():
        encode(files[: BATCHES[-1]])
        preparing = computing = 0.0
        rest = files[BATCHES[-1] :]
        for at in range(0, len(rest), options.batch):
            encode(rest[at : at + options.batch])
    stages = {"preprocess": 1000 * preparing / len(rest), "forward": 1000 * computing / len(rest)}
    print(json.dumps(asdict(Speed(len(rest) / (preparing + computing), stages))))


# ---- rounds


def _throughput(options: argparse.Namespace) -> None:
    plan = _plan(options)
    rounds = [measure_round(plan, number) for number in range(plan.rounds)]
    if options.json:
        record = [{cell: asdict(speed) for cell, speed in one.items()} for one in rounds]
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print("\n".join(table(rounds)))


def measure_round(plan: Plan, number: int) -> Speeds:
    """Both systems on the same files; who begins alternates."""
    to_stderr(f"round {number + 1} of {plan.rounds}")
    ways: list[Callable[[Plan, Sequence[Path]], Speeds]] = [measure_service, measure_plain]
    speeds: Speeds = {}
    with tempfile.TemporaryDirectory() as directory:
        files = write_pictures(Path(directory), plan, number)
        for way in ways if number % 2 == 0 else reversed(ways):
            speeds |= way(plan, files)
    return speeds


def table(rounds: Sequence[Speeds]) -> Iterator[str]:
    """Markdown: medians of the rounds, and the ratio to the better loop of the same round."""
    yield (
        "| way | pictures/s | of the better loop | "
        + " | ".join(f"{stage}, ms" for stage in STAGES)
        + " |"
    )
    yield "|---|" + "---:|" * (2 + len(STAGES))
    cells = sorted(rounds[0], key=lambda cell: (cell.startswith("batch"), _count_of(cell)))
    for cell in cells:
        ratio = statistics.median(one[cell].pictures_per_second / _better(one) for one in rounds)
        yield _row(cell, [one[cell] for one in rounds], ratio)


def _count_of(cell: str) -> int:
    return next(int(word) for word in cell.split() if word.isdigit())


def _better(speeds: Speeds) -> float:
    return max(speeds[f"batch {batch}"].pictures_per_second for batch in BATCHES)


def _row(cell: str, speeds: Sequence[Speed], ratio: float) -> str:
    way = f"transformers, {cell}" if cell.startswith("batch") else f"chiasm, {cell}"
    speed = statistics.median(one.pictures_per_second for one in speeds)
    stages = (
        f"{statistics.median(one.stages[stage] for one in speeds):.1f}"
        if stage in speeds[0].stages
        else "-"
        for stage in STAGES
    )
    return f"| {way} | {speed:.2f} | {ratio:.2f} | {' | '.join(stages)} |"


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
    plain.add_argument("--batch", type=int, required=True)
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
