"""API keys over a real socket: who gets in, as which tenant, and how often."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from gateway.app import create_app
from gateway.settings import GatewaySettings
from tests.gateway.gateway_system import MIB, System, whole_system
from tests.scripted_llm import MODEL, Script

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
STATED_TOKENS = 37  # of the scripted answer: 30 of the prompt and 7 of its own


def entry(key: str, tenant: str = "", **fields: object) -> str:
    """One key of a file, named like its tenant; the key itself is `key`."""
    lines = [
        "[[key]]",
        f'name = "{key}-name"',
        f'tenant = "{tenant or key}"',
        f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"',
        *(f"{name} = {value}" for name, value in fields.items()),
    ]
    return "\n".join(lines) + "\n"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(system: System, key: str, **fields: object) -> httpx.Response:
    return await system.http.post(CHAT, json=ASK | fields, headers=bearer(key))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded_system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        entry("red") + entry("blue") + entry("late", expires="2000-01-01T00:00:00Z")
        + entry("few", requests_per_minute=2) + entry("one", concurrent_requests=1)
        + entry("slow", tokens_per_minute=100) + entry("left", tokens_per_minute=1000)
        + entry("faulty", tokens_per_minute=1000)
    )  # fmt: skip
    async with whole_system(keys_file=path, max_body_bytes=4 * MIB) as running:
        yield running


@pytest.fixture
def guarded(guarded_system: System) -> System:
    guarded_system.llm.script = Script()
    guarded_system.llm.received.clear()
    return guarded_system


def routes() -> list[tuple[str, str]]:
    """Every path of the application with each of its methods."""
    app = create_app(GatewaySettings())
    found = []
    for route in app.routes:
        path = getattr(route, "path", "").replace("{id:path}", MODEL).replace("{name}", "app.js")
        found += [(method, path) for method in sorted(getattr(route, "methods", None) or ())]
    return found


async def test_every_path_but_health_and_ready_needs_a_key(guarded: System) -> None:
    others = [("GET", "/nothing"), ("OPTIONS", CHAT), ("PUT", "/v1/models"), ("GET", "/v1//models")]
    assert len(routes()) > 10
    for method, path in [*routes(), *others]:
        answer = await guarded.http.request(method, path)
        if path in ("/health", "/ready"):
            assert answer.status_code == 200
            continue
        assert answer.status_code == 401, (method, path)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-request-id"]
        if method != "HEAD":
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert not guarded.llm.received


@pytest.mark.parametrize("path", ["/health", "//health/", "/ready", "/health?x=1"])
async def test_probes_need_no_key(guarded: System, path: str) -> None:
    answer = await guarded.http.get(f"http://127.0.0.1:{guarded.port}{path}")
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/health/../v1/models", "/health%2f..%2fv1/models", "/healthz"])
async def test_what_only_looks_like_a_probe_needs_one(guarded: System, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", guarded.port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
    writer.close()


@pytest.mark.parametrize("value", ["Bearer red", "bearer red", "BEARER red"])
async def test_a_known_key_is_served_however_its_scheme_is_written(
    guarded: System, value: str
) -> None:
    answer = await guarded.http.post(CHAT, json=ASK, headers={"authorization": value})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "value", ["Bearer wrong-key", "Bearer re", "red", "Basic cmVkOg==", "Bearer", "Bearer red red"]
)
async def test_another_key_is_refused_and_never_repeated(guarded: System, value: str) -> None:
    answer = await guarded.http.post(CHAT, json=ASK, headers={"authorization": value})
    assert answer.status_code == 401
    assert "wrong-key" not in answer.text


async def test_an_expired_key_is_refused_and_told_so(guarded: System) -> None:
    answer = await ask(guarded, "late")
    assert answer.status_code == 401
    assert "expired" in answer.json()["error"]["message"]


async def test_a_large_body_without_a_key_is_refused_at_its_head(guarded: System) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", guarded.port)
    writer.write(
        b"POST %b HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 4000000\r\n\r\n"
        % CHAT.encode()
    )
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_the_official_client_raises_its_own_error_of_authentication(guarded: System) -> None:
    client = openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{guarded.port}/v1",
        api_key="wrong",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
    )
    async with client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(**ASK)
        told = await client.with_options(api_key="red").chat.completions.create(**ASK)
        assert told.choices[0].message.content == "Hello, world"


async def test_each_request_goes_to_the_llm_service_as_its_keys_tenant(guarded: System) -> None:
    for path, body in (
        (CHAT, ASK),
        (CHAT, ASK | {"stream": True}),
        ("/v1/completions", {"model": MODEL, "prompt": "hi"}),
        ("/v1/responses", {"model": MODEL, "input": "hi"}),
    ):
        for key in ("red", "blue"):
            answer = await guarded.http.post(path, json=body, headers=bearer(key))
            assert answer.status_code == 200, (path, answer.text)
            assert guarded.llm.last.message.tenant == key


async def test_a_tenant_is_never_taken_from_the_request(guarded: System) -> None:
    headers = bearer("red") | {"x-tenant": "blue", "tenant": "blue"}
    await guarded.http.post(CHAT, json=ASK | {"tenant": "blue"}, headers=headers)
    assert guarded.llm.last.message.tenant == "red"


async def test_requests_over_the_keys_limit_get_429_with_the_time_to_wait(guarded: System) -> None:
    first, second, third = [await ask(guarded, "few") for _ in range(3)]
    assert [one.status_code for one in (first, second, third)] == [200, 200, 429]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert third.headers["x-ratelimit-remaining-requests"] == "0"
    assert third.headers["x-ratelimit-reset-requests"].endswith("s")
    assert 1 <= int(third.headers["retry-after"]) <= 30
    error = third.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert (await ask(guarded, "red")).status_code == 200
    assert "x-ratelimit-limit-requests" not in (await ask(guarded, "red")).headers


async def test_requests_at_once_are_bounded_for_each_key(guarded: System) -> None:
    guarded.llm.script = Script(admission_seconds=0.5)
    running = asyncio.create_task(ask(guarded, "one"))
    while not guarded.llm.running:
        await asyncio.sleep(0.01)
    refused = await ask(guarded, "one")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert (await running).status_code == 200
    guarded.llm.script = Script()
    assert (await ask(guarded, "one")).status_code == 200


async def test_tokens_are_counted_from_the_answers_usage_and_set_aside_before(
    guarded: System,
) -> None:
    first = await ask(guarded, "slow", max_tokens=10)
    assert first.headers["x-ratelimit-limit-tokens"] == "100"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 100
    # Thought to take more than is left; had it been let in, it would have taken it.
    second = await ask(guarded, "slow", max_tokens=90)
    assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    left = int(second.headers["x-ratelimit-remaining-tokens"])
    assert 100 - STATED_TOKENS <= left <= 100 - STATED_TOKENS + 10
    assert len(guarded.llm.received) == 1
    models = await guarded.http.get("/v1/models", headers=bearer("slow"))
    assert models.status_code == 200


async def test_who_leaves_a_stream_pays_what_was_set_aside(guarded: System) -> None:
    guarded.llm.script = Script(["x"] * 1000, pause_seconds=0.02)
    body = ASK | {"stream": True, "max_tokens": 500}
    async with guarded.http.stream("POST", CHAT, json=body, headers=bearer("left")) as answer:
        async for _ in answer.aiter_lines():
            if guarded.llm.running:
                break
    while guarded.llm.running:
        await asyncio.sleep(0.01)
    guarded.llm.script = Script()
    later = await ask(guarded, "left", max_tokens=1)
    assert int(later.headers["x-ratelimit-remaining-tokens"]) < 600


async def test_what_failed_costs_no_tokens(guarded: System) -> None:
    for _ in range(5):
        assert (await ask(guarded, "faulty", n=0)).status_code == 400
    assert (await ask(guarded, "faulty", model="none", max_tokens=900)).status_code == 404
    after = await ask(guarded, "faulty", max_tokens=1)
    assert int(after.headers["x-ratelimit-remaining-tokens"]) > 960


async def test_metrics_need_a_key_unless_the_operator_opens_them(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("red"))
    async with whole_system(keys_file=path, open_metrics=True, open_page=True) as opened:
        assert (await opened.http.get("/metrics")).status_code == 200
        assert (await opened.http.get("/")).status_code == 200
        assert (await opened.http.get("/page/app.js")).status_code == 200
        assert (await opened.http.get("/v1/models")).status_code == 401
        assert (await opened.http.get("/page")).status_code == 401


async def until_status(system: System, key: str, status: int) -> None:
    async with asyncio.timeout(10):
        while (await ask(system, key)).status_code != status:
            await asyncio.sleep(0.1)


async def test_a_changed_file_counts_at_once_and_a_broken_one_changes_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("red", requests_per_minute=5))
    async with whole_system(keys_file=path) as running:
        assert [(await ask(running, "red")).status_code for _ in range(3)] == [200] * 3
        assert (await ask(running, "blue")).status_code == 401
        fresh = tmp_path / "fresh.toml"
        fresh.write_text(entry("blue") + entry("red", requests_per_minute=5))
        os.replace(fresh, path)
        await until_status(running, "blue", 200)
        # What was used before stays used.
        told = (await ask(running, "red")).headers["x-ratelimit-remaining-requests"]
        assert int(told) < 3
        path.write_text("[[key")
        await asyncio.sleep(2.5)
        assert (await ask(running, "blue")).status_code == 200
        path.unlink()
        await asyncio.sleep(2.5)
        assert (await ask(running, "blue")).status_code == 200
        path.write_text(entry("red"))
        await until_status(running, "blue", 401)


async def test_unknown_callers_take_no_place_from_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("red"))
    async with whole_system(keys_file=path, max_active_requests=2) as running:
        silent = []
        for _ in range(10):  # their bodies never come, so their refusals stay open for a while
            _, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(
                b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n" % CHAT.encode()
            )
            silent.append(writer)
        await asyncio.sleep(0.2)
        assert (await ask(running, "red")).status_code == 200
        for writer in silent:
            writer.close()


async def test_without_a_file_everybody_is_let_in_as_the_shared_tenant() -> None:
    async with whole_system() as running:
        answer = await running.ask()
        assert answer.status_code == 200
        assert running.llm.last.message.tenant == ""
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
