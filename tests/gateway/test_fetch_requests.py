"""Pictures by URL in requests to a gateway, from a real host that misbehaves."""

import asyncio
import base64
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from chiasm.v1 import image_pb2, llm_service_pb2
from tests.gateway.gateway_system import MIB, System, gateway_before, whole_system
from tests.gateway.picture_host import PICTURE, PictureHost, picture_host
from tests.gateway.test_image_embeddings import PictureService
from tests.scripted_llm import MODEL, Script

pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHER = PICTURE + b"\0"
SECONDS = 2
Json = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host() -> AsyncIterator[PictureHost]:
    async with picture_host() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_system(host: PictureHost) -> AsyncIterator[System]:
    async with whole_system(**reaching(host)) as running:
        yield running


@pytest.fixture
def system(running_system: System, host: PictureHost) -> System:
    running_system.llm.script = Script()
    running_system.llm.received.clear()
    running_system.llm.card.vision_source = llm_service_pb2.VISION_SOURCE_REMOTE
    host.body, host.most_running = PICTURE, 0
    host.requests.clear()
    return running_system


def reaching(host: PictureHost, **more: Any) -> Json:
    """Settings of a gateway that fetches from `host`."""
    settings = {
        "url_allow": host.address,
        "url_ports": f"80,443,{host.port}",
        "url_seconds": SECONDS,
        "max_image_bytes": MIB,
        "max_request_image_bytes": 2 * MIB,
    }
    return settings | more


def by_url(url: str, **more: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url} | more}


def inline(data: bytes) -> Json:
    return by_url(f"data:image/png;base64,{base64.b64encode(data).decode()}")


def user(*parts: Json) -> Json:
    return {"role": "user", "content": list(parts)}


def text(words: str) -> Json:
    return {"type": "text", "text": words}


async def refused(system: System, *messages: Json, **fields: Any) -> Json:
    """The error of a request that never reached the LLM service, streamed and not."""
    errors: list[Json] = []
    for stream in (False, True):
        answer = await system.ask(messages=list(messages), stream=stream, **fields)
        assert answer.status_code == 400, answer.text
        assert len(answer.content) < 2048
        assert "secret-of-the-host" not in answer.text
        errors.append(answer.json()["error"])
    assert system.llm.received == []
    assert errors[0]["type"] == "invalid_request_error"
    assert errors[0]["code"] == errors[1]["code"]
    return errors[0]


PLACE = "messages[0].content[1].image_url.url"


# What arrives


async def test_a_picture_by_url_arrives_as_its_bytes_at_its_place(
    system: System, host: PictureHost
) -> None:
    host.body = OTHER
    answer = await system.ask(
        messages=[
            user(text("a"), by_url(host.url("/ok"), detail="low"), text("b"), inline(PICTURE)),
            {"role": "assistant", "content": "c"},
            user(by_url(host.url("/crumbs"))),
        ]
    )
    assert answer.status_code == 200, answer.text
    last = system.llm.last
    parts = last.message.messages[0].parts
    assert [part.WhichOneof("content") for part in parts] == ["text", "image", "text", "image"]
    assert (last.image(0, 1), last.image(0, 3), last.image(2, 0)) == (OTHER, PICTURE, OTHER)
    assert parts[1].image.options.detail == image_pb2.IMAGE_DETAIL_LOW


async def test_every_way_in_gives_the_same_bytes(system: System, host: PictureHost) -> None:
    url = host.url("/ok")
    chat = {"model": MODEL, "messages": [user(by_url(url))]}
    assert (await system.http.post("/v1/chat/completions", json=chat)).status_code == 200
    given = {"model": MODEL, "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    ]}  # fmt: skip
    assert (await system.http.post("/v1/responses", json=given)).status_code == 200
    assert [one.image(0, 0) for one in system.llm.received] == [PICTURE, PICTURE]
    assert (await system.http.post("/tokenize", json=chat)).status_code == 200
    asked = system.llm.tokenized[-1]
    image = asked.message.messages[0].parts[0].image
    assert bytes(asked.data(image.data)) == PICTURE


@pytest.mark.parametrize("route", ["/v1/image_embeddings", "/v1/embeddings"])
async def test_pictures_to_be_embedded_are_fetched_too(host: PictureHost, route: str) -> None:
    service = PictureService()
    url = host.url("/ok")
    async with (
        service.serving() as llm,
        gateway_before(llm, **reaching(host)) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False, timeout=20) as http,
    ):
        for given in ([url], [{"image": url}], [by_url(url)], [url, inline(PICTURE), url]):
            answer = await http.post(route, json={"model": "m", "input": given})
            assert answer.status_code == 200, answer.text
        for request in service.received:
            assert bytes(request.data(request.message.part.image.data)) == PICTURE
        assert len(service.received) == 6
        service.received.clear()
        for bad, code in (("http://127.0.0.1/", "invalid_image_url"),
                          (host.url("/none"), "failed_to_download_image")):  # fmt: skip
            answer = await http.post(route, json={"model": "m", "input": [url, bad]})
            error = answer.json()["error"]
            told = (answer.status_code, error["code"], error["param"])
            assert told == (400, code, "input[1]")
        many = await http.post(route, json={"model": "m", "input": [inline(bytes(MIB))] * 3})
        assert many.json()["error"]["code"] == "image_file_too_large"
        assert service.received == []


