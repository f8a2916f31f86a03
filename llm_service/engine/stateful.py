"""Runs decoders that paged attention does not do: each sequence alone, with a cache of its own.

Decoders with masks over images, sliding windows or recurrent state run here through transformers'
own forward with transformers' own cache, as `generate` runs them: the whole prompt in one forward,
then a token a forward. That gives their exact answers for a price:

- Answers that run together share no forward, so n of them take n times as long as one.
- A prompt is never cut, so a long one holds up running answers until it is through.
- No two prompts share what they have in common.
- Keys and values lie outside the pool. Its blocks still decide how many sequences run: a sequence
  has a cache only while it has blocks. Recurrent state, of constant size, is not counted.
"""

import inspect
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import DynamicCache

from llm_service.engine.positions import places_of
from llm_service.engine.pricing import ApartPrices
from llm_service.engine.refusals import UnsupportedDecoder
from llm_service.engine.runner import (
    Known,
    Predictions,
    Tokens,
    image_parts,
    predictions_of,
)
from llm_service.engine.scheduler import Chunk, Step
from llm_service.engine.values import DecoderParts, ImageSpan

# In this family's token types 0 is the prompt, all of which sees all of it, and 1 what follows it;
# in the others' 1 is an image.
_WHOLE_PROMPT_SEES_ITSELF: Final = ("paligemma",)
_PRICED_TOKENS: Final = 64
_PRICED_TIMES: Final = 3
_TOKEN_TYPES: Final = ("token_type_ids", "mm_token_type_ids")
_PLACEHOLDERS: Final = ("image_token_id", "video_token_id", "audio_token_id")


@dataclass(frozen=True, eq=False)
class _Held:
    """A cache and how many tokens of its sequence it has taken in."""

    cache: Any
    computed: int


