"""The embedded engine: one thread that schedules, runs and publishes."""

import contextlib
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Protocol

import torch

from chiasm.telemetry import logger
from llm_service.engine.block_pool import BlockPool
from llm_service.engine.pricing import StepLimits
from llm_service.engine.refusals import (
    EngineBusy,
    EngineStopped,
    PromptInvalid,
    PromptTooLong,
    TooManyChoices,
)
from llm_service.engine.runner import Runner
from llm_service.engine.sampler import Draw, Sampled, sample
from llm_service.engine.scheduler import Scheduler, Step
from llm_service.engine.sequence import Request, Sequence
from llm_service.engine.stateful import StatefulRunner
from llm_service.engine.token_bytes import TokenBytes
from llm_service.engine.values import (
    Constraint,
    DecoderParts,
    Delta,
    EngineSettings,
    EngineStats,
    Event,
    Failed,
    FailureReason,
    Finished,
    ImageSpan,
    Prompt,
    Publish,
    SamplingParams,
    Ticket,
    TokenDecoder,
)


class Engine(Protocol):
    """What the service needs of an engine."""

    @property
    def healthy(self) -> bool: ...
    @property
    def context_length(self) -> int: ...
    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        deadline: float | None,
        publish: Publish,
        *,
        choices: int = 1,
        constraint: Constraint | None = None,
    ) -> Ticket: ...
    def cancel(self, ticket: Ticket) -> None: ...
    def stats(self) -> EngineStats: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...


class ModelBroken(Exception):
    """The decoder computes nothing any more, not even one known token."""


@dataclass(frozen=True)
class _Submitted:
    """A request whose ticket has the key of the first of `sequences`; the others' count on."""

    key: int
    request: Request
    sequences: tuple[Sequence, ...]


@dataclass(frozen=True)
class _Cancelled:
    key: int


@dataclass(frozen=True)
class _Stopped:
    pass


_Order = _Submitted | _Cancelled | _Stopped
# For a thread that has failed to end, before it is left behind.
_LAST_SECONDS: Final = 1.0


@dataclass
class _Totals:
    tokens_generated: int = 0
    prefill_tokens: int = 0
    steps: int = 0
    cancelled: int = 0


