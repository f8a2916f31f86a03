"""HTTP as odd clients speak it: versions, methods, bodies in pieces, requests sent ahead."""

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from gateway.app import create_app
from gateway.settings import GatewaySettings
from tests.gateway.gateway_system import MIB, System
from tests.gateway.raw_http import Answer, chat, request, wired
from tests.scripted_llm import MODEL, Script

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
STREAM: Any = ASK | {"stream": True}
ROUTES = [route for route in create_app(GatewaySettings()).routes if isinstance(route, Route)]
NAMES = {"{id:path}": MODEL, "{name}": "answer.js"}
PATHS = [
    (re.sub("{.*}", lambda found: NAMES[found[0]], route.path), route.methods or set())
    for route in ROUTES
]
POSTED = [path for path, methods in PATHS if "POST" in methods]


async def answer_to(system: System, sent: bytes, method: str = "POST") -> Answer:
    """The answer on a connection of its own."""
    async with wired(system.port) as wire:
        await wire.send(sent)
        return await wire.answer(method)


async def assert_alive(system: System) -> None:
    assert (await system.ask()).status_code == 200
    assert (await system.http.get("/health")).status_code == 200


def assert_an_error(answer: Answer, status: int, code: str | None) -> None:
    assert answer.status == status
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert answer.headers["x-request-id"].startswith("req-")
    assert len(answer.body) < 2048


@pytest.mark.parametrize(("path", "methods"), PATHS)
async def test_head_is_get_without_the_body_and_never_where_get_is_not(
    system: System, path: str, methods: set[str]
) -> None:
    async with wired(system.port) as wire:
        await wire.send(request("HEAD", path))
        answer = await wire.answer("HEAD")
        assert answer.status == (200 if "GET" in methods else 405)
        assert answer.headers["x-request-id"]
        # No byte of a body came: the next answer begins where it should.
        await wire.send(request("GET", "/health"))
        assert (await wire.answer()).json() == {"status": "ok"}


