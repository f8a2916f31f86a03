"""What a family's rules are made from, read from a checkpoint without its weights."""

from typing import Any

from transformers import AutoImageProcessor, PreTrainedConfig

from chiasm.models.checkpoint import Checkpoint, CheckpointError
from chiasm.models.family import Sources
from chiasm.models.half import brief
from chiasm.models.identity import IMAGE_BACKEND, processor_class_name


def read_sources(checkpoint: Checkpoint, config: PreTrainedConfig) -> Sources:
    """The rules' sources. Raises `CheckpointError` where the image processor cannot be made."""
    return Sources(
        config=config,
        image_processor=_load_image_processor(checkpoint),
        processor=checkpoint.processor_settings(),
        tokenizer=checkpoint.tokenizer_settings(),
    )


def _load_image_processor(checkpoint: Checkpoint) -> Any:
    expected = processor_class_name(checkpoint.image_processor_settings())
    try:
        auto: Any = AutoImageProcessor
        processor = auto.from_pretrained(
            checkpoint.directory,
            backend=IMAGE_BACKEND,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint.directory}: transformers cannot make the image processor {expected}: "
            f"{brief(error)}"
        ) from error
    if type(processor).__name__ != expected:
        raise CheckpointError(
            f"{checkpoint.directory} wants the image processor {expected}, this version of "
            f"transformers has {type(processor).__name__}; name one it has as image_processor_type"
        )
    return processor
