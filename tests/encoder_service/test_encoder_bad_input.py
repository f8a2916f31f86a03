"""Bad pictures and options are refused by name, and nobody else notices."""

import asyncio
import io
from pathlib import Path

import PIL.Image
import pytest
import torch

from chiasm.errors import ChiasmError, Reason
from chiasm.rpc.channel import EncoderMethods
from chiasm.v1 import encoder_service_pb2 as pb
from chiasm.v1 import image_pb2
from chiasm.wire import Wired, plain
from tests.encoder_service.calls import picture, rows_of, serving, settings_for

ODD = Path(__file__).parent.parent / "odd_images"


def odd(name: str) -> bytes:
    return (ODD / name).read_bytes()


def bomb() -> bytes:
    """A small file that declares 20,000 x 20,000 pixels."""
    file = io.BytesIO()
    PIL.Image.new("1", (20_000, 20_000)).save(file, "PNG")
    return file.getvalue()


async def test_bad_pictures_are_typed_while_good_ones_are_answered(checkpoint: Path) -> None:
    bad = {
        b"": (Reason.IMAGE_INVALID, "empty_image_file"),
        b"Hello World": (Reason.IMAGE_INVALID, "image_parse_error"),
        odd("truncated_jpeg.jpg"): (Reason.IMAGE_INVALID, "image_parse_error"),
        odd("hopper.heif")[:300]: (Reason.IMAGE_INVALID, "image_parse_error"),
        b"\0\0\0\x0cJXL \r\n\x87\n": (Reason.IMAGE_INVALID, "unsupported_image_media_type"),
        odd("png_decompression_dos.png"): None,
        bomb(): (Reason.IMAGE_TOO_LARGE, "image_too_large"),
    }
    good = [picture(seed) for seed in range(4)]
    async with serving(settings_for(checkpoint)) as service:
        expected = [rows_of(await service.encode(data, tenant="before")) for data in good]
        answers = await asyncio.gather(
            *(service.encode(data) for data in [*bad, *good]), return_exceptions=True
        )
    for told, wanted in zip(answers, bad.values(), strict=False):
        assert isinstance(told, ChiasmError)
        assert told.field == "image.data"
        if wanted:
            assert (told.reason, told.metadata["code"]) == wanted
    for reply, rows in zip(answers[len(bad) :], expected, strict=True):
        assert isinstance(reply, Wired)
        assert torch.equal(rows_of(reply), rows)


async def test_a_file_above_the_limit_is_refused_before_it_is_read(checkpoint: Path) -> None:
    async with serving(settings_for(checkpoint, max_image_bytes=5000)) as service:
        with pytest.raises(ChiasmError, match="the limit is 5000") as refused:
            await service.encode(b"x" * 5001)
    assert refused.value.reason is Reason.IMAGE_TOO_LARGE
    assert refused.value.metadata["code"] == "image_file_too_large"


async def test_a_picture_above_the_pixel_limit_is_refused(checkpoint: Path) -> None:
    async with serving(settings_for(checkpoint, max_image_pixels=1000)) as service:
        with pytest.raises(ChiasmError, match="the limit is 1000") as refused:
            await service.encode(picture(1, (40, 30)))
    assert refused.value.reason is Reason.IMAGE_TOO_LARGE


async def test_a_thread_of_a_picture_is_refused(checkpoint: Path) -> None:
    async with serving(settings_for(checkpoint)) as service:
        with pytest.raises(ChiasmError, match="200 times") as refused:
            await service.encode(picture(1, (1000, 2)))
    assert refused.value.reason is Reason.IMAGE_INVALID


async def test_a_request_without_an_image_is_refused(checkpoint: Path) -> None:
    async with serving(settings_for(checkpoint)) as service:
        with pytest.raises(ChiasmError) as refused:
            await EncoderMethods.ENCODE_IMAGE.call(service.channel, plain(pb.EncodeImageRequest()))
    assert (refused.value.reason, refused.value.field) == (Reason.REQUEST_INVALID, "image")


@pytest.mark.parametrize("name", ["min_pixels", "max_pixels"])
async def test_pixel_options_are_refused_where_the_model_has_one_size(
    checkpoint: Path, name: str
) -> None:
    options = image_pb2.ImageOptions()
    setattr(options, name, 1000)
    async with serving(settings_for(checkpoint)) as service:
        with pytest.raises(ChiasmError) as refused:
            await service.encode(picture(1), options=options)
    assert refused.value.reason is Reason.IMAGE_INVALID
    assert refused.value.field == f"image.options.{name}"


async def test_every_detail_is_accepted_and_an_unknown_one_refused(checkpoint: Path) -> None:
    async with serving(settings_for(checkpoint)) as service:
        for detail in image_pb2.ImageDetail.values():
            options = image_pb2.ImageOptions(detail=detail)
            assert (await service.encode(picture(1), options=options)).message.embedding.row_count
        with pytest.raises(ChiasmError) as refused:
            await service.encode(picture(1), options=image_pb2.ImageOptions(detail=17))  # type: ignore[arg-type]
    assert refused.value.field == "image.options.detail"
