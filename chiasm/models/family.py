"""What differs from one model family to the next, as plain values and pure functions.

Everything else is the generic path of `vision` and `language`: transformers' own `from_pretrained`,
image processor and `get_image_features`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chiasm.models.contract import ImageContract, RowRule

if TYPE_CHECKING:
    from chiasm.models.identity import EncoderIdentity


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model_type: the `model_type` of its config.json.
        vision_modules: module paths, in transformers' model, that only the vision half holds.
        language_modules: module paths that only the language half holds.
        width_tensor: canonical name of the vision tensor whose first extent is the width of a row.
        settings: names in config.json that change the features besides the weights.
        level_count: extra feature levels (deepstack) an image has beside its rows.
        vision_tensor_name: canonical name of a stored tensor of the vision half, None for any other
            tensor. Old and new key layouts of one checkpoint give the same names.
        refusal: why a checkpoint with this transformers config cannot be served, or None.
        row_rule: the rule for row and placeholder counts, from the transformers config.
    """

    model_type: str
    vision_modules: tuple[str, ...]
    language_modules: tuple[str, ...]
    width_tensor: str
    settings: tuple[str, ...]
    level_count: int
    vision_tensor_name: Callable[[str], str | None]
    refusal: Callable[[Any], str | None]
    row_rule: Callable[[Any], RowRule]

    def contract(self, config: Any, identity: "EncoderIdentity") -> ImageContract:
        return ImageContract(identity, identity.width, self.level_count, self.row_rule(config))
