"""Keys of different tenants before one real system: what one holds, no other finds."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from chiasm.cli import main
from tests.system.processes import start_gateway
from tests.system.test_references import chat, fresh, held, ref_part, refused, url_part
from tests.system.three import Three

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

CHAT = "/v1/chat/completions"
TEXT: Any = {"type": "text", "text": "What is it?"}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


@pytest.fixture
def red(keys_file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return new_key("red", "team-red", keys_file, capsys)


@pytest.fixture
def blue(keys_file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return new_key("blue", "team-blue", keys_file, capsys)


@pytest.fixture
def url(tiny: Three, keys_file: Path, red: str, blue: str) -> Iterator[str]:
    """A gateway that asks for keys, before the services that other tests use without."""
    with start_gateway(tiny.llm.port, "--keys-file", str(keys_file)) as gateway:
        yield gateway.url


def new_key(name: str, tenant: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["key", "new", "--name", name, "--tenant", tenant, "--file", str(path)]) == 0
    return capsys.readouterr().out.strip()


def client(url: str, key: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False)


async def test_a_reference_is_found_by_its_own_tenant_alone(
    tiny: Three, url: str, red: str, blue: str
) -> None:
    picture = fresh()
    async with client(url, red) as first, client(url, blue) as second, tiny.http() as shared:
        [item] = await held(first, url_part(picture))
        body = chat(tiny, TEXT, ref_part(item["reference"]))
        own = await first.post(CHAT, json=body)
        assert own.status_code == 200, own.text
        for other in (second, shared):
            answer = await other.post(CHAT, json=body)
            told = refused(
                answer, 400, "embedding_not_found", "messages[0].content[1].image_embeds.ref"
            )
            assert "team-red" not in told
        [theirs] = await held(second, url_part(picture))
        assert theirs["reference"] != item["reference"]


async def test_a_name_of_a_picture_is_its_tenants_own(
    tiny: Three, url: str, red: str, blue: str
) -> None:
    async with client(url, red) as first, client(url, blue) as second:
        for one in (first, second):  # the same name, other bytes
            named = url_part(fresh()) | {"uuid": "my-picture"}
            answer = await one.post(CHAT, json=chat(tiny, TEXT, named))
            assert answer.status_code == 200, answer.text
        alone = {"type": "image_url", "image_url": None, "uuid": "my-picture"}
        assert (await second.post(CHAT, json=chat(tiny, TEXT, alone))).status_code == 200


async def test_a_new_key_of_the_same_tenant_finds_what_the_old_one_held(
    tiny: Three, url: str, red: str, keys_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client(url, red) as first:
        [item] = await held(first, url_part(fresh()))
    fresh_key = new_key("red-2", "team-red", keys_file, capsys)
    body = chat(tiny, TEXT, ref_part(item["reference"]))
    async with client(url, fresh_key) as second, asyncio.timeout(15):
        while (answer := await second.post(CHAT, json=body)).status_code == 401:
            await asyncio.sleep(0.2)
        assert answer.status_code == 200, answer.text