async def test_what_a_url_gives_now_counts_and_not_what_it_gave(
    system: System, host: PictureHost
) -> None:
    for body in (PICTURE, OTHER, PICTURE):
        host.body = body
        await system.ask(messages=[user(by_url(host.url("/ok")))])
        assert system.llm.last.image(0, 0) == body


async def test_one_url_in_several_places_is_fetched_once(system: System, host: PictureHost) -> None:
    part = by_url(host.url("/ok"))
    await system.ask(messages=[user(part, part), user(part)])
    assert len(host.requests) == 1
    last = system.llm.last
    assert last.image(0, 0) == last.image(0, 1) == last.image(1, 0) == PICTURE


async def test_the_pictures_of_a_request_are_fetched_together(
    system: System, host: PictureHost
) -> None:
    host.waits_for = 5
    parts = [by_url(host.url(f"/together/{number}")) for number in range(5)]
    assert (await system.ask(messages=[user(*parts)])).status_code == 200
    assert host.most_running == 5


# What is refused


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/x.png", "http://169.254.169.254/latest/meta-data/", "http://10.0.0.1/",
     "http://[::1]/", "http://[::ffff:169.254.169.254]/", "http://2130706433/", "http://localhost/",
     "http://0x7f.0.0.1/", "https://metadata/", "http://me:secret@example.com/x.png",
     "http://example.com:22/", "http://example.com./", "ftp://example.com/x.png",
     "file:///etc/hostname", "file:///nowhere", "/etc/hostname", "etc/hostname", "//example.com/x",
     "iVBORw0KGgo=", ""],
)  # fmt: skip
async def test_a_url_that_is_not_fetched_opens_no_socket_and_no_file(
    system: System, url: str
) -> None:
    await system.ask()  # what the gateway itself opens is open
    system.llm.received.clear()
    seen: list[tuple[str, Any]] = []
    _seen.append(seen)
    try:
        error = await refused(system, user(text("a"), by_url(url)))
    finally:
        _seen.remove(seen)
    assert (error["code"], error["param"]) == ("invalid_image_url", PLACE)
    assert "secret" not in error["message"]
    assert seen == []


_seen: list[list[tuple[str, Any]]] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in {"socket.connect", "socket.getaddrinfo", "open"}:
        for seen in _seen:
            seen.append((event, arguments[:2]))


sys.addaudithook(_watch)


async def test_that_watch_sees_a_picture_that_is_fetched(system: System, host: PictureHost) -> None:
    seen: list[tuple[str, Any]] = []
    _seen.append(seen)
    await system.ask(messages=[user(by_url(host.url("/ok")))])
    _seen.remove(seen)
    assert [event for event, _ in seen] == ["socket.connect"]
    assert seen[0][1][1] == (host.address, host.port)


async def test_the_same_is_said_of_files_that_are_there_and_that_are_not(system: System) -> None:
    said = {
        (await refused(system, user(text("a"), by_url(url))))["message"]
        for url in ("file:///etc/hostname", "file:///nowhere", "/etc/hostname", "/nowhere")
    }
    assert len(said) == 1
    assert "data URL" in said.pop()


@pytest.mark.parametrize(
    ("path", "code", "told"),
    [
        ("/none", "failed_to_download_image", "404"),
        ("/status/503", "failed_to_download_image", "503"),
        ("/noise/00", "failed_to_download_image", "not HTTP"),
        ("/hang", "failed_to_download_image", "2 seconds"),
        ("/drip", "failed_to_download_image", "2 seconds"),
        ("/endless", "image_file_too_large", str(MIB)),
        ("/huge", "image_file_too_large", str(MIB)),
        ("/to/302/http:%2F%2F127.0.0.1%2F", "invalid_image_url", "data URL"),
    ],
)
async def test_a_picture_that_does_not_arrive_is_named_with_the_reason(
    system: System, host: PictureHost, path: str, code: str, told: str
) -> None:
    error = await refused(system, user(text("a"), by_url(host.url(path))))
    assert (error["code"], error["param"]) == (code, PLACE)
    assert told in error["message"]
    assert (await system.ask()).status_code == 200


async def test_the_first_picture_that_fails_ends_the_other_downloads(
    system: System, host: PictureHost
) -> None:
    parts = [by_url(host.url("/hang")), by_url(host.url("/none"))]
    error = await refused(system, user(*parts))
    assert error["param"] == PLACE
    await host.until(lambda: host.running == 0)


