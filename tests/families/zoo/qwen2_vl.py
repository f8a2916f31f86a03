"""Qwen2-VL."""

from pathlib import Path
from typing import Any

from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.families.zoo.common import chatml, save, text_settings, token_id, tokenizer

IMAGE = "<|image_pad|>"
SPECIAL = ("<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")


def build(directory: Path, seed: int = 0) -> None:
    template = chatml(f"<|vision_start|>{IMAGE}<|vision_end|>")
    made = tokenizer(SPECIAL, template, "Qwen2VLProcessor")
    config_of: Any = Qwen2VLConfig
    config = config_of(
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": 14,
            "initializer_range": 0.2,
        },
        text_config={
            **text_settings(made),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2, 3, 3],
            },
        },
        image_token_id=token_id(made, IMAGE),
        video_token_id=token_id(made, "<|video_pad|>"),
        vision_start_token_id=token_id(made, "<|vision_start|>"),
        vision_end_token_id=token_id(made, "<|vision_end|>"),
        tie_word_embeddings=True,
    )
    size = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 60}
    processors: Any = Qwen2VLImageProcessorPil
    save(
        directory,
        Qwen2VLForConditionalGeneration,
        config,
        made,
        processors(size=size, patch_size=14, merge_size=2),
        seed,
    )
