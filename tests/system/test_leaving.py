"""Callers that leave free what they held; services told to stop finish what they began."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from chiasm.client import AsyncClient, Delta
from chiasm.conversation import Sampling, user
from chiasm.errors import ChiasmError, Reason
from tests.system.processes import ServiceProcess, start_gateway, start_llm
from tests.system.three import Three, figure, noise, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

LENGTH = 1800
# Several seconds of work, so that nothing ends by itself within the second that it may take.
LONG = Sampling(temperature=0, max_tokens=LENGTH, ignore_eos=True)
LONG_JSON: dict[str, Any] = {"max_tokens": LENGTH, "ignore_eos": True}
QUESTION = [user(noise(5), "Tell all.")]
FREED_WITHIN_SECONDS = 1.0


def cancelled(llm: ServiceProcess) -> float:
    return figure(llm, "chiasm_llm_cancelled_sequences_total")


def used(llm: ServiceProcess) -> float:
    return figure(llm, "chiasm_llm_kv_blocks_used")


@asynccontextmanager
async def watched(system: Three) -> AsyncIterator[None]:
    """What runs inside leaves a request in the middle; then its keys and values are soon free."""
    assert until(lambda: used(system.llm) == 0) < 10
    before = cancelled(system.llm)
    yield
    assert until(lambda: used(system.llm) == 0, FREED_WITHIN_SECONDS) < FREED_WITHIN_SECONDS
    # It was cut off: it did not just come to its end.
    assert cancelled(system.llm) == before + 1
    assert figure(system.llm, "chiasm_rpc_active_calls") == 0


async def test_a_grpc_stream_that_is_closed_frees_its_blocks(tiny: Three) -> None:
    async with tiny.client() as client, watched(tiny):
        stream = client.stream(QUESTION, LONG)
        async for event in stream:
            assert isinstance(event, Delta)
            break
        assert used(tiny.llm) > 0
        await stream.aclose()


async def test_a_grpc_caller_that_is_cancelled_frees_its_blocks(tiny: Three) -> None:
    async with tiny.client() as client, watched(tiny):
        task = asyncio.create_task(client.generate(QUESTION, LONG))
        await started(tiny.llm)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_grpc_connection_that_breaks_frees_its_blocks(tiny: Three) -> None:
    async with watched(tiny):
        client = AsyncClient(tiny.llm.target)
        task = asyncio.create_task(client.generate(QUESTION, LONG))
        await started(tiny.llm)
        await client.close()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_http_stream_that_is_closed_frees_its_blocks(tiny: Three) -> None:
    body = tiny.body(QUESTION, stream=True, **LONG_JSON)
    async with (
        tiny.http() as http,
        watched(tiny),
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        assert response.status_code == 200
        lines = response.aiter_lines()
        for _ in range(8):
            await anext(lines)
        assert used(tiny.llm) > 0
    assert figure(tiny.gateway, "chiasm_gateway_active_requests") <= 1


async def test_an_http_call_that_is_closed_before_its_answer_frees_its_blocks(tiny: Three) -> None:
    request = httpx.Request(
        "POST", f"{tiny.gateway.url}/v1/chat/completions", json=tiny.body(QUESTION, **LONG_JSON)
    )
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with closing(socket.create_connection(("127.0.0.1", tiny.gateway.port))) as connection:
        async with watched(tiny):
            connection.sendall(f"POST {request.url.path} HTTP/1.1\r\n{head}\r\n".encode())
            connection.sendall(request.content)
            await started(tiny.llm)
            connection.close()
    assert figure(tiny.gateway, "chiasm_gateway_active_requests") <= 1


async def test_callers_that_leave_disturb_no_other(tiny: Three) -> None:
    sampling = Sampling(temperature=0, max_tokens=200, ignore_eos=True)
    async with tiny.client() as client:
        alone = await client.generate(QUESTION, sampling)
        staying = asyncio.create_task(client.generate(QUESTION, sampling))
        for _ in range(5):
            stream = client.stream(QUESTION, LONG)
            await anext(stream)
            await stream.aclose()
        assert (await staying).token_ids == alone.token_ids


async def started(llm: ServiceProcess) -> None:
    """Waits until the service computes something for its one caller."""
    while used(llm) == 0:
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def text_llm(tiny_checkpoint: Path) -> Iterator[ServiceProcess]:
    """An LLM service that may be stopped."""
    with start_llm(tiny_checkpoint, "--vision", "none", "--drain-seconds", "0.3") as llm:
        yield llm


async def test_a_gateway_told_to_stop_finishes_its_streams(
    text_llm: ServiceProcess, tiny_checkpoint: Path
) -> None:
    with start_gateway(text_llm.port) as gateway:
        stream = Streamed(gateway, tiny_checkpoint.name)
        async with stream.opened():
            gateway.terminate()
            await stream.read_to_its_end()
        assert gateway.wait() == 0
    assert text_llm.alive


async def test_an_llm_service_told_to_stop_finishes_its_streams_and_takes_no_other(
    text_llm: ServiceProcess, tiny_checkpoint: Path
) -> None:
    with start_gateway(text_llm.port) as gateway:
        stream = Streamed(gateway, tiny_checkpoint.name)
        async with stream.opened(), AsyncClient(text_llm.target) as client:
            text_llm.terminate()
            with pytest.raises(ChiasmError) as refused:
                await until_refused(client)
            assert refused.value.reason is Reason.NOT_READY
            assert text_llm.alive
            await stream.read_to_its_end()
        assert text_llm.wait() == 0
        # The gateway is left without an LLM service, says so, and lives on.
        async with httpx.AsyncClient(trust_env=False) as http:
            told = await http.get(f"{gateway.url}/ready")
        assert (told.status_code, told.json()["error"]["code"]) == (503, "not_ready")


async def until_refused(client: AsyncClient) -> None:
    """Asks until a service that drains no longer takes requests."""
    while True:
        await client.generate([user("Hi")], Sampling(max_tokens=1))


class Streamed:
    """A long answer that OpenAI's client streams from a gateway."""

    LENGTH = 1000

    def __init__(self, gateway: ServiceProcess, model: str) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none")
        self._model = model
        self._stream: openai.AsyncStream[ChatCompletionChunk]

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open, with its first text read."""
        body: dict[str, Any] = {"ignore_eos": True}
        async with self._client as client:
            self._stream = await client.chat.completions.create(
                model=self._model, messages=[{"role": "user", "content": "Tell all."}],
                temperature=0, max_tokens=self.LENGTH, extra_body=body,
                stream=True, stream_options={"include_usage": True},
            )  # fmt: skip
            for _ in range(3):
                await anext(self._stream)
            yield

    async def read_to_its_end(self) -> None:
        """Reads what is left, which is all of it and ends as it should."""
        chunks = [chunk async for chunk in self._stream]
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
        assert [reason for reason in reasons if reason] == ["length"]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == self.LENGTH
