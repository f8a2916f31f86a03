"""The families that are served, each in one file. A family that is not listed here is refused."""

from collections.abc import Mapping

from chiasm.models.checkpoint import CheckpointError
from chiasm.models.families import (
    aya_vision,
    gemma3,
    gemma4,
    glm4v,
    idefics3,
    internvl,
    lfm2_vl,
    llava,
    llava_next,
    llava_onevision,
    minicpmv4_6,
    mistral3,
    paligemma,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_vl,
    smolvlm,
)
from chiasm.models.family import Family

_MODULES = (
    llava,
    llava_next,
    llava_onevision,
    mistral3,
    internvl,
    idefics3,
    smolvlm,
    qwen2_vl,
    qwen2_5_vl,
    qwen3_vl,
    glm4v,
    gemma3,
    gemma4,
    paligemma,
    qwen3_5,
    minicpmv4_6,
    aya_vision,
    lfm2_vl,
)
FAMILIES: Mapping[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}


def family_of(model_type: str) -> Family:
    """The family of a config's `model_type`.

    Raises:
        CheckpointError: the type is no vision-language family whose exactness is tested here.
    """
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"the model type {model_type!r} is not among the vision-language families whose split "
            f"is tested ({', '.join(sorted(FAMILIES))}); give a checkpoint of one of these"
        )
    return FAMILIES[model_type]
