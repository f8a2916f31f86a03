"""An LLM service's pool of encoders, and a gateway before an LLM service, under mutual TLS."""

import asyncio
import hashlib
import io
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import structlog
import torch
from PIL import Image
from prometheus_client import CollectorRegistry

from chiasm.errors import ChiasmError, Reason
from chiasm.images import decode_image, image_size
from chiasm.models.contract import DEFAULT_OPTIONS
from chiasm.models.vision import VisionHalf
from chiasm.rpc import mtls
from chiasm.rpc.callers import ServerTls
from chiasm.rpc.certificates import load
from chiasm.rpc.secure_channel import ClientTls
from llm_service.request import RawImage
from llm_service.vision.discovery import discovery
from llm_service.vision.encoder import EncoderSettings
from llm_service.vision.fleet_metrics import FleetMetrics
from llm_service.vision.pool import EncoderPool, PoolSettings
from llm_service.vision.source import Asked, Fetched, Sought
from tests.gateway.gateway_system import gateway_before
from tests.rpc_tls.authority import Authority, Files
from tests.rpc_tls.tiny_service import client_tls
from tests.scripted_encoder import ScriptedEncoder
from tests.scripted_llm import MODEL, ScriptedLlm
from tests.tiny_llava import build_tiny_llava

GATEWAY, LLM, ENCODER = "chiasm-gateway", "chiasm-llm", "chiasm-encoder"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
POOL = PoolSettings(EncoderSettings(1.0, 5.0), attempts=3, wait_seconds=2.0, hedge=False)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> VisionHalf:
    torch.set_num_threads(1)
    directory = build_tiny_llava(tmp_path_factory.mktemp("mtls") / "tiny", context_length=512)
    return VisionHalf.load(directory, model_id="tiny")


def server_tls(ca: Authority, directory: Path, name: str, allowed: str) -> ServerTls:
    files = ca.files(directory, name)
    material = load(mtls.Files(files.cert, files.key, files.ca))
    return ServerTls(lambda: material, mtls.callers(allowed))


def picture(seed: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


async def encode(pool: EncoderPool, half: VisionHalf, data: bytes) -> Fetched:
    width, height = image_size(memoryview(data))
    form = half.contract.of_size((height, width), DEFAULT_OPTIONS)
    asked = Asked("", "r", time.monotonic() + 10)
    image = RawImage(memoryview(data), DEFAULT_OPTIONS)
    return await pool.encode(Sought(image, hashlib.sha256(data).digest(), form, asked))


@asynccontextmanager
async def pool_of(
    half: VisionHalf, tls: ClientTls | None, *encoders: ScriptedEncoder
) -> AsyncIterator[EncoderPool]:
    found = discovery([one.address for one in encoders])
    pool = EncoderPool(found, half.contract, POOL, FleetMetrics(CollectorRegistry()), tls)
    try:
        yield pool
    finally:
        await pool.close()


async def test_pictures_are_encoded_by_an_encoder_that_knows_the_service(
    ca: Authority, half: VisionHalf, tmp_path: Path
) -> None:
    files = ca.files(tmp_path / "llm", LLM)
    encoder = ScriptedEncoder(half)
    async with (
        encoder.serving(tls=server_tls(ca, tmp_path / "encoder", ENCODER, LLM)),
        pool_of(half, client_tls(files, ENCODER), encoder) as pool,
    ):
        for seed in range(3):
            data = picture(seed)
            fetched = await encode(pool, half, data)
            (features,) = half.encode([half.preprocess(decode_image(data))])
            assert torch.equal(features.rows, fetched.rows.rows)
        # A new certificate, while pictures are asked for.
        files.write(ca.issue(LLM), ca.pem)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            await encode(pool, half, picture(0))


@pytest.mark.parametrize(
    ("name", "allowed", "detail"),
    [
        ("somebody-else", LLM, "no certificate that comes from a trusted authority"),
        (ENCODER, "somebody-else", "--mtls-clients"),
    ],
)
async def test_a_wrong_encoder_or_service_is_no_encoder_and_the_log_says_why(
    ca: Authority, half: VisionHalf, tmp_path: Path, name: str, allowed: str, detail: str
) -> None:
    wrong, right = ScriptedEncoder(half), ScriptedEncoder(half)
    tls = client_tls(ca.files(tmp_path / "llm", LLM), ENCODER)
    with structlog.testing.capture_logs() as logs:
        async with (
            wrong.serving(tls=server_tls(ca, tmp_path / "wrong", name, allowed)),
            right.serving(tls=server_tls(ca, tmp_path / "right", ENCODER, LLM)),
        ):
            async with pool_of(half, tls, wrong) as pool:
                with pytest.raises(ChiasmError) as caught:
                    await encode(pool, half, picture(1))
                assert caught.value.reason is Reason.NO_ENCODER
            async with pool_of(half, tls, wrong, right) as pool:
                for seed in range(4):
                    await encode(pool, half, picture(seed))
    assert wrong.asked == []
    told = [line["detail"] for line in logs if line["event"] == "encoder ejected"]
    assert any(detail in one for one in told)


async def test_plaintext_and_tls_do_not_meet(
    ca: Authority, half: VisionHalf, tmp_path: Path
) -> None:
    plain, secure = ScriptedEncoder(half), ScriptedEncoder(half)
    tls = client_tls(ca.files(tmp_path / "llm", LLM), ENCODER)
    async with (
        plain.serving(),
        secure.serving(tls=server_tls(ca, tmp_path / "encoder", ENCODER, LLM)),
    ):
        for dialled, shown in ((plain, tls), (secure, None)):
            async with pool_of(half, shown, dialled) as pool:
                with pytest.raises(ChiasmError) as caught:
                    await encode(pool, half, picture(1))
                assert caught.value.reason is Reason.NO_ENCODER


@asynccontextmanager
async def gateway(files: Files, port: int) -> AsyncIterator[httpx.AsyncClient]:
    settings = {"mtls_cert": files.cert, "mtls_key": files.key, "mtls_ca": files.ca}
    async with (
        gateway_before(port, mtls_llm=LLM, **settings) as served,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{served}", timeout=20, trust_env=False
        ) as http,
    ):
        yield http


