"""`python -m benchmarks.tracing`: what traces cost a request.

Four whole systems of the demo model on one machine, asked in turn, one request at a time: without
traces; with them on and no trace sampled; with every trace sampled and sent to a collector (a real
gRPC server in this process); and the same with a collector that takes calls and never answers.
Times are medians of whole answers over HTTP. CPU is what all three processes of a system took, the
sending included, divided by the requests.

Then the call sites alone, in this process, with traces off.
"""

import argparse
import base64
import io
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import numpy as np
import PIL.Image
import psutil

from chiasm.tracing import names, spans
from chiasm.tracing.w3c import NO_TRACE
from tests.system.processes import DEMO_MODEL
from tests.system.three import Three, three
from tests.tracing.collector import collecting

KINDS: Final = ("text, 16 tokens", "new picture, 1 token")
_WARM_UP: Final = 20
_SITES: Final = 100_000
# Spans within a request with one picture, in all three processes.
_STAGES: Final = 4


@dataclass
class Arm:
    """One system and what its requests took.

    Attributes:
        seconds: of each answer, by kind.
        cpu: seconds of CPU, by kind.
    """

    name: str
    system: Three
    http: httpx.Client
    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    cpu: dict[str, float] = field(default_factory=dict)

    def used(self) -> float:
        """Seconds of CPU that the three processes have taken so far."""
        times = [psutil.Process(one.pid).cpu_times() for one in self.system.processes]
        return sum(one.user + one.system for one in times)

    def ask(self, body: dict[str, Any]) -> float:
        began = time.perf_counter()
        answer = self.http.post("/v1/chat/completions", json=body)
        seconds = time.perf_counter() - began
        answer.raise_for_status()
        return seconds


@contextmanager
def arms() -> Iterator[list[Arm]]:
    """The four systems, ready."""
    with ExitStack() as stack:
        taking, hanging = (stack.enter_context(collecting()) for _ in range(2))
        hanging.block()
        flags: dict[str, tuple[str, ...]] = {
            "off": (),
            "on, none sampled": ("--trace-endpoint", taking.endpoint, "--trace-ratio", "0"),
            "on, all sampled": ("--trace-endpoint", taking.endpoint),
            "on, collector hangs": ("--trace-endpoint", hanging.endpoint),
        }
        found = []
        for name, more in flags.items():
            system = three(DEMO_MODEL, encoder_flags=more, llm_flags=more, gateway_flags=more)
            running = stack.enter_context(system)
            client = httpx.Client(base_url=running.gateway.url, timeout=60, trust_env=False)
            found.append(Arm(name, running, stack.enter_context(client)))
        yield found


def body_of(kind: str, number: int) -> dict[str, Any]:
    """A request of that kind, with a picture that none had before."""
    text = {"type": "text", "text": "What is in the picture?"}
    body: dict[str, Any] = {"model": DEMO_MODEL.name, "temperature": 0, "ignore_eos": True}
    if kind == KINDS[0]:
        return body | {"messages": [{"role": "user", "content": [text]}], "max_tokens": 16}
    url = f"data:image/png;base64,{base64.b64encode(picture(number)).decode()}"
    shown = {"type": "image_url", "image_url": {"url": url}}
    return body | {"messages": [{"role": "user", "content": [shown, text]}], "max_tokens": 1}


def picture(seed: int) -> bytes:
    """A PNG of 64 by 64 random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def measure(found: Sequence[Arm], count: int) -> None:
    """Asks all arms in turn, `count` times for each kind."""
    for number in range(_WARM_UP):
        for arm in found:
            for kind in KINDS:
                arm.ask(body_of(kind, number))
    for index, kind in enumerate(KINDS):
        before = [arm.used() for arm in found]
        for number in range(count):
            body = body_of(kind, (index + 1) * 1_000_000 + number)
            for step in range(len(found)):
                # None is always the one that comes after another.
                arm = found[(number + step) % len(found)]
                arm.seconds[kind].append(arm.ask(body))
        # So that the last spans have been sent.
        time.sleep(2)
        for arm, was in zip(found, before, strict=True):
            arm.cpu[kind] = arm.used() - was


def table(found: Sequence[Arm]) -> None:
    print("| request | traces | median ms | p95 ms | CPU ms a request |\n|---|---|---|---|---|")
    for kind in KINDS:
        for arm in found:
            taken = arm.seconds[kind]
            median, p95 = statistics.median(taken), statistics.quantiles(taken, n=20)[-1]
            cpu = arm.cpu[kind] / len(taken)
            print(f"| {kind} | {arm.name} | {median * 1000:.2f} | {p95 * 1000:.2f} | "
                  f"{cpu * 1000:.2f} |")  # fmt: skip


def call_sites() -> float:
    """Microseconds that the call sites of a request take with traces off."""
    began = time.perf_counter()
    for _ in range(_SITES):
        with spans.request("request", NO_TRACE):
            for _ in range(_STAGES):
                with spans.stage(names.VISION):
                    pass
    return (time.perf_counter() - began) / _SITES * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300, help="of each kind (default 300)")
    arguments = parser.parse_args()
    with arms() as found:
        measure(found, arguments.requests)
        table(found)
    print(f"\nCall sites of a process with traces off: {call_sites():.1f} µs a request "
          f"(its span and {_STAGES} stages).")  # fmt: skip


if __name__ == "__main__":
    main()
