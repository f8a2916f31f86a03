"""Channels, and calls that send and receive `Wired` messages without copying tensors."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from chiasm import wire
from chiasm.errors import from_rpc_error
from chiasm.rpc import limits
from chiasm.rpc.context import traced, value_of
from chiasm.rpc.lined_channel import PlainChannel
from chiasm.rpc.secure_channel import ClientTls, SecureChannel, SecureSyncChannel
from chiasm.v1 import encoder_service_pb2, llm_service_pb2

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Metadata = tuple[tuple[str, str | bytes], ...]

_SERVICE_CONFIG = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        # Without this a draining server still gets calls.
        "healthCheckConfig": {"serviceName": ""},
    }
)


def options() -> list[tuple[str, Any]]:
    """Channel arguments of every client of ours."""
    return [
        ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", limits.KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", limits.PING_TIMEOUT_MS),
        # Notices a peer that accepts bytes and never answers; keepalive alone does not.
        ("grpc.http2.ping_timeout_ms", limits.PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A restarted peer is found again within about a second.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name the time that one attempt to connect may take: a busy machine or a long
        # way needs more than a little.
        ("grpc.min_reconnect_backoff_ms", 3_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
        # Two channels to one address must not share a connection's fate.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.service_config", _SERVICE_CONFIG),
    ]


def open_channel(target: str, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A channel to `target` (`host:port`, or `dns:///name:port` to reach every address).

    Plaintext, or mutual TLS with `tls`. The connection is made at the first call; one that reaches
    nobody for some seconds is given up for a new one (`lined_channel`). Close the channel on the
    loop that opened it.
    """
    if tls is not None:
        return SecureChannel(target, tls, options())
    return PlainChannel(target, options())


def open_sync_channel(target: str, tls: ClientTls | None = None) -> grpc.Channel:
    """The blocking form of `open_channel`, for clients only: no server of ours uses it."""
    if tls is not None:
        return SecureSyncChannel(target, tls, options())
    return grpc.insecure_channel(target, options=options())


