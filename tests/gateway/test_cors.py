"""Browsers' rules for pages of other origins, where the operator lets such pages in."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import ValidationError

from gateway.settings import GatewaySettings
from tests.gateway.gateway_system import System, whole_system
from tests.gateway.test_keys import entry
from tests.scripted_llm import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")

ORIGIN = "https://page.example"
CHAT = "/v1/chat/completions"
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
WANTED = "authorization,content-type,x-stainless-os,x-stainless-lang,x-stainless-retry-count"


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(entry("red", requests_per_minute=100))
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(keys_file: Path) -> AsyncIterator[System]:
    """Keys are on; pages of one origin, and of one on this machine, are let in."""
    origins = f"{ORIGIN}, http://localhost:5173"
    async with whole_system(keys_file=keys_file, cors_origins=origins) as running:
        yield running


def preflight(origin: str, method: str = "POST") -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": WANTED,
    }


@pytest.mark.parametrize("origin", [ORIGIN, "http://localhost:5173"])
async def test_a_preflight_needs_no_key_and_lets_the_clients_own_headers_in(
    shared: System, origin: str
) -> None:
    answer = await shared.http.options(CHAT, headers=preflight(origin))
    assert answer.is_success
    assert answer.headers["access-control-allow-origin"] == origin
    assert "POST" in answer.headers["access-control-allow-methods"]
    allowed = answer.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
    assert set(WANTED.split(",")) <= set(allowed)
    assert answer.headers["x-request-id"]
    assert "origin" in answer.headers["vary"].lower()


@pytest.mark.parametrize("origin", ["https://other.example", "null", "https://page.example.evil"])
async def test_a_preflight_of_another_origin_is_refused_in_json(
    shared: System, origin: str
) -> None:
    answer = await shared.http.options(CHAT, headers=preflight(origin))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "cors_refused")
    assert "access-control-allow-origin" not in answer.headers
    assert ".example" not in answer.text


async def test_a_page_can_read_answers_and_their_headers(shared: System) -> None:
    headers = {"origin": ORIGIN, "authorization": "Bearer red"}
    for stream in (False, True):
        answer = await shared.http.post(CHAT, json=ASK | {"stream": stream}, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert answer.headers["access-control-expose-headers"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("POST", CHAT, "", 401), ("POST", CHAT, "wrong", 401), ("POST", CHAT, "red", 400),
        ("GET", "/nothing", "red", 404), ("GET", CHAT, "red", 405), ("GET", "/health", "", 200),
    ],
)  # fmt: skip
async def test_a_page_can_read_errors_too(
    shared: System, method: str, path: str, key: str, status: int
) -> None:
    headers = {"origin": ORIGIN} | ({"authorization": f"Bearer {key}"} if key else {})
    answer = await shared.http.request(method, path, headers=headers)
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["x-request-id"]


async def test_a_body_too_large_is_an_error_that_a_page_can_read() -> None:
    async with whole_system(cors_origins="*", max_body_bytes=1024) as running:
        answer = await running.http.post(
            CHAT, content=b" " * 5000, headers={"origin": "https://any.example"}
        )
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (413, "*")


async def test_an_options_request_that_is_no_preflight_needs_a_key(shared: System) -> None:
    answer = await shared.http.options(CHAT, headers={"origin": ORIGIN})
    assert answer.status_code == 401


async def test_without_the_setting_no_origin_is_let_in() -> None:
    async with whole_system() as running:
        answer = await running.http.options(CHAT, headers=preflight(ORIGIN))
        assert answer.status_code == 405
        answer = await running.http.post(CHAT, json=ASK, headers={"origin": ORIGIN})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    "text", ["page.example", "https://page.example/", "https://Page.example", "https://*.example"]
)
async def test_what_no_browser_sends_as_an_origin_ends_the_start(text: str) -> None:
    with pytest.raises(ValidationError, match="an origin is"):
        GatewaySettings(cors_origins=text)
