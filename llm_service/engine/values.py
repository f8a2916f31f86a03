"""What goes into the engine and what comes out of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from chiasm.errors import ChiasmError, Reason

FinishReason = Literal["stop", "length"]
FailureReason = Literal["DEADLINE", "CANCELLED", "INTERNAL", "SHUTTING_DOWN"]
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How one answer is drawn and when it ends.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass, above 0 up to 1.
        top_k: likeliest tokens considered; 0 considers all.
        min_p: least probability relative to the likeliest token, 0 to 1.
        seed: equal seeds give equal answers whatever else runs; None draws one.
        max_tokens: most tokens to generate; None is as many as the context holds, and so is more
            than it holds.
        min_tokens: tokens before an end-of-sequence token, stop token or stop text counts.
        stop: texts that end the answer and are not part of it.
        stop_token_ids: tokens that end the answer; their text is not part of it.
        ignore_eos: go on past the model's end-of-sequence tokens.
        presence_penalty: taken once off the logit of each token that the answer holds, -2 to 2.
        frequency_penalty: taken off it for each time the answer holds it, -2 to 2.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that
            the prompt's text or the answer holds; above 0 up to 2, and 1 changes nothing.
        logit_bias: added to the logits of some tokens, each from -100 to 100.
        top_logprobs: likeliest tokens told beside each token that was drawn, 0 to 20; None tells
            no log-probabilities.

    Raises:
        ChiasmError: REQUEST_INVALID naming the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        # Written so that NaN, which fails every comparison, is refused.
        _require(0 <= self.temperature < float("inf"), "temperature", "a finite number, at least 0")
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", "at least 0")
        _require(0 <= self.min_p <= 1, "min_p", "from 0 to 1")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        _require(self.min_tokens >= 0, "min_tokens", "at least 0")
        _require(all(self.stop), "stop", "texts of at least one character")
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", "from -2 to 2")
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "from -2 to 2")
        _require(0 < self.repetition_penalty <= 2, "repetition_penalty", "above 0 and at most 2")
        biases = [bias for _, bias in self.logit_bias]
        _require(all(-100 <= bias <= 100 for bias in biases), "logit_bias", "from -100 to 100")
        told = self.top_logprobs
        _require(told is None or 0 <= told <= MAX_TOP_LOGPROBS, "top_logprobs", "from 0 to 20")


def _require(holds: bool, field: str, rule: str) -> None:
    if not holds:
        raise ChiasmError(Reason.REQUEST_INVALID, f"{field} must be {rule}.", field)


@dataclass(frozen=True, eq=False)
class ImageSpan:
    """The rows that stand for the placeholder tokens `start` to `start + length` of a prompt.

    Attributes:
        rows: `[length, width]`, any float type; cast to the decoder's.
        digest: of the rows' content and their encoder's identity. Empty where it is not known:
            what is computed from here on is then shared with no other prompt.
        levels: what the decoder's first layers add to the rows' tokens, each shaped as `rows`
            (deepstack, https://arxiv.org/abs/2406.04334); one a level of the decoder.
    """

    start: int
    length: int
    rows: torch.Tensor
    digest: bytes = b""
    levels: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids with a placeholder id for each image row, and the images in order.

    Attributes:
        salt: whose prompt it is, tenant and cache salt each framed by its length. Prompts of
            other salts share no keys and values with it.
        positions: int64 `[axes, len(token_ids)]`; None where every token stands at its index.
        position_delta: a generated token stands at its index plus this, on all axes.
    """

    token_ids: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()
    salt: bytes = b""
    positions: torch.Tensor | None = None
    position_delta: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    """A token and how likely the model itself held it, before any setting of the request.

    Attributes:
        token: its bytes, not always whole characters. Those of a text's tokens, joined, are the
            text in UTF-8. A special token, which is no text, has its spelling.
        logprob: natural logarithm of the probability.
        top: the likeliest tokens in its place, likeliest first, each without a `top` of its own.
    """

    token_id: int
    token: bytes
    logprob: float
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True)
class Delta:
    """New tokens of one choice and the text they made certain, which may be empty.

    Attributes:
        logprobs: one for each of `token_ids`, or none where none were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: int = 0


@dataclass(frozen=True)
class Finished:
    """One choice is complete; its last text came in a Delta before.

    Attributes:
        completion_tokens: generated tokens, the one that ended the answer included.
        cached_tokens: prompt tokens whose keys and values were not computed again.
        queue_seconds: from submission to the first step that worked on it.
        prefill_seconds: from then to the first token.
        decode_seconds: from the first token to the last.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    choice: int = 0


@dataclass(frozen=True)
class Failed:
    """The request ended early with all its choices. Nothing follows."""

    reason: FailureReason


