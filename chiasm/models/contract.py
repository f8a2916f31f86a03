"""What a model says about images before any tower has run: width, levels, rows and placeholders."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

# An identity is computed with the family's names, and families state their rules in terms of this
# module: only the type goes the other way.
if TYPE_CHECKING:
    from chiasm.models.identity import EncoderIdentity

Grid = tuple[int, int, int]
"""(time, height, width) in patches, for the families whose positions need it."""


class ContractError(Exception):
    """An embedding the model cannot take; `message` says what was expected and what was given."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RowRule(Protocol):
    """How many rows and placeholders one image has in a family."""

    def placeholder_count(self, height: int, width: int) -> int:
        """Placeholders of a raw, upright image of `height` x `width` pixels."""
        ...

    def check_rows(
        self, row_count: int, grid_thw: Grid | None, image_size: tuple[int, int] | None
    ) -> int:
        """The placeholders that `row_count` rows fill; raises `ContractError` for a wrong count."""
        ...


@dataclass(frozen=True)
class FixedRows:
    """Every image is scaled to one size, so that each has the same number of rows."""

    row_count: int

    def placeholder_count(self, height: int, width: int) -> int:
        return self.row_count

    def check_rows(
        self, row_count: int, grid_thw: Grid | None, image_size: tuple[int, int] | None
    ) -> int:
        if row_count != self.row_count:
            raise ContractError(
                f"an image of this model has {self.row_count} rows, the embedding has {row_count}"
            )
        if grid_thw is not None:
            raise ContractError(
                f"images of this model have no grid, the embedding states {grid_thw}; leave it out"
            )
        return row_count


@dataclass(frozen=True)
class ImageContract:
    """The model's own word on image embeddings; usable without the tower.

    Attributes:
        expected_identity: the encoder whose rows the language half was trained with.
        width: elements a row.
        level_count: extra feature levels an embedding carries (0 for most families).
        rows: the family's rule for row and placeholder counts.
    """

    expected_identity: "EncoderIdentity"
    width: int
    level_count: int
    rows: RowRule

    def placeholder_count(self, height: int, width: int) -> int:
        """Placeholders of a raw, upright image of `height` x `width` pixels, before encoding it.

        Raises:
            ContractError: a size below one pixel.
        """
        _check_size(height, width)
        return self.rows.placeholder_count(height, width)

    def check_rows(
        self, row_count: int, grid_thw: Grid | None, image_size: tuple[int, int] | None
    ) -> int:
        """The number of placeholders that an embedding of `row_count` rows takes.

        `grid_thw` and `image_size` (height, width in pixels) are the sender's claims and are
        checked against the family's rule.

        Raises:
            ContractError: rows, grid or size do not fit this model.
        """
        if image_size is not None:
            _check_size(*image_size)
        return self.rows.check_rows(row_count, grid_thw, image_size)


def _check_size(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise ContractError(
            f"an image has at least 1 x 1 pixels, the stated height x width is {height} x {width}"
        )
