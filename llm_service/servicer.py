"""The walk of a request: check, admit, measure, fetch, submit, stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import chiasm
from chiasm import wire
from chiasm.errors import ChiasmError, Reason
from chiasm.models.families import family_of
from chiasm.models.language import LanguageHalf
from chiasm.models.wire import identity_to_wire
from chiasm.rpc import limits
from chiasm.rpc.server import Call, Service, StreamMethod, UnaryMethod
from chiasm.v1 import llm_service_pb2
from llm_service.admission import Permits
from llm_service.constraint.compiler import Compiler
from llm_service.embeddings import Rows
from llm_service.engine.engine import Engine
from llm_service.engine.values import (
    Constraint,
    Delta,
    Event,
    Failed,
    Finished,
    ImageSpan,
    Prompt,
    SamplingParams,
    TokenLogprob,
)
from llm_service.mailbox import Mailbox
from llm_service.metrics import LlmMetrics
from llm_service.picture_methods import PictureMethods
from llm_service.pictures import Measured, PictureReader, Ready
from llm_service.prompt import Layout, PromptBuilder, Run
from llm_service.references import References
from llm_service.request import (
    Conversation,
    check_model,
    check_token_ids,
    read_choice_count,
    read_conversation,
    read_salt,
    read_sampling,
    refuse_unserved,
)
from llm_service.settings import LlmSettings
from llm_service.vision.source import Asked

_S = llm_service_pb2
Answer = wire.Wired[llm_service_pb2.GenerateResponse]
_SOURCES = {
    "none": _S.VISION_SOURCE_NONE,
    "local": _S.VISION_SOURCE_LOCAL,
    "remote": _S.VISION_SOURCE_REMOTE,
}
_REASONS = {"stop": _S.FINISH_REASON_STOP, "length": _S.FINISH_REASON_LENGTH}
_FAILURES = {
    "DEADLINE": ChiasmError(Reason.DEADLINE, "The deadline passed before the answer was whole."),
    "CANCELLED": ChiasmError(Reason.CANCELLED, "The call was cancelled."),
    "SHUTTING_DOWN": ChiasmError(Reason.NOT_READY, "The service is stopping; try another replica."),
    "INTERNAL": ChiasmError(
        Reason.INTERNAL, "This answer failed; the log holds the detail beside the request id."
    ),
}


@dataclass
class Clock:
    """Times of one request, time.monotonic."""

    arrived: float = field(default_factory=time.monotonic)
    submitted: float = 0.0
    first_token: float = 0.0


@dataclass(frozen=True)
class Work:
    """What the engine is asked for."""

    prompt: Prompt
    sampling: SamplingParams
    choices: int = 1
    constraint: Constraint | None = None


class LlmServicer:
    """The methods of `chiasm.v1.LlmService`."""

    def __init__(
        self,
        settings: LlmSettings,
        model: LanguageHalf,
        engine: Engine,
        pictures: PictureReader,
        references: References,
        constraints: Compiler,
        workers: Executor,
        metrics: LlmMetrics,
        is_draining: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._model = model
        self._engine = engine
        self._pictures = pictures
        self._constraints = constraints
        self._workers = workers
        self._metrics = metrics
        self._prompts = PromptBuilder(model)
        self._permits = Permits(settings.max_active_requests, metrics.refused.inc)
        self._held = PictureMethods(settings, model.contract, pictures, references, self._permits)
        self._ready_at = int(time.time())
        self._is_draining = is_draining

    def service(self) -> Service:
        """The service as a server takes it."""
        return Service(
            "chiasm.v1.LlmService",
            {
                "Generate": StreamMethod(_S.GenerateRequest, self.generate),
                "CountTokens": UnaryMethod(_S.CountTokensRequest, self.count_tokens),
                "HoldEmbedding": UnaryMethod(_S.HoldEmbeddingRequest, self._held.hold),
                "PoolImage": UnaryMethod(_S.PoolImageRequest, self._held.pool),
                "GetModel": UnaryMethod(_S.LlmServiceGetModelRequest, self.get_model),
                "GetLoad": UnaryMethod(_S.LlmServiceGetLoadRequest, self.get_load),
            },
        )

    async def generate(
        self, request: wire.Wired[llm_service_pb2.GenerateRequest], call: Call
    ) -> AsyncIterator[Answer]:
        """Answers a conversation."""
        clock = Clock()
        message = request.message
        check_model(message.model, self._settings.served_name)
        refuse_unserved(message)
        conversation = self._conversation(message.messages, request.buffers, message.tenant)
        sampling = read_sampling(message.sampling, self._model.generation)
        check_token_ids(sampling, self._model.vocab_size)
        choices, salt = read_choice_count(message.sampling), read_salt(message)
        with self._permits.hold(choices):
            layout, measured = await self._laid_out(conversation)
            check_length(layout, message.sampling.max_token_count, self._engine.context_length)
            asked = Asked(message.tenant, call.request_id, self._deadline(call))
            constraint = await self._constrained(message, sampling, asked.deadline)
            ready = await self._pictures.fetch(measured, asked)
            self._count(layout, ready)
            work = Work(as_prompt(layout, ready, salt), sampling, choices, constraint)
            async for answer in self._run(call, work, layout, asked, ready, clock):
                yield answer

    async def count_tokens(
        self, request: wire.Wired[llm_service_pb2.CountTokensRequest], call: Call
    ) -> wire.Wired[llm_service_pb2.CountTokensResponse]:
        """Counts a prompt; encodes nothing."""
        message = request.message
        check_model(message.model, self._settings.served_name)
        conversation = self._conversation(message.messages, request.buffers, message.tenant)
        with self._permits.hold():
            layout, _ = await self._laid_out(conversation)
        return wire.plain(
            _S.CountTokensResponse(
                total_token_count=len(layout.token_ids),
                text_token_count=layout.text_token_count,
                image_token_count=layout.image_token_count,
                context_length=self._engine.context_length,
            )
        )

    async def get_model(
        self, request: wire.Wired[llm_service_pb2.LlmServiceGetModelRequest], call: Call
    ) -> wire.Wired[llm_service_pb2.LlmServiceGetModelResponse]:
        """Describes the model and the limits."""
        settings, contract = self._settings, self._model.contract
        family = family_of(self._model.family)
        return wire.plain(
            _S.LlmServiceGetModelResponse(
                model_id=settings.served_name,
                family=self._model.family,
                context_length=self._engine.context_length,
                encoder_identity=identity_to_wire(contract.expected_identity),
                level_count=contract.level_count,
                vision_source=_SOURCES[settings.vision],
                max_image_count=settings.max_images,
                max_image_bytes=settings.max_image_bytes,
                max_image_pixels=settings.max_image_pixels,
                max_message_bytes=limits.MAX_MESSAGE_BYTES,
                ready_unix_seconds=self._ready_at,
                version=chiasm.__version__,
                family_title=family.title,
                needs_grid_thw="grid_thw" in family.needs,
                needs_image_size="image_size" in family.needs,
                image_options=self._model.options,
                layers=self._model.layers,
                reference_seconds=max(1, int(settings.reference_seconds)),
            )
        )

    async def get_load(
        self, request: wire.Wired[llm_service_pb2.LlmServiceGetLoadRequest], call: Call
    ) -> wire.Wired[llm_service_pb2.LlmServiceGetLoadResponse]:
        """Describes the work in hand."""
        stats = self._engine.stats()
        return wire.plain(
            _S.LlmServiceGetLoadResponse(
                running_count=stats.running,
                waiting_count=stats.waiting,
                kv_blocks_used=stats.blocks_used,
                kv_blocks_total=stats.blocks_total,
                active_call_count=self._permits.held,
                draining=self._is_draining(),
            )
        )

    def _conversation(
        self,
        messages: Sequence[llm_service_pb2.Message],
        buffers: wire.Buffers,
        tenant: str,
    ) -> Conversation:
        return read_conversation(
            messages, buffers, tenant=tenant, max_images=self._settings.max_images
        )

    async def _laid_out(self, conversation: Conversation) -> tuple[Layout, list[Measured]]:
        check_text(self._prompts.least_tokens(conversation), self._engine.context_length)
        loop = asyncio.get_running_loop()
        measuring = asyncio.ensure_future(
            self._pictures.measure(conversation.pictures, conversation.tenant)
        )
        rendering = loop.run_in_executor(self._workers, self._prompts.render, conversation)
        measured, rendered = await asyncio.gather(measuring, rendering)
        forms = [one.form for one in measured]
        check_text(sum(form.row_count for form in forms), self._engine.context_length)
        laying = loop.run_in_executor(self._workers, self._prompts.lay_out, rendered, forms)
        return await laying, measured

    async def _constrained(
        self,
        message: llm_service_pb2.GenerateRequest,
        sampling: SamplingParams,
        deadline: float,
    ) -> Constraint | None:
        if not message.HasField("constraint"):
            return None
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await self._constraints.compile(
                    message.constraint, ignore_eos=sampling.ignore_eos
                )
        except TimeoutError:
            raise ChiasmError(Reason.DEADLINE, _FAILURES["DEADLINE"].message) from None

    def _deadline(self, call: Call) -> float:
        ours = time.monotonic() + self._settings.request_timeout_seconds
        return ours if call.deadline is None else min(ours, call.deadline)

    def _count(self, layout: Layout, ready: Sequence[Ready]) -> None:
        self._metrics.prompt_tokens.observe(len(layout.token_ids))
        self._metrics.image_tokens.inc(layout.image_token_count)
        for one in ready:
            source = _S.ImageSource.Name(one.source).removeprefix("IMAGE_SOURCE_").lower()
            self._metrics.images.labels(source).inc()
            self._metrics.fetch_seconds.labels(source).observe(one.fetch_seconds)

    async def _run(
        self,
        call: Call,
        work: Work,
        layout: Layout,
        asked: Asked,
        ready: Sequence[Ready],
        clock: Clock,
    ) -> AsyncIterator[Answer]:
        mailbox = Mailbox()
        clock.submitted = time.monotonic()
        ticket = self._engine.submit(
            call.request_id, work.prompt, work.sampling, asked.deadline, mailbox.put,
            choices=work.choices, constraint=work.constraint,
        )  # fmt: skip
        try:
            await call.accept()
            ends: dict[int, Finished] = {}
            while len(ends) < work.choices:
                deltas, ended = gathered(await mailbox.take())
                ends |= ended
                if deltas:
                    self._observe_first(clock)
                    yield as_deltas(deltas)
            finished = [ends[choice] for choice in range(work.choices)]
            call.notes.update(_notes(finished, ready))
            yield as_finished(finished, layout, ready, clock)
        finally:
            # Frees the blocks if the caller left; a sequence that ended does not mind.
            self._engine.cancel(ticket)

    def _observe_first(self, clock: Clock) -> None:
        if not clock.first_token:
            clock.first_token = time.monotonic()
            self._metrics.first_token_seconds.observe(clock.first_token - clock.arrived)


def check_text(least_tokens: int, context_length: int) -> None:
    """Raises CONTEXT_LENGTH_EXCEEDED for messages that cannot fit, before they are tokenized."""
    if least_tokens > context_length:
        raise ChiasmError(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"The model's context holds {context_length} tokens, but the messages have at least "
            f"{least_tokens}. Shorten the messages.",
            "messages",
        )


def check_length(layout: Layout, max_token_count: int, context_length: int) -> None:
    """Raises CONTEXT_LENGTH_EXCEEDED if prompt and the answer asked for exceed the context.

    A `max_token_count` of 0 asks for none in particular.
    """
    prompt, wanted = len(layout.token_ids), max_token_count or 1
    if prompt + wanted > context_length:
        raise ChiasmError(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"The model's context holds {context_length} tokens, but the messages have {prompt} "
            f"({layout.image_token_count} of them pictures) and the answer may take {wanted}. "
            "Shorten the messages, send fewer pictures or ask for fewer tokens.",
            "messages",
        )


def as_prompt(layout: Layout, ready: Sequence[Ready], salt: bytes) -> Prompt:
    """The engine's prompt."""
    spans = tuple(_as_span(run, ready[run.picture].rows) for run in layout.runs)
    return Prompt(layout.token_ids, spans, salt, layout.positions, layout.position_delta)


