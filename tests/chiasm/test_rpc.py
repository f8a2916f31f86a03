"""A served method: errors, ids, deadlines, cancellation, health, limits, drain; real sockets."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from chiasm import wire
from chiasm.errors import ChiasmError, Reason
from chiasm.rpc.channel import EncoderMethods, LlmMethods, open_channel
from chiasm.rpc.server import Call, Server, ServerSettings, Service, StreamMethod, UnaryMethod
from chiasm.v1 import encoder_service_pb2 as e
from chiasm.v1 import llm_service_pb2 as s

SETTINGS = ServerSettings("127.0.0.1", 0, 0.05, 5.0, 60.0)
LOAD = wire.plain(e.EncoderServiceGetLoadRequest())
GENERATE = wire.plain(s.GenerateRequest())


@asynccontextmanager
async def _served(name: str, **methods: Any) -> AsyncIterator[tuple[Server, grpc.aio.Channel]]:
    server = Server(SETTINGS, Service(name, methods), CollectorRegistry())
    await server.start()
    await server.ready()
    channel = open_channel(f"127.0.0.1:{server.port}")
    try:
        yield server, channel
    finally:
        await channel.close()
        await server.abort()


def _load(run: Any) -> dict[str, Any]:
    return {"GetLoad": UnaryMethod(e.EncoderServiceGetLoadRequest, run)}


async def _failure(channel: grpc.aio.Channel, **options: Any) -> ChiasmError:
    with pytest.raises(ChiasmError) as caught:
        await EncoderMethods.GET_LOAD.call(channel, LOAD, **options)
    return caught.value


async def test_an_error_arrives_with_reason_field_and_retry_hint() -> None:
    async def refuse(_: Any, __: Call) -> Any:
        raise ChiasmError(Reason.QUEUE_FULL, "busy", "messages", 2.0)

    async with _served("chiasm.v1.EncoderService", **_load(refuse)) as (_, channel):
        told = await _failure(channel)
    assert (told.reason, told.field, told.retry_after) == (Reason.QUEUE_FULL, "messages", 2.0)


async def test_a_bug_is_internal_and_its_text_stays_at_home() -> None:
    async def fail(_: Any, __: Call) -> Any:
        raise RuntimeError("secret detail")

    async with _served("chiasm.v1.EncoderService", **_load(fail)) as (_, channel):
        told = await _failure(channel)
    assert told.reason is Reason.INTERNAL
    assert "secret" not in told.message


async def test_a_cancellation_that_nobody_asked_for_is_answered_at_once() -> None:
    async def lost(_: Any, __: Call) -> Any:
        raise asyncio.CancelledError

    async with _served("chiasm.v1.EncoderService", **_load(lost)) as (_, channel):
        began = time.monotonic()
        told = await _failure(channel, timeout=5)
    assert told.reason is Reason.INTERNAL
    assert time.monotonic() - began < 2


async def test_a_caller_that_leaves_cancels_the_method() -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def wait(_: Any, __: Call) -> AsyncIterator[Any]:
        entered.set()
        try:
            await asyncio.sleep(60)
            yield wire.plain(s.GenerateResponse())
        finally:
            left.set()

    methods = {"Generate": StreamMethod(s.GenerateRequest, wait)}
    async with _served("chiasm.v1.LlmService", **methods) as (_, channel):
        stream = LlmMethods.GENERATE.stream(channel, GENERATE)
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.wait_for(entered.wait(), 5)
        reading.cancel()
        await asyncio.wait_for(left.wait(), 5)


async def test_the_deadline_travels_and_the_caller_is_told() -> None:
    seen: list[float] = []

    async def slow(_: Any, call: Call) -> Any:
        assert call.deadline is not None
        seen.append(call.deadline - time.monotonic())
        await asyncio.sleep(30)

    async with _served("chiasm.v1.EncoderService", **_load(slow)) as (_, channel):
        told = await _failure(channel, timeout=0.4)
    assert told.reason is Reason.DEADLINE
    assert 0 < seen[0] <= 0.4


@pytest.mark.parametrize(
    ("claimed", "kept"), [("trace-1", True), ("x" * 500, False), ("a b", False)]
)
async def test_a_request_id_is_kept_only_if_it_is_short_and_plain(claimed: str, kept: bool) -> None:
    seen: list[str] = []

    async def note(_: Any, call: Call) -> Any:
        seen.append(call.request_id)
        return wire.plain(e.EncoderServiceGetLoadResponse())

    async with _served("chiasm.v1.EncoderService", **_load(note)) as (_, channel):
        metadata = (("x-request-id", claimed),)
        await EncoderMethods.GET_LOAD.call(channel, LOAD, metadata=metadata)
    assert (seen[0] == claimed) is kept


async def test_bytes_that_are_no_message_are_the_callers_fault() -> None:
    async def never(_: Any, __: Call) -> Any:
        raise AssertionError("not reached")

    async with _served("chiasm.v1.EncoderService", **_load(never)) as (_, channel):
        call: Any = channel.unary_unary(EncoderMethods.GET_LOAD.path, None, None)
        with pytest.raises(grpc.RpcError) as caught:
            await call(b"\xff\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_messages_far_above_grpcs_default_limit_pass_both_ways() -> None:
    from chiasm import tensors
    from chiasm.v1 import image_pb2, tensor_pb2

    async def echo(request: Any, _: Call) -> Any:
        view = request.data(request.message.image.data)
        buffers = wire.Buffers()
        kind = tensors.BY_WIRE[tensor_pb2.DATA_TYPE_UINT8]
        features = tensors.to_wire(tensors.Array(kind, (len(view),), view), buffers)
        embedding = image_pb2.ImageEmbedding(features=features)
        return wire.Wired(e.EncodeImageResponse(embedding=embedding), buffers)

    methods = {"EncodeImage": UnaryMethod(e.EncodeImageRequest, echo)}
    async with _served("chiasm.v1.EncoderService", **methods) as (_, channel):
        data = bytes(range(256)) * 80_000
        buffers = wire.Buffers()
        message = e.EncodeImageRequest(image=image_pb2.Image(data=buffers.put(data)))
        reply = await EncoderMethods.ENCODE_IMAGE.call(channel, wire.Wired(message, buffers))
    assert bytes(reply.data(reply.message.embedding.features.data)) == data


async def test_health_says_serving_only_between_ready_and_drain() -> None:
    async def fine(_: Any, __: Call) -> Any:
        return wire.plain(e.EncoderServiceGetLoadResponse())

    serving = health_pb2.HealthCheckResponse.SERVING
    async with _served("chiasm.v1.EncoderService", **_load(fine)) as (server, _):
        # A plain channel: our own sends nothing to a server that says NOT_SERVING.
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "chiasm.v1.EncoderService"):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == (
                serving
            )
        with pytest.raises(grpc.RpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await server.unready()
        assert (await health.Check(health_pb2.HealthCheckRequest())).status != serving
        await channel.close()


async def test_a_drain_lets_a_running_stream_end() -> None:
    async def count(_: Any, __: Call) -> AsyncIterator[Any]:
        for _number in range(5):
            yield wire.plain(s.GenerateResponse(delta=s.DeltaBatch(deltas=[s.Delta(text="x")])))
            await asyncio.sleep(0.1)

    methods = {"Generate": StreamMethod(s.GenerateRequest, count)}
    async with _served("chiasm.v1.LlmService", **methods) as (server, channel):
        stream = LlmMethods.GENERATE.stream(channel, GENERATE)
        await anext(stream)
        drained = asyncio.create_task(server.drain())
        rest = [response async for response in stream]
        await drained
    assert len(rest) == 4


async def test_a_port_in_use_is_refused_and_not_shared() -> None:
    async def fine(_: Any, __: Call) -> Any:
        return wire.plain(e.EncoderServiceGetLoadResponse())

    async with _served("chiasm.v1.EncoderService", **_load(fine)) as (server, _):
        taken = ServerSettings("127.0.0.1", server.port, 0, 0, 60)
        second = Server(taken, Service("x.Y", {}), CollectorRegistry())
        with pytest.raises(OSError, match="port taken"):
            await second.start()
        await second.abort()
