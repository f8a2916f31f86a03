"""One request inside the engine: its tokens, its text, its clock, and where its events go."""

import secrets
import time
from dataclasses import dataclass

import torch

from llm_service.engine.sampler import Draw
from llm_service.engine.text import StopFilter, TextStream
from llm_service.engine.values import (
    Delta,
    Finished,
    FinishReason,
    ImageSpan,
    Prompt,
    Publish,
    SamplingParams,
    TokenDecoder,
)


@dataclass
class _Clock:
    """Monotonic seconds; None where it has not come to that."""

    submitted: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def tick(self) -> None:
        self.last_token = time.monotonic()
        self.first_token = self.first_token or self.last_token


class Sequence:
    """Owned by the engine's thread once submitted.

    Attributes:
        token_ids: the prompt's and, behind them, the answer's.
        deadline: monotonic seconds, or None.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        max_tokens: int,
        eos_ids: tuple[int, ...],
        deadline: float | None,
        publish: Publish,
        tokenizer: TokenDecoder,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt.token_ids)
        self.images: tuple[ImageSpan, ...] = prompt.images
        self.deadline = deadline
        self.publish = publish
        self._prompt_tokens = len(prompt.token_ids)
        self._max_tokens = max_tokens
        self._sampling = sampling
        eos = () if sampling.ignore_eos else eos_ids
        self._ending = tuple({*eos, *sampling.stop_token_ids})
        self._text = TextStream(tokenizer)
        self._stop_filter = StopFilter(sampling.stop)
        self._generator = torch.Generator()
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._generator.manual_seed(seed & 0xFFFF_FFFF_FFFF_FFFF)
        self._clock = _Clock(submitted=time.monotonic())

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return self._prompt_tokens + self._max_tokens

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self._prompt_tokens

    def overdue(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline

    def start(self) -> None:
        """A step works on it; only the first counts."""
        self._clock.started = self._clock.started or time.monotonic()

    def draw(self) -> Draw:
        """How its next token is to be drawn."""
        early = self.generated < self._sampling.min_tokens
        return Draw(self._sampling, self._generator, self._ending if early else ())

    def take(self, token_id: int) -> tuple[Delta, FinishReason | None]:
        """Appends a sampled token; tells what that lets out, and the reason if it was the last."""
        self._clock.tick()
        self.token_ids.append(token_id)
        text, reason = self._read(token_id)
        return Delta(text, (token_id,)), reason

    def finished(self, reason: FinishReason) -> Finished:
        """The closing event, with the clock as it stands."""
        clock = self._clock
        now = time.monotonic()
        started = clock.started or now
        first = clock.first_token or now
        return Finished(
            reason=reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self.generated,
            cached_tokens=0,
            queue_seconds=started - clock.submitted,
            prefill_seconds=first - started,
            decode_seconds=(clock.last_token or now) - first,
        )

    def _read(self, token_id: int) -> tuple[str, FinishReason | None]:
        if token_id in self._ending:
            return self._close("", "stop")
        text, stopped = self._filter(self._text.push(token_id))
        if stopped:
            return text, "stop"
        if self.generated >= self._max_tokens:
            return self._close(text, "length")
        return text, None

    def _close(self, text: str, reason: FinishReason) -> tuple[str, FinishReason]:
        last, stopped = self._filter(self._text.close())
        if stopped:
            return text + last, "stop"
        return text + last + self._stop_filter.close(), reason

    def _filter(self, text: str) -> tuple[str, bool]:
        if self.generated < self._sampling.min_tokens:
            return text, False
        return self._stop_filter.push(text)
