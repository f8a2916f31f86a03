"""Which decoders run over paged keys and values, and what a window asks for instead."""

from typing import Any, Final

from chiasm.models.family import Layers

PAGED: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Plain causal attention, tested against transformers with every family that has them."""


def layers_of(config: Any) -> Layers:
    """`paged` for the decoders of `PAGED` without a window shorter than the context."""
    text = config.text_config
    plain = text.model_type in PAGED and not _has_window(text)
    return "paged" if plain else "stateful"


def _has_window(text: Any) -> bool:
    window = getattr(text, "sliding_window", None)
    if window is None or window >= text.max_position_embeddings:
        return False
    # Qwen2's configs name a window that this flag may leave unused.
    return bool(getattr(text, "use_sliding_window", True))
