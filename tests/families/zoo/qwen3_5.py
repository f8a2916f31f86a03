"""Qwen3.5 with two recurrent layers before one of attention."""

from pathlib import Path
from typing import Any

from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.families.zoo.common import chatml, save, text_settings, token_id, tokenizer

IMAGE = "<|image_pad|>"
SPECIAL = ("<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")


def build(directory: Path, seed: int = 0) -> None:
    template = chatml(f"<|vision_start|>{IMAGE}<|vision_end|>")
    made = tokenizer(SPECIAL, template, "Qwen3VLProcessor")
    config_of: Any = Qwen3_5Config
    config = config_of(
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "initializer_range": 0.2,
        },
        text_config={**text_settings(made), **recurrent_settings()},
        image_token_id=token_id(made, IMAGE),
        video_token_id=token_id(made, "<|video_pad|>"),
        vision_start_token_id=token_id(made, "<|vision_start|>"),
        vision_end_token_id=token_id(made, "<|vision_end|>"),
        tie_word_embeddings=False,
    )
    size = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 40}
    processors: Any = Qwen2VLImageProcessorPil
    save(
        directory,
        Qwen3_5ForConditionalGeneration,
        config,
        made,
        processors(size=size, patch_size=16, merge_size=2),
        seed,
    )


def recurrent_settings() -> dict[str, Any]:
    """Of a decoder of three layers, two of them recurrent."""
    return {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
