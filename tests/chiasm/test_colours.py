"""A colour has one spelling inside, whatever it was written as."""

import pytest

from chiasm import colours


@pytest.mark.parametrize(
    ("written", "canonical", "rgb"),
    [
        ("white", "#ffffff", (255, 255, 255)),
        ("Black", "#000000", (0, 0, 0)),
        (" #0a14FF ", "#0a14ff", (10, 20, 255)),
    ],
)
def test_each_spelling_of_a_colour_becomes_one(
    written: str, canonical: str, rgb: tuple[int, int, int]
) -> None:
    assert colours.canonical(written) == canonical
    assert colours.to_rgb(written) == rgb


@pytest.mark.parametrize("written", ["", "red", "#fff", "#12345g", "#1234567", "ffffff", "#12345٣"])
def test_what_is_no_colour_is_told_how_colours_are_written(written: str) -> None:
    with pytest.raises(ValueError, match="white, black or #rrggbb"):
        colours.canonical(written)
