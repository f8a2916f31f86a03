"""What a family's rules are made from, read from a checkpoint without its weights."""

from typing import Any

from transformers import AutoImageProcessor, PreTrainedConfig

from chiasm.models.checkpoint import Checkpoint, CheckpointError
from chiasm.models.families import family_of
from chiasm.models.family import Sources
from chiasm.models.half import brief
from chiasm.models.identity import IMAGE_BACKEND, processor_class_name


def read_sources(checkpoint: Checkpoint, config: PreTrainedConfig) -> Sources:
    """The rules' sources. Raises `CheckpointError` where the image processor cannot be made."""
    return Sources(
        config=config,
        image_processor=load_image_processor(checkpoint),
        processor=checkpoint.processor_settings(),
        tokenizer=checkpoint.tokenizer_settings(),
    )


def load_image_processor(checkpoint: Checkpoint) -> Any:
    """transformers' image processor on PIL, or the family's own where transformers has none.

    Raises:
        CheckpointError: its settings name no class, or one that cannot be made of them.
    """
    settings = checkpoint.image_processor_settings()
    expected = processor_class_name(settings)
    own = family_of(checkpoint.model_type).processor_in_place_of(expected)
    try:
        processor = _from_transformers(checkpoint) if own is None else own.make(settings)
    except (OSError, ValueError, TypeError) as error:
        maker = "transformers" if own is None else "Chiasm"
        raise CheckpointError(
            f"{checkpoint.directory}: {maker} cannot make the image processor {expected}: "
            f"{brief(error)}"
        ) from error
    if type(processor).__name__ != expected:
        raise CheckpointError(
            f"{checkpoint.directory} wants the image processor {expected}, this version of "
            f"transformers has {type(processor).__name__}; name one it has as image_processor_type"
        )
    return processor


def _from_transformers(checkpoint: Checkpoint) -> Any:
    auto: Any = AutoImageProcessor
    return auto.from_pretrained(
        checkpoint.directory,
        backend=IMAGE_BACKEND,
        local_files_only=True,
        trust_remote_code=False,
    )
