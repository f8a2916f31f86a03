"""Who a server under mutual TLS serves, and how it refuses everybody else; real sockets."""

import asyncio
import ssl
import warnings
from collections.abc import Callable
from pathlib import Path
from ssl import TLSVersion
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from grpc.experimental import session_cache
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from chiasm.errors import ChiasmError, Reason
from chiasm.rpc.channel import open_channel
from tests.rpc_tls.authority import CLIENT as CLIENT_USAGE
from tests.rpc_tls.authority import SERVER as SERVER_USAGE
from tests.rpc_tls.authority import Authority, Files, Issued
from tests.rpc_tls.tiny_service import (
    CLIENT,
    NAME,
    SERVER,
    SPIFFE,
    asked,
    bare_channel,
    client_tls,
    load_of,
    refusal,
    tiny,
)

OTHER = Authority()


@pytest.mark.parametrize(
    ("allowed", "name"),
    [(CLIENT, CLIENT), (f"{SPIFFE}, other", SPIFFE), ("CHIASM-LLM", CLIENT)],
)
async def test_a_client_with_one_of_the_names_is_served(
    ca: Authority, server_files: Files, tmp_path: Path, allowed: str, name: str
) -> None:
    files = ca.files(tmp_path / "named", name)
    async with (
        tiny(server_files, allowed) as served,
        open_channel(served.target, client_tls(files)) as channel,
        open_channel(f"dns:///localhost:{served.server.port}", client_tls(files)) as by_name,
    ):
        assert await load_of(channel) == 7
        assert await load_of(by_name) == 7
    assert served.figure("chiasm_mtls_refused_calls_total", cause="name") == 0


WRONG_CLIENTS: dict[str, Callable[[Authority], Issued]] = {
    "another authority": lambda ca: OTHER.issue(CLIENT),
    "expired": lambda ca: ca.issue(CLIENT, from_days=-3, to_days=-1),
    "not valid yet": lambda ca: ca.issue(CLIENT, from_days=1),
    "for servers only": lambda ca: ca.issue(CLIENT, usages=(SERVER_USAGE,)),
}


@pytest.mark.parametrize("kind", WRONG_CLIENTS)
async def test_a_wrong_certificate_is_refused_and_the_server_lives_on(
    ca: Authority, server_files: Files, client_files: Files, kind: str
) -> None:
    issued = WRONG_CLIENTS[kind](ca)
    async with tiny(server_files) as served:
        good = client_tls(client_files)
        client_files.write(issued, ca.pem)
        told = await refusal(served.target, client_tls(client_files))
        assert told.reason is Reason.NOT_READY
        client_files.write(ca.issue(CLIENT), ca.pem)
        async with open_channel(served.target, good) as channel:
            assert await load_of(channel) == 7


