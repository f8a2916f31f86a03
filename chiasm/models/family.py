"""What differs from one model family to the next, as plain values and pure functions.

Everything else is the generic path of `vision` and `language`: transformers' own `from_pretrained`,
image processor and `get_image_features`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from chiasm.models.contract import ImageContract, ImageRule

if TYPE_CHECKING:
    from chiasm.models.identity import EncoderIdentity

Positions = Literal["flat", "mrope"]
"""`flat`: a token's index. `mrope`: three axes that follow image grids (Qwen2-VL, 3.1)."""

Layers = Literal["paged", "stateful"]
"""`paged`: plain causal attention over KV blocks, many sequences in one pass. `stateful`: the
decoder needs masks over images, windows or recurrent state, so each sequence runs through
transformers' own forward with a cache of its own."""


@dataclass(frozen=True)
class Sources:
    """What a family's rules are made from; no weights.

    Attributes:
        config: transformers' config of the whole model.
        image_processor: transformers' image processor, PIL backend, or the family's own.
        processor: processor_config.json, empty if there is none.
        tokenizer: tokenizer_config.json, empty if there is none.
    """

    config: Any
    image_processor: Any
    processor: Mapping[str, Any]
    tokenizer: Mapping[str, Any]


def _no_levels(config: Any) -> int:
    return 0


def _image_token_id(config: Any) -> int:
    return int(config.image_token_id)


def _no_marker(sources: Sources) -> str | None:
    return None


def paged(config: Any) -> Layers:
    return "paged"


def stateful(config: Any) -> Layers:
    return "stateful"


@dataclass(frozen=True)
class OwnImageProcessor:
    """An image processor of this project, where transformers has none on PIL.

    Attributes:
        replaces: the class that transformers would have on PIL, e.g. `CLIPImageProcessorPil`.
        name: what the encoder's identity has in place of it; ends in a number that rises with every
            change that alters a pixel.
        make: from the settings of preprocessor_config.json; raises `ValueError` or `TypeError`.
    """

    replaces: str
    name: str
    make: Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model_type: the `model_type` of its config.json.
        title: the name people know it by.
        vision_modules: module paths, in transformers' model, that only the vision half holds.
        language_modules: module paths that only the language half holds.
        width_tensor: canonical name of a vision tensor one of whose extents is the width of a row.
        width_axis: which extent that is.
        settings: names in config.json that change the features besides the weights.
        vision_tensor_name: canonical name of a stored tensor of the vision half, None for any other
            tensor. Old and new key layouts of one checkpoint give the same names.
        refusal: why a checkpoint with this transformers config cannot be served, or None.
        image_rule: what stands for an image in a prompt.
        level_count: extra feature levels (deepstack) an image has beside its rows.
        image_token_id: the token that rows take the place of.
        marker: what the chat template writes once an image; None is the image token itself.
        positions: how tokens are placed.
        layers: how the decoder runs.
        needs: what an embedding must come with, besides its rows: "grid_thw" or "image_size".
        options: names of request options that change something in this family.
        own_processor: the image processor that takes the place of one transformers lacks on PIL.
    """

    model_type: str
    title: str
    vision_modules: tuple[str, ...]
    language_modules: tuple[str, ...]
    width_tensor: str
    settings: tuple[str, ...]
    vision_tensor_name: Callable[[str], str | None]
    refusal: Callable[[Any], str | None]
    image_rule: Callable[[Sources], ImageRule]
    width_axis: int = 0
    level_count: Callable[[Any], int] = _no_levels
    image_token_id: Callable[[Any], int] = _image_token_id
    marker: Callable[[Sources], str | None] = _no_marker
    positions: Positions = "flat"
    layers: Callable[[Any], Layers] = paged
    needs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    own_processor: OwnImageProcessor | None = None

    @property
    def has_levels(self) -> bool:
        """Whether embeddings of this family may carry levels beside their rows."""
        return self.level_count is not _no_levels

    def processor_in_place_of(self, class_name: str) -> OwnImageProcessor | None:
        """The family's own image processor, if it replaces the class named."""
        own = self.own_processor
        return own if own is not None and own.replaces == class_name else None

    def contract(self, sources: Sources, identity: "EncoderIdentity") -> ImageContract:
        levels = self.level_count(sources.config)
        return ImageContract(identity, identity.width, levels, self.image_rule(sources))
