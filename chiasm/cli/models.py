"""`chiasm models`: the families that are served, as a table for people or as a page of the docs."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Final

from chiasm.models.families import FAMILIES
from chiasm.models.family import Family, paged, stateful

_HEADINGS: Final = ("family", "model_type", "embeddings also need", "request options", "decoder")
_NEEDS: Final = {"grid_thw": "image_grid_thw", "image_size": "image_sizes"}
_PAGE: Final = """# Model families

A checkpoint is served if the `model_type` of its `config.json` is in this table. `chiasm models`
prints the same list; the tests in `tests/families/` compare every family with transformers' own
`generate`, token by token. A directory of another type, or one that lacks a file, is refused at
start with the reason.

{table}

- **Embeddings also need**: what has to come beside the rows, in an `image_embeds` object or in
  `ImageEmbedding` over gRPC, because the rows alone do not tell where they belong.
- **Request options**: fields of `image_url.detail` and `mm_processor_kwargs` that change what is
  encoded. `detail` is taken everywhere; families without it treat all levels alike. Pixel limits
  are refused where there are none.
- **Decoder**: *paged* runs many answers in one pass over blocks of keys and values, with a prefix
  cache. *One by one* runs each answer through transformers' own forward with a cache of its own,
  because the decoder masks whole pictures, looks through a window or keeps a recurrent state: as
  exact, but slower with many callers, and without a prefix cache. *By config* is one or the other.
"""


def run(options: argparse.Namespace) -> int:
    print(page() if options.markdown else _aligned(list(_rows())), end="")
    return 0


def page() -> str:
    """docs/models.md."""
    lines = [_HEADINGS, tuple("---" for _ in _HEADINGS), *(_quoted(row) for row in _rows())]
    return _PAGE.format(table="\n".join(f"| {' | '.join(line)} |" for line in lines))


def _rows() -> Iterator[tuple[str, ...]]:
    for family in sorted(FAMILIES.values(), key=lambda one: one.title.lower()):
        yield (
            family.title,
            family.model_type,
            ", ".join(_needs(family)) or "nothing",
            ", ".join(family.options) or "none",
            _decoder(family),
        )


def _needs(family: Family) -> Iterator[str]:
    yield from (_NEEDS[name] for name in family.needs)
    if family.has_levels:
        yield "deepstack levels"


def _decoder(family: Family) -> str:
    if family.layers is paged:
        return "paged"
    return "one by one" if family.layers is stateful else "by config"


def _quoted(row: Sequence[str]) -> tuple[str, ...]:
    title, model_type, *others = row
    return (title, f"`{model_type}`", *others)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    lines = [_HEADINGS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        + "\n"
        for line in lines
    )
