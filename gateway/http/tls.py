"""The certificate that the gateway shows, from files, and fresh again when they change."""

import ssl
from pathlib import Path

from chiasm import telemetry
from gateway.watch import State, state_of, watch


class TlsFileError(ValueError):
    """Files that make no certificate with its key. The text has no content of the files."""


class Certificate:
    """A context for a server, TLS 1.2 at least. Raises TlsFileError."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._paths = (certificate, key)
        self._known: State = state_of(self._paths)
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(self.context)

    async def follow(self) -> None:
        """Shows the files' newest certificate to new connections, until cancelled."""
        await watch(self._paths, self._known, self._reload)

    def _reload(self) -> None:
        log = telemetry.logger()
        try:
            # First into one that nobody uses: half of a pair would spoil the one in use.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except TlsFileError as fault:
            log.error("certificate is unusable; the one before it stays", detail=str(fault))
            return
        log.info("certificate read")

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            # A password would be asked for on the terminal: an encrypted key is a fault here.
            context.load_cert_chain(*self._paths, password=lambda: "")
        except ssl.SSLError:
            text = (
                "the certificate (PEM, with its chain) and the key (PEM, not encrypted) do not "
                "belong together or cannot be read"
            )
            raise TlsFileError(text) from None
        except OSError as error:
            raise TlsFileError(f"a file cannot be read: {error.strerror or 'unknown'}") from None
