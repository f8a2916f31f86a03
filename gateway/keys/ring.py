"""The keys in force: found by what a caller shows, replaced as a whole when their file changes."""

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chiasm import api_keys, telemetry
from chiasm.errors import ChiasmError, Reason
from gateway.keys.allowance import Allowance
from gateway.keys.file import Key, KeysFileError, read_keys
from gateway.watch import State, state_of, watch

_SCHEME: Final = "bearer"
_NOBODY: Final = bytes(32)
# A key of ours has 50 characters; nothing longer is hashed.
_LONGEST: Final = 512


@dataclass(frozen=True)
class Bearer:
    """Who asks: a key of the file, and what is left to it."""

    key: Key
    allowance: Allowance


class KeyRing:
    """The keys of one file. Finding one takes as long whatever is shown.

    Digests are looked up under a secret of this process: how far a wrong one agrees with a right
    one then shows nowhere, not even in the order of a table.
    """

    def __init__(self, path: Path) -> None:
        """Raises KeysFileError."""
        self._path = path
        self._known: State = state_of([path])
        self._secret = secrets.token_bytes(32)
        self._bearers: Mapping[bytes, Bearer] = {}
        self._put(read_keys(path), time.monotonic())

    async def follow(self) -> None:
        """Keeps the keys as the file has them, until cancelled."""
        await watch([self._path], self._known, self._reload)

    def _reload(self) -> None:
        """A file that cannot be used leaves the keys as they are."""
        log = telemetry.logger()
        try:
            keys = read_keys(self._path)
        except KeysFileError as fault:
            log.error("keys file is unusable; the keys before it stay", detail=str(fault))
            return
        self._put(keys, time.monotonic())
        log.info("keys file read", keys=len(keys))

    def bearer(self, shown: Sequence[str], now: float) -> Bearer:
        """Whose key is in the values of `Authorization`. `now` is in Unix seconds.

        Raises UNAUTHENTICATED.
        """
        if not shown:
            raise _refused("This server needs an API key: Authorization: Bearer KEY.")
        scheme, _, key = shown[0].strip().partition(" ")
        if len(shown) > 1 or scheme.lower() != _SCHEME or not key.strip():
            raise _refused("Show the API key in one header: Authorization: Bearer KEY.")
        found = self._found(key.strip())
        if found is None:
            raise _refused("This API key is not known here.")
        if found.key.expires is not None and found.key.expires <= now:
            raise _refused("This API key has expired; ask the operator for a new one.")
        return found

    def _found(self, key: str) -> Bearer | None:
        digest = api_keys.digest_of(key[:_LONGEST])
        found = self._bearers.get(self._place(digest))
        known = hmac.compare_digest(_NOBODY if found is None else found.key.digest, digest)
        return found if known and len(key) <= _LONGEST else None

    def _put(self, keys: Sequence[Key], now: float) -> None:
        # By name: a key that was replaced goes on where the old one was.
        before = {one.key.name: one.allowance for one in self._bearers.values()}
        bearers = {}
        for key in keys:
            allowance = before.get(key.name)
            if allowance is None:
                allowance = Allowance(key.limits, now)
            else:
                allowance.change(key.limits, now)
            bearers[self._place(key.digest)] = Bearer(key, allowance)
        self._bearers = bearers

    def _place(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()


def _refused(text: str) -> ChiasmError:
    return ChiasmError(Reason.UNAUTHENTICATED, text)
