"""`chiasm key new`: makes an API key for the gateway and the entry by which it is known."""

import argparse
import os
import sys
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from chiasm import api_keys

_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")


def run(options: argparse.Namespace) -> int:
    """Shows a new key once. Returns 0; 2 for a file that cannot take it."""
    key = api_keys.new_key()
    entry = "\n".join(_lines(options, key)) + "\n"
    if options.file is None:
        print(
            f"{key}\n\nThe key is shown only now. For the gateway's --keys-file:\n\n{entry}", end=""
        )
        return 0
    fault = _fault(options.file, options.name)
    if fault:
        print(f"error: {options.file} {fault}", file=sys.stderr)
        return 2
    try:
        _append(options.file, entry)
    except OSError as error:
        print(f"error: {options.file} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    print(key)
    print(f"The key is shown only now; {options.file} has its hash.", file=sys.stderr)
    return 0


def _lines(options: argparse.Namespace, key: str) -> Iterator[str]:
    yield "[[key]]"
    yield f'name = "{options.name}"'
    yield f'tenant = "{options.tenant}"'
    yield f'sha256 = "{api_keys.digest_of(key).hex()}"'
    for name in _LIMITS:
        value = getattr(options, name)
        if value is not None:
            yield f"{name} = {value}"
    if options.days is not None:
        expires = datetime.now(UTC) + timedelta(days=options.days)
        yield f"expires = {expires:%Y-%m-%dT%H:%M:%SZ}"


def _fault(path: Path, name: str) -> str:
    """Why the file cannot take a key of that name; empty if it can."""
    try:
        entries: Any = tomllib.loads(path.read_text()).get("key", [])
        names = [entry["name"] for entry in entries]
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, LookupError, TypeError):
        return "is no keys file"
    return f"has a key of the name {name} already" if name in names else ""


def _append(path: Path, entry: str) -> None:
    # Hashes of random keys give nothing away, names and limits are still nobody's business.
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(handle, "a") as file:
        file.write(f"\n{entry}")
