"""API keys as their file holds them: a name, a tenant and the SHA-256 of the key, never the key.

A key carries 256 bits of chance, so its plain hash cannot be searched for; passwords would need a
slow hash with a salt.
"""

import hashlib
import re
import secrets
from typing import Final

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
"""What names of keys and tenants are made of: they stand in logs and in requests."""
NAME_FORM: Final = "1 to 64 letters, digits and . _ @ -, a letter or digit first"
_PREFIX: Final = "chiasm-"  # by which people and scanners of secrets know what it is


def new_key() -> str:
    """A key that nobody has had."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    """The 32 bytes by which a key is known."""
    return hashlib.sha256(key.encode()).digest()
