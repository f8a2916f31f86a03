"""GLM-4.1V and later: as Qwen2-VL, with scaling of its own."""

from typing import Any

from chiasm.models.families.grids import OPTIONS, Budget, GridRows
from chiasm.models.families.names import under
from chiasm.models.family import Family, Sources


def refusal(config: Any) -> str | None:
    return None


def image_rule(sources: Sources) -> GridRows:
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

    processor = sources.image_processor
    frames = processor.temporal_patch_size

    def resize(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
        scaled: tuple[int, int] = smart_resize(
            frames, height, width, frames, factor, min_pixels=least, max_pixels=most
        )
        return scaled

    budget = Budget(int(processor.size["shortest_edge"]), int(processor.size["longest_edge"]))
    return GridRows(processor.patch_size, processor.merge_size, budget, resize, frames)


FAMILY = Family(
    model_type="glm4v",
    title="GLM-4V",
    vision_modules=("model.visual",),
    language_modules=("model.language_model", "lm_head"),
    width_tensor="visual.merger.down_proj.weight",
    settings=("vision_config",),
    vision_tensor_name=under("visual"),
    refusal=refusal,
    image_rule=image_rule,
    positions="mrope",
    needs=("grid_thw",),
    options=OPTIONS,
)
