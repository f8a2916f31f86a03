"""PaliGemma with a template that writes what transformers' processor adds by itself."""

from pathlib import Path
from typing import Any

from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.families.zoo.common import save, text_settings, token_id, tokenizer
from tests.families.zoo.gemma3 import published

IMAGE = "<image>"
# Pictures first, <bos> behind the last of them, a line break at the end.
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is not string %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{{ bos_token }}"
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n' }}{% endif %}"
)


def build(directory: Path, seed: int = 0) -> None:
    made = tokenizer((IMAGE,), TEMPLATE, "PaliGemmaProcessor", image_token=IMAGE)
    config_of: Any = PaliGemmaConfig
    config = config_of(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "vision_use_head": False,
        },
        text_config={"model_type": "gemma", **text_settings(made), "head_dim": 16},
        image_token_index=token_id(made, IMAGE),
        projection_dim=64,
        hidden_size=64,
        vocab_size=len(made),
    )
    processors: Any = SiglipImageProcessorPil
    processor = processors(size={"height": 28, "width": 28})
    processor.image_seq_length = 4
    save(
        directory,
        PaliGemmaForConditionalGeneration,
        config,
        made,
        processor,
        seed,
        rename=published,
    )