async def test_pictures_are_counted_before_any_is_fetched(
    system: System, host: PictureHost
) -> None:
    parts = [by_url(host.url(f"/ok/{number}")) for number in range(9)]
    error = await refused(system, user(*parts))
    assert error["code"] == "too_many_images"
    assert host.requests == []


async def test_an_unknown_model_is_told_before_any_picture_is_fetched(
    system: System, host: PictureHost
) -> None:
    answer = await system.ask(model="nope", messages=[user(by_url(host.url("/ok")))])
    assert answer.status_code == 404
    assert host.requests == []


async def test_where_no_pictures_are_encoded_none_is_fetched(
    system: System, host: PictureHost
) -> None:
    system.llm.card.vision_source = llm_service_pb2.VISION_SOURCE_NONE
    async with (
        gateway_before(system.server.port, **reaching(host)) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as http,
    ):
        body = {"model": MODEL, "messages": [user(by_url(host.url("/ok")))]}
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["code"] == "unsupported_parameter"
    assert host.requests == []


async def test_the_bytes_of_all_pictures_are_bounded_however_they_come(
    system: System, host: PictureHost
) -> None:
    host.body = bytes(MIB * 3 // 4)
    two = [by_url(host.url("/ok/1")), inline(host.body)]
    assert (await system.ask(messages=[user(*two)])).status_code == 200
    system.llm.received.clear()
    for three in ([*two, by_url(host.url("/ok/2"))], [*two, inline(host.body)]):
        error = await refused(system, user(*three))
        assert error["code"] == "image_file_too_large"
        assert error["param"].startswith("messages[0].content[")
        assert str(2 * MIB) in error["message"]


async def test_one_switch_turns_it_off(host: PictureHost) -> None:
    host.requests.clear()
    async with whole_system(**reaching(host, url_pictures=False)) as system:
        error = await refused(system, user(text("a"), by_url(host.url("/ok"))))
        assert (error["code"], error["param"]) == ("invalid_image_url", PLACE)
        assert "not enabled" in error["message"]
        assert (await system.ask(messages=[user(inline(PICTURE))])).status_code == 200
    assert host.requests == []


async def test_what_the_operator_denies_is_not_fetched(host: PictureHost) -> None:
    host.requests.clear()
    async with whole_system(**reaching(host, url_deny="127.0.0.0/8")) as system:
        error = await refused(system, user(text("a"), by_url(host.url("/ok"))))
        assert error["code"] == "invalid_image_url"
    assert host.requests == []


# Under load


async def test_a_client_that_leaves_ends_its_downloads(system: System, host: PictureHost) -> None:
    asking = asyncio.create_task(
        system.ask(messages=[user(*(by_url(host.url(f"/hang/{n}")) for n in range(3)))])
    )
    await host.until(lambda: host.running == 3)
    asking.cancel()
    await asyncio.wait([asking])
    # Long before the downloads' own deadline.
    async with asyncio.timeout(SECONDS / 2):
        await host.until(lambda: host.running == 0)
    assert system.llm.received == []


async def test_dripping_hosts_hold_up_nobody_else(system: System, host: PictureHost) -> None:
    dripping = [
        asyncio.create_task(system.ask(messages=[user(by_url(host.url(f"/drip/{number}")))]))
        for number in range(64)
    ]
    await host.until(lambda: host.running >= 8)
    for message in (user(text("hi")), user(inline(PICTURE))):
        async with asyncio.timeout(SECONDS):
            assert (await system.ask(messages=[message])).status_code == 200
    answers = await asyncio.gather(*dripping)
    codes = [answer.json()["error"]["code"] for answer in answers]
    assert set(codes) <= {"failed_to_download_image", "queue_full"}
    for answer in answers:
        if answer.status_code == 429:
            assert answer.headers["retry-after"]
        else:
            assert answer.status_code == 400
    assert (await system.ask(messages=[user(by_url(host.url("/ok")))])).status_code == 200


async def test_what_is_fetched_counts_as_held_until_the_llm_service_accepts(
    host: PictureHost,
) -> None:
    host.body = bytes(MIB // 2)
    async with whole_system(**reaching(host, max_held_body_bytes=MIB)) as system:
        system.llm.script = Script(admission_seconds=1)
        parts = [user(by_url(host.url("/ok")))]
        answers = await asyncio.gather(*(system.ask(messages=parts) for _ in range(4)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses[0] == 200
        assert statuses[-1] == 429
        metrics = (await system.http.get("/metrics")).text
        assert "chiasm_gateway_held_body_bytes 0.0" in metrics
        assert "chiasm_gateway_active_picture_downloads 0.0" in metrics
        fetched, full = statuses.count(200), statuses.count(429)
        name = "chiasm_gateway_picture_downloads_total"
        assert f'{name}{{outcome="ok"}} {fetched}.0' in metrics
        assert f'{name}{{outcome="QUEUE_FULL"}} {full}.0' in metrics
