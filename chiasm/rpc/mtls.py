"""What the settings say about mutual TLS: the files, who may call, who is called. Pure.

A name is a subject alternative name (SAN) of a certificate: a DNS name or a URI (`spiffe://...`).
A server is known by a DNS name, for gRPC compares no other with a server's certificate.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

CERT: Final = (
    "Certificate of this process with its chain (PEM), shown to every peer: gRPC is then mutual "
    "TLS alone (docs/mtls.md). Read again when it changes. Goes with --mtls-key and --mtls-ca."
)
KEY: Final = "Key of --mtls-cert (PEM, not encrypted). Read again when it changes."
CA: Final = (
    "Certificates (PEM) of the authorities that peers' certificates must come from. Read again "
    "when it changes."
)
CLIENTS: Final = (
    "With --mtls-cert: who may call, by names in the certificate (SAN), separated by commas; each "
    "a DNS name or a URI such as spiffe://cluster.local/ns/chiasm/sa/chiasm-llm."
)
# Host names of RFC 1123; the underscore is allowed in container networks.
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_DNS: Final = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*", re.I | re.A)
_URI: Final = re.compile(r"[a-z][a-z0-9+.-]*://[\x21-\x2b\x2d-\x7e]+", re.I)


def servers(whose: str) -> str:
    """The help of a setting that names the servers which are called."""
    return (
        f"With --mtls-cert: DNS names (SAN) that the certificates {whose} may have, separated by "
        "commas; one of them must be in it, whatever address was dialled."
    )


@dataclass(frozen=True)
class Files:
    """The files of one process, in PEM."""

    cert: Path
    key: Path
    ca: Path


@dataclass(frozen=True)
class Material:
    """One consistent state of the files, in PEM.

    Attributes:
        names: SANs of the certificate, for the log.
        not_after: unix time at which the certificate expires.
    """

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes
    names: tuple[str, ...]
    not_after: float


@dataclass(frozen=True)
class Callers:
    """Names of which a caller's certificate must have one."""

    dns: frozenset[str]
    uris: frozenset[str]

    def include(self, dns: frozenset[str], uris: frozenset[str]) -> bool:
        """Whether a certificate with these names is a caller's. DNS names in lower case."""
        return bool(self.dns & dns or self.uris & uris)


def files(cert: Path | None, key: Path | None, ca: Path | None) -> Files | None:
    """The three files, or none of them. Raises ValueError for one or two."""
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        raise ValueError("--mtls-cert, --mtls-key and --mtls-ca go together; give all or none")
    return Files(cert, key, ca)


def callers(text: str) -> Callers:
    """The names of a list. Raises ValueError for one that is no SAN."""
    names = _listed(text)
    uris = frozenset(name for name in names if "://" in name)
    for name in names:
        if not (_URI if name in uris else _DNS).fullmatch(name):
            raise ValueError(f"{name!r} is neither a DNS name nor a URI such as spiffe://td/path")
    return Callers(frozenset(name.lower() for name in names if name not in uris), uris)


def server_names(text: str) -> tuple[str, ...]:
    """The DNS names of a list, in order. Raises ValueError."""
    names = _listed(text)
    for name in names:
        if "://" in name:
            raise ValueError(
                f"{name!r} is a URI; gRPC compares only DNS names with a server's certificate: "
                "give the servers one (it may stand beside the URI)"
            )
        if not _DNS.fullmatch(name):
            raise ValueError(f"{name!r} is no DNS name")
    return names


def check(found: Files | None, flag: str, names: str, *, needed: bool = True) -> None:
    """Raises ValueError unless `flag` names somebody where mutual TLS is on and nobody else."""
    if found is None and names.strip(" ,"):
        raise ValueError(f"{flag} needs --mtls-cert, --mtls-key and --mtls-ca")
    if found is not None and needed and not names.strip(" ,"):
        raise ValueError(f"{flag} must name at least one SAN where --mtls-cert is given")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))
