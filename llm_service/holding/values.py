"""What a store of held embeddings deals in."""

import hashlib
import secrets
from dataclasses import dataclass

from llm_service.embeddings import Rows

ID_PREFIX = "emb_"
_ID_BYTES = 32


@dataclass(frozen=True, eq=False)
class Held:
    """Rows under an id until `expires_at`, in seconds since the epoch."""

    id: str
    rows: Rows
    expires_at: float


@dataclass(frozen=True)
class Binding:
    """What a caller's alias names.

    Attributes:
        id: of the held rows.
        rows: `Rows.digest` of them.
        file: SHA-256 over picture file and options; empty where only the rows were ever sent.
    """

    id: str
    rows: bytes
    file: bytes = b""

    def agrees(self, other: "Binding") -> bool:
        """Whether both name the same picture: by its file, or else by its rows."""
        if self.file and other.file:
            return self.file == other.file
        return self.rows == other.rows


def new_id() -> str:
    """An id that nobody can guess: 256 random bits."""
    return ID_PREFIX + secrets.token_urlsafe(_ID_BYTES)


def content_key(tenant: str, rows: Rows) -> bytes:
    """Differs for any two that must not share an id: other tenant, rows or claims beside them."""
    beside = repr((tenant, rows.identity_checked, rows.image_size)).encode()
    return hashlib.sha256(rows.digest + beside).digest()
