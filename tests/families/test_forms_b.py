"""An image's form says before encoding what transformers' processor and whole model make of it.

Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, GLM-4V, MiniCPM-V 4.6, Aya Vision, Gemma 3, Gemma 4 and
PaliGemma.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from chiasm.models.checkpoint import CheckpointError, open_checkpoint
from chiasm.models.contract import (
    DETAILS,
    ContractError,
    Grid,
    ImageContract,
    ImageForm,
    ImageRule,
    Mark,
    PixelOptions,
    Size,
)
from chiasm.models.families import family_of, glm4v, qwen2_vl
from chiasm.models.family import Sources
from chiasm.models.half import load_config
from chiasm.models.identity import checkpoint_identity, identity_of
from chiasm.models.language import LanguageHalf
from chiasm.models.sources import read_sources
from chiasm.models.vision import VisionHalf
from tests.chiasm.models.variants import copy_of, edit_json, picture
from tests.families import zoo
from tests.families.oracle import Whole
from tests.families.zoo.paligemma import IMAGE as PALIGEMMA_IMAGE

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

GRIDDED = ("glm4v", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl")
FIXED = ("gemma3", "paligemma")
NAMES = (*GRIDDED, *FIXED, "aya_vision", "gemma4", "minicpmv4_6")
LEVELS = {"qwen3_vl": 2}

# Height and width: below a patch, thin, odd, square, and larger than every tiny budget.
SIZES: tuple[Size, ...] = (
    (1, 1),
    (1, 100),
    (100, 1),
    (28, 26),
    (27, 332),
    (32, 32),
    (57, 113),
    (200, 300),
    (640, 311),
)
OPTIONS = (
    PixelOptions("low"),
    PixelOptions("high"),
    PixelOptions("original"),
    PixelOptions(min_pixels=9000),
    PixelOptions(max_pixels=9000),
    PixelOptions("low", min_pixels=5000, max_pixels=9000),
)
HUGE: Size = (5000, 4000)


class Known:
    """A tiny checkpoint, its whole model and what the split says about its images."""

    def __init__(self, name: str, directory: Path) -> None:
        zoo.BUILDERS[name](directory)
        self.name = name
        self.directory = directory
        self.whole = Whole(directory)
        self.contract = contract_of(directory)

    def processed(self, size: Size, options: PixelOptions) -> Any:
        """What transformers' processor makes of an image and no other text."""
        processor = self.whole.processor
        return processor(
            images=[image(size)],
            text=[processor.image_token],
            return_tensors="pt",
            add_special_tokens=False,
            **self.contract.rule.processor_options(options),
        )

    def encoded(self, made: Any) -> list[int]:
        """The shape of the rows that the whole model's tower gives."""
        tower = self.whole.model.base_model.get_image_features
        taken = ("pixel_values", "image_grid_thw", "target_sizes", "image_position_ids")
        with torch.inference_mode():
            out = tower(**{name: made[name] for name in taken if name in made}, return_dict=True)
        pooled = out.pooler_output
        pieces = [pooled] if isinstance(pooled, torch.Tensor) else list(pooled)
        return list(torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces]).shape)

    def spelled(self, form: ImageForm) -> list[int]:
        """The token ids of a form's text as that of a prompt's first image."""
        one = self.whole.tokenizer.convert_ids_to_tokens(self.whole.model.config.image_token_id)
        pieces = (
            "0" if piece is Mark.NUMBER else one * piece if isinstance(piece, int) else piece
            for piece in form.text
        )
        ids = self.whole.tokenizer("".join(map(str, pieces)), add_special_tokens=False)
        return [int(token) for token in ids["input_ids"]]


def contract_of(directory: Path) -> ImageContract:
    checkpoint = open_checkpoint(directory)
    family = family_of(checkpoint.model_type)
    sources = read_sources(checkpoint, load_config(checkpoint, family))
    return family.contract(sources, identity_of(checkpoint, "float32", "tiny"))


def image(size: Size) -> PIL.Image.Image:
    height, width = size
    return picture(height + width, width=width, height=height)


def _known(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> Known:
    return Known(request.param, factory.mktemp(request.param))


@pytest.fixture(scope="module", params=NAMES)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    return _known(request, tmp_path_factory)


@pytest.fixture(scope="module", params=GRIDDED)
def gridded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    return _known(request, tmp_path_factory)


@pytest.mark.parametrize("size", SIZES)
def test_the_form_of_a_size_is_the_processors_text_and_the_whole_models_rows(
    known: Known, size: Size
) -> None:
    check(known, size, PixelOptions())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [(1, 100), (28, 26), (200, 300)])
