"""MiniCPM-V 4.6 with slices from 32 x 32 pixels on."""

from pathlib import Path
from typing import Any

from transformers import MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)

from tests.families.zoo.common import chatml, save, text_settings, token_id, tokenizer
from tests.families.zoo.qwen3_5 import recurrent_settings

IMAGE = "<|image_pad|>"
TOKENS = {
    "image_token": IMAGE,
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}


def build(directory: Path, seed: int = 0) -> None:
    named: dict[str, str] = TOKENS
    made = tokenizer(tuple(TOKENS.values()), chatml(IMAGE), "MiniCPMV4_6Processor", **named)
    config_of: Any = MiniCPMV4_6Config
    config = config_of(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 4,
        },
        text_config={
            "model_type": "qwen3_5_text",
            **text_settings(made),
            **recurrent_settings(),
        },
        insert_layer_id=0,
        image_size=32,
        image_token_id=token_id(made, IMAGE),
        video_token_id=token_id(made, "<|video_pad|>"),
    )
    processors: Any = MiniCPMV4_6ImageProcessorPil
    save(
        directory,
        MiniCPMV4_6ForConditionalGeneration,
        config,
        made,
        processors(patch_size=4, scale_resolution=32, max_slice_nums=4),
        seed,
        processor={"processor_class": "MiniCPMV4_6Processor"},
    )
