"""A certificate authority for tests: right certificates, and wrong ones of every kind."""

import datetime
import itertools
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
_PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
_PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey
_DAY = datetime.timedelta(days=1)
_serial = itertools.count(1)


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, in PEM."""

    cert: bytes
    key: bytes


@dataclass(frozen=True)
class Files:
    """The three files of one process."""

    cert: Path
    key: Path
    ca: Path

    def write(self, issued: Issued, ca: bytes) -> None:
        for path, content in ((self.cert, issued.cert), (self.key, issued.key), (self.ca, ca)):
            path.write_bytes(content)

    @property
    def flags(self) -> list[str]:
        """As a process takes them."""
        named = {"--mtls-cert": self.cert, "--mtls-key": self.key, "--mtls-ca": self.ca}
        return [word for name, path in named.items() for word in (name, str(path))]


class Authority:
    """Issues certificates for DNS names and URIs; `pem` is its own."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(f"Test authority {next(_serial)}")
        unlimited = x509.BasicConstraints(ca=True, path_length=None)
        built = _begun(self._name, self._name, self._key.public_key(), -1, 30)
        signed = built.add_extension(unlimited, critical=True).sign(self._key, hashes.SHA256())
        self.pem = signed.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        *sans: str,
        from_days: float = -1,
        to_days: float = 10,
        usages: tuple[x509.ObjectIdentifier, ...] = (SERVER, CLIENT),
        key: _PrivateKey | None = None,
    ) -> Issued:
        """A certificate for `sans`, valid between two moments in days from now."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        built = _begun(_name("part"), self._name, key.public_key(), from_days, to_days)
        if sans:
            names = x509.SubjectAlternativeName([_san(one) for one in sans])
            built = built.add_extension(names, critical=False)
        if usages:
            built = built.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        signed = built.sign(self._key, hashes.SHA256())
        return Issued(
            signed.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )

    def files(self, directory: Path, *sans: str) -> Files:
        """The files of a process that has a certificate for `sans`, in a new directory."""
        directory.mkdir()
        made = Files(directory / "tls.crt", directory / "tls.key", directory / "ca.crt")
        made.write(self.issue(*sans), self.pem)
        return made


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _san(text: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier(text) if "://" in text else x509.DNSName(text)


def _begun(
    subject: x509.Name, issuer: x509.Name, key: _PublicKey, from_days: float, to_days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + from_days * _DAY)
        .not_valid_after(now + to_days * _DAY)
    )
