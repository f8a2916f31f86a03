"""Ways to ask one question of one system. Each takes a dialogue and returns the answer's text."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai

from chiasm.cli.dialogue import (
    EMBEDDING,
    EMBEDDING_FIRST,
    RAW,
    RAW_FIRST,
    Dialogue,
    Form,
    grpc_messages,
    http_messages,
)
from chiasm.client import AsyncClient
from chiasm.conversation import Sampling

Ask = Callable[[Dialogue], Awaitable[str]]


@dataclass(frozen=True)
class Way:
    """A way to ask. `least_pictures`: with fewer it is the same as another way."""

    name: str
    ask: Ask
    least_pictures: int = 1


_FORMS: tuple[tuple[str, Form, int], ...] = (
    ("raw", RAW, 1),
    ("emb", EMBEDDING, 1),
    ("raw+emb", RAW_FIRST, 2),
    ("emb+raw", EMBEDDING_FIRST, 2),
)


@asynccontextmanager
async def http_ways(url: str, max_tokens: int, seconds: float) -> AsyncIterator[list[Way]]:
    """The ways through a gateway, with the official client; an answer may take `seconds`."""
    async with openai.AsyncOpenAI(
        base_url=f"{url.rstrip('/')}/v1",
        api_key="none",
        max_retries=0,
        timeout=seconds,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        model = (await client.models.list()).data[0].id
        yield [
            Way(f"HTTP {name}", _http(client, model, max_tokens, form), least)
            for name, form, least in _FORMS
        ]


def grpc_ways(client: AsyncClient, max_tokens: int) -> list[Way]:
    """The ways straight into an LLM service."""
    return [
        Way(f"gRPC {name}", grpc_way(client, max_tokens, form), least)
        for name, form, least in _FORMS
    ]


def grpc_way(client: AsyncClient, max_tokens: int, form: Form) -> Ask:
    """One way straight into an LLM service."""

    async def ask(dialogue: Dialogue) -> str:
        sampling = Sampling(temperature=0, max_tokens=max_tokens)
        return (await client.generate(grpc_messages(dialogue, form), sampling)).text

    return ask


def threaded(answer: Callable[[Dialogue], str]) -> Ask:
    """A way that computes in this process, off the event loop."""

    async def ask(dialogue: Dialogue) -> str:
        return await asyncio.to_thread(answer, dialogue)

    return ask


def _http(client: openai.AsyncOpenAI, model: str, max_tokens: int, form: Form) -> Ask:
    async def ask(dialogue: Dialogue) -> str:
        messages: Any = http_messages(dialogue, form)
        answer = await client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=max_tokens
        )
        return answer.choices[0].message.content or ""

    return ask
