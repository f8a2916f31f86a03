"""The life of the process: not serving, serving, draining, gone."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from chiasm.errors import ChiasmError, Reason
from chiasm.models.vision import VisionHalf
from chiasm.rpc.channel import open_channel
from chiasm.v1 import encoder_service_pb2 as pb
from encoder_service.app import EncoderService, running
from tests.encoder_service.calls import Service, picture, serving, settings_for, until

ROOT = Path(__file__).parent.parent.parent
NAMES = ("", "chiasm.v1.EncoderService")


async def health(channel: grpc.aio.Channel, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=name))
    return int(response.status)


async def test_health_turns_to_serving_when_a_picture_was_encoded(
    checkpoint: Path, half: VisionHalf
) -> None:
    registry = CollectorRegistry()
    service = EncoderService(settings_for(checkpoint), registry)
    await service.server.start()
    address = f"127.0.0.1:{service.server.port}"
    async with grpc.aio.insecure_channel(address) as channel:
        caller = Service(service.server.port, channel, registry)
        for name in NAMES:
            assert await health(channel, name) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(ChiasmError) as refused:
            await caller.encode(picture(1))
        assert refused.value.reason is Reason.NOT_READY
        assert await caller.load() == pb.EncoderServiceGetLoadResponse()
        async with service.opened(half, "llava"):
            assert caller.figure("encoded_images_total") == 1
            for name in NAMES:
                assert await health(channel, name) == health_pb2.HealthCheckResponse.SERVING
            assert (await caller.encode(picture(1))).message.embedding.row_count == 4
    await service.server.abort()


async def test_reflection_lists_the_service(checkpoint: Path) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with serving(settings_for(checkpoint)) as service:
        stub = reflection_pb2_grpc.ServerReflectionStub(service.channel)
        async for response in stub.ServerReflectionInfo(iter([request])):
            names = {entry.name for entry in response.list_services_response.service}
            break
    assert {"chiasm.v1.EncoderService", "grpc.health.v1.Health"} <= names


@contextmanager
def process(*flags: str) -> Iterator["subprocess.Popen[str]"]:
    """The real process; killed if it still runs at the end."""
    command = [sys.executable, "-m", "encoder_service", "--torch-threads", "1", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        try:
            yield child
        finally:
            if child.poll() is None:
                child.kill()


@pytest.mark.system
async def test_sigterm_ends_running_calls_and_then_the_process(slow_checkpoint: Path) -> None:
    flags = ("--model", str(slow_checkpoint), "--port", "0", "--metrics-port", "0")
    times = ("--drain-seconds", "0.2", "--grace-seconds", "30", "--log-format", "json")
    with process(*flags, *times) as child:
        assert child.stdout is not None
        ready = json.loads(await asyncio.to_thread(child.stdout.readline))
        assert ready["event"] == "ready"
        assert ready["service"] == "encoder"
        async with open_channel(f"127.0.0.1:{ready['port']}") as channel:
            service = Service(ready["port"], channel, CollectorRegistry())
            calls = [asyncio.create_task(service.encode(picture(seed))) for seed in range(4)]
            await service.until_active(4)
            child.send_signal(signal.SIGTERM)
            replies = await asyncio.gather(*calls)
        assert [reply.message.embedding.row_count for reply in replies] == [1024] * 4
        _, log = await asyncio.to_thread(child.communicate, timeout=20)
    assert child.returncode == 0
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["event"] for line in lines].count("settings") == 1
    calls_logged = [line for line in lines if line.get("method") == "EncodeImage"]
    assert len(calls_logged) == 4
    assert all(line["status"] == "OK" and line["request_id"] for line in calls_logged)
    assert "fault" not in {line["event"] for line in lines}


@pytest.mark.system
async def test_health_answers_within_a_second_while_the_tower_works_through_a_long_batch(
    slow_checkpoint: Path,
) -> None:
    # All but the first in one forward: pictures of 1,024 patches, seconds of work.
    flags = ("--no-bit-exact", "--max-batch-patches", "16384", "--drain-seconds", "0")
    with process("--model", str(slow_checkpoint), "--port", "0", *flags) as child:
        assert child.stdout is not None
        ready = json.loads(await asyncio.to_thread(child.stdout.readline))
        async with open_channel(f"127.0.0.1:{ready['port']}") as channel:
            service = Service(ready["port"], channel, CollectorRegistry())
            calls = [asyncio.create_task(service.encode(picture(seed))) for seed in range(9)]
            longest, most_in_tower = 0.0, 0
            while not all(call.done() for call in calls):
                began = time.monotonic()
                assert await health(channel, "") == health_pb2.HealthCheckResponse.SERVING
                load = await service.load()
                longest = max(longest, time.monotonic() - began)
                most_in_tower = max(most_in_tower, load.in_flight_patch_count)
                await asyncio.sleep(0.02)
            await asyncio.gather(*calls)
    assert most_in_tower >= 4 * 1024
    assert longest < 1


@pytest.mark.system
async def test_on_sigterm_health_says_so_first_and_calls_are_served_on(
    checkpoint: Path,
) -> None:
    times = ("--drain-seconds", "1.5", "--grace-seconds", "10")
    with process("--model", str(checkpoint), "--port", "0", *times) as child:
        assert child.stdout is not None
        ready = json.loads(await asyncio.to_thread(child.stdout.readline))
        target = f"127.0.0.1:{ready['port']}"
        # A plain channel: ours asks no server whose health says no.
        async with grpc.aio.insecure_channel(target) as channel:
            service = Service(ready["port"], channel, CollectorRegistry())
            await service.encode(picture(1))
            child.send_signal(signal.SIGTERM)
            await until(lambda load: load.draining, service.load)
            assert await health(channel, "") == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await service.encode(picture(2))).message.embedding.row_count == 4
            assert await asyncio.to_thread(child.wait, 10) == 0
            with pytest.raises(ChiasmError) as refused:
                await service.encode(picture(3))
            assert refused.value.reason is Reason.NOT_READY


@pytest.mark.system
def test_a_directory_without_a_checkpoint_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    with process("--model", str(tmp_path), "--port", "0") as child:
        _, log = child.communicate(timeout=30)
    assert child.returncode == 2
    assert f"error: {tmp_path} has no config.json" in log
    assert "Traceback" not in log


async def test_a_used_port_is_an_error(checkpoint: Path) -> None:
    async with serving(settings_for(checkpoint)) as service:
        taken = settings_for(checkpoint).model_copy(update={"port": service.port})
        with pytest.raises(OSError, match="is the port taken"):
            async with serving(taken):
                raise AssertionError("two servers share a port")


async def test_metrics_are_served_where_asked_for(checkpoint: Path) -> None:
    async with running(settings_for(checkpoint, metrics_port=0)) as service:
        address = f"http://127.0.0.1:{service.metrics_port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(address).read().decode())
    assert "chiasm_encoder_encoded_images_total 1.0" in text


async def test_a_stopped_service_leaves_no_thread_behind(checkpoint: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    async with serving(settings_for(checkpoint)) as service:
        await service.encode(picture(1))
        names = {thread.name.rpartition("_")[0] for thread in threading.enumerate()}
        assert {"decode", "tower"} <= names
    left = {thread.name for thread in threading.enumerate()} - before
    assert not {name for name in left if name.startswith(("decode", "tower"))}
