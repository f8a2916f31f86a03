"""The LLM service as the gateway sees it: what it serves, whether it is ready, and its answers."""

import asyncio
import time
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chiasm import wire
from chiasm.rpc import limits
from chiasm.rpc.channel import LlmMethods, Method, OpenStream, Request, Response
from chiasm.v1 import llm_service_pb2

Card = llm_service_pb2.LlmServiceGetModelResponse
Answers = OpenStream[llm_service_pb2.GenerateResponse]

CARD_SECONDS: Final = 5.0
_CARD_TIMEOUT_SECONDS: Final = 5.0
_HEALTH_TIMEOUT_SECONDS: Final = 2.0
_LARGE_BYTES: Final = 1 << 20


class Llm:
    """Calls one LLM service, or the replicas behind one name, over `channel`.

    Each call is for a tenant, and its request is marked as that tenant's here: no route can forget.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._large = asyncio.Lock()
        self._card: Card | None = None
        self._read_at = 0.0

    async def card(self, request_id: str, *, max_age: float = CARD_SECONDS) -> Card:
        """What is served, read at most `max_age` seconds ago. Raises ChiasmError."""
        if self._card is None or time.monotonic() - self._read_at > max_age:
            request = wire.plain(llm_service_pb2.LlmServiceGetModelRequest())
            answer = await self._call(
                LlmMethods.GET_MODEL, request, request_id, _CARD_TIMEOUT_SECONDS
            )
            self._card, self._read_at = answer.message, time.monotonic()
        return self._card

    @property
    def known(self) -> Card | None:
        """What was served when it was last read."""
        return self._card

    async def hold(
        self,
        request: wire.Wired[llm_service_pb2.HoldEmbeddingRequest],
        *,
        request_id: str,
        tenant: str,
        seconds: float,
    ) -> wire.Wired[llm_service_pb2.HoldEmbeddingResponse]:
        """Has the service hold a picture's features. Raises ChiasmError."""
        request.message.tenant = tenant
        return await self._call(LlmMethods.HOLD_EMBEDDING, request, request_id, seconds)

    async def pool(
        self,
        request: wire.Wired[llm_service_pb2.PoolImageRequest],
        *,
        request_id: str,
        tenant: str,
        seconds: float,
    ) -> wire.Wired[llm_service_pb2.PoolImageResponse]:
        """One vector of a picture. Raises ChiasmError."""
        request.message.tenant = tenant
        return await self._call(LlmMethods.POOL_IMAGE, request, request_id, seconds)

    async def tokenize(
        self,
        request: wire.Wired[llm_service_pb2.TokenizeRequest],
        *,
        request_id: str,
        tenant: str,
        seconds: float,
    ) -> wire.Wired[llm_service_pb2.TokenizeResponse]:
        """The tokens of a text or a conversation. Raises ChiasmError."""
        request.message.tenant = tenant
        return await self._call(LlmMethods.TOKENIZE, request, request_id, seconds)

    async def detokenize(
        self,
        request: wire.Wired[llm_service_pb2.DetokenizeRequest],
        *,
        request_id: str,
        seconds: float,
    ) -> wire.Wired[llm_service_pb2.DetokenizeResponse]:
        """The text of tokens. Raises ChiasmError."""
        return await self._call(LlmMethods.DETOKENIZE, request, request_id, seconds)

    async def _call(
        self,
        method: Method[Request, Response],
        request: wire.Wired[Request],
        request_id: str,
        seconds: float,
    ) -> wire.Wired[Response]:
        metadata = ((limits.REQUEST_ID, request_id),)
        return await method.call(self._channel, request, timeout=seconds, metadata=metadata)

    async def is_serving(self) -> bool:
        """Whether the service says within two seconds that it can answer."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = await stub.Check(
                health_pb2.HealthCheckRequest(),
                timeout=_HEALTH_TIMEOUT_SECONDS,
                # A connection that is renewed just now is no sign of a service that cannot answer.
                wait_for_ready=True,
            )
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def generate(
        self,
        request: wire.Wired[llm_service_pb2.GenerateRequest],
        *,
        request_id: str,
        tenant: str,
        seconds: float,
    ) -> Answers:
        """The answers to `request`, once the service has accepted it.

        Raises ChiasmError if it does not. The caller cancels what it is given; leaving before that
        cancels the call.
        """
        request.message.tenant = tenant
        answers = LlmMethods.GENERATE.open_stream(
            self._channel,
            await self._serialized(request),
            timeout=seconds,
            metadata=((limits.REQUEST_ID, request_id),),
        )
        try:
            await answers.accepted()
        except BaseException:
            answers.cancel()
            raise
        return answers

    async def _serialized(self, request: wire.Wired[llm_service_pb2.GenerateRequest]) -> bytes:
        """The bytes of a request. Many large ones become ready one by one.

        gRPC copies them on the event loop, which then turns between two of them.
        """
        if request.buffers.byte_count < _LARGE_BYTES:
            return wire.serialize(request)
        async with self._large:
            return await asyncio.to_thread(wire.serialize, request)
