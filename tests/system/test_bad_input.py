"""Bad input of every kind is a typed error, and a good stream beside it does not notice."""

import asyncio
import base64
import json
import pickle
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch

from chiasm import tensors
from chiasm.client import AsyncClient, Client
from chiasm.conversation import Embedding, Message, Part, Sampling, user
from chiasm.errors import ChiasmError, Reason
from chiasm.rpc.channel import open_channel, told_errors
from chiasm.tensors import Array, DataType
from chiasm.v1 import encoder_service_pb2, image_pb2
from tests.system import bad_files
from tests.system.footprint import memory
from tests.system.three import Json, Three, asked, data_url, noise

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ROWS, WIDTH = 4, 64  # of the tiny model
LENGTH = 1500
LONG = Sampling(temperature=0, max_tokens=LENGTH, ignore_eos=True)
QUESTION = [user(noise(3), "Tell all.")]
FLOAT32 = tensors.BY_NAME["float32"]
GOOD = np.linspace(-1, 1, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
# Times 256 bytes a row this is 1,024 bytes once 64 bits overflow: what GOOD has.
OVERFLOWING_ROWS: Final = 2**62 + ROWS
MIB = 1 << 20


@pytest.fixture(scope="module")
def alone(tiny: Three) -> str:
    """The text of the good stream with nothing beside it."""
    with Client(tiny.llm.target) as client:
        return client.generate(QUESTION, LONG).text


class GoodStreams:
    """Long answers, one after another for as long as a test goes on; each must be as it is alone.

    One after another, because no length outlasts what a test does on every machine.
    """

    def __init__(self, http: httpx.AsyncClient, body: Json, alone: str) -> None:
        self._http, self._body, self._alone = http, body, alone
        self._came = asyncio.Condition()
        self._length = 0

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            async with self._http.stream("POST", "/v1/chat/completions", json=self._body) as answer:
                text = ""
                async for line in answer.aiter_lines():
                    text += await self._piece(line)
                    assert self._alone.startswith(text)
            assert text == self._alone

    async def _piece(self, line: str) -> str:
        if not line.startswith("data: {"):
            return ""
        event: Json = json.loads(line.removeprefix("data: "))
        piece: str = event["choices"][0]["delta"].get("content") or ""
        async with self._came:
            self._length += len(piece)
            self._came.notify_all()
        return piece

    async def more(self) -> None:
        """Waits for 20 characters more."""
        wanted = self._length + 20
        async with self._came:
            await self._came.wait_for(lambda: self._length >= wanted)


@asynccontextmanager
async def beside_a_good_stream(system: Three, alone: str) -> AsyncIterator[None]:
    """Good streams run before, during and after what happens inside, and all stays well."""
    body = system.body(QUESTION, stream=True, max_tokens=LENGTH, ignore_eos=True)
    async with system.http() as http:
        streams = GoodStreams(http, body, alone)
        running = asyncio.create_task(streams.run())
        await first_of(streams.more(), running)
        yield
        await first_of(streams.more(), running)
        running.cancel()
        await asyncio.wait([running])
        assert all(process.alive for process in system.processes)
        assert (await http.get("/ready")).status_code == 200
        assert await asked(http, system.body([user("Hi")], max_tokens=2, ignore_eos=True))


async def first_of(wait: Coroutine[Any, Any, None], running: asyncio.Task[None]) -> None:
    """Waits; what ended `running` before that is raised here."""
    waiting = asyncio.create_task(wait)
    done, _ = await asyncio.wait([waiting, running], return_when=asyncio.FIRST_COMPLETED)
    if running in done:
        waiting.cancel()
        running.result()


@dataclass(frozen=True)
class Told:
    """The error that a request over HTTP must get."""

    status: int
    code: str
    param: str | None


URL = "messages[0].content[0].image_url.url"
EMBEDS = "messages[0].content[0].image_embeds"
BAD_EMBEDS = Told(400, "invalid_image_embeds", EMBEDS)


async def check_told(http: httpx.AsyncClient, body: Json, expected: Told) -> None:
    """Streamed and not, the error is the same and comes before any event."""
    for stream in (False, True):
        response = await http.post("/v1/chat/completions", json={**body, "stream": stream})
        error = response.json()["error"]
        assert Told(response.status_code, error["code"], error["param"]) == expected, error
        assert error["type"] == "invalid_request_error"
        assert error["message"]


PICTURES: dict[str, tuple[bytes, str]] = {
    "truncated_jpeg": (bad_files.truncated_jpeg(), "image_parse_error"),
    "truncated_png": (bad_files.truncated_png(), "image_parse_error"),
    "bomb": (bad_files.bomb(), "image_too_large"),
    "text": (bad_files.TEXT, "image_parse_error"),
    "nothing": (b"", "empty_image_file"),
}


@pytest.mark.parametrize("name", PICTURES)
async def test_bad_pictures_over_http(tiny: Three, alone: str, name: str) -> None:
    picture, code = PICTURES[name]
    content = [{"type": "image_url", "image_url": {"url": data_url(picture)}}]
    body = http_body(tiny, content)
    async with tiny.http() as http, beside_a_good_stream(tiny, alone):
        await check_told(http, body, Told(400, code, URL))


@pytest.mark.parametrize("name", PICTURES)
async def test_bad_pictures_over_grpc(tiny: Three, alone: str, name: str) -> None:
    picture, code = PICTURES[name]
    reason = Reason.IMAGE_TOO_LARGE if name == "bomb" else Reason.IMAGE_INVALID
    async with tiny.client() as client, beside_a_good_stream(tiny, alone):
        told = await refusal(client, [user(picture, "What is it?")])
        assert (told.reason, told.metadata["code"]) == (reason, code)
        assert told.field is not None
        assert told.field.startswith("messages[0].parts[0].image")
        # Internal callers ask the encoder itself.
        with pytest.raises(ChiasmError) as failed:
            await client.encode(picture)
        assert (failed.value.reason, failed.value.metadata["code"]) == (reason, code)
        assert failed.value.field == "image.data"


def floats(*shape: int) -> npt.NDArray[np.float32]:
    return np.full(shape, 0.5, np.float32)


def holding(value: float) -> npt.NDArray[np.float32]:
    rows = GOOD.copy()
    rows[2, 5] = value
    return rows


ARRAYS: dict[str, npt.NDArray[Any]] = {
    "no_rows": floats(0, WIDTH),
    "no_elements": floats(0),
    "scalar": floats(),
    "too_wide": floats(ROWS, WIDTH + 1),
    "too_narrow": floats(ROWS, WIDTH - 1),
    "rank_1": floats(ROWS * WIDTH),
    "rank_3_of_rows": floats(ROWS, 1, WIDTH),
    "rank_4": floats(1, 1, ROWS, WIDTH),
    "too_many_rows": floats(ROWS + 1, WIDTH),
    "too_few_rows": floats(ROWS - 1, WIDTH),
    "nan": holding(np.nan),
    "infinite": holding(np.inf),
    "minus_infinite": holding(-np.inf),
    "integers": np.ones((ROWS, WIDTH), np.int64),
    "booleans": np.ones((ROWS, WIDTH), np.bool_),
    "complex": np.ones((ROWS, WIDTH), np.complex64),
}
DATA = GOOD.tobytes()
FILES: dict[str, bytes] = {
    **{f"npy_{name}": bad_files.npy(array.dtype.str, array.shape, array.tobytes())
       for name, array in ARRAYS.items()},
    **{f"torch_{name}": bad_files.torch_file(torch.tensor(array))
       for name, array in ARRAYS.items()},
    "nothing": b"",
    "text": bad_files.TEXT,
    "npy_unknown_type": bad_files.npy("<f7", GOOD.shape, DATA),
    "npy_too_short": bad_files.npy("<f4", GOOD.shape, DATA[:-4]),
    "npy_too_long": bad_files.npy("<f4", GOOD.shape, DATA + b"1234"),
    "npy_overflow": bad_files.npy("<f4", (OVERFLOWING_ROWS, WIDTH), DATA),
    "npy_negative": bad_files.npy("<f4", (-ROWS, -WIDTH), DATA),
    "safetensors_unknown_type": bad_files.safetensors_file("F7", [ROWS, WIDTH], DATA),
    "safetensors_too_short": bad_files.safetensors_file("F32", [ROWS, WIDTH], DATA[:-4]),
    "safetensors_beyond_its_end": bad_files.safetensors_file("F32", [ROWS, WIDTH], DATA, 1 << 40),
    "safetensors_overflow": bad_files.safetensors_file("F32", [OVERFLOWING_ROWS, WIDTH], DATA),
    "safetensors_negative": bad_files.safetensors_file("F32", [-ROWS, -WIDTH], DATA),
    "torch_truncated": bad_files.torch_file(torch.tensor(GOOD))[:-200],
    "torch_sparse": bad_files.torch_file(bad_files.sparse((ROWS, WIDTH))),
    "torch_sparse_4_TiB": bad_files.torch_file(bad_files.sparse((1 << 20, 1 << 20))),
    "torch_dictionary": bad_files.torch_file({"image_embeds": torch.tensor(GOOD)}),
    "torch_three_pictures": bad_files.torch_file(torch.tensor(GOOD).expand(3, ROWS, WIDTH)),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
async def test_bad_embeddings_over_http(tiny: Three, alone: str, name: str) -> None:
    async with tiny.http() as http, beside_a_good_stream(tiny, alone):
        expected = Told(*too_large_or_bad(name))
        await check_told(http, http_body(tiny, [embeds(FILES[name])]), expected)


def too_large_or_bad(name: str) -> tuple[int, str, str]:
    """A well-formed header that declares more than the limit is told as too large."""
    if name.endswith("_overflow"):
        return 413, "image_embeds_too_large", EMBEDS
    return BAD_EMBEDS.status, BAD_EMBEDS.code, EMBEDS


async def test_pickled_objects_over_http_are_refused_and_never_run(
    tiny: Three, alone: str, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    act = bad_files.Act(marker)
    files = [
        bad_files.torch_file(act),
        bad_files.torch_file([torch.tensor(GOOD), act]),
        pickle.dumps(act),
        bad_files.object_npy(marker),
    ]
    async with tiny.http() as http, beside_a_good_stream(tiny, alone):
        for file in files:
            await check_told(http, http_body(tiny, [embeds(file)]), BAD_EMBEDS)
    assert not marker.exists()


UNKNOWN = DataType("unknown", 99, 4, np.dtype("<f4"), True)  # type: ignore[arg-type]
INT64 = tensors.BY_NAME["int64"]
TENSORS: dict[str, tuple[Array, str]] = {
    "no_rows": (Array(FLOAT32, (0, WIDTH), memoryview(b"")), "features.shape"),
    "no_shape": (Array(FLOAT32, (), memoryview(DATA[:4])), "features.shape"),
    "too_wide": (tensors.from_numpy(floats(ROWS, WIDTH + 1)), "features.shape"),
    "rank_1": (tensors.from_numpy(floats(ROWS * WIDTH)), "features.shape"),
    "rank_3_of_rows": (tensors.from_numpy(floats(ROWS, 1, WIDTH)), "features.shape"),
    "rank_9": (Array(FLOAT32, (*[1] * 7, ROWS, WIDTH), memoryview(DATA)), "features.shape"),
    "too_many_rows": (tensors.from_numpy(floats(ROWS + 1, WIDTH)), "features"),
    "nan": (tensors.from_numpy(holding(np.nan)), "features.data"),
    "infinite": (tensors.from_numpy(holding(np.inf)), "features.data"),
    "unknown_type": (Array(UNKNOWN, GOOD.shape, memoryview(DATA)), "features.data_type"),
    "integers": (tensors.from_numpy(np.ones((ROWS, WIDTH), np.int64)), "features.data_type"),
    "too_short": (Array(FLOAT32, GOOD.shape, memoryview(DATA[:-4])), "features.data"),
    "too_long": (Array(FLOAT32, GOOD.shape, memoryview(DATA + b"1234")), "features.data"),
    "overflow": (Array(FLOAT32, (OVERFLOWING_ROWS, WIDTH), memoryview(DATA)), "features.shape"),
    "negative": (Array(FLOAT32, (-ROWS, -WIDTH), memoryview(DATA)), "features.shape"),
}


@pytest.mark.parametrize("name", TENSORS)
async def test_bad_embeddings_over_grpc(tiny: Three, alone: str, name: str) -> None:
    array, field = TENSORS[name]
    async with tiny.client() as client, beside_a_good_stream(tiny, alone):
        told = await refusal(client, [user("Look: ", own_embedding(array), "what?")])
        assert (told.reason, told.field) == (
            Reason.TENSOR_INVALID, f"messages[0].parts[1].embedding.{field}",
        )  # fmt: skip


@pytest.mark.parametrize("claim", ["row_count", "placeholder_count"])
async def test_false_claims_about_an_embedding_over_grpc(
    tiny: Three, alone: str, claim: str
) -> None:
    embedding = own_embedding(tensors.from_numpy(GOOD), **{claim: ROWS + 1})
    async with tiny.client() as client, beside_a_good_stream(tiny, alone):
        told = await refusal(client, [user(embedding, "what?")])
        assert (told.reason, told.field) == (
            Reason.TENSOR_INVALID, f"messages[0].parts[0].embedding.{claim}",
        )  # fmt: skip


async def test_an_embedding_of_another_encoder(tiny: Three, demo: Three, alone: str) -> None:
    async with demo.client() as other:
        foreign = await other.encode(noise(8))
    async with tiny.client() as client, tiny.http() as http, beside_a_good_stream(tiny, alone):
        told = await refusal(client, [user(foreign, "what?")])
        assert (told.reason, told.field) == (
            Reason.ENCODER_MISMATCH, "messages[0].parts[0].embedding.identity",
        )  # fmt: skip
        # Of the right shape, it is known by its identity alone.
        disguised = Embedding(
            tensors.from_numpy(GOOD), foreign.message, "computed", "", foreign.timings
        )
        told = await refusal(client, [user(disguised, "what?")])
        assert told.reason is Reason.ENCODER_MISMATCH
        # Files carry no identity: over HTTP the shape tells.
        await check_told(http, tiny.body([user(foreign)]), BAD_EMBEDS)


BODIES: dict[str, tuple[bytes, str]] = {
    "not_json": (b'{"model": x}', "invalid_json"),
    "empty": (b"", "invalid_json"),
    "cut": (b'{"model": "tiny", "messages": [', "invalid_json"),
    "utf_16": ('{"model": "tiny"}'.encode("utf-16"), "invalid_json"),
    "nested_10000_deep": (b"[" * 10_000, "invalid_json"),
    "list": (b"[]", "invalid_type"),
    "number": (b"5", "invalid_type"),
    "null": (b"null", "invalid_type"),
}


@pytest.mark.parametrize("name", BODIES)
async def test_invalid_json(tiny: Three, alone: str, name: str) -> None:
    body, code = BODIES[name]
    async with tiny.http() as http, beside_a_good_stream(tiny, alone):
        response = await http.post("/v1/chat/completions", content=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, code, None)


async def test_bytes_that_are_no_message_over_grpc(tiny: Three, alone: str) -> None:
    async with open_channel(tiny.llm.target) as channel, beside_a_good_stream(tiny, alone):
        call: Any = channel.unary_stream("/chiasm.v1.LlmService/Generate", None, None)
        for junk in (b"\xff" * 40, b"\x12\xff\xff\xff\xff\x0f", b"\x0b"):
            with pytest.raises(ChiasmError) as failed, told_errors():
                await call(junk, timeout=20).read()
            assert failed.value.reason is Reason.REQUEST_INVALID


async def test_an_unknown_model(tiny: Three, alone: str) -> None:
    async with tiny.client() as client, tiny.http() as http, beside_a_good_stream(tiny, alone):
        body = {**tiny.body([user("Hi")]), "model": "nope"}
        await check_told(http, body, Told(404, "model_not_found", "model"))
        told = await refusal(client, [user("Hi")], model="nope")
        assert (told.reason, told.field) == (Reason.MODEL_NOT_FOUND, "model")


async def test_a_prompt_beyond_the_context(tiny: Three, alone: str) -> None:
    long = [user("red circle " * 3000)]
    pictures = [user(*(noise(seed) for seed in range(16)), "red circle " * 1000)]
    async with tiny.client() as client, tiny.http() as http, beside_a_good_stream(tiny, alone):
        for turns in (long, pictures):
            expected = Told(400, "context_length_exceeded", "messages")
            await check_told(http, tiny.body(turns), expected)
            told = await refusal(client, turns)
            assert (told.reason, told.field) == (Reason.CONTEXT_LENGTH_EXCEEDED, "messages")


@pytest.mark.parametrize("stated", [True, False])
async def test_a_body_of_200_mb(tiny: Three, alone: str, stated: bool) -> None:
    head = {"content-type": "application/json"}
    if stated:
        head["content-length"] = str(200 * MIB)
    before = memory(tiny.gateway)
    async with tiny.http() as http, beside_a_good_stream(tiny, alone):
        response = await http.post("/v1/chat/completions", content=zeros(200), headers=head)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (
            413, "body_too_large", None,
        )  # fmt: skip
    # At most the limit of a body is ever held.
    grown = memory(tiny.gateway).peak - before.peak
    assert grown < (MIB if stated else 100 * MIB) + 20 * MIB


async def test_a_picture_of_200_mb_over_grpc(tiny: Three, alone: str) -> None:
    async with tiny.client() as client, beside_a_good_stream(tiny, alone):
        told = await refusal(client, [user(bytes(200 * MIB), "what?")])
        assert told.reason is Reason.IMAGE_TOO_LARGE
        assert told.field is not None
        assert told.field.startswith("messages[0].parts[0].image")


def http_body(system: Three, content: list[Json]) -> Json:
    return {"model": system.model, "messages": [{"role": "user", "content": content}]}


def embeds(file: bytes) -> Json:
    return {"type": "image_embeds", "image_embeds": base64.b64encode(file).decode()}


def own_embedding(array: Array, **claims: int) -> Part:
    message = image_pb2.ImageEmbedding(**claims)  # type: ignore[arg-type]
    return Embedding(array, message, "computed", "", encoder_service_pb2.EncodeTimings())


async def zeros(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield bytes(MIB)


async def refusal(client: AsyncClient, turns: list[Message], model: str = "") -> ChiasmError:
    """The error of a request that must not be answered."""
    with pytest.raises(ChiasmError) as failed:
        await client.generate(turns, Sampling(max_tokens=4), model=model)
    return failed.value
