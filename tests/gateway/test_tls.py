"""HTTPS by files: who is shown, what is refused, and new certificates without a restart."""

import asyncio
import socket
import ssl
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography import x509
from pydantic import ValidationError

from gateway.http.tls import Certificate, TlsFileError
from gateway.settings import GatewaySettings
from tests.gateway.gateway_system import gateway_before
from tests.scripted_llm import MODEL, ScriptedLlm

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


class Files:
    """A certificate of `authority` for this machine and its key, as an operator has them."""

    def __init__(self, directory: Path, authority: trustme.CA) -> None:
        self.cert, self.key = directory / "cert.pem", directory / "key.pem"
        self._authority = authority
        self.renew()

    def renew(self) -> int:
        """Puts a new pair in place; returns its serial number."""
        pair = self._authority.issue_cert("localhost", "127.0.0.1")
        self.key.write_bytes(pair.private_key_pem.bytes())
        self.cert.write_bytes(b"".join(blob.bytes() for blob in pair.cert_chain_pems))
        return x509.load_pem_x509_certificate(self.cert.read_bytes()).serial_number

    @property
    def settings(self) -> dict[str, Path]:
        return {"tls_cert": self.cert, "tls_key": self.key}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, authority: trustme.CA) -> Files:
    return Files(tmp_path, authority)


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def shown(port: int, context: ssl.SSLContext) -> int:
    """The serial number of the certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(found).serial_number


async def test_a_client_that_trusts_the_authority_is_answered_whole_and_streamed(
    files: Files, authority: trustme.CA
) -> None:
    llm = ScriptedLlm()
    async with (
        llm.serving() as server,
        gateway_before(server.port, **files.settings) as port,
        httpx.AsyncClient(
            base_url=f"https://localhost:{port}", verify=trusting(authority), timeout=20
        ) as http,
    ):
        answer = await http.post("/v1/chat/completions", json=ASK)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello, world"
        streamed = await http.post("/v1/chat/completions", json=ASK | {"stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        large = ASK | {"pad": "x" * (8 << 20)}
        assert (await http.post("/v1/chat/completions", json=large)).status_code == 200


async def test_a_client_that_does_not_is_not_talked_into_it(files: Files) -> None:
    async with gateway_before(1, **files.settings) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            await shown(port, ssl.create_default_context())


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_tls_1_2_and_1_3_are_spoken(
    files: Files, authority: trustme.CA, version: ssl.TLSVersion
) -> None:
    context = trusting(authority)
    context.minimum_version = context.maximum_version = version
    async with gateway_before(1, **files.settings) as port:
        assert await shown(port, context)


async def test_older_tls_and_plain_http_are_not(files: Files, authority: trustme.CA) -> None:
    assert Certificate(files.cert, files.key).context.minimum_version == ssl.TLSVersion.TLSv1_2
    async with gateway_before(1, **files.settings) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
            await asyncio.to_thread(plain.sendall, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200" not in await asyncio.to_thread(plain.recv, 1000)
        assert await shown(port, trusting(authority))


async def until_shown(port: int, context: ssl.SSLContext, serial: int) -> None:
    async with asyncio.timeout(10):
        while await shown(port, context) != serial:
            await asyncio.sleep(0.1)


async def test_a_renewed_certificate_is_shown_and_open_connections_go_on(
    files: Files, authority: trustme.CA
) -> None:
    context = trusting(authority)
    async with (
        gateway_before(1, **files.settings) as port,
        httpx.AsyncClient(base_url=f"https://localhost:{port}", verify=context) as http,
    ):
        assert (await http.get("/health")).status_code == 200
        await until_shown(port, context, files.renew())
        assert (await http.get("/health")).status_code == 200


async def test_a_pair_that_does_not_belong_together_leaves_the_one_before(
    files: Files, authority: trustme.CA
) -> None:
    context = trusting(authority)
    async with gateway_before(1, **files.settings) as port:
        before = await shown(port, context)
        files.key.write_bytes(authority.issue_cert("localhost").private_key_pem.bytes())
        await asyncio.sleep(2.5)
        assert await shown(port, context) == before
        files.cert.write_text("no certificate")
        await asyncio.sleep(2.5)
        assert await shown(port, context) == before
        await until_shown(port, context, files.renew())


def test_files_that_make_no_pair_end_the_start_and_are_not_quoted(
    files: Files, authority: trustme.CA
) -> None:
    other = files.key.with_name("other.pem")
    other.write_bytes(authority.issue_cert("localhost").private_key_pem.bytes())
    with pytest.raises(TlsFileError, match="belong together"):
        Certificate(files.cert, other)
    with pytest.raises(TlsFileError, match="cannot be read"):
        Certificate(files.cert, files.key.with_name("none.pem"))


def test_one_of_the_two_flags_alone_ends_the_start(files: Files) -> None:
    with pytest.raises(ValidationError, match="go together"):
        GatewaySettings(tls_cert=files.cert)
