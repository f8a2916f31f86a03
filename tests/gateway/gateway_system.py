"""A gateway on a real socket in front of a scripted LLM service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import openai

from chiasm.rpc.server import Server
from gateway.server import HttpServer, listen
from gateway.settings import GatewaySettings
from tests.scripted_llm import ScriptedLlm

MIB = 1 << 20


@dataclass(frozen=True)
class System:
    """Both ends of the path, and clients of it."""

    llm: ScriptedLlm
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    port: int
    server: Server

    async def ask(self, **fields: object) -> httpx.Response:
        """A chat request with `fields` over a smallest one."""
        body = {"model": "scripted/tiny", "messages": [{"role": "user", "content": "hi"}]}
        return await self.http.post("/v1/chat/completions", json=body | fields)

    async def send(self, body: bytes, **headers: str) -> httpx.Response:
        """A chat request whose body is `body` as it is."""
        return await self.http.post("/v1/chat/completions", content=body, headers=headers)


@asynccontextmanager
async def gateway_before(llm_port: int, **settings: object) -> AsyncIterator[int]:
    """A gateway that serves on the port it gives."""
    listener = listen("127.0.0.1", 0)
    read = GatewaySettings(llm=f"127.0.0.1:{llm_port}", grace_seconds=1, **settings)  # type: ignore[arg-type]
    server = HttpServer(read)
    serving = asyncio.create_task(server.serve([listener]))
    port = listener.getsockname()[1]
    await server.listening.wait()
    try:
        yield port
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def whole_system(**settings: object) -> AsyncIterator[System]:
    """A scripted LLM service, a gateway with `settings`, and clients."""
    llm = ScriptedLlm()
    async with (
        llm.serving() as server,
        gateway_before(server.port, **settings) as port,
        # Reading certificates takes longer than most tests; there is no TLS here.
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, verify=False) as http,
    ):
        official = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=False),
        )
        async with official:
            yield System(llm, http, official, port, server)
