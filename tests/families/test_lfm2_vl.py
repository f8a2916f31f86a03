"""LFM2-VL's image processor is our own: it lays pictures out as transformers' own does.

`lfm2_vl_layouts.json` holds what transformers 5.24's `Lfm2VlImageProcessor` (torchvision 0.28) and
`Lfm2VlProcessor` made of blurred noise of these sizes: the grid's lines and columns, height and
width of the whole as scaled, runs of equal `spatial_shapes` (height, width, how many), patches
after padding, image tokens, and under `published` (no setting changed) the text, with `*n` after an
image token that is repeated. One size of 307, which transformers' tower could not have taken, is
left out. Pixels were compared then: they differ by 2 grey levels at most, by 0.02 on average.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

from chiasm.models.checkpoint import CheckpointError, open_checkpoint
from chiasm.models.contract import ContractError, ImageForm, PixelOptions
from chiasm.models.families.lfm2_vl import UnevenTiles
from chiasm.models.identity import checkpoint_identity
from chiasm.models.processors.lfm2_vl import Lfm2VlImageProcessorPil, Tiling
from chiasm.models.sources import load_image_processor
from chiasm.models.vision import VisionHalf
from tests.chiasm.models.variants import copy_of, edit_json, picture
from tests.families import zoo
from tests.families.oracle import Whole
from tests.families.test_forms_a import contract_of

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

TOLD: dict[str, Any] = json.loads(
    Path(__file__).with_name("lfm2_vl_layouts.json").read_text(encoding="utf-8")
)
SETTINGS: dict[str, dict[str, Any]] = TOLD["settings"]
LAYOUTS: list[dict[str, Any]] = TOLD["layouts"]
PREPROCESSOR = "preprocessor_config.json"


def tiling_of(settings: str) -> Tiling:
    return Lfm2VlImageProcessorPil(**SETTINGS[settings]).tiling()


def form_of(told: dict[str, Any], named: bool = True) -> ImageForm:
    around = ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
    rule = UnevenTiles(tiling_of(told["settings"]), *around, named)
    height, width = told["size"]
    return rule.of_size((height, width), PixelOptions())


def shapes(told: dict[str, Any]) -> list[list[int]]:
    return [[height, width] for height, width, count in told["runs"] for _ in range(count)]


@pytest.mark.parametrize("settings", sorted(SETTINGS))
def test_grid_sizes_and_padding_are_those_of_transformers(settings: str) -> None:
    tiling, edge = tiling_of(settings), tiling_of(settings).encoder_patch_size
    told = [one for one in LAYOUTS if one["settings"] == settings]
    assert len(told) > 30
    for one in told:
        layout = tiling.layout((one["size"][0], one["size"][1]))
        assert [layout.lines, layout.columns] == one["grid"], one
        assert list(layout.scaled) == one["scaled"], one
        found = [[height // edge, width // edge] for height, width in layout.sizes]
        assert found == shapes(one), one
        assert tiling.most_patches == one["padded"]


@pytest.mark.parametrize("settings", sorted(SETTINGS))
def test_rows_are_what_the_tower_gives_and_transformers_counts(settings: str) -> None:
    """One tile alone is encoded as a tile; transformers counts the whole, and then refuses it."""
    for one in (each for each in LAYOUTS if each["settings"] == settings):
        form = form_of(one, named=False)
        edge = tiling_of(settings).encoder_patch_size
        encoded = sum(height * width // 4 for height, width in shapes(one))
        assert form.row_count == encoded
        tile_alone = one["grid"] == [1, 1] and shapes(one) != [
            [side // edge for side in one["scaled"]]
        ]
        assert (form.row_count == one["tokens"]) is not tile_alone


def test_the_text_is_that_of_transformers() -> None:
    told = [one for one in LAYOUTS if "text" in one]
    assert len(told) > 50
    for one in told:
        pieces = form_of(one).text
        spelled = "".join(
            piece if isinstance(piece, str) else f"<image>*{piece}" for piece in pieces
        )
        assert spelled == one["text"]


@pytest.mark.parametrize("size", [(28, 26), (511, 512), (752, 720), (33, 1500), (1025, 1024)])
def test_the_processor_makes_what_the_layout_says(size: tuple[int, int]) -> None:
    processor: Any = Lfm2VlImageProcessorPil()
    layout = processor.tiling().layout(size)
    made = processor(images=_picture(size), return_tensors="pt", return_row_col_info=True)
    assert made["pixel_values"].shape == (len(layout.sizes), 1024, 768)
    expected = [[height // 16, width // 16] for height, width in layout.sizes]
    assert made["spatial_shapes"].tolist() == expected
    counts = made["spatial_shapes"].prod(-1)
    assert made["pixel_attention_mask"].sum(-1).tolist() == counts.tolist()
    for pixels, count in zip(made["pixel_values"], counts, strict=True):
        assert not pixels[count:].any()
        assert pixels[:count].std() > 0.1
    info = [torch.as_tensor(made[name]).tolist()[0] for name in ("image_rows", "image_cols")]
    assert info == [layout.lines, layout.columns]


def test_tiles_are_cut_line_by_line_with_channels_innermost() -> None:
    """A picture of whole tiles is not scaled, so every value is known."""
    seen = PIL.Image.new("RGB", (1536, 1024))
    for line in range(2):
        for column in range(3):
            colour = (40 * (3 * line + column), 0, 255)
            seen.paste(colour, (512 * column, 512 * line, 512 * (column + 1), 512 * (line + 1)))
    processor = Lfm2VlImageProcessorPil(use_thumbnail=False)
    made = processor(images=seen, return_tensors="pt")["pixel_values"]
    assert len(made) == 6
    for number, tile in enumerate(made):
        expected = torch.tensor([40 * number / 127.5 - 1, -1, 1]).repeat(1024, 256)
        assert torch.allclose(tile, expected, atol=1e-6)


def test_several_pictures_follow_one_another_as_they_are_alone() -> None:
    processor = Lfm2VlImageProcessorPil()
    seen = [_picture(size) for size in ((60, 90), (900, 1200), (90, 60))]
    together = processor(images=seen, return_tensors="pt")
    alone = [processor(images=one, return_tensors="pt") for one in seen]
    for name in ("pixel_values", "pixel_attention_mask", "spatial_shapes"):
        assert torch.equal(together[name], torch.cat([one[name] for one in alone]))


def test_a_picture_of_more_patches_than_the_tower_takes_is_refused() -> None:
    with pytest.raises(ContractError, match=r"10 x 9000 .*crop it or pad it"):
        Lfm2VlImageProcessorPil().tiling().layout((10, 9000))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"do_pad": False}, "do_pad"),
        ({"min_tiles": 5, "max_tiles": 4}, "min_tiles 5"),
        ({"tile_size": 500}, "tile_size 500"),
        ({"encoder_patch_size": 0}, "encoder_patch_size"),
        ({"max_image_tokens": -1}, "max_image_tokens"),
        ({"max_pixels_tolerance": 0.0}, "max_pixels_tolerance"),
    ],
)
def test_settings_that_lay_out_nothing_are_refused_by_name(
    settings: dict[str, Any], named: str, tiny: Path, tmp_path: Path
) -> None:
    broken = copy_of(tiny, tmp_path / "broken")
    edit_json(broken / PREPROCESSOR, settings)
    with pytest.raises(CheckpointError, match=named):
        load_image_processor(open_checkpoint(broken))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"downsample_factor": 4}, "downsample_factor"),
        ({"vision_config.patch_size": 8}, "encoder_patch_size"),
        ({"text_config.model_type": "llama"}, "decoder"),
    ],
)
def test_a_config_that_does_not_fit_its_image_processor_is_refused(
    change: dict[str, Any], reason: str, tiny: Path, tmp_path: Path
) -> None:
    broken = copy_of(tiny, tmp_path / "broken")
    edit_json(broken / "config.json", change)
    with pytest.raises(CheckpointError, match=reason):
        contract_of(broken)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lfm2_vl")
    zoo.BUILDERS["lfm2_vl"](made)
    return made


def test_the_older_name_of_the_processor_is_the_same_encoder(tiny: Path, tmp_path: Path) -> None:
    older = copy_of(tiny, tmp_path / "older")
    edit_json(older / PREPROCESSOR, {"image_processor_type": "Lfm2VlImageProcessorFast"})
    made = load_image_processor(open_checkpoint(older))
    assert type(made) is Lfm2VlImageProcessorPil
    identities = [checkpoint_identity(each, "float32", "tiny") for each in (tiny, older)]
    assert identities[0] == identities[1]


def test_settings_inside_the_processors_file_go_first(tiny: Path, tmp_path: Path) -> None:
    nested = copy_of(tiny, tmp_path / "nested")
    settings = json.loads((nested / PREPROCESSOR).read_text())
    inside = {"image_processor": {**settings, "use_thumbnail": False}}
    (nested / "processor_config.json").write_text(json.dumps(inside))
    tiled = (200, 300)
    fewer = contract_of(nested).of_size(tiled).row_count
    assert fewer < contract_of(tiny).of_size(tiled).row_count
    half = VisionHalf.load(nested, model_id="tiny")
    (found,) = half.encode([half.preprocess(_picture(tiled))])
    assert len(found.rows) == fewer


def test_the_identity_names_our_processor_and_its_backend(tiny: Path) -> None:
    settings = json.loads((tiny / PREPROCESSOR).read_text())
    settings.pop("image_processor_type")
    told = {"backend": "pil", "class": "chiasm.Lfm2VlImageProcessorPil.1", "settings": settings}
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    identity = checkpoint_identity(tiny, "float32", "tiny")
    assert identity.processor_digest == hashlib.sha256(text.encode()).hexdigest()


def test_without_special_tokens_the_text_is_rows_alone(tiny: Path, tmp_path: Path) -> None:
    bare = copy_of(tiny, tmp_path / "bare")
    edit_json(bare / "processor_config.json", {"use_image_special_tokens": False})
    whole = Whole(bare)
    for size in ((60, 90), (200, 300)):
        form = contract_of(bare).of_size(size)
        assert all(isinstance(piece, int) for piece in form.text)
        made = whole.processor(
            images=[_picture(size)],
            text=["<image>"],
            use_image_special_tokens=False,
            return_tensors="pt",
        )
        image_token = whole.processor.image_token_id
        assert made["input_ids"].tolist() == [[image_token] * form.row_count]


def test_the_newer_layout_of_keys_has_the_same_identity(tiny: Path, tmp_path: Path) -> None:
    newer = copy_of(tiny, tmp_path / "newer")
    tensors = load_file(tiny / "model.safetensors")
    renamed = {
        name.replace("vision_tower.vision_model.", "vision_tower."): tensor
        for name, tensor in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, newer / "model.safetensors", metadata={"format": "pt"})
    identities = [checkpoint_identity(each, "float32", "tiny") for each in (tiny, newer)]
    assert identities[0] == identities[1]
    halves = [VisionHalf.load(each, model_id="tiny") for each in (tiny, newer)]
    rows = [half.encode([half.preprocess(_picture((200, 300)))])[0].rows for half in halves]
    assert torch.equal(*rows)


def _picture(size: tuple[int, int]) -> PIL.Image.Image:
    height, width = size
    return picture(height + width, width=width, height=height)
