"""Turns a step into one forward pass of the decoder, or of its layers in native code."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from chiasm.telemetry import logger
from llm_service.engine.attention import KvPool, flat_order, lay_out, use_paged_attention
from llm_service.engine.block_pool import ZERO_BLOCK
from llm_service.engine.native import NativeDecoder
from llm_service.engine.native.decoder import rows_of
from llm_service.engine.positions import places_of
from llm_service.engine.pricing import StepPrices
from llm_service.engine.scheduler import Chunk, Step
from llm_service.engine.values import DecoderParts, ImageSpan

_PROBE = Chunk(key=-1, start=0, length=1, samples=True, blocks=(ZERO_BLOCK,))
_TRIAL_LENGTH: Final = 12
_PRICED_TOKENS: Final = 64
_PRICED_TIMES: Final = 3
# Greatest difference of logits, as a share of the greatest logit, at which the native layers count
# as the decoder's own: rounding, and far from what a wrong formula gives.
_AGREEMENT: Final = {torch.float32: 1e-4, torch.bfloat16: 0.06}


class Tokens(Protocol):
    """A sequence as a runner reads it: prompt and answer so far, how many of them are the prompt,
    and its images and positions as in `Prompt`."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def images(self) -> tuple[ImageSpan, ...]: ...
    @property
    def positions(self) -> torch.Tensor | None: ...
    @property
    def position_delta(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...


@dataclass(frozen=True)
class Known:
    """Tokens that are nobody's, to try the decoder with."""

    token_ids: tuple[int, ...] = (0,)
    images: tuple[ImageSpan, ...] = ()
    positions: torch.Tensor | None = None
    position_delta: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class Predictions:
    """Logits for the next token of the sequences `keys`.

    Attributes:
        logits: float32 `[len(keys), vocab_size]`.
        best: each row's likeliest token.
        whole: whether each row holds numbers only.
    """

    keys: tuple[int, ...]
    logits: torch.Tensor
    best: list[int]
    whole: list[bool]


class Runner:
    """Holds the decoder and the pool of keys and values. Not for two threads at once.

    Raises:
        UnsupportedDecoder: the decoder needs what paged attention does not do.
    """

    def __init__(
        self, decoder: DecoderParts, block_count: int, block_size: int, *, native: bool = True
    ) -> None:
        use_paged_attention(decoder.model)
        decoder.model.eval()
        self._decoder = decoder
        self._pool = KvPool.allocate(
            decoder.layer_count, block_count, block_size, decoder.kv_head_count,
            decoder.head_dim, decoder.dtype, decoder.device,
        )  # fmt: skip
        # What the native layers never compute, no trial of theirs covers.
        plain = decoder.position_axes == 1 and decoder.level_count == 0
        self._native = self._proved_native() if native and plain else None

    @property
    def native(self) -> bool:
        """Whether the layers run in native code."""
        return self._native is not None

    def run(self, step: Step, sequences: Mapping[int, Tokens]) -> Predictions:
        """Computes keys and values of all tokens of `step`, and logits where it samples.

        Running a step again gives the same: nothing but the pool's own slots is written.
        """
        with torch.inference_mode():
            self._pool.clear([block for chunk in step.chunks for block in chunk.fresh])
            if self._native is not None:
                return self._run_native(self._native, step.chunks, sequences)
            return self._run_own(step.chunks, sequences)

    def retain(self, keys: Collection[int]) -> None:
        """Takes note of the sequences that have blocks; the scheduler's blocks are all there is."""

    def probe(self) -> bool:
        """Whether the decoder still computes: one token, no sequence's blocks."""
        try:
            return all(self.run(Step((_PROBE,)), {_PROBE.key: Known()}).whole)
        finally:
            self._pool.clear([ZERO_BLOCK])

    def prices(self) -> StepPrices | None:
        """What steps cost here and now; None where the pool is too small to tell. Not while others
        hold blocks."""
        many = min(_PRICED_TOKENS, self._pool.token_count, self._decoder.context_length)
        if many < 2:
            return None
        return StepPrices.fit((1, self._seconds(1)), (many, self._seconds(many)))

    def _seconds(self, tokens: int) -> float:
        """The shortest of some steps of so many tokens: what disturbs one only makes it longer."""
        last = ZERO_BLOCK + -(-tokens // self._pool.block_size)
        blocks = tuple(range(ZERO_BLOCK + 1, last + 1))
        chunk = Chunk(key=-1, start=0, length=tokens, samples=True, blocks=blocks, fresh=blocks)
        known = {chunk.key: Known((0,) * tokens)}
        times = []
        for _ in range(_PRICED_TIMES):
            begun = time.perf_counter()
            self.run(Step((chunk,)), known)
            times.append(time.perf_counter() - begun)
        self._pool.clear(blocks)
        return min(times)

    def _run_native(
        self, native: NativeDecoder, chunks: Sequence[Chunk], sequences: Mapping[int, Tokens]
    ) -> Predictions:
        hidden = self._embed(chunks, sequences)
        computed = native.compute(rows_of(chunks, hidden, self._pool.block_size))
        keys = tuple(chunk.key for chunk in chunks if chunk.samples)
        return Predictions(keys, computed.logits, computed.best, computed.finite)

    def _run_own(self, chunks: Sequence[Chunk], sequences: Mapping[int, Tokens]) -> Predictions:
        ordered = flat_order(chunks)
        hidden = self._forward(ordered, sequences)
        return self._predict(hidden, ordered)

    def _proved_native(self) -> NativeDecoder | None:
        """The native layers, if there are any and they agree with the decoder on known tokens."""
        native = NativeDecoder.of(self._decoder, self._pool.tensor, torch.get_num_threads())
        if native is None:
            return None
        length = min(_TRIAL_LENGTH, self._pool.block_size)
        chunk = Chunk(key=-1, start=0, length=length, samples=True, blocks=(ZERO_BLOCK + 1,))
        tokens = {chunk.key: Known(tuple(range(length)))}
        with torch.inference_mode():
            own = self._run_own([chunk], tokens).logits
            others = self._run_native(native, [chunk], tokens).logits
        self._pool.clear(chunk.blocks)
        apart = (own - others).abs().max() / own.abs().max()
        if apart <= _AGREEMENT[self._decoder.dtype]:
            return native
        logger().error("native layers differ from the decoder; left out", difference=float(apart))
        return None

    def _forward(self, ordered: Sequence[Chunk], sequences: Mapping[int, Tokens]) -> torch.Tensor:
        model: Any = self._decoder.model
        hidden: torch.Tensor = model(
            inputs_embeds=self._embed(ordered, sequences)[None],
            position_ids=self._places(ordered, sequences),
            use_cache=False,
            paged=lay_out(ordered, self._pool, self._decoder.context_length),
            **self._levels(ordered, sequences),
        ).last_hidden_state
        return hidden[0]

    def _places(self, ordered: Sequence[Chunk], sequences: Mapping[int, Tokens]) -> torch.Tensor:
        """`[1, T]`, or `[axes, 1, T]` where the decoder has several axes."""
        axes = self._decoder.position_axes
        parts = [places_of(sequences[chunk.key], chunk.start, chunk.end, axes) for chunk in ordered]
        places = torch.cat(parts, dim=1).to(self._decoder.device)
        return places if axes == 1 else places[:, None]

    def _levels(self, ordered: Sequence[Chunk], sequences: Mapping[int, Tokens]) -> dict[str, Any]:
        """Deepstack's arguments; none where the step has no image token, as in the whole model."""
        if not self._decoder.level_count:
            return {}
        visual = torch.zeros(1, sum(chunk.length for chunk in ordered), dtype=torch.bool)
        levels: list[list[torch.Tensor]] = [[] for _ in range(self._decoder.level_count)]
        begin = 0
        for chunk in ordered:
            for place, image, here in image_parts(
                chunk.start, chunk.end, sequences[chunk.key].images
            ):
                visual[0, begin + place : begin + place + here.stop - here.start] = True
                for level, added in zip(levels, image.levels, strict=True):
                    level.append(added[here].to(self._decoder.device, self._decoder.dtype))
            begin += chunk.length
        if not levels[0]:
            return {}
        return {
            "visual_pos_masks": visual.to(self._decoder.device),
            "deepstack_visual_embeds": [torch.cat(level) for level in levels],
        }

    def _embed(self, ordered: Sequence[Chunk], sequences: Mapping[int, Tokens]) -> torch.Tensor:
        ids: list[int] = []
        for chunk in ordered:
            ids += sequences[chunk.key].token_ids[chunk.start : chunk.end]
        rows: torch.Tensor = self._decoder.embed_tokens(
            torch.tensor(ids, device=self._decoder.device)
        )
        begin = 0
        for chunk in ordered:
            for place, image, here in image_parts(
                chunk.start, chunk.end, sequences[chunk.key].images
            ):
                part = image.rows[here]
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
        logits: torch.Tensor = self._decoder.lm_head(hidden[last_rows]).float()
        return predictions_of(tuple(keys), logits)


def predictions_of(keys: tuple[int, ...], logits: torch.Tensor) -> Predictions:
    # A NaN or an infinity is the greatest of its row, or makes the sum one.
    whole: list[bool] = torch.isfinite(logits.sum(-1)).tolist()
    return Predictions(keys, logits, logits.argmax(-1).tolist(), whole)


def image_parts(
    begin: int, end: int, images: tuple[ImageSpan, ...]
) -> Iterator[tuple[int, ImageSpan, slice]]:
    """The images inside the tokens `begin` to `end`: the place there of each one's first row, and
    which of its rows they are."""
    for image in images:
        first = max(begin, image.start)
        last = min(end, image.start + image.length)
        if first < last:
            yield first - begin, image, slice(first - image.start, last - image.start)
