"""The keys file: what it may hold, and what is said of one that cannot be used."""

import hashlib
from pathlib import Path

import pytest

from chiasm import api_keys
from chiasm.errors import ChiasmError, Reason
from gateway.keys.file import Key, KeysFileError, keys_in, read_keys
from gateway.keys.limits import Limits
from gateway.keys.ring import KeyRing

HASH = hashlib.sha256(b"key-1").hexdigest()
OTHER = hashlib.sha256(b"key-2").hexdigest()
ENTRY = f'[[key]]\nname = "a"\ntenant = "t"\nsha256 = "{HASH}"\n'


def fault_of(text: str) -> str:
    with pytest.raises(KeysFileError) as caught:
        keys_in(text.encode())
    return str(caught.value)


def test_a_key_has_a_name_a_tenant_a_hash_and_limits() -> None:
    text = (
        ENTRY + "requests_per_minute = 60\ntokens_per_minute = 1000\nconcurrent_requests = 2\n"
        "expires = 1970-01-02T00:00:00Z\n"
    )
    [key] = keys_in(text.encode())
    assert key == Key("a", "t", hashlib.sha256(b"key-1").digest(), Limits(60, 1000, 2), 86_400.0)
    [plain] = keys_in(ENTRY.encode())
    assert (plain.limits, plain.expires) == (Limits(), None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "key"),
        ("[[key", "TOML"),
        ("[[key]]\nname = 1", "key[0].name"),
        (ENTRY.replace('"a"', '""'), "key[0].name"),
        (ENTRY.replace('"a"', '"a\\nb"'), "key[0].name"),
        (ENTRY.replace('tenant = "t"\n', ""), "key[0].tenant"),
        (ENTRY.replace('"t"', '""'), "key[0].tenant"),
        (ENTRY.replace(HASH, "secret-key"), "64 hexadecimal"),
        (ENTRY + "requests_per_minute = 0", "key[0].requests_per_minute"),
        (ENTRY + "tokens_per_minute = true", "key[0].tokens_per_minute"),
        (ENTRY + "expires = 2030-01-01T00:00:00", "key[0].expires"),
        (ENTRY + 'key = "secret-key"', "key[0]"),
        (ENTRY + ENTRY.replace(HASH, OTHER), "same name"),
        (ENTRY + ENTRY.replace('"a"', '"b"'), "same sha256"),
    ],
)
def test_a_faulty_file_is_refused_with_the_place_and_without_its_content(
    text: str, words: str
) -> None:
    fault = fault_of(text)
    assert words in fault
    assert "secret-key" not in fault
    assert HASH not in fault


def test_a_file_that_is_not_there_or_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeysFileError, match="cannot be read"):
        read_keys(tmp_path / "none.toml")
    with pytest.raises(KeysFileError, match="UTF-8"):
        keys_in(b"\xff\xfe")


def test_keys_differ_and_say_what_they_are() -> None:
    keys = {api_keys.new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("chiasm-") and len(key) == 50 for key in keys)


def refused(ring: KeyRing, *values: str, now: float = 0.0) -> str:
    with pytest.raises(ChiasmError) as caught:
        ring.bearer(values, now)
    assert caught.value.reason is Reason.UNAUTHENTICATED
    return caught.value.message


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    path = tmp_path / "keys.toml"
    path.write_text(ENTRY + "expires = 1970-01-02T00:00:00Z\n")
    return KeyRing(path)


@pytest.mark.parametrize("value", ["Bearer key-1", "bearer key-1", "BEARER   key-1 "])
def test_a_key_is_known_as_a_bearer(ring: KeyRing, value: str) -> None:
    assert ring.bearer([value], 0.0).key.name == "a"


@pytest.mark.parametrize(
    "values",
    [
        [], [""], ["key-1"], ["Bearer"], ["Bearer "], ["Basic key-1"], ["Bearer key-"],
        ["Bearer key-12"], ["Bearer key-1 key-1"], ["Bearer key-1", "Bearer key-1"],
        ["Bearer key-1, Bearer key-1"], ["Bearer " + "key-1" * 10_000], [f"Bearer {HASH}"],
        ["Bearer \xff\xfe"], ["Bearer key-1\x00"],
    ],
)  # fmt: skip
def test_anything_else_is_refused_and_not_repeated(ring: KeyRing, values: list[str]) -> None:
    told = refused(ring, *values)
    assert "key-" not in told
    assert HASH not in told


def test_a_key_ends_at_its_time(ring: KeyRing) -> None:
    assert ring.bearer(["Bearer key-1"], 86_399.9).key.name == "a"
    assert "expired" in refused(ring, "Bearer key-1", now=86_400.0)


def test_a_path_that_is_no_file_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(KeysFileError, match="cannot be read"):
        KeyRing(tmp_path)