def test_with_options_it_is_the_processors_and_the_whole_models_too(
    gridded: Known, size: Size, options: PixelOptions
) -> None:
    check(gridded, size, options)


@pytest.mark.parametrize("name", ["gemma4", "glm4v", "minicpmv4_6", "qwen2_vl"])
def test_a_huge_image_has_the_processors_text(name: str, tmp_path: Path) -> None:
    check(Known(name, tmp_path), HUGE, PixelOptions())


def check(known: Known, size: Size, options: PixelOptions) -> None:
    form = known.contract.of_size(size, options)
    made = known.processed(size, options)
    assert known.spelled(form) == made["input_ids"][0].tolist()
    assert known.encoded(made) == [form.row_count, known.contract.width]
    assert form.row_count > 0
    if known.name in GRIDDED:
        assert form.grid_thw == tuple(made["image_grid_thw"][0].tolist())
    else:
        assert form.grid_thw is None


def test_the_vision_half_gives_the_forms_rows_and_all_levels(gridded: Known) -> None:
    half = VisionHalf.load(gridded.directory, model_id="tiny")
    assert gridded.contract.level_count == LEVELS.get(gridded.name, 0)
    for options in (PixelOptions(), PixelOptions("low"), PixelOptions(max_pixels=9000)):
        form = half.contract.of_size((200, 300), options)
        (found,) = half.encode([half.preprocess(image((200, 300)), options)])
        assert found.rows.shape == (form.row_count, half.contract.width)
        assert found.grid_thw == form.grid_thw
        assert [level.shape for level in found.levels] == [found.rows.shape] * (
            gridded.contract.level_count
        )


@pytest.mark.parametrize("name", [*NAMES, "lfm2_vl", "llava_next", "llava_onevision", "pixtral"])
def test_images_may_share_a_forward(name: str, tmp_path: Path) -> None:
    """Sizes whose tiles are of one shape and whose rows are not of one number, among others."""
    zoo.BUILDERS[name](tmp_path)
    half = VisionHalf.load(tmp_path, model_id="tiny")
    sizes = ((60, 100), (60, 100), (100, 60), (90, 200), (90, 200))
    batch = [half.preprocess(image(size)) for size in sizes]
    alone, together = half.encode(batch), half.encode(batch, bit_exact=False)
    for one, other in zip(alone, together, strict=True):
        assert one.rows.shape == other.rows.shape
        assert torch.allclose(one.rows, other.rows, atol=1e-5)


def test_every_size_has_rows_or_a_reason(known: Known) -> None:
    for height in (1, 2, 13, 14, 27, 29, 55, 57, 200, 999, 4000):
        for width in (1, 3, 14, 28, 57, 113, 168, 1023, 5000):
            try:
                rows = known.contract.of_size((height, width)).row_count
            except ContractError:
                assert known.name in GRIDDED
                assert max(height, width) > 200 * min(height, width)
            else:
                assert rows > 0


@pytest.mark.parametrize("size", [(1, 201), (4001, 20)])
def test_an_image_too_thin_for_the_processor_is_refused_with_its_size(
    gridded: Known, size: Size
) -> None:
    with pytest.raises(ValueError, match="aspect ratio"):
        gridded.whole.processor.image_processor(images=image(size))
    with pytest.raises(ContractError, match=f"{size[0]} x {size[1]} pixels"):
        gridded.contract.of_size(size)


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_a_size_are_read_back_as_the_same_form(known: Known, size: Size) -> None:
    form = known.contract.of_size(size)
    assert known.contract.of_rows(form.row_count, form.grid_thw, size) == form
    if known.name != "minicpmv4_6":
        assert known.contract.of_rows(form.row_count, form.grid_thw, None) == form


@pytest.mark.parametrize("off", [-1, 1, 1000])
def test_a_row_too_few_or_too_many_is_refused(known: Known, off: int) -> None:
    size = (2000, 2000)
    form = known.contract.of_size(size)
    # Gemma 4's images may have any number of rows, up to a bound.
    off = 1000 if known.name == "gemma4" else off
    with pytest.raises(ContractError, match="row"):
        known.contract.of_rows(form.row_count + off, form.grid_thw, size)


