"""What the settings and the files of mutual TLS may be, and how a start with others ends."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from chiasm.rpc import mtls
from chiasm.rpc.certificates import MtlsFileError, load
from encoder_service.settings import EncoderSettings
from gateway.settings import GatewaySettings
from llm_service.settings import LlmSettings
from tests.rpc_tls.authority import CLIENT, Authority, Files


@pytest.fixture
def files(ca: Authority, tmp_path: Path) -> Files:
    return ca.files(tmp_path / "files", "chiasm-gateway")


@pytest.mark.parametrize(
    ("text", "dns", "uris"),
    [
        ("chiasm-llm", {"chiasm-llm"}, set()),
        ("A.b.svc.cluster.local , c,", {"a.b.svc.cluster.local", "c"}, set()),
        ("spiffe://td/ns/X", set(), {"spiffe://td/ns/X"}),
        ("under_score.example,https://a/b?c=d", {"under_score.example"}, {"https://a/b?c=d"}),
    ],
)
def test_names_that_may_call(text: str, dns: set[str], uris: set[str]) -> None:
    allowed = mtls.callers(text)
    assert set(allowed.dns) == dns
    assert set(allowed.uris) == uris
    for name in dns:
        assert allowed.include(frozenset([name, "other"]), frozenset())
        assert not allowed.include(frozenset([f"{name}.other"]), frozenset([name]))
    for name in uris:
        assert allowed.include(frozenset(), frozenset([name]))
        assert not allowed.include(frozenset([name]), frozenset([f"{name}/other"]))


@pytest.mark.parametrize(
    "text", ["*.svc", "a b", "spiffe://", "ümlaut", "-a", "a:1", "x" * 254, "http:/a", "a..b"]
)
def test_names_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is neither a DNS name nor a URI"):
        mtls.callers(text)
    with pytest.raises(ValueError, match=r"is no DNS name|is a URI"):
        mtls.server_names(text)


def test_a_server_is_not_named_by_a_uri() -> None:
    assert mtls.server_names("a, b") == ("a", "b")
    with pytest.raises(ValueError, match="gRPC compares only DNS names"):
        mtls.server_names("spiffe://td/x")


PART: dict[str, Any] = {"mtls_cert": Path("c"), "mtls_key": Path("k"), "mtls_ca": Path("a")}


def test_the_settings_of_one_process_agree() -> None:
    model: dict[str, Any] = {"model": Path("m")}
    with pytest.raises(ValueError, match="go together"):
        GatewaySettings(mtls_cert=Path("c"))
    with pytest.raises(ValueError, match="--mtls-llm must name"):
        GatewaySettings(**PART)
    with pytest.raises(ValueError, match="--mtls-llm needs --mtls-cert"):
        GatewaySettings(mtls_llm="chiasm-llm")
    with pytest.raises(ValueError, match="--mtls-clients must name"):
        EncoderSettings(**model, **PART)
    with pytest.raises(ValueError, match="--mtls-clients must name"):
        LlmSettings(**model, **PART, mtls_encoders="e")
    with pytest.raises(ValueError, match="--mtls-encoders must name"):
        LlmSettings(**model, **PART, mtls_clients="g")
    assert LlmSettings(**model, **PART, mtls_clients="g", vision="local").mtls_files is not None
    assert GatewaySettings().mtls_files is None


def _spoil(ca: Authority, files: Files, how: str) -> None:
    match how:
        case "encrypted":
            from cryptography.hazmat.primitives import serialization as s

            key = s.load_pem_private_key(files.key.read_bytes(), None)
            sealed = s.BestAvailableEncryption(b"x")
            files.key.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, sealed))
        case "edwards":
            files.write(ca.issue("x", key=ed25519.Ed25519PrivateKey.generate()), ca.pem)
        case "P-521":
            files.write(ca.issue("x", key=ec.generate_private_key(ec.SECP521R1())), ca.pem)
        case "other purpose":
            from cryptography.x509.oid import ExtendedKeyUsageOID

            files.write(ca.issue("x", usages=(ExtendedKeyUsageOID.CODE_SIGNING,)), ca.pem)
        case "other key":
            files.key.write_bytes(ca.issue("x").key)
        case "directory":
            files.ca.unlink()
            files.ca.mkdir()
        case "absent":
            files.cert.unlink()
        case "swapped":
            files.cert.write_bytes(files.key.read_bytes())


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("encrypted", "--mtls-key: it is encrypted"),
        ("edwards", "--mtls-key: gRPC takes"),
        ("P-521", "--mtls-key: gRPC takes"),
        ("other purpose", "--mtls-cert: its extended key usage"),
        ("other key", "--mtls-key: it does not belong"),
        ("directory", "--mtls-ca: .* cannot be read"),
        ("absent", "--mtls-cert: .* cannot be read"),
        ("swapped", "--mtls-cert: it holds no certificate"),
    ],
)
def test_files_that_cannot_serve(ca: Authority, files: Files, how: str, told: str) -> None:
    _spoil(ca, files, how)
    with pytest.raises(MtlsFileError, match=told) as caught:
        load(mtls.Files(files.cert, files.key, files.ca))
    assert "PRIVATE" not in str(caught.value)


def test_what_is_loaded_shows_no_key(ca: Authority, files: Files) -> None:
    loaded = load(mtls.Files(files.cert, files.key, files.ca))
    assert loaded.names == ("chiasm-gateway",)
    assert b"PRIVATE KEY" in loaded.key
    assert "PRIVATE KEY" not in repr(loaded)
    files.write(ca.issue("client-only", usages=(CLIENT,)), ca.pem)
    assert load(mtls.Files(files.cert, files.key, files.ca)).names == ("client-only",)


@pytest.mark.parametrize("part", ["gateway", "encoder_service", "llm_service"])
def test_a_start_with_bad_files_exits_with_2_and_the_flag(
    ca: Authority, files: Files, part: str
) -> None:
    files.key.write_bytes(ca.issue("x").key)
    more = {
        "gateway": ["--mtls-llm", "chiasm-llm", "--port", "0"],
        "encoder_service": ["--mtls-clients", "x", "--model", "demo_model/checkpoint"],
        "llm_service": [
            "--mtls-clients", "x", "--mtls-encoders", "y", "--model", "demo_model/checkpoint",
        ],
    }[part]  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-m", part, *files.flags, *more],
        capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 2
    assert "error: --mtls-key: it does not belong" in ran.stderr
    assert "PRIVATE" not in ran.stderr
