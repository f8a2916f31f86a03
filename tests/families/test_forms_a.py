"""An image's form says before encoding what transformers' processor and whole model make of it.

LLaVA, Pixtral, LLaVA-NeXT, LLaVA-OneVision, Mistral 3, InternVL, Idefics3, SmolVLM and LFM2-VL.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

from chiasm.models.checkpoint import CheckpointError, open_checkpoint
from chiasm.models.contract import ContractError, ImageContract, ImageForm, PixelOptions, Size
from chiasm.models.families import family_of
from chiasm.models.half import load_config
from chiasm.models.identity import checkpoint_identity, identity_of
from chiasm.models.language import LanguageHalf
from chiasm.models.sources import read_sources
from chiasm.models.vision import ImageShapeError, VisionHalf
from tests.chiasm.models.variants import copy_of, edit_json, picture
from tests.families import zoo
from tests.families.oracle import Whole

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

NAMES = (
    "idefics3",
    "internvl",
    "lfm2_vl",
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "pixtral",
    "smolvlm",
)
SIZED = ("idefics3", "lfm2_vl", "llava_next", "llava_onevision", "mistral3", "pixtral", "smolvlm")
"""Families whose text follows from the image's size, in pixels."""
LINED = ("mistral3", "pixtral")
"""Families that scale down and keep the shape, so that nothing may be left of a short side."""
THIN = (*LINED, "lfm2_vl")
"""Families that refuse the thinnest pictures."""

# Height and width: below a patch, thin, odd, square, just over a tile, and large.
SIZES: tuple[Size, ...] = (
    (1, 1),
    (1, 100),
    (100, 1),
    (28, 26),
    (27, 332),
    (332, 27),
    (33, 47),
    (56, 56),
    (57, 113),
    (169, 85),
    (200, 300),
    (311, 640),
)
ONE_CELL = ((1, 1), (28, 26))
"""What Mistral 3's code in transformers cannot encode; the tiny one's cells have 28 pixels."""
HUGE: Size = (4000, 5000)


class Known:
    """A tiny checkpoint, its whole model and what the split says about its images."""

    def __init__(self, name: str, directory: Path, built: bool = False) -> None:
        if not built:
            zoo.BUILDERS[name](directory)
        self.name = name
        self.directory = directory
        self.whole = Whole(directory)
        self.contract = contract_of(directory)


def contract_of(directory: Path) -> ImageContract:
    checkpoint = open_checkpoint(directory)
    family = family_of(checkpoint.model_type)
    sources = read_sources(checkpoint, load_config(checkpoint, family))
    return family.contract(sources, identity_of(checkpoint, "float32", "tiny"))


@pytest.fixture(scope="module", params=NAMES)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=SIZED)
def sized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known(request.param, tmp_path_factory.mktemp(request.param))


def image(size: Size) -> PIL.Image.Image:
    height, width = size
    return picture(height + width, width=width, height=height)


def spelled(form: ImageForm, image_token: str) -> str:
    """A form's text as one string, an image token for each row."""
    return "".join(
        piece if isinstance(piece, str) else image_token * piece
        for piece in form.text
        if isinstance(piece, str | int)
    )


def processed(known: Known, size: Size) -> Any:
    """Token ids and pixels that transformers' processor makes of an image and no other text."""
    token = known.whole.processor.image_token
    return known.whole.processor(
        images=[image(size)], text=[token], return_tensors="pt", add_special_tokens=False
    )


def expected_ids(known: Known, form: ImageForm) -> list[int]:
    text = spelled(form, known.whole.processor.image_token)
    ids = known.whole.tokenizer(text, add_special_tokens=False)["input_ids"]
    return [int(one) for one in ids]


@pytest.mark.parametrize("size", SIZES)
def test_the_form_of_a_size_is_the_processors_text_and_the_whole_models_rows(
    known: Known, size: Size
) -> None:
    if known.name == "mistral3" and size in ONE_CELL:
        pytest.skip("transformers itself fails")
    form = known.contract.of_size(size)
    assert expected_ids(known, form) == processed(known, size)["input_ids"][0].tolist()
    rows, levels = known.whole.features(image(size))
    assert tuple(rows.shape) == (form.row_count, known.contract.width)
    assert not levels
    assert form.grid_thw is None


