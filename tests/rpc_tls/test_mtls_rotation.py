"""New certificates and authorities without a restart, and without a failed call; real sockets."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
import structlog

from chiasm import wire
from chiasm.client import Client, MutualTls
from chiasm.errors import ChiasmError
from chiasm.rpc.channel import EncoderMethods, open_channel
from chiasm.rpc.secure_channel import SecureChannel
from chiasm.v1 import encoder_service_pb2 as e
from tests.rpc_tls.authority import Authority, Files
from tests.rpc_tls.tiny_service import (
    CLIENT,
    SERVER,
    Tiny,
    asked,
    bare_channel,
    client_tls,
    load_of,
    refusal,
    tiny,
)


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


class Callers:
    """Calls all the time; counts what came of it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.answered = 0
        self.failures: list[ChiasmError] = []
        self._channel = channel

    async def _call(self) -> None:
        while True:
            try:
                await load_of(self._channel)
                self.answered += 1
            except ChiasmError as error:
                self.failures.append(error)
            await asyncio.sleep(0.005)

    @asynccontextmanager
    async def calling(self) -> AsyncIterator["Callers"]:
        tasks = [asyncio.create_task(self._call()) for _ in range(4)]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def more(self, count: int = 50) -> None:
        goal = self.answered + count
        await until(lambda: self.answered >= goal or bool(self.failures))


def reloads(served: Tiny, outcome: str) -> float:
    return served.figure("chiasm_mtls_reloads_total", outcome=outcome) or 0


async def test_new_certificates_of_both_ends_are_used_without_a_failed_call(
    ca: Authority, server_files: Files, client_files: Files
) -> None:
    async with (
        tiny(server_files) as served,
        open_channel(served.target, client_tls(client_files)) as channel,
        Callers(channel).calling() as callers,
    ):
        assert isinstance(channel, SecureChannel)
        await callers.more()
        first = channel.line()
        server_files.write(ca.issue(SERVER), ca.pem)
        await until(lambda: reloads(served, "taken") == 1)
        await callers.more()
        client_files.write(ca.issue(CLIENT), ca.pem)
        await until(lambda: channel.line() is not first)
        await callers.more()
    assert callers.failures == []


async def test_an_authority_is_replaced_by_way_of_a_bundle_without_a_failed_call(
    ca: Authority, server_files: Files, client_files: Files
) -> None:
    new = Authority()
    both = ca.pem + new.pem
    async with (
        tiny(server_files) as served,
        open_channel(served.target, client_tls(client_files)) as channel,
        Callers(channel).calling() as callers,
    ):
        steps = [(ca, both), (new, both), (new, new.pem)]
        for step, (issuer, trusted) in enumerate(steps, 1):
            server_files.write(issuer.issue(SERVER), trusted)
            await until(lambda step=step: reloads(served, "taken") == step)  # type: ignore[misc]
            before = channel.line()  # type: ignore[attr-defined]
            client_files.write(issuer.issue(CLIENT), trusted)
            await until(lambda before=before: channel.line() is not before)  # type: ignore
            await callers.more()
        assert callers.failures == []
        # The old authority counts no more, on either end.
        async with bare_channel(served.target, ca.issue(CLIENT), new) as old:
            with pytest.raises(grpc.aio.AioRpcError):
                await asked(old)


async def test_a_running_stream_ends_on_the_certificate_that_it_began_with(
    ca: Authority, server_files: Files, client_files: Files
) -> None:
    async with (
        tiny(server_files) as served,
        open_channel(served.target, client_tls(client_files)) as channel,
    ):
        assert isinstance(channel, SecureChannel)
        request = wire.plain(e.EncodeImageStreamRequest())
        stream = EncoderMethods.ENCODE_IMAGE_STREAM.stream(channel, request, timeout=30)
        await anext(stream)
        old = channel.line()
        client_files.write(ca.issue(CLIENT), ca.pem)
        await until(lambda: channel.line() is not old)
        assert await load_of(channel) == 7
        for _ in range(10):
            await anext(stream)
        served.release.set()
        async with asyncio.timeout(5):
            async for _ in stream:
                pass
        await until(lambda: old.channel.get_state().name == "SHUTDOWN")


async def test_a_certificate_that_the_peer_does_not_take_yet_harms_nobody(
    ca: Authority, server_files: Files, client_files: Files
) -> None:
    new = Authority()
    async with (
        tiny(server_files) as served,
        open_channel(served.target, client_tls(client_files)) as channel,
        Callers(channel).calling() as callers,
    ):
        assert isinstance(channel, SecureChannel)
        await callers.more()
        first = channel.line()
        client_files.write(new.issue(CLIENT), ca.pem)
        await asyncio.sleep(1)
        await callers.more()
        assert channel.line() is first
        # Once the server trusts it, it is taken up by itself.
        server_files.write(ca.issue(SERVER), ca.pem + new.pem)
        await until(lambda: channel.line() is not first)
        await callers.more()
    assert callers.failures == []


