"""Requests of every kind with the answers that they must have, and what became of them."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import httpx

from chiasm.client import AsyncClient
from chiasm.conversation import Message, user
from tests.chaos.fleet import Fleet
from tests.system.three import Json, messages_to_json, noise

TOKENS = 8
_SHARES = {"text": 0.25, "picture": 0.45, "pictures": 0.1, "embedding": 0.12, "mixed": 0.08}


@dataclass(frozen=True)
class Request:
    """One request; `kind` is told in the figures."""

    kind: str
    body: Json
    answer: str = ""


@dataclass
class Outcome:
    """What became of the requests."""

    right: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    # Neither an answer nor a typed error.
    untyped: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def told(self) -> str:
        ordered = sorted(self.seconds)
        return (
            f"{sum(self.right.values())} right {dict(self.right)}, {len(self.wrong)} wrong, errors "
            f"{dict(self.errors)}, {len(self.untyped)} untyped; p50 "
            f"{ordered[len(ordered) // 2]:.2f} s, p99 {ordered[len(ordered) * 99 // 100]:.2f} s, "
            f"longest {ordered[-1]:.2f} s"
        )


async def requests(fleet: Fleet, count: int, seed: int = 1) -> list[Request]:
    """`count` requests from a stock of distinct ones, with the answers of a calm system."""
    stock = await _stock(fleet)
    kinds = Counter(one.kind for one in stock)
    weights = [_SHARES[one.kind] / kinds[one.kind] for one in stock]
    return random.Random(seed).choices(stock, weights, k=count)


async def send_all(
    fleet: Fleet, wanted: Iterable[Request], callers: int, outcome: Outcome | None = None
) -> Outcome:
    """Sends them from `callers` callers at once."""
    outcome = outcome or Outcome()
    waiting = iter(wanted)

    async def caller(http: httpx.AsyncClient) -> None:
        for request in waiting:
            await send(http, request, outcome)

    async with fleet.http() as http:
        await asyncio.gather(*(caller(http) for _ in range(callers)))
    return outcome


async def send(http: httpx.AsyncClient, request: Request, outcome: Outcome) -> None:
    """Sends one request and notes what became of it."""
    began = time.monotonic()
    try:
        response = await http.post("/v1/chat/completions", json=request.body)
    except httpx.HTTPError as error:
        outcome.untyped.append(f"{request.kind}: {type(error).__name__}")
        return
    outcome.seconds.append(time.monotonic() - began)
    if response.status_code == 200:
        answer = response.json()["choices"][0]["message"]["content"]
        if answer == request.answer:
            outcome.right[request.kind] += 1
        else:
            outcome.wrong.append(f"{request.kind}: {answer!r}, not {request.answer!r}")
        return
    told = response.json().get("error", {})
    if told.get("code") and told.get("type"):
        outcome.errors[f"{response.status_code} {told['code']}"] += 1
    else:
        outcome.untyped.append(f"{request.kind}: {response.status_code} {response.text[:200]}")


async def _stock(fleet: Fleet) -> list[Request]:
    first = fleet.encoders[0].target
    async with AsyncClient(fleet.llm.target, first, timeout=60) as client:
        sent = [await client.encode(noise(9_000 + seed)) for seed in range(6)]
    turns: list[tuple[str, list[Message]]] = []
    turns += [("text", [user(f"Say {number} words")]) for number in range(8)]
    turns += [("picture", [user(noise(seed), "What is it?")]) for seed in range(40)]
    turns += [
        ("pictures", [user(*(noise(100 + 8 * at + seed) for seed in range(4)), "Compare.")])
        for at in range(4)
    ]
    turns += [("embedding", [user(embedding, "What is it?")]) for embedding in sent]
    turns += [("mixed", [user("A", sent[at], noise(200 + at), "B")]) for at in range(4)]
    async with fleet.http() as http:
        return [await _answered(fleet, http, kind, messages) for kind, messages in turns]


async def _answered(
    fleet: Fleet, http: httpx.AsyncClient, kind: str, messages: list[Message]
) -> Request:
    body: Json = {
        "model": fleet.model,
        "messages": messages_to_json(messages),
        "temperature": 0,
        "max_tokens": TOKENS,
    }
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return Request(kind, body, response.json()["choices"][0]["message"]["content"])
