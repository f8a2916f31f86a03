"""Mistral Small 3.1."""

from pathlib import Path
from typing import Any

from transformers import Mistral3Config, Mistral3ForConditionalGeneration
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests.families.zoo.common import chatml, save, text_settings, token_id, tokenizer
from tests.families.zoo.pixtral import SPECIAL, TOWER


def build(directory: Path, seed: int = 0) -> None:
    made = tokenizer(SPECIAL, chatml("[IMG]"), "PixtralProcessor")
    config_of: Any = Mistral3Config
    config = config_of(
        vision_config=TOWER,
        text_config={"model_type": "mistral", **text_settings(made), "sliding_window": None},
        image_token_index=token_id(made, "[IMG]"),
        vision_feature_layer=-1,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    processors: Any = PixtralImageProcessorPil
    save(
        directory,
        Mistral3ForConditionalGeneration,
        config,
        made,
        processors(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14}),
        seed,
        processor={
            "processor_class": "PixtralProcessor",
            "patch_size": 14,
            "spatial_merge_size": 2,
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
    )
