"""`python -m benchmarks.transfer`: embeddings from an encoder process to an LLM process, loopback.

The encoder process is the real service with a tower that gives features of the wanted size at once
(after the first time they come from its cache); the LLM process asks it as an LLM service does and
ends with checked rows in a tensor. Beside it in the same run, round by round: the same bytes by
bare gRPC, unary and as a stream (nothing of ours: what the library itself can do), over a raw TCP
socket into a buffer that is used again, through a segment of memory that both processes hold (the
sender copies in, a small bare call says so, the receiver copies out), and by memcpy. Rates are of
the tensor's bytes, in MB/s (a million bytes), medians of the rounds. "checks" is the share of the
time in which the receiver checks type, shape and every value. Memory is the most that each process
held above its rest, in multiples of the tensors, the sender's own included. The last table is the
time of small replies, one after the other, while a large one is on its way.
"""

import argparse
import asyncio
import hashlib
import io
import mmap
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc.aio
import numpy as np
import PIL.Image
import torch
import uvloop

from chiasm import memory, telemetry, tensors, torch_tensors, wire
from chiasm.models.contract import (
    DEFAULT_OPTIONS,
    Grid,
    ImageContract,
    ImageForm,
    PixelOptions,
    Size,
)
from chiasm.models.identity import EncoderIdentity
from chiasm.models.vision import ImageFeatures, PixelInputs
from chiasm.rpc import limits
from chiasm.rpc.embedding_stream import chunk_bytes
from chiasm.v1 import image_pb2
from encoder_service.app import running
from encoder_service.settings import EncoderSettings
from llm_service.embeddings import check_embedding
from llm_service.request import CallerEmbedding, RawImage
from llm_service.vision.encoder import Encoder
from llm_service.vision.encoder import EncoderSettings as AskSettings
from llm_service.vision.source import Asked, Fetched, Sought

# Elements a row, float32: 64 rows are 1 MiB.
WIDTH: Final = 4096
ROW_BYTES: Final = 4 * WIDTH
MODEL: Final = Path(__file__).parents[1] / "demo_model" / "checkpoint"
BARE_OPTIONS: Final = [
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
]
IDENTITY: Final = EncoderIdentity("wide", "0" * 64, "0" * 64, "float32", WIDTH)


@dataclass(frozen=True)
class RowPerColumn:
    """A picture has as many rows as it is wide."""

    def of_size(self, size: Size, options: PixelOptions) -> ImageForm:
        return ImageForm(size[1], (size[1],))

    def of_rows(self, row_count: int, grid_thw: Grid | None, size: Size | None) -> ImageForm:
        return ImageForm(row_count, (row_count,))

    def processor_options(self, options: PixelOptions) -> dict[str, Any]:
        return {}


CONTRACT: Final = ImageContract(IDENTITY, WIDTH, 0, RowPerColumn())


class WideTower:
    """A tower that only makes features of the right size."""

    contract = CONTRACT

    def preprocess(self, image: PIL.Image.Image, options: PixelOptions) -> PixelInputs:
        return PixelInputs({}, 1, image.width, None, (image.height, image.width))

    def encode(self, batch: Sequence[PixelInputs], *, bit_exact: bool) -> list[ImageFeatures]:
        return [
            ImageFeatures(torch.rand(one.image_size[1], WIDTH), (), one.image_size[1], None,
                          one.image_size)
            for one in batch
        ]  # fmt: skip


# ---- the encoder process


