"""The LLM service over a real socket: exactness, mixing, refusals beside a running stream."""

import asyncio
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from chiasm.client import Answer, AsyncClient, Delta
from chiasm.conversation import GREEDY, Embedding, Message, Part, Sampling, assistant, user
from chiasm.errors import ChiasmError, Reason
from chiasm.images import decode_image
from chiasm.models.vision import VisionHalf
from chiasm.models.wire import identity_to_wire
from chiasm.tensors import Array
from chiasm.torch_tensors import from_torch
from chiasm.v1 import encoder_service_pb2, image_pb2, llm_service_pb2
from llm_service.prompt import PromptBuilder
from tests.llm_service.conftest import Serve

LONG = Sampling(temperature=0, max_tokens=300, ignore_eos=True)
SHORT = Sampling(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def tower(checkpoint: Path) -> VisionHalf:
    return VisionHalf.load(checkpoint, model_id="tiny")


def _embedded(tower: VisionHalf, picture: bytes, *, identity: bool = True) -> Embedding:
    (features,) = tower.encode([tower.preprocess(decode_image(picture))])
    message = image_pb2.ImageEmbedding(row_count=len(features.rows))
    if identity:
        message.identity.CopyFrom(identity_to_wire(tower.identity))
    timings = encoder_service_pb2.EncodeTimings()
    return Embedding(from_torch(features.rows), message, "computed", "test", timings)


def _generated(whole: Any, tower: VisionHalf, turns: list[Message], count: int) -> list[int]:
    """Tokens of transformers' own answer, from the whole model and its own tower."""
    from transformers import AutoTokenizer

    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(whole.config._name_or_path)
    messages, pixels = [], []
    for turn in turns:
        content: list[dict[str, str]] = []
        for part in turn.parts:
            if isinstance(part, bytes):
                pixels.append(tower.preprocess(decode_image(part)).tensors["pixel_values"])
                content.append({"type": "image"})
            else:
                content.append({"type": "text", "text": str(part)})
        messages.append({"role": {1: "system", 2: "user", 3: "assistant"}[turn.role],
                         "content": content})  # fmt: skip
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    text = text.replace("<image>", "<image>" * whole.config.image_seq_length)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    more = {"pixel_values": torch.cat(pixels)} if pixels else {}
    with torch.no_grad():
        out = whole.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=count, eos_token_id=None, **more,
        )  # fmt: skip
    answer: list[int] = out[0, ids.shape[1] :].tolist()
    return answer


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
async def test_local_tower_and_embeddings_answer_as_the_whole_model_does(
    serve: Serve, whole: Any, tower: VisionHalf, pictures: list[bytes], count: int
) -> None:
    first = [user("Look:", *pictures[: max(0, count - 1)], "what?")]
    turns = [*first, assistant("a thing"), user(*pictures[count - 1 : count], "and this?")]
    expected = _generated(whole, tower, turns, 12)
    async with serve() as (_, client):
        raw = await client.generate(turns, SHORT)
        embedded = await client.generate(_with_embeddings(turns, tower), SHORT)
    assert list(raw.token_ids) == list(embedded.token_ids) == expected
    assert raw.text == embedded.text
    assert raw.usage.image_token_count == embedded.usage.image_token_count == 4 * count
    assert [path.identity_checked for path in embedded.image_paths] == [True] * count


def _with_embeddings(turns: list[Message], tower: VisionHalf) -> list[Message]:
    def changed(part: Part) -> Part:
        return _embedded(tower, part) if isinstance(part, bytes) else part

    return [Message(turn.role, tuple(changed(part) for part in turn.parts)) for turn in turns]


async def test_swapping_pictures_swaps_answers_and_mixing_kinds_changes_nothing(
    serve: Serve, tower: VisionHalf, pictures: list[bytes]
) -> None:
    a, b = pictures[:2]
    ea, eb = (_embedded(tower, one) for one in (a, b))

    async def text(*parts: Part) -> str:
        return (await client.generate([user(*parts)], SHORT)).text

    async with serve() as (_, client):
        ab = [await text("x", p, "y", q) for p, q in ((a, b), (ea, b), (a, eb), (ea, eb))]
        ba = [await text("x", p, "y", q) for p, q in ((b, a), (eb, a), (b, ea), (eb, ea))]
    assert len(set(ab)) == len(set(ba)) == 1
    assert ab[0] != ba[0]


async def test_a_bare_array_is_taken_and_the_answer_says_its_identity_was_not_checked(
    serve: Serve, tower: VisionHalf, pictures: list[bytes]
) -> None:
    embedding = _embedded(tower, pictures[0])
    async with serve() as (_, client):
        two = await client.generate([user(embedding.to_numpy(), "?")], SHORT)
        three = await client.generate([user(embedding.to_numpy()[None], "?")], SHORT)
        raw = await client.generate([user(pictures[0], "?")], SHORT)
    assert two.text == three.text == raw.text
    assert not two.image_paths[0].identity_checked


