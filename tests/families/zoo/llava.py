"""LLaVA 1.5 with a CLIP tower."""

import json
from pathlib import Path

from tests.tiny_llava import build_tiny_llava

_PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}


def build(directory: Path, seed: int = 0) -> None:
    build_tiny_llava(directory, seed=seed)
    (directory / "processor_config.json").write_text(json.dumps(_PROCESSOR))
