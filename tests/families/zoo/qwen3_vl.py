"""Qwen3-VL."""

from pathlib import Path
from typing import Any

from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.families.zoo.common import chatml, save, text_settings, token_id, tokenizer

IMAGE = "<|image_pad|>"
SPECIAL = ("<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")


def build(directory: Path, seed: int = 0) -> None:
    template = chatml(f"<|vision_start|>{IMAGE}<|vision_end|>")
    made = tokenizer(SPECIAL, template, "Qwen3VLProcessor")
    config_of: Any = Qwen3VLConfig
    config = config_of(
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
            "initializer_range": 0.2,
        },
        text_config={
            **text_settings(made),
            "head_dim": 16,
            "num_hidden_layers": 3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            },
        },
        image_token_id=token_id(made, IMAGE),
        video_token_id=token_id(made, "<|video_pad|>"),
        vision_start_token_id=token_id(made, "<|vision_start|>"),
        vision_end_token_id=token_id(made, "<|vision_end|>"),
        tie_word_embeddings=False,
    )
    size = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 60}
    processors: Any = Qwen2VLImageProcessorPil
    save(
        directory,
        Qwen3VLForConditionalGeneration,
        config,
        made,
        processors(size=size, patch_size=16, merge_size=2),
        seed,
    )