@pytest.mark.parametrize("grid", [(1, 4, 6), (2, 4, 4), (1, 3, 8), (1, 16, 1), (1, 2**40, 2**40)])
def test_a_grid_that_is_not_that_of_the_rows_is_refused(gridded: Known, grid: Grid) -> None:
    assert gridded.contract.of_rows(4, (1, 4, 4), None).row_count == 4
    with pytest.raises(ContractError, match="grid"):
        gridded.contract.of_rows(4, grid, None)


@pytest.mark.parametrize("grid", [(1, 0, 4), (-1, -4, 4)])
def test_a_grid_without_an_extent_is_refused(gridded: Known, grid: Grid) -> None:
    with pytest.raises(ContractError, match="at least 1"):
        gridded.contract.of_rows(4, grid, None)


def test_rows_without_a_grid_are_refused_with_the_field_to_send(gridded: Known) -> None:
    with pytest.raises(ContractError, match="image_grid_thw"):
        gridded.contract.of_rows(4, None, (200, 300))


@pytest.mark.parametrize("name", [*FIXED, "aya_vision", "gemma4", "minicpmv4_6"])
def test_a_family_without_a_grid_refuses_one_and_pixel_bounds(name: str, tmp_path: Path) -> None:
    zoo.BUILDERS[name](tmp_path)
    contract = contract_of(tmp_path)
    form = contract.of_size((57, 113))
    with pytest.raises(ContractError, match="no grid"):
        contract.of_rows(form.row_count, (1, 4, 4), (57, 113))
    bounds = {
        "min_pixels": PixelOptions(min_pixels=9000),
        "max_pixels": PixelOptions(max_pixels=9000),
    }
    for bound, options in bounds.items():
        with pytest.raises(ContractError, match=bound) as raised:
            contract.of_size((57, 113), options)
        assert raised.value.option == bound


def test_minicpm_rows_are_refused_without_the_size_that_slices_them(tmp_path: Path) -> None:
    zoo.BUILDERS["minicpmv4_6"](tmp_path)
    contract = contract_of(tmp_path)
    rows = contract.of_size((57, 113)).row_count
    with pytest.raises(ContractError, match="image_sizes"):
        contract.of_rows(rows, None, None)
    with pytest.raises(ContractError, match=r"1 x 1 .*rows"):
        contract.of_rows(rows, None, (1, 1))


@pytest.mark.parametrize(
    ("options", "at_fault"),
    [
        (PixelOptions(min_pixels=9000, max_pixels=8000), "min_pixels"),
        (PixelOptions(min_pixels=27 * 27), "min_pixels"),
        (PixelOptions(max_pixels=27 * 27), "max_pixels"),
        (PixelOptions(max_pixels=0), "max_pixels"),
        (PixelOptions(max_pixels=-5), "max_pixels"),
        (PixelOptions(max_pixels=2**62), "max_pixels"),
        (PixelOptions(min_pixels=2**62), "min_pixels"),
    ],
)
def test_pixel_bounds_beyond_the_checkpoints_are_refused_by_name(
    gridded: Known, options: PixelOptions, at_fault: str
) -> None:
    for ask in (
        gridded.contract.rule.processor_options,
        partial(gridded.contract.of_size, SIZES[-1]),
    ):
        with pytest.raises(ContractError, match=at_fault) as raised:
            ask(options)
        assert raised.value.option == at_fault


def published() -> dict[str, ImageRule]:
    """The rules that the settings of published checkpoints give."""
    qwen: Any = Qwen2VLImageProcessorPil
    glm: Any = Glm4vImageProcessorPil
    qwen3 = {"shortest_edge": 65536, "longest_edge": 16777216}
    processors = {
        "Qwen2-VL": (qwen2_vl.image_rule, qwen(min_pixels=3136, max_pixels=12845056)),
        "Qwen3-VL": (qwen2_vl.image_rule, qwen(patch_size=16, size=qwen3)),
        "GLM-4.1V": (glm4v.image_rule, glm()),
    }
    nothing: Any = SimpleNamespace()
    return {
        name: rule(Sources(nothing, processor, {}, {}))
        for name, (rule, processor) in processors.items()
    }


