"""One request in both ways, JSON over HTTP and messages over gRPC, and what comes of it."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest
import torch

from chiasm import tensors, wire
from chiasm.conversation import Embedding, Message, Part, Sampling, messages_to_wire, user
from chiasm.errors import ChiasmError
from chiasm.rpc.channel import LlmMethods, open_channel
from chiasm.v1 import encoder_service_pb2, image_pb2, llm_service_pb2
from tests.system.processes import SAMPLES
from tests.system.three import Json, Three, messages_to_json

Way = Literal["http", "grpc"]
WAYS: tuple[Way, ...] = ("http", "grpc")
both = pytest.mark.parametrize("way", WAYS)

LENGTH = 16
COLOUR_QUESTION = "What colour is it?"
STAR, SEVEN = (SAMPLES / "star.png").read_bytes(), (SAMPLES / "seven.png").read_bytes()
# As `demo_model.samples` drew them.
COLOUR = {STAR: "orange", SEVEN: "green"}
BAD_REQUEST: Final[dict[Way, str]] = {
    "http": "400 invalid_request_error",
    "grpc": "INVALID_ARGUMENT",
}
DETAILS = {
    "auto": image_pb2.IMAGE_DETAIL_AUTO,
    "low": image_pb2.IMAGE_DETAIL_LOW,
    "high": image_pb2.IMAGE_DETAIL_HIGH,
    "original": image_pb2.IMAGE_DETAIL_ORIGINAL,
}
UNSTATED_DETAIL = image_pb2.IMAGE_DETAIL_UNSPECIFIED
UNKNOWN_DETAIL: Any = 17


@dataclass(frozen=True)
class Pixels:
    """What a request asks of every raw picture; `detail` may be one that does not exist."""

    detail: str | None = None
    least: int | None = None
    most: int | None = None

    def to_wire(self) -> image_pb2.ImageOptions:
        detail = DETAILS.get(self.detail, UNKNOWN_DETAIL) if self.detail else UNSTATED_DETAIL
        return image_pb2.ImageOptions(detail=detail, min_pixels=self.least, max_pixels=self.most)

    def fields(self) -> Json:
        bounds = {"min_pixels": self.least, "max_pixels": self.most}
        asked = {name: value for name, value in bounds.items() if value is not None}
        return {"mm_processor_kwargs": asked} if asked else {}


@dataclass(frozen=True)
class Said:
    """An answer, and what it tells of its prompt."""

    text: str
    prompt_tokens: int
    image_tokens: int
    cached_tokens: int
    sources: tuple[str, ...]
    per_picture: tuple[int, ...]


@dataclass(frozen=True)
class Refusal:
    """A refusal: OpenAI's code and param, or the reason and field of `chiasm.v1`.

    `status` is what goes before them: `400 invalid_request_error`, or gRPC's `INVALID_ARGUMENT`.
    """

    status: str
    code: str
    place: str | None
    message: str


class Refused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.refusal = refusal


DEFAULTS = Pixels()


async def said(
    system: Three,
    way: Way,
    messages: Sequence[Message],
    pixels: Pixels = DEFAULTS,
    *,
    length: int | None = LENGTH,
) -> Said:
    """The greedy answer of `length` tokens, or up to its own end."""
    if way == "http":
        return await _said_http(system, messages, pixels, length)
    return await _said_grpc(system, messages, pixels, length)


async def refused(
    system: Three, way: Way, messages: Sequence[Message], pixels: Pixels = DEFAULTS
) -> Refusal:
    """The refusal of a bad request; right after it the services answer as ever."""
    refusal = await failed(system, way, messages, pixels)
    assert refusal.status == BAD_REQUEST[way], refusal
    return refusal


async def failed(
    system: Three, way: Way, messages: Sequence[Message], pixels: Pixels = DEFAULTS
) -> Refusal:
    """How a request failed, through whose fault ever; right after it the services answer."""
    with pytest.raises(Refused) as caught:
        await said(system, way, messages, pixels)
    await check_alive(system)
    return caught.value.refusal


async def check_alive(system: Three) -> None:
    assert all(process.alive for process in system.processes)
    async with system.http() as http:
        assert (await http.get("/ready")).status_code == 200
    for way in WAYS:
        assert (await said(system, way, [user("Hi")], length=2)).image_tokens == 0


async def _said_http(
    system: Three, messages: Sequence[Message], pixels: Pixels, length: int | None
) -> Said:
    own = {} if length is None else {"max_tokens": length, "ignore_eos": True}
    body = {**system.body([]), **own, **pixels.fields(), "messages": _json(messages, pixels)}
    async with system.http() as http:
        response = await http.post("/v1/chat/completions", json=body)
    told = response.json()
    if response.status_code != 200:
        error = told["error"]
        status = f"{response.status_code} {error['type']}"
        raise Refused(Refusal(status, error["code"], error["param"], error["message"]))
    images, details = told["chiasm"]["images"], told["usage"]["prompt_tokens_details"]
    return Said(
        told["choices"][0]["message"]["content"],
        told["usage"]["prompt_tokens"],
        details["image_tokens"],
        details["cached_tokens"],
        tuple(one["source"] for one in images),
        tuple(one["tokens"] for one in images),
    )


async def _said_grpc(
    system: Three, messages: Sequence[Message], pixels: Pixels, length: int | None
) -> Said:
    request = _request(messages, pixels, length)
    text = ""
    async with open_channel(system.llm.target) as channel:
        try:
            async for event in LlmMethods.GENERATE.stream(channel, request, timeout=60):
                text += "".join(delta.text for delta in event.message.delta.deltas)
                finished = event.message.finished
        except ChiasmError as error:
            status, reason = error.grpc_code.name, error.reason.name
            raise Refused(Refusal(status, reason, error.field, error.message)) from error
    usage, paths = finished.usage, finished.image_paths
    names = [llm_service_pb2.ImageSource.Name(path.source) for path in paths]
    return Said(
        text,
        usage.prompt_token_count,
        usage.image_token_count,
        usage.cached_token_count,
        tuple(name.removeprefix("IMAGE_SOURCE_").lower() for name in names),
        tuple(path.placeholder_count for path in paths),
    )


def _request(
    messages: Sequence[Message], pixels: Pixels, length: int | None
) -> wire.Wired[llm_service_pb2.GenerateRequest]:
    buffers = wire.Buffers()
    wired = messages_to_wire(messages, buffers)
    for part in (part for message in wired for part in message.parts):
        if part.HasField("image"):
            part.image.options.CopyFrom(pixels.to_wire())
    sampling = Sampling(temperature=0, max_tokens=length, ignore_eos=length is not None)
    message = llm_service_pb2.GenerateRequest(messages=wired, sampling=sampling.to_wire())
    return wire.Wired(message, buffers)


def _json(messages: Sequence[Message], pixels: Pixels) -> list[Json]:
    written = []
    for message in messages:
        [one] = messages_to_json([Message(message.role, ())])
        one["content"] = [_json_part(part, pixels) for part in message.parts]
        written.append(one)
    return written


def _json_part(part: Part, pixels: Pixels) -> Json:
    if isinstance(part, Embedding):
        return _json_embedding(part)
    [message] = messages_to_json([user(part)])
    written: Json = message["content"][0]
    if pixels.detail and written["type"] == "image_url":
        written["image_url"]["detail"] = pixels.detail
    return written


def _json_embedding(part: Embedding) -> Json:
    """The features in their own element type, as `torch.save` writes them."""
    kind = getattr(torch, part.features.data_type.name)
    tensor = torch.frombuffer(bytearray(part.features.data), dtype=kind)
    file = io.BytesIO()
    torch.save(tensor.reshape(part.features.shape), file)
    grid = part.message.grid_thw
    beside = {"image_grid_thw": [grid.temporal, grid.height, grid.width]} if grid.temporal else {}
    rows = {"image_embeds": base64.b64encode(file.getvalue()).decode(), **beside}
    return {"type": "image_embeds", "image_embeds": rows}


def embedding(rows: torch.Tensor) -> Embedding:
    """Features of the caller's own, of any type and shape."""
    name = str(rows.dtype).removeprefix("torch.")
    data = memoryview(rows.contiguous().view(torch.uint8).numpy().tobytes())
    array = tensors.Array(tensors.BY_NAME[name], tuple(rows.shape), data)
    timings = encoder_service_pb2.EncodeTimings()
    return Embedding(array, image_pb2.ImageEmbedding(), "computed", "", timings)


async def encoded(system: Three, picture: bytes) -> Embedding:
    async with system.client() as client:
        return await client.encode(picture)


async def rows_of(system: Three, picture: bytes) -> torch.Tensor:
    return torch.from_numpy(np.array((await encoded(system, picture)).to_numpy()))


def saved(pixels: npt.NDArray[np.uint8], kind: str = "PNG", orientation: int = 1) -> bytes:
    """A file of `[height, width, 3]` pixels."""
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, kind, exif=exif)
    return file.getvalue()


def plain(width: int, height: int, colour: tuple[int, int, int] = (255, 140, 0)) -> bytes:
    return saved(np.full((height, width, 3), colour, np.uint8))


def url(part: str) -> str:
    return f"messages[0].content[0].{part}"


def field(part: str) -> str:
    return f"messages[0].parts[0].{part}"
