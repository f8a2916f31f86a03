"""Embeddings in every form that clients send, and what is said of those that are wrong.

The rows B01 to B16 of the project's cases, where the gateway decides them.
"""

import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from chiasm.v1 import image_pb2, llm_service_pb2
from gateway.openai import pulled
from gateway.openai.parse import parse_chat
from tests.gateway.gateway_system import MIB, System, whole_system
from tests.scripted_llm import MODEL, WIDTH, Script

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIRST = "messages[0].content[0]"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def large_system() -> AsyncIterator[System]:
    async with whole_system(
        max_body_bytes=32 * MIB, max_image_bytes=MIB, max_embedding_bytes=4 * MIB
    ) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def leveled() -> AsyncIterator[System]:
    """A gateway before a model with three further feature levels."""
    async with whole_system() as running:
        running.llm.card.level_count = 3
        yield running


def rows(count: int = 4, width: int = WIDTH) -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).standard_normal((count, width)).astype(np.float32)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def npy(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, np.asarray(array))
    return b64(file.getvalue())


def torch_b64(tensor: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return b64(file.getvalue())


def raw(array: np.ndarray[Any, Any], **changes: Any) -> dict[str, Any]:
    fields = {"data": b64(array.tobytes()), "dtype": "float32", "shape": list(array.shape)}
    return fields | changes


def embeds(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_embeds", "image_embeds": value, **more}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


async def received(system: System, *parts: dict[str, Any], **fields: Any) -> Any:
    system.llm.script = Script()
    answer = await system.ask(messages=[user(*parts)], **fields)
    assert answer.status_code == 200, answer.text
    return system.llm.last


async def embedding(system: System, value: Any) -> image_pb2.ImageEmbedding:
    got = await received(system, embeds(value))
    part: image_pb2.ImageEmbedding = got.message.messages[0].parts[0].embedding
    return part


async def refused(system: System, *parts: dict[str, Any], **fields: Any) -> Any:
    before = len(system.llm.received)
    answer = await system.ask(messages=[user(*parts)], **fields)
    assert len(system.llm.received) == before
    assert answer.status_code in {400, 413}, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error | {"status": answer.status_code}


# Forms


@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_raw_elements_arrive_bit_for_bit(system: System, dtype: str) -> None:
    array = rows().astype(dtype)
    for value in (
        raw(array, dtype=dtype),
        {"image_embeds": raw(array, dtype=dtype)},
        raw(array, dtype=dtype, image_sizes=None),
        raw(array, dtype=dtype, shape=[1, 4, WIDTH]),
    ):
        got = (await received(system, embeds(value))).features(0, 0)
        assert got.data_type.name == dtype
        assert bytes(got.data) == array.tobytes()
    patterns = np.arange(16, dtype=np.uint16)
    bits = raw(patterns, dtype="bfloat16", shape=[2, WIDTH])
    got = (await received(system, embeds(bits))).features(0, 0)
    assert (got.data_type.name, bytes(got.data)) == ("bfloat16", patterns.tobytes())


@pytest.mark.parametrize(
    ("changes", "inner", "words"),
    [
        ({"data": b64(bytes(124))}, "data", ["[4, 8]", "128 bytes", "124"]),
        ({"data": b64(bytes(132))}, "data", ["132"]),
        ({"data": "@@@@"}, "data", ["base64"]),
        ({"data": ""}, "data", ["0 bytes"]),
        ({"data": 5}, "data", ["base64"]),
        ({"dtype": "float8"}, "dtype", ["float8", "float32", "bfloat16"]),
        ({"dtype": "int64"}, "dtype", ["int64"]),
        ({"dtype": None}, "dtype", ["element type"]),
        ({"dtype": ["float32"]}, "dtype", ["element type"]),
        ({"shape": [4, WIDTH + 1]}, "shape", ["[rows, 8]", "[4, 9]"]),
        ({"shape": [2, 2, WIDTH]}, "shape", ["send several parts"]),
        ({"shape": [-4, WIDTH]}, "shape", ["whole numbers"]),
        ({"shape": [4.0, WIDTH]}, "shape", ["whole numbers"]),
        ({"shape": [True, WIDTH]}, "shape", ["whole numbers"]),
        ({"shape": [2**70, WIDTH]}, "shape", ["no size"]),
        ({"shape": [1] * 5}, "shape", ["at most 4"]),
        ({"shape": [0, WIDTH]}, "shape", ["empty"]),
        ({"shape": []}, "shape", ["scalar"]),
        ({"shape": "4,8"}, "shape", ["list"]),
        ({"strides": [1]}, "strides", ["strides"]),
    ],
)
async def test_raw_elements_that_do_not_add_up_are_refused_at_their_field(
    system: System, changes: dict[str, Any], inner: str, words: list[str]
) -> None:
    for value, place in (
        (raw(rows(), **changes), f"{FIRST}.image_embeds"),
        ({"image_embeds": raw(rows(), **changes)}, f"{FIRST}.image_embeds.image_embeds"),
    ):
        error = await refused(system, embeds(value))
        assert error["param"] == f"{place}.{inner}"
        assert all(word in error["message"] for word in words), error


async def test_a_raw_shape_beyond_the_limit_is_a_413(system: System) -> None:
    error = await refused(system, embeds(raw(rows(), shape=[2**40, WIDTH])))
    assert (error["status"], error["code"]) == (413, "image_embeds_too_large")


async def test_grid_and_size_arrive_in_each_form(system: System) -> None:
    grids = ([1, 4, 6], [[1, 4, 6]], npy([1, 4, 6]), npy(np.array([[1, 4, 6]], ">i4")),
             torch_b64(torch.tensor([[1, 4, 6]])))  # fmt: skip
    for grid in grids:
        got = await embedding(system, {"image_embeds": npy(rows()), "image_grid_thw": grid})
        assert got.grid_thw == image_pb2.GridThw(temporal=1, height=4, width=6)
        assert not got.HasField("image_size")
    sizes = ([30, 20], [[30, 20]], npy([30, 20]), torch_b64(torch.tensor([[30, 20]]).int()))
    for size in sizes:
        got = await embedding(system, raw(rows(), image_sizes=size))
        assert got.image_size == image_pb2.ImageSize(height=30, width=20)
        assert not got.HasField("grid_thw")


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ([1, 4], ["[t, h, w]", "list of 2"]),
        ([1, 4, 6, 8], ["list of 4"]),
        ([[1, 4, 6], [1, 4, 6]], ["2 rows", "several parts"]),
        ([1, 0, 6], ["from 1", "0 came"]),
        ([1, -4, 6], ["-4 came"]),
        ([1, 4, 2**31], ["2147483648 came"]),
        ([1, 10**400, 6], ["came"]),
        ([1, 4.0, 6], ["fraction"]),
        ([1, True, 6], ["number"]),
        ([1, "4", 6], ["number"]),
        ({"data": "AAAA"}, ["[t, h, w]"]),
        (5, ["[t, h, w]"]),
        ("", ["0 bytes"]),
        ("AAAA", ["format is not known"]),
        (npy([1.0, 4.0, 6.0]), ["int32 or int64"]),
        (npy(np.array([1, 4, 6], np.int16)), ["int32 or int64"]),
        (npy(np.ones((3, 3), np.int64)), ["72 bytes", "limit is 64"]),
        (npy(7), ["scalar"]),
        (npy(np.zeros((0, 3), np.int64)), ["empty"]),
        ("A" * 100_000, ["limit is 65536"]),
    ],
)
async def test_a_grid_that_is_none_is_refused_at_its_path(
    system: System, grid: Any, words: list[str]
) -> None:
    error = await refused(system, embeds({"image_embeds": npy(rows()), "image_grid_thw": grid}))
    assert error["param"] == f"{FIRST}.image_embeds.image_grid_thw"
    assert all(word in error["message"] for word in words), error


