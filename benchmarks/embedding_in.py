"""`python -m benchmarks.embedding_in`: an embedding in a request's JSON, from body to tensor.

Prints, for each container, how long the gateway takes from the bytes of the body to a tensor ready
for the LLM service, how long other requests stand still meanwhile (the longest time between two
turns of the event loop, less what was slept), and the copies that it makes (the peak of memory
allocated on the way, in multiples of the tensor, the body not counted). The row "parsed whole" is
the same request when the JSON parser makes a text of the embedding. With `--vllm-python`, vLLM's
loader (base64, then torch.load with weights_only) runs on the same file in its own interpreter,
against the same steps here. Medians of many runs.
"""

import argparse
import asyncio
import base64
import io
import json
import statistics
import subprocess
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import safetensors.torch
import torch

from chiasm import wire
from chiasm.v1 import image_pb2, llm_service_pb2
from gateway.containers import decode_base64, read_embedding
from gateway.openai.parse import Parsed, parse_body, parse_chat
from gateway.openai.translate import Asked, translate
from gateway.settings import PictureLimits

WIDTH: Final = 4096
TICK_SECONDS: Final = 0.0005
LIMITS: Final = PictureLimits(8, 20 << 20, 64 << 20)
CARD: Final = llm_service_pb2.LlmServiceGetModelResponse(
    encoder_identity=image_pb2.EncoderIdentity(width=WIDTH), max_image_count=8
)
VLLM_LOADER: Final = """
import io, statistics, sys, time
import pybase64, torch
text = open(sys.argv[1]).read()
times = []
for _ in range(int(sys.argv[2])):
    began = time.perf_counter()
    tensor = torch.load(io.BytesIO(pybase64.b64decode(text, validate=True)), weights_only=True)
    times.append(time.perf_counter() - began)
    assert tensor.shape[-1] == 4096
print(statistics.median(times))
"""
Work = Callable[[bytearray], Awaitable[Asked]]


async def ours(body: bytearray) -> Asked:
    return await translate(await parse_body(body), CARD, LIMITS)


async def parsed_whole(body: bytearray) -> Asked:
    return await translate(Parsed(parse_chat(body), {}), CARD, LIMITS)


def files_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The request's `image_embeds` in each form."""
    torch_file, npy_file = io.BytesIO(), io.BytesIO()
    torch.save(tensor, torch_file)
    np.save(npy_file, tensor.numpy())
    raw = _b64(tensor.numpy().tobytes())
    return {
        "torch.save": _b64(torch_file.getvalue()),
        ".npy": _b64(npy_file.getvalue()),
        "safetensors": _b64(safetensors.torch.save({"x": tensor})),
        "raw": {"data": raw, "dtype": "float32", "shape": list(tensor.shape)},
    }


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def body_of(embeds: Any) -> bytes:
    part = {"type": "image_embeds", "image_embeds": embeds}
    message = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}
    return json.dumps({"model": "m", "messages": [message]}).encode()


async def _longest_gap(gaps: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(TICK_SECONDS)
        gaps.append(time.perf_counter() - began - TICK_SECONDS)


async def one_run(work: Work | None, body: bytes) -> tuple[float, float]:
    """Seconds that `work` took, and the longest gap of the event loop; idle without `work`."""
    gaps: list[float] = []
    ticking = asyncio.create_task(_longest_gap(gaps))
    given = bytearray(body)
    await asyncio.sleep(10 * TICK_SECONDS)
    gaps.clear()
    began = time.perf_counter()
    if work is None:
        await asyncio.sleep(0.02)
    else:
        await work(given)
    spent = time.perf_counter() - began
    await asyncio.sleep(2 * TICK_SECONDS)  # a gap that the work caused ends after it
    ticking.cancel()
    with suppress(asyncio.CancelledError):
        await ticking
    return spent, max(gaps)


def measure(work: Work | None, body: bytes, runs: int) -> tuple[float, float, float]:
    """Median seconds, median and greatest of the longest gaps."""
    asyncio.run(one_run(work, body))
    spent, gaps = zip(*(asyncio.run(one_run(work, body)) for _ in range(runs)), strict=True)
    return statistics.median(spent), statistics.median(gaps), max(gaps)


def copies(work: Work, body: bytes, tensor_bytes: int) -> float:
    given = bytearray(body)
    tracemalloc.start()
    asyncio.run(_hold(work, given))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / tensor_bytes


async def _hold(work: Work, body: bytearray) -> None:
    await work(body)


def loader_seconds(text: str, limit: int, runs: int) -> float:
    """The gateway's base64 and torch readers alone."""
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        read_embedding(decode_base64(text, limit_bytes=2 * limit), limit_bytes=limit)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def vllm_seconds(python: str, text: str, runs: int) -> float:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "embedding.b64"
        path.write_text(text)
        command = [python, "-c", VLLM_LOADER, str(path), str(runs)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def serialise_seconds(body: bytes, runs: int) -> float:
    asked = asyncio.run(_asked(body))
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        wire.serialize(asked.wired)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


async def _asked(body: bytes) -> Asked:
    return await ours(bytearray(body))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--vllm-python", help="interpreter of an environment that holds vLLM")
    asked = parser.parse_args()
    torch.manual_seed(0)
    tensor = torch.randn(asked.megabytes * (1 << 20) // (4 * WIDTH), WIDTH)
    size, megabytes = tensor.nbytes, tensor.nbytes / 1e6
    forms = files_of(tensor)
    print("| form | way | ms | ms/MB | stall ms | worst stall ms | copies |")
    print("|---|---|---|---|---|---|---|")
    _, idle, worst_idle = measure(None, b"", asked.runs)
    print(f"| - | idle | - | - | {idle * 1000:.1f} | {worst_idle * 1000:.1f} | - |")
    ways: list[tuple[str, str, Work]] = [(form, "ours", ours) for form in forms]
    ways.append(("torch.save", "parsed whole", parsed_whole))
    for form, name, work in ways:
        body = body_of(forms[form])
        spent, stall, worst = measure(work, body, asked.runs)
        held = copies(work, body, size)
        print(
            f"| {form} | {name} | {spent * 1000:.1f} | {spent * 1000 / megabytes:.2f} "
            f"| {stall * 1000:.1f} | {worst * 1000:.1f} | {held:.2f} |"
        )
    sent = serialise_seconds(body_of(forms["raw"]), asked.runs)
    print(f"\nInto the message for the LLM service, one copy: {sent * 1000:.1f} ms.")
    text = forms["torch.save"]
    here = loader_seconds(text, 64 << 20, asked.runs)
    print(f"base64 and torch file alone: {here * 1000 / megabytes:.3f} ms/MB here", end="")
    if asked.vllm_python:
        peer = vllm_seconds(asked.vllm_python, text, asked.runs)
        print(f", {peer * 1000 / megabytes:.3f} in vLLM's loader: {here / peer:.2f} of it", end="")
    print(".")


if __name__ == "__main__":
    main()
