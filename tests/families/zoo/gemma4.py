"""Gemma 4 with per-layer embeddings and shared keys and values, as the smallest ones have them."""

from pathlib import Path
from typing import Any

from transformers import Gemma4Config, Gemma4ForConditionalGeneration
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from tests.families.zoo.common import save, text_settings, token_id, tokenizer
from tests.families.zoo.gemma3 import turns

IMAGE = "<|image|>"
TOKENS = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": IMAGE,
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
TURN = ("<|turn>", "<turn|>")


def build(directory: Path, seed: int = 0) -> None:
    named: dict[str, str] = TOKENS
    template = turns(IMAGE, *TURN)
    special = (*TURN, *TOKENS.values(), "<|video|>")
    made = tokenizer(special, template, "Gemma4Processor", **named)
    config_of: Any = Gemma4Config
    config = config_of(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 512,
            "pooling_kernel_size": 2,
            "initializer_range": 0.2,
        },
        text_config={
            **text_settings(made),
            "head_dim": 16,
            "global_head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": len(made),
            "use_bidirectional_attention": "vision",
        },
        audio_config=None,
        image_token_id=token_id(made, IMAGE),
        video_token_id=token_id(made, "<|video|>"),
        audio_token_id=token_id(made, "<|audio|>"),
        boi_token_id=token_id(made, "<|image>"),
        eoi_token_id=token_id(made, "<image|>"),
        boa_token_id=token_id(made, "<|audio>"),
        eoa_token_index=token_id(made, "<audio|>"),
    )
    processors: Any = Gemma4ImageProcessorPil
    save(
        directory,
        Gemma4ForConditionalGeneration,
        config,
        made,
        processors(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2),
        seed,
        processor={"processor_class": "Gemma4Processor"},
    )
