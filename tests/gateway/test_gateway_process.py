"""The gateway as a process: what it loads, how it starts, and how it stops."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.server import listen
from tests.scripted_llm import MODEL, Script, ScriptedLlm

pytestmark = pytest.mark.system

ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}


@asynccontextmanager
async def gateway_process(*flags: str) -> AsyncIterator[tuple[Process, int]]:
    """`python -m gateway` once it listens, and its port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "--port", "0", "--log-format", "json", *flags,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
        assert ready == {"event": "ready", "service": "gateway", "port": ready["port"]}
        yield process, ready["port"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def test_the_gateway_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, gateway.__main__, gateway.server, gateway.app; "
        "print([m for m in ('torch', 'transformers', 'PIL', 'encoder_service', 'llm_service') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("flags", "variables", "words"),
    [
        (["--port", "99999"], {}, "--port"),
        (["--invented", "1"], {}, "--invented"),
        ([], {"CHIASM_GATEWAY_INVENTED": "1"}, "CHIASM_GATEWAY_INVENTED"),
        (["--host", "203.0.113.7"], {}, "203.0.113.7"),
    ],
)
def test_a_setting_that_cannot_be_ends_the_start_with_its_name(
    flags: list[str], variables: dict[str, str], words: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", *flags],
        capture_output=True,
        text=True,
        env=os.environ | variables,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


async def test_sigterm_lets_streams_end_says_not_ready_and_exits_with_0() -> None:
    llm = ScriptedLlm(Script(["x"] * 20, pause_seconds=0.05))
    async with (
        llm.serving() as server,
        gateway_process("--llm", f"127.0.0.1:{server.port}", "--drain-seconds", "0.5") as running,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{running[1]}", verify=False) as http,
    ):
        process = running[0]
        assert (await http.get("/ready")).status_code == 200
        stream = asyncio.create_task(http.post("/v1/chat/completions", json=ASK))
        while not llm.running:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        assert (await http.get("/ready")).status_code == 503
        llm.script = Script()
        assert (await http.post("/v1/chat/completions", json=ASK)).status_code == 200
        text = (await stream).text
        assert text.count('"content":"x"') == 20
        assert text.endswith("data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), 5) == 0


async def test_a_second_signal_stops_at_once() -> None:
    llm = ScriptedLlm(Script(["x"] * 1000, pause_seconds=0.1))
    async with (
        llm.serving() as server,
        gateway_process("--llm", f"127.0.0.1:{server.port}", "--drain-seconds", "30") as running,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{running[1]}", verify=False) as http,
    ):
        process = running[0]
        stream = asyncio.create_task(http.post("/v1/chat/completions", json=ASK))
        while not llm.running:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 5)
        await asyncio.gather(stream, return_exceptions=True)
    assert llm.running == 0


async def test_each_request_logs_one_line_that_has_no_content() -> None:
    llm = ScriptedLlm()
    async with (
        llm.serving() as server,
        gateway_process("--llm", f"127.0.0.1:{server.port}", "--drain-seconds", "0") as running,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{running[1]}", verify=False) as http,
    ):
        process = running[0]
        secret = [{"role": "user", "content": "hush-hush"}]
        headers = {"x-request-id": "line-1"}
        await http.post("/v1/chat/completions", json=ASK | {"messages": secret}, headers=headers)
        await http.post("/v1/chat/completions", json={"model": "hush-hush"}, headers=headers)
        await http.get("/health", headers=headers)
        process.send_signal(signal.SIGTERM)
        _, logged = await asyncio.wait_for(process.communicate(), 5)
    lines = [json.loads(line) for line in logged.splitlines() if b"line-1" in line]
    assert [(line["event"], line["status"]) for line in lines] == [
        ("request", 200),
        ("request", 400),
    ]
    assert lines[0]["completion_tokens"] == 7
    assert lines[1]["reason"] == "REQUEST_INVALID"
    assert b"hush" not in logged


def test_tokens_are_not_held_back_to_fill_a_packet() -> None:
    with listen("127.0.0.1", 0) as listener:
        # asyncio switches Nagle's delay off only for sockets that are named as TCP.
        assert listener.proto == socket.IPPROTO_TCP