@pytest.mark.parametrize("name", sorted(published()))
def test_less_detail_never_has_more_rows(name: str) -> None:
    rule = published()[name]
    for height in (1, 16, 40, 300, 1000, 3000, 8000):
        for width in (14, 50, 333, 1023, 2500, 6000):
            if max(height, width) > 200 * min(height, width):
                continue
            rows = {
                detail: rule.of_size((height, width), PixelOptions(detail)).row_count
                for detail in DETAILS
            }
            assert rows["low"] <= rows["auto"] == rows["high"] == rows["original"]
    low = rule.of_size((4000, 3000), PixelOptions("low")).row_count
    assert 200 < low < 400 < 4000 < rule.of_size((4000, 3000), PixelOptions("high")).row_count


def test_pixel_bounds_hold_for_the_picture_as_scaled(gridded: Known) -> None:
    edge = gridded.whole.processor.image_processor.patch_size
    for bound in (6000, 9000, 12000):
        form = gridded.contract.of_size((300, 200), PixelOptions(max_pixels=bound))
        assert form.grid_thw is not None
        pixels = form.grid_thw[1] * form.grid_thw[2] * edge**2
        assert bound / 3 < pixels <= bound
        form = gridded.contract.of_size((30, 20), PixelOptions(min_pixels=bound))
        assert form.grid_thw is not None
        assert form.grid_thw[1] * form.grid_thw[2] * edge**2 >= bound


def test_paligemmas_template_writes_what_its_processor_adds(tmp_path: Path) -> None:
    known = Known("paligemma", tmp_path)
    seen, text = image((57, 113)), "count them:"
    processors: Any = PaliGemmaProcessor
    adding = processors(known.whole.processor.image_processor, known.whole.tokenizer)
    for count in (1, 3):
        added = adding(images=[[seen] * count], text=[PALIGEMMA_IMAGE * count + text])
        ours = known.whole.inputs([("user", (*[seen] * count, text))])
        assert ours["input_ids"][0].tolist() == list(added["input_ids"][0])


def _before_v5(name: str) -> str:
    """As transformers before 4.52 wrote Qwen2-VL."""
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "model.")


def _since_v5(name: str) -> str:
    """As transformers 5 writes Gemma 3 and PaliGemma, whose published layout is the older one."""
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    if name.startswith("lm_head."):
        return f"model.{name}".removeprefix("model.")
    bare = name.replace("vision_tower.vision_model.", "vision_tower.")
    return "model." + bare.replace("language_model.model.", "language_model.")


OTHER: dict[str, Callable[[str], str]] = {
    "qwen2_vl": _before_v5,
    "qwen2_5_vl": _before_v5,
    "gemma3": _since_v5,
    "paligemma": _since_v5,
}


@pytest.mark.parametrize("name", sorted(OTHER))
def test_another_layout_of_keys_has_the_same_identity_and_rows(name: str, tmp_path: Path) -> None:
    one = tmp_path / "one"
    zoo.BUILDERS[name](one)
    other = copy_of(one, tmp_path / "other")
    tensors = load_file(one / "model.safetensors")
    renamed = {OTHER[name](key): tensor for key, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, other / "model.safetensors", metadata={"format": "pt"})
    identities = [checkpoint_identity(each, "float32", "tiny") for each in (one, other)]
    assert identities[0] == identities[1]
    halves = [VisionHalf.load(each, model_id="tiny") for each in (one, other)]
    rows = [half.encode([half.preprocess(image((57, 113)))])[0].rows for half in halves]
    assert torch.equal(*rows)
    LanguageHalf.load(other, model_id="tiny")


def test_qwens_head_for_several_tokens_ahead_is_left_out(tmp_path: Path) -> None:
    zoo.BUILDERS["qwen3_5"](tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["mtp.layers.0.mlp.up_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    VisionHalf.load(tmp_path, model_id="tiny")
    LanguageHalf.load(tmp_path, model_id="tiny")


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gemma3", {"vision_config.model_type": "clip_vision_model"}, "vision tower"),
        ("paligemma", {"vision_config.model_type": "clip_vision_model"}, "vision tower"),
        ("paligemma", {"text_config.model_type": "llama"}, "decoder"),
        ("minicpmv4_6", {"merger_times": 2}, "merges"),
        ("qwen2_vl", {"text_config.use_sliding_window": True}, "sliding"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(
    name: str, change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    zoo.BUILDERS[name](tmp_path)
    edit_json(tmp_path / "config.json", change)
    with pytest.raises(CheckpointError, match=reason):
        contract_of(tmp_path)
