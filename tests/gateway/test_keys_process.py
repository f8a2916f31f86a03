"""Keys and certificates of the gateway as a process: how it starts, and what it writes."""

import asyncio
import json
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import trustme

from chiasm.cli import main
from tests.gateway.test_gateway_process import ASK, gateway_process
from tests.scripted_llm import ScriptedLlm

pytestmark = pytest.mark.system

PROMPT = "hush-hush-prompt"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


@pytest.fixture
def key(keys_file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    words = ["key", "new", "--name", "alice", "--tenant", "team-a", "--file", str(keys_file)]
    assert main([*words, "--requests-per-minute", "3"]) == 0
    return capsys.readouterr().out.strip()


def ended_start(*flags: str) -> str:
    """What a gateway says that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "--port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr


async def logged(process: asyncio.subprocess.Process) -> bytes:
    process.send_signal(signal.SIGTERM)
    _, log = await asyncio.wait_for(process.communicate(), 10)
    return log


async def test_logs_have_the_keys_name_and_tenant_and_neither_key_nor_prompt(
    keys_file: Path, key: str
) -> None:
    llm = ScriptedLlm()
    flags = ("--keys-file", str(keys_file), "--drain-seconds", "0", "--log-level", "debug")
    body = ASK | {"messages": [{"role": "user", "content": PROMPT}]}
    async with (
        llm.serving() as server,
        gateway_process("--llm", f"127.0.0.1:{server.port}", *flags) as (process, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as http,
    ):
        statuses = []
        for shown in (key, key, key, key, "wrong-key", f"{key} {key}"):
            headers = {"authorization": f"Bearer {shown}"}
            answer = await http.post("/v1/chat/completions", json=body, headers=headers)
            statuses.append(answer.status_code)
        assert statuses == [200, 200, 200, 429, 401, 401]
        log = await logged(process)
    lines = [json.loads(line) for line in log.splitlines() if b'"event": "request"' in line]
    assert [line["status"] for line in lines] == statuses
    assert [line.get("key") for line in lines] == ["alice"] * 4 + [None] * 2
    assert lines[0]["tenant"] == "team-a"
    assert lines[3]["reason"] == "RATE_LIMIT"
    for secret in (key, "wrong-key", PROMPT):
        assert secret.encode() not in log


async def test_an_open_gateway_says_so_and_names_the_flag(keys_file: Path, key: str) -> None:
    async with gateway_process("--drain-seconds", "0") as (process, _):
        log = await logged(process)
    [line] = [json.loads(one) for one in log.splitlines() if b'"warning"' in one]
    assert "--keys-file" in line["event"]
    flags = ("--keys-file", str(keys_file), "--drain-seconds", "0")
    async with gateway_process(*flags) as (process, _):
        assert b'"warning"' not in await logged(process)


def test_a_keys_file_that_cannot_be_used_ends_the_start(keys_file: Path) -> None:
    assert "--keys-file" in ended_start("--keys-file", str(keys_file))
    keys_file.write_text("[[key]]\nname = 'hush'\n")
    told = ended_start("--keys-file", str(keys_file))
    assert "key[0].tenant" in told
    assert "hush" not in told


def test_certificates_that_cannot_be_used_end_the_start(tmp_path: Path) -> None:
    authority, cert, key = trustme.CA(), tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(authority.issue_cert("localhost").cert_chain_pems[0].bytes())
    key.write_bytes(authority.issue_cert("localhost").private_key_pem.bytes())
    assert "--tls-cert" in ended_start("--tls-cert", str(cert), "--tls-key", str(key))
    assert "--tls-cert" in ended_start("--tls-cert", str(cert))
    encrypted = subprocess.run(
        ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:x"],
        capture_output=True,
        check=True,
    )
    key.write_bytes(encrypted.stdout)
    assert "not encrypted" in ended_start("--tls-cert", str(cert), "--tls-key", str(key))


async def test_https_is_served_by_the_process_with_keys_and_limits_as_elsewhere(
    tmp_path: Path, keys_file: Path, key: str
) -> None:
    authority = trustme.CA()
    pair = authority.issue_cert("localhost")
    cert_path, key_path = tmp_path / "cert.pem", tmp_path / "key.pem"
    pair.cert_chain_pems[0].write_to_path(str(cert_path))
    pair.private_key_pem.write_to_path(str(key_path))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    tls = ("--tls-cert", str(cert_path), "--tls-key", str(key_path), "--drain-seconds", "0")
    llm = ScriptedLlm()
    async with (
        llm.serving() as server,
        gateway_process(
            "--llm", f"127.0.0.1:{server.port}", "--keys-file", str(keys_file), *tls
        ) as (_, port),
        httpx.AsyncClient(base_url=f"https://localhost:{port}", verify=trusting) as http,
    ):
        assert (await http.get("/health")).status_code == 200
        assert (await http.post("/v1/chat/completions", json=ASK)).status_code == 401
        http.headers["authorization"] = f"Bearer {key}"
        answer = await http.post("/v1/chat/completions", json=ASK)
        assert answer.text.endswith("data: [DONE]\n\n")
        large = await http.get("/health", headers={"x-large": "y" * 100_000})
        assert (large.status_code, large.json()["error"]["code"]) == (431, "headers_too_large")
        pair = authority.issue_cert("localhost")
        pair.private_key_pem.write_to_path(str(key_path))
        pair.cert_chain_pems[0].write_to_path(str(cert_path))
        wanted = ssl.PEM_cert_to_DER_cert(cert_path.read_text())
        async with asyncio.timeout(10):
            while await shown(port, trusting) != wanted:
                await asyncio.sleep(0.2)


async def shown(port: int, context: ssl.SSLContext) -> bytes | None:
    """The certificate that a new connection is shown, in DER."""
    _, writer = await asyncio.open_connection("localhost", port, ssl=context)
    found: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


def test_the_help_names_every_flag_of_keys_and_certificates() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "--help"], capture_output=True, text=True, check=True
    )
    for flag in ("--keys-file", "--open-metrics", "--open-page", "--tls-cert", "--tls-key",
                 "--cors-origins", "--body-timeout-seconds", "--header-timeout-seconds",
                 "--idle-timeout-seconds", "--max-header-bytes", "--max-headers",
                 "--max-json-depth", "--max-connections"):  # fmt: skip
        assert flag in done.stdout
