"""The certificate, key and authorities of this process, from files that may change at any time.

Files are read whole and compared by content: mounted secrets change by a link, editors in place.
A change counts once two looks have found the same, and only if it makes sense as a whole, so a pair
that is half written is never used; what was used before stays until then.
"""

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from prometheus_client import CollectorRegistry, Counter, Gauge

from chiasm import telemetry
from chiasm.rpc.mtls import Files, Material

_FILE_BYTES: Final = 1 << 20
_LOOK_SECONDS: Final = 1.0
_WARN_SECONDS: Final = 3600.0
_CURVES: Final = ("secp256r1", "secp384r1")


class MtlsFileError(ValueError):
    """Files that cannot be used. The text begins with the flag and has no content of the files."""


# The three files as they were read, in the order of `Files`.
_Contents = tuple[bytes, bytes, bytes]


def load(files: Files) -> Material:
    """What the files hold now. Raises MtlsFileError."""
    return _checked(_contents(files))


def _contents(files: Files) -> _Contents:
    return (
        _read("--mtls-cert", files.cert),
        _read("--mtls-key", files.key),
        _read("--mtls-ca", files.ca),
    )


@functools.lru_cache(maxsize=256)
def expiry_of(pem: bytes) -> float:
    """Unix time at which a peer's certificate expires; 0 for one that cannot be read."""
    try:
        return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
    except Exception:  # as `_checked`
        return 0


def _read(flag: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES + 1)
    except OSError as error:
        why = error.strerror or "unknown"
        raise MtlsFileError(f"{flag}: {path} cannot be read: {why}") from None
    if len(content) > _FILE_BYTES:
        raise MtlsFileError(f"{flag}: {path} has more than {_FILE_BYTES} bytes")
    return content


def _checked(contents: _Contents) -> Material:
    try:
        return _understood(*contents)
    except MtlsFileError:
        raise
    except Exception:  # whatever the parser makes of odd fields; a look must go on
        raise MtlsFileError("--mtls-cert: it has a field that cannot be read") from None


def _understood(cert: bytes, key: bytes, ca: bytes) -> Material:
    leaf = _certificates("--mtls-cert", cert)[0]
    _certificates("--mtls-ca", ca)
    _check_pair(leaf, key)
    _check_usage(leaf)
    return Material(cert, key, ca, _names(leaf), leaf.not_valid_after_utc.timestamp())


def _certificates(flag: str, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        text = f"{flag}: it holds no certificate in PEM, or one that is damaged"
        raise MtlsFileError(text) from None


def _check_pair(leaf: x509.Certificate, pem: bytes) -> None:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
        public = leaf.public_key()
    except TypeError:
        raise MtlsFileError("--mtls-key: it is encrypted; give the key in the clear") from None
    except (ValueError, UnsupportedAlgorithm):
        raise MtlsFileError("--mtls-key: it holds no private key in PEM") from None
    curve = key.curve.name if isinstance(key, ec.EllipticCurvePrivateKey) else ""
    if not (isinstance(key, rsa.RSAPrivateKey) or curve in _CURVES):
        raise MtlsFileError("--mtls-key: gRPC takes RSA keys and those on P-256 or P-384")
    if key.public_key() != public:
        raise MtlsFileError("--mtls-key: it does not belong to --mtls-cert's first certificate")


def _check_usage(leaf: x509.Certificate) -> None:
    """Peers refuse a certificate that says what it is for, but not this."""
    try:
        usages = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    wanted = {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    if not wanted & set(usages):
        raise MtlsFileError(
            "--mtls-cert: its extended key usage allows neither server nor client authentication"
        )


def _names(leaf: x509.Certificate) -> tuple[str, ...]:
    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    kinds = (x509.DNSName, x509.UniformResourceIdentifier)
    return tuple(name for kind in kinds for name in found.get_values_for_type(kind))


class Certificates:
    """The newest usable state of `files`. Raises MtlsFileError if there is none at the start.

    `look` (and so `looked`) may be called on any thread, `latest` too.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._used = _contents(files)
        self._material = _checked(self._used)
        self._pending: _Contents | str | None = None
        self._told: _Contents | str | None = None
        self._looking = threading.Lock()
        self._looked_at = time.monotonic()
        self._on_outcome: Callable[[str], None] = lambda _: None

    def latest(self) -> Material:
        """As of the last look."""
        return self._material

    def looked(self) -> Material:
        """After a look, if the last is more than a second ago: for who has no task that follows."""
        if time.monotonic() - self._looked_at >= _LOOK_SECONDS:
            self.look()
        return self._material

    def look(self) -> None:
        """Reads the files; takes up what has not changed since the last look and can be used."""
        if not self._looking.acquire(blocking=False):
            return  # another thread does
        try:
            self._looked_at = time.monotonic()
            self._compare(self._seen())
        finally:
            self._looking.release()

    def _seen(self) -> _Contents | str:
        try:
            return _contents(self._files)
        except MtlsFileError as fault:
            return str(fault)

    def _compare(self, seen: _Contents | str) -> None:
        settled, self._pending = seen == self._pending, seen
        if seen == self._used:
            self._told = None
        elif settled and seen != self._told:
            self._told = seen
            self._take(seen)

    def _take(self, seen: _Contents | str) -> None:
        log = telemetry.logger()
        try:
            if isinstance(seen, str):
                raise MtlsFileError(seen)
            self._material = _checked(seen)
        except MtlsFileError as fault:
            log.error("mTLS files are unusable; those before stay", detail=str(fault))
            self._on_outcome("refused")
            return
        assert not isinstance(seen, str)
        self._used = seen
        log.info("mTLS files read", names=self._material.names, **self._remaining())
        self._on_outcome("taken")

    def _remaining(self) -> dict[str, float]:
        return {"days_left": round((self._material.not_after - time.time()) / 86_400, 1)}

    async def follow(self, registry: CollectorRegistry) -> None:
        """Looks each second until cancelled, tells `registry`, and warns of an expired one."""
        self._count(registry)
        telemetry.logger().info("mTLS", names=self._material.names, **self._remaining())
        warned_at = -_WARN_SECONDS
        while True:
            if self._material.not_after <= time.time() and (
                time.monotonic() - warned_at >= _WARN_SECONDS
            ):
                warned_at = time.monotonic()
                text = "the certificate of --mtls-cert has expired; peers refuse it"
                telemetry.logger().error(text, names=self._material.names)
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await asyncio.to_thread(self.look)
            except Exception:  # the next look may go well
                telemetry.logger().exception("cannot look at the mTLS files")

    def _count(self, registry: CollectorRegistry) -> None:
        expiry = Gauge(
            "chiasm_mtls_certificate_expiry_seconds",
            "Unix time at which this process's own mTLS certificate expires.",
            registry=registry,
        )
        expiry.set_function(lambda: self._material.not_after)
        reloads = Counter(
            "chiasm_mtls_reloads",
            "Changes of the mTLS files, by outcome: taken, or refused as unusable.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("taken", "refused"):
            reloads.labels(outcome)
        self._on_outcome = lambda outcome: reloads.labels(outcome).inc()


def certificates_of(files: Files | None) -> Certificates | None:
    """Those of `files`, none for none. Raises MtlsFileError."""
    return None if files is None else Certificates(files)


@asynccontextmanager
async def followed(
    certificates: Certificates | None, registry: CollectorRegistry
) -> AsyncIterator[None]:
    """Keeps `certificates` as their files have them while open."""
    if certificates is None:
        yield
        return
    following = asyncio.create_task(certificates.follow(registry))
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
