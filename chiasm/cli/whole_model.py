"""The yardstick: transformers' own `generate` on the whole checkpoint, nothing of it split.

Loads torch and transformers. Uses the checkpoint's image processor, tokenizer and chat template,
and the rows that the model's own tower gives to count placeholders.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import logging

from chiasm.cli.dialogue import Dialogue, Picture
from chiasm.images import decode_image
from chiasm.models.checkpoint import open_checkpoint
from chiasm.models.sources import load_image_processor


class WholeModel:
    """A whole model that answers dialogues greedily, one at a time."""

    def __init__(self, directory: Path, dtype: str, max_tokens: int) -> None:
        notes: Any = logging
        notes.disable_progress_bar()
        automatic: Any = AutoModelForImageTextToText
        self._model: Any = automatic.from_pretrained(
            directory, dtype=getattr(torch, dtype), local_files_only=True
        ).eval()
        self._processor: Any = load_image_processor(open_checkpoint(directory))
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self._max_tokens = max_tokens

    @torch.inference_mode()
    def answer(self, dialogue: Dialogue) -> str:
        """The text that the model adds to `dialogue`."""
        pictures = [item for line in dialogue for item in line.items if isinstance(item, Picture)]
        pixels = self._pixels(pictures)
        token_ids = torch.tensor([list(self._expanded(dialogue, pixels))])
        generated = self._model.generate(
            input_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),
            **pixels,
            max_new_tokens=self._max_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
        )
        answer = generated[0, token_ids.shape[1] :]
        text: str = self._tokenizer.decode(answer, skip_special_tokens=True)
        return text

    def _pixels(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        images = [decode_image(picture.path.read_bytes()) for picture in pictures]
        return dict(self._processor(images=images, return_tensors="pt")) if images else {}

    def _expanded(self, dialogue: Dialogue, pixels: dict[str, Any]) -> Iterator[int]:
        counts = iter(self._placeholder_counts(pixels) if pixels else ())
        for token_id in self._token_ids(dialogue):
            placeholder = token_id == self._model.config.image_token_id
            yield from [token_id] * (next(counts) if placeholder else 1)

    def _token_ids(self, dialogue: Dialogue) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(
            [_message(line) for line in dialogue], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self._tokenizer(rendered, add_special_tokens=False).input_ids
        return ids

    def _placeholder_counts(self, pixels: dict[str, Any]) -> list[int]:
        found = self._model.get_image_features(**pixels, return_dict=True).pooler_output
        if not isinstance(found, torch.Tensor):
            return [rows.shape[-2] for rows in found]
        image_count = len(pixels["pixel_values"])
        return [found.numel() // found.shape[-1] // image_count] * image_count


def _message(line: Any) -> dict[str, Any]:
    parts = [
        {"type": "image"} if isinstance(item, Picture) else {"type": "text", "text": item}
        for item in line.items
    ]
    return {"role": "assistant" if line.by_model else "user", "content": parts}