async def test_names_that_are_not_known_are_refused_not_dropped(system: System) -> None:
    for name in ("deepstack", "pixel_values", "image_sizes_hw"):
        error = await refused(system, embeds({"image_embeds": npy(rows()), name: "AAAA"}))
        assert error["param"] == f"{FIRST}.image_embeds.{name}"
        assert name in error["message"]
    error = await refused(system, embeds({"image_embeds": npy(rows()), "a b" * 500: 1}))
    assert error["param"] == f"{FIRST}.image_embeds"
    assert len(error["message"]) < 300


@pytest.mark.parametrize("name", ["image_grid_thw", "image_sizes"])
async def test_what_stands_beside_the_object_is_refused_not_dropped(
    system: System, name: str
) -> None:
    error = await refused(system, embeds(npy(rows())) | {name: [1, 2, 2]})
    assert error["param"] == f"{FIRST}.{name}"
    assert "into the object image_embeds" in error["message"]


async def test_a_reference_arrives_by_its_id(system: System) -> None:
    part = (await received(system, embeds({"ref": "emb_A-b_9"}))).message.messages[0].parts[0]
    assert part.reference.id == "emb_A-b_9"
    for value in ({"ref": "mine"}, {"ref": 5}, {"ref": "emb_" + "x" * 200}, {"ref": "emb_\n"}):
        error = await refused(system, embeds(value))
        assert error["param"] == f"{FIRST}.image_embeds.ref"
    error = await refused(system, embeds({"ref": "emb_1", "image_embeds": npy(rows())}))
    assert error["param"] == f"{FIRST}.image_embeds.image_embeds"


