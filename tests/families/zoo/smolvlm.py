"""SmolVLM."""

from pathlib import Path

from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tests.families.zoo.idefics3 import write


def build(directory: Path, seed: int = 0) -> None:
    write(
        directory, seed, "SmolVLMProcessor",
        SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil,
    )  # fmt: skip
