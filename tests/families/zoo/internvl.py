"""InternVL 3."""

from pathlib import Path
from typing import Any

from transformers import InternVLConfig, InternVLForConditionalGeneration
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tests.families.zoo.common import chatml, save, text_settings, token_id, tokenizer

IMAGE = "<IMG_CONTEXT>"


def build(directory: Path, seed: int = 0) -> None:
    made = tokenizer(
        ["<img>", "</img>", IMAGE, "<video>"],
        chatml(IMAGE + "\n"),
        "InternVLProcessor",
        extra_special_tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": IMAGE,
            "video_token": "<video>",
        },
    )
    config_of: Any = InternVLConfig
    config = config_of(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [28, 28],
            "patch_size": [7, 7],
            "initializer_range": 0.2,
            "layer_scale_init_value": 1.0,
        },
        text_config={"model_type": "qwen2", **text_settings(made)},
        image_token_id=token_id(made, IMAGE),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    processors: Any = GotOcr2ImageProcessorPil
    save(
        directory,
        InternVLForConditionalGeneration,
        config,
        made,
        processors(size={"height": 28, "width": 28}, max_patches=6),
        seed,
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
    )
