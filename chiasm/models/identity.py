"""Which encoder made an embedding: a digest of everything that decides its rows.

Computed from the checkpoint's files alone, so that an encoder (which holds the vision half) and an
LLM service (which never loads it) come to the same identity from the same checkpoint.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chiasm import colours
from chiasm.models.checkpoint import Checkpoint, CheckpointError, StoredTensor, open_checkpoint
from chiasm.models.families import family_of
from chiasm.models.family import Family

FeatureType = Literal["float32", "float16", "bfloat16"]
FEATURE_TYPES: tuple[FeatureType, ...] = ("float32", "float16", "bfloat16")

IMAGE_BACKEND: Literal["pil"] = "pil"
"""What resizes and crops, in transformers and in processors of our own; others differ in bits."""

# Notes that programs leave in settings; none changes a feature.
_IDLE_SETTINGS = frozenset(
    {"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version",
     "processor_class", "_processor_class", "image_processor_type", "feature_extractor_type"}
)  # fmt: skip


@dataclass(frozen=True)
class EncoderIdentity:
    """Two encoders with equal identities give interchangeable embeddings.

    Attributes:
        model_id: the name under which the checkpoint is served.
        weights_digest: SHA-256, hex, of the vision half's tensors and the settings that shape it.
        processor_digest: SHA-256, hex, of the image processor's settings, class and backend.
        dtype: the type the tower computes in and its rows have.
        width: elements a row.
        background: what shows through transparent pixels, `#rrggbb`.
    """

    model_id: str
    weights_digest: str
    processor_digest: str
    dtype: FeatureType
    width: int
    background: str = colours.WHITE

    def describe(self) -> str:
        """Short enough for an error, long enough to tell two encoders apart."""
        return (
            f"{self.model_id} (weights {self.weights_digest[:12]}, processor "
            f"{self.processor_digest[:12]}, {self.dtype}, width {self.width}, background "
            f"{self.background})"
        )


def checkpoint_identity(
    directory: Path, dtype: str, model_id: str, background: str = colours.WHITE
) -> EncoderIdentity:
    """The identity of the encoder that the checkpoint in `directory` makes when run in `dtype`
    on pictures that were decoded over `background`.

    Reads every byte of the vision half, in chunks; memory stays at a few MiB.

    Raises:
        CheckpointError: the directory is incomplete or of a family that is not served.
        ValueError: `dtype` is none of `FEATURE_TYPES`, or `background` no colour.
    """
    return identity_of(open_checkpoint(directory), feature_type(dtype), model_id, background)


def identity_of(
    checkpoint: Checkpoint, dtype: FeatureType, model_id: str, background: str = colours.WHITE
) -> EncoderIdentity:
    """As `checkpoint_identity`, for a checkpoint that is open already."""
    family = family_of(checkpoint.model_type)
    tensors = vision_tensors(checkpoint, family)
    return EncoderIdentity(
        model_id=model_id,
        weights_digest=_digest_weights(tensors, _family_settings(checkpoint, family)),
        processor_digest=_digest_processor(checkpoint.image_processor_settings(), family),
        dtype=dtype,
        width=tensors[family.width_tensor].shape[family.width_axis],
        background=colours.canonical(background),
    )


def feature_type(name: str) -> FeatureType:
    for known in FEATURE_TYPES:
        if name == known:
            return known
    raise ValueError(f"features are {', '.join(FEATURE_TYPES)}, not {name!r}")


def vision_tensors(checkpoint: Checkpoint, family: Family) -> dict[str, StoredTensor]:
    """The vision half's tensors by canonical name, in the order of names."""
    named: dict[str, StoredTensor] = {}
    for stored in checkpoint.tensors.values():
        name = family.vision_tensor_name(stored.name)
        if name is None:
            continue
        if name in named:
            raise CheckpointError(
                f"{checkpoint.directory} holds {name} twice: {named[name].name}, {stored.name}"
            )
        named[name] = stored
    if family.width_tensor not in named:
        raise CheckpointError(
            f"{checkpoint.directory} lacks {family.width_tensor}: its weights are not those of a "
            f"whole {family.model_type} checkpoint; fetch them again"
        )
    return dict(sorted(named.items()))


def processor_class_name(settings: Mapping[str, Any]) -> str:
    """The class that prepares images, e.g. `CLIPImageProcessorPil`."""
    name = settings.get("image_processor_type") or settings.get("feature_extractor_type")
    if not isinstance(name, str):
        raise CheckpointError(
            "the image processor's settings name no image_processor_type; add it as the "
            "checkpoint's publisher states it"
        )
    base = name.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast")
    return base if base.endswith("Pil") else f"{base}Pil"


def _family_settings(checkpoint: Checkpoint, family: Family) -> dict[str, Any]:
    return {name: checkpoint.config[name] for name in family.settings if name in checkpoint.config}


def _digest_weights(tensors: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    _add_framed(digest, _canonical(settings))
    for name, stored in tensors.items():
        _add_framed(digest, _canonical([name, stored.data_type, stored.shape, stored.byte_count]))
        for chunk in stored.chunks():
            digest.update(chunk)
    return digest.hexdigest()


def _digest_processor(settings: Mapping[str, Any], family: Family) -> str:
    class_name = processor_class_name(settings)
    own = family.processor_in_place_of(class_name)
    description = {
        "backend": IMAGE_BACKEND,
        "class": class_name if own is None else own.name,
        "settings": settings,
    }
    return hashlib.sha256(_canonical(description)).hexdigest()


def _add_framed(digest: "hashlib._Hash", field: bytes) -> None:
    digest.update(len(field).to_bytes(8, "little"))
    digest.update(field)


def _canonical(value: Any) -> bytes:
    """JSON with sorted names and no spaces, without the settings that change nothing."""
    return json.dumps(_without_idle(value), sort_keys=True, separators=(",", ":")).encode()


def _without_idle(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _without_idle(item) for name, item in value.items() if name not in _IDLE_SETTINGS
        }
    if isinstance(value, list | tuple):
        return [_without_idle(item) for item in value]
    return value