@contextmanager
def told_errors() -> Iterator[None]:
    """Turns the failure of a call inside into the ChiasmError that the server told."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def _taken(reading: "asyncio.Future[Any]") -> None:
    """Nobody waits for it any more, so nobody needs to hear how it ended."""
    if not reading.cancelled():
        reading.exception()


class OpenStream(Generic[Response]):
    """A server stream in hand, for a caller that must know whether it was accepted before it reads.

    Iterate it once, and `cancel` it whatever happened: a stream left alone goes on.
    """

    def __init__(self, call: Any, read: Callable[[bytes], wire.Wired[Response]]) -> None:
        self._call = call
        self._read = read
        self._first: list[bytes] = []

    async def accepted(self) -> None:
        """Waits until the server says that an answer will come. Raises ChiasmError if none will.

        Our servers say it by headers that name the request; others by their first message.
        """
        with told_errors():
            if value_of(await self._call.initial_metadata(), limits.REQUEST_ID) is not None:
                return
            received = await self._next()
            if received is not grpc.aio.EOF:
                self._first.append(received)

    async def __aiter__(self) -> AsyncIterator[wire.Wired[Response]]:
        for received in self._first:
            yield self._read(received)
        with told_errors():
            while (received := await self._next()) is not grpc.aio.EOF:
                yield self._read(received)

    async def _next(self) -> Any:
        # A read that is cancelled leaves what the library has allocated for it behind; one whose
        # call is cancelled comes to its end.
        reading = asyncio.ensure_future(self._call.read())
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            reading.add_done_callback(_taken)
            raise

    def cancel(self) -> None:
        """Ends the call at once, here and at the server; harmless after its end."""
        self._call.cancel()


class Method(Generic[Request, Response]):
    """One method of a service: its path and the types of its messages."""

    def __init__(self, path: str, response: type[Response]) -> None:
        self.path = path
        self._response = response

    def read(self, received: bytes) -> wire.Wired[Response]:
        return wire.parse(self._response, received)

    async def call(
        self,
        channel: grpc.aio.Channel,
        request: wire.Wired[Request],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - a gRPC deadline, sent to the server
        metadata: Metadata = (),
    ) -> wire.Wired[Response]:
        """A unary call. Raises ChiasmError."""
        send: Any = channel.unary_unary(self.path, None, None)
        with told_errors():
            received = await send(
                wire.serialize(request), timeout=timeout, metadata=traced(metadata)
            )
        return self.read(received)

    async def stream(
        self,
        channel: grpc.aio.Channel,
        request: wire.Wired[Request],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        metadata: Metadata = (),
    ) -> AsyncGenerator[wire.Wired[Response], None]:
        """A server stream. Raises ChiasmError; leaving the iteration cancels the call."""
        send: Any = channel.unary_stream(self.path, None, None)
        call = send(wire.serialize(request), timeout=timeout, metadata=traced(metadata))
        try:
            with told_errors():
                async for received in call:
                    yield self.read(received)
        finally:
            call.cancel()

    def open_stream(
        self,
        channel: grpc.aio.Channel,
        request: wire.Wired[Request] | bytes,
        *,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> OpenStream[Response]:
        """A server stream whose acceptance and messages are awaited apart.

        A large request may be given as the bytes that `wire.serialize` made in a thread.
        """
        data = request if isinstance(request, bytes) else wire.serialize(request)
        send: Any = channel.unary_stream(self.path, None, None)
        call = send(data, timeout=timeout, metadata=traced(metadata))
        return OpenStream(call, self.read)

    def call_sync(
        self,
        channel: grpc.Channel,
        request: wire.Wired[Request],
        *,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> wire.Wired[Response]:
        """The blocking form of `call`."""
        send: Any = channel.unary_unary(self.path, None, None)
        with told_errors():
            received = send(wire.serialize(request), timeout=timeout, metadata=traced(metadata))
        return self.read(received)

    def stream_sync(
        self,
        channel: grpc.Channel,
        request: wire.Wired[Request],
        *,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> Iterator[wire.Wired[Response]]:
        """The blocking form of `stream`."""
        send: Any = channel.unary_stream(self.path, None, None)
        call = send(wire.serialize(request), timeout=timeout, metadata=traced(metadata))
        try:
            with told_errors():
                for received in call:
                    yield self.read(received)
        finally:
            call.cancel()


_E, _L = encoder_service_pb2, llm_service_pb2
_ENCODER, _LLM = "/chiasm.v1.EncoderService", "/chiasm.v1.LlmService"


class EncoderMethods:
    """The methods of `chiasm.v1.EncoderService`."""

    ENCODE_IMAGE = Method[_E.EncodeImageRequest, _E.EncodeImageResponse](
        f"{_ENCODER}/EncodeImage", _E.EncodeImageResponse
    )
    ENCODE_IMAGE_STREAM = Method[_E.EncodeImageStreamRequest, _E.EncodeImageStreamResponse](
        f"{_ENCODER}/EncodeImageStream", _E.EncodeImageStreamResponse
    )
    GET_MODEL = Method[_E.EncoderServiceGetModelRequest, _E.EncoderServiceGetModelResponse](
        f"{_ENCODER}/GetModel", _E.EncoderServiceGetModelResponse
    )
    GET_LOAD = Method[_E.EncoderServiceGetLoadRequest, _E.EncoderServiceGetLoadResponse](
        f"{_ENCODER}/GetLoad", _E.EncoderServiceGetLoadResponse
    )


class LlmMethods:
    """The methods of `chiasm.v1.LlmService`."""

    GENERATE = Method[_L.GenerateRequest, _L.GenerateResponse](
        f"{_LLM}/Generate", _L.GenerateResponse
    )
    HOLD_EMBEDDING = Method[_L.HoldEmbeddingRequest, _L.HoldEmbeddingResponse](
        f"{_LLM}/HoldEmbedding", _L.HoldEmbeddingResponse
    )
    POOL_IMAGE = Method[_L.PoolImageRequest, _L.PoolImageResponse](
        f"{_LLM}/PoolImage", _L.PoolImageResponse
    )
    COUNT_TOKENS = Method[_L.CountTokensRequest, _L.CountTokensResponse](
        f"{_LLM}/CountTokens", _L.CountTokensResponse
    )
    TOKENIZE = Method[_L.TokenizeRequest, _L.TokenizeResponse](
        f"{_LLM}/Tokenize", _L.TokenizeResponse
    )
    DETOKENIZE = Method[_L.DetokenizeRequest, _L.DetokenizeResponse](
        f"{_LLM}/Detokenize", _L.DetokenizeResponse
    )
    GET_MODEL = Method[_L.LlmServiceGetModelRequest, _L.LlmServiceGetModelResponse](
        f"{_LLM}/GetModel", _L.LlmServiceGetModelResponse
    )
    GET_LOAD = Method[_L.LlmServiceGetLoadRequest, _L.LlmServiceGetLoadResponse](
        f"{_LLM}/GetLoad", _L.LlmServiceGetLoadResponse
    )