def _as_span(run: Run, rows: Rows) -> ImageSpan:
    here = slice(run.first_row, run.first_row + run.length)
    return ImageSpan(
        start=run.start,
        length=run.length,
        rows=rows.rows[here],
        # Of the whole image; where the run begins in it tells its runs apart.
        digest=rows.digest and rows.digest + run.first_row.to_bytes(8, "little"),
        levels=tuple(level[here] for level in rows.levels),
    )


def gathered(events: Sequence[Event]) -> tuple[list[Delta], dict[int, Finished]]:
    """One delta a choice for all that came, and the choices that ended. Raises a failure."""
    by_choice: dict[int, list[Delta]] = {}
    ends: dict[int, Finished] = {}
    for event in events:
        match event:
            case Delta():
                by_choice.setdefault(event.choice, []).append(event)
            case Finished():
                ends[event.choice] = event
            case Failed():
                told = _FAILURES[event.reason]
                raise ChiasmError(told.reason, told.message)
    return [_merged(choice, deltas) for choice, deltas in by_choice.items()], ends


def _merged(choice: int, deltas: Sequence[Delta]) -> Delta:
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(told for delta in deltas for told in delta.logprobs),
        choice=choice,
    )


def as_deltas(deltas: Sequence[Delta]) -> Answer:
    """The message of deltas."""
    wired = [
        _S.Delta(
            choice_index=delta.choice,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=[_as_logprob(told) for told in delta.logprobs],
        )
        for delta in deltas
    ]
    return wire.plain(_S.GenerateResponse(delta=_S.DeltaBatch(deltas=wired)))


