"""A request inside the engine and its answers: tokens, text, clock, and where events go."""

import hashlib
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from llm_service.engine.block_keys import BlockKeys
from llm_service.engine.penalties import bias_of, seen_of
from llm_service.engine.positions import name_of_places
from llm_service.engine.sampler import Draw, Sampled
from llm_service.engine.text import StopFilter, text_stream
from llm_service.engine.token_bytes import TokenBytes
from llm_service.engine.values import (
    Constraint,
    Delta,
    Finished,
    FinishReason,
    ImageSpan,
    Prompt,
    Publish,
    SamplingParams,
    TokenDecoder,
    TokenLogprob,
)


@dataclass(eq=False)
class Request:
    """What all answers to one prompt share. Owned by the engine's thread once submitted.

    Attributes:
        max_tokens: of each answer.
        eos_ids: the model's own; none where the request ignores them.
        deadline: monotonic seconds, or None.
        seed: of the first answer; the next ones count up from it.
        submitted: monotonic seconds.
        open: keys of the answers that have not ended, kept by the engine.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int
    eos_ids: tuple[int, ...]
    deadline: float | None
    publish: Publish
    tokenizer: TokenDecoder
    token_bytes: TokenBytes
    seed: int = 0
    submitted: float = field(default_factory=time.monotonic)
    open: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        wanted = self.sampling.seed
        self.seed = secrets.randbits(64) if wanted is None else wanted

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return len(self.prompt.token_ids) + self.max_tokens

    def overdue(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline


@dataclass
class _Clock:
    """Monotonic seconds; None where it has not come to that."""

    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def tick(self) -> None:
        self.last_token = time.monotonic()
        self.first_token = self.first_token or self.last_token


class KeysFailed(Exception):
    """The keys of a sequence's blocks could not be made."""


class _Keys(BlockKeys):
    """Keys that raise nothing into the scheduler, which serves all sequences at once.

    Where they cannot be made, the blocks are shared with nobody, and `failure` says why.
    """

    failure: BaseException | None = None

    def key(self, index: int) -> bytes | None:
        """As of any BlockKeys, but None where it fails."""
        try:
            return super().key(index)
        except BaseException as failure:  # of Rust's panics too, as in the engine
            self.failure = failure
            return None


class NothingAllowed(Exception):
    """A constraint leaves no token to come: a bug of it."""


class Sequence:
    """One answer to a request, behind its prompt. Owned by the engine's thread once submitted.

    Attributes:
        token_ids: the prompt's and, behind them, the answer's.
        choice: which of the request's answers, from 0.
    """

    def __init__(self, request: Request, choice: int, constraint: Constraint | None) -> None:
        self.request = request
        self.choice = choice
        self.token_ids = list(request.prompt.token_ids)
        self.images: tuple[ImageSpan, ...] = request.prompt.images
        self.positions = request.prompt.positions
        self.position_delta = request.prompt.position_delta
        self.prompt_tokens = len(self.token_ids)
        self._sampling = request.sampling
        self._seed = request.seed + choice
        self._constraint = constraint
        self._ending = tuple({*request.eos_ids, *request.sampling.stop_token_ids})
        self._text = text_stream(request.tokenizer, request.token_bytes)
        self._stop_filter = StopFilter(request.sampling.stop)
        self._teller = _Teller(request.token_bytes)
        self._seen = seen_of(request.sampling, _text_ids(request.prompt))
        self._bias = bias_of(request.sampling)
        self._clock = _Clock()
        self._keys: _Keys | None = None

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    def block_keys(self, block_size: int) -> BlockKeys:
        """Keys of its blocks, for the scheduler; once they have failed `take` raises."""
        prompt = self.request.prompt
        placed = partial(name_of_places, self)
        self._keys = _Keys(self.token_ids, prompt.images, prompt.salt, block_size, placed)
        return self._keys

    def start(self) -> None:
        """A step works on it; only the first counts."""
        self._clock.started = self._clock.started or time.monotonic()

    def draw(self) -> Draw:
        """How its next token is to be drawn. Asking again gives the same."""
        allowed = None if self._constraint is None else self._constraint.allowed()
        if allowed is not None and not allowed.any():
            raise NothingAllowed
        greedy = self._sampling.temperature == 0
        return Draw(
            self._sampling,
            dice=0.0 if greedy else _dice(self._seed, self.generated),
            forbidden=self._ending if self.generated < self._sampling.min_tokens else (),
            allowed=allowed,
            bias=self._bias,
            seen=self._seen,
        )

    def take(self, sampled: Sampled) -> tuple[Delta, FinishReason | None]:
        """Appends a sampled token; tells what that lets out, and the reason if it was the last."""
        if self._keys is not None and self._keys.failure is not None:
            raise KeysFailed from self._keys.failure
        self._clock.tick()
        token_id = sampled.token_id
        self.token_ids.append(token_id)
        if self._seen is not None:
            self._seen.add(token_id)
        told = (self._teller.tell(sampled),) if sampled.logprob is not None else ()
        text, reason = self._read(token_id)
        return Delta(text, (token_id,), told, self.choice), reason

    def finished(self, reason: FinishReason, cached_tokens: int) -> Finished:
        """The closing event, with the clock as it stands."""
        clock = self._clock
        now = time.monotonic()
        started = clock.started or now
        first = clock.first_token or now
        return Finished(
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.generated,
            cached_tokens=cached_tokens,
            queue_seconds=started - self.request.submitted,
            prefill_seconds=first - started,
            decode_seconds=(clock.last_token or now) - first,
            choice=self.choice,
        )

    def _read(self, token_id: int) -> tuple[str, FinishReason | None]:
        if token_id in self._ending:
            return self._close("", "stop")
        constraint = self._constraint
        if constraint is not None:
            constraint.advance(token_id)
        text, stopped = self._filter(self._text.push(token_id))
        if stopped:
            return text, "stop"
        if constraint is not None and constraint.ended:
            return self._close(text, "stop")
        if self.generated >= self.request.max_tokens:
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


class _Teller:
    """Log-probabilities as an answer tells them."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._begun = False

    def tell(self, sampled: Sampled) -> TokenLogprob:
        assert sampled.logprob is not None
        top = tuple(TokenLogprob(one, self._spell(one), value) for one, value in sampled.top)
        told = TokenLogprob(sampled.token_id, self._spell(sampled.token_id), sampled.logprob, top)
        self._begun = self._begun or not self._bytes.is_special(sampled.token_id)
        return told

    def _spell(self, token_id: int) -> bytes:
        token = self._bytes.of(token_id)
        if self._begun or self._bytes.is_special(token_id):
            return token
        return self._bytes.text_start(token)


def _dice(seed: int, position: int) -> float:
    """A number from 0 to below 1, drawn anew for each token of the answer.

    A hash of both, so that neither what else runs nor computing a step again changes it.
    """
    seeded = (seed & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little") + position.to_bytes(8, "little")
    drawn = int.from_bytes(hashlib.blake2b(seeded, digest_size=8).digest(), "little")
    # 53 bits are all that a double holds below 1.
    return (drawn >> 11) / (1 << 53)


def _text_ids(prompt: Prompt) -> Iterator[int]:
    """The prompt's tokens that do not stand for rows of an image."""
    end = 0
    for image in prompt.images:
        yield from prompt.token_ids[end : image.start]
        end = image.start + image.length
    yield from prompt.token_ids[end:]