async def test_plaintext_and_a_client_without_a_certificate_are_refused(
    ca: Authority, server_files: Files, client_files: Files
) -> None:
    async with tiny(server_files) as served:
        assert (await refusal(served.target, None)).reason is Reason.NOT_READY
        credentials = grpc.ssl_channel_credentials(ca.pem)
        options = [("grpc.ssl_target_name_override", SERVER)]
        async with grpc.aio.secure_channel(served.target, credentials, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asked(channel)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        async with open_channel(served.target, client_tls(client_files)) as channel:
            assert await load_of(channel) == 7


async def test_a_name_that_may_not_call_is_told_so_counted_and_logged_once(
    ca: Authority, server_files: Files, tmp_path: Path
) -> None:
    stranger = ca.files(tmp_path / "stranger", "stranger", "spiffe://cluster.local/x")
    with structlog.testing.capture_logs() as logs:
        async with tiny(server_files) as served:
            for _ in range(3):
                told = await refusal(served.target, client_tls(stranger))
                assert told.reason is Reason.CALLER_NOT_ALLOWED
                assert told.grpc_code is grpc.StatusCode.PERMISSION_DENIED
                assert "--mtls-clients" in told.message
    assert served.figure("chiasm_mtls_refused_calls_total", cause="name") == 3
    lines = [line for line in logs if line["event"] == "caller not allowed"]
    assert [line["names"] for line in lines] == [("stranger", "spiffe://cluster.local/x")]


@pytest.mark.parametrize(
    "names", [(), (f"x{CLIENT}",), (f"{CLIENT}.evil",), ("spiffe://chiasm-llm/",)]
)
async def test_names_are_compared_whole_and_by_kind(
    ca: Authority, server_files: Files, names: tuple[str, ...]
) -> None:
    async with (
        tiny(server_files) as served,
        bare_channel(served.target, ca.issue(*names), ca) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked(channel)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def _first_reflected(channel: grpc.aio.Channel) -> Any:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for response in stub.ServerReflectionInfo(iter([request]), timeout=5):
        return response
    return None


async def test_health_and_reflection_of_the_port_obey_the_same(
    ca: Authority, server_files: Files
) -> None:
    check = health_pb2.HealthCheckRequest()
    async with tiny(server_files) as served:
        async with bare_channel(served.target, ca.issue(CLIENT), ca) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(check, timeout=5)).status == 1
            async for told in health.Watch(check, timeout=5):
                assert told.status == 1
                break
            services = (await _first_reflected(channel)).list_services_response.service
            assert "chiasm.v1.EncoderService" in {one.name for one in services}
        async with bare_channel(served.target, ca.issue("stranger"), ca) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health.Check(check, timeout=5)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _first_reflected(channel)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health.Watch(check, timeout=5).read()
            # Not PERMISSION_DENIED: clients that watch would then never make the call that is told.
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_stream_is_refused_before_its_first_message(
    ca: Authority, server_files: Files
) -> None:
    async with (
        tiny(server_files) as served,
        bare_channel(served.target, ca.issue("stranger"), ca) as channel,
    ):
        send: Any = channel.unary_stream(f"/{NAME}/EncodeImageStream")
        call = send(b"", timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


WRONG_SERVERS: dict[str, Callable[[Authority], Issued]] = {
    "another name": lambda ca: ca.issue("somebody-else"),
    "expired": lambda ca: ca.issue(SERVER, from_days=-3, to_days=-1),
    "another authority": lambda ca: OTHER.issue(SERVER),
    "for clients only": lambda ca: ca.issue(SERVER, usages=(CLIENT_USAGE,)),
    "a name as URI alone": lambda ca: ca.issue(f"spiffe://{SERVER}/"),
}


@pytest.mark.parametrize("kind", WRONG_SERVERS)
async def test_a_client_refuses_a_wrong_server_and_says_what_to_look_at(
    ca: Authority, server_files: Files, client_files: Files, kind: str
) -> None:
    server_files.write(WRONG_SERVERS[kind](ca), ca.pem)
    async with tiny(server_files) as served:
        told = await refusal(served.target, client_tls(client_files))
    assert told.reason is Reason.NOT_READY
    assert "certificate" in told.message


@pytest.mark.parametrize(
    ("version", "served"),
    [(TLSVersion.TLSv1_1, False), (TLSVersion.TLSv1_2, True), (TLSVersion.TLSv1_3, True)],
)
async def test_tls_1_2_at_least(
    ca: Authority, server_files: Files, client_files: Files, version: TLSVersion, served: bool
) -> None:
    context = ssl.create_default_context(cafile=str(client_files.ca))
    context.load_cert_chain(client_files.cert, client_files.key)
    # OpenSSL itself offers nothing below 1.2 at its usual level.
    context.set_ciphers("DEFAULT@SECLEVEL=0")
    context.set_alpn_protocols(["h2"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    async with tiny(server_files) as one:
        assert await _shakes_hands(context, one.server.port) is served


async def _shakes_hands(context: ssl.SSLContext, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname=SERVER
        )
    except OSError:
        return False
    writer.transport.abort()
    return True


async def test_a_certificate_that_expires_ends_its_connections_and_sessions_too(
    ca: Authority, server_files: Files
) -> None:
    # Four seconds from now; a session that is resumed shows no certificate again.
    brief = ca.issue(CLIENT, to_days=4 / 86_400)
    credentials = grpc.ssl_channel_credentials(ca.pem, brief.key, brief.cert)
    sessions: Any = session_cache
    options: list[tuple[str, Any]] = [
        ("grpc.ssl_target_name_override", SERVER),
        ("grpc.ssl_session_cache", sessions.ssl_session_cache_lru(8)),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with tiny(server_files) as served:
        open_one = grpc.aio.secure_channel(served.target, credentials, options=options)
        async with open_one as first:
            assert await load_of(first) == 7
            async with grpc.aio.secure_channel(
                served.target, credentials, options=options
            ) as second:
                assert await load_of(second) == 7
            await asyncio.sleep(4.5)
            for channel in (
                first,
                grpc.aio.secure_channel(served.target, credentials, options=options),
            ):
                with pytest.raises(ChiasmError) as caught:
                    await load_of(channel)
                assert caught.value.reason is Reason.CALLER_NOT_ALLOWED
                assert "expired" in caught.value.message
                await channel.close()
        assert served.figure("chiasm_mtls_refused_calls_total", cause="expired") == 2