async def test_the_cache_serves_the_second_request_and_not_another_tenant(
    serve: Serve, pictures: list[bytes]
) -> None:
    async with serve() as (service, client):
        sources = [
            (await client.generate([user(pictures[0], "?")], SHORT)).image_paths[0].source
            for _ in range(2)
        ]
        async with AsyncClient(llm=f"127.0.0.1:{service.port}", tenant="other") as other:
            third = await other.generate([user(pictures[0], "?")], SHORT)
    assert [*sources, third.image_paths[0].source] == [3, 1, 3]


async def test_counting_equals_the_usage_of_the_answer(
    serve: Serve, tower: VisionHalf, pictures: list[bytes]
) -> None:
    turns = [user("one", pictures[0], _embedded(tower, pictures[1]), "two")]
    async with serve() as (_, client):
        counted = await client.count_tokens(turns)
        answer = await client.generate(turns, SHORT)
    usage = answer.usage
    assert counted.total_token_count == usage.prompt_token_count
    assert usage.prompt_token_count == usage.text_token_count + usage.image_token_count
    assert counted.image_token_count == 8


def _bad_rows(change: Any) -> Any:
    rows = np.zeros((4, 64), np.float32)
    return change(rows)


def _bomb() -> bytes:
    head = io.BytesIO()
    Image.new("RGB", (1, 1)).save(head, "PNG")
    data = bytearray(head.getvalue())
    data[16:24] = (20000).to_bytes(4, "big") * 2
    return bytes(data)


def _nan(rows: Any) -> Any:
    rows[2, 3] = np.nan
    return rows


def _infinite(rows: Any) -> Any:
    rows[1, 0] = np.inf
    return rows


BAD_PARTS: dict[str, tuple[Part, Reason, str]] = {
    "text as image": (b"hello", Reason.IMAGE_INVALID, "image.data"),
    "empty image": (b"", Reason.IMAGE_INVALID, "image.data"),
    "bomb": (_bomb(), Reason.IMAGE_INVALID, "image"),
    "wrong width": (np.zeros((4, 63), np.float32), Reason.TENSOR_INVALID, "features.shape"),
    "wrong rank": (np.zeros(64, np.float32), Reason.TENSOR_INVALID, "features.shape"),
    "stack": (np.zeros((2, 4, 64), np.float32), Reason.TENSOR_INVALID, "features.shape"),
    "wrong rows": (np.zeros((5, 64), np.float32), Reason.TENSOR_INVALID, "features"),
    "empty tensor": (np.zeros((0, 64), np.float32), Reason.TENSOR_INVALID, "features.shape"),
    "integers": (np.zeros((4, 64), np.int64), Reason.TENSOR_INVALID, "features.data_type"),
    "nan": (_bad_rows(_nan), Reason.TENSOR_INVALID, "features.data"),
    "infinite": (_bad_rows(_infinite), Reason.TENSOR_INVALID, "features.data"),
}


@pytest.mark.parametrize("name", BAD_PARTS)
async def test_a_bad_part_is_a_typed_error_while_a_stream_runs_on(
    serve: Serve, pictures: list[bytes], name: str
) -> None:
    part, reason, place = BAD_PARTS[name]
    async with serve() as (_, client):
        alone = (await client.generate([user(pictures[0], "go on")], LONG)).text
        running = asyncio.create_task(client.generate([user(pictures[0], "go on")], LONG))
        with pytest.raises(ChiasmError) as caught:
            await client.generate([user("ok", pictures[1]), user("x", part)], SHORT)
        assert (await running).text == alone
    told = caught.value
    assert told.reason in {reason, Reason.IMAGE_TOO_LARGE if name == "bomb" else reason}
    assert (told.field or "").startswith("messages[1].parts[1].")
    assert place in (told.field or "")


async def test_an_embedding_of_another_encoder_is_refused_with_both_identities(
    serve: Serve, tower: VisionHalf, pictures: list[bytes]
) -> None:
    embedding = _embedded(tower, pictures[0])
    embedding.message.identity.weights_digest = "f" * 64
    async with serve() as (_, client):
        with pytest.raises(ChiasmError) as caught:
            await client.generate([user(embedding)], SHORT)
    assert caught.value.reason is Reason.ENCODER_MISMATCH
    assert "f" * 12 in caught.value.message
    assert tower.identity.weights_digest[:12] in caught.value.message


@pytest.mark.parametrize(
    ("shape", "size"), [([4, 64], 1023), ([2**40, 2**40], 1024), ([2**62, 64], 1024)]
)
async def test_a_lying_tensor_header_is_refused(serve: Serve, shape: list[int], size: int) -> None:
    kind = from_torch(torch.zeros(1)).data_type
    lying = Embedding(
        Array(kind, tuple(shape), memoryview(bytes(size))),
        image_pb2.ImageEmbedding(),
        "",
        "",
        encoder_service_pb2.EncodeTimings(),
    )
    async with serve() as (_, client):
        with pytest.raises(ChiasmError) as caught:
            await client.generate([user(lying)], SHORT)
    assert caught.value.reason is Reason.TENSOR_INVALID


