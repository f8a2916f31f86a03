"""The plaintext health port, and the probe that containers ask it with; real sockets."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from socket import socket

import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from chiasm.rpc import probe
from chiasm.rpc.health import LIVE, PROBE_WATCHES, Health, health_port
from chiasm.rpc.server import Server, ServerSettings, Service
from tests.rpc_tls.tiny_service import asked

NAME = "chiasm.v1.EncoderService"
_S = health_pb2.HealthCheckResponse
UP, DOWN = _S.SERVING, _S.NOT_SERVING


@asynccontextmanager
async def stub_of(port: int | None) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health_pb2_grpc.HealthStub(channel)


async def states(stub: health_pb2_grpc.HealthStub) -> list[int]:
    """Of readiness by both of its names, and of liveness."""
    asked = [health_pb2.HealthCheckRequest(service=name) for name in ("", NAME, LIVE)]
    return [(await stub.Check(one, timeout=5)).status for one in asked]


async def test_it_says_what_the_server_says_until_the_process_ends() -> None:
    health = Health(NAME)
    settings = ServerSettings("127.0.0.1", 0, 0.5, 5, 60)
    server = Server(settings, Service(NAME, {}), CollectorRegistry(), health=health)
    async with health_port(health, "127.0.0.1", 0) as port, stub_of(port) as stub:
        assert await states(stub) == [DOWN, DOWN, UP]  # it loads
        await server.start()
        async with stub_of(server.port) as main:
            assert await states(main) == [DOWN, DOWN, UP]
            await server.ready()
            assert await states(stub) == await states(main) == [UP, UP, UP]
            draining = asyncio.create_task(server.drain())
            await asyncio.sleep(0.1)
            assert await states(stub) == await states(main) == [DOWN, DOWN, UP]
        await draining
        assert await states(stub) == [DOWN, DOWN, UP]


async def test_a_process_that_is_given_up_is_not_live() -> None:
    health = Health(NAME)
    settings = ServerSettings("127.0.0.1", 0, 0, 5, 60)
    server = Server(settings, Service(NAME, {}), CollectorRegistry(), health=health)
    async with health_port(health, "127.0.0.1", 0) as port, stub_of(port) as stub:
        await server.start()
        await server.ready()
        await server.fail()
        assert await states(stub) == [DOWN, DOWN, DOWN]


async def test_nothing_else_is_served_there() -> None:
    async with health_port(Health(NAME), "127.0.0.1", 0) as port, stub_of(port) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=5)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="x" * 10_000), timeout=5)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for path in (f"/{NAME}/GetModel", "/grpc.reflection.v1alpha.ServerReflection/X"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await asked(channel, path)
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_every_watcher_hears_of_every_change_although_others_leave() -> None:
    health = Health(NAME)
    request = health_pb2.HealthCheckRequest()
    async with health_port(health, "127.0.0.1", 0) as port, stub_of(port) as stub:
        calls = [stub.Watch(request, timeout=20) for _ in range(3)]
        assert [(await call.read()).status for call in calls] == [DOWN] * 3
        calls[0].cancel()
        await asyncio.sleep(0.1)
        for ready in (True, False):
            health.set_ready(ready)
            told = [(await call.read()).status for call in calls[1:]]
            assert told == [UP if ready else DOWN] * 2
        for call in calls:
            call.cancel()


async def test_watchers_are_bounded_and_take_no_place_from_probes() -> None:
    request = health_pb2.HealthCheckRequest()
    async with health_port(Health(NAME), "127.0.0.1", 0) as port, stub_of(port) as stub:
        calls = [stub.Watch(request, timeout=20) for _ in range(PROBE_WATCHES)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(request, timeout=5).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await states(stub) == [DOWN, DOWN, UP]
        for call in calls:
            call.cancel()
        async with asyncio.timeout(5):
            while True:
                again = stub.Watch(request, timeout=5)
                try:
                    assert (await again.read()).status == DOWN
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.02)
        again.cancel()


async def test_a_taken_port_is_told_by_its_flag() -> None:
    with socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="--health-port"):
            async with health_port(Health(NAME), "127.0.0.1", taken.getsockname()[1]):
                pass


async def test_no_port_serves_nothing() -> None:
    async with health_port(Health(NAME), "127.0.0.1", None) as port:
        assert port is None


async def _probe(*words: str) -> int:
    return await asyncio.to_thread(probe.main, words)


async def test_the_probe_asks_about_one_service(capsys: pytest.CaptureFixture[str]) -> None:
    health = Health(NAME)
    async with health_port(health, "127.0.0.1", 0) as port:
        target = f"127.0.0.1:{port}"
        assert await _probe(target, LIVE) == 0
        assert await _probe(target) == 1
        assert capsys.readouterr().err == f"{target}: it says NOT_SERVING\n"
        health.set_ready(True)
        assert await _probe(target) == await _probe(target, NAME) == 0
        assert await _probe(target, "other") == 1
        assert "NOT_FOUND" in capsys.readouterr().err
    assert await _probe(target) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/silent":
            threading.Event().wait(0.6)
        self.send_response({"/ready": 200, "/moved": 302}.get(self.path, 503))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def http_server(tls: bool) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    if tls:
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trustme.CA().issue_cert("gateway.example").configure_cert(context)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("tls", [False, True])
def test_the_probe_asks_a_url(tls: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with http_server(tls) as url:
        assert probe.main([f"{url}/ready"]) == 0
        for path, status in (("/other", 503), ("/moved", 302)):
            assert probe.main([f"{url}{path}"]) == 1
            assert capsys.readouterr().err == f"{url}{path}: it answers with status {status}\n"
    assert probe.main([f"{url}/ready"]) == 1


def test_the_probe_gives_up_in_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "LIMIT_SECONDS", 0.3)
    with http_server(False) as url:
        assert probe.main([f"{url}/silent"]) == 1
    assert url in capsys.readouterr().err
    with socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        assert probe.main([f"127.0.0.1:{mute.getsockname()[1]}"]) == 1


@pytest.mark.parametrize(
    "words",
    [
        [], ["127.0.0.1"], ["127.0.0.1:1", "a", "b"], ["ftp://h/"], ["http://"], ["http://h:x/"],
        ["http://h:99999/"], ["unix:/x"], ["http://h/", "live"],
    ],
)  # fmt: skip
def test_the_probe_refuses_what_is_no_address(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe.main(words) == 2
    assert capsys.readouterr().err.startswith("usage: ")


def test_the_probe_is_a_program_that_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import runpy, sys; sys.argv[1:] = ['127.0.0.1:1']\n"
        "try: runpy.run_module('chiasm.rpc.probe', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert ran.stdout.split() == ["1", "False", "False"]
