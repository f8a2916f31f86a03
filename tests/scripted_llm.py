"""A real `chiasm.v1.LlmService` on a real socket that says what a script tells it to.

For tests of whatever stands before an LLM service: no model is loaded, every request is recorded,
and delays and failures come where the script puts them.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from chiasm import tensors, wire
from chiasm.errors import ChiasmError
from chiasm.rpc.server import Call, Server, ServerSettings, Service, StreamMethod, UnaryMethod
from chiasm.v1 import image_pb2, llm_service_pb2

_S = llm_service_pb2
MODEL = "scripted/tiny"
WIDTH = 8


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
        self.running = 0
        self.card_reads = 0

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[Server]:
        """A server that is ready, on a free port unless one is named."""
        settings = ServerSettings("127.0.0.1", port, 0, 0, 60)
        server = Server(settings, self._service(), CollectorRegistry())
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
                "GetModel": UnaryMethod(_S.LlmServiceGetModelRequest, self._get_model),
            },
        )

    async def _get_model(
        self, request: wire.Wired[llm_service_pb2.LlmServiceGetModelRequest], call: Call
    ) -> wire.Wired[llm_service_pb2.LlmServiceGetModelResponse]:
        self.card_reads += 1
        return wire.plain(self.card)

    async def _generate(
        self, request: wire.Wired[llm_service_pb2.GenerateRequest], call: Call
    ) -> AsyncIterator[wire.Wired[llm_service_pb2.GenerateResponse]]:
        script = self.script
        self.received.append(Received(request, call.request_id, call.deadline))
        self.running += 1
        try:
            await asyncio.sleep(script.admission_seconds)
            if script.refusal is not None:
                raise script.refusal
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