def _halves(ca: Authority, files: Files, how: str) -> None:
    issued = ca.issue(SERVER)
    damaged = {
        "a new certificate beside the old key": (files.cert, issued.cert),
        "half a certificate": (files.cert, issued.cert[: len(issued.cert) // 2]),
        "an empty key": (files.key, b""),
        "an empty bundle": (files.ca, b""),
        "noise": (files.cert, os.urandom(5000)),
        "two mebibytes": (files.ca, ca.pem * 4000),
    }
    if how == "no file":
        files.key.unlink()
        return
    path, content = damaged[how]
    path.write_bytes(content)


@pytest.mark.parametrize(
    "how",
    [
        "a new certificate beside the old key", "half a certificate", "an empty key",
        "an empty bundle", "noise", "two mebibytes", "no file",
    ],
)  # fmt: skip
async def test_files_that_cannot_be_used_are_told_once_and_the_old_ones_serve_on(
    ca: Authority, server_files: Files, client_files: Files, how: str
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with (
            tiny(server_files) as served,
            open_channel(served.target, client_tls(client_files)) as channel,
        ):
            _halves(ca, server_files, how)
            await until(lambda: reloads(served, "refused") == 1)
            await asyncio.sleep(1.5)
            assert reloads(served, "refused") == 1
            assert await load_of(channel) == 7
            server_files.write(ca.issue(SERVER), ca.pem)
            await until(lambda: reloads(served, "taken") == 1)
            assert await load_of(channel) == 7
    told = [line for line in logs if line["event"].startswith("mTLS files are unusable")]
    assert len(told) == 1
    assert told[0]["detail"].startswith("--mtls-")
    assert "PRIVATE KEY" not in repr(logs)


async def test_a_mounted_secret_that_is_swapped_by_its_link_is_read(
    ca: Authority, client_files: Files, tmp_path: Path
) -> None:
    # As Kubernetes does it: ..data is a link to a directory, replaced by a rename.
    for name in ("..1", "..2"):
        ca.files(tmp_path / name, SERVER)
    os.symlink("..1", tmp_path / "..data")
    mounted = [tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt")]
    for path in mounted:
        os.symlink(f"..data/{path.name}", path)
    async with tiny(Files(*mounted)) as served:
        before = served.certificates.latest()
        os.symlink("..2", tmp_path / "..tmp")
        os.rename(tmp_path / "..tmp", tmp_path / "..data")
        await until(lambda: served.certificates.latest() is not before)
        assert served.certificates.latest().cert == (tmp_path / "..2" / "tls.crt").read_bytes()
        async with open_channel(served.target, client_tls(client_files)) as channel:
            assert await load_of(channel) == 7


async def test_the_expiry_is_a_figure_and_an_expired_certificate_an_error_in_the_log(
    ca: Authority, server_files: Files
) -> None:
    async with tiny(server_files) as served:
        left = (served.figure("chiasm_mtls_certificate_expiry_seconds") or 0) - time.time()
        assert 9.9 < left / 86_400 < 10.1
    server_files.write(ca.issue(SERVER, from_days=-3, to_days=-1), ca.pem)
    with structlog.testing.capture_logs() as logs:
        async with tiny(server_files):
            await until(lambda: any("expired" in line["event"] for line in logs))


async def test_several_names_of_servers_are_tried_in_turn(
    ca: Authority, server_files: Files, client_files: Files
) -> None:
    names = ("chiasm-encoder.old", "chiasm-encoder.older", SERVER)
    async with (
        tiny(server_files) as served,
        open_channel(served.target, client_tls(client_files, *names)) as channel,
    ):
        async with asyncio.timeout(15):
            while True:
                with contextlib.suppress(ChiasmError):
                    assert await load_of(channel) == 7
                    break
                await asyncio.sleep(0.05)
    async with tiny(server_files) as served:
        told = await refusal(served.target, client_tls(client_files, *names[:2]))
        assert "certificate" in told.message


async def test_a_channel_that_is_closed_leaves_no_task(
    ca: Authority, server_files: Files, client_files: Files
) -> None:
    before = asyncio.all_tasks()
    async with tiny(server_files) as served:
        channel = open_channel(served.target, client_tls(client_files, "wrong", SERVER))
        with contextlib.suppress(ChiasmError):
            await load_of(channel)
        client_files.write(Authority().issue(CLIENT), ca.pem)
        with contextlib.suppress(ChiasmError):
            await load_of(channel)
        await channel.close()
    await until(lambda: asyncio.all_tasks() == before, 2)


async def test_the_blocking_client_follows_its_files_too(
    ca: Authority, server_files: Files, client_files: Files
) -> None:
    tls = MutualTls(client_files.cert, client_files.key, client_files.ca, encoder=SERVER)
    async with tiny(server_files) as served:
        told: list[object] = []

        def ask(client: Client) -> None:
            try:
                client.encode(b"picture")
            except ChiasmError as error:
                told.append(error.grpc_code.name)

        with Client(encoder=served.target, timeout=5, tls=tls) as client:
            # The small service has no such method, which only an accepted caller learns.
            await asyncio.to_thread(ask, client)
            assert told == ["INTERNAL"]
            first = threading.active_count()
            server_files.write(Authority().issue(SERVER), ca.pem)
            await until(lambda: reloads(served, "taken") == 1)
            client_files.write(ca.issue(CLIENT), ca.pem)
            for _ in range(2):
                await asyncio.sleep(1.1)
                await asyncio.to_thread(ask, client)
            # Its new connection met the server's new certificate, which nobody trusts.
            assert told[-1] == "UNAVAILABLE"
            assert threading.active_count() <= first + 2


async def test_a_client_must_say_whom_it_expects(client_files: Files) -> None:
    tls = MutualTls(client_files.cert, client_files.key, client_files.ca, encoder=SERVER)
    with pytest.raises(ValueError, match=r"MutualTls\.llm"):
        Client(llm="127.0.0.1:1", tls=tls)
    client_files.key.write_bytes(b"")
    with pytest.raises(ValueError, match="--mtls-key"):
        Client(encoder="127.0.0.1:1", tls=tls)
