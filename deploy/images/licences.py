"""Licences of what the images hold, as SPDX expressions, and which of them go with Apache-2.0.

A package says its licence in one of several ways. What it says in SPDX's words is taken; for older
spellings there is a table, and for Debian's packages another, written by reading their copyright
files. A spelling that is in no table is an error: a person reads the licence and adds it.
"""

import email.message
import re
from collections.abc import Iterable
from typing import Final

from license_expression import ExpressionError, get_spdx_licensing
from license_expression import LicenseExpression as Expression

SPDX: Final = get_spdx_licensing()

# May be part of what is passed on under Apache-2.0 together with it.
PERMISSIVE: Final = frozenset({
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause",
    "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0",
    "Python-2.0.1", "Unlicense", "Zlib", "blessing", "bzip2-1.0.6",
    "LicenseRef-public-domain",
})  # fmt: skip

# Of these, file by file, the source must be offered; they bind nothing beside them.
BY_FILE: Final = frozenset({"MPL-2.0"})

# Debian's own packages are works apart, passed on unchanged beside ours: libraries that may be
# linked by what is under any licence, and data. Debian keeps their sources.
APART: Final = frozenset({
    "GPL-2.0-only", "GPL-2.0-or-later", "GPL-3.0-or-later WITH GCC-exception-3.1",
    "LGPL-2.1-or-later",
})  # fmt: skip

# The exact words of metadata, for what has no expression there.
SPELLINGS: Final = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",  # mpmath and sympy: their LICENSE files have three clauses
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "MIT License": "MIT",
    "Python Software Foundation License": "PSF-2.0",
}

# By name, for what says several things of itself that do not agree.
PYTHON: Final = {
    # Its own code is BSD-3-Clause; its wheels hold libheif, libde265 and x265.
    "pillow-heif": "BSD-3-Clause AND LGPL-3.0-or-later AND GPL-2.0-or-later",
    "uvloop": "MIT OR Apache-2.0",  # LICENSE-MIT and LICENSE-APACHE
}
# Of the CUDA images: their own terms, which allow to pass them on with a program that uses them.
NVIDIA: Final = "LicenseRef-NVIDIA"

DEBIAN: Final = {
    "base-files": "GPL-2.0-or-later",
    "ca-certificates": "GPL-2.0-or-later AND MPL-2.0",
    "gcc-12-base": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "libbz2-1.0": "bzip2-1.0.6",
    "libc6": "LGPL-2.1-or-later AND GPL-2.0-or-later",
    "libcrypt1": "LGPL-2.1-or-later",
    "libexpat1": "MIT",
    "libffi8": "MIT",
    "libgcc-s1": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "libgomp1": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "liblzma5": "LicenseRef-public-domain",
    "libpython3.11-minimal": "PSF-2.0",
    "libpython3.11-stdlib": "PSF-2.0",
    "libsqlite3-0": "blessing",
    "libssl3": "Apache-2.0",
    "libstdc++6": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "libuuid1": "BSD-3-Clause",
    "media-types": "LicenseRef-public-domain",
    "netbase": "GPL-2.0-only",
    "python3.11-minimal": "PSF-2.0",
    "tzdata": "LicenseRef-public-domain",
    "zlib1g": "Zlib",
}


class UnknownLicenceError(Exception):
    """A package's licence is in no table; the text names it."""


def of_debian(name: str) -> str:
    try:
        return DEBIAN[name]
    except KeyError:
        raise UnknownLicenceError(
            f"{name}: read usr/share/doc/{name}/copyright and add it to licences.DEBIAN"
        ) from None


def of_python(metadata: email.message.Message) -> str:
    """The SPDX expression of a distribution's METADATA."""
    name = str(metadata["Name"]).lower()
    if name in PYTHON:
        return PYTHON[name]
    if name.startswith("nvidia-"):
        return NVIDIA
    said = [str(metadata.get("License-Expression", "")), str(metadata.get("License", ""))]
    said += [
        line.rpartition(" :: ")[2].partition(" (")[0]
        for line in metadata.get_all("Classifier", [])
        if line.startswith("License :: ")
    ]
    for text in said:
        if found := known_or_empty(text.strip()):
            return found
    raise UnknownLicenceError(
        f"{name}: its metadata says {said!r}; read its licence and add the spelling to "
        "licences.SPELLINGS"
    )


def known_or_empty(text: str) -> str:
    """`text` as an SPDX expression; empty if it is none and no known spelling of one."""
    text = SPELLINGS.get(text, text)
    if not text or "\n" in text or len(text) > 300:
        return ""
    text = re.sub(r"(?<=\S)/(?=\S)", " OR ", text)  # Rust's older way of writing a choice
    try:
        parsed = SPDX.parse(text, validate=True)
    except ExpressionError:
        return ""
    return str(parsed) if parsed is not None else ""


def refused(expression: str, *, apart: bool) -> str:
    """What in an expression may not be passed on with Apache-2.0; empty if nothing.

    `apart`: it is of a work apart (a package of Debian's), not linked into ours by us.
    """
    allowed = PERMISSIVE | BY_FILE | (APART if apart else frozenset())
    text = expression
    for reference in re.findall(r"LicenseRef-[A-Za-z0-9.-]+", expression):
        if reference not in allowed:
            return str(reference)
        text = text.replace(reference, "0BSD")
    parsed = SPDX.parse(text)
    return "" if parsed is None else str(_refused(parsed, allowed))


def _refused(parsed: Expression, allowed: frozenset[str]) -> str:
    operator = getattr(parsed, "operator", "").strip()
    if operator == "OR":
        answers = [_refused(one, allowed) for one in parsed.args]
        return "" if "" in answers else answers[0]
    if operator == "AND":
        return next((found for one in parsed.args if (found := _refused(one, allowed))), "")
    text: str = str(parsed)
    return "" if text in allowed else text


def table(rows: Iterable[tuple[str, ...]], head: tuple[str, ...]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