@pytest.mark.parametrize(("path", "methods"), PATHS)
@pytest.mark.parametrize("method", ["OPTIONS", "DELETE", "PUT", "PATCH", "TRACE"])
async def test_other_methods_are_told_with_those_that_there_are(
    system: System, path: str, methods: set[str], method: str
) -> None:
    answer = await answer_to(system, request(method, path))
    assert_an_error(answer, 405, "method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) == methods


@pytest.mark.parametrize("path", POSTED)
@pytest.mark.parametrize("form", ["{}/", "/{}", "//{}//", "/v1/{}", "{}/x", "{}?a=b", "{}%2f"])
async def test_no_form_of_a_path_redirects_a_post(system: System, path: str, form: str) -> None:
    answer = await answer_to(system, request("POST", form.format(path), b"{"))
    assert answer.status in {400, 404}
    assert "location" not in answer.headers
    assert_an_error(answer, answer.status, answer.json()["error"]["code"])


@pytest.mark.parametrize(
    "path",
    [
        "/v1/messages",
        "/v1/v1/chat/completions",
        "/v1/audio/speech",
        "/%00",
        "/v1/models%0d%0aset-cookie:%20a=b",
        "/..",
        "/%2e%2e/",
    ],
)
async def test_what_is_not_there_is_a_404_in_the_shape_of_errors(
    system: System, path: str
) -> None:  # fmt: skip
    for method in ("GET", "POST"):
        answer = await answer_to(system, request(method, path))
        assert_an_error(answer, 404, "not_found")
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_gets_its_answer_without_chunks_and_the_connection_ends_it(
    system: System, stream: bool
) -> None:
    system.llm.script = Script(["a", "b"], pause_seconds=0.02)
    async with wired(system.port) as wire:
        await wire.send(chat(ASK | {"stream": stream}, version="1.0"))
        status, headers = await wire.head()
        body = await wire.rest()
    assert (status, headers["connection"]) == (200, "close")
    assert "transfer-encoding" not in headers
    if not stream:
        assert int(headers["content-length"]) == len(body)
        assert json.loads(body)["choices"][0]["message"]["content"] == "ab"
        return
    told = Answer(status, headers, body, ()).events()
    assert told[-1] == "[DONE]"
    said = [json.loads(one)["choices"][0]["delta"].get("content") for one in told[:-1]]
    assert said == ["", "a", "b", None]


async def test_http_1_0_gets_each_event_as_it_comes(system: System) -> None:
    system.llm.script = Script(["a"] * 100_000, pause_seconds=0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", system.port)
    writer.write(chat(STREAM, version="1.0"))
    for _ in range(5):
        await asyncio.wait_for(reader.readuntil(b'"content":"a"'), 5)
    assert system.llm.running == 1
    writer.close()
    async with asyncio.timeout(1):
        while system.llm.running:
            await asyncio.sleep(0.01)


async def test_a_failure_in_a_stream_of_http_1_0_is_told_too(system: System) -> None:
    system.llm.script = Script(end=None)
    async with wired(system.port) as wire:
        await wire.send(chat(STREAM, version="1.0"))
        await wire.head()
        body = await wire.rest()
    assert b'"code":"internal_error"' in body
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_requests_sent_ahead_are_answered_in_order(
    system: System, fields: dict[str, Any]
) -> None:
    system.llm.script = Script(pause_seconds=0.02)
    bodies = [ASK | fields | {"max_tokens": count} for count in (1, 2, 3)]
    async with wired(system.port) as wire:
        await wire.send(b"".join(chat(body) for body in bodies) + request("GET", "/nothing"))
        for _ in bodies:
            answer = await wire.answer()
            assert answer.status == 200
            assert b"world" in answer.body
        assert (await wire.answer()).status == 404
    limits = [one.message.sampling.max_token_count for one in system.llm.received]
    assert limits == [1, 2, 3]


async def test_many_requests_sent_ahead_are_all_answered(system: System) -> None:
    async with wired(system.port) as wire:
        await wire.send(chat(ASK) * 200)
        assert [(await wire.answer()).status for _ in range(200)] == [200] * 200


async def test_a_bad_request_between_good_ones_leaves_them_be(system: System) -> None:
    bad = request("POST", "/v1/chat/completions", b"{")
    async with wired(system.port) as wire:
        await wire.send(chat(ASK) + bad + chat(STREAM) + chat(ASK))
        assert [(await wire.answer()).status for _ in range(4)] == [200, 400, 200, 200]


def in_chunks(body: bytes, size: int, trailer: bytes = b"") -> bytes:
    pieces = (body[start : start + size] for start in range(0, len(body), size))
    chunks = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return chunks + b"0\r\n" + trailer + b"\r\n"


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_a_body_in_chunks_is_read(system: System, size: int) -> None:
    head = request("POST", "/v1/chat/completions").replace(
        b"content-length: 0", b"transfer-encoding: chunked"
    )
    body = json.dumps(ASK).encode()
    async with wired(system.port) as wire:
        await wire.send(head + in_chunks(body, size, b"x-checksum: 1\r\n"))
        assert (await wire.answer()).status == 200
        await wire.send(chat(ASK))
        assert (await wire.answer()).status == 200


async def test_a_length_beside_chunks_is_refused(system: System) -> None:
    """Two ways to tell where a request ends let one be hidden in another."""
    head = request("POST", "/v1/chat/completions", headers=("transfer-encoding: chunked",))
    answer = await answer_to(system, head + in_chunks(json.dumps(ASK).encode(), 50))
    assert answer.status == 400
    assert answer.headers["connection"] == "close"
    assert system.llm.received == []


NO_HTTP: dict[str, bytes] = {
    "nonsense": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "two lengths": b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n"
    b"content-length: 2\r\n\r\n12",
    "negative length": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    "odd chunk": b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
    b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "space in a name": b"GET /health HTTP/1.1\r\nhost: x\r\na b: c\r\n\r\n",
    "NUL in a value": b"GET /health HTTP/1.1\r\nhost: x\r\na: b\0c\r\n\r\n",
    "bare CR in the id": b"GET /health HTTP/1.1\r\nhost: x\r\nx-request-id: a\rb: c\r\n\r\n",
}


@pytest.mark.parametrize("sent", NO_HTTP.values(), ids=NO_HTTP.keys())
async def test_what_is_no_http_is_a_400_in_the_shape_of_errors(system: System, sent: bytes) -> None:
    answer = await answer_to(system, sent)
    assert_an_error(answer, 400, "invalid_http")
    assert answer.headers["connection"] == "close"
    await assert_alive(system)


async def test_nonsense_behind_a_stream_never_lands_within_it(system: System) -> None:
    system.llm.script = Script(["x"] * 50, pause_seconds=0.02)
    async with wired(system.port) as wire:
        await wire.send(chat(STREAM))
        await wire.head()
        await wire.send(b"nonsense\r\n\r\n")
        assert b"HTTP/1.1" not in await wire.rest()
    async with asyncio.timeout(1):
        while system.llm.running:
            await asyncio.sleep(0.01)


async def test_a_body_over_the_limit_is_told_and_the_connection_closes_cleanly(
    system: System,
) -> None:
    sent = chat(ASK | {"pad": "x" * (5 * MIB)})
    async with wired(system.port) as wire:
        await wire.send(sent)
        answer = await wire.answer()
        # A reset would raise here, or would have eaten the answer.
        assert await wire.rest() == b""
    assert_an_error(answer, 413, "body_too_large")
    assert answer.headers["connection"] == "close"
    await assert_alive(system)


async def test_a_data_url_of_a_megabyte_and_a_half_is_served(system: System) -> None:
    url = "data:image/png;base64," + "iVBORw0KGgo=".ljust(3 * MIB // 2 - 400_000, "A")
    part = {"type": "image_url", "image_url": {"url": url.rstrip("=")}}
    text = {"type": "text", "text": "x" * 400_000}
    sent = chat(ASK | {"messages": [{"role": "user", "content": [part, text]}]})
    assert len(sent) > 3 * MIB // 2
    answer = await answer_to(system, sent)
    assert answer.status in {200, 400}
    assert answer.status == 200 or answer.json()["error"]["code"] != "body_too_large"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("x-request-id: mine\\r\\nset-cookie: a=b",), None),
        (("x-request-id: mine%0d%0aset-cookie: a=b",), None),
        (("x-request-id: mine\u2028x".encode().decode("latin-1"),), None),
        (("x-request-id: \u00fcber".encode().decode("latin-1"),), None),
        (("x-request-id: " + "x" * 129,), None),
        (("x-request-id: " + "x" * 128,), "x" * 128),
        (("X-REQUEST-ID:    mine   ",), "mine"),
    ],
)
async def test_a_request_id_cannot_bring_a_header_along(
    system: System, lines: tuple[str, ...], expected: str | None
) -> None:
    for path in ("/health", "/nothing"):
        answer = await answer_to(system, request("GET", path, headers=lines))
        assert "set-cookie" not in answer.headers
        found = answer.headers["x-request-id"]
        assert found == expected if expected else found.startswith("req-")


