"""What HTTP itself may cost: heads, bodies and connections that are too large, too slow, too many.

Every refusal has OpenAI's shape and an id to quote, and never what the caller sent.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from chiasm.errors import ChiasmError, Reason
from gateway.app import create_app
from gateway.http.depth import nests_deeper
from gateway.openai.errors import as_http, plain_error
from gateway.settings import GatewaySettings
from tests.gateway.gateway_system import MIB, System, whole_system
from tests.scripted_llm import MODEL, Script

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
SECRET = "zq-secret-zq"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bounded_system() -> AsyncIterator[System]:
    async with whole_system(
        max_body_bytes=4 * MIB,
        max_header_bytes=16 << 10,
        max_headers=32,
        max_connections=40,
        max_json_depth=20,
        header_timeout_seconds=0.5,
        body_timeout_seconds=1,
        idle_timeout_seconds=2,
    ) as running:
        yield running


@pytest.fixture
def bounded(bounded_system: System) -> System:
    bounded_system.llm.script = Script()
    bounded_system.llm.received.clear()
    return bounded_system


@dataclass(frozen=True)
class Answer:
    """What came back on one connection until it was closed."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


def read(raw: bytes) -> Answer:
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Answer(int(first.split()[1]), headers, body)


async def exchange(system: System, *pieces: bytes, pause: float = 0.0) -> bytes:
    """All that comes back on a connection of its own to which `pieces` are sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", system.port)
    reading = asyncio.create_task(reader.read())
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            if pause:
                await asyncio.sleep(pause)
    except ConnectionError:  # closed while we still send: what came back counts
        pass
    try:
        return await asyncio.wait_for(reading, 10)
    finally:
        writer.close()


def check_refusal(raw: bytes, status: int, code: str) -> None:
    answer = read(raw)
    assert (answer.status, answer.code) == (status, code)
    assert answer.headers["x-request-id"].startswith("req-")
    assert answer.headers["connection"] == "close"
    assert len(answer.body) == int(answer.headers["content-length"]) < 2048
    assert SECRET not in raw.decode()


def head(*lines: bytes, path: bytes = b"/health") -> bytes:
    return b"\r\n".join((b"GET %b HTTP/1.1" % path, b"host: x", *lines, b"", b""))


@pytest.mark.parametrize(
    "sent",
    [
        head(b"x-long: " + SECRET.encode() * 2000),
        head(b"x-request-id: " + b"r" * 100_000),
        head(*(b"x-%d: y" % number for number in range(100))),
        head(path=b"/" + b"p" * 20_000),
        head(b"x" * 20_000 + b": y"),
        CHUNKED + b"2\r\n{}\r\n0\r\nx-trailer: " + b"t" * 500_000,
    ],
    ids=["header", "request-id", "count", "path", "name", "trailer"],
)
async def test_a_head_too_large_is_a_431(bounded: System, sent: bytes) -> None:
    raw = await exchange(bounded, sent)
    check_refusal(raw, 431, "headers_too_large")
    assert read(await exchange(bounded, LAST)).status == 200


async def test_a_header_without_an_end_is_cut_off_at_the_limit(bounded: System) -> None:
    start = b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: "
    raw = await exchange(bounded, start, *[b"y" * 4096] * 64)
    check_refusal(raw, 431, "headers_too_large")


async def test_a_head_within_the_limits_is_served_in_pieces_too(bounded: System) -> None:
    lines = [b"x-%d: %b" % (number, b"y" * 300) for number in range(20)]
    whole = head(*lines, b"connection: close")
    pieces = [whole[start : start + 1000] for start in range(0, len(whole), 1000)]
    assert read(await exchange(bounded, *pieces, pause=0.02)).status == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense " + SECRET.encode() + b"\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /" + "ö".encode() + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        head(b"no colon " + SECRET.encode()),
        head(b"content-length: x"),
        head(b"content-length: 1", b"content-length: 2"),
        head(b"content-length: 1", b"transfer-encoding: chunked"),
        CHUNKED + b"zz\r\n",
    ],
)
async def test_what_is_no_http_is_told_in_the_errors_own_shape(
    bounded: System, sent: bytes
) -> None:
    check_refusal(await exchange(bounded, sent), 400, "invalid_http")


def chat(stream: bool) -> bytes:
    body = json.dumps(ASK | {"stream": stream}).encode()
    start = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    return start % (CHAT.encode(), len(body)) + body


@pytest.mark.parametrize("behind", [b"nonsense\r\n\r\n", b"x" * 40_000, CHUNKED + b"zz\r\n"])
@pytest.mark.parametrize("stream", [True, False])
async def test_what_came_whole_is_answered_before_the_fault_behind_it_ends_the_connection(
    bounded: System, stream: bool, behind: bytes
) -> None:
    bounded.llm.script = Script(["x"] * 20, pause_seconds=0.02)
    for pause in (0.0, 0.15):
        raw = await exchange(bounded, chat(stream), behind, pause=pause)
        assert raw.startswith(b"HTTP/1.1 200 ")
        assert raw.count(b"HTTP/1.1") == 1
        assert raw.count(b'"x"' if stream else b"x" * 20) == (20 if stream else 1)
        assert not bounded.llm.running


async def test_requests_sent_ahead_of_a_fault_are_all_answered(bounded: System) -> None:
    raw = await exchange(bounded, chat(stream=False) + HEALTH + HEALTH + b"nonsense\r\n\r\n")
    assert raw.count(b"HTTP/1.1 200 ") == raw.count(b"HTTP/1.1") == 3


async def test_a_head_that_drips_is_a_408(bounded: System) -> None:
    raw = await exchange(bounded, b"GET /health HTTP/1.1\r\nho", b"st: x\r\n", pause=0.2)
    check_refusal(raw, 408, "request_timeout")
    raw = await exchange(bounded, HEALTH, b"GET /hea", pause=0.1)
    assert raw.count(b"HTTP/1.1 200") == 1
    assert raw.count(b"HTTP/1.1 408") == 1


async def test_line_ends_alone_keep_no_connection_open(bounded: System) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", bounded.port)
    reading = asyncio.create_task(reader.read())
    async with asyncio.timeout(8):
        while not reading.done():
            writer.write(b"\r\n")
            await asyncio.sleep(0.05)
    writer.close()
    # Closed with line ends unread: the one or the other.
    assert isinstance(reading.exception(), ConnectionResetError) or reading.result() == b""


async def test_a_connection_that_says_nothing_is_closed_and_one_that_waits_a_while_is_served(
    bounded: System,
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", bounded.port)
    await asyncio.sleep(1)
    for _ in range(2):
        writer.write(HEALTH)
        assert (await reader.readuntil(b'"ok"}')).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(1)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert await exchange(bounded) == b""


async def test_connections_outlive_the_pools_of_clients_and_proxies() -> None:
    assert GatewaySettings().idle_timeout_seconds >= 75


@pytest.mark.parametrize("length", [b"content-length: 1000", b"transfer-encoding: chunked"])
async def test_a_body_that_drips_is_a_408_at_its_deadline(bounded: System, length: bytes) -> None:
    start = b"POST %b HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % (CHAT.encode(), length)
    began = asyncio.get_running_loop().time()
    raw = await exchange(bounded, start, *[b"1\r\n{\r\n"] * 12, pause=0.2)
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in body
    assert SECRET.encode() not in raw
    assert asyncio.get_running_loop().time() - began < 9
    assert not bounded.llm.received


async def test_a_body_that_comes_slowly_but_in_time_is_served(bounded: System) -> None:
    body = json.dumps(ASK).encode()
    start = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    third = len(body) // 3
    pieces = [body[:third], body[third : 2 * third], body[2 * third :]]
    raw = await exchange(bounded, start % (CHAT.encode(), len(body)), *pieces, pause=0.1)
    assert raw.startswith(b"HTTP/1.1 200 ")


async def test_an_answer_that_takes_longer_than_a_body_may_is_no_timeout(bounded: System) -> None:
    bounded.llm.script = Script(admission_seconds=1.5)
    assert (await bounded.ask()).status_code == 200


async def test_a_reader_that_stops_reading_is_cut_off_and_its_answer_cancelled(
    bounded: System,
) -> None:
    bounded.llm.script = Script(["x" * 100_000] * 500)
    body = json.dumps(ASK | {"stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", bounded.port, limit=1024)
    writer.write(
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
        % (CHAT.encode(), len(body), body)
    )
    await reader.readuntil(b"\r\n")
    assert bounded.llm.running == 1
    async with asyncio.timeout(15):
        while bounded.llm.running:
            await asyncio.sleep(0.05)
    writer.close()


async def test_connections_beyond_the_limit_are_told_so_and_closed(bounded: System) -> None:
    held = [await asyncio.open_connection("127.0.0.1", bounded.port) for _ in range(40)]
    await asyncio.sleep(0.2)
    answers = [await exchange(bounded, LAST) for _ in range(5)]
    refused = [raw for raw in answers if raw.startswith(b"HTTP/1.1 503 ")]
    assert refused
    check_refusal(refused[0], 503, "not_ready")
    assert read(refused[0]).headers["retry-after"] == "1"
    for _, writer in held:
        writer.close()
    await asyncio.sleep(0.2)
    assert read(await exchange(bounded, LAST)).status == 200


@pytest.mark.parametrize("text", ["[" * 30 + "]" * 30, '{"a":' * 30 + "1" + "}" * 30])
async def test_json_that_nests_too_deeply_is_a_400_on_every_path(
    bounded: System, text: str
) -> None:
    deep = f'{{"model": "{MODEL}", "messages": {text}}}'.encode()
    for path in (CHAT, "/v1/embeddings", "/v1/image_embeddings", "/v1/completions", "/tokenize"):
        answer = await bounded.http.post(path, content=deep)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_json")
        assert "20 deep" in error["message"]


@pytest.mark.parametrize(
    ("text", "limit", "deeper"),
    [
        ("[[1]]", 2, False), ("[[1]]", 1, True), ('["[[[["]', 1, False), ('{"a":[{}]}', 3, False),
        ('{"a":[{}]}', 2, True), (r'["\"[[[["]', 1, False), (r'["\\",[[]]]', 2, True),
        (r'["\\\"[[[",[]]', 2, False), ("[" * 5 + "]" * 5 + "[" * 5 + "]" * 5, 5, False),
        ("[[],[],[],[]]", 2, False), ('["a\\n\\"[[["]', 1, False),
    ],
)  # fmt: skip
async def test_brackets_within_texts_nest_nothing(text: str, limit: int, deeper: bool) -> None:
    json.loads(text if text.count("][") == 0 else "[]")
    assert nests_deeper(text.encode(), limit) is deeper


def methods() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for route in create_app(GatewaySettings()).routes:
        path = getattr(route, "path", "").replace("{id:path}", MODEL).replace("{name}", "app.js")
        found.setdefault(path, set()).update(getattr(route, "methods", None) or ())
    return found


async def test_head_goes_where_get_does_and_options_names_the_methods(bounded: System) -> None:
    assert len(methods()) > 8
    for path, served in methods().items():
        head = await bounded.http.head(path)
        if "GET" in served:
            got = await bounded.http.get(path)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            assert head.headers["content-type"] == got.headers["content-type"]
        else:
            assert head.status_code == 405
        options = await bounded.http.options(path)
        assert options.status_code == 405
        assert options.json()["error"]["code"] == "method_not_allowed"
        assert set(options.headers["allow"].split(", ")) == served, path


def echoes() -> list[tuple[str, dict[str, Any]]]:
    """Bodies at fault, with a text that must not come back at the place of the fault."""
    user = {"role": "user", "content": "hi"}
    return [
        (CHAT, ASK | {"model": SECRET}),
        (CHAT, ASK | {"temperature": SECRET}),
        (CHAT, ASK | {"messages": [{"role": SECRET, "content": "x"}]}),
        (CHAT, ASK | {"messages": [user | {"content": [{"type": SECRET}]}]}),
        (CHAT, ASK | {"messages": [user | {SECRET * 50: 1, "content": 5}]}),
        (CHAT, ASK | {"response_format": {"type": SECRET}}),
        (CHAT, ASK | {"tool_choice": SECRET}),
        (CHAT, ASK | {"logit_bias": {SECRET: 1}}),
        (CHAT, ASK | {"mm_processor_kwargs": {SECRET.replace("-", " "): 1}}),
        (CHAT, ASK | {"messages": [user | {"content": [
            {"type": "image_url", "image_url": {"url": f"data:{SECRET};base64,{SECRET}"}}]}]}),
        (CHAT, ASK | {"messages": [user | {"content": [
            {"type": "image_url", "image_url": {"url": f"ftp://{SECRET}/{SECRET}"}}]}]}),
        ("/v1/completions", {"model": SECRET, "prompt": "x"}),
        ("/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": SECRET}),
        ("/v1/embeddings", {"model": MODEL, "input": [{SECRET: SECRET}]}),
        ("/v1/image_embeddings", {"model": MODEL, "input": [SECRET]}),
        ("/tokenize", {"model": SECRET, "prompt": "x"}),
        (f"/v1/{SECRET}", {}),
        (f"/v1/models/{SECRET}?{SECRET}", {}),
    ]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), echoes())
async def test_errors_are_small_and_never_repeat_what_was_sent(
    bounded: System, path: str, body: dict[str, Any]
) -> None:
    answer = await bounded.http.post(path, json=body)
    assert 400 <= answer.status_code < 500
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert SECRET not in answer.text
    assert len(answer.content) < 2048
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("letter", ["x", "\x00", "é", "\U0001f600", '"'])
async def test_an_error_stays_under_two_kilobytes_whatever_its_texts_are(letter: str) -> None:
    body = plain_error(400, letter * 100_000, "invalid_value")
    error = ChiasmError(Reason.REQUEST_INVALID, letter * 100_000, letter * 100_000)
    for told in (body, as_http(error).body):
        assert len(json.dumps(told).encode()) < 2048
        assert told["error"]["message"].startswith(letter)
    assert plain_error(400, "short", None)["error"]["message"] == "short"


@pytest.mark.parametrize(
    ("reason", "status", "retry"),
    [
        (Reason.QUEUE_FULL, 429, ""), (Reason.NOT_READY, 503, ""), (Reason.NO_ENCODER, 503, ""),
        (Reason.INTERNAL, 500, "false"), (Reason.DEADLINE, 504, "false"),
        (Reason.ENCODER_MISMATCH, 502, "false"), (Reason.REQUEST_INVALID, 400, ""),
    ],
)  # fmt: skip
async def test_clients_are_told_not_to_repeat_what_did_harm(
    bounded: System, reason: Reason, status: int, retry: str
) -> None:
    bounded.llm.script = Script(refusal=ChiasmError(reason, "No."))
    client = bounded.openai.with_options(max_retries=1)
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(**ASK)
    answer = caught.value.response
    assert answer.status_code == status
    assert answer.headers.get("x-should-retry", "") == retry
    assert ("retry-after" in answer.headers) == (status in {429, 503})
    tries = 2 if status in {429, 503} else 1
    assert len(bounded.llm.received) == tries


async def test_a_connection_refused_for_its_head_serves_no_one_else(bounded: System) -> None:
    raw = await exchange(bounded, head(b"x: " + b"y" * 20_000), LAST)
    assert raw.count(b"HTTP/1.1") == 1


async def test_many_slow_heads_leave_the_others_alone(bounded: System) -> None:
    slow = [
        asyncio.create_task(exchange(bounded, *[b"GET /health H", b"TTP/1.1\r\n"], pause=0.1))
        for _ in range(20)
    ]
    async with httpx.AsyncClient(verify=False) as http:
        answer = await http.get(f"http://127.0.0.1:{bounded.port}/health")
        assert answer.status_code == 200
    assert all(raw.startswith(b"HTTP/1.1 408 ") for raw in await asyncio.gather(*slow))
