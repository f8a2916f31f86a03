"""What a checkpoint's settings say for sizing; no weights are loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chiasm.cli.mixes import Size
from chiasm.models.checkpoint import CheckpointError, open_checkpoint
from chiasm.models.contract import DEFAULT_OPTIONS, ImageRule
from chiasm.models.families import family_of
from chiasm.models.half import load_config
from chiasm.models.sources import read_sources
from chiasm.sizing.fleet import Shape

TYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Model:
    """A checkpoint's rule for pictures, and sizes in bytes for a type of elements."""

    shape: Shape
    rule: ImageRule

    def rows(self, sizes: Sequence[tuple[Size, float]]) -> tuple[tuple[int, float], ...]:
        """Feature rows of pictures of such sizes, with their shares."""
        return tuple(
            (self.rule.of_size((height, width), DEFAULT_OPTIONS).row_count, share)
            for (width, height), share in sizes
        )


def read_model(directory: Path, dtype: str) -> Model:
    """Raises CheckpointError for what cannot be served."""
    checkpoint = open_checkpoint(directory)
    family = family_of(checkpoint.model_type)
    config = load_config(checkpoint, family)
    text = config.get_text_config(decoder=True)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if not isinstance(heads, int) or not isinstance(head_dim, int):
        raise CheckpointError(f"{directory} has layers of different kinds; leave --model out")
    element = TYPE_BYTES[dtype]
    shape = Shape(
        row_bytes=text.hidden_size * element * (1 + family.level_count(config)),
        kv_token_bytes=2 * text.num_hidden_layers * heads * head_dim * element,
    )
    return Model(shape, family.image_rule(read_sources(checkpoint, config)))
