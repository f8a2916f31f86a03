"""Pictures of many calls meet in one batch, and stay strangers there."""

import asyncio
from pathlib import Path

import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

from chiasm import images
from chiasm.errors import ChiasmError, Reason
from chiasm.models.vision import ImageFeatures, PixelInputs, VisionHalf
from chiasm.v1 import encoder_service_pb2 as pb
from chiasm.wire import Wired
from encoder_service.tower import forward
from tests.encoder_service.calls import (
    Service,
    picture,
    png,
    rows_of,
    serving,
    settings_for,
    until_prepared,
)
from tests.encoder_service.gated_tower import GatedTower
from tests.tiny_llava import build_tiny_llava

Reply = Wired[pb.EncodeImageResponse]

PATCHES = 4
"""Of one picture in the tiny checkpoint."""


async def batched(service: Service, tower: GatedTower, pictures: list[bytes]) -> list[Reply]:
    """Replies to `pictures`, of which all but the first were together in the queue."""
    with tower.held():
        first = asyncio.create_task(service.encode(pictures[0]))
        await asyncio.to_thread(tower.waiting.wait, 10)
        rest = [asyncio.create_task(service.encode(data)) for data in pictures[1:]]
        await until_prepared(service, len(pictures))
        tower.release()
        return await asyncio.gather(first, *rest)


@pytest.mark.parametrize(("bit_exact", "takes"), [(True, 7), (False, 2)])
async def test_calls_that_wait_together_are_taken_together_where_they_share_a_forward(
    checkpoint: Path, half: VisionHalf, bit_exact: bool, takes: int
) -> None:
    tower = GatedTower(half)
    pictures = [picture(seed) for seed in range(7)]
    async with serving(settings_for(checkpoint, bit_exact=bit_exact), tower) as service:
        before = service.figure("batch_images_count"), service.figure("batch_images_sum")
        replies = await batched(service, tower, pictures)
        assert service.figure("batch_images_count") - before[0] == takes
        assert service.figure("batch_images_sum") - before[1] == 7
    for data, reply in zip(pictures, replies, strict=True):
        (alone,) = half.encode([half.preprocess(images.decode_image(data))])
        if bit_exact:
            assert torch.equal(rows_of(reply), alone.rows)
        else:
            torch.testing.assert_close(rows_of(reply), alone.rows, rtol=0, atol=1e-5)


async def test_a_batch_keeps_to_its_patches(checkpoint: Path, half: VisionHalf) -> None:
    tower = GatedTower(half)
    settings = settings_for(checkpoint, bit_exact=False, max_batch_patches=2 * PATCHES)
    async with serving(settings, tower) as service:
        before = service.figure("batch_images_count")
        await batched(service, tower, [picture(seed) for seed in range(6)])
        assert service.figure("batch_images_count") - before == 1 + 3
        assert service.figure("batch_patches_bucket", le="64.0") == before + 4


async def test_a_picture_above_the_batch_budget_is_still_encoded(checkpoint: Path) -> None:
    async with serving(settings_for(checkpoint, max_batch_patches=1)) as service:
        assert (await service.encode(picture(1))).message.embedding.row_count == 4


def test_a_member_that_breaks_the_forward_leaves_the_others_whole(half: VisionHalf) -> None:
    def pixels(seed: int) -> PixelInputs:
        return half.preprocess(images.decode_image(picture(seed)))

    good, other, broken = pixels(1), pixels(2), pixels(3)
    wrong = {"pixel_values": broken.tensors["pixel_values"][:, :, :13]}
    broken = PixelInputs(wrong, 4, 4, None, (1, 1))
    first, second, third = forward(half, [good, broken, other], bit_exact=False)
    assert isinstance(first, ImageFeatures)
    assert isinstance(third, ImageFeatures)
    assert torch.equal(first.rows, half.encode([good])[0].rows)
    assert isinstance(second, Exception)
    assert torch.equal(third.rows, half.encode([other])[0].rows)


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float16 a white picture exceeds 65,504 in the tower's first layer; a grey one does not."""
    directory = build_tiny_llava(tmp_path_factory.mktemp("overflowing"))
    file = directory / "model.safetensors"
    weights = load_file(file)
    (name,) = [name for name in weights if name.endswith("patch_embedding.weight")]
    weights[name] = torch.full_like(weights[name], 100.0)
    save_file(weights, file, metadata={"format": "pt"})
    return directory


async def test_features_that_are_not_finite_fail_their_own_picture_only(overflowing: Path) -> None:
    white = png(PIL.Image.new("RGB", (32, 32), (255, 255, 255)))
    grey = png(PIL.Image.new("RGB", (32, 32), (130, 130, 130)))
    async with serving(settings_for(overflowing, dtype="float16", bit_exact=False)) as service:
        sick, well = await asyncio.gather(
            service.encode(white), service.encode(grey), return_exceptions=True
        )
        assert isinstance(well, Wired)
        assert torch.isfinite(rows_of(well)).all()
        assert isinstance(sick, ChiasmError)
        assert (sick.reason, sick.field) == (Reason.INTERNAL, "image.data")
        assert "not finite" in sick.message
        with pytest.raises(ChiasmError, match="not finite"):
            await service.encode(white)  # a failure is not kept