async def test_a_uuid_becomes_an_alias_and_may_stand_for_the_data(system: System) -> None:
    got = await received(
        system,
        embeds(npy(rows()), uuid="first"),
        embeds(None, uuid="first"),
        {"type": "image_url", "image_url": None, "uuid": "é" * 128},
        {"image_embeds": None, "uuid": "no type"},
    )
    parts = got.message.messages[0].parts
    assert [part.alias for part in parts] == ["first", "first", "é" * 128, "no type"]
    kinds = [part.WhichOneof("content") for part in parts]
    assert kinds == ["embedding", None, None, None]
    plain = (await received(system, embeds(npy(rows())))).message.messages[0].parts[0]
    assert not plain.HasField("alias")


@pytest.mark.parametrize("uuid", ["", "é" * 129, 5, "a\0b"])
async def test_a_uuid_that_is_no_short_text_is_refused(system: System, uuid: Any) -> None:
    error = await refused(system, embeds(npy(rows()), uuid=uuid))
    assert error["param"] == f"{FIRST}.uuid"


@pytest.mark.parametrize("kind", ["image_url", "image_embeds"])
async def test_neither_data_nor_uuid_is_refused(system: System, kind: str) -> None:
    for part in ({"type": kind}, {"type": kind, kind: None}, {kind: None}):
        error = await refused(system, part)
        assert (error["param"], error["code"]) == (
            f"{FIRST}.{kind}", "missing_required_parameter",
        )  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["audio_embeds", "input_audio", "audio_url", "video_url", "video_embeds", "file"]
)
async def test_other_media_are_not_served_and_their_part_is_named(
    system: System, kind: str
) -> None:
    error = await refused(system, {"type": "text", "text": "a"}, {"type": kind, kind: "AAAA"})
    assert (error["param"], error["code"]) == ("messages[0].content[1]", "unsupported_parameter")
    assert kind in error["message"]


# Levels, as vLLM takes them for Qwen3-VL: torch.cat([features, *levels], dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_levels_beside_the_features_are_taken_apart(
    leveled: System, dtype: torch.dtype
) -> None:
    blocks = [torch.from_numpy(rows(5) + n).to(dtype) for n in range(4)]
    for joined in (torch.cat(blocks, dim=1), torch.cat(blocks, dim=1)[None]):
        got = await received(leveled, embeds(torch_b64(joined)))
        message = got.message.messages[0].parts[0].embedding
        tensors = [message.features, *message.levels]
        assert len(tensors) == 4
        for block, tensor in zip(blocks, tensors, strict=True):
            assert list(tensor.shape) == [*joined.shape[:-1], WIDTH]
            assert bytes(got.wired.data(tensor.data)) == block.view(torch.uint8).numpy().tobytes()