def _as_logprob(told: TokenLogprob) -> llm_service_pb2.TokenLogprob:
    return _S.TokenLogprob(
        token_id=told.token_id,
        token=told.token,
        logprob=told.logprob,
        top=[_as_logprob(one) for one in told.top],
    )


def as_finished(
    finished: Sequence[Finished], layout: Layout, ready: Sequence[Ready], clock: Clock
) -> Answer:
    """The message of the end of all choices. The first one's prompt was computed for all."""
    first = finished[0]
    encode = max((one.encode_seconds for one in ready), default=0.0)
    fetch = max((one.fetch_seconds for one in ready), default=0.0)
    timings = _S.GenerateTimings(
        queue_seconds=first.queue_seconds,
        fetch_seconds=fetch,
        encode_seconds=encode,
        transfer_seconds=max((o.fetch_seconds - o.encode_seconds for o in ready), default=0.0),
        prefill_seconds=first.prefill_seconds,
        decode_seconds=max(one.decode_seconds for one in finished),
        total_seconds=time.monotonic() - clock.arrived,
    )
    usage = _S.Usage(
        prompt_token_count=len(layout.token_ids),
        text_token_count=layout.text_token_count,
        image_token_count=layout.image_token_count,
        cached_token_count=first.cached_tokens,
        completion_token_count=sum(one.completion_tokens for one in finished),
    )
    end = _S.Finished(
        choices=[
            _S.FinishedChoice(choice_index=one.choice, reason=_REASONS[one.reason])
            for one in finished
        ],
        usage=usage,
        timings=timings,
        image_paths=[one.path() for one in ready],
    )
    return wire.plain(_S.GenerateResponse(finished=end))


def _notes(finished: Sequence[Finished], ready: Sequence[Ready]) -> dict[str, object]:
    return {
        "prompt_tokens": finished[0].prompt_tokens,
        "completion_tokens": sum(one.completion_tokens for one in finished),
        "images": len(ready),
        "finish": ",".join(one.reason for one in finished),
    }
