"""`chiasm up --restart`: each part is killed; the system fails in words and comes back."""

import base64
import json
import signal
import time
from typing import Any

import httpx
import psutil
import pytest

from tests.system.processes import SAMPLES, Process
from tests.system.test_up import address, children, gone, running, wait_ready, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
STAR = base64.b64encode((SAMPLES / "star.png").read_bytes()).decode()


def question(**more: Any) -> dict[str, Any]:
    url = {"url": f"data:image/png;base64,{STAR}"}
    content = [
        {"type": "image_url", "image_url": url},
        {"type": "text", "text": "What shape is it?"},
    ]
    return {"model": "chiasm-demo", "messages": [{"role": "user", "content": content}], **more}


def counting() -> dict[str, Any]:
    messages = [{"role": "user", "content": "Count to 50."}]
    return {"model": "chiasm-demo", "messages": messages, "max_tokens": 1900, "stream": True,
            "ignore_eos": True}  # fmt: skip


def test_every_part_is_started_again_and_calls_fail_in_words() -> None:
    with Process("-m", "chiasm.cli", "up", "--port", "0", "--restart") as system:
        wait_ready(system)
        url = f"{address(system)}/v1/chat/completions"
        with httpx.Client(trust_env=False, timeout=60) as client:
            before = client.post(url, json=question(temperature=0)).json()
            killed_llm_ends_streams_with_an_error(system, client, url)
            for module in ("encoder_service", "llm_service", "gateway"):
                kill(system, module)
                answer_again(client, url, before["choices"][0]["message"]["content"])
        parts = children(system)
        assert len(parts) == 3
        system.send_signal(signal.SIGINT)
        assert system.wait() == 0
        assert gone(parts, 0)
        assert system.out().count("starting again in") == 4
        assert "Traceback" not in system.log()


def killed_llm_ends_streams_with_an_error(system: Process, client: httpx.Client, url: str) -> None:
    with client.stream("POST", url, json=counting()) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        kill(system, "llm_service")
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    error = json.loads([event for event in events if event != "[DONE]"][-1])["error"]
    assert error["message"]
    assert error["code"]


def kill(system: Process, module: str) -> None:
    """Kills a part and waits until another has its place and is ready."""
    again = system.out().count("ready again")
    dead = running(module, children(system))
    dead.kill()
    wait_until(lambda: system.out().count("ready again") > again, system, 120)
    assert not psutil.pid_exists(dead.pid) or dead.status() == psutil.STATUS_ZOMBIE


def answer_again(client: httpx.Client, url: str, text: str) -> None:
    """Until the callers of the restarted part have connected to it; every failure is typed."""
    deadline = time.monotonic() + 30
    while True:
        reply = client.post(url, json=question(temperature=0))
        if reply.status_code == 200:
            break
        assert reply.status_code in (502, 503), reply.text
        assert reply.json()["error"]["code"], reply.text
        assert time.monotonic() < deadline, reply.text
        time.sleep(0.2)
    assert reply.json()["choices"][0]["message"]["content"] == text