class EmbeddedEngine:
    """Continuous batching over one decoder, on a thread of its own.

    `submit`, `cancel` and `stats` may be called from any thread; events are published on the
    engine's. A request ends with exactly one Finished for each choice or, in all, one Failed.
    Blocks are free before their end is told.

    What raises over one request ends it alone. What belongs to none of them, as the scheduler's
    arithmetic or a model that computes nothing, ends all, and `on_fatal` is called once.

    Of several choices the first computes the prompt. The others join when it has its first token
    and find the prompt's full blocks there.

    Raises:
        UnsupportedDecoder: the decoder needs what paged attention does not do.
        ModelBroken: it cannot compute a single token.
        ValueError: `kv_bytes` holds no block.
    """

    def __init__(
        self,
        decoder: DecoderParts,
        detokenizer_tokenizer: TokenDecoder,
        settings: EngineSettings,
        *,
        on_fatal: Callable[[], None],
    ) -> None:
        self._decoder = decoder
        self._tokenizer = detokenizer_tokenizer
        self._settings = settings
        self._on_fatal = on_fatal
        block_count = _block_count(decoder, settings)
        self._pool = BlockPool(block_count, settings.block_size)
        self._runner = _runner(decoder, block_count, settings.block_size)
        if not self._runner.probe():
            raise ModelBroken("the decoder's first logits are not finite")
        self._scheduler = Scheduler(
            self._pool, settings.step_token_budget, settings.max_running,
            limits=_limits(self._runner, settings.decode_stretch),
            whole_prompts=decoder.stateful is not None,
        )  # fmt: skip
        self._orders: SimpleQueue[_Order] = SimpleQueue()
        self._token_bytes = TokenBytes(detokenizer_tokenizer)
        self._requests: dict[int, Request] = {}  # by their tickets' keys
        self._sequences: dict[int, Sequence] = {}
        self._totals = _Totals()
        self._gate = threading.Lock()  # guards the four below
        self._next_key = 0
        self._open = True
        self._held = 0
        self._healthy = True
        self._step_begun: float | None = None  # by time.monotonic()
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)

    @property
    def healthy(self) -> bool:
        """False for good once the model is broken."""
        return self._healthy

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together, at most: the model's limit or the pool's."""
        return min(self._decoder.context_length, self._scheduler.capacity)

    @property
    def step_seconds(self) -> float:
        """How long the step in hand takes already; 0 between steps. For any thread."""
        begun = self._step_begun
        return 0.0 if begun is None else time.monotonic() - begun

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Fails what remains with SHUTTING_DOWN and joins the thread, unless it was abandoned."""
        with self._gate:
            self._open = False
            self._orders.put(_Stopped())
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(None if self._healthy else _LAST_SECONDS)
        elif not self._thread.is_alive():
            self._end_all("SHUTTING_DOWN")

    def abandon(self) -> None:
        """From another thread: gives up an engine whose step never ends. All waiters are told.

        Its thread stays where it hangs and its memory with it: the process must end.
        """
        with self._gate:
            self._open = False
        self._healthy = False
        waiting = [one.request for one in _drained(self._orders) if isinstance(one, _Submitted)]
        for request in {id(one): one for one in (*self._requests.values(), *waiting)}.values():
            _told(request, Failed("INTERNAL"))
        self._on_fatal()

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        deadline: float | None,
        publish: Publish,
        *,
        choices: int = 1,
        constraint: Constraint | None = None,
    ) -> Ticket:
        """Queues a request; `publish` gets its events on the engine's thread and must not block.

        Args:
            deadline: `time.monotonic()` seconds, or None.
            choices: answers wanted. Each counts as one that waits or runs.
            constraint: form of the answers; at its start, and the engine's from now on.

        Raises:
            PromptTooLong, PromptInvalid, TooManyChoices, EngineBusy, EngineStopped: see `refusals`.
        """
        room = self.context_length - len(prompt.token_ids)
        if room < 1:
            raise PromptTooLong(len(prompt.token_ids), self.context_length)
        self._check(prompt, sampling)
        if not 1 <= choices <= self._places:
            raise TooManyChoices(choices, self._places)
        request = Request(
            request_id, prompt, sampling, min(sampling.max_tokens or room, room),
            () if sampling.ignore_eos else self._decoder.eos_ids, deadline, publish,
            self._tokenizer, self._token_bytes,
        )  # fmt: skip
        # Forked while it stands at its start.
        forks = [constraint and constraint.fork() for _ in range(1, choices)]
        return self._enqueue(
            request,
            tuple(
                Sequence(request, choice, one) for choice, one in enumerate([constraint, *forks])
            ),
        )

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request with CANCELLED before the next step; does nothing once it has ended."""
        self._orders.put(_Cancelled(ticket.key))

    def stats(self) -> EngineStats:
        running = self._scheduler.running_count
        return EngineStats(
            running=running,
            waiting=max(self._held - running, 0),
            blocks_used=self._pool.used_count,
            blocks_total=self._pool.total,
            tokens_generated_total=self._totals.tokens_generated,
            prefill_tokens_total=self._totals.prefill_tokens,
            steps_total=self._totals.steps,
            cancelled_total=self._totals.cancelled,
            preempted_total=self._scheduler.preempted_total,
            blocks_cached=self._pool.cached_count,
            prefix_cache_query_tokens_total=self._scheduler.queried_tokens_total,
            prefix_cache_hit_tokens_total=self._scheduler.found_tokens_total,
        )

    def _check(self, prompt: Prompt, sampling: SamplingParams) -> None:
        weight: torch.Tensor = self._decoder.embed_tokens.weight  # type: ignore[assignment]
        vocabulary, width = weight.shape
        if not prompt.token_ids:
            raise PromptInvalid("The prompt has no token; send at least one.", "messages")
        _check_ids(prompt.token_ids, vocabulary, "messages")
        _check_ids(sampling.stop_token_ids, vocabulary, "stop_token_ids")
        _check_ids(tuple(one for one, _ in sampling.logit_bias), vocabulary, "logit_bias")
        _check_images(prompt.images, len(prompt.token_ids), width, self._decoder.level_count)
        _check_positions(prompt, self._decoder.position_axes)

    @property
    def _places(self) -> int:
        return self._settings.max_running + self._settings.max_waiting

    def _enqueue(self, request: Request, sequences: tuple[Sequence, ...]) -> Ticket:
        with self._gate:
            if not self._open:
                raise EngineStopped
            if self._held + len(sequences) > self._places:
                raise EngineBusy(self._settings.max_waiting)
            key = self._next_key
            self._next_key += len(sequences)
            self._held += len(sequences)
            self._orders.put(_Submitted(key, request, sequences))
        return Ticket(key, request.request_id)

    # From here on: the engine's thread. BaseException is caught there, because a panic in a
    # library's Rust code is no Exception, and neither signals nor exits reach this thread.

    def _live(self) -> None:
        reason: FailureReason = "SHUTTING_DOWN"
        try:
            self._serve()
        except BaseException:
            reason = "INTERNAL"
            self._healthy = False
            _log_failure("the engine has failed and serves no more")
        self._step_begun = None
        with self._gate:
            self._open = False
        self._end_all(reason)
        if not self._healthy:
            self._on_fatal()

    def _serve(self) -> None:
        while self._take_orders():
            self._step_begun = time.monotonic()
            self._end_overdue()
            step = self._scheduler.plan()
            self._runner.retain(self._scheduler.running_keys)
            if step.chunks:
                self._publish(step, self._run(step))
                self._runner.retain(self._scheduler.running_keys)
            self._step_begun = None

    def _take_orders(self) -> bool:
        """Applies what came in, waiting only where there is nothing to do; False: stop."""
        try:
            while True:
                if not self._obey(self._orders.get(block=not self._sequences)):
                    return False
        except Empty:
            return True

    def _obey(self, order: _Order) -> bool:
        match order:
            case _Submitted(key):
                self._register(order)
                self._begin(key)
            case _Cancelled(key) if key in self._requests:
                self._totals.cancelled += 1
                self._fail(self._requests[key], "CANCELLED")
            case _Cancelled():
                pass
            case _Stopped():
                return False
        return True

    def _register(self, order: _Submitted) -> None:
        keyed = dict(enumerate(order.sequences, start=order.key))
        self._requests[order.key] = order.request
        self._sequences |= keyed
        order.request.open |= keyed.keys()

    def _begin(self, key: int) -> None:
        try:
            self._schedule(key)
        except BaseException:
            self._log_failed(key)
            self._fail(self._requests[key], "INTERNAL")

    def _schedule(self, key: int) -> None:
        sequence, settings = self._sequences[key], self._settings
        shares = settings.prefix_cache and self._decoder.stateful is None
        keys = sequence.block_keys(settings.block_size) if shares else None
        self._scheduler.add(key, len(sequence.token_ids), sequence.request.longest, keys)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for request, reason in [(one, _ends_now(one, now)) for one in self._requests.values()]:
            if reason is not None:
                self._fail(request, reason)

    def _run(self, step: Step) -> dict[int, Sampled | None]:
        """The sampled token of each sampling sequence; None where a sequence failed."""
        try:
            tokens = self._sampled(step)
        except BaseException:
            _log_failure("a step failed; its sequences are run one by one")
            tokens = self._run_apart(step)
        # Whoever failed had nobody beside it to prove the model sound.
        if tokens and not any(tokens.values()) and not self._probe():
            raise ModelBroken
        return tokens

    def _sampled(self, step: Step) -> dict[int, Sampled | None]:
        for chunk in step.chunks:
            self._sequences[chunk.key].start()
        predictions = self._runner.run(step, self._sequences)
        tokens: dict[int, Sampled | None] = dict.fromkeys(predictions.keys)
        draws = self._draws(predictions.keys, predictions.whole)
        if draws:
            whole = len(draws) == len(tokens)
            logits = predictions.logits if whole else predictions.logits[list(draws)]
            keys = [predictions.keys[row] for row in draws]
            best = [predictions.best[row] for row in draws]
            tokens.update(zip(keys, sample(logits, [*draws.values()], best), strict=True))
        return tokens

    def _draws(self, keys: Iterable[int], finite: Iterable[bool]) -> dict[int, Draw]:
        """How each row is to be drawn; rows that failed are not among them."""
        draws: dict[int, Draw] = {}
        for row, (key, whole) in enumerate(zip(keys, finite, strict=True)):
            if whole:
                try:
                    draws[row] = self._sequences[key].draw()
                except BaseException:
                    self._log_failed(key)
        return draws

    def _run_apart(self, step: Step) -> dict[int, Sampled | None]:
        tokens: dict[int, Sampled | None] = {}
        for part in step.apart():
            try:
                tokens |= self._sampled(part)
            except BaseException:
                key = part.chunks[0].key
                tokens[key] = None
                self._log_failed(key)
        return tokens

    def _log_failed(self, key: int) -> None:
        _log_failure("a sequence failed", request_id=self._sequences[key].request.request_id)

    def _probe(self) -> bool:
        try:
            return self._runner.probe()
        except BaseException:
            _log_failure("the decoder fails on a known token")
            return False

    def _publish(self, step: Step, tokens: dict[int, Sampled | None]) -> None:
        self._scheduler.commit(step)
        self._count(step)
        for key, sampled in tokens.items():
            # A choice that failed has ended its siblings.
            if key in self._sequences:
                self._advance(key, sampled)

    def _count(self, step: Step) -> None:
        self._totals.steps += 1
        self._totals.prefill_tokens += sum(
            chunk.length for chunk in step.chunks if self._sequences[chunk.key].generated == 0
        )

    def _advance(self, key: int, sampled: Sampled | None) -> None:
        request = self._sequences[key].request
        taken = None if sampled is None else self._taken(key, sampled)
        if taken is None:
            self._fail(request, "INTERNAL")
            return
        self._totals.tokens_generated += 1
        delta, finished = taken
        if finished is not None:
            self._finish(key, delta, finished)
        elif not _told(request, delta):
            self._fail(request, "INTERNAL")

    def _taken(self, key: int, sampled: Sampled) -> tuple[Delta, Finished | None] | None:
        """What the token lets out, and the choice's end if it was the last; None: it failed."""
        sequence = self._sequences[key]
        try:
            delta, reason = sequence.take(sampled)
            if sequence.choice == 0 and sequence.generated == 1:
                self._schedule_others(key)
            if reason is None:
                return delta, None
            return delta, sequence.finished(reason, self._scheduler.cached(key))
        except BaseException:
            self._log_failed(key)
            return None

    def _schedule_others(self, first: int) -> None:
        for key in sorted(self._sequences[first].request.open - {first}):
            self._schedule(key)

    def _finish(self, key: int, delta: Delta, finished: Finished) -> None:
        """Ends one choice, its blocks free before its end is told."""
        request = self._sequences[key].request
        self._free(key)
        if not (_told(request, delta) and _told(request, finished)):
            self._fail(request, "INTERNAL")
        elif not request.open:
            self._forget(request)

    def _fail(self, request: Request, reason: FailureReason) -> None:
        """Ends a request with all its choices."""
        self._forget(request)
        try:
            for key in sorted(request.open):
                self._free(key, spoiled=reason == "INTERNAL")
        finally:
            _told(request, Failed(reason))

    def _forget(self, request: Request) -> None:
        self._requests = {key: one for key, one in self._requests.items() if one is not request}

    def _free(self, key: int, *, spoiled: bool = False) -> None:
        sequence = self._sequences.pop(key)
        sequence.request.open.discard(key)
        with self._gate:
            self._held -= 1
        self._scheduler.remove(key, spoiled=spoiled)

    def _end_all(self, reason: FailureReason) -> None:
        for order in _drained(self._orders):
            if isinstance(order, _Submitted):
                self._register(order)
        for request in list(self._requests.values()):
            try:
                self._fail(request, reason)
            except BaseException:
                # Nobody may be left waiting, whatever broke.
                _log_failure("blocks could not be freed")