Event = Delta | Finished | Failed
Publish = Callable[[Event], None]


@dataclass(frozen=True)
class Ticket:
    """A submitted request, to cancel it by."""

    key: int
    request_id: str


@dataclass(frozen=True)
class EngineStats:
    """Counts since the start, and what is held now.

    Attributes:
        blocks_cached: blocks in use by none whose content can be found again.
        prefix_cache_query_tokens_total: prompt tokens of admitted sequences that may share blocks.
        prefix_cache_hit_tokens_total: those of them that were found and not computed.
    """

    running: int
    waiting: int
    blocks_used: int
    blocks_total: int
    tokens_generated_total: int
    prefill_tokens_total: int
    steps_total: int
    cancelled_total: int
    preempted_total: int
    blocks_cached: int = 0
    prefix_cache_query_tokens_total: int = 0
    prefix_cache_hit_tokens_total: int = 0


@dataclass(frozen=True)
class EngineSettings:
    """Limits of the embedded engine.

    Attributes:
        kv_bytes: memory for keys and values; in `stateful` decoders all layers count as if they
            kept every token, and recurrent state is not counted.
        step_token_budget: most tokens a step computes, so the longest that a running answer waits
            for another's prompt; at least `max_running`. Where prompts cannot be cut (`stateful`),
            a longer one still goes in one step.
        decode_stretch: how many times as long as the steps that an answer began with a step may
            take for the sake of prompts, above 1; 0 sets no limit but the budget.
        max_running: most sequences in one step.
        max_waiting: most submitted sequences that wait for a place.
        block_size: tokens a block of keys and values holds.
        prefix_cache: keep the blocks of answers that ended while nobody needs the room, for
            prompts that begin with the same tokens and pictures under the same salt.
    """

    kv_bytes: int = 512 * 1024 * 1024
    step_token_budget: int = 512
    decode_stretch: float = 1.5
    max_running: int = 64
    max_waiting: int = 1024
    block_size: int = 16
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        smallest = min(self.kv_bytes, self.max_running, self.max_waiting, self.block_size)
        if smallest < 1:
            raise ValueError("every engine setting must be at least 1")
        if self.decode_stretch != 0 and not self.decode_stretch > 1:
            raise ValueError("decode_stretch must be above 1, or 0 for no limit")
        if self.step_token_budget < self.max_running:
            raise ValueError(
                f"step_token_budget is {self.step_token_budget}; it must be at least max_running, "
                f"{self.max_running}, for each running sequence needs a token a step"
            )


@dataclass(frozen=True, eq=False)
class DecoderParts:
    """A text decoder and what the engine must know of it.

    Attributes:
        model: the bare decoder, e.g. `LlamaModel`. The engine sets its attention implementation
            and keeps it; nothing else may run it meanwhile.
        embed_tokens: ids `[...]` to `[..., width]`; has a `weight` of `[vocab_size, width]`.
        lm_head: hidden states `[..., width]` to logits `[..., vocab_size]`.
        eos_ids: tokens that end an answer.
        context_length: prompt and answer together, in tokens.
        position_axes: of a token's place; 3 in the decoders with M-RoPE.
        level_count: extra levels (deepstack) that come with image rows.
        stateful: the whole language half, as transformers runs it, where paged attention does not
            do; None where it does.
    """

    model: nn.Module
    embed_tokens: nn.Module
    lm_head: nn.Module
    layer_count: int
    kv_head_count: int
    head_dim: int
    eos_ids: tuple[int, ...]
    context_length: int
    dtype: torch.dtype
    device: torch.device | str
    position_axes: int = 1
    level_count: int = 0
    stateful: Any | None = None


class Constraint(Protocol):
    """Where one answer stands in its grammar. Not for two threads at once."""

    def allowed(self) -> torch.Tensor:
        """Tokens that may come now: bool `[vocab_size]` on the CPU.

        The model's end-of-sequence tokens are among them only where the answer may end.
        """

    def advance(self, token_id: int) -> None:
        """Takes note of the token that was drawn."""

    @property
    def ended(self) -> bool:
        """Whether nothing may follow; the answer then ends with "stop"."""

    def fork(self) -> "Constraint":
        """A copy at the same state, for another choice."""


class TokenDecoder(Protocol):
    """What the engine needs of a fast tokenizer, as transformers types it.

    Attributes:
        backend_tokenizer: the `tokenizers.Tokenizer` behind it.
        added_tokens_decoder: its `AddedToken`s by id, special ones among them.
    """

    @property
    def backend_tokenizer(self) -> Any: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = ..., **options: Any
    ) -> str | list[str]: ...
