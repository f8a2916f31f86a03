"""docs/licences.md: every package of the images with its licence."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from deploy.images import licences
from deploy.images.inventory import Part

PAGE: Final = Path(__file__).parents[2] / "docs" / "licences.md"

_TABLES: Final = "## Python packages\n"


def page(held: Mapping[str, Sequence[Part]]) -> str:
    """The page with its tables anew, its prose as it is; `held` has the parts of each image."""
    prose = PAGE.read_text(encoding="utf-8").partition(_TABLES)[0]
    debian = list(_rows(held, "debian"))
    python = list(_rows(held, "python"))
    head = ("package", "version", "licence (SPDX)", "images")
    return (
        f"{prose}{_TABLES}\n{licences.table(python, head)}\n"
        f"## Packages of Debian 12\n\n{licences.table(debian, head)}"
    )


def _rows(held: Mapping[str, Sequence[Part]], kind: str) -> Iterator[tuple[str, ...]]:
    images: dict[Part, list[str]] = {}
    for image, parts in held.items():
        for part in parts:
            if part.kind == kind and part.name != "chiasm":
                images.setdefault(part, []).append(image)
    for part in sorted(images, key=lambda part: part.name):
        where = "all" if len(images[part]) == len(held) else ", ".join(images[part])
        yield part.name, part.version, part.licence, where