def _log_failure(message: str, request_id: str | None = None) -> None:
    # A log that nobody takes any more must not leave waiters untold.
    with contextlib.suppress(Exception):
        # As text: a rendering with local variables prints prompts, and takes seconds over tensors.
        logger().error(message, request_id=request_id, traceback=traceback.format_exc())


def _ends_now(request: Request, now: float) -> FailureReason | None:
    try:
        return "DEADLINE" if request.overdue(now) else None
    except BaseException:
        _log_failure("a sequence failed", request_id=request.request_id)
        return "INTERNAL"


def _told(request: Request, event: Event) -> bool:
    """Publishes; False where the listener fails, which is no other request's concern."""
    try:
        request.publish(event)
    except BaseException:
        _log_failure("a listener failed", request_id=request.request_id)
        return False
    return True


def _drained(orders: "SimpleQueue[_Order]") -> Iterator[_Order]:
    while True:
        try:
            yield orders.get_nowait()
        except Empty:
            return


def _runner(decoder: DecoderParts, block_count: int, block_size: int) -> Runner | StatefulRunner:
    if decoder.stateful is not None:
        return StatefulRunner(decoder)
    return Runner(decoder, block_count, block_size)


def _limits(runner: Runner | StatefulRunner, stretch: float) -> StepLimits | None:
    prices = runner.prices() if stretch else None
    return None if prices is None else StepLimits(prices, stretch)


