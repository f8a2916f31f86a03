"""LLaVA-NeXT with a CLIP tower and Mistral's decoder."""

from pathlib import Path
from typing import Any

from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)

from tests.families.zoo.common import chatml, save, text_settings, token_id, tokenizer

PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]


def build(directory: Path, seed: int = 0) -> None:
    made = tokenizer(["<image>"], chatml("<image>"), "LlavaNextProcessor")
    config_of: Any = LlavaNextConfig
    config = config_of(
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
            "initializer_range": 0.2,
            "initializer_factor": 10.0,
        },
        text_config={"model_type": "mistral", **text_settings(made), "sliding_window": None},
        image_token_index=token_id(made, "<image>"),
        image_grid_pinpoints=PINPOINTS,
        image_seq_length=16,
    )
    processors: Any = LlavaNextImageProcessorPil
    save(
        directory,
        LlavaNextForConditionalGeneration,
        config,
        made,
        processors(
            size={"shortest_edge": 28},
            crop_size={"height": 28, "width": 28},
            image_grid_pinpoints=PINPOINTS,
        ),
        seed,
        processor={
            "processor_class": "LlavaNextProcessor",
            "patch_size": 7,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    )
