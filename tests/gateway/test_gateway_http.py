"""The HTTP surface: bodies, paths, methods, request ids, probes, metrics, and a missing service."""

import asyncio
import gzip
import json
import resource
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.gateway.gateway_system import MIB, System, gateway_before, whole_system
from tests.scripted_llm import MODEL, Script, ScriptedLlm

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
LIMIT = 4 * MIB


def padded(count: int) -> bytes:
    """A good request of exactly `count` bytes."""
    plain = json.dumps(ASK | {"pad": ""}).encode()
    return plain[:-2] + b"x" * (count - len(plain)) + plain[-2:]


async def raw(system: System, sent: bytes, *, seconds: float = 5) -> bytes:
    """All that comes back on a connection of its own until the gateway closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", system.port)
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(), seconds)
    finally:
        writer.close()


async def test_a_body_at_the_limit_is_served_and_one_byte_more_is_a_413(system: System) -> None:
    assert (await system.send(padded(LIMIT))).status_code == 200
    answer = await system.send(padded(LIMIT + 1))
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert error["code"] == "body_too_large"
    assert str(LIMIT) in error["message"]
    assert (await system.ask()).status_code == 200


async def test_a_chunked_body_is_counted_while_it_comes(system: System) -> None:
    async def chunks(count: int) -> AsyncIterator[bytes]:
        whole = padded(count)
        for start in range(0, count, 1 << 16):
            yield whole[start : start + (1 << 16)]

    answer = await system.http.post("/v1/chat/completions", content=chunks(2 * MIB))
    assert answer.status_code == 200
    answer = await system.http.post("/v1/chat/completions", content=chunks(3 * LIMIT))
    assert answer.status_code == 413


async def test_a_body_of_200_mb_is_told_so_and_takes_no_memory(system: System) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield block

    block = b" " * MIB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = await system.http.post("/v1/chat/completions", content=endless())
    assert answer.status_code == 413
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 * 1024


async def test_a_body_announced_too_large_is_refused_before_it_is_sent(system: System) -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        b"expect: 100-continue\r\ncontent-length: 999999999\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", system.port)
    writer.write(head)
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 1)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()
    writer.close()


async def test_expect_100_continue_is_served(system: System) -> None:
    sent = padded(2 * MIB)
    reader, writer = await asyncio.open_connection("127.0.0.1", system.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(sent)
    )
    assert b" 100 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 1)
    writer.write(sent)
    assert b" 200 " in (await asyncio.wait_for(reader.read(), 5)).split(b"\r\n")[0]
    writer.close()


async def test_pipelined_requests_are_answered_in_order(system: System) -> None:
    one = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = await raw(system, one + one + last)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.count(b"HTTP/1.1 404") == 1
    assert answer.rindex(b"HTTP/1.1 404") > answer.rindex(b"HTTP/1.1 200")


async def test_a_compressed_body_is_a_415(system: System) -> None:
    answer = await system.send(gzip.compress(padded(1000)), **{"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_content_encoding"
    bomb = gzip.compress(b" " * (64 * MIB))
    assert (await system.send(bomb, **{"content-encoding": "gzip"})).status_code == 415
    assert (await system.send(padded(1000), **{"content-encoding": "identity"})).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "//v1//chat/completions", "/v1/chat//completions//"]
)
async def test_a_slash_too_many_is_served(system: System, path: str) -> None:
    body = json.dumps(ASK).encode()
    answer = await raw(
        system,
        b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
        % (path.encode(), len(body), body),
    )
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("POST", "/v1/v1/chat/completions", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
async def test_other_paths_and_methods_are_told_in_json(
    system: System, method: str, path: str, status: int, code: str
) -> None:
    answer = await system.http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"] | {"message": ""} == {
        "message": "", "type": "invalid_request_error", "param": None, "code": code,
    }  # fmt: skip
    if status == 405:
        assert answer.headers["allow"]
    assert answer.headers["x-request-id"]


async def test_models_have_openais_fields_and_ids_with_slashes_work(system: System) -> None:
    models = (await system.http.get("/v1/models")).json()
    expected = {
        "id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "chiasm",
        "max_model_len": 128,
    }  # fmt: skip
    assert "/" in MODEL
    [told] = models["data"]
    takes = told["chiasm"]
    assert models == {"object": "list", "data": [expected | {"chiasm": takes}]}
    assert (takes["family"], takes["max_images"], takes["image_embeds"]["width"]) == (
        "scripted", 8, 8,
    )  # fmt: skip
    assert (await system.http.get(f"/v1/models/{MODEL}")).json() == told
    assert (await system.openai.models.retrieve(MODEL)).id == MODEL
    assert [model.id async for model in system.openai.models.list()] == [MODEL]
    missing = await system.http.get("/v1/models/nope")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_head_works_where_get_does(system: System) -> None:
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        answer = await system.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    "claimed", [None, "", "x" * 100_000, "a b", "id\u00e9".encode().decode("latin-1"), "a;b"]
)
async def test_a_request_id_that_is_absent_or_odd_is_replaced(
    system: System, claimed: str | None
) -> None:
    headers = {} if claimed is None else {"x-request-id": claimed.encode("latin-1")}
    for path in ("/health", "/nothing"):
        answer = await system.http.get(path, headers=headers)  # type: ignore[arg-type]
        assert answer.headers["x-request-id"].startswith("req-")


async def test_a_good_request_id_is_on_every_answer(system: System) -> None:
    headers = {"x-request-id": "trace:1.2_3-4"}
    answers = [
        await system.http.get("/v1/models", headers=headers),
        await system.http.get("/nothing", headers=headers),
        await system.http.post("/v1/chat/completions", json={}, headers=headers),
        await system.http.post("/v1/chat/completions", json=ASK, headers=headers),
        await system.http.post(
            "/v1/chat/completions", json=ASK | {"stream": True}, headers=headers
        ),
    ]
    assert [answer.headers["x-request-id"] for answer in answers] == ["trace:1.2_3-4"] * 5
    assert system.llm.last.request_id == "trace:1.2_3-4"


async def test_the_card_of_the_model_is_read_once_for_many_requests(system: System) -> None:
    await system.ask()
    before = system.llm.card_reads
    for _ in range(5):
        await system.ask()
    assert system.llm.card_reads <= before + 1


async def test_metrics_count_requests_by_route_status_and_reason(system: System) -> None:
    async def value(name: str) -> float:
        lines = (await system.http.get("/metrics")).text.splitlines()
        found = [line.rpartition(" ")[2] for line in lines if line.startswith(name + " ")]
        return float(found[0]) if found else 0.0

    good = 'chiasm_gateway_requests_total{reason="",route="/v1/chat/completions",status="200"}'
    bad = (
        'chiasm_gateway_requests_total{reason="REQUEST_INVALID",'
        'route="/v1/chat/completions",status="400"}'
    )
    other = 'chiasm_gateway_requests_total{reason="HTTP",route="other",status="404"}'
    seconds = 'chiasm_gateway_request_seconds_count{route="/v1/chat/completions"}'
    names = [good, bad, other, seconds, "chiasm_gateway_first_token_seconds_count",
             "chiasm_gateway_body_bytes_count"]  # fmt: skip
    before = [await value(name) for name in names]
    await system.ask()
    await system.ask(n=0)
    for path in ("/a", "/b", "/v1/models/../c"):
        await system.http.get(path)
    after = [await value(name) for name in names]
    grown = [new - old for old, new in zip(before, after, strict=True)]
    assert grown[:2] == [1, 1]
    assert grown[2] >= 2
    assert grown[3:] == [2, 1, 2]
    assert await value("chiasm_gateway_active_requests") == 1  # the one that asks
    assert await value("chiasm_gateway_held_body_bytes") == 0


async def test_ready_follows_the_llm_service_and_serving_needs_no_restart(
    unused_tcp_port: int,
) -> None:
    llm = ScriptedLlm()
    url = "http://127.0.0.1"
    async with gateway_before(unused_tcp_port) as port, httpx.AsyncClient(verify=False) as http:
        answer = await http.get(f"{url}:{port}/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert (await http.get(f"{url}:{port}/health")).status_code == 200
        answer = await http.post(f"{url}:{port}/v1/chat/completions", json=ASK)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        async with llm.serving(unused_tcp_port):
            await until_status(http, f"{url}:{port}/ready", 200)
            answer = await http.post(f"{url}:{port}/v1/chat/completions", json=ASK)
            assert answer.status_code == 200
        await until_status(http, f"{url}:{port}/ready", 503)


async def until_status(http: httpx.AsyncClient, url: str, status: int) -> None:
    async with asyncio.timeout(5):
        while (await http.get(url)).status_code != status:
            await asyncio.sleep(0.05)


async def test_an_answer_that_takes_longer_than_allowed_is_a_504() -> None:
    async with whole_system(request_timeout_seconds=0.3) as slow:
        slow.llm.script = Script(admission_seconds=5)
        answer = await slow.ask()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        slow.llm.script = Script(["x"] * 100, pause_seconds=0.1)
        answer = await slow.ask(stream=True)
        assert '"code":"deadline_exceeded"' in answer.text
        assert '"finish_reason":"stop"' not in answer.text


async def test_requests_beyond_what_may_be_in_hand_get_a_429_and_probes_are_answered() -> None:
    async with whole_system(max_active_requests=2) as small:
        small.llm.script = Script(admission_seconds=0.5)
        held = [asyncio.create_task(small.ask()) for _ in range(2)]
        while len(small.llm.received) < 2:
            await asyncio.sleep(0.01)
        answer = await small.ask()
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert answer.headers["retry-after"] == "1"
        assert (await small.http.get("/health")).status_code == 200
        assert [(await one).status_code for one in held] == [200, 200]


async def test_bodies_beyond_what_may_be_held_get_a_429_until_there_is_room() -> None:
    async with whole_system(max_held_body_bytes=2 * MIB) as small:
        small.llm.script = Script(admission_seconds=0.5)
        held = asyncio.create_task(small.send(padded(MIB + MIB // 2)))
        while not small.llm.received:
            await asyncio.sleep(0.01)
        assert (await small.send(padded(MIB))).status_code == 429
        assert (await held).status_code == 200
        assert (await small.send(padded(MIB))).status_code == 200
