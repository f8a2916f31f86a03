"""A real `chiasm.v1.LlmService` on a real socket that says what a script tells it to.

For tests of whatever stands before an LLM service: no model is loaded, every request is recorded,
and delays and failures come where the script puts them.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import CollectorRegistry

from chiasm import tensors, wire
from chiasm.errors import ChiasmError, Reason
from chiasm.rpc.callers import ServerTls
from chiasm.rpc.server import Call, Server, ServerSettings, Service, StreamMethod, UnaryMethod
from chiasm.tracing.spans import current_trace
from chiasm.v1 import image_pb2, llm_service_pb2

_S = llm_service_pb2
MODEL = "scripted/tiny"
WIDTH = 8
# Tokens are bytes, and these.
FIRST_TOKEN, PICTURE_TOKEN = 256, 257
PICTURE_TOKENS = 4


def finished(
    *reasons: "llm_service_pb2.FinishReason.ValueType",
) -> llm_service_pb2.Finished:
    """An end with figures that differ from each other, so that a mix-up shows.

    There is a choice for each of `reasons`, or one that stopped.
    """
    return _S.Finished(
        choices=[
            _S.FinishedChoice(choice_index=index, reason=reason)
            for index, reason in enumerate(reasons or [_S.FINISH_REASON_STOP])
        ],
        usage=_S.Usage(
            prompt_token_count=30,
            text_token_count=12,
            image_token_count=18,
            cached_token_count=5,
            completion_token_count=7,
        ),
        timings=_S.GenerateTimings(
            queue_seconds=0.001,
            fetch_seconds=0.005,
            encode_seconds=0.003,
            transfer_seconds=0.002,
            prefill_seconds=0.010,
            decode_seconds=0.020,
            total_seconds=0.040,
        ),
        image_paths=[
            _S.ImagePath(
                message_index=0,
                part_index=1,
                source=_S.IMAGE_SOURCE_REMOTE,
                encoder_name="eye-1",
                placeholder_count=18,
                identity_checked=True,
                encoder_cache_hit=True,
            )
        ],
    )


@dataclass(frozen=True)
class Script:
    """What the service does with each request. `pause_seconds` comes before each text.

    `deltas`, where there are any, are sent in place of the texts, each list in one message.
    """

    texts: Sequence[str] = ("Hello", ", ", "world")
    deltas: Sequence[Sequence[llm_service_pb2.Delta]] = ()
    refusal: ChiasmError | None = None
    failure: ChiasmError | None = None
    admission_seconds: float = 0.0
    pause_seconds: float = 0.0
    end: llm_service_pb2.Finished | None = field(default_factory=finished)


@dataclass(frozen=True)
class Received:
    """One request as it came."""

    wired: wire.Wired[llm_service_pb2.GenerateRequest]
    request_id: str
    deadline: float | None
    trace_parent: str
    trace_state: str = ""

    @property
    def message(self) -> llm_service_pb2.GenerateRequest:
        return self.wired.message

    def image(self, message: int, part: int) -> bytes:
        """The bytes of a picture part."""
        return bytes(self.wired.data(self.message.messages[message].parts[part].image.data))

    def features(self, message: int, part: int) -> tensors.Array:
        """The features of an embedding part."""
        features = self.message.messages[message].parts[part].embedding.features
        return tensors.from_wire(features, self.wired.data(features.data))


class ScriptedLlm:
    """The service. Change `script` or `card` at any time."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.card = _S.LlmServiceGetModelResponse(
            model_id=MODEL,
            family="scripted",
            context_length=128,
            encoder_identity=image_pb2.EncoderIdentity(model_id=MODEL, width=WIDTH),
            max_image_count=8,
            ready_unix_seconds=1_700_000_000,
        )
        self.received: list[Received] = []
        # Texts that are refused as prompts, whatever the script.
        self.refused_prompts: set[str] = set()
        self.tokenized: list[wire.Wired[llm_service_pb2.TokenizeRequest]] = []
        self.detokenized: list[llm_service_pb2.DetokenizeRequest] = []
        self.running = 0
        self.card_reads = 0

    @asynccontextmanager
    async def serving(
        self, port: int = 0, *, tls: ServerTls | None = None
    ) -> AsyncIterator[Server]:
        """A server that is ready, on a free port unless one is named."""
        settings = ServerSettings("127.0.0.1", port, 0, 0, 60)
        server = Server(settings, self._service(), CollectorRegistry(), tls=tls)
        await server.start()
        await server.ready()
        try:
            yield server
        finally:
            await server.abort()

    @property
    def last(self) -> Received:
        return self.received[-1]

    def _service(self) -> Service:
        return Service(
            "chiasm.v1.LlmService",
            {
                "Generate": StreamMethod(_S.GenerateRequest, self._generate),
                "Tokenize": UnaryMethod(_S.TokenizeRequest, self._tokenize),
                "Detokenize": UnaryMethod(_S.DetokenizeRequest, self._detokenize),
                "HoldEmbedding": UnaryMethod(_S.HoldEmbeddingRequest, self._hold),
                "PoolImage": UnaryMethod(_S.PoolImageRequest, self._pool),
                "GetModel": UnaryMethod(_S.LlmServiceGetModelRequest, self._get_model),
            },
        )

    async def _get_model(
        self, request: wire.Wired[llm_service_pb2.LlmServiceGetModelRequest], call: Call
    ) -> wire.Wired[llm_service_pb2.LlmServiceGetModelResponse]:
        self.card_reads += 1
        return wire.plain(self.card)

    async def _hold(
        self, request: wire.Wired[llm_service_pb2.HoldEmbeddingRequest], call: Call
    ) -> wire.Wired[llm_service_pb2.HoldEmbeddingResponse]:
        """Rows of zeros, whatever the picture."""
        rows = tensors.from_numpy(np.zeros((PICTURE_TOKENS, WIDTH), np.float32))
        buffers = wire.Buffers()
        wanted = request.message.return_features
        embedding = image_pb2.ImageEmbedding(
            features=tensors.to_wire(rows, buffers) if wanted else tensors.describe(rows),
            row_count=PICTURE_TOKENS,
            placeholder_count=PICTURE_TOKENS,
        )
        answer = _S.HoldEmbeddingResponse(
            reference=image_pb2.EmbeddingReference(id="emb_scripted"),
            embedding=embedding,
            expires_unix_seconds=1_700_000_600,
            path=_S.ImagePath(source=_S.IMAGE_SOURCE_REMOTE, placeholder_count=PICTURE_TOKENS),
        )
        return wire.Wired(answer, buffers)

    async def _pool(
        self, request: wire.Wired[llm_service_pb2.PoolImageRequest], call: Call
    ) -> wire.Wired[llm_service_pb2.PoolImageResponse]:
        path = _S.ImagePath(source=_S.IMAGE_SOURCE_REMOTE, placeholder_count=PICTURE_TOKENS)
        return wire.plain(_S.PoolImageResponse(values=[0.5] * WIDTH, path=path))

    async def _tokenize(
        self, request: wire.Wired[llm_service_pb2.TokenizeRequest], call: Call
    ) -> wire.Wired[llm_service_pb2.TokenizeResponse]:
        self.tokenized.append(request)
        if self.script.refusal is not None:
            raise self.script.refusal
        message = request.message
        ids = list(message.prompt.encode())
        if not message.messages and (
            message.add_special_tokens or not message.HasField("add_special_tokens")
        ):
            ids = [FIRST_TOKEN, *ids]
        for part in (part for one in message.messages for part in one.parts):
            ids += part.text.encode() or [PICTURE_TOKEN] * PICTURE_TOKENS
        answer = _S.TokenizeResponse(token_ids=ids, context_length=self.card.context_length)
        return wire.plain(answer)

    async def _detokenize(
        self, request: wire.Wired[llm_service_pb2.DetokenizeRequest], call: Call
    ) -> wire.Wired[llm_service_pb2.DetokenizeResponse]:
        self.detokenized.append(request.message)
        if self.script.refusal is not None:
            raise self.script.refusal
        text = bytes(one for one in request.message.token_ids if one < 256).decode(errors="replace")
        return wire.plain(_S.DetokenizeResponse(text=text))

    async def _generate(
        self, request: wire.Wired[llm_service_pb2.GenerateRequest], call: Call
    ) -> AsyncIterator[wire.Wired[llm_service_pb2.GenerateResponse]]:
        script = self.script
        trace = current_trace()
        self.received.append(
            Received(request, call.request_id, call.deadline, trace.parent, trace.state)
        )
        self.running += 1
        try:
            await asyncio.sleep(script.admission_seconds)
            if script.refusal is not None:
                raise script.refusal
            if request.message.prompt.text in self.refused_prompts:
                raise ChiasmError(Reason.REQUEST_INVALID, "Not this prompt.", "prompt.text")
            await call.accept()
            texts = [[_S.Delta(text=text, token_ids=[i])] for i, text in enumerate(script.texts)]
            for deltas in script.deltas or texts:
                await asyncio.sleep(script.pause_seconds)
                yield wire.plain(_S.GenerateResponse(delta=_S.DeltaBatch(deltas=deltas)))
            if script.failure is not None:
                raise script.failure
            if script.end is not None:
                yield wire.plain(_S.GenerateResponse(finished=script.end))
        finally:
            self.running -= 1
