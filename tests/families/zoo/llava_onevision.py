"""LLaVA-OneVision with a SigLIP tower and Qwen2's decoder."""

from pathlib import Path
from typing import Any

from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from tests.families.zoo.common import chatml, save, text_settings, token_id, tokenizer

PINPOINTS = [[28 * rows, 28 * columns] for rows in range(1, 5) for columns in range(1, 5)]


def build(directory: Path, seed: int = 0) -> None:
    made = tokenizer(["<image>", "<video>"], chatml("<image>"), "LlavaOnevisionProcessor")
    config_of: Any = LlavaOnevisionConfig
    config = config_of(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
            "vision_use_head": False,
        },
        text_config={"model_type": "qwen2", **text_settings(made)},
        image_token_index=token_id(made, "<image>"),
        video_token_index=token_id(made, "<video>"),
        image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio="anyres_max_4",
    )
    processors: Any = LlavaOnevisionImageProcessorPil
    save(
        directory,
        LlavaOnevisionForConditionalGeneration,
        config,
        made,
        processors(size={"height": 28, "width": 28}, image_grid_pinpoints=PINPOINTS),
        seed,
        processor={
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_4",
        },
    )
