"""What a reply holds, in both forms."""

import hashlib
import io
from pathlib import Path

import grpc
import numpy as np
import PIL.Image
import pytest
import torch
import xxhash
from grpc.aio import insecure_channel

from chiasm import images, tensors, torch_tensors
from chiasm.errors import ChiasmError, Reason
from chiasm.models.vision import ImageFeatures, VisionHalf
from chiasm.models.wire import identity_from_wire, identity_to_wire
from chiasm.rpc import limits
from chiasm.rpc.channel import EncoderMethods
from chiasm.v1 import encoder_service_pb2 as pb
from chiasm.v1 import encoder_service_pb2_grpc, image_pb2
from chiasm.wire import plain
from encoder_service.batcher import StageTimes
from encoder_service.messages import Answer, check_unary, to_reply
from encoder_service.single_flight import Source
from tests.encoder_service.calls import (
    picture,
    rows_of,
    serving,
    settings_for,
    wired,
)


def alone(half: VisionHalf, data: bytes) -> torch.Tensor:
    """The rows that the vision half itself computes."""
    (features,) = half.encode([half.preprocess(images.decode_image(data))])
    return features.rows


async def test_features_are_bit_equal_to_the_vision_half(
    checkpoint: Path, half: VisionHalf
) -> None:
    async with serving(settings_for(checkpoint)) as service:
        for seed, size in ((1, (40, 30)), (2, (28, 28)), (3, (7, 90))):
            data = picture(seed, size)
            assert torch.equal(rows_of(await service.encode(data)), alone(half, data))


async def test_a_reply_states_what_its_rows_are(checkpoint: Path, half: VisionHalf) -> None:
    data = picture(4, (40, 30))
    async with serving(settings_for(checkpoint, encoder_name="eye-1")) as service:
        message = (await service.encode(data)).message
    embedding = message.embedding
    assert (embedding.row_count, embedding.placeholder_count) == (4, 4)
    assert list(embedding.features.shape) == [4, 64]
    assert (embedding.image_size.height, embedding.image_size.width) == (30, 40)
    assert embedding.content_digest == hashlib.sha256(data).digest()
    assert identity_from_wire(embedding.identity) == half.identity
    assert not embedding.HasField("grid_thw")
    assert message.encoder_name == "eye-1"
    assert message.source == pb.ENCODE_SOURCE_COMPUTED


async def test_the_stages_of_a_reply_add_up(checkpoint: Path) -> None:
    data = picture(5)
    async with serving(settings_for(checkpoint)) as service:
        first = (await service.encode(data)).message
        again = (await service.encode(data)).message
    times = first.timings
    stages = (times.preprocess_seconds, times.queue_seconds, times.forward_seconds)
    assert min(stages) > 0
    assert sum(stages) <= times.total_seconds < 5
    assert again.source == pb.ENCODE_SOURCE_CACHE
    assert again.timings.preprocess_seconds == again.timings.forward_seconds == 0
    assert again.timings.total_seconds > 0


async def test_orientation_is_applied_before_the_size_is_told(checkpoint: Path) -> None:
    turned = PIL.Image.fromarray(np.zeros((16, 24, 3), np.uint8))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    async with serving(settings_for(checkpoint)) as service:
        file = io.BytesIO()
        turned.save(file, "JPEG", exif=exif)
        size = (await service.encode(file.getvalue())).message.embedding.image_size
    assert (size.height, size.width) == (24, 16)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
async def test_rows_travel_in_the_type_of_the_tower(checkpoint: Path, dtype: str) -> None:
    other = VisionHalf.load(checkpoint, model_id="tiny", dtype=torch_tensors.dtype_of(dtype))
    data = picture(6)
    async with serving(settings_for(checkpoint, dtype=dtype)) as service:
        rows = rows_of(await service.encode(data))
    assert rows.dtype == torch_tensors.dtype_of(dtype)
    assert torch.equal(rows, alone(other, data))


async def test_stock_stubs_understand_the_service(checkpoint: Path, half: VisionHalf) -> None:
    data = picture(7)
    async with (
        serving(settings_for(checkpoint)) as service,
        insecure_channel(f"127.0.0.1:{service.port}") as channel,
    ):
        stub = encoder_service_pb2_grpc.EncoderServiceStub(channel)
        reply = await stub.EncodeImage(pb.EncodeImageRequest(image=image_pb2.Image(data=data)))
        events = [
            event
            async for event in stub.EncodeImageStream(
                pb.EncodeImageStreamRequest(image=image_pb2.Image(data=data))
            )
        ]
    rows = np.frombuffer(reply.embedding.features.data, "<f4")
    assert np.array_equal(rows.reshape(4, 64), alone(half, data).numpy())
    assert b"".join(event.chunk.data for event in events) == reply.embedding.features.data


