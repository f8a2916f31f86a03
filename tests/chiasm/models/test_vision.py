from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from transformers import LlavaForConditionalGeneration
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from chiasm.models.vision import ImageFeatures, ImageShapeError, VisionHalf
from tests.chiasm.models.variants import picture
from tests.tiny_llava import build_tiny_llava


def whole_models_rows(directory: Path, processor: Any, image: PIL.Image.Image) -> torch.Tensor:
    model: Any = LlavaForConditionalGeneration.from_pretrained(directory)
    pixels = processor.from_pretrained(directory)(images=image, return_tensors="pt")
    with torch.no_grad():
        (rows,) = model.get_image_features(**pixels, return_dict=True).pooler_output
    assert isinstance(rows, torch.Tensor)
    return rows


@pytest.fixture(scope="module")
def half(clip_llava: Path) -> VisionHalf:
    return VisionHalf.load(clip_llava, model_id="tiny")


def encode(half: VisionHalf, image: PIL.Image.Image) -> ImageFeatures:
    (features,) = half.encode([half.preprocess(image)])
    return features


def test_rows_equal_the_whole_models_in_every_bit(clip_llava: Path, half: VisionHalf) -> None:
    image = picture(1)
    features = encode(half, image)
    assert torch.equal(features.rows, whole_models_rows(clip_llava, CLIPImageProcessorPil, image))
    assert features.rows.is_contiguous()
    assert not features.rows.requires_grad
    assert (features.levels, features.grid_thw, features.image_size) == ((), None, (30, 40))


def test_rows_of_a_siglip_tower_equal_the_whole_models_in_every_bit(siglip_llava: Path) -> None:
    image = picture(2)
    rows = encode(VisionHalf.load(siglip_llava, model_id="tiny"), image).rows
    assert torch.equal(rows, whole_models_rows(siglip_llava, SiglipImageProcessorPil, image))


def test_several_feature_layers_are_joined_as_in_the_whole_model(tmp_path: Path) -> None:
    directory = build_tiny_llava(tmp_path, vision_feature_layer=[-3, -1])
    image = picture(3)
    rows = encode(VisionHalf.load(directory, model_id="tiny"), image).rows
    assert torch.equal(rows, whole_models_rows(directory, CLIPImageProcessorPil, image))


def test_rows_do_not_depend_on_batch_mates(half: VisionHalf) -> None:
    prepared = [half.preprocess(picture(seed)) for seed in range(5)]
    together = half.encode(prepared)
    for pixels, features in zip(prepared, together, strict=True):
        assert torch.equal(half.encode([pixels])[0].rows, features.rows)


def test_one_forward_for_a_batch_differs_by_rounding_only(half: VisionHalf) -> None:
    prepared = [half.preprocess(picture(seed)) for seed in range(5)]
    exact, together = half.encode(prepared), half.encode(prepared, bit_exact=False)
    for one, other in zip(exact, together, strict=True):
        torch.testing.assert_close(one.rows, other.rows, rtol=1e-5, atol=1e-5)
        assert other.rows.untyped_storage().nbytes() == other.rows.nbytes
    assert not torch.allclose(exact[0].rows, exact[1].rows, atol=0.1)


def test_an_empty_batch_gives_no_features(half: VisionHalf) -> None:
    assert half.encode([]) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_half_runs_and_answers_in_the_type_asked_for(
    clip_llava: Path, half: VisionHalf, dtype: torch.dtype
) -> None:
    short = VisionHalf.load(clip_llava, model_id="tiny", dtype=dtype)
    rows = encode(short, picture(4)).rows
    assert {parameter.dtype for parameter in short.model.parameters()} == {dtype}
    assert rows.dtype == dtype
    assert short.identity.dtype == str(dtype).removeprefix("torch.")
    torch.testing.assert_close(rows.float(), encode(half, picture(4)).rows, rtol=0.1, atol=0.2)


def test_no_parameter_of_the_language_half_exists(half: VisionHalf) -> None:
    names = [name for name, _ in half.model.named_parameters()]
    names += [name for name, _ in half.model.named_buffers()]
    assert names
    assert all(
        name.startswith(("model.vision_tower.", "model.multi_modal_projector.")) for name in names
    )


def test_using_the_absent_half_is_an_error_that_says_so(half: VisionHalf) -> None:
    with pytest.raises(RuntimeError, match=r"model\.language_model belongs to the half"):
        half.model.model.language_model(torch.zeros(1))


def test_many_threads_prepare_the_same_pixels_as_one(half: VisionHalf) -> None:
    pictures = [picture(seed, width=30 + seed) for seed in range(16)]
    alone = [half.preprocess(image) for image in pictures]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(half.preprocess, pictures))
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.tensors["pixel_values"], other.tensors["pixel_values"])
        assert one.image_size == other.image_size


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (5, 3), (4, 1), (1, 200), (200, 1)])
def test_the_smallest_and_thinnest_images_are_encoded(
    half: VisionHalf, size: tuple[int, int]
) -> None:
    width, height = size
    features = encode(half, PIL.Image.new("RGB", size, "orange"))
    plain = encode(half, PIL.Image.new("RGB", (28, 28), "orange"))
    assert features.image_size == (height, width)
    torch.testing.assert_close(features.rows, plain.rows)


def test_an_image_too_thin_to_scale_is_refused_with_its_size(half: VisionHalf) -> None:
    with pytest.raises(ImageShapeError, match="1 x 201") as refused:
        half.preprocess(PIL.Image.new("RGB", (201, 1)))
    assert "200" in refused.value.message


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_an_image_that_is_not_rgb_is_refused(half: VisionHalf, mode: str) -> None:
    with pytest.raises(ImageShapeError, match=mode):
        half.preprocess(PIL.Image.new(mode, (9, 9)))
