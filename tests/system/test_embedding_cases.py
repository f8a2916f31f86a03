"""Embeddings that are wrong, huge or hostile, encoders that fail, and what a cache may mix up.

Over HTTP and over gRPC to the same services; the ids are those of the rows in the list of cases.
"""

import asyncio
import base64
import hashlib
import http.server
import io
import json
import math
import pickle
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

from chiasm import tensors
from chiasm.conversation import Embedding, Part, Reference, messages_to_wire, user
from chiasm.errors import ChiasmError, Reason
from chiasm.models.wire import identity_from_wire
from chiasm.tensors import Array
from chiasm.v1 import encoder_service_pb2, image_pb2, llm_service_pb2, llm_service_pb2_grpc
from chiasm.wire import Buffers, Wired, serialize
from tests.system import bad_files
from tests.system.footprint import memory
from tests.system.processes import ServiceProcess, start_gateway, start_llm
from tests.system.three import Json, Three, contained, data_url, noise, three
from tests.system.ways import (
    COLOUR,
    COLOUR_QUESTION,
    SEVEN,
    STAR,
    Way,
    both,
    check_alive,
    embedding,
    encoded,
    failed,
    field,
    plain,
    refused,
    rows_of,
    said,
    url,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

MIB = 1 << 20
SIDE = 1 << 20  # of a declared shape of 4 TiB
CALLERS = 16
FLOAT32 = tensors.BY_NAME["float32"]
FIRST = "messages[0].content[0]"
FAILED = {"http": "500 server_error", "grpc": "INTERNAL"}


def told(response: httpx.Response) -> Json:
    """The error of a response, its status beside it."""
    error: Json = response.json()["error"]
    return {**error, "status": response.status_code}


def embeds(given: Any) -> Json:
    return {"type": "image_embeds", "image_embeds": given}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def posted(system: Three, *content: Json, stream: bool = False) -> httpx.Response:
    """The response to one user message."""
    parts = [*content, {"type": "text", "text": COLOUR_QUESTION}]
    body = {**system.body([], stream=stream), "messages": [{"role": "user", "content": parts}]}
    async with system.http() as http:
        return await http.post("/v1/chat/completions", json=body)


async def text_of(system: Three, *content: Json) -> str:
    response = await posted(system, *content)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def own(shape: Sequence[int], data: bytes) -> Embedding:
    """A float32 tensor as the caller declares it, true or not."""
    array = Array(FLOAT32, tuple(shape), memoryview(data))
    timings = encoder_service_pb2.EncodeTimings()
    return Embedding(array, image_pb2.ImageEmbedding(), "computed", "", timings)


def stock_refusal(target: str, part: Part) -> grpc.RpcError:
    """How gRPC's own generated client is told that one picture is refused."""
    buffers = Buffers()
    message = llm_service_pb2.GenerateRequest(messages=messages_to_wire([user(part)], buffers))
    whole = llm_service_pb2.GenerateRequest.FromString(serialize(Wired(message, buffers)))
    with grpc.insecure_channel(target) as channel:
        stub = llm_service_pb2_grpc.LlmServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(whole, timeout=20))
    return caught.value


def generate_calls(llm: ServiceProcess) -> float:
    """Calls of Generate that ended so far."""
    address = f"http://127.0.0.1:{llm.metrics_port}/metrics"
    lines = httpx.get(address, trust_env=False).text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("chiasm_rpc_calls_total{") and "Generate" in line
    )


# B01


@pytest.mark.parametrize("more", [1, -1])
async def test_rows_of_another_width_are_refused_by_the_gateway_with_both_widths(
    demo: Three, more: int
) -> None:
    """B01"""
    count, width = (await rows_of(demo, STAR)).shape
    wrong = np.zeros((count, width + more), np.float32)
    before = generate_calls(demo.llm)
    error = told(await posted(demo, embeds(b64(contained(wrong, "torch")))))
    assert (error["status"], error["param"]) == (400, f"{FIRST}.image_embeds")
    assert f"[rows, {width}]" in error["message"]
    assert str([count, width + more]) in error["message"]
    assert generate_calls(demo.llm) == before
    await check_alive(demo)


