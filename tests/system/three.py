"""The whole system for a test, and both ways to ask it: JSON over HTTP, messages over gRPC."""

import base64
import io
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch
from PIL import Image

from chiasm.client import AsyncClient
from chiasm.conversation import Embedding, Message, Part
from chiasm.v1 import llm_service_pb2
from tests.system.footprint import Memory, memory
from tests.system.processes import ServiceProcess, start_encoder, start_gateway, start_llm

Container = Literal["torch", "npy", "safetensors"]
CONTAINERS: tuple[Container, ...] = ("torch", "npy", "safetensors")
SETTLE_SECONDS = 10.0
_ROLES = {
    llm_service_pb2.ROLE_SYSTEM: "system",
    llm_service_pb2.ROLE_USER: "user",
    llm_service_pb2.ROLE_ASSISTANT: "assistant",
}
Json = dict[str, Any]


@dataclass(frozen=True)
class Three:
    """The three processes, ready, and the name under which they serve their model."""

    encoder: ServiceProcess
    llm: ServiceProcess
    gateway: ServiceProcess
    model: str
    memory_at_start: tuple[Memory, Memory, Memory]

    @property
    def processes(self) -> tuple[ServiceProcess, ...]:
        return self.encoder, self.llm, self.gateway

    @asynccontextmanager
    async def client(self, *, seconds: float | None = 60, tenant: str = "") -> AsyncIterator[
        AsyncClient
    ]:  # fmt: skip
        """A gRPC client of the LLM service and the encoder."""
        async with AsyncClient(
            self.llm.target, self.encoder.target, timeout=seconds, tenant=tenant
        ) as client:
            yield client

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        """An HTTP client of the gateway, for as many requests at once as a test likes."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.gateway.url, timeout=60, limits=limits, trust_env=False
        ) as client:
            yield client

    def body(
        self, messages: Sequence[Message], container: Container = "torch", **options: Any
    ) -> Json:
        """The body of a greedy chat completion."""
        return {
            "model": self.model,
            "messages": messages_to_json(messages, container),
            "temperature": 0,
            **options,
        }


@contextmanager
def three(
    model: Path,
    *,
    encoder_flags: Sequence[str] = (),
    llm_flags: Sequence[str] = (),
    gateway_flags: Sequence[str] = (),
) -> Iterator[Three]:
    """Starts the three for the checkpoint in `model`."""
    with ExitStack() as stack:
        encoder = stack.enter_context(start_encoder(model, *encoder_flags))
        llm = stack.enter_context(start_llm(model, "--encoders", encoder.target, *llm_flags))
        gateway = stack.enter_context(start_gateway(llm.port, *gateway_flags))
        at_start = memory(encoder), memory(llm), memory(gateway)
        yield Three(encoder, llm, gateway, model.name, at_start)


def messages_to_json(messages: Sequence[Message], container: Container = "torch") -> list[Json]:
    """The messages as OpenAI's clients write them; embeddings in the given container."""
    return [
        {
            "role": _ROLES[message.role],
            "content": [_part(part, container) for part in message.parts],
        }
        for message in messages
    ]


def data_url(picture: bytes) -> str:
    """A picture file in a URL."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def contained(rows: npt.NDArray[Any], container: Container) -> bytes:
    """A file of that container that holds `rows`."""
    file = io.BytesIO()
    if container == "torch":
        torch.save(torch.tensor(rows), file)
    elif container == "npy":
        np.save(file, rows)
    else:
        file.write(safetensors.numpy.save({"image_embeds": rows}))
    return file.getvalue()


def with_embeddings(
    messages: Sequence[Message], embeddings: Mapping[bytes, Embedding]
) -> list[Message]:
    """The messages with each raw picture in `embeddings` replaced by its features."""

    def replaced(part: Part) -> Part:
        return embeddings.get(part, part) if isinstance(part, bytes) else part

    return [Message(one.role, tuple(replaced(part) for part in one.parts)) for one in messages]


async def asked(http: httpx.AsyncClient, body: Json) -> str:
    """The text of one answer over HTTP."""
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def noise(seed: int, side: int = 40) -> bytes:
    """A PNG of seeded noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def figure(process: ServiceProcess, name: str) -> float:
    """The sum of a metric's samples, over all labels, as the process tells it now."""
    text = httpx.get(f"http://127.0.0.1:{process.metrics_port}/metrics", trust_env=False).text
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not among the metrics"
    return sum(float(value) for value in found)


def until(condition: Callable[[], bool], seconds: float = SETTLE_SECONDS) -> float:
    """Waits for `condition`; returns the seconds that it took, more than `seconds` if in vain."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            break
        time.sleep(0.01)
    return time.monotonic() - began


def _part(part: Part, container: Container) -> Json:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, bytes):
        return {"type": "image_url", "image_url": {"url": data_url(part)}}
    assert isinstance(part, Embedding)
    file = contained(part.to_numpy(), container)
    return {"type": "image_embeds", "image_embeds": base64.b64encode(file).decode()}