async def test_a_gateway_asks_an_llm_service_that_knows_it_and_follows_its_files(
    ca: Authority, tmp_path: Path
) -> None:
    files, llm = ca.files(tmp_path / "gateway", GATEWAY), ScriptedLlm()
    async with (
        llm.serving(tls=server_tls(ca, tmp_path / "llm", LLM, GATEWAY)) as server,
        gateway(files, server.port) as http,
    ):
        assert (await http.get("/ready")).status_code == 200
        files.write(ca.issue(GATEWAY), ca.pem)
        end, taken = time.monotonic() + 15, False
        while not taken and time.monotonic() < end:
            answer = await http.post("/v1/chat/completions", json=ASK)
            assert answer.status_code == 200
            figures = (await http.get("/metrics")).text
            taken = 'chiasm_mtls_reloads_total{outcome="taken"} 1.0' in figures
        assert taken
        assert "chiasm_mtls_certificate_expiry_seconds" in figures
        assert (await http.post("/v1/chat/completions", json=ASK)).status_code == 200


@pytest.mark.parametrize(
    ("name", "allowed", "status", "code"),
    [
        (LLM, "somebody-else", 502, "caller_not_allowed"),
        ("somebody-else", GATEWAY, 503, "not_ready"),
    ],
)
async def test_a_gateway_says_that_it_and_the_llm_service_do_not_belong_together(
    ca: Authority, tmp_path: Path, name: str, allowed: str, status: int, code: str
) -> None:
    files, llm = ca.files(tmp_path / "gateway", GATEWAY), ScriptedLlm()
    async with (
        llm.serving(tls=server_tls(ca, tmp_path / "llm", name, allowed)) as server,
        gateway(files, server.port) as http,
    ):
        answer = await http.post("/v1/chat/completions", json=ASK)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/health")).status_code == 200
    assert llm.received == []


async def test_a_gateway_without_certificates_gets_nothing(ca: Authority, tmp_path: Path) -> None:
    llm = ScriptedLlm()
    async with (
        llm.serving(tls=server_tls(ca, tmp_path / "llm", LLM, GATEWAY)) as server,
        gateway_before(server.port) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http,
    ):
        answers = await asyncio.gather(
            *(http.post("/v1/chat/completions", json=ASK, timeout=20) for _ in range(3))
        )
    assert {answer.status_code for answer in answers} == {503}