@pytest.mark.parametrize("more", [1, -1])
async def test_rows_of_another_width_are_an_invalid_argument_with_both_widths(
    demo: Three, more: int
) -> None:
    """B01"""
    count, width = (await rows_of(demo, STAR)).shape
    wrong = own((count, width + more), bytes(4 * count * (width + more)))
    error: Any = await asyncio.to_thread(stock_refusal, demo.llm.target, wrong)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"[rows, {width}]" in error.details()
    assert str([count, width + more]) in error.details()
    assert generate_calls(demo.llm) > 0
    await check_alive(demo)


# B06


def huge_declarations(few: bytes) -> dict[str, Any]:
    """Small things that say they are 4 TiB."""
    return {
        "sparse": b64(bad_files.torch_file(bad_files.sparse((SIDE, SIDE)))),
        "npy": b64(bad_files.npy("<f4", (SIDE, SIDE), few)),
        "safetensors": b64(bad_files.safetensors_file("F32", [SIDE, SIDE], few)),
        "expanded": b64(bad_files.torch_file(torch.zeros(1).expand(SIDE, SIDE))),
        "raw": {"data": b64(few), "dtype": "float32", "shape": [SIDE, SIDE]},
    }


async def test_what_declares_4_tib_is_refused_from_its_header_in_many_requests_at_once(
    demo: Three,
) -> None:
    """B06"""
    given = huge_declarations(bytes(1024))
    assert all(len(json.dumps(one)) < 4096 for one in given.values())
    before = memory(demo.gateway).peak
    for name, one in given.items():
        responses = await asyncio.gather(*(posted(demo, embeds(one)) for _ in range(CALLERS)))
        for error in map(told, responses):
            assert error["status"] == (400 if name == "sparse" else 413), (name, error)
            assert error["type"] == "invalid_request_error"
            assert error["param"].startswith(f"{FIRST}.image_embeds")
    assert memory(demo.gateway).peak - before < 24 * MIB
    await check_alive(demo)


async def test_a_tensor_that_declares_more_than_it_brings_is_refused_before_any_allocation(
    demo: Three,
) -> None:
    """B06"""
    _, width = (await rows_of(demo, STAR)).shape
    shapes = {(SIDE, SIDE): "shape", (SIDE, width): "data", (2**40, 2**40): "shape"}
    before = memory(demo.llm).peak
    async with demo.client() as client:
        for shape, place in shapes.items():
            turns = [user(own(shape, bytes(1024)), "?")]
            calls = (client.generate(turns) for _ in range(CALLERS))
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, ChiasmError)
                assert (error.reason, error.field) == (
                    Reason.TENSOR_INVALID,
                    field(f"embedding.features.{place}"),
                )
    assert memory(demo.llm).peak - before < 24 * MIB
    await check_alive(demo)


# B07


async def test_pickles_are_run_by_no_route_of_the_gateway(demo: Three, tmp_path: Path) -> None:
    """B07; the chat's own route is in test_bad_input."""
    marker = tmp_path / "ran"
    act = bad_files.Act(marker)
    files = [bad_files.torch_file(act), pickle.dumps(act), bad_files.object_npy(marker)]
    binary = {"content-type": "application/x-safetensors"}
    async with demo.http() as http:
        for file in files:
            items = [embeds(b64(file)), embeds({"image_embeds": b64(file)})]
            for item in items:
                body = {"model": demo.model, "input": [item]}
                error = told(await http.post("/v1/image_embeddings", json=body))
                assert (error["status"], error["code"]) == (400, "invalid_image_embeds")
            error = told(await http.post("/v1/image_embeddings", content=file, headers=binary))
            assert error["status"] == 400
            grid = embeds({"image_embeds": "", "image_grid_thw": b64(file)})
            assert told(await posted(demo, grid))["param"] == f"{FIRST}.image_embeds.image_grid_thw"
    assert not marker.exists()
    await check_alive(demo)


