"""Idefics3."""

from pathlib import Path
from typing import Any

from transformers import Idefics3Config, Idefics3ForConditionalGeneration
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from tests.families.zoo.common import chatml, save, text_settings, token_id, tokenizer

TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES]


def build(directory: Path, seed: int = 0) -> None:
    write(
        directory, seed, "Idefics3Processor",
        Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessorPil,
    )  # fmt: skip


def write(
    directory: Path, seed: int, processor: str, config_of: Any, model: Any, image_processor: Any
) -> None:
    """The checkpoint with the classes of Idefics3, or with SmolVLM's, which differ in name only."""
    made = tokenizer(SPECIAL, chatml("<image>"), processor)
    config = config_of(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "initializer_range": 0.2,
        },
        text_config={"model_type": "llama", **text_settings(made)},
        image_token_id=token_id(made, "<image>"),
        scale_factor=2,
        pad_token_id=token_id(made, "<pad>"),
    )
    save(
        directory,
        model,
        config,
        made,
        image_processor(size={"longest_edge": 168}, max_image_size={"longest_edge": 56}),
        seed,
        processor={"processor_class": processor, "image_seq_len": 4},
    )
