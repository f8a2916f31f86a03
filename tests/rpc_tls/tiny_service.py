"""A small encoder-shaped service under mutual TLS, on a real port, and clients of every kind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from chiasm import wire
from chiasm.errors import ChiasmError
from chiasm.rpc import mtls
from chiasm.rpc.callers import ServerTls
from chiasm.rpc.certificates import Certificates, followed
from chiasm.rpc.channel import EncoderMethods, open_channel
from chiasm.rpc.secure_channel import ClientTls
from chiasm.rpc.server import Call, Server, ServerSettings, Service, StreamMethod, UnaryMethod
from chiasm.v1 import encoder_service_pb2 as e
from tests.rpc_tls.authority import Authority, Files, Issued

SETTINGS = ServerSettings("127.0.0.1", 0, 0, 5, 60)
LOAD = wire.plain(e.EncoderServiceGetLoadRequest())
NAME = "chiasm.v1.EncoderService"
SERVER, CLIENT = "chiasm-encoder", "chiasm-llm"
SPIFFE = "spiffe://cluster.local/ns/chiasm/sa/chiasm-llm"


@dataclass
class Tiny:
    """The running service; `release` ends its streams."""

    server: Server
    registry: CollectorRegistry
    certificates: Certificates
    release: asyncio.Event

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def figure(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@asynccontextmanager
async def tiny(files: Files, allowed: str = CLIENT) -> AsyncIterator[Tiny]:
    """Serves GetLoad, and a stream that goes on until it is released."""
    release, registry = asyncio.Event(), CollectorRegistry()

    async def load(_: Any, __: Call) -> Any:
        return wire.plain(e.EncoderServiceGetLoadResponse(queued_image_count=7))

    async def stream(_: Any, __: Call) -> Any:
        while True:
            yield wire.plain(e.EncodeImageStreamResponse())
            if release.is_set():
                return
            await asyncio.sleep(0.02)

    methods: dict[str, UnaryMethod[Any] | StreamMethod[Any]] = {
        "GetLoad": UnaryMethod(e.EncoderServiceGetLoadRequest, load),
        "EncodeImageStream": StreamMethod(e.EncodeImageStreamRequest, stream),
    }
    certificates = Certificates(mtls.Files(files.cert, files.key, files.ca))
    tls = ServerTls(certificates.latest, mtls.callers(allowed))
    service = Service(NAME, methods)
    server = Server(SETTINGS, service, registry, tls=tls)
    async with followed(certificates, registry):
        await server.start()
        await server.ready()
        try:
            yield Tiny(server, registry, certificates, release)
        finally:
            await server.abort()


def client_tls(files: Files, *names: str) -> ClientTls:
    """Of a client that looks at its files at every call."""
    certificates = Certificates(mtls.Files(files.cert, files.key, files.ca))

    def latest() -> mtls.Material:
        certificates.look()
        return certificates.latest()

    return ClientTls(latest, names or (SERVER,))


async def load_of(channel: grpc.aio.Channel) -> int:
    reply = await EncoderMethods.GET_LOAD.call(channel, LOAD, timeout=5)
    return reply.message.queued_image_count


async def asked(channel: grpc.aio.Channel, path: str = f"/{NAME}/GetLoad") -> Any:
    """What gRPC itself gives or raises for an empty message."""
    send: Any = channel.unary_unary(path, None, None)
    return await send(b"", timeout=5)


async def refusal(target: str, tls: ClientTls | None) -> ChiasmError:
    """Why a call over a channel of its own fails."""
    async with open_channel(target, tls) as channel:
        with pytest.raises(ChiasmError) as caught:
            await load_of(channel)
    return caught.value


def bare_channel(target: str, issued: Issued, ca: Authority) -> grpc.aio.Channel:
    """As a client has it that is not ours: no health watch, no retries."""
    credentials = grpc.ssl_channel_credentials(ca.pem, issued.key, issued.cert)
    options = [("grpc.ssl_target_name_override", SERVER)]
    return grpc.aio.secure_channel(target, credentials, options=options)