async def test_missing_levels_are_named_with_the_width_that_is_due(leveled: System) -> None:
    error = await refused(leveled, embeds(npy(rows())))
    assert all(word in error["message"] for word in ("[rows, 32]", "3 levels", "[4, 8]"))


# B01 to B16


async def test_b04_several_embeddings_in_several_turns_keep_their_order(system: System) -> None:
    arrays = [rows(4), rows(9), rows(4) + 1]
    first, second, third = (embeds(npy(array)) for array in arrays)
    answer = await system.ask(
        messages=[user(first, second), {"role": "assistant", "content": "ok"}, user(third)]
    )
    assert answer.status_code == 200
    got = [system.llm.last.features(*place) for place in ((0, 0), (0, 1), (2, 0))]
    assert [bytes(one.data) for one in got] == [array.tobytes() for array in arrays]


async def test_b06_b07_sparse_tensors_and_pickles_are_refused(system: System) -> None:
    huge = torch.sparse_coo_tensor(
        torch.tensor([[0], [0]]), torch.ones(1), (2**20, 2**20), check_invariants=True
    )
    for payload in (
        torch_b64(huge),
        npy(np.array([{"a": 1}], dtype=object)),
        b64(b"\x80\x04N."),
    ):
        error = await refused(system, embeds(payload))
        assert (error["status"], error["param"]) == (400, f"{FIRST}.image_embeds")


async def test_b08_a_tensor_of_an_absent_device_is_read(system: System) -> None:
    payload = base64.b64decode(torch_b64(torch.from_numpy(rows())))
    moved = payload.replace(b"X\x03\0\0\0cpu", b"X\x03\0\0\0xpu")
    assert moved != payload
    got = (await received(system, embeds(b64(moved)))).features(0, 0)
    assert bytes(got.data) == rows().tobytes()


async def test_b10_doubles_are_rounded_and_bytes_refused(system: System) -> None:
    got = (await received(system, embeds(npy(rows().astype(np.float64))))).features(0, 0)
    assert bytes(got.data) == rows().tobytes()
    error = await refused(system, embeds(npy(rows().astype(np.int8))))
    assert "convert it to float32, float16, bfloat16 or float64" in error["message"]


async def test_b12_the_same_embedding_twice_arrives_twice_the_same(system: System) -> None:
    for more in ([], [{"type": "text", "text": "and now?"}]):
        got = await received(system, embeds(npy(rows())), *more)
        assert bytes(got.features(0, 0).data) == rows().tobytes()


@pytest.mark.parametrize("value", [npy(rows()[:0]), "", [], npy(1.0), [[0.5]]])
async def test_b16_an_embedding_of_nothing_is_refused(system: System, value: Any) -> None:
    error = await refused(system, embeds(value))
    assert (error["status"], error["param"]) == (400, f"{FIRST}.image_embeds")


