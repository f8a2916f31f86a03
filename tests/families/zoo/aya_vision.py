"""Aya Vision: a Cohere 2 decoder with a sliding window of 24 tokens and a tied `lm_head`."""

from pathlib import Path
from typing import Any

from transformers import AyaVisionConfig, AyaVisionForConditionalGeneration
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tests.families.zoo.common import chatml, save, text_settings, token_id, tokenizer
from tests.families.zoo.gemma3 import published

MARKER = "<image>"
PATCH = "<|IMG_PATCH|>"
AROUND = ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>")


def build(directory: Path, seed: int = 0) -> None:
    made = tokenizer([MARKER, PATCH, *AROUND], chatml(MARKER), "AyaVisionProcessor")
    config_of: Any = AyaVisionConfig
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
        text_config={
            "model_type": "cohere2",
            **text_settings(made),
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
        image_token_index=token_id(made, PATCH),
        initializer_range=0.2,
    )
    processors: Any = GotOcr2ImageProcessorPil
    save(
        directory,
        AyaVisionForConditionalGeneration,
        config,
        made,
        processors(size={"height": 28, "width": 28}, max_patches=6),
        seed,
        processor={
            "processor_class": "AyaVisionProcessor",
            "img_size": 28,
            "patch_size": 7,
            "downsample_factor": 2,
        },
        rename=published,
    )
