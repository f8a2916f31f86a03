"""The keys file: TOML of one `[[key]]` table a key. `docs/gateway-keys.md` describes it."""

import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from chiasm import api_keys
from gateway.keys.limits import Limits

_MOST_BYTES: Final = 16 << 20


class KeysFileError(ValueError):
    """A file that cannot be used. The text says where and why and has no content of the file."""


@dataclass(frozen=True)
class Key:
    """One key of the file. `expires` is in Unix seconds, None for never."""

    name: str
    tenant: str
    digest: bytes
    limits: Limits
    expires: float | None


def _name(text: str) -> str:
    if not api_keys.NAME.fullmatch(text):
        raise ValueError(f"must be {api_keys.NAME_FORM}")
    return text


def _digest(text: str) -> str:
    if len(text) != 64 or not all(letter in "0123456789abcdef" for letter in text.lower()):
        raise ValueError("must be the 64 hexadecimal digits of a SHA-256")
    return text


Name = Annotated[str, AfterValidator(_name)]
Count = Annotated[int, Field(ge=1, le=10**12)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Name
    tenant: Name
    sha256: Annotated[str, AfterValidator(_digest)]
    expires: AwareDatetime | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent_requests: Count | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    key: list[_Entry]


def read_keys(path: Path) -> list[Key]:
    """The keys of a file, in its order. Raises KeysFileError."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise KeysFileError(f"cannot be read: {error.strerror or 'unknown'}") from None
    if len(text) > _MOST_BYTES:
        raise KeysFileError(f"has more than {_MOST_BYTES} bytes")
    return keys_in(text)


def keys_in(text: bytes) -> list[Key]:
    """The keys of a file's content. Raises KeysFileError."""
    try:
        read = _File.model_validate(tomllib.loads(text.decode()))
    except tomllib.TOMLDecodeError:
        # Its own text quotes the file.
        raise KeysFileError("is not valid TOML") from None
    except UnicodeDecodeError:
        raise KeysFileError("is not text in UTF-8") from None
    except ValidationError as faults:
        raise KeysFileError(_fault(faults.errors(include_url=False)[0])) from None
    keys = [_key(entry) for entry in read.key]
    _refuse_doubles(keys)
    return keys


def _key(entry: _Entry) -> Key:
    limits = Limits(entry.requests_per_minute, entry.tokens_per_minute, entry.concurrent_requests)
    expires: datetime | None = entry.expires
    return Key(
        entry.name,
        entry.tenant,
        bytes.fromhex(entry.sha256),
        limits,
        None if expires is None else expires.timestamp(),
    )


def _refuse_doubles(keys: list[Key]) -> None:
    for kind, values in (
        ("name", [key.name for key in keys]),
        ("sha256", [key.digest for key in keys]),
    ):
        value, count = Counter(values).most_common(1)[0] if values else ("", 0)
        if count > 1:
            at = [number for number, one in enumerate(values) if one == value]
            raise KeysFileError(f"key[{at[0]}] and key[{at[1]}] have the same {kind}")


def _fault(fault: Mapping[str, Any]) -> str:
    place = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in fault["loc"])
    text = str(fault["msg"]).removeprefix("Value error, ")
    # A name that is not of the form may be anything, a key pasted into the wrong place included.
    known = fault["type"] != "extra_forbidden"
    told = place.lstrip(".") if known else place.lstrip(".").rpartition(".")[0] or "the file"
    return f"{told}: {text[:1].lower()}{text[1:]}" if known else f"{told} has a field that is none"
