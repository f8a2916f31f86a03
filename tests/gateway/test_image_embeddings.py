"""`/v1/image_embeddings` and `/v1/embeddings` before an LLM service that does as a test says."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
from prometheus_client import CollectorRegistry

from chiasm import tensors, wire
from chiasm.errors import ChiasmError, Reason
from chiasm.rpc.server import Call, Server, ServerSettings, Service, StreamMethod, UnaryMethod
from chiasm.v1 import image_pb2, llm_service_pb2
from gateway.image_embeddings import cast, joined
from gateway.safetensors import read_safetensors_items, write_safetensors
from tests.gateway.gateway_system import gateway_before

_S = llm_service_pb2
WIDTH = 4
PNG = "data:image/png;base64,iVBORw0KGgo="
Values = list[float]


class PictureService:
    """Holds whatever it is sent; `vector` is what it pools, `failure` what it raises instead."""

    def __init__(self) -> None:
        self.vector: Values = [0.6, 0.8, 0.0, 0.0]
        self.failure: ChiasmError | None = None
        self.delays: list[float] = []
        self.received: list[Any] = []
        self.running = self.most = 0
        self.levels = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        methods: dict[str, UnaryMethod[Any] | StreamMethod[Any]] = {
            "HoldEmbedding": UnaryMethod(_S.HoldEmbeddingRequest, self._counted(self._hold)),
            "PoolImage": UnaryMethod(_S.PoolImageRequest, self._counted(self._pool)),
            "GetModel": UnaryMethod(_S.LlmServiceGetModelRequest, self._card),
        }
        service = Service("chiasm.v1.LlmService", methods)
        server = Server(ServerSettings("127.0.0.1", 0, 0, 0, 60), service, CollectorRegistry())
        await server.start()
        await server.ready()
        try:
            yield server.port
        finally:
            await server.abort()

    def _counted(
        self, answer: Callable[[wire.Wired[Any]], wire.Wired[Any]]
    ) -> Callable[[wire.Wired[Any], Call], Awaitable[wire.Wired[Any]]]:
        async def run(request: wire.Wired[Any], call: Call) -> wire.Wired[Any]:
            self.received.append(request)
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await asyncio.sleep(self.delays.pop(0) if self.delays else 0)
                if self.failure is not None:
                    raise self.failure
                return answer(request)
            finally:
                self.running -= 1

        return run

    def _hold(self, request: wire.Wired[Any]) -> wire.Wired[Any]:
        buffers = wire.Buffers()
        rows = np.full((3, WIDTH), len(self.received), np.float32)
        embedding = image_pb2.ImageEmbedding(
            features=tensors.to_wire(tensors.from_numpy(rows), buffers),
            levels=[tensors.to_wire(tensors.from_numpy(-rows), buffers)] * self.levels,
            row_count=3,
            placeholder_count=3,
        )
        sent = bytes(request.data(request.message.part.image.data)).hex()
        reference = image_pb2.EmbeddingReference(id=f"emb_{sent}")
        reply = _S.HoldEmbeddingResponse(reference=reference, embedding=embedding)
        reply.path.source = _S.IMAGE_SOURCE_REMOTE
        return wire.Wired(reply, buffers)

    def _pool(self, request: wire.Wired[Any]) -> wire.Wired[Any]:
        reply = _S.PoolImageResponse(values=self.vector, path=_S.ImagePath(placeholder_count=3))
        return wire.plain(reply)

    async def _card(self, request: wire.Wired[Any], call: Call) -> wire.Wired[Any]:
        return wire.plain(
            _S.LlmServiceGetModelResponse(
                model_id="m",
                encoder_identity=image_pb2.EncoderIdentity(model_id="m", width=WIDTH),
                level_count=self.levels,
                vision_source=_S.VISION_SOURCE_REMOTE,
                max_image_count=8,
            )
        )


@asynccontextmanager
async def system(**settings: Any) -> AsyncIterator[tuple[PictureService, httpx.AsyncClient]]:
    service = PictureService()
    async with (
        service.serving() as llm,
        gateway_before(llm, **settings) as port,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}/v1", timeout=20, trust_env=False
        ) as http,
    ):
        yield service, http


def upload(**arrays: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        "content": safetensors.numpy.save(arrays),
        "headers": {"content-type": "application/x-safetensors"},
    }


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_a_vector_that_is_not_finite_is_a_500_that_names_the_item(
    bad: float, encoding: str
) -> None:
    async with system() as (service, http):
        service.vector = [0.0, bad, 0.0, 0.0]
        body = {"model": "m", "input": [PNG], "encoding_format": encoding}
        answer = await http.post("/embeddings", json=body)
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("server_error", "input[0]")
        service.vector = [1.0, 0.0, 0.0, 0.0]
        assert (await http.post("/embeddings", json=body)).status_code == 200


async def test_answers_keep_the_order_of_the_request_and_few_pictures_run_at_once() -> None:
    async with system() as (service, http):
        service.delays = [0.4, 0.35, 0.3, 0.25, 0.0, 0.0, 0.0, 0.0]
        files = [bytes([137, number]) for number in range(8)]
        urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
        data = (await http.post("/image_embeddings", json={"input": urls})).json()["data"]
        assert [one["index"] for one in data] == list(range(8))
        assert [one["reference"] for one in data] == [f"emb_{file.hex()}" for file in files]
        assert service.most == 4


async def test_a_failure_of_the_service_names_the_item_and_the_rest_is_left() -> None:
    async with system() as (service, http):
        service.failure = ChiasmError(Reason.IMAGE_INVALID, "It is cut short.", "part.image.data")
        answer = await http.post("/image_embeddings", json={"input": [PNG, {"image": "iVBORw0="}]})
        assert answer.status_code == 400
        told = {(one["param"], one["code"]) for one in [answer.json()["error"]]}
        assert told <= {
            ("input[0]", "image_parse_error"),
            ("input[1].image", "image_parse_error"),
        }
        service.failure = ChiasmError(Reason.NOT_READY, "Try again.", None, 2.0)
        answer = await http.post("/image_embeddings", json={"input": [PNG]})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        service.failure = ChiasmError(Reason.ENCODER_MISMATCH, "Another.", "part.image")
        answer = await http.post("/image_embeddings", json={"input": [PNG]})
        assert answer.status_code == 502


async def test_features_are_sent_only_where_they_were_asked_for() -> None:
    async with system() as (service, http):
        told = (await http.post("/image_embeddings", json={"input": [PNG]})).json()["data"][0]
        assert "data" not in told
        assert not service.received[-1].message.return_features
        assert (told["shape"], told["dtype"], told["identity"]) == ([3, WIDTH], "float32", None)
        body = {"input": [PNG], "encoding_format": "base64"}
        told = (await http.post("/image_embeddings", json=body)).json()["data"][0]
        assert service.received[-1].message.return_features
        assert len(base64.b64decode(told["data"])) == 3 * WIDTH * 4


async def test_levels_stand_beside_the_features_and_come_back_apart() -> None:
    async with system() as (service, http):
        service.levels = 2
        headers = {"accept": "application/x-safetensors"}
        answer = await http.post("/image_embeddings", json={"input": [PNG]}, headers=headers)
        (array,) = safetensors.numpy.load(answer.content).values()
        assert array.shape == (3, 3 * WIDTH)
        assert (array[:, :WIDTH] == 1).all()
        assert (array[:, WIDTH:] == -1).all()
        headers = {"content-type": "application/x-safetensors"}
        again = await http.post("/image_embeddings", content=answer.content, headers=headers)
        assert again.status_code == 200
        sent = service.received[-1]
        embedding = sent.message.part.embedding
        parts = [
            tensors.from_wire(tensor, sent.data(tensor.data)).storage
            for tensor in (embedding.features, *embedding.levels)
        ]
        assert [part.shape for part in parts] == [(3, WIDTH)] * 3
        assert [part[0, 0] for part in parts] == [1, -1, -1]


async def test_a_body_of_several_tensors_gives_a_reference_each() -> None:
    async with system() as (_, http):
        arrays = {name: np.full((3, WIDTH), i, np.float32) for i, name in enumerate("abc")}
        answer = await http.post("/image_embeddings?model=m", **upload(**arrays))
        assert len(answer.json()["data"]) == 3
        answer = await http.post("/image_embeddings?model=other", **upload(**arrays))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("body", "code", "status"),
    [
        (b"", "invalid_image_embeds", 400),
        (b"\x02\0\0\0\0\0\0\0{}", "invalid_image_embeds", 400),
        (b"\xff" * 64, "invalid_image_embeds", 400),
        (upload(a=np.zeros((3, WIDTH), np.float32))["content"][:-1], "invalid_image_embeds", 400),
        (
            upload(a=np.zeros((3, WIDTH), np.float32))["content"] + b"\0",
            "invalid_image_embeds",
            400,
        ),
        (upload(a=np.zeros((3, WIDTH), np.int8))["content"], "invalid_image_embeds", 400),
        (upload(a=np.zeros((2, 3, WIDTH), np.float32))["content"], "invalid_image_embeds", 400),
        (upload(a=np.zeros((3, WIDTH + 1), np.float32))["content"], "invalid_image_embeds", 400),
        (upload(a=np.zeros((999, WIDTH), np.float32))["content"], "image_embeds_too_large", 413),
        (
            upload(**{str(i): np.zeros((1, WIDTH), np.float32) for i in range(9)})["content"],
            "too_many_images",
            400,
        ),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value),
)
async def test_a_broken_body_is_refused_and_never_reaches_the_service(
    body: bytes, code: str, status: int
) -> None:
    async with system(max_embedding_bytes=4096) as (service, http):
        answer = await http.post(
            "/image_embeddings",
            content=body,
            headers={"content-type": "application/x-safetensors"},
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        assert not service.received
        assert (await http.post("/image_embeddings", json={"input": [PNG]})).status_code == 200


@pytest.mark.parametrize(
    "told",
    [
        {"image_size": [1]},
        {"image_size": "big"},
        {"grid_thw": [1, 2, 2**40]},
        {"identity": {"model_id": "m"}},
        {"identity": []},
        [],
        "no object",
    ],
)
async def test_metadata_that_is_none_of_ours_is_refused(told: Any) -> None:
    body = write_safetensors([tensors.from_numpy(np.zeros((3, WIDTH), np.float32))], [told])
    async with system() as (service, http):
        answer = await http.post(
            "/image_embeddings",
            content=body,
            headers={"content-type": "application/x-safetensors"},
        )
        assert answer.status_code == 400
        assert not service.received


def test_what_is_written_is_read_back_by_us_and_by_the_reference_reader() -> None:
    arrays = [
        tensors.from_numpy(np.arange(12, dtype=np.float32).reshape(3, 4)),
        tensors.from_numpy(np.arange(5, dtype=np.float16).reshape(1, 5)),
        tensors.from_numpy(np.arange(6, dtype=np.uint16).reshape(2, 3), "bfloat16"),
    ]
    told = [{"number": number} for number in range(3)]
    body = write_safetensors(arrays, told)
    read = read_safetensors_items(memoryview(body), 1 << 20)
    assert [one.told for one in read] == told
    for one, array in zip(read, arrays, strict=True):
        assert (one.array.dtype, one.array.shape) == (array.data_type.name, array.shape)
        assert bytes(one.array.data) == bytes(array.data)
    loaded = safetensors.numpy.load(write_safetensors(arrays[:2], told[:2]))
    assert np.array_equal(loaded["0"], arrays[0].storage)
    assert json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["2"]["dtype"] == "BF16"


def test_a_cast_widens_exactly_or_is_refused() -> None:
    half = tensors.from_numpy(np.array([[1.5, -2.25]], np.float16))
    wide = cast(half, "float32")
    assert wide is not None
    assert wide.to_float32().tolist() == [[1.5, -2.25]]
    assert cast(half, None) is half
    assert cast(half, "bfloat16") is None
    assert joined([half]) is half
