"""The walk of a request: check, admit, measure, fetch, submit, stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import chiasm
from chiasm import wire
from chiasm.errors import ChiasmError, Reason
from chiasm.models.families import family_of
from chiasm.models.language import LanguageHalf
from chiasm.models.wire import identity_to_wire
from chiasm.rpc import limits
from chiasm.rpc.server import Call, Service, StreamMethod, UnaryMethod
from chiasm.tracing import names, spans
from chiasm.v1 import llm_service_pb2
from llm_service import traces
from llm_service.admission import Permits
from llm_service.answer import (
    FAILURES,
    Answer,
    Clock,
    as_deltas,
    as_finished,
    gathered,
    rests_of,
)
from llm_service.constraint.compiler import Compiler
from llm_service.embeddings import Rows
from llm_service.engine.engine import Engine
from llm_service.engine.values import (
    Constraint,
    Finished,
    ImageSpan,
    Prompt,
    SamplingParams,
)
from llm_service.mailbox import Mailbox
from llm_service.metrics import LlmMetrics, TokenPace
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
    read_raw_prompt,
    read_salt,
    read_sampling,
    read_variables,
    refuse_beside_prompt,
)
from llm_service.settings import LlmSettings
from llm_service.tools.constraint import ToolConstraints
from llm_service.tools.hermes import Calls
from llm_service.tools.offered import Tools, read_tools
from llm_service.vision.source import Asked

_S = llm_service_pb2
SERVICE = "chiasm.v1.LlmService"
WithMessages = (
    llm_service_pb2.GenerateRequest
    | llm_service_pb2.TokenizeRequest
    | llm_service_pb2.CountTokensRequest
)
_SOURCES = {
    "none": _S.VISION_SOURCE_NONE,
    "local": _S.VISION_SOURCE_LOCAL,
    "remote": _S.VISION_SOURCE_REMOTE,
}


@dataclass(frozen=True)
class Work:
    """What the engine is asked for."""

    prompt: Prompt
    sampling: SamplingParams
    choices: int = 1
    constraint: Constraint | None = None
    # Tools that an answer may call.
    tools: Tools | None = None

    def parsers(self) -> list[Calls]:
        """What tells the calls of each choice from its text; none where there are none."""
        if self.tools is None:
            return []
        forced = self.tools.choice != "auto"
        return [Calls(forced=forced) for _ in range(self.choices)]


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
        self._tools = ToolConstraints(constraints)
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
            SERVICE,
            {
                "Generate": StreamMethod(_S.GenerateRequest, self.generate),
                "CountTokens": UnaryMethod(_S.CountTokensRequest, self.count_tokens),
                "Tokenize": UnaryMethod(_S.TokenizeRequest, self.tokenize),
                "Detokenize": UnaryMethod(_S.DetokenizeRequest, self.detokenize),
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
        if message.HasField("prompt"):
            refuse_beside_prompt(message)
        offered = self._offered(message.tools)
        sampling = read_sampling(message.sampling, self._model.generation)
        check_token_ids(sampling, self._model.vocab_size)
        choices, salt = read_choice_count(message.sampling), read_salt(message)
        with self._permits.hold(choices):
            traces.asked(spans.current(), message, sampling, choices)
            with spans.stage(names.PREPARE):
                layout, measured = await self._prompt_of(request, offered)
                check_length(layout, message.sampling.max_token_count, self._engine.context_length)
                asked = Asked(message.tenant, call.request_id, self._deadline(call))
                constraint = await self._constrained(message, offered, sampling, asked.deadline)
            ready = await self._pictures.fetch(measured, asked)
            self._count(layout, ready)
            prompt = as_prompt(layout, ready, salt)
            work = Work(prompt, sampling, choices, constraint, tools=offered)
            async for answer in self._run(call, work, layout, asked, ready, clock):
                yield answer

    async def count_tokens(
        self, request: wire.Wired[llm_service_pb2.CountTokensRequest], call: Call
    ) -> wire.Wired[llm_service_pb2.CountTokensResponse]:
        """Counts a prompt; encodes nothing."""
        message = request.message
        check_model(message.model, self._settings.served_name)
        offered = self._offered(message.tools)
        conversation = self._conversation(message, request.buffers, offered)
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

    async def tokenize(
        self, request: wire.Wired[llm_service_pb2.TokenizeRequest], call: Call
    ) -> wire.Wired[llm_service_pb2.TokenizeResponse]:
        """The tokens of a text or a conversation; encodes nothing."""
        message = request.message
        check_model(message.model, self._settings.served_name)
        with self._permits.hold():
            if message.HasField("prompt"):
                layout = await self._tokenized(message)
            else:
                offered = self._offered(message.tools)
                layout, _ = await self._laid_out(
                    self._conversation(message, request.buffers, offered)
                )
        return wire.plain(
            _S.TokenizeResponse(
                token_ids=layout.token_ids, context_length=self._engine.context_length
            )
        )

    async def detokenize(
        self, request: wire.Wired[llm_service_pb2.DetokenizeRequest], call: Call
    ) -> wire.Wired[llm_service_pb2.DetokenizeResponse]:
        """The text of tokens."""
        message = request.message
        check_model(message.model, self._settings.served_name)
        with self._permits.hold():
            loop = asyncio.get_running_loop()
            token_ids = tuple(message.token_ids)
            text = await loop.run_in_executor(self._workers, self._prompts.text_of, token_ids)
        return wire.plain(_S.DetokenizeResponse(text=text))

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
                tool_format=self._prompts.tool_format,
                template_variables=sorted(settings.settable_variables),
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

    def _offered(self, message: llm_service_pb2.ToolOptions) -> Tools | None:
        offered = read_tools(message)
        if offered is not None and not self._prompts.tool_format:
            raise ChiasmError(
                Reason.UNSUPPORTED,
                "This model's chat template has no place for tools, or its calls are of a form "
                "that is not served; leave the tools out.",
                "tools.tools_json",
            )
        return offered

    def _conversation(
        self, message: WithMessages, buffers: wire.Buffers, offered: Tools | None
    ) -> Conversation:
        continued, variables = False, dict[str, Any]()
        if not isinstance(message, _S.CountTokensRequest):
            continued = message.continue_final_message
            if message.HasField("chat_template_variables_json"):
                variables = read_variables(
                    message.chat_template_variables_json, self._settings.settable_variables
                )
        conversation = read_conversation(
            message.messages,
            buffers,
            tenant=message.tenant,
            max_images=self._settings.max_images,
            continued=continued,
        )
        tools = () if offered is None else offered.definitions
        return replace(conversation, tools=tools, variables=variables)

    async def _prompt_of(
        self, request: wire.Wired[llm_service_pb2.GenerateRequest], offered: Tools | None
    ) -> tuple[Layout, list[Measured]]:
        message = request.message
        if not message.HasField("prompt"):
            conversation = self._conversation(message, request.buffers, offered)
            return await self._laid_out(conversation)
        prompt = read_raw_prompt(message.prompt)
        check_text(self._prompts.least_of(prompt), self._engine.context_length)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, self._prompts.raw, prompt), []

    async def _tokenized(self, message: llm_service_pb2.TokenizeRequest) -> Layout:
        if message.messages:
            raise ChiasmError(
                Reason.REQUEST_INVALID, "A prompt comes without messages; keep one.", "messages"
            )
        special = message.add_special_tokens or not message.HasField("add_special_tokens")
        raw = partial(self._prompts.raw, message.prompt, add_special_tokens=special)
        return await asyncio.get_running_loop().run_in_executor(self._workers, raw)

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
        offered: Tools | None,
        sampling: SamplingParams,
        deadline: float,
    ) -> Constraint | None:
        if offered is None and not message.HasField("constraint"):
            return None
        constraint = message.constraint if message.HasField("constraint") else None
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                if offered is not None:
                    answer = self._tools.enforce(offered, constraint, sampling.ignore_eos)
                    return await answer
                return await self._constraints.compile(
                    message.constraint, ignore_eos=sampling.ignore_eos
                )
        except TimeoutError:
            raise ChiasmError(Reason.DEADLINE, FAILURES["DEADLINE"].message) from None

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
        answering, engine_span = spans.current(), spans.begin(names.ENGINE)
        clock.submitted = time.monotonic()
        ticket = self._engine.submit(
            call.request_id, work.prompt, work.sampling, asked.deadline, mailbox.put,
            choices=work.choices, constraint=work.constraint,
        )  # fmt: skip
        try:
            await call.accept()
            ends: dict[int, Finished] = {}
            calls = work.parsers()
            pace = TokenPace(self._metrics)
            while len(ends) < work.choices:
                deltas, ended = gathered(await mailbox.take())
                ends |= ended
                if deltas:
                    self._observe_first(clock, answering)
                    pace.note(deltas)
                    yield as_deltas(deltas, calls)
            for rest in rests_of(calls):
                yield rest
            finished = [ends[choice] for choice in range(work.choices)]
            call.notes.update(_notes(finished, ready))
            end = as_finished(finished, layout, ready, clock, calls)
            tokens = [one.completion_tokens for one in finished]
            prepared = clock.submitted - clock.arrived
            self._metrics.answered(end.message.finished, tokens, prepared)
            traces.answered(
                answering, engine_span, end.message.finished, clock.submitted, clock.first_token
            )
            yield end
        except BaseException as error:
            spans.raised(engine_span, error)
            raise
        finally:
            engine_span.end()
            # Frees the blocks if the caller left; a sequence that ended does not mind.
            self._engine.cancel(ticket)

    def _observe_first(self, clock: Clock, span: spans.Span) -> None:
        if not clock.first_token:
            clock.first_token = time.monotonic()
            self._metrics.first_token_seconds.observe(clock.first_token - clock.arrived)
            traces.first_token(span, clock.arrived, clock.first_token)


# Clients know an overflow by these words of OpenAI's: litellm, langchain-openai.
_EXCEEDING = "Input tokens exceed the configured limit. "


def _maximum(context_length: int) -> str:
    return f"This model's maximum context length is {context_length} tokens"


def check_text(least_tokens: int, context_length: int) -> None:
    """Raises CONTEXT_LENGTH_EXCEEDED for messages that cannot fit, before they are tokenized."""
    if least_tokens > context_length:
        raise ChiasmError(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"{_EXCEEDING}{_maximum(context_length)}, but the messages "
            f"have at least {least_tokens}. Shorten the messages.",
            "messages",
        )


def check_length(layout: Layout, max_token_count: int, context_length: int) -> None:
    """Raises CONTEXT_LENGTH_EXCEEDED if prompt and the answer asked for exceed the context.

    A `max_token_count` of 0 asks for none in particular.
    """
    prompt, wanted = len(layout.token_ids), max_token_count or 1
    if prompt + wanted > context_length:
        exceeding = _EXCEEDING if prompt >= context_length else ""
        raise ChiasmError(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"{exceeding}{_maximum(context_length)}, but the messages have {prompt} "
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


def _notes(finished: Sequence[Finished], ready: Sequence[Ready]) -> dict[str, object]:
    return {
        "prompt_tokens": finished[0].prompt_tokens,
        "completion_tokens": sum(one.completion_tokens for one in finished),
        "images": len(ready),
        "finish": ",".join(one.reason for one in finished),
    }
