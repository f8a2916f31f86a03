"""`python -m benchmarks.gateway_llm`: an LLM service of no model, as quick as a server can be.

The first text of a request is a `Plan` as JSON, which says what it answers. Prints its port.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Final

import uvloop

from chiasm import memory, telemetry, wire
from chiasm.rpc.server import Call
from chiasm.v1 import llm_service_pb2
from tests.scripted_llm import MODEL, ScriptedLlm, finished

_S = llm_service_pb2
Answer = wire.Wired[llm_service_pb2.GenerateResponse]

TOKEN: Final = " word"
WIDTH: Final = 4096
CONTEXT: Final = 1 << 20


@dataclass(frozen=True)
class Plan:
    """An answer: so many tokens, so many in a message, so long a pause before each message."""

    tokens: int
    per_message: int = 1
    pause_seconds: float = 0.0

    @property
    def text(self) -> str:
        return self.tokens * TOKEN

    def request(self) -> llm_service_pb2.GenerateRequest:
        """What asks for it by gRPC."""
        part = _S.Part(text=json.dumps(asdict(self)))
        return _S.GenerateRequest(
            model=MODEL, messages=[_S.Message(role=_S.ROLE_USER, parts=[part])]
        )

    def body(self, *parts: object, stream: bool = True) -> bytes:
        """What asks for it by HTTP, with further `parts` of the message."""
        content = [{"type": "text", "text": json.dumps(asdict(self))}, *parts]
        message = {"role": "user", "content": content}
        return json.dumps({"model": MODEL, "messages": [message], "stream": stream}).encode()


@cache
def _messages(plan: Plan) -> list[Answer]:
    """All messages of an answer, made once."""
    made = []
    for first in range(0, plan.tokens, plan.per_message):
        count = min(plan.per_message, plan.tokens - first)
        delta = _S.Delta(text=count * TOKEN, token_ids=range(first, first + count))
        made.append(wire.plain(_S.GenerateResponse(delta=_S.DeltaBatch(deltas=[delta]))))
    return [*made, wire.plain(_S.GenerateResponse(finished=finished()))]


class PlannedLlm(ScriptedLlm):
    """Answers by the plan in the request; remembers nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.card.context_length = CONTEXT
        self.card.encoder_identity.width = WIDTH

    async def _generate(
        self, request: wire.Wired[llm_service_pb2.GenerateRequest], call: Call
    ) -> AsyncIterator[Answer]:
        plan = Plan(**json.loads(request.message.messages[0].parts[0].text))
        await call.accept()
        for message in _messages(plan):
            if plan.pause_seconds:
                await asyncio.sleep(plan.pause_seconds)
            yield message


async def _serve() -> None:
    async with PlannedLlm().serving() as server:
        print(json.dumps({"event": "ready", "port": server.port}), flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Serves until it is killed."""
    memory.tune()
    telemetry.start_logging("planned-llm", "json", "error")
    uvloop.run(_serve())


if __name__ == "__main__":
    main()