async def test_the_chunked_form_equals_the_unary_and_its_checksum_verifies(
    slow_checkpoint: Path,
) -> None:
    data = picture(8)
    async with serving(settings_for(slow_checkpoint)) as service:
        unary = await service.encode(data)
        request = wired(pb.EncodeImageStreamRequest, data)
        events = [
            event
            async for event in EncoderMethods.ENCODE_IMAGE_STREAM.stream(service.channel, request)
        ]
    kinds = [event.message.WhichOneof("event") for event in events]
    assert kinds == ["header", *["chunk"] * 8, "trailer"]
    header, *middle, trailer = events
    joined = b""
    for event in middle:
        assert event.message.chunk.byte_offset == len(joined)
        piece = event.data(event.message.chunk.data)
        assert 0 < len(piece) <= limits.MAX_CHUNK_BYTES
        joined += piece
    assert len(joined) == header.message.header.total_byte_count
    assert xxhash.xxh3_64_intdigest(joined) == trailer.message.trailer.checksum
    described = header.message.header.embedding
    assert described.features.shape == unary.message.embedding.features.shape
    assert joined == bytes(unary.data(unary.message.embedding.features.data))
    assert described.identity == unary.message.embedding.identity
    assert described.content_digest == unary.message.embedding.content_digest


async def test_get_model_states_identity_and_limits(checkpoint: Path, half: VisionHalf) -> None:
    settings = settings_for(checkpoint, max_image_bytes=2000, max_image_pixels=1000)
    async with serving(settings) as service:
        request = plain(pb.EncoderServiceGetModelRequest())
        model = (await EncoderMethods.GET_MODEL.call(service.channel, request)).message
    assert identity_from_wire(model.identity) == half.identity
    assert (model.family, model.level_count) == ("llava", 0)
    assert (model.max_image_bytes, model.max_image_pixels) == (2000, 1000)
    assert model.max_unary_bytes == limits.MAX_UNARY_TENSOR_BYTES
    assert {"jpeg", "png", "webp"} <= set(model.image_formats)
    assert model.encoder_name.endswith(f":{service.port}")
    assert model.version


async def test_the_expected_identity_is_accepted(checkpoint: Path, half: VisionHalf) -> None:
    async with serving(settings_for(checkpoint)) as service:
        expected = identity_to_wire(half.identity)
        reply = await service.encode(picture(9), expected_identity=expected)
    assert reply.message.embedding.identity == expected


async def test_another_encoder_than_expected_is_refused_by_both_names(
    checkpoint: Path, half: VisionHalf
) -> None:
    async with serving(settings_for(checkpoint)) as service:
        expected = identity_to_wire(half.identity)
        expected.model_id, expected.weights_digest = "other", "f" * 64
        with pytest.raises(ChiasmError) as refused:
            await service.encode(b"no picture at all", expected_identity=expected)
        assert service.figure("encoded_images_total") == 1  # the picture of the start
    assert refused.value.reason is Reason.ENCODER_MISMATCH
    assert refused.value.grpc_code is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.field == "expected_identity"
    assert "other (weights ffffffffffff" in refused.value.message
    assert half.identity.describe() in refused.value.message


def test_an_embedding_above_the_unary_limit_points_to_the_chunked_form(half: VisionHalf) -> None:
    rows = torch.empty(limits.MAX_UNARY_TENSOR_BYTES // 256 + 1, 64)
    features = ImageFeatures(rows, (), rows.shape[0], None, (1, 1))
    answer = Answer(features, half.identity, b"", Source.COMPUTED, StageTimes(), 0.0, "eye")
    with pytest.raises(ChiasmError, match="EncodeImageStream") as refused:
        check_unary(to_reply(answer))
    assert refused.value.reason is Reason.TENSOR_TOO_LARGE


def test_extra_levels_follow_the_rows(half: VisionHalf) -> None:
    rows = torch.arange(256.0).reshape(4, 64)
    features = ImageFeatures(rows, (rows + 1, rows + 2), 1, (1, 4, 4), (8, 8))
    answer = Answer(features, half.identity, b"", Source.COMPUTED, StageTimes(), 0.0, "eye")
    response = to_reply(answer)
    levels = response.message.embedding.levels
    sent = [tensors.from_wire(level, response.data(level.data)) for level in levels]
    assert [float(level.to_float32()[0, 0]) for level in sent] == [1.0, 2.0]
    grid = response.message.embedding.grid_thw
    assert (grid.temporal, grid.height, grid.width) == (1, 4, 4)