def _block_count(decoder: DecoderParts, settings: EngineSettings) -> int:
    values = decoder.layer_count * 2 * decoder.kv_head_count * decoder.head_dim
    block_bytes = values * settings.block_size * decoder.dtype.itemsize
    longest = math.ceil(decoder.context_length / settings.block_size)
    return min(settings.kv_bytes // block_bytes, longest * settings.max_running) + 1


def _check_ids(token_ids: tuple[int, ...], vocabulary: int, field: str) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
        raise PromptInvalid(f"Token ids must be at least 0 and below {vocabulary}.", field)


def _check_images(
    images: tuple[ImageSpan, ...], prompt_tokens: int, width: int, level_count: int
) -> None:
    end = 0
    for number, image in enumerate(images):
        field = f"images[{number}]"
        if tuple(image.rows.shape) != (image.length, width) or not image.rows.is_floating_point():
            found = f"{image.rows.dtype} {list(image.rows.shape)}"
            raise PromptInvalid(
                f"Rows must be floats of shape [{image.length}, {width}]; found {found}.", field
            )
        _check_levels(image, level_count, field)
        if image.start < end or image.length < 1 or image.start + image.length > prompt_tokens:
            raise PromptInvalid(
                "Images must be in order, apart, and inside the prompt; found tokens "
                f"{image.start} to {image.start + image.length} of {prompt_tokens}.",
                field,
            )
        end = image.start + image.length


def _check_levels(image: ImageSpan, count: int, field: str) -> None:
    if len(image.levels) != count:
        raise PromptInvalid(
            f"An image of this model has {count} deepstack levels beside its rows; "
            f"found {len(image.levels)}.",
            field,
        )
    for level in image.levels:
        if level.shape != image.rows.shape or not level.is_floating_point():
            raise PromptInvalid(
                f"Levels must be floats of the rows' shape {list(image.rows.shape)}; "
                f"found {level.dtype} {list(level.shape)}.",
                field,
            )


def _check_positions(prompt: Prompt, axes: int) -> None:
    """Positions come from the prompt's own pictures, but grids may be their senders' claims."""
    placed, delta, tokens = prompt.positions, prompt.position_delta, len(prompt.token_ids)
    if axes == 1 and (placed is not None or delta):
        raise PromptInvalid(
            "This model places every token at its index; send no positions.", "messages"
        )
    if tokens + delta < 0 or (placed is None and delta):
        raise PromptInvalid("Positions must be at least 0 and come with their delta.", "messages")
    if placed is None:
        return
    if placed.dtype != torch.int64 or tuple(placed.shape) != (axes, tokens):
        raise PromptInvalid(
            f"Positions must be int64 of shape [{axes}, {tokens}]; "
            f"found {placed.dtype} {list(placed.shape)}.",
            "messages",
        )
    if int(placed.min()) < 0:
        raise PromptInvalid("Positions must be at least 0.", "messages")