class StatefulRunner:
    """Holds the model and the caches of the sequences that run. Not for two threads at once.

    A cache that stands elsewhere than a chunk begins is made anew from the sequence's first token:
    after a preemption, a step that failed, and a step that is run again.

    Raises:
        UnsupportedDecoder: the model takes no embeddings, or has deepstack levels.
    """

    native: Final = False

    def __init__(self, decoder: DecoderParts) -> None:
        model: Any = decoder.stateful
        model.eval()
        self._decoder = decoder
        self._model = model
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        if "inputs_embeds" not in self._takes or decoder.level_count:
            raise UnsupportedDecoder(
                f"{type(model).__name__} cannot be run on embeddings with a cache of its own"
            )
        # Its name changed from one release to the next.
        self._cache_name = "cache" if "cache" in self._takes else "past_key_values"
        config: Any = model.config
        text = config.get_text_config(decoder=True)
        self._prefix = config.model_type in _WHOLE_PROMPT_SEES_ITSELF
        self._has_per_layer = bool(getattr(text, "hidden_size_per_layer_input", 0))
        # Models of per-layer inputs look all placeholders up as padding, even generated ones.
        names = _PLACEHOLDERS if "per_layer_inputs" in self._takes else ()
        self._placeholders = [one for name in names if (one := getattr(config, name, None))]
        self._padding = text.pad_token_id
        self._held: dict[int, _Held] = {}

    @property
    def cached_tokens(self) -> int:
        """Tokens in all caches."""
        return sum(held.computed for held in self._held.values())

    def run(self, step: Step, sequences: Mapping[int, Tokens]) -> Predictions:
        """Takes in all tokens of `step` and gives logits where it samples.

        Running a step again gives the same.
        """
        keys = tuple(chunk.key for chunk in step.chunks if chunk.samples)
        with torch.inference_mode():
            rows = [self._advance(chunk, sequences[chunk.key]) for chunk in step.chunks]
            logits = [row for chunk, row in zip(step.chunks, rows, strict=True) if chunk.samples]
            return predictions_of(keys, torch.cat(logits).float())

    def retain(self, keys: Collection[int]) -> None:
        """Drops the caches of all other sequences: they ended or lost their blocks."""
        self._held = {key: held for key, held in self._held.items() if key in keys}

    def probe(self) -> bool:
        """Whether the decoder still computes: one token, no sequence's cache."""
        with torch.inference_mode():
            logits, _ = self._forward(Known(), 0, 1, self._fresh())
            return bool(torch.isfinite(logits).all())

    def prices(self) -> ApartPrices | None:
        """What forwards cost here and now; None where the context is too short to tell."""
        many = min(_PRICED_TOKENS, self._decoder.context_length)
        if many < 2:
            return None
        return ApartPrices.fit((1, self._seconds(1)), (many, self._seconds(many)))

    def _seconds(self, tokens: int) -> float:
        """The shortest of some forwards of so many tokens."""
        known, times = Known((0,) * tokens), []
        for _ in range(_PRICED_TIMES):
            begun = time.perf_counter()
            with torch.inference_mode():
                self._forward(known, 0, tokens, self._fresh())
            times.append(time.perf_counter() - begun)
        return min(times)

    def _advance(self, chunk: Chunk, sequence: Tokens) -> torch.Tensor:
        """Logits `[1, vocab_size]` after the chunk's last token."""
        # Out of the table while it is written to: a forward that fails leaves it half grown.
        held = self._held.pop(chunk.key, None)
        if held is None or held.computed != chunk.start:
            held = _Held(self._fresh(), 0)
        logits, cache = self._forward(sequence, held.computed, chunk.end, held.cache)
        self._held[chunk.key] = _Held(cache, chunk.end)
        return logits

    def _fresh(self) -> Any:
        return DynamicCache(config=self._model.config.get_text_config(decoder=True))

    def _forward(
        self, sequence: Tokens, first: int, last: int, cache: Any
    ) -> tuple[torch.Tensor, Any]:
        ids = self._ids(sequence, first, last)
        output = self._model(
            inputs_embeds=self._embed(ids, sequence.images, first)[None],
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: cache},
            **self._token_types(sequence, first, last),
            **self._places(sequence, first, last),
            **self._per_layer(ids),
        )
        return output.logits[:, -1], output[self._cache_name]

    def _ids(self, sequence: Tokens, first: int, last: int) -> torch.Tensor:
        ids = torch.tensor(sequence.token_ids[first:last], device=self._decoder.device)
        for placeholder in self._placeholders:
            ids[ids == placeholder] = self._padding
        return ids

    def _embed(self, ids: torch.Tensor, images: tuple[ImageSpan, ...], first: int) -> torch.Tensor:
        rows: torch.Tensor = self._decoder.embed_tokens(ids)
        for place, image, here in image_parts(first, first + len(ids), images):
            part = image.rows[here]
            rows[place : place + len(part)] = part.to(rows)
        return rows

    def _token_types(self, sequence: Tokens, first: int, last: int) -> dict[str, torch.Tensor]:
        """Of a beginning; later tokens see all before them and none behind, whatever their type."""
        name = next((name for name in _TOKEN_TYPES if name in self._takes), None)
        if name is None or first > 0 or self._decoder.position_axes > 1:
            return {}
        types = torch.zeros(1, last, dtype=torch.long, device=self._decoder.device)
        if self._prefix:
            types[:, sequence.prompt_tokens :] = 1
        else:
            for image in sequence.images:
                types[:, image.start : image.start + image.length] = 1
        return {name: types}

    def _places(self, sequence: Tokens, first: int, last: int) -> dict[str, torch.Tensor]:
        """Where the model does not count by itself."""
        axes = self._decoder.position_axes
        if axes == 1:
            return {}
        places = places_of(sequence, first, last, axes).to(self._decoder.device)
        return {"position_ids": places[:, None]}

    def _per_layer(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Per-layer embeddings, which a model cannot look up where it gets no ids."""
        if not self._has_per_layer:
            return {}
        decoder: Any = self._decoder.model
        return {"per_layer_inputs": decoder.get_per_layer_inputs(ids[None])}
