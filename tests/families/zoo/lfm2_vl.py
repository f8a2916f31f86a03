"""LFM2-VL: convolutions and attention by turns, tiles of 40 pixels beside a whole of 128 rows."""

from pathlib import Path
from typing import Any

from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

from chiasm.models.processors.lfm2_vl import Lfm2VlImageProcessorPil
from tests.families.zoo.common import chatml, save, text_settings, token_id, tokenizer

IMAGE = "<image>"
AROUND = ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
TILES = tuple(f"<|img_row_{line}_col_{column}|>" for line in range(1, 7) for column in range(1, 7))


def build(directory: Path, seed: int = 0) -> None:
    made = tokenizer([IMAGE, *AROUND, *TILES], chatml(IMAGE), "Lfm2VlProcessor")
    config_of: Any = Lfm2VlConfig
    config = config_of(
        vision_config={
            "model_type": "siglip2_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_patches": 64,
            "patch_size": 4,
            "vision_use_head": False,
        },
        text_config={
            "model_type": "lfm2",
            **text_settings(made),
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "block_multiple_of": 16,
        },
        image_token_id=token_id(made, IMAGE),
        projector_hidden_size=48,
        initializer_range=0.2,
    )
    save(
        directory,
        Lfm2VlForConditionalGeneration,
        config,
        made,
        Lfm2VlImageProcessorPil(
            encoder_patch_size=4,
            tile_size=40,
            min_tiles=2,
            max_tiles=6,
            min_image_tokens=16,
            max_image_tokens=128,
        ),
        seed,
        processor={"processor_class": "Lfm2VlProcessor"},
        rename=published,
    )


def published(name: str) -> str:
    """The key layout of published checkpoints."""
    return name.replace("vision_tower.", "vision_tower.vision_model.")
