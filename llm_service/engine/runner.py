"""Turns a step into one forward pass of the decoder."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from llm_service.engine.attention import KvPool, flat_order, lay_out, use_paged_attention
from llm_service.engine.block_pool import ZERO_BLOCK
from llm_service.engine.scheduler import Chunk, Step
from llm_service.engine.values import DecoderParts, ImageSpan

_PROBE = Chunk(key=-1, start=0, length=1, samples=True, blocks=(ZERO_BLOCK,))


class Tokens(Protocol):
    """A sequence as the runner reads it: prompt and answer so far, and its images in order."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def images(self) -> tuple[ImageSpan, ...]: ...


@dataclass(frozen=True)
class _OneToken:
    token_ids: tuple[int, ...] = (0,)
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, eq=False)
class Predictions:
    """Logits float32 `[len(keys), vocab_size]` for the next token of the sequences `keys`."""

    keys: tuple[int, ...]
    logits: torch.Tensor

    def finite(self) -> list[bool]:
        """Whether each row holds numbers only."""
        whole: list[bool] = torch.isfinite(self.logits).all(-1).tolist()
        return whole


class Runner:
    """Holds the decoder and the pool of keys and values. Not for two threads at once.

    Raises:
        UnsupportedDecoder: the decoder needs what paged attention does not do.
    """

    def __init__(self, decoder: DecoderParts, block_count: int, block_size: int) -> None:
        use_paged_attention(decoder.model)
        decoder.model.eval()
        self._decoder = decoder
        self._pool = KvPool.allocate(
            decoder.layer_count, block_count, block_size, decoder.kv_head_count,
            decoder.head_dim, decoder.dtype, decoder.device,
        )  # fmt: skip

    def run(self, step: Step, sequences: Mapping[int, Tokens]) -> Predictions:
        """Computes keys and values of all tokens of `step`, and logits where it samples.

        Running a step again gives the same: nothing but the pool's own slots is written.
        """
        with torch.inference_mode():
            self._pool.clear([block for chunk in step.chunks for block in chunk.fresh])
            ordered = flat_order(step.chunks)
            hidden = self._forward(ordered, sequences)
            return self._predict(hidden, ordered)

    def probe(self) -> bool:
        """Whether the decoder still computes: one token, no sequence's blocks."""
        try:
            return all(self.run(Step((_PROBE,)), {_PROBE.key: _OneToken()}).finite())
        finally:
            self._pool.clear([ZERO_BLOCK])

    def _forward(self, ordered: Sequence[Chunk], sequences: Mapping[int, Tokens]) -> torch.Tensor:
        model: Any = self._decoder.model
        positions = [position for chunk in ordered for position in range(chunk.start, chunk.end)]
        hidden: torch.Tensor = model(
            inputs_embeds=self._embed(ordered, sequences)[None],
            position_ids=torch.tensor([positions], device=self._decoder.device),
            use_cache=False,
            paged=lay_out(ordered, self._pool, self._decoder.context_length),
        ).last_hidden_state
        return hidden[0]

    def _embed(self, ordered: Sequence[Chunk], sequences: Mapping[int, Tokens]) -> torch.Tensor:
        ids: list[int] = []
        for chunk in ordered:
            ids += sequences[chunk.key].token_ids[chunk.start : chunk.end]
        rows: torch.Tensor = self._decoder.embed_tokens(
            torch.tensor(ids, device=self._decoder.device)
        )
        begin = 0
        for chunk in ordered:
            for place, part in _image_rows(chunk, sequences[chunk.key].images):
                rows[begin + place : begin + place + len(part)] = part.to(rows)
            begin += chunk.length
        return rows

    def _predict(self, hidden: torch.Tensor, ordered: Sequence[Chunk]) -> Predictions:
        keys, last_rows, end = [], [], 0
        for chunk in ordered:
            end += chunk.length
            if chunk.samples:
                keys.append(chunk.key)
                last_rows.append(end - 1)
        logits: torch.Tensor = self._decoder.lm_head(hidden[last_rows])
        return Predictions(tuple(keys), logits.float())


def _image_rows(chunk: Chunk, images: tuple[ImageSpan, ...]) -> Iterator[tuple[int, torch.Tensor]]:
    """The image rows inside a chunk, each with its place there."""
    for image in images:
        first = max(chunk.start, image.start)
        last = min(chunk.end, image.start + image.length)
        if first < last:
            yield first - chunk.start, image.rows[first - image.start : last - image.start]
