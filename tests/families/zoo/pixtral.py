"""Pixtral: the class of LLaVA with a tower of its own."""

from pathlib import Path
from typing import Any

from transformers import LlavaConfig, LlavaForConditionalGeneration
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests.families.zoo.common import chatml, save, text_settings, token_id, tokenizer

TOWER = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 112,
    "patch_size": 14,
    "initializer_range": 0.2,
}
SPECIAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


def build(directory: Path, seed: int = 0) -> None:
    made = tokenizer(SPECIAL, chatml("[IMG]"), "PixtralProcessor")
    config_of: Any = LlavaConfig
    config = config_of(
        vision_config=TOWER,
        text_config={"model_type": "mistral", **text_settings(made), "sliding_window": None},
        image_token_index=token_id(made, "[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    processors: Any = PixtralImageProcessorPil
    save(
        directory,
        LlavaForConditionalGeneration,
        config,
        made,
        processors(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14}),
        seed,
        processor={
            "processor_class": "PixtralProcessor",
            "patch_size": 14,
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
    )
