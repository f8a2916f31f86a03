"""Gemma 3: a sliding window of 24 tokens, so that prompts are longer than it."""

from pathlib import Path
from typing import Any

from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tests.families.zoo.common import save, text_settings, token_id, tokenizer

IMAGE = "<image_soft_token>"
TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": IMAGE}
TURN = ("<start_of_turn>", "<end_of_turn>")


def turns(image: str, start: str = TURN[0], end: str = TURN[1]) -> str:
    """Gemma's template: the assistant is `model`, every text is stripped."""
    return (
        "{{ bos_token }}{% for message in messages %}"
        + start
        + "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        + image
        + "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}"
        "{% endif %}" + end + "\n{% endfor %}{% if add_generation_prompt %}" + start + "model\n"
        "{% endif %}"
    )


def build(directory: Path, seed: int = 0) -> None:
    named: dict[str, str] = TOKENS
    template = turns(TOKENS["boi_token"])
    made = tokenizer((*TURN, *TOKENS.values()), template, "Gemma3Processor", **named)
    config_of: Any = Gemma3Config
    config = config_of(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "vision_use_head": False,
        },
        text_config={
            **text_settings(made),
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 3,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        mm_tokens_per_image=4,
        image_token_index=token_id(made, IMAGE),
        boi_token_index=token_id(made, TOKENS["boi_token"]),
        eoi_token_index=token_id(made, TOKENS["eoi_token"]),
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    processors: Any = Gemma3ImageProcessorPil
    save(
        directory,
        Gemma3ForConditionalGeneration,
        config,
        made,
        processors(size={"height": 56, "width": 56}),
        seed,
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 4},
        rename=published,
    )


def published(name: str) -> str:
    """The key layout of the checkpoints of Gemma 3 and PaliGemma."""
    return (
        name.removeprefix("model.")
        .replace("vision_tower.", "vision_tower.vision_model.")
        .replace("language_model.", "language_model.model.")
    )