@pytest.mark.parametrize("form", ["npy", "raw"])
async def test_b16_an_embedding_beyond_the_limit_is_a_413(large_system: System, form: str) -> None:
    array = rows(9 * MIB // 4 // WIDTH)
    error = await refused(large_system, embeds(npy(array) if form == "npy" else raw(array)))
    assert (error["status"], error["code"]) == (413, "image_embeds_too_large")


# Large texts are decoded before the JSON is parsed


async def test_a_large_embedding_and_a_large_picture_arrive_whole(large_system: System) -> None:
    array, picture = rows(3 * MIB // 4 // WIDTH), np.random.default_rng(1).bytes(900_000)
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64(picture)}"}}
    for value in (npy(array), {"image_embeds": npy(array)}, raw(array),
                  {"image_embeds": raw(array), "image_sizes": [3, 4]}):  # fmt: skip
        got = await received(large_system, url, embeds(value), url)
        assert got.image(0, 0) == got.image(0, 2) == picture
        assert bytes(got.features(0, 1).data) == array.tobytes()


async def test_large_base64_that_is_a_text_stays_one(large_system: System) -> None:
    words = b64(np.random.default_rng(1).bytes(600_000))
    got = await received(
        large_system, {"type": "text", "text": words}, {"type": "text", "text": f"x {words}"},
        {"type": "text", "text": f"\"{words}\""}, {"type": "text", "text": "A" * MIB},
        embeds(npy(rows(40_000))), user=words,
    )  # fmt: skip
    texts = [part.text for part in got.message.messages[0].parts[:4]]
    assert texts == [words, f"x {words}", f'"{words}"', "A" * MIB]
    assert bytes(got.features(0, 4).data) == rows(40_000).tobytes()


async def test_large_untidy_base64_is_read_as_small_is(large_system: System) -> None:
    data = np.random.default_rng(1).bytes(900_001)
    encoded = b64(data)
    lines = "\r\n".join(encoded[start : start + 76] for start in range(0, len(encoded), 76))
    safe = encoded.translate(str.maketrans("+/", "-_"))
    for form in (encoded.rstrip("="), lines, safe):
        for head in ("data:image/png;base64,", "DATA: image/png ; charset=x ;BASE64 ,"):
            part = {"type": "image_url", "image_url": {"url": head + form}}
            assert (await received(large_system, part)).image(0, 0) == data
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    body = json.dumps({"model": MODEL, "messages": [user(url)]}).replace("/", "\\/")
    assert (await large_system.send(body.encode())).status_code == 200
    assert large_system.llm.last.image(0, 0) == data


async def test_large_pictures_have_the_same_faults_as_small_ones(large_system: System) -> None:
    encoded = b64(bytes(900_000))
    for url, code in (
        (encoded, "invalid_image_url"),
        (f"file:{encoded}", "invalid_image_url"),
        (f"data:;;;base64,{encoded}", None),
        (f"data:im age/png;base64,{encoded}", "invalid_image_url"),
        (f"data:image/png;base64,{b64(bytes(1_100_000))}", "image_file_too_large"),
    ):
        part = {"type": "image_url", "image_url": {"url": url}}
        if code is None:
            assert (await received(large_system, part)).image(0, 0) == bytes(900_000)
            continue
        error = await refused(large_system, part)
        assert (error["param"], error["code"]) == (f"{FIRST}.image_url.url", code)


async def test_broken_json_around_large_texts_stays_broken(large_system: System) -> None:
    run = b"A" * MIB
    for body in (
        b'{"a":"b"' + run + b'"}', b'{"a":"' + run, b'{"a":' + run + b'"}', b'"' + run,
        b'{"a":"x\\"' + run + b'}', b'[1]"' + run + b'"', b'{"a":"\x01' + run + b'"}',
    ):  # fmt: skip
        answer = await large_system.send(body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


async def test_pulling_changes_nothing_but_where_the_bytes_are() -> None:
    text, url = "B" * pulled.LARGE, f"data:image/png;base64,{'Q' * MIB}"
    request = {
        "model": "m", "n": 2,
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "say \"AAAA\""},
            {"type": "image_url", "image_url": url},
            {"type": "image_embeds", "image_embeds": {"image_embeds": {"data": text}}},
        ]}],
    }  # fmt: skip
    body = bytearray(json.dumps(request).encode())
    before = bytes(body)
    got = await pulled.pull(body)
    assert body == before
    assert len(got.data) == 2
    restored = bytes(got.body)
    for ticket, data in got.data.items():
        assert restored.count(ticket.encode()) == 1
        restored = restored.replace(ticket.encode(), base64.b64encode(data))
    assert restored == before
    assert len(got.body) < 1000
    assert pulled.all_placed(json.loads(got.body), got.data)
    assert parse_chat(restored).n == 2