def test_a_huge_image_has_the_processors_text(known: Known) -> None:
    form = known.contract.of_size(HUGE)
    assert expected_ids(known, form) == processed(known, HUGE)["input_ids"][0].tolist()


def test_every_size_has_rows_or_a_reason(known: Known) -> None:
    for height in (1, 2, 13, 14, 27, 29, 55, 57, 200, 999, 4000):
        for width in (1, 3, 14, 28, 57, 113, 168, 1023, 5000):
            one_cell = known.name == "mistral3" and max(height, width) <= 28
            thin = max(height, width) > 100 * min(height, width)
            if known.name in THIN and (one_cell or thin):
                assert_rows_or_reason(known.contract, (height, width))
            else:
                assert known.contract.of_size((height, width)).row_count > 0


def assert_rows_or_reason(contract: ImageContract, size: Size) -> None:
    refused = ""
    try:
        rows = contract.of_size(size).row_count
    except ContractError as error:
        rows, refused = 0, error.message
    assert rows > 0 or f"{size[0]} x {size[1]}" in refused


@pytest.mark.parametrize("size", ONE_CELL)
def test_mistral3_refuses_a_picture_of_one_cell_and_takes_its_row(
    size: Size, tmp_path: Path
) -> None:
    zoo.BUILDERS["mistral3"](tmp_path)
    half = VisionHalf.load(tmp_path, model_id="tiny")
    with pytest.raises(ImageShapeError, match=f"{size[0]} x {size[1]} .*more than 28 pixels"):
        half.preprocess(image(size))
    assert half.contract.of_rows(1, None, size).text == (1, "[IMG_END]")


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_a_size_are_read_back_as_the_same_form(known: Known, size: Size) -> None:
    if known.name == "mistral3" and size in ONE_CELL:
        pytest.skip("there is no form of a size")
    form = known.contract.of_size(size)
    assert known.contract.of_rows(form.row_count, None, size) == form


@pytest.mark.parametrize("off", [-1, 1, 1000])
def test_a_row_too_few_or_too_many_is_refused(known: Known, off: int) -> None:
    form = known.contract.of_size((57, 113))
    with pytest.raises(ContractError, match="row"):
        known.contract.of_rows(form.row_count + off, None, (57, 113))


def test_the_claim_of_a_grid_is_refused(known: Known) -> None:
    form = known.contract.of_size((57, 113))
    with pytest.raises(ContractError, match="no grid"):
        known.contract.of_rows(form.row_count, (1, 4, 4), (57, 113))


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_the_claim_of_an_impossible_size_is_refused(known: Known, size: Size) -> None:
    rows = known.contract.of_size((57, 113)).row_count
    with pytest.raises(ContractError, match="1 x 1 pixels"):
        known.contract.of_rows(rows, None, size)


def test_the_size_of_another_image_is_refused(sized: Known) -> None:
    rows = sized.contract.of_size((57, 113)).row_count
    with pytest.raises(ContractError, match=r"40 x 40 .*rows"):
        sized.contract.of_rows(rows, None, (40, 40))


