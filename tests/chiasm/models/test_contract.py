from pathlib import Path

import pytest

from chiasm.models.contract import ContractError, FixedRows, Grid, ImageContract
from chiasm.models.identity import EncoderIdentity
from chiasm.models.language import LanguageHalf
from chiasm.models.vision import VisionHalf
from tests.chiasm.models.variants import picture
from tests.tiny_llava import Strategy, Tower, build_tiny_llava

IDENTITY = EncoderIdentity("m", "a" * 64, "b" * 64, "float32", 64)
CONTRACT = ImageContract(IDENTITY, width=64, level_count=0, rule=FixedRows(4))


def test_every_size_has_the_fixed_number_of_placeholders() -> None:
    assert {CONTRACT.of_size(size).row_count for size in ((1, 1), (30, 4000), (4000, 30))} == {4}


def test_the_right_row_count_is_the_placeholder_count() -> None:
    assert CONTRACT.of_rows(4, None, (480, 640)).text == (4,)
    assert CONTRACT.of_rows(4, None, None).row_count == 4


@pytest.mark.parametrize("row_count", [0, 3, 5, 8])
def test_a_wrong_row_count_is_refused_with_both_counts(row_count: int) -> None:
    with pytest.raises(ContractError) as refused:
        CONTRACT.of_rows(row_count, None, None)
    assert ("4 rows" if row_count else "1 row") in refused.value.message
    assert str(row_count) in refused.value.message


@pytest.mark.parametrize(("grid", "size"), [((1, 2, 2), None), (None, (0, 5)), (None, (5, -1))])
def test_claims_that_do_not_fit_the_family_are_refused(
    grid: Grid | None, size: tuple[int, int] | None
) -> None:
    with pytest.raises(ContractError):
        CONTRACT.of_rows(4, grid, size)


@pytest.mark.parametrize(
    ("tower", "strategy", "row_count"),
    [("clip", "default", 9), ("clip", "full", 10), ("siglip", "full", 9), ("siglip", "default", 8)],
)
def test_the_contract_states_before_encoding_what_the_tower_gives(
    tmp_path: Path, tower: Tower, strategy: Strategy, row_count: int
) -> None:
    directory = build_tiny_llava(
        tmp_path, image_size=42, tower=tower, vision_feature_select_strategy=strategy
    )
    contract = LanguageHalf.load(directory, model_id="x").contract
    vision = VisionHalf.load(directory, model_id="x")
    image = picture(1, width=50, height=20)
    prepared = vision.preprocess(image)
    (features,) = vision.encode([prepared])
    assert contract.of_size((image.height, image.width)).row_count == row_count
    assert features.rows.shape == (row_count, contract.width)
    assert features.placeholder_count == prepared.placeholder_count == row_count
    assert prepared.patch_count == 9
