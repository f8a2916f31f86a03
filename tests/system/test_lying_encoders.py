"""An encoder that lies is named in the log and asked no more; no caller gets a wrong answer."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from chiasm.client import AsyncClient
from chiasm.conversation import Message, Sampling, user
from chiasm.errors import ChiasmError, Reason
from chiasm.models.vision import VisionHalf
from tests.scripted_encoder import Behaviour, ScriptedEncoder
from tests.system.processes import ServiceProcess
from tests.system.three import figure, noise, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SHORT = Sampling(temperature=0, max_tokens=8, ignore_eos=True)
# Enough that one of them surely has the liar as its first encoder.
PICTURES = [noise(seed) for seed in range(30, 42)]
TEXT = [user("Say something.")]
ATTEMPT_SECONDS = 1.5
# Of each whole test's callers.
DEADLINE_SECONDS = 20.0

UNARY: dict[Behaviour, str] = {
    "too few rows": "lying",
    "rows of another size": "lying",
    "not finite": "lying",
    "another picture": "lying",
    "no identity": "lying",
    "garbage": "lying",
    "another identity": "foreign",
    "silent": "silent",
}
CHUNKED: dict[Behaviour, str] = {
    "truncated chunk": "lying",
    "wrong checksum": "lying",
    "no trailer": "lying",
    "endless chunks": "lying",
    "more than stated": "lying",
    "chunks out of order": "lying",
    "huge header": "lying",
    "dripping chunks": "silent",
}
ALONE: dict[Behaviour, tuple[Reason, ...]] = {
    "not finite": (Reason.INTERNAL,),
    "wrong checksum": (Reason.INTERNAL,),
    "another identity": (Reason.ENCODER_MISMATCH,),
    "silent": (Reason.NO_ENCODER,),
}


class Asked:
    """An LLM service whose encoders are those that a file lists."""

    def __init__(self, llm: ServiceProcess, listed: Path) -> None:
        self.llm = llm
        self._listed = listed

    @asynccontextmanager
    async def beside(self, *encoders: ScriptedEncoder) -> AsyncIterator[AsyncClient]:
        """Each of them serves and is known to the service; a client of it."""
        async with AsyncExitStack() as stack:
            for encoder in encoders:
                await stack.enter_async_context(encoder.serving())
            self._listed.write_text("\n".join(one.address for one in encoders))
            await self._known([one.address for one in encoders])
            yield await stack.enter_async_context(
                AsyncClient(self.llm.target, timeout=DEADLINE_SECONDS)
            )

    def told(self, event: str, address: str) -> list[dict[str, Any]]:
        """The lines of the log about one encoder."""
        lines = [json.loads(line) for line in self.llm.log().splitlines() if line[:1] == "{"]
        return [one for one in lines if (one["event"], one.get("encoder")) == (event, address)]

    async def _known(self, addresses: Sequence[str]) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not all(self.told("encoder ready", one) for one in addresses):
                await asyncio.sleep(0.05)


def started(module: str, checkpoint: Path, directory: Path) -> Iterator[Asked]:
    listed = directory / "encoders"
    listed.write_text("")
    flags = {
        "--model": str(checkpoint),
        "--encoders": f"file://{listed}",
        "--encoder-attempt-seconds": str(ATTEMPT_SECONDS),
        # Every picture is asked of an encoder.
        "--embedding-cache-bytes": "0",
        "--log-format": "json",
        "--port": "0",
        "--metrics-port": "0",
        "--torch-threads": "1",
        "--drain-seconds": "0",
    }
    command = [word for pair in flags.items() for word in pair]
    with ServiceProcess("-m", module, *command) as llm:
        yield Asked(llm, listed)


@pytest.fixture(scope="module")
def unary(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    yield from started("llm_service", tiny_checkpoint, tmp_path_factory.mktemp("unary"))


@pytest.fixture(scope="module")
def chunked(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    directory = tmp_path_factory.mktemp("chunked")
    yield from started("tests.system.chunked_llm", tiny_checkpoint, directory)


@pytest.fixture(scope="module")
def half(tiny_checkpoint: Path) -> VisionHalf:
    torch.set_num_threads(1)
    return VisionHalf.load(tiny_checkpoint, model_id=tiny_checkpoint.name)


async def answers(client: AsyncClient, turns: Sequence[list[Message]]) -> list[tuple[int, ...]]:
    found = await asyncio.gather(*(client.generate(one, SHORT) for one in turns))
    return [one.token_ids for one in found]


def about_all() -> list[list[Message]]:
    return [*([user(picture, "What is it?")] for picture in PICTURES), TEXT]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """What an honest encoder alone leads to; filled by the first test that asks."""
    return []


async def check_made_good(
    asked: Asked, half: VisionHalf, lie: Behaviour, cause: str, expected: list[tuple[int, ...]]
) -> None:
    liar, honest = ScriptedEncoder(half, lie), ScriptedEncoder(half)
    if not expected:
        async with asked.beside(honest) as client:
            expected += await answers(client, about_all())
        assert len(set(expected)) > len(PICTURES) // 2
    async with asked.beside(liar, honest) as client:
        began = time.monotonic()
        assert await answers(client, about_all()) == expected
        assert time.monotonic() - began < ATTEMPT_SECONDS + 5
        assert liar.asked
        told, *_ = asked.told(
            "encoder ejected", liar.address
        ) or asked.told(  # one of another model is back with each probe
            "encoder of another model", liar.address
        )
        assert told.get("cause", "foreign") == cause
        assert not asked.told("encoder ejected", honest.address)
        # Whoever lies passes every probe, and yet is not asked again at once.
        if cause == "lying":
            before = len(liar.asked)
            assert await answers(client, about_all()) == expected
            assert len(liar.asked) == before
        assert liar.running == 0
    assert figure(asked.llm, "chiasm_llm_kv_blocks_used") == 0


@pytest.mark.parametrize("lie", UNARY)
async def test_a_liar_is_named_and_its_pictures_made_good_by_an_honest_encoder(
    unary: Asked, half: VisionHalf, lie: Behaviour, expected: list[tuple[int, ...]]
) -> None:
    await check_made_good(unary, half, lie, UNARY[lie], expected)


@pytest.mark.parametrize("lie", CHUNKED)
async def test_a_broken_stream_is_named_and_made_good_by_an_honest_encoder(
    chunked: Asked, half: VisionHalf, lie: Behaviour, expected: list[tuple[int, ...]]
) -> None:
    await check_made_good(chunked, half, lie, CHUNKED[lie], expected)


@pytest.mark.parametrize("lie", ALONE)
async def test_with_liars_only_a_picture_ends_in_a_typed_error_and_text_runs_on(
    unary: Asked, chunked: Asked, half: VisionHalf, lie: Behaviour
) -> None:
    asked = chunked if lie in CHUNKED else unary
    async with asked.beside(ScriptedEncoder(half, lie)) as client:
        picture = asyncio.create_task(client.generate([user(PICTURES[0], "What?")], SHORT))
        text = await client.generate(TEXT, SHORT)
        assert text.usage.completion_token_count == 8
        with pytest.raises(ChiasmError) as failed:
            await picture
    assert failed.value.reason in ALONE[lie]
    assert failed.value.field == "messages[0].parts[0].image"
    assert until(lambda: figure(asked.llm, "chiasm_llm_kv_blocks_used") == 0, 2) < 2