def test_rows_whose_text_follows_from_a_size_are_refused_without_it(sized: Known) -> None:
    rows = sized.contract.of_size((57, 113)).row_count
    with pytest.raises(ContractError, match="image_sizes"):
        sized.contract.of_rows(rows, None, None)


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("min_pixels", PixelOptions(min_pixels=1000)),
        ("max_pixels", PixelOptions(max_pixels=1000)),
    ],
)
def test_an_option_that_the_family_lacks_is_refused_by_name(
    known: Known, option: str, options: PixelOptions
) -> None:
    with pytest.raises(ContractError, match=option) as raised:
        known.contract.of_size((57, 113), options)
    assert raised.value.option == option


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"longest_edge": 150}},
        {"size": {"height": 100, "width": 150}},
        {"size": {"longest_edge": 50}},
        {"do_resize": False},
        {"do_image_splitting": False},
    ],
)
def test_tiles_that_do_not_divide_the_edge_are_counted_as_they_are_cut(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    zoo.BUILDERS[name](tmp_path)
    edit_json(tmp_path / "preprocessor_config.json", settings)
    known = Known(name, tmp_path, built=True)
    for size in ((1, 1), (28, 26), (332, 27), (57, 113), (133, 143), (200, 180)):
        form = known.contract.of_size(size)
        assert expected_ids(known, form) == processed(known, size)["input_ids"][0].tolist()


def test_internvl_rows_need_no_size(tmp_path: Path) -> None:
    zoo.BUILDERS["internvl"](tmp_path)
    contract = contract_of(tmp_path)
    for size in SIZES:
        form = contract.of_size(size)
        assert contract.of_rows(form.row_count, None, None) == form
    for rows in (3, 8, 13, 4 * 8):
        with pytest.raises(ContractError, match="times 3"):
            contract.of_rows(rows, None, None)


def _old_llava(name: str) -> str:
    """As transformers before 4.52 wrote the families of LLaVA."""
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    bare = name.removeprefix("model.")
    return bare.replace("language_model.", "language_model.model.", 1)


def _old_clip(name: str) -> str:
    return _old_llava(name).replace("vision_tower.", "vision_tower.vision_model.", 1)


OLD: dict[str, Callable[[str], str]] = {
    "llava_next": _old_clip,
    "llava_onevision": _old_clip,
    "pixtral": _old_llava,
    "mistral3": _old_llava,
    "internvl": _old_llava,
}


@pytest.mark.parametrize("name", sorted(OLD))
def test_an_older_layout_of_keys_has_the_same_identity_and_rows(name: str, tmp_path: Path) -> None:
    new = tmp_path / "new"
    zoo.BUILDERS[name](new)
    old = copy_of(new, tmp_path / "old")
    tensors = load_file(new / "model.safetensors")
    renamed = {OLD[name](key): tensor for key, tensor in tensors.items()}
    assert renamed.keys().isdisjoint(tensors)
    save_file(renamed, old / "model.safetensors", metadata={"format": "pt"})
    same(new, old)
    LanguageHalf.load(old, model_id="tiny")


@pytest.mark.parametrize("name", NAMES)
def test_shards_have_the_same_identity_and_rows(name: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    zoo.BUILDERS[name](whole)
    shards = copy_of(whole, tmp_path / "shards")
    (shards / "model.safetensors").unlink()
    tensors = load_file(whole / "model.safetensors")
    places: dict[str, str] = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        held = {key: tensors[key] for key in sorted(tensors)[number::3]}
        save_file(held, shards / file, metadata={"format": "pt"})
        places |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    same(whole, shards)


def same(one: Path, other: Path) -> None:
    identities = [checkpoint_identity(each, "float32", "tiny") for each in (one, other)]
    assert identities[0] == identities[1]
    halves = [VisionHalf.load(each, model_id="tiny") for each in (one, other)]
    seen = image((57, 113))
    rows = [half.encode([half.preprocess(seen)])[0].rows for half in halves]
    assert torch.equal(*rows)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("mistral3", {"vision_config.model_type": "clip_vision_model"}, "vision tower"),
        ("llava_next", {"vision_feature_select_strategy": "full"}, "select_strategy"),
        ("llava_onevision", {"vision_aspect_ratio": "pad"}, "vision_aspect_ratio"),
        ("llava_onevision", {"vision_feature_select_strategy": "default"}, "select_strategy"),
    ],
)
def test_a_config_whose_rows_are_not_known_is_refused(
    name: str, change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    zoo.BUILDERS[name](tmp_path)
    edit_json(tmp_path / "config.json", change)
    with pytest.raises(CheckpointError, match=reason):
        contract_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "layers"),
    [
        ("mistral3", {}, "paged"),
        ("mistral3", {"text_config.sliding_window": 64}, "stateful"),
        ("mistral3", {"text_config.sliding_window": 8192}, "paged"),
        ("pixtral", {"text_config.sliding_window": 64}, "stateful"),
        ("internvl", {"text_config.use_sliding_window": False}, "paged"),
        ("internvl", {"text_config.use_sliding_window": True,
                      "text_config.sliding_window": 64}, "stateful"),
    ],
)  # fmt: skip
def test_a_window_shorter_than_the_context_runs_with_a_state(
    name: str, change: dict[str, Any], layers: str, tmp_path: Path
) -> None:
    zoo.BUILDERS[name](tmp_path)
    edit_json(tmp_path / "config.json", change)
    checkpoint = open_checkpoint(tmp_path)
    family = family_of(checkpoint.model_type)
    assert family.layers(load_config(checkpoint, family)) == layers
