"""GLM-4.1V."""

from pathlib import Path
from typing import Any

from transformers import Glm4vConfig, Glm4vForConditionalGeneration
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from tests.families.zoo.common import chatml, save, text_settings, token_id, tokenizer

IMAGE = "<|image|>"
SPECIAL = (
    "<|begin_of_image|>",
    "<|end_of_image|>",
    IMAGE,
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|video|>",
)


def build(directory: Path, seed: int = 0) -> None:
    template = chatml(f"<|begin_of_image|>{IMAGE}<|end_of_image|>")
    made = tokenizer(SPECIAL, template, "Glm4vProcessor")
    config_of: Any = Glm4vConfig
    config = config_of(
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "image_size": 56,
            "patch_size": 14,
            "initializer_range": 0.2,
        },
        text_config={
            **text_settings(made),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 3, 3],
            },
        },
        image_token_id=token_id(made, IMAGE),
        video_token_id=token_id(made, "<|video|>"),
        image_start_token_id=token_id(made, "<|begin_of_image|>"),
        image_end_token_id=token_id(made, "<|end_of_image|>"),
        video_start_token_id=token_id(made, "<|begin_of_video|>"),
        video_end_token_id=token_id(made, "<|end_of_video|>"),
        tie_word_embeddings=False,
    )
    processors: Any = Glm4vImageProcessorPil
    size = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 120}
    save(
        directory,
        Glm4vForConditionalGeneration,
        config,
        made,
        processors(size=size, patch_size=14, merge_size=2),
        seed,
    )