async def test_limits_are_refused_by_name(serve: Serve, pictures: list[bytes]) -> None:
    async def told(turns: list[Message], sampling: Sampling = SHORT, **more: Any) -> ChiasmError:
        with pytest.raises(ChiasmError) as caught:
            await client.generate(turns, sampling, **more)
        return caught.value

    async with serve(max_images=2) as (_, client):
        many = await told([user(pictures[0]), assistant("a"), user(*pictures[1:3])])
        long = await told([user("word " * 600)])
        too_much = await told([user("hello")], Sampling(max_tokens=510))
        other = await told([user("hello")], model="nope")
        hot = await told([user("hello")], Sampling(temperature=2.5))
        role = await told([Message(llm_service_pb2.ROLE_UNSPECIFIED, ("x",))])
        empty = await told([])
        crumbs = await told([user(*[""] * 16_385)])
    assert crumbs.field == "messages"
    assert (many.reason, "3" in many.message) == (Reason.TOO_MANY_IMAGES, True)
    assert long.reason is too_much.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert other.reason is Reason.MODEL_NOT_FOUND
    assert (hot.reason, hot.field) == (Reason.REQUEST_INVALID, "sampling.temperature")
    assert role.field == "messages[0].role"
    assert empty.field == "messages"


async def test_a_text_far_beyond_the_context_is_not_even_tokenized(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[str] = []
    tokenize = PromptBuilder._tokenize

    def noted(builder: PromptBuilder, rendered: str, spelled: Any) -> Any:
        tokenized.append(rendered)
        return tokenize(builder, rendered, spelled)

    async with serve() as (_, client):
        monkeypatch.setattr(PromptBuilder, "_tokenize", noted)
        assert (await client.generate([user("hello")], SHORT)).text
        for texts in (["word " * 4_000_000], ["w" * 8192] * 2000):
            with pytest.raises(ChiasmError) as caught:
                await client.generate([user(*texts)], SHORT)
            assert caught.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED
            assert caught.value.field == "messages"
    assert len(tokenized) == 1


async def test_a_full_service_refuses_with_a_retry_hint(serve: Serve) -> None:
    async with serve(max_active_requests=1) as (_, client):
        stream = client.stream([user("go on")], LONG)
        await anext(stream)
        with pytest.raises(ChiasmError) as caught:
            await client.generate([user("hello")], SHORT)
        await stream.aclose()
    assert caught.value.reason is Reason.QUEUE_FULL
    assert caught.value.retry_after == 1.0


async def test_leaving_a_stream_frees_its_blocks_within_a_second(serve: Serve) -> None:
    async with serve() as (service, client):
        stream = client.stream([user("go on")], LONG)
        await anext(stream)
        assert service.engine.stats().blocks_used > 0
        await stream.aclose()
        left = time.monotonic()
        while service.engine.stats().blocks_used and time.monotonic() - left < 1:
            await asyncio.sleep(0.01)
        assert service.engine.stats().blocks_used == 0
        assert service.engine.stats().running == 0


async def test_a_deadline_ends_a_stream_with_its_status(serve: Serve) -> None:
    async with (
        serve() as (service, _),
        AsyncClient(llm=f"127.0.0.1:{service.port}", timeout=0.03) as hurried,
    ):
        with pytest.raises(ChiasmError) as caught:
            await hurried.generate([user("go on")], LONG)
    assert caught.value.reason is Reason.DEADLINE


async def test_a_drain_finishes_running_streams(serve: Serve) -> None:
    async with serve() as (service, client):
        whole = (await client.generate([user("go on")], LONG)).text
        stream = client.stream([user("go on")], LONG)
        first = await anext(stream)
        drained = asyncio.create_task(service.server.drain())
        rest = [event async for event in stream]
        await drained
    assert isinstance(first, Delta)
    assert isinstance(rest[-1], Answer)
    assert rest[-1].text == whole


async def test_a_service_without_vision_takes_embeddings_and_refuses_pictures(
    serve: Serve, tower: VisionHalf, pictures: list[bytes]
) -> None:
    async with serve(vision="none") as (_, client):
        answer = await client.generate([user(_embedded(tower, pictures[0]), "?")], SHORT)
        with pytest.raises(ChiasmError) as caught:
            await client.generate([user(pictures[0], "?")], SHORT)
    assert answer.usage.image_token_count == 4
    assert caught.value.reason is Reason.UNSUPPORTED
    assert caught.value.field == "messages[0].parts[0].image"


async def test_no_encoder_alive_is_a_typed_answer_and_text_is_served_on(
    serve: Serve, pictures: list[bytes]
) -> None:
    async with serve(vision="remote", encoders="127.0.0.1:1") as (_, client):
        with pytest.raises(ChiasmError) as caught:
            await client.generate([user(pictures[0], "?")], SHORT)
        text = await client.generate([user("hello")], GREEDY)
    assert caught.value.reason is Reason.NO_ENCODER
    assert caught.value.retry_after
    assert text.usage.completion_token_count >= 1