# Pixels


async def test_bounds_of_pixels_go_to_every_raw_picture(system: System) -> None:
    url = {"type": "image_url", "image_url": {"url": "data:;base64,QQ==", "detail": "low"}}
    bounds = {"min_pixels": 100, "max_pixels": 2000, "other": None}
    got = await received(system, url, embeds(npy(rows())), url, mm_processor_kwargs=bounds)
    for number in (0, 2):
        options = got.message.messages[0].parts[number].image.options
        assert (options.detail, options.min_pixels, options.max_pixels) == (
            image_pb2.IMAGE_DETAIL_LOW, 100, 2000,
        )  # fmt: skip
    got = await received(system, url, mm_processor_kwargs={"max_pixels": 5})
    options = got.message.messages[0].parts[0].image.options
    assert (options.HasField("min_pixels"), options.max_pixels) == (False, 5)
    for none in (dict[str, int](), None):
        got = await received(system, url, mm_processor_kwargs=none)
        options = got.message.messages[0].parts[0].image.options
        assert not options.HasField("min_pixels")
        assert not options.HasField("max_pixels")


@pytest.mark.parametrize(
    ("bounds", "param", "code"),
    [
        ({"min_pixels": 0}, "mm_processor_kwargs.min_pixels", "below_min_value"),
        ({"max_pixels": 2**31}, "mm_processor_kwargs.max_pixels", "above_max_value"),
        ({"max_pixels": 1.5}, "mm_processor_kwargs.max_pixels", "invalid_type"),
        ({"max_pixels": True}, "mm_processor_kwargs.max_pixels", "invalid_type"),
        ({"min_pixels": 9, "max_pixels": 8}, "mm_processor_kwargs.min_pixels", "invalid_value"),
        ({"num_crops": 4}, "mm_processor_kwargs.num_crops", "unsupported_parameter"),
        ({"size": {"longest_edge": 4}}, "mm_processor_kwargs.size", "unsupported_parameter"),
        ({"a b": 4}, "mm_processor_kwargs", "unsupported_parameter"),
        ([], "mm_processor_kwargs", "invalid_type"),
    ],
)
async def test_other_bounds_of_pixels_are_refused_by_name(
    system: System, bounds: Any, param: str, code: str
) -> None:
    error = await refused(system, embeds(npy(rows())), mm_processor_kwargs=bounds)
    assert (error["param"], error["code"]) == (param, code)


# A35, A38


async def test_a35_a_raw_picture_for_a_deployment_without_vision_is_refused() -> None:
    url = {"type": "image_url", "image_url": {"url": "data:;base64,QQ=="}}
    async with whole_system() as blind:
        blind.llm.card.vision_source = llm_service_pb2.VISION_SOURCE_NONE
        error = await refused(blind, {"type": "text", "text": "a"}, url)
        assert (error["param"], error["status"]) == ("messages[0].content[1]", 400)
        await received(blind, embeds(npy(rows())))
        assert (await blind.ask()).status_code == 200


async def test_a35_a_model_without_pictures_takes_no_embedding_either() -> None:
    async with whole_system() as texts:
        texts.llm.card.encoder_identity.width = 0
        texts.llm.card.vision_source = llm_service_pb2.VISION_SOURCE_NONE
        error = await refused(texts, embeds(npy(rows())))
        assert (error["param"], error["code"]) == (f"{FIRST}.image_embeds", "unsupported_parameter")


async def test_a38_pictures_of_every_turn_are_passed_on(system: System) -> None:
    url = {"type": "image_url", "image_url": {"url": "data:;base64,QQ=="}}
    parts = [url, embeds(npy(rows()))]
    for role in ("system", "developer", "assistant", "tool"):
        answer = await system.ask(messages=[{"role": role, "content": parts}, user(*parts)])
        assert answer.status_code == 200
        for message in system.llm.last.message.messages:
            assert [part.WhichOneof("content") for part in message.parts] == ["image", "embedding"]
