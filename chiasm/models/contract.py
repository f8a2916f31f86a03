"""What a model says about images before any tower has run: width, levels, rows, and their text."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

# An identity is computed with the family's names, and families state their rules in terms of this
# module: only the type goes the other way.
if TYPE_CHECKING:
    from chiasm.models.identity import EncoderIdentity

Grid = tuple[int, int, int]
"""(time, height, width) in patches, for the families whose positions need it."""

Size = tuple[int, int]
"""(height, width) in pixels, of the upright image as it was given, before any scaling."""

Detail = Literal["auto", "low", "high", "original"]
DETAILS: Final[tuple[Detail, ...]] = ("auto", "low", "high", "original")


class ContractError(Exception):
    """An image, embedding or option the model cannot take.

    Attributes:
        message: what it takes and what came.
        option: the field of `PixelOptions` that is at fault, or None.
    """

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.option = option


class Mark(Enum):
    """What the text of an image holds besides text and rows."""

    NUMBER = "number"
    """The image's number in the prompt, from 0, in decimal digits."""


Piece = str | int | Mark
"""Of an image's text: text with special tokens spelled out, or so many image tokens, or a mark."""


@dataclass(frozen=True)
class PixelOptions:
    """What a request may choose about an image; the defaults leave all to the checkpoint.

    Attributes:
        min_pixels: least height times width after scaling.
        max_pixels: greatest height times width after scaling.
    """

    detail: Detail = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None


DEFAULT_OPTIONS: Final = PixelOptions()


@dataclass(frozen=True)
class ImageForm:
    """What stands for one image in a prompt.

    Attributes:
        row_count: feature rows, each of which takes the place of one image token.
        text: what replaces the template's marker; its numbers add up to `row_count`.
        grid_thw: the patch grid, in the families whose positions follow from it.
    """

    row_count: int
    text: tuple[Piece, ...]
    grid_thw: Grid | None = None

    def __post_init__(self) -> None:
        told = sum(piece for piece in self.text if isinstance(piece, int))
        if told != self.row_count:
            raise ValueError(f"the text has {told} image tokens for {self.row_count} rows")


class ImageRule(Protocol):
    """What stands for one image in a family's prompts."""

    def of_size(self, size: Size, options: PixelOptions) -> ImageForm:
        """The form of a raw image; raises `ContractError` for an option the family lacks."""
        ...

    def of_rows(self, row_count: int, grid_thw: Grid | None, size: Size | None) -> ImageForm:
        """The form of `row_count` rows from somewhere; raises `ContractError` for impossible ones.

        Grid and size are their sender's claims.
        """
        ...

    def processor_options(self, options: PixelOptions) -> dict[str, Any]:
        """What the image processor is called with so that it does what `of_size` says."""
        ...


def fixed_pixels(options: PixelOptions) -> dict[str, Any]:
    """`processor_options` of a family that scales without a choice; every detail is the same."""
    for name in ("min_pixels", "max_pixels"):
        if getattr(options, name) is not None:
            raise ContractError(
                f"this model scales images to sizes of its own and has no {name}; leave it out",
                name,
            )
    return {}


def no_grid(grid_thw: Grid | None) -> None:
    """Refuses the claim of a grid in a family that has none."""
    if grid_thw is not None:
        raise ContractError(
            f"images of this model have no grid, the embedding states {grid_thw}; leave it out"
        )


def of_stated_size(
    form_of: Callable[[Size], ImageForm], row_count: int, grid_thw: Grid | None, size: Size | None
) -> ImageForm:
    """`of_rows` of a family whose rows follow from the size of the image alone."""
    no_grid(grid_thw)
    if size is None:
        raise ContractError(
            "this model places rows by the size of the image, which the embedding lacks; send it, "
            "height and width in pixels, as image_sizes"
        )
    form = form_of(size)
    if form.row_count != row_count:
        raise ContractError(
            f"an image of {size[0]} x {size[1]} pixels (height x width) has {form.row_count} rows "
            f"in this model, the embedding has {row_count}"
        )
    return form


@dataclass(frozen=True)
class FixedRows:
    """Every image is scaled to one size, so that each has the same number of rows.

    Attributes:
        before, after: text around the image tokens.
    """

    row_count: int
    before: tuple[Piece, ...] = ()
    after: tuple[Piece, ...] = ()

    def of_size(self, size: Size, options: PixelOptions) -> ImageForm:
        fixed_pixels(options)
        return self._form()

    def of_rows(self, row_count: int, grid_thw: Grid | None, size: Size | None) -> ImageForm:
        if row_count != self.row_count:
            raise ContractError(
                f"an image of this model has {self.row_count} rows, the embedding has {row_count}"
            )
        no_grid(grid_thw)
        return self._form()

    def processor_options(self, options: PixelOptions) -> dict[str, Any]:
        return fixed_pixels(options)

    def _form(self) -> ImageForm:
        return ImageForm(self.row_count, (*self.before, self.row_count, *self.after))


@dataclass(frozen=True)
class ImageContract:
    """The model's own word on image embeddings; usable without the tower.

    Attributes:
        expected_identity: the encoder whose rows the language half was trained with.
        width: elements a row.
        level_count: extra feature levels an embedding carries (0 for most families).
        rule: what stands for an image in a prompt.
    """

    expected_identity: "EncoderIdentity"
    width: int
    level_count: int
    rule: ImageRule = field(repr=False)

    def of_size(self, size: Size, options: PixelOptions = DEFAULT_OPTIONS) -> ImageForm:
        """The form of a raw, upright image of `size` before encoding it.

        Raises:
            ContractError: a size below one pixel, or an option the family lacks.
        """
        _check_size(size)
        return self.rule.of_size(size, options)

    def of_rows(self, row_count: int, grid_thw: Grid | None, size: Size | None) -> ImageForm:
        """The form of an embedding of `row_count` rows.

        `grid_thw` and `size` are the sender's claims and are checked against the family's rule.

        Raises:
            ContractError: rows, grid or size do not fit this model.
        """
        if row_count < 1:
            raise ContractError(f"an image has at least 1 row, the embedding has {row_count}")
        if size is not None:
            _check_size(size)
        if grid_thw is not None and min(grid_thw) < 1:
            raise ContractError(f"a grid's extents are at least 1, the embedding states {grid_thw}")
        return self.rule.of_rows(row_count, grid_thw, size)


def _check_size(size: Size) -> None:
    height, width = size
    if height < 1 or width < 1:
        raise ContractError(
            f"an image has at least 1 x 1 pixels, the stated height x width is {height} x {width}"
        )