async def serve_all() -> None:
    """Serves an encoder, bare gRPC and a raw socket; obeys one command a line of standard input."""
    block = bytearray(torch.rand(LARGEST // 4).numpy().data)
    segment = Segment(os.memfd_create("transfer"))
    settings = EncoderSettings(model=MODEL, port=0, torch_threads=1, cache_bytes=8 << 30,
                               log_level="error")  # fmt: skip
    async with AsyncExitStack() as stack:
        encoder = await stack.enter_async_context(running(settings, tower=WideTower()))
        bare_port = await _serve_bare(stack, block, segment)
        raw = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=_serve_raw, args=(raw, block), daemon=True).start()
        print(encoder.port, bare_port, raw.getsockname()[1], segment.descriptor, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(_rest() if line.strip() == "rest" else _peak(), flush=True)


class Segment:
    """Memory that both processes hold, with room for each of the calls in flight."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        os.ftruncate(descriptor, MOST_IN_FLIGHT * LARGEST)
        self._view = memoryview(mmap.mmap(descriptor, MOST_IN_FLIGHT * LARGEST))

    def place(self, at: int, size: int) -> memoryview:
        return self._view[at * LARGEST : at * LARGEST + size]


async def _serve_bare(stack: AsyncExitStack, block: bytearray, segment: Segment) -> int:
    view = memoryview(block)

    async def answer(request: bytes, context: Any) -> bytes:
        return bytes(view[: int(request)])

    async def stream(request: bytes, context: Any) -> None:
        size = int(request)
        step = chunk_bytes(size)
        for start in range(0, size, step):
            await context.write(bytes(view[start : min(size, start + step)]))

    async def share(request: bytes, context: Any) -> bytes:
        at, size = map(int, request.split())
        segment.place(at, size)[:] = view[:size]
        return b""

    server = grpc.aio.server(options=BARE_OPTIONS)
    handlers: dict[str, Any] = {
        "Bytes": grpc.unary_unary_rpc_method_handler(answer),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
        "Share": grpc.unary_unary_rpc_method_handler(share),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stack.push_async_callback(server.stop, None)
    return port


def _serve_raw(listening: socket.socket, block: bytearray) -> None:
    def answer(connection: socket.socket) -> None:
        with connection:
            while asked := connection.recv(8):
                connection.sendall(memoryview(block)[: int.from_bytes(asked, "little")])

    while True:
        threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()


def _rest() -> int:
    """Gives back free memory, forgets the peak; returns the bytes now resident."""
    memory.release()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


# ---- the LLM process


@dataclass(frozen=True)
class Step:
    """One size and one number of calls in flight."""

    megabytes: int
    in_flight: int

    @property
    def rows(self) -> int:
        return max(1, self.megabytes * 1_000_000 // ROW_BYTES)

    @property
    def byte_count(self) -> int:
        return self.rows * ROW_BYTES


MOST_IN_FLIGHT: Final = 8
STEPS: Final = tuple(Step(size, many) for size in (1, 5, 40, 120) for many in (1, MOST_IN_FLIGHT))
LARGEST: Final = max(step.byte_count for step in STEPS)


class Peers:
    """The encoder process and the ways to ask it."""

    def __init__(self, unary_bytes: int) -> None:
        self._unary_bytes = unary_bytes
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transfer", "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdout is not None
        encoder, bare, raw_port, segment = map(int, self._child.stdout.readline().split())
        self._segment = Segment(os.open(f"/proc/{self._child.pid}/fd/{segment}", os.O_RDWR))
        self.target = f"127.0.0.1:{encoder}"
        self.encoder = self.asking(2)
        self._bare = grpc.aio.insecure_channel(f"127.0.0.1:{bare}", options=BARE_OPTIONS)
        self._threads = ThreadPoolExecutor(MOST_IN_FLIGHT)
        self._sockets = [
            socket.create_connection(("127.0.0.1", raw_port)) for _ in range(MOST_IN_FLIGHT)
        ]
        self._buffers = [bytearray(LARGEST) for _ in range(MOST_IN_FLIGHT)]

    def asking(self, connections: int, unary_bytes: int | None = None) -> Encoder:
        """The encoder as an LLM service asks it, over so many connections."""
        most = self._unary_bytes if unary_bytes is None else unary_bytes
        settings = AskSettings(60, 60, connections, most)
        return Encoder(
            self.target, CONTRACT, settings, lambda _: None, lambda: 60.0, lambda _: False
        )

    async def chiasm(self, step: Step, at: int) -> Fetched:
        fetched = await self.encoder.ask(sought(step.rows))
        assert len(fetched.rows.rows) == step.rows
        return fetched

    async def bare(self, step: Step, at: int) -> None:
        call: Any = self._bare.unary_unary("/bare/Bytes", None, None)
        assert len(await call(str(step.byte_count).encode())) == step.byte_count

    async def bare_stream(self, step: Step, at: int) -> None:
        call: Any = self._bare.unary_stream("/bare/Stream", None, None)
        rest = _fresh(step.byte_count)
        async for chunk in call(str(step.byte_count).encode()):
            rest[: len(chunk)] = chunk
            rest = rest[len(chunk) :]
        assert not rest

    async def raw(self, step: Step, at: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._read_raw, step.byte_count, at)

    async def shared(self, step: Step, at: int) -> None:
        call: Any = self._bare.unary_unary("/bare/Share", None, None)
        await call(f"{at} {step.byte_count}".encode())
        _fresh(step.byte_count)[:] = self._segment.place(at, step.byte_count)

    async def copy(self, step: Step, at: int) -> None:
        _fresh(step.byte_count)[:] = memoryview(self._buffers[at])[: step.byte_count]

    def told(self, command: str) -> int:
        """What the encoder process answers to `rest` or `peak`."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{command}\n")
        self._child.stdin.flush()
        return int(self._child.stdout.readline())

    async def close(self) -> None:
        await self.encoder.close()
        await self._bare.close()
        self._child.kill()

    def _read_raw(self, size: int, at: int) -> None:
        connection, view = self._sockets[at], memoryview(self._buffers[at])[:size]
        connection.sendall(size.to_bytes(8, "little"))
        while view:
            view = view[connection.recv_into(view) :]


def _fresh(size: int) -> memoryview:
    return wire.as_bytes_view(np.empty(size, np.uint8))


def sought(rows: int) -> Sought:
    """A picture with so many rows."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (rows, 1)).save(file, "PNG")
    data = file.getvalue()
    return Sought(
        RawImage(memoryview(data), DEFAULT_OPTIONS),
        hashlib.sha256(data).digest(),
        ImageForm(rows, (rows,)),
        Asked("", "transfer", time.monotonic() + 60),
    )


Way = Callable[[Step, int], Awaitable[object]]


async def seconds_of(way: Way, step: Step) -> float:
    """Wall time of all of the step's calls at once. What they give is held until the last ends."""
    began = time.perf_counter()
    held = await asyncio.gather(*(way(step, at) for at in range(step.in_flight)))
    seconds = time.perf_counter() - began
    assert len(held) == step.in_flight
    return seconds


async def rates(peers: Peers, step: Step, rounds: int) -> dict[str, float]:
    """Median MB/s by way."""
    ways: dict[str, Way] = {
        "Chiasm": peers.chiasm, "bare": peers.bare, "stream": peers.bare_stream, "raw": peers.raw,
        "shared": peers.shared, "memcpy": peers.copy,
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            taken = await seconds_of(way, step)
            if number:  # the first round warms up
                seconds[name].append(taken)
    total = step.in_flight * step.byte_count / 1e6
    return {name: total / statistics.median(taken) for name, taken in seconds.items()}


def checking_share(step: Step, rate: float) -> float:
    """The share of a transfer's time that the check of the rows takes."""
    buffers = wire.Buffers()
    array = torch_tensors.from_torch(torch.rand(step.rows, WIDTH))
    message = image_pb2.ImageEmbedding(features=tensors.to_wire(array, buffers))
    embedding = CallerEmbedding(message, buffers.get(message.features.data), ())
    times = []
    for _ in range(5):
        began = time.perf_counter()
        check_embedding(embedding, CONTRACT)
        times.append(time.perf_counter() - began)
    return statistics.median(times) / (step.byte_count / 1e6 / rate)


async def peaks(peers: Peers, step: Step) -> tuple[float, float]:
    """Most memory of the encoder's and of this process, in multiples of the tensors."""
    total = step.in_flight * step.byte_count
    # The turn of the loop in which something was awaited still holds its result.
    await asyncio.sleep(0)
    theirs, ours = peers.told("rest"), _rest()
    await seconds_of(peers.chiasm, step)
    own = step.byte_count  # the features in the encoder's cache
    return (peers.told("peak") - theirs + own) / total, (_peak() - ours) / total


async def small_beside_large(peers: Peers, connections: int, unary: bool, rounds: int) -> str:
    """Times of 64 kB replies while one of 120 MB comes, as columns of the table."""
    encoder = peers.asking(connections, LARGEST if unary else 0)
    large, small = sought(LARGEST // ROW_BYTES), sought(4)
    times = []
    try:
        await encoder.ask(large)
        for _ in range(rounds):
            coming = asyncio.ensure_future(encoder.ask(large))
            await asyncio.sleep(0.01)
            while not coming.done():
                began = time.perf_counter()
                await encoder.ask(small)
                times.append(1000 * (time.perf_counter() - began))
            await coming
    finally:
        await encoder.close()
    return f"{statistics.median(times):.1f} | {max(times):.0f} | {len(times)}"


async def measure(rounds: int, unary_bytes: int) -> None:
    """Prints the tables."""
    peers = Peers(unary_bytes)
    try:
        await print_rates(peers, rounds)
        print("\n| large reply | connections | median ms of small | worst | count |")
        print("|---|---:|---:|---:|---:|")
        for unary in (True, False):
            for connections in (1, 2, 4):
                found = await small_beside_large(peers, connections, unary, rounds)
                print(f"| {'unary' if unary else 'chunks'} | {connections} | {found} |", flush=True)
    finally:
        await peers.close()


async def print_rates(peers: Peers, rounds: int) -> None:
    """Prints the table of rates and memory."""
    print("| MB | in flight | **Chiasm** | bare gRPC | its streams | raw socket | shared memory "
          "| memcpy | of raw | of bare | checks | encoder's memory | LLM's memory |")  # fmt: skip
    print("|" + 13 * "---:|")
    for step in STEPS:
        found = await rates(peers, step, rounds)
        share = checking_share(step, found["Chiasm"])
        theirs, ours = await peaks(peers, step)
        print(
            f"| {step.megabytes} | {step.in_flight} | "
            + " | ".join(f"{rate:,.0f}" for rate in found.values())
            + f" | {found['Chiasm'] / found['raw']:.2f}"
            + f" | {found['Chiasm'] / max(found['bare'], found['stream']):.2f} | {share:.0%} "
            f"| {theirs:.2f} | {ours:.2f} |",
            flush=True,
        )


def main() -> None:
    """Measures, or serves for the process that measures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("role", nargs="?", choices=["measure", "serve"], default="measure")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--unary-bytes",
        type=int,
        default=limits.STREAMED_ABOVE_BYTES,
        help="above so many bytes in chunks",
    )
    asked = parser.parse_args()
    memory.tune()
    telemetry.start_logging("transfer", "console", "error")
    torch.set_num_threads(1)
    uvloop.run(serve_all() if asked.role == "serve" else measure(asked.rounds, asked.unary_bytes))


if __name__ == "__main__":
    main()