async def test_pickles_are_run_by_no_service_behind(demo: Three, tmp_path: Path) -> None:
    """B07"""
    marker = tmp_path / "ran"
    _, width = (await rows_of(demo, STAR)).shape
    async with demo.client() as client:
        for file in (pickle.dumps(bad_files.Act(marker)), bad_files.object_npy(marker)):
            rows = file.ljust(math.ceil(len(file) / (4 * width)) * 4 * width, b"\0")
            wrong: list[Part] = [own((len(rows) // (4 * width), width), rows), file]
            for part in wrong:
                with pytest.raises(ChiasmError) as caught:
                    await client.generate([user(part, "?")])
                assert caught.value.grpc_code is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(ChiasmError) as caught:
                await client.encode(file)
            assert caught.value.reason is Reason.IMAGE_INVALID
    assert not marker.exists()
    await check_alive(demo)


# B08


@both
async def test_a_tensor_of_a_device_that_is_not_here_answers_as_its_values_do(
    demo: Three, way: Way
) -> None:
    """B08; over gRPC a tensor has no device, its bytes are the values."""
    for picture in (STAR, SEVEN):
        rows = await rows_of(demo, picture)
        if way == "grpc":
            turns = [user(embedding(rows), COLOUR_QUESTION)]
            assert (await said(demo, way, turns, length=None)).text == COLOUR[picture]
            continue
        file = contained(rows.numpy(), "torch")
        for device in (b"xpu", b"hpu", b"cud"):
            moved = file.replace(b"X\x03\0\0\0cpu", b"X\x03\0\0\0" + device)
            assert moved != file
            assert await text_of(demo, embeds(b64(moved))) == COLOUR[picture]


# B14


async def test_plain_little_endian_floats_with_shape_and_type_answer_as_their_picture(
    demo: Three,
) -> None:
    """B14"""
    for picture in (STAR, SEVEN):
        rows = (await rows_of(demo, picture)).numpy().astype("<f4")
        raw = {"data": b64(rows.tobytes()), "dtype": "float32", "shape": list(rows.shape)}
        assert await text_of(demo, embeds(raw)) == COLOUR[picture]
        assert await text_of(demo, embeds({"image_embeds": raw})) == COLOUR[picture]
        body = {"model": demo.model, "input": [embeds(raw)], "encoding_format": "base64"}
        async with demo.http() as http:
            (item,) = (await http.post("/v1/image_embeddings", json=body)).json()["data"]
        assert {name: item[name] for name in raw} == raw
    for data in (rows.tobytes()[:-1], rows.tobytes()[:-4], rows.tobytes() + b"\0\0\0\0", b"1"):
        error = told(await posted(demo, embeds({**raw, "data": b64(data)})))
        assert (error["status"], error["param"]) == (400, f"{FIRST}.image_embeds.data")
        assert all(str(count) in error["message"] for count in (rows.nbytes, len(data)))
    await check_alive(demo)


async def test_a_wrong_count_of_bytes_is_refused_with_the_right_one(demo: Three) -> None:
    """B14"""
    rows = await rows_of(demo, STAR)
    data = rows.numpy().tobytes()
    assert (
        await said(demo, "grpc", [user(own(rows.shape, data), COLOUR_QUESTION)], length=None)
    ).text == COLOUR[STAR]
    for wrong in (data[:-1], data[:-4], data + b"\0\0\0\0", b""):
        refusal = await refused(demo, "grpc", [user(own(rows.shape, wrong), "?")])
        assert refusal.place == field("embedding.features.data")
        assert all(str(count) in refusal.message for count in (len(data), len(wrong)))


# B15


@pytest.fixture(scope="module")
def overflowing(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    """In float16 a white picture exceeds 65,504 in the tower's first layer; a grey one does not."""
    directory = tmp_path_factory.mktemp("checkpoints") / "overflowing"
    directory.mkdir()
    for file in tiny_checkpoint.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    weights = load_file(directory / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("patch_embedding.weight")]
    weights[name] = torch.full_like(weights[name], 100.0)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with three(
        directory,
        encoder_flags=("--dtype", "float16"),
        llm_flags=("--encoder-dtype", "float16"),
    ) as system:
        yield system


GREY, SICK = plain(32, 32, (130, 130, 130)), plain(32, 32, (255, 255, 255))


@both
async def test_features_that_are_not_finite_fail_the_chat_by_the_picture_and_no_other(
    overflowing: Three, way: Way
) -> None:
    """B15"""
    # As often as an encoder may fail before it is taken for broken, and once more.
    for _ in range(4):
        refusal = await failed(overflowing, way, [user(GREY, SICK, "?")])
        assert refusal.status == FAILED[way]
        assert refusal.place is not None
        place = "messages[0].content[1]" if way == "http" else "messages[0].parts[1].image"
        assert refusal.place.startswith(place)
        assert "not finite" in refusal.message
        assert (await said(overflowing, way, [user(GREY, "?")])).image_tokens > 0


@pytest.mark.parametrize(
    ("route", "encoding"),
    [("embeddings", "float"), ("embeddings", "base64"), ("image_embeddings", "base64")],
)
async def test_features_that_are_not_finite_are_a_server_error_that_names_the_item(
    overflowing: Three, route: str, encoding: str
) -> None:
    """B15"""
    pictures = [{"image": data_url(one)} for one in (GREY, SICK)]
    body = {"model": overflowing.model, "input": pictures, "encoding_format": encoding}
    async with overflowing.http() as http:
        for _ in range(2):
            response = await http.post(f"/v1/{route}", json=body)
            error = told(response)
            assert (error["status"], error["type"]) == (500, "server_error")
            assert error["param"].startswith("input[1]")
            assert "data" not in response.json()
        good = await http.post(f"/v1/{route}", json={**body, "input": pictures[:1]})
        assert good.status_code == 200
        assert np.isfinite(vector(good.json()["data"][0])).all()


def vector(item: Json) -> npt.NDArray[Any]:
    """The numbers of one item, in whichever form they came."""
    if "data" in item:
        return np.frombuffer(base64.b64decode(item["data"]), item["dtype"])
    given = item["embedding"]
    return np.frombuffer(base64.b64decode(given), "<f4") if isinstance(given, str) else given


async def test_features_that_are_not_finite_leave_neither_the_encoder_nor_the_llm_service(
    overflowing: Three,
) -> None:
    """B15"""
    async with overflowing.client() as client:
        for ask in (client.encode, client.hold, client.pool):
            with pytest.raises(ChiasmError) as caught:
                await ask(SICK)
            assert caught.value.reason is Reason.INTERNAL
            assert caught.value.field in {"image.data", "part.image", "part.image.data"}
            await ask(GREY)


# B16


@pytest.fixture(scope="module")
def narrow(demo: Three) -> Iterator[Three]:
    """The demo system behind a gateway that takes embeddings of at most 1 MiB."""
    with start_gateway(demo.llm.port, "--max-embedding-bytes", str(MIB)) as gateway:
        yield replace(demo, gateway=gateway)


@pytest.mark.parametrize("given", ["no rows", "", [], [[0.5]], "scalar", "raw without rows"])
async def test_an_embedding_of_nothing_is_a_bad_request(demo: Three, given: Any) -> None:
    """B16"""
    _, width = (await rows_of(demo, STAR)).shape
    made = {
        "no rows": b64(contained(np.zeros((0, width), np.float32), "torch")),
        "scalar": b64(contained(np.array(1, np.float32), "npy")),
        "raw without rows": {"data": "", "dtype": "float32", "shape": [0, width]},
    }
    value = made.get(given, given) if isinstance(given, str) else given
    for stream in (False, True):
        error = told(await posted(demo, embeds(value), stream=stream))
        assert (error["status"], error["type"]) == (400, "invalid_request_error")
        assert error["param"].startswith(f"{FIRST}.image_embeds")
    await check_alive(demo)


@pytest.mark.parametrize("form", ["torch", "npy", "safetensors", "raw"])
async def test_an_embedding_of_5_mb_more_than_the_limit_is_too_large(
    narrow: Three, form: Any
) -> None:
    """B16"""
    _, width = (await rows_of(narrow, STAR)).shape
    rows = np.zeros((6 * MIB // (4 * width), width), np.float32)
    raw = {"data": b64(rows.tobytes()), "dtype": "float32", "shape": list(rows.shape)}
    before = generate_calls(narrow.llm)
    given = raw if form == "raw" else b64(contained(rows, form))
    error = told(await posted(narrow, embeds(given)))
    assert (error["status"], error["type"]) == (413, "invalid_request_error")
    assert error["param"].startswith(f"{FIRST}.image_embeds")
    assert str(MIB) in error["message"]
    assert generate_calls(narrow.llm) == before
    await check_alive(narrow)


async def test_a_tensor_of_nothing_is_an_invalid_argument(demo: Three) -> None:
    """B16"""
    _, width = (await rows_of(demo, STAR)).shape
    nothing = {
        (0, width): "shape",
        (): "shape",
        (0,): "shape",
        (1, 0, width): "shape",
    }
    for shape, place in nothing.items():
        refusal = await refused(demo, "grpc", [user(own(shape, b""), "?")])
        assert refusal.place == field(f"embedding.features.{place}")
    empty = replace(own((1, width), b""), message=image_pb2.ImageEmbedding())
    refusal = await refused(demo, "grpc", [user(empty, "?")])
    assert refusal.place == field("embedding.features.data")


async def test_a_message_of_5_mb_more_than_the_limit_is_exhausted_and_named(demo: Three) -> None:
    """B16"""
    _, width = (await rows_of(demo, STAR)).shape
    count = 261 * MIB // (4 * width)
    async with demo.client() as client:
        with pytest.raises(ChiasmError) as caught:
            await client.generate([user(own((count, width), bytes(count * 4 * width)), "?")])
    assert caught.value.reason is Reason.BODY_TOO_LARGE
    assert caught.value.grpc_code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await check_alive(demo)


# C03 and A04


@pytest.fixture(scope="module")
def black(tiny_checkpoint: Path) -> Iterator[Three]:
    """The tiny model, transparent pixels shown over black everywhere."""
    flags = ("--image-background", "black")
    with three(tiny_checkpoint, encoder_flags=flags, llm_flags=flags) as system:
        yield system


@pytest.fixture(scope="module")
def crossed(tiny: Three, black: Three, tiny_checkpoint: Path) -> Iterator[Three]:
    """An LLM service of white pictures whose only encoder shows black."""
    encoders = ("--encoders", black.encoder.target)
    with start_llm(tiny_checkpoint, *encoders) as llm, start_gateway(llm.port) as gateway:
        yield replace(tiny, encoder=black.encoder, llm=llm, gateway=gateway)


@pytest.fixture(scope="module")
def grey_inside(tiny: Three, tiny_checkpoint: Path) -> Iterator[Three]:
    """The tiny model with a tower in the LLM process, that shows grey."""
    flags = ("--vision", "local", "--image-background", "#808080")
    with start_llm(tiny_checkpoint, *flags) as llm, start_gateway(llm.port) as gateway:
        yield replace(tiny, llm=llm, gateway=gateway)


def half_clear(seed: int) -> PIL.Image.Image:
    """Noise whose left half is clear."""
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 4), np.uint8)
    pixels[:, :16, 3], pixels[:, 16:, 3] = 0, 255
    return PIL.Image.fromarray(pixels)


def as_png(picture: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def over(picture: PIL.Image.Image, colour: str) -> bytes:
    """The opaque picture that `picture` is over a colour."""
    flat = PIL.Image.new("RGB", picture.size, colour)
    flat.paste(picture, mask=picture.getchannel("A"))
    return as_png(flat)


def hidden_magenta() -> PIL.Image.Image:
    """One clear pixel over magenta, three opaque blue ones."""
    picture = PIL.Image.new("RGBA", (2, 2), (0, 0, 255, 255))
    picture.putpixel((0, 0), (255, 0, 255, 0))
    return picture


def same(one: Embedding, other: Embedding) -> bool:
    return bytes(one.features.data) == bytes(other.features.data)


@pytest.mark.parametrize("make", [lambda: half_clear(1), hidden_magenta], ids=["noise", "magenta"])
async def test_what_shows_through_a_picture_is_the_encoders_background_and_part_of_its_identity(
    tiny: Three, black: Three, make: Callable[[], PIL.Image.Image]
) -> None:
    """C03, A04"""
    clear, opaque = as_png(make()), over(make(), "white")
    white, dark = await encoded(tiny, clear), await encoded(black, clear)
    assert not same(white, dark)
    assert same(white, await encoded(tiny, over(make(), "white")))
    assert same(dark, await encoded(black, over(make(), "black")))
    # What has nothing clear is the same over both, and yet of two encoders.
    assert same(await encoded(tiny, opaque), await encoded(black, opaque))
    identities = [identity_from_wire(one.message.identity) for one in (white, dark)]
    assert identities[0] is not None
    assert identities[1] == replace(identities[0], background="#000000")
    assert identities[0].background == "#ffffff"


@both
async def test_answers_see_a_clear_picture_over_the_background_of_their_service(
    tiny: Three, black: Three, grey_inside: Three, way: Way
) -> None:
    """C03, A04"""
    picture = half_clear(2)
    systems = {"white": tiny, "black": black, "#808080": grey_inside}
    texts = set()
    for colour, system in systems.items():
        seen = await said(system, way, [user(as_png(picture), "?")], length=32)
        expected = await said(system, way, [user(over(picture, colour), "?")], length=32)
        assert seen.text == expected.text
        again = await said(system, way, [user(as_png(picture), "?")], length=32)
        assert (again.text, again.sources) == (seen.text, ("cache",))
        texts.add(seen.text)
    assert len(texts) == len(systems)


async def test_an_encoder_of_another_background_is_refused_by_both_colours(
    crossed: Three, black: Three
) -> None:
    """C03"""
    opaque = noise(50)
    for picture in (as_png(half_clear(3)), opaque):
        with pytest.raises(ChiasmError) as caught:
            async with crossed.client() as client:
                await client.generate([user(picture, "?")])
        assert caught.value.reason is Reason.ENCODER_MISMATCH
        assert "background #ffffff" in caught.value.message
        assert "background #000000" in caught.value.message
        error = told(await posted(crossed, {"type": "image_url",
                                            "image_url": {"url": data_url(picture)}}))  # fmt: skip
        assert (error["status"], error["code"]) == (502, "encoder_mismatch")
        assert "background #ffffff" in error["message"]
        assert "background #000000" in error["message"]
    assert (await said(crossed, "http", [user("Hi")])).image_tokens == 0
    assert (await said(black, "http", [user(opaque, "?")])).image_tokens > 0


async def test_an_embedding_of_another_background_is_refused_by_both_colours(
    tiny: Three, black: Three
) -> None:
    """C03"""
    part = await encoded(black, as_png(half_clear(4)))
    async with tiny.client() as client:
        with pytest.raises(ChiasmError) as caught:
            await client.generate([user(part, "?")])
    assert caught.value.field == field("embedding.identity")
    assert "background #000000" in caught.value.message
    assert "background #ffffff" in caught.value.message
    # The gateway's own form carries the identity in both directions.
    binary = "application/x-safetensors"
    body = {"model": black.model, "input": [{"image": data_url(as_png(half_clear(4)))}]}
    async with black.http() as http:
        sent = await http.post("/v1/image_embeddings", json=body, headers={"accept": binary})
        back = await http.post(
            "/v1/image_embeddings", content=sent.content, headers={"content-type": binary}
        )
        (item,) = back.json()["data"]
        assert item["identity"]["background"] == "#000000"
    async with tiny.http() as http:
        error = told(
            await http.post(
                "/v1/image_embeddings", content=sent.content, headers={"content-type": binary}
            )
        )
    assert (error["status"], error["code"]) == (400, "encoder_mismatch")


# C04


@contextmanager
def picture_server() -> Iterator[tuple[str, list[str]]]:
    """A web server whose picture turns from red to blue, and the paths that were asked of it."""
    asked: list[str] = []
    bodies = [plain(32, 32, (255, 0, 0)), plain(32, 32, (0, 0, 255))]

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = bodies[min(len(asked), 2) - 1]
            self.send_response(200)
            self.send_header("content-type", "image/png")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/picture.png", asked
        finally:
            server.shutdown()
            thread.join()


async def test_a_picture_by_its_address_is_refused_by_code_and_never_fetched(demo: Three) -> None:
    """C04: what is never fetched is never stale."""
    with picture_server() as (address, asked):
        part = {"type": "image_url", "image_url": {"url": address}}
        for _ in range(2):
            error = told(await posted(demo, part))
            assert (error["status"], error["code"]) == (400, "invalid_image_url")
            assert error["param"] == url("image_url.url")
            async with demo.http() as http:
                for route in ("embeddings", "image_embeddings"):
                    body = {"model": demo.model, "input": [part]}
                    error = told(await http.post(f"/v1/{route}", json=body))
                    assert (error["status"], error["code"]) == (400, "invalid_image_url")
                    assert error["param"] == "input[0].image_url.url"
        assert asked == []
        assert (await asyncio.to_thread(httpx.get, address, trust_env=False)).status_code == 200
        assert asked == ["/picture.png"]
    await check_alive(demo)


async def test_an_address_in_the_place_of_a_picture_is_no_picture(demo: Three) -> None:
    """C04: messages have no field for an address."""
    with picture_server() as (address, asked):
        refusal = await refused(demo, "grpc", [user(address.encode(), "?")])
        assert refusal.code == "IMAGE_INVALID"
        async with demo.client() as client:
            with pytest.raises(ChiasmError) as caught:
                await client.encode(address.encode())
            assert caught.value.reason is Reason.IMAGE_INVALID
        assert asked == []


@both
async def test_changed_content_under_one_name_is_never_answered_from_the_old(
    tiny: Three, way: Way
) -> None:
    """C04 for names that are served: what a cache finds, it finds by the bytes."""
    red, blue = (plain(32, 32, colour) for colour in ((250, 0, 1), (1, 0, 250)))
    texts = [(await said(tiny, way, [user(one, "?")])).text for one in (red, blue, red)]
    assert texts[0] == texts[2] != texts[1]


# C05


def with_crc(data: bytes, wanted: int) -> bytes:
    """`data` and four bytes behind it, so that the CRC-32 of all is `wanted`."""

    def crc(tail: int) -> int:
        return zlib.crc32(data + tail.to_bytes(4, "little"))

    # A CRC is affine: bit by bit, eliminated over GF(2).
    base = crc(0)
    basis: dict[int, tuple[int, int]] = {}
    for bit in range(32):
        image, tail = crc(1 << bit) ^ base, 1 << bit
        while image and image.bit_length() in basis:
            known = basis[image.bit_length()]
            image, tail = image ^ known[0], tail ^ known[1]
        basis[image.bit_length()] = image, tail
    left, found = wanted ^ base, 0
    while left:
        image, tail = basis[left.bit_length()]
        left, found = left ^ image, found ^ tail
    return data + found.to_bytes(4, "little")


Twins = tuple[bytes, bytes]


def red_and_blue(mark: bytes) -> Twins:
    """Two pictures of equal length; `mark` stands behind the end chunk, where no reader looks."""
    files = [plain(32, 32, colour) for colour in ((255, 0, 0), (0, 0, 255))]
    red, blue = (one.ljust(max(map(len, files)), b"\0") + mark for one in files)
    return red, blue


def crc_twins(mark: bytes) -> Twins:
    """Whose CRC-32 are equal."""
    red, blue = red_and_blue(mark)
    red += bytes(4)
    return red, with_crc(blue, zlib.crc32(red))


def sha_twins(mark: bytes, bits: slice) -> Twins:
    """Whose SHA-256 are equal in these four bytes."""
    red, blue = ((one, hashlib.sha256(one)) for one in red_and_blue(mark))

    def part(started: "hashlib._Hash", tail: bytes) -> bytes:
        digest = started.copy()
        digest.update(tail)
        return digest.digest()[bits]

    tails = [number.to_bytes(4, "little") for number in range(1 << 18)]
    of_red = {part(red[1], tail): tail for tail in tails}
    tail = next(one for one in tails if part(blue[1], one) in of_red)
    return red[0] + of_red[part(blue[1], tail)], blue[0] + tail


HEAD, END = slice(4), slice(28, 32)
TWINS: dict[str, tuple[Callable[[bytes], Twins], Callable[[bytes], Any]]] = {
    "CRC-32": (crc_twins, zlib.crc32),
    "the first 32 bits of SHA-256": (
        lambda mark: sha_twins(mark, HEAD),
        lambda data: hashlib.sha256(data).digest()[HEAD],
    ),
    "the last 32 bits of SHA-256": (
        lambda mark: sha_twins(mark, END),
        lambda data: hashlib.sha256(data).digest()[END],
    ),
}


@both
@pytest.mark.parametrize("name", TWINS)
async def test_pictures_that_agree_in_32_bits_of_any_key_are_told_apart_everywhere(
    tiny: Three, way: Way, name: str
) -> None:
    """C05"""
    make, key = TWINS[name]
    # Each way begins with pictures that no cache holds.
    red, blue = make(way.encode())
    assert red != blue
    assert (len(red), key(red)) == (len(blue), key(blue))
    first, second, third = [await said(tiny, way, [user(one, "?")]) for one in (red, blue, red)]
    assert (first.sources, second.sources, third.sources) == (("remote",), ("remote",), ("cache",))
    assert first.text == third.text != second.text
    assert not same(await encoded(tiny, red), await encoded(tiny, blue))


async def test_references_are_of_128_bits_and_more_and_differ_for_twins(tiny: Three) -> None:
    """C05"""
    red, blue = crc_twins(b"held")
    async with tiny.client() as client:
        one, other, again = [await client.hold(picture) for picture in (red, blue, red)]
    assert isinstance(one, Reference)
    assert one.id == again.id != other.id
    # Base64 without padding: six bits a letter.
    assert len(one.id.removeprefix("emb_")) * 6 >= 128