async def test_a_request_id_is_not_repeated_in_the_events(system: System) -> None:
    sent = chat(STREAM, headers=("x-request-id: only-in-the-head",))
    answer = await answer_to(system, sent)
    assert answer.headers["x-request-id"] == "only-in-the-head"
    assert b"only-in-the-head" not in answer.body


async def test_an_offer_of_http_2_is_passed_over(system: System) -> None:
    """Java's own client makes one with each first request of a connection."""
    offer = (
        "connection: Upgrade, HTTP2-Settings",
        "upgrade: h2c",
        "http2-settings: AAEAAEAAAAIAAA",
    )
    async with wired(system.port) as wire:
        for fields in (ASK, STREAM):
            await wire.send(chat(fields, headers=offer))
            assert (await wire.answer()).status == 200
        await wire.send(request("GET", "/v1/models", headers=offer))
        assert (await wire.answer()).status == 200
        await wire.send(chat(ASK))
        assert (await wire.answer()).status == 200


async def test_the_absolute_form_of_a_target_is_served(system: System) -> None:
    answer = await answer_to(system, request("GET", f"http://127.0.0.1:{system.port}/health"))
    assert answer.json() == {"status": "ok"}


CURL = shutil.which("curl")


async def curl(*words: str) -> tuple[str, bytes]:
    """What curl says of an exchange (`-v`), and the body."""
    assert CURL
    process = await asyncio.create_subprocess_exec(
        CURL, "-sv", "--noproxy", "*", "--max-time", "20", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    body, told = await process.communicate()
    assert process.returncode == 0, told.decode(errors="replace")[-2000:]
    return told.decode(errors="replace"), body


@pytest.mark.skipif(CURL is None, reason="curl is not installed")
@pytest.mark.parametrize("version", ["--http1.0", "--http1.1", "--http2"])
async def test_curl_sends_two_megabytes_and_gets_its_answer(
    system: System, tmp_path: Path, version: str
) -> None:
    file = tmp_path / "body.json"
    file.write_text(json.dumps(ASK | {"pad": "x" * (2 * MIB)}))
    told, body = await curl(
        version, "-H", "content-type: application/json", "--data-binary", f"@{file}",
        f"http://127.0.0.1:{system.port}/v1/chat/completions",
    )  # fmt: skip
    assert json.loads(body)["choices"][0]["message"]["content"] == "Hello, world"
    if version == "--http1.1":
        assert "> Expect: 100-continue" in told
        assert "< HTTP/1.1 100 Continue" in told


@pytest.mark.skipif(CURL is None, reason="curl is not installed")
async def test_curl_sends_a_body_of_unknown_length_and_reads_a_stream(
    system: System, tmp_path: Path
) -> None:
    file = tmp_path / "body.json"
    file.write_text(json.dumps(STREAM | {"pad": "x" * 100_000}))
    told, body = await curl(
        "-N", "--compressed", "-H", "transfer-encoding: chunked", "--data-binary", f"@{file}",
        f"http://127.0.0.1:{system.port}/v1/chat/completions",
    )  # fmt: skip
    assert "< transfer-encoding: chunked" in told.lower()
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.skipif(CURL is None, reason="curl is not installed")
async def test_curl_is_told_of_a_body_over_the_limit_before_it_sends_it(
    system: System, tmp_path: Path
) -> None:
    file = tmp_path / "body.json"
    file.write_bytes(b"x" * (6 * MIB))
    told, body = await curl(
        "--http1.1", "--data-binary", f"@{file}",
        f"http://127.0.0.1:{system.port}/v1/chat/completions",
    )  # fmt: skip
    assert json.loads(body)["error"]["code"] == "body_too_large"
    assert "< HTTP/1.1 413" in told
    assert "100 Continue" not in told
