"""`python -m benchmarks.mtls`: what mutual TLS costs between LLM service and encoder, loopback.

One encoder process serves the same features in plaintext and under mutual TLS, on two ports, with
a tower that gives them at once (after the first time they come from its cache). The asking process
is the LLM service's own code. Round by round, both ways in turn: one small call, embeddings of 5 MB
and of 40 MB with all checks, and a connection that is made anew for one small call. Medians, in
milliseconds, and the processor time of both processes together.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import trustme
import uvloop

from benchmarks.transfer import CONTRACT, MODEL, ROW_BYTES, WideTower, sought
from chiasm import memory, telemetry, wire
from chiasm.rpc import mtls
from chiasm.rpc.certificates import Certificates
from chiasm.rpc.channel import EncoderMethods, open_channel
from chiasm.rpc.secure_channel import ClientTls
from chiasm.v1 import encoder_service_pb2
from encoder_service.app import running
from encoder_service.settings import EncoderSettings
from llm_service.vision.encoder import Encoder
from llm_service.vision.encoder import EncoderSettings as AskSettings

_LOAD: Final = wire.plain(encoder_service_pb2.EncoderServiceGetLoadRequest())
_ENCODER, _LLM = "chiasm-encoder", "chiasm-llm"
_MEGABYTES: Final = (5, 40)


async def serve(directory: Path) -> None:
    """Serves the two ports until standard input ends."""
    files = _files(directory / _ENCODER)
    common: dict[str, Any] = {
        "model": MODEL, "port": 0, "torch_threads": 1, "cache_bytes": 1 << 30,
        "log_level": "error",
    }  # fmt: skip
    plain = EncoderSettings(**common)
    secure = EncoderSettings(
        **common, mtls_cert=files.cert, mtls_key=files.key, mtls_ca=files.ca, mtls_clients=_LLM
    )
    async with AsyncExitStack() as stack:
        served = [
            await stack.enter_async_context(running(settings, tower=WideTower()))
            for settings in (plain, secure)
        ]
        print(*(one.port for one in served), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def _files(directory: Path) -> mtls.Files:
    return mtls.Files(directory / "tls.crt", directory / "tls.key", directory / "ca.crt")


def _issue(directory: Path) -> None:
    authority = trustme.CA()
    for name in (_ENCODER, _LLM):
        issued, files = authority.issue_cert(name), _files(directory / name)
        files.cert.parent.mkdir()
        issued.private_key_pem.write_to_path(files.key)
        authority.cert_pem.write_to_path(files.ca)
        for pem in issued.cert_chain_pems:
            pem.write_to_path(files.cert, append=True)


@dataclass(frozen=True)
class Peer:
    """One of the two ports, as an LLM service asks it."""

    target: str
    tls: ClientTls | None
    encoder: Encoder

    @classmethod
    def at(cls, port: int, tls: ClientTls | None) -> "Peer":
        target = f"127.0.0.1:{port}"
        encoder = Encoder(
            target, CONTRACT, AskSettings(60, 60), lambda _: None, lambda: 60.0, lambda _: False,
            tls,
        )  # fmt: skip
        return cls(target, tls, encoder)

    async def small(self) -> None:
        with self.encoder._bundle.lent(0) as channel:
            await EncoderMethods.GET_LOAD.call(channel, _LOAD, timeout=10)

    async def embedding(self, megabytes: int) -> None:
        rows = megabytes * 1_000_000 // ROW_BYTES
        fetched = await self.encoder.ask(sought(rows))
        assert len(fetched.rows.rows) == rows

    async def connection(self) -> None:
        async with open_channel(self.target, self.tls) as channel:
            await EncoderMethods.GET_LOAD.call(channel, _LOAD, timeout=10)


Way = Callable[[Peer], Awaitable[None]]


def _embedding(megabytes: int) -> Way:
    return lambda peer: peer.embedding(megabytes)


WAYS: Final[dict[str, tuple[int, Way]]] = {
    "small call": (20, Peer.small),
    **{f"embedding of {size} MB": (1, _embedding(size)) for size in _MEGABYTES},
    "new connection and a small call": (1, Peer.connection),
}


def measure(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        _issue(directory)
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.mtls", "--serve", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            plain, secure = map(int, child.stdout.readline().split())
            latest = Certificates(_files(directory / _LLM)).latest
            ways = {"plaintext": (plain, None), "mTLS": (secure, ClientTls(latest, (_ENCODER,)))}
            uvloop.run(_compare(ways, psutil.Process(child.pid), rounds))
        finally:
            child.kill()
            child.wait()


async def _compare(
    ways: dict[str, tuple[int, ClientTls | None]], child: psutil.Process, rounds: int
) -> None:
    peers = {kind: Peer.at(port, tls) for kind, (port, tls) in ways.items()}
    await _print_all(peers, child, rounds)
    for peer in peers.values():
        await peer.encoder.close()


async def _print_all(peers: dict[str, Peer], child: psutil.Process, rounds: int) -> None:
    print(f"{rounds} rounds; milliseconds, medians: wall time, processor time of both ends")
    print(f"{'':34}{'plaintext':>18}{'mTLS':>18}")
    for name, (times, way) in WAYS.items():
        for peer in peers.values():
            await way(peer)  # computes, connects
        taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in peers}
        for _ in range(rounds):
            for kind, peer in peers.items():
                taken[kind].append(await _timed(way, peer, times, child))
        cells = (
            f"{statistics.median(wall for wall, _ in one):9.2f}"
            f"{statistics.mean(spent for _, spent in one):9.2f}"
            for one in taken.values()
        )
        print(f"{name:34}{''.join(cells)}")


async def _timed(way: Way, peer: Peer, times: int, child: psutil.Process) -> tuple[float, float]:
    """Wall and processor milliseconds of one of `times`."""
    spent, began = _spent(child), time.perf_counter()
    for _ in range(times):
        await way(peer)
    wall = time.perf_counter() - began
    return wall * 1000 / times, (_spent(child) - spent) * 1000 / times


def _spent(child: psutil.Process) -> float:
    other = child.cpu_times()
    return time.process_time() + other.user + other.system


def main() -> None:
    memory.tune()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="(%(default)s)")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    telemetry.start_logging("benchmark", "console", "error")
    if options.serve:
        uvloop.run(serve(options.serve))
    else:
        measure(options.rounds)


if __name__ == "__main__":
    main()
